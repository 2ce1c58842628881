/* What the tests use: to steer the stand-in driver and to look into it. None of these
   calls counts as a driver call, lets time pass on the device or can be made to fail.
 */

#include "fake_cuda.h"

#include <stdlib.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>

enum { DEFAULT_DEVICE_LIMIT_GIB = 8 };

static void
lock(void)
{
    pthread_mutex_lock(&fake.lock);
}

static void
unlock(void)
{
    pthread_mutex_unlock(&fake.lock);
}

/* --- start, fork, reset --- */

static void
make_lock(void)
{
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&fake.lock, NULL);
    pthread_cond_init(&fake.changed, &clock);
    pthread_condattr_destroy(&clock);
}

/* In the child: another thread of the parent may have held the lock. */
static void
after_fork_in_child(void)
{
    make_lock();
    fake.forked = true;
}

/* The environment's FAKE_CUDA_DEVICES, for programs that tests start; or one. */
static int
devices_by_default(void)
{
    const char *wish = getenv("FAKE_CUDA_DEVICES");
    int count = wish != NULL ? atoi(wish) : 1;
    return count < 1 || count > MAX_DEVICES ? 1 : count;
}

static void
set_defaults(void)
{
    fake.driver_version = DEFAULT_DRIVER_VERSION;
    fake.device_count = devices_by_default();
    fake.mode = MODE_LATE;
    fake.random = fake.moods = fake.lanes = 0;
    fake.hold = 0;
    fake.staged_htod = false;
    fake.max_pitch = INT32_MAX;
    fake.device_limit = (size_t)DEFAULT_DEVICE_LIMIT_GIB << 30;
    fake.page_locked_limit = SIZE_MAX;
    memset(fake.calls, 0, sizeof(fake.calls));
    memset(fake.hidden, 0, sizeof(fake.hidden));
    fake.failure_count = fake.delay_count = 0;
    fake.all_calls = fake.lost_calls = 0;
    fake.lost_from = UINT64_MAX;
    fake.begun_delays = fake.ended_delays = 0;
    fake.host_syncs = 0;
    free(fake.kernels);
    fake.kernels = NULL;
    *fake.child_calls = 0;
}

