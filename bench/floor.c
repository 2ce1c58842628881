/*
 * The cost of driver calls from C: the floor that the binding is measured against.
 *
 * Compiled by driver_calls.py. The caller passes the driver's entry points, so neither
 * headers nor the driver are needed to build. Each function makes `calls` calls in a row
 * in the calling thread's current context and returns the nanoseconds of one, or a
 * negative number where the driver refused.
 */
#define _POSIX_C_SOURCE 199309L

#include <stddef.h>
#include <time.h>

typedef int (*call_2)(void *, void *);
typedef int (*call_3)(void *, void *, unsigned int);
typedef int (*call_copy)(unsigned long long, const void *, size_t, void *);

static double
now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

double
floor_event_record(call_2 record, void *event, void *stream, int calls)
{
    double start = now();
    for (int i = 0; i < calls; i++) {
        if (record(event, stream) != 0) {
            return -1;
        }
    }
    return (now() - start) / calls;
}

double
floor_wait_event(call_3 wait, void *stream, void *event, int calls)
{
    double start = now();
    for (int i = 0; i < calls; i++) {
        if (wait(stream, event, 0) != 0) {
            return -1;
        }
    }
    return (now() - start) / calls;
}

double
floor_memcpy_htod_async(call_copy copy, unsigned long long dest, const void *src,
                        size_t bytes, void *stream, int calls)
{
    double start = now();
    for (int i = 0; i < calls; i++) {
        if (copy(dest, src, bytes, stream) != 0) {
            return -1;
        }
    }
    return (now() - start) / calls;
}
