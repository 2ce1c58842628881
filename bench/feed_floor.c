/*
 * How fast the machine itself feeds a device: what the feed is measured against.
 *
 * Compiled by feed_floor.py, which passes the driver's entry points, so neither headers
 * nor the driver are needed to build. A function works through `passes` minibatches in
 * a row and returns the nanoseconds of one, or a negative number where the driver
 * refused or a thread could not be started. The source holds `batches` minibatches,
 * read in turn.
 */
#define _POSIX_C_SOURCE 200112L

#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

enum { CHUNK = 2 << 20, RING = 4, MOST_THREADS = 64, HOST = 1, DEVICE = 2 };

struct driver {
    void *context;
    void *stream;
    int (*set_current)(void *);
    int (*synchronize)(void *stream);
    int (*copy)(unsigned long long, const void *, size_t, void *stream);
    int (*copy_2d)(const void *, void *stream);
    int (*record)(void *event, void *stream);
    int (*wait)(void *event);
};

/* CUDA_MEMCPY2D */
struct copy_2d {
    size_t src_x, src_y;
    unsigned int src_type;
    const void *src_host;
    unsigned long long src_device;
    void *src_array;
    size_t src_pitch;
    size_t dest_x, dest_y;
    unsigned int dest_type;
    void *dest_host;
    unsigned long long dest_device;
    void *dest_array;
    size_t dest_pitch;
    size_t width, height;
};

struct job {
    const struct driver *driver; /* NULL: into memory only */
    unsigned long long device;   /* with a driver: where the minibatch goes */
    char *dest;    /* a ring of chunks for each thread, or the minibatch */
    void **events; /* with a driver: one for each chunk of the rings */
    const char *src;
    size_t bytes; /* of a minibatch in float32 */
    int batches, is_double;
    long chunks_a_pass, chunks;
    _Atomic(long) next;
    _Atomic(int) failed;
    _Atomic(int) threads; /* numbers handed out */
};

static double
now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void
stage(void *dest, const void *src, size_t bytes, int is_double)
{
    if (!is_double) {
        memcpy(dest, src, bytes);
        return;
    }
    float *restrict to = dest;
    const double *restrict from = src;
    for (size_t i = 0; i < bytes / sizeof(float); i++) {
        to[i] = (float)from[i];
    }
}

/* A thread's share: whichever chunk is next, until none is left. */
static void *
work(void *argument)
{
    struct job *job = argument;
    const struct driver *driver = job->driver;
    int thread = atomic_fetch_add(&job->threads, 1);
    size_t wide = job->is_double ? 2 : 1;
    long used = 0;

    if (driver != NULL && driver->set_current(driver->context) != 0) {
        atomic_store(&job->failed, 1);
        return NULL;
    }
    for (;;) {
        long chunk = atomic_fetch_add(&job->next, 1);
        if (chunk >= job->chunks || atomic_load(&job->failed)) {
            return NULL;
        }
        size_t pass = (size_t)(chunk / job->chunks_a_pass);
        size_t offset = (size_t)(chunk % job->chunks_a_pass) * CHUNK;
        size_t bytes = job->bytes - offset < CHUNK ? job->bytes - offset : CHUNK;
        size_t batch = pass % (size_t)job->batches;
        const char *from = job->src + (batch * job->bytes + offset) * wide;

        if (driver == NULL) {
            stage(job->dest + offset, from, bytes, job->is_double);
            continue;
        }
        int place = thread * RING + (int)(used % RING);
        char *to = job->dest + (size_t)place * CHUNK;
        void *event = job->events[place];
        if (used++ >= RING && driver->wait(event) != 0) {
            atomic_store(&job->failed, 1);
            return NULL;
        }
        stage(to, from, bytes, job->is_double);
        if (driver->copy(job->device + offset, to, bytes, driver->stream) != 0 ||
            driver->record(event, driver->stream) != 0) {
            atomic_store(&job->failed, 1);
            return NULL;
        }
    }
}

static double
run(struct job *job, int threads, int passes)
{
    pthread_t others[MOST_THREADS];
    int started = 0;

    job->chunks_a_pass = (long)((job->bytes + CHUNK - 1) / CHUNK);
    job->chunks = job->chunks_a_pass * passes;
    double start = now();
    while (started < threads - 1 && started < MOST_THREADS) {
        if (pthread_create(&others[started], NULL, work, job) != 0) {
            atomic_store(&job->failed, 1);
            break;
        }
        started++;
    }
    work(job);
    for (int i = 0; i < started; i++) {
        pthread_join(others[i], NULL);
    }
    if (job->driver != NULL && job->driver->synchronize(job->driver->stream) != 0) {
        return -1;
    }
    return atomic_load(&job->failed) ? -1 : (now() - start) / passes;
}

/* Copy or cast to float32 into memory, by threads that take chunks as they come. */
double
floor_stage(void *dest, const void *src, size_t bytes, int batches, int is_double,
            int threads, int passes)
{
    struct job job = {
        .dest = dest,
        .src = src,
        .bytes = bytes,
        .batches = batches,
        .is_double = is_double,
    };
    return run(&job, threads, passes);
}

/*
 * The same to the device: each thread stages a chunk in page-locked memory and queues
 * its copy. `ring` has RING chunks, and `events` RING events, for each thread.
 */
double
floor_pipeline(const struct driver *driver, unsigned long long device, void *ring,
               void **events, const void *src, size_t bytes, int batches, int is_double,
               int threads, int passes)
{
    struct job job = {
        .driver = driver,
        .device = device,
        .dest = ring,
        .events = events,
        .src = src,
        .bytes = bytes,
        .batches = batches,
        .is_double = is_double,
    };
    return run(&job, threads, passes);
}

/* Copy page-locked memory to the device. */
double
floor_link(const struct driver *driver, unsigned long long device, const void *src,
           size_t bytes, int passes)
{
    double start = now();
    for (int i = 0; i < passes; i++) {
        if (driver->copy(device, src, bytes, driver->stream) != 0) {
            return -1;
        }
    }
    return driver->synchronize(driver->stream) != 0 ? -1 : (now() - start) / passes;
}

/* The same of every other row. */
double
floor_rows(const struct driver *driver, unsigned long long device, const void *src,
           size_t row, size_t rows, int passes)
{
    struct copy_2d copy = {
        .src_type = HOST,
        .src_host = src,
        .src_pitch = 2 * row,
        .dest_type = DEVICE,
        .dest_device = device,
        .dest_pitch = row,
        .width = row,
        .height = rows,
    };
    double start = now();
    for (int i = 0; i < passes; i++) {
        if (driver->copy_2d(&copy, driver->stream) != 0) {
            return -1;
        }
    }
    return driver->synchronize(driver->stream) != 0 ? -1 : (now() - start) / passes;
}