__attribute__((constructor)) static void
start(void)
{
    make_lock();
    fake.child_calls = mmap(NULL, sizeof(*fake.child_calls), PROT_READ | PROT_WRITE,
                            MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (fake.child_calls == MAP_FAILED) {
        abort();
    }
    pthread_atfork(NULL, NULL, after_fork_in_child);
    fake.context_handles.tag = (uintptr_t)1 << 40;
    fake.stream_handles.tag = (uintptr_t)2 << 40;
    fake.event_handles.tag = (uintptr_t)3 << 40;
    fake.module_handles.tag = (uintptr_t)4 << 40;
    fake.function_handles.tag = (uintptr_t)5 << 40;
    fake.blas_handles.tag = (uintptr_t)6 << 40;
    fake.epoch = 1;
    set_defaults();
}

/* Drop all work, free all memory, make all handles invalid, and start afresh; only
   cuInit stays done. Threads that wait in the driver return first. */
FAKE_EXPORT void
fake_reset(void)
{
    lock();
    fake.releases++;
    for (queue_cancel_all(); fake.waiters; queue_cancel_all()) {
        unlock();
        sched_yield();
        lock();
    }
    memory_reset();
    objects_reset();
    set_defaults();
    unlock();
}

/* --- settings --- */

/* Choose when work runs. Turning to eager runs what is pending. */
FAKE_EXPORT void
fake_set_mode(int mode, uint64_t seed)
{
    lock();
    fake.mode = (enum mode)mode;
    fake.random = seed;
    fake.moods = seed;
    if (fake.mode == MODE_EAGER) {
        queue_want_all();
    }
    unlock();
}

FAKE_EXPORT void
fake_set_driver_version(int version)
{
    lock();
    fake.driver_version = version;
    unlock();
}

/* Return 0, or -1 for a number of devices that is not possible. */
FAKE_EXPORT int
fake_set_device_count(int count)
{
    if (count < 0 || count > MAX_DEVICES) {
        return -1;
    }
    lock();
    fake.device_count = count;
    unlock();
    return 0;
}

FAKE_EXPORT void
fake_set_limits(size_t device_bytes, size_t page_locked_bytes)
{
    lock();
    fake.device_limit = device_bytes;
    fake.page_locked_limit = page_locked_bytes;
    unlock();
}

FAKE_EXPORT void
fake_set_max_pitch(int bytes)
{
    lock();
    fake.max_pitch = bytes;
    unlock();
}

FAKE_EXPORT void
fake_set_staged_htod(int on)
{
    lock();
    fake.staged_htod = on != 0;
    unlock();
}

/* Choose the library of kernels for modules loaded from now on; NULL: the one that the
   environment names. */
FAKE_EXPORT void
fake_set_kernels(const char *path)
{
    lock();
    free(fake.kernels);
    fake.kernels = path ? strcpy(allocate(strlen(path) + 1, 1), path) : NULL;
    unlock();
}

/* --- calls --- */

/* Return the name of an entry point, the driver's before cuBLAS's; NULL from CALL_COUNT
   on. */
FAKE_EXPORT const char *
fake_entry_name(int call)
{
    return call >= 0 && call < CALL_COUNT ? entry_name((enum call)call) : NULL;
}

FAKE_EXPORT uint64_t
fake_calls(int call)
{
    lock();
    uint64_t calls = fake.calls[call];
    unlock();
    return calls;
}

/* Forget the failures that have happened. Called under the lock. */
static void
drop_past_failures(void)
{
    size_t kept = 0;
    for (size_t i = 0; i < fake.failure_count; i++) {
        struct failure *failure = &fake.failures[i];
        if (fake.calls[failure->call] < failure->last) {
            fake.failures[kept++] = *failure;
        }
    }
    fake.failure_count = kept;
}

/* Let `times` calls fail, after `skip` more that do not. Return 0, or -1 if too many
   failures are planned already. */
FAKE_EXPORT int
fake_fail(int call, uint64_t skip, uint64_t times, int code)
{
    lock();
    drop_past_failures();
    bool room = fake.failure_count < MAX_FAILURES;
    if (room) {
        uint64_t first = fake.calls[call] + skip;
        fake.failures[fake.failure_count++] =
            (struct failure){(enum call)call, first, first + times, (CUresult)code};
    }
    unlock();
    return room ? 0 : -1;
}

/* Let no more calls fail; the context is there again. */
FAKE_EXPORT void
fake_heal(void)
{
    lock();
    fake.failure_count = 0;
    fake.lost_from = UINT64_MAX;
    unlock();
}

/* After `skip` more calls, of whatever entry points, the context is lost: all calls
   that need one return `code`. */
FAKE_EXPORT void
fake_lose_context(uint64_t skip, int code)
{
    lock();
    fake.lost_from = fake.all_calls + skip;
    fake.lost_code = (CUresult)code;
    fake.lost_calls = 0;
    unlock();
}

/* Let the call after `skip` more that do not wait so many ns before it does anything,
   or until they are let go. Return 0, or -1 if too many are planned already. */
FAKE_EXPORT int
fake_delay(int call, uint64_t skip, uint64_t ns)
{
    lock();
    size_t kept = 0;
    for (size_t i = 0; i < fake.delay_count; i++) {
        if (fake.delays[i].ns > 0) {
            fake.delays[kept++] = fake.delays[i];
        }
    }
    fake.delay_count = kept;
    bool room = kept < MAX_DELAYS;
    if (room) {
        fake.delays[fake.delay_count++] =
            (struct delay){(enum call)call, fake.calls[call] + skip, ns};
    }
    unlock();
    return room ? 0 : -1;
}

/* Let the calls that wait go on; if `forget`, there are to be no others either. */
FAKE_EXPORT void
fake_end_delays(int forget)
{
    lock();
    fake.releases++;
    if (forget) {
        fake.delay_count = 0;
    }
    pthread_cond_broadcast(&fake.changed);
    unlock();
}

/* Let cuGetProcAddress find the entry point or not. */
FAKE_EXPORT void
fake_hide(int call, int hidden)
{
    lock();
    fake.hidden[call] = hidden != 0;
    unlock();
}

/* --- counts --- */

#define COUNTS(X)                                                       \
    X(contexts, fake.context_handles.live)                              \
    X(streams, fake.stream_handles.live)                                \
    X(events, fake.event_handles.live)                                  \
    X(device_blocks, fake.counts[BLOCK_DEVICE])                         \
    X(device_bytes, fake.bytes[BLOCK_DEVICE])                           \
    X(pinned_blocks, fake.counts[BLOCK_PAGE_LOCKED])                    \
    X(pinned_bytes, fake.bytes[BLOCK_PAGE_LOCKED])                      \
    X(modules, fake.module_handles.live)                                \
    X(blas_handles, fake.blas_handles.live)                             \
    X(registered, fake.counts[BLOCK_REGISTERED])                        \
    X(registered_bytes, fake.bytes[BLOCK_REGISTERED])                   \
    X(pending, fake.pending)                                            \
    X(host_syncs, fake.host_syncs)                                      \
    X(all_calls, fake.all_calls)                                        \
    X(lost_calls, fake.lost_calls)                                      \
    X(delayed, fake.delayed)                                            \
    X(begun_delays, fake.begun_delays)                                  \
    X(ended_delays, fake.ended_delays)                                  \
    X(child_calls, __atomic_load_n(fake.child_calls, __ATOMIC_RELAXED)) \
    X(faults, fake.faults)                                              \
    X(damaged_zones, memory_damaged_zones())                            \
    X(late_writes, memory_late_writes())

/* Return one of the counts above, UINT64_MAX for a name that is not there. */
FAKE_EXPORT uint64_t
fake_count(const char *name)
{
    uint64_t value = UINT64_MAX;
    lock();
#define X(known, expression)         \
    if (strcmp(name, #known) == 0) { \
        value = expression;          \
    }
    COUNTS(X)
#undef X
    unlock();
    return value;
}

/* Return one of these counts of a device, UINT64_MAX for a name that is not there. */
FAKE_EXPORT uint64_t
fake_count_on(int device, const char *name)
{
    uint64_t value = UINT64_MAX;
    lock();
    if (strcmp(name, "retains") == 0) {
        value = fake.retains[device];
    } else if (strcmp(name, "device_bytes") == 0) {
        value = fake.device_bytes[device];
    } else if (strcmp(name, "contexts") == 0 || strcmp(name, "streams") == 0) {
        value = 0;
        for (const struct context *it = fake.contexts; it != NULL; it = it->next) {
            if (it->device != device || it->destroyed) {
                continue;
            }
            value += name[0] == 'c';
            for (const struct stream *s = it->streams; s != NULL; s = s->next) {
                value += name[0] == 's' && !s->destroyed && s->thread == 0;
            }
        }
    } else if (strcmp(name, "pinned_bytes") == 0) {
        value = 0;
        for (size_t i = 0; i < fake.block_count; i++) {
            const struct block *block = fake.blocks[i];
            value += block->kind != BLOCK_DEVICE && block->context->device == device
                         ? block->bytes
                         : 0;
        }
    }
    unlock();
    return value;
}

/* --- work --- */

/* Find a stream; the default ones are those of `context`, or of the current context
   where that is NULL. Called with the lock held. */
static CUresult
find_stream(CUstream handle, CUcontext context_handle, struct stream **stream)
{
    struct context *context = context_find(context_handle);
    CUresult code = CUDA_SUCCESS;
    if (context_handle == NULL) {
        code = context_current(&context);
    } else if (context == NULL) {
        code = CUDA_ERROR_INVALID_CONTEXT;
    }
    return code == CUDA_SUCCESS ? stream_find(handle, context, stream) : code;
}

/* Queue work that keeps a stream busy for so many ns. */
FAKE_EXPORT int
fake_spin(CUstream handle, CUcontext context, uint64_t ns)
{
    struct stream *stream;
    lock();
    CUresult code = find_stream(handle, context, &stream);
    if (code == CUDA_SUCCESS) {
        struct item *item = item_new(ITEM_SPIN, stream);
        item->duration = ns;
        queue_submit(stream, item);
    }
    unlock();
    return (int)code;
}

/* Let copies and memsets issued to the stream from now on take so many ns each. */
FAKE_EXPORT int
fake_hold(CUstream handle, CUcontext context, uint64_t ns)
{
    struct stream *stream;
    lock();
    CUresult code = find_stream(handle, context, &stream);
    if (code == CUDA_SUCCESS) {
        stream->hold = ns;
    }
    unlock();
    return (int)code;
}

/* The same for every stream, those made later too. */
FAKE_EXPORT void
fake_hold_all(uint64_t ns)
{
    lock();
    fake.hold = ns;
    unlock();
}

/* Run all work of a stream, as cuStreamSynchronize does. */
FAKE_EXPORT int
fake_drain(CUstream handle, CUcontext context)
{
    struct stream *stream;
    lock();
    CUresult code = find_stream(handle, context, &stream);
    if (code == CUDA_SUCCESS) {
        queue_wait_stream(stream);
    }
    unlock();
    return (int)code;
}

/* --- contexts --- */

/* Make a context and push it. */
FAKE_EXPORT int
fake_context_create(int device, CUcontext *handle)
{
    struct context *context;
    lock();
    fake.initialised = true;
    CUresult code = context_create(device, 0, false, &context);
    if (code == CUDA_SUCCESS) {
        *handle = context->handle;
        code = context_push(context->handle);
    }
    unlock();
    return (int)code;
}

FAKE_EXPORT int
fake_context_destroy(CUcontext handle)
{
    lock();
    struct context *context = context_find(handle);
    CUresult code = context ? context_destroy(context) : CUDA_ERROR_INVALID_CONTEXT;
    unlock();
    return (int)code;
}

FAKE_EXPORT int
fake_context_push(CUcontext handle)
{
    lock();
    CUresult code = context_push(handle);
    unlock();
    return (int)code;
}

FAKE_EXPORT int
fake_context_pop(CUcontext *handle)
{
    lock();
    CUresult code = context_pop(handle);
    unlock();
    return (int)code;
}

/* Return this thread's current context, NULL if it has none. */
FAKE_EXPORT CUcontext
fake_context_top(void)
{
    lock();
    CUcontext handle = context_top();
    unlock();
    return handle;
}
