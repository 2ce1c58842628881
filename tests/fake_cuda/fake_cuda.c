/* A stand-in for libcuda, to test without a GPU what the CUDA driver's rules allow.

   This file holds the driver's entry points and the one exported name of the real
   library that our binding looks up, cuGetProcAddress_v2. It is not a copy of the
   driver: where the rules leave open when or whether something happens, this one does
   what hurts most. Work runs as late as it may, handles are never used again, freed
   memory turns into NaN, and a call without a current context is an error.

   Every entry point has the same frame: `enter` counts the call, plays planned failures
   and checks what the call needs; then the work, under the lock; `leave` gives the lock
   back and passes the result on. */

#include "fake_cuda.h"

#include <stdio.h>
#include <string.h>

struct fake fake;

/* --- the frame of every call --- */

/* Say that the driver cannot be used in this process, and let the parent know that it
   was tried. */
static CUresult
refuse_in_child(void)
{
    __atomic_fetch_add(fake.child_calls, 1, __ATOMIC_RELAXED);
    return CUDA_ERROR_NOT_INITIALIZED;
}

/* Say whether a call is of those that work where the context is lost. */
static bool
needs_no_context(enum call call)
{
    switch (call) {
    case CALL_cuInit:
    case CALL_cuDriverGetVersion:
    case CALL_cuGetErrorName:
    case CALL_cuGetErrorString:
        return true;
    default:
        return false;
    }
}

/* Let a call that is to be late wait, without the lock. */
static void
wait_delay(enum call call, uint64_t number)
{
    for (size_t i = 0; i < fake.delay_count; i++) {
        struct delay *delay = &fake.delays[i];
        if (delay->call == call && delay->number == number && delay->ns > 0) {
            uint64_t end = clock_now() + delay->ns, releases = fake.releases;
            delay->ns = 0;
            fake.begun_delays++;
            fake.delayed++;
            while (fake.releases == releases && clock_now() < end) {
                sleep_until(end);
            }
            fake.delayed--;
            fake.ended_delays += fake.releases == releases;
            return;
        }
    }
}

/* Count the call; return the code of a planned failure of it, if there is one. */
static CUresult
count_call(enum call call)
{
    uint64_t number = fake.calls[call]++;
    if (!needs_no_context(call) && fake.all_calls++ >= fake.lost_from) {
        fake.lost_calls++;
        return fake.lost_code;
    }
    wait_delay(call, number);
    for (size_t i = 0; i < fake.failure_count; i++) {
        const struct failure *failure = &fake.failures[i];
        if (failure->call == call && failure->first <= number
            && number < failure->last) {
            return failure->code;
        }
    }
    return CUDA_SUCCESS;
}

CUresult
leave(CUresult code)
{
    pthread_mutex_unlock(&fake.lock);
    return code;
}

/* Begin a call that needs no initialised driver. On success the lock is held. */
CUresult
enter_early(enum call call)
{
    if (fake.forked) {
        return refuse_in_child();
    }
    pthread_mutex_lock(&fake.lock);
    CUresult code = count_call(call);
    if (code != CUDA_SUCCESS) {
        return leave(code);
    }
    queue_step();
    return CUDA_SUCCESS;
}

/* Begin a call that needs the driver but no context. On success the lock is held. */
static CUresult
enter(enum call call)
{
    CUresult code = enter_early(call);
    if (code == CUDA_SUCCESS && !fake.initialised) {
        return leave(CUDA_ERROR_NOT_INITIALIZED);
    }
    return code;
}

/* Begin a call that needs a current context. On success the lock is held. */
CUresult
enter_context(enum call call, struct context **current)
{
    CUresult code = enter(call);
    if (code == CUDA_SUCCESS && (code = context_current(current)) != CUDA_SUCCESS) {
        return leave(code);
    }
    return code;
}

/* Begin a call on a stream. On success the lock is held. */
CUresult
enter_stream(enum call call, CUstream handle, struct context **current,
             struct stream **stream)
{
    CUresult code = enter_context(call, current);
    if (code == CUDA_SUCCESS
        && (code = stream_find(handle, *current, stream)) != CUDA_SUCCESS) {
        return leave(code);
    }
    return code;
}

/* Begin a call on an event. On success the lock is held. */
static CUresult
enter_event(enum call call, CUevent handle, struct event **event)
{
    struct context *current;
    CUresult code = enter_context(call, &current);
    if (code == CUDA_SUCCESS && (*event = event_find(handle)) == NULL) {
        return leave(CUDA_ERROR_INVALID_HANDLE);
    }
    return code;
}

/* --- the driver --- */

static CUresult CUDAAPI
fake_cuInit(unsigned int flags)
{
    CUresult code = enter_early(CALL_cuInit);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (flags != 0) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    if (fake.device_count == 0) {
        return leave(CUDA_ERROR_NO_DEVICE);
    }
    fake.initialised = true;
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuDriverGetVersion(int *version)
{
    CUresult code = enter_early(CALL_cuDriverGetVersion);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (version == NULL) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    *version = fake.driver_version;
    return leave(CUDA_SUCCESS);
}

#define ERRORS(X)                                                                \
    X(CUDA_SUCCESS, "no error")                                                  \
    X(CUDA_ERROR_INVALID_VALUE, "invalid argument")                              \
    X(CUDA_ERROR_OUT_OF_MEMORY, "out of memory")                                 \
    X(CUDA_ERROR_NOT_INITIALIZED, "initialization error")                        \
    X(CUDA_ERROR_DEINITIALIZED, "driver shutting down")                          \
    X(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected")                \
    X(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal")                       \
    X(CUDA_ERROR_INVALID_CONTEXT, "invalid device context")                      \
    X(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image is available")              \
    X(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, "too many blocks")                \
    X(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle")                      \
    X(CUDA_ERROR_NOT_FOUND, "named symbol not found")                            \
    X(CUDA_ERROR_NOT_READY, "device not ready")                                  \
    X(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered")    \
    X(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure")                    \
    X(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed")                   \
    X(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "memory is already registered") \
    X(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "memory is not registered")         \
    X(CUDA_ERROR_NOT_PERMITTED, "operation not permitted")                       \
    X(CUDA_ERROR_NOT_SUPPORTED, "operation not supported")                       \
    X(CUDA_ERROR_SYSTEM_NOT_READY, "system not yet initialized")                 \
    X(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "driver and library do not match")      \
    X(CUDA_ERROR_UNKNOWN, "unknown error")

static CUresult CUDAAPI
fake_cuGetErrorName(CUresult error, const char **name)
{
    CUresult code = enter_early(CALL_cuGetErrorName);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (name == NULL) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    switch (error) {
#define X(value, text)  \
    case value:         \
        *name = #value; \
        return leave(CUDA_SUCCESS);
        ERRORS(X)
#undef X
    default:
        *name = NULL;
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
}

static CUresult CUDAAPI
fake_cuGetErrorString(CUresult error, const char **string)
{
    CUresult code = enter_early(CALL_cuGetErrorString);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (string == NULL) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    switch (error) {
#define X(value, text)  \
    case value:         \
        *string = text; \
        return leave(CUDA_SUCCESS);
        ERRORS(X)
#undef X
    default:
        *string = NULL;
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
}

/* --- devices --- */

/* Begin a call on a device. On success the lock is held. */
static CUresult
enter_device(enum call call, CUdevice device, const void *out)
{
    CUresult code = enter(call);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (device < 0 || device >= fake.device_count) {
        return leave(CUDA_ERROR_INVALID_DEVICE);
    }
    return out ? CUDA_SUCCESS : leave(CUDA_ERROR_INVALID_VALUE);
}

static CUresult CUDAAPI
fake_cuDeviceGetCount(int *count)
{
    CUresult code = enter(CALL_cuDeviceGetCount);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (count == NULL) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    *count = fake.device_count;
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuDeviceGet(CUdevice *device, int ordinal)
{
    CUresult code = enter_device(CALL_cuDeviceGet, ordinal, device);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    *device = ordinal;
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuDeviceGetName(char *name, int length, CUdevice device)
{
    CUresult code = enter_device(CALL_cuDeviceGetName, device, name);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (length <= 0) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    snprintf(name, (size_t)length, "Fake CUDA device %d", device);
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuDeviceTotalMem(size_t *bytes, CUdevice device)
{
    CUresult code = enter_device(CALL_cuDeviceTotalMem, device, bytes);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    *bytes = fake.device_limit;
    return leave(CUDA_SUCCESS);
}

/* Return an attribute of every device; 0 for those that nobody here asks for. */
static int
device_attribute(CUdevice_attribute attribute, CUdevice device)
{
    switch ((int)attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        return 9;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        return MAX_BLOCK_THREADS;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
        return SHARED_BYTES;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
        return SHARED_BYTES_OPTIN;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
        return 32;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        return MULTIPROCESSORS;
    case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
        return fake.max_pitch;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
        return 2;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
        return device + 1;
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
        return 1;
    default:
        return 0;
    }
}

static CUresult CUDAAPI
fake_cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    CUresult code = enter_device(CALL_cuDeviceGetAttribute, device, value);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if ((int)attribute < 1 || attribute >= CU_DEVICE_ATTRIBUTE_MAX) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    *value = device_attribute(attribute, device);
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuDeviceGetPCIBusId(char *text, int length, CUdevice device)
{
    CUresult code = enter_device(CALL_cuDeviceGetPCIBusId, device, text);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    int needed = length > 0
                     ? snprintf(text, (size_t)length, "0000:%02X:00.0", device + 1)
                     : length;
    return leave(needed < length ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
}

/* --- contexts --- */

static CUresult CUDAAPI
fake_cuDevicePrimaryCtxRetain(CUcontext *handle, CUdevice device)
{
    CUresult code = enter_device(CALL_cuDevicePrimaryCtxRetain, device, handle);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    struct context *context = fake.primary[device];
    if (context == NULL) {
        code = context_create(device, 0, true, &context);
    }
    if (code == CUDA_SUCCESS) {
        context->primary_refs++;
        fake.retains[device]++;
        *handle = context->handle;
    }
    return leave(code);
}

static CUresult CUDAAPI
fake_cuDevicePrimaryCtxRelease(CUdevice device)
{
    CUresult code = enter_device(CALL_cuDevicePrimaryCtxRelease, device, "");
    if (code != CUDA_SUCCESS) {
        return code;
    }
    struct context *context = fake.primary[device];
    if (context == NULL || context->primary_refs == 0) {
        return leave(CUDA_ERROR_INVALID_CONTEXT);
    }
    if (--context->primary_refs == 0) {
        fake.host_syncs++;
        code = context_destroy(context);
    }
    return leave(code);
}

static CUresult CUDAAPI
fake_cuCtxGetCurrent(CUcontext *handle)
{
    CUresult code = enter(CALL_cuCtxGetCurrent);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (handle == NULL) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    *handle = context_top();
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuCtxSetCurrent(CUcontext handle)
{
    CUresult code = enter(CALL_cuCtxSetCurrent);
    return code == CUDA_SUCCESS ? leave(context_set(handle)) : code;
}

static CUresult CUDAAPI
fake_cuCtxPushCurrent(CUcontext handle)
{
    CUresult code = enter(CALL_cuCtxPushCurrent);
    return code == CUDA_SUCCESS ? leave(context_push(handle)) : code;
}

static CUresult CUDAAPI
fake_cuCtxPopCurrent(CUcontext *handle)
{
    CUresult code = enter(CALL_cuCtxPopCurrent);
    return code == CUDA_SUCCESS ? leave(context_pop(handle)) : code;
}

static CUresult CUDAAPI
fake_cuCtxGetDevice(CUdevice *device)
{
    struct context *current;
    CUresult code = enter_context(CALL_cuCtxGetDevice, &current);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (device == NULL) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    *device = current->device;
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuCtxSynchronize(void)
{
    struct context *current;
    CUresult code = enter_context(CALL_cuCtxSynchronize, &current);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    fake.host_syncs++;
    queue_wait_context(current);
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuCtxCreate(CUcontext *handle, unsigned int flags, CUdevice device)
{
    CUresult code = enter_device(CALL_cuCtxCreate, device, handle);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    struct context *context;
    code = context_create(device, flags, false, &context);
    if (code == CUDA_SUCCESS
        && (code = context_push(context->handle)) != CUDA_SUCCESS) {
        context_destroy(context);
    }
    if (code == CUDA_SUCCESS) {
        *handle = context->handle;
    }
    return leave(code);
}

static CUresult CUDAAPI
fake_cuCtxDestroy(CUcontext handle)
{
    CUresult code = enter(CALL_cuCtxDestroy);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    struct context *context = context_find(handle);
    if (context == NULL || context->is_primary) {
        return leave(CUDA_ERROR_INVALID_CONTEXT);
    }
    fake.host_syncs++;
    return leave(context_destroy(context));
}

/* --- streams --- */

static CUresult CUDAAPI
fake_cuStreamCreateWithPriority(CUstream *handle, unsigned int flags, int priority)
{
    struct context *current;
    CUresult code = enter_context(CALL_cuStreamCreateWithPriority, &current);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    struct stream *stream;
    code = handle ? stream_create(current, flags, priority, &stream)
                  : CUDA_ERROR_INVALID_VALUE;
    if (code == CUDA_SUCCESS) {
        *handle = stream->handle;
    }
    return leave(code);
}

static CUresult CUDAAPI
fake_cuStreamDestroy(CUstream handle)
{
    struct context *current;
    struct stream *stream;
    CUresult code = enter_stream(CALL_cuStreamDestroy, handle, &current, &stream);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (stream->is_null || stream->thread != 0) {
        return leave(CUDA_ERROR_INVALID_HANDLE);
    }
    stream_destroy(stream);
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuStreamQuery(CUstream handle)
{
    struct context *current;
    struct stream *stream;
    CUresult code = enter_stream(CALL_cuStreamQuery, handle, &current, &stream);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    return leave(queue_stream_done(stream) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

static CUresult CUDAAPI
fake_cuStreamSynchronize(CUstream handle)
{
    struct context *current;
    struct stream *stream;
    CUresult code = enter_stream(CALL_cuStreamSynchronize, handle, &current, &stream);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    fake.host_syncs++;
    queue_wait_stream(stream);
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned int flags)
{
    struct context *current;
    struct stream *stream;
    CUresult code = enter_stream(CALL_cuStreamWaitEvent, handle, &current, &stream);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    struct event *event = event_find(event_handle);
    if (event == NULL) {
        return leave(CUDA_ERROR_INVALID_HANDLE);
    }
    if (flags != 0) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    struct item *item = item_new(ITEM_WAIT, stream);
    queue_add_wait(item, event->record);
    queue_submit(stream, item);
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuStreamGetPriority(CUstream handle, int *priority)
{
    struct context *current;
    struct stream *stream;
    CUresult code = enter_stream(CALL_cuStreamGetPriority, handle, &current, &stream);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (priority == NULL) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    *priority = stream->priority;
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuStreamGetFlags(CUstream handle, unsigned int *flags)
{
    struct context *current;
    struct stream *stream;
    CUresult code = enter_stream(CALL_cuStreamGetFlags, handle, &current, &stream);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (flags == NULL) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    *flags = stream->flags;
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuStreamGetCtx(CUstream handle, CUcontext *context)
{
    struct context *current;
    struct stream *stream;
    CUresult code = enter_stream(CALL_cuStreamGetCtx, handle, &current, &stream);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (context == NULL) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    *context = stream->context->handle;
    return leave(CUDA_SUCCESS);
}

/* --- events --- */

static CUresult CUDAAPI
fake_cuEventCreate(CUevent *handle, unsigned int flags)
{
    const unsigned known = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;
    struct context *current;
    CUresult code = enter_context(CALL_cuEventCreate, &current);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (handle == NULL || (flags & ~known)) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    *handle = event_create(current, flags)->handle;
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuEventDestroy(CUevent handle)
{
    struct event *event;
    CUresult code = enter_event(CALL_cuEventDestroy, handle, &event);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    event_destroy(event);
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuEventRecord(CUevent handle, CUstream stream_handle)
{
    struct context *current;
    struct stream *stream;
    CUresult code = enter_stream(CALL_cuEventRecord, stream_handle, &current, &stream);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    struct event *event = event_find(handle);
    if (event == NULL || event->context != stream->context) {
        return leave(CUDA_ERROR_INVALID_HANDLE);
    }
    struct item *item = item_new(ITEM_RECORD, stream);
    item->refs++; /* for the event */
    item_unref(event->record);
    event->record = item;
    queue_submit(stream, item);
    return leave(CUDA_SUCCESS);
}

/* Say whether a wait for the event would return at once; one never recorded would. */
static bool
event_done(const struct event *event)
{
    return event->record == NULL || event->record->done;
}

static CUresult CUDAAPI
fake_cuEventQuery(CUevent handle)
{
    struct event *event;
    CUresult code = enter_event(CALL_cuEventQuery, handle, &event);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    return leave(event_done(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY);
}

static CUresult CUDAAPI
fake_cuEventSynchronize(CUevent handle)
{
    struct event *event;
    CUresult code = enter_event(CALL_cuEventSynchronize, handle, &event);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    fake.host_syncs++;
    queue_wait_item(event->record);
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuEventElapsedTime(float *milliseconds, CUevent start_handle, CUevent end_handle)
{
    struct event *start;
    CUresult code = enter_event(CALL_cuEventElapsedTime, start_handle, &start);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    struct event *end = event_find(end_handle);
    if (end == NULL || start->record == NULL || end->record == NULL
        || start->context->device != end->context->device
        || ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING)) {
        return leave(CUDA_ERROR_INVALID_HANDLE);
    }
    if (milliseconds == NULL) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    if (!event_done(start) || !event_done(end)) {
        return leave(CUDA_ERROR_NOT_READY);
    }
    int64_t ns = (int64_t)(end->record->finish_at - start->record->finish_at);
    *milliseconds = (float)((double)ns / 1e6);
    return leave(CUDA_SUCCESS);
}

/* --- memory --- */

/* Allocate a block as every allocation does: after all work of the context. */
static CUresult
allocate_block(enum call call, enum block_kind kind, size_t bytes, bool valid,
               uintptr_t *address)
{
    struct context *current;
    CUresult code = enter_context(call, &current);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (!valid || bytes == 0) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    fake.host_syncs++;
    queue_wait_context(current);
    struct block *block = NULL;
    if (current->destroyed) { /* by another thread while we waited */
        code = CUDA_ERROR_CONTEXT_IS_DESTROYED;
    } else {
        code = memory_allocate(current, kind, bytes, &block);
    }
    if (code == CUDA_SUCCESS) {
        *address = block->address;
    }
    return leave(code);
}

/* Free a block as every free does: after all work of its context. */
static CUresult
free_block(enum call call, enum block_kind kind, uintptr_t address)
{
    struct context *current;
    CUresult code = enter_context(call, &current);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    struct block *block = memory_find_base(kind, address);
    if (block == NULL) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    fake.host_syncs++;
    queue_wait_context(block->context);
    block = memory_find_base(kind, address); /* another thread may have freed it */
    if (block == NULL) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    memory_release(block);
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuMemAlloc(CUdeviceptr *pointer, size_t bytes)
{
    uintptr_t address = 0;
    CUresult code =
        allocate_block(CALL_cuMemAlloc, BLOCK_DEVICE, bytes, pointer != NULL, &address);
    if (code == CUDA_SUCCESS) {
        *pointer = (CUdeviceptr)address;
    }
    return code;
}

static CUresult CUDAAPI
fake_cuMemFree(CUdeviceptr pointer)
{
    return free_block(CALL_cuMemFree, BLOCK_DEVICE, (uintptr_t)pointer);
}

static CUresult CUDAAPI
fake_cuMemHostAlloc(void **pointer, size_t bytes, unsigned int flags)
{
    const unsigned known = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
                           | CU_MEMHOSTALLOC_WRITECOMBINED;
    uintptr_t address = 0;
    bool valid = pointer != NULL && !(flags & ~known);
    CUresult code =
        allocate_block(CALL_cuMemHostAlloc, BLOCK_PAGE_LOCKED, bytes, valid, &address);
    if (code == CUDA_SUCCESS) {
        *pointer = (void *)address;
    }
    return code;
}

static CUresult CUDAAPI
fake_cuMemFreeHost(void *pointer)
{
    return free_block(CALL_cuMemFreeHost, BLOCK_PAGE_LOCKED, (uintptr_t)pointer);
}

static CUresult CUDAAPI
fake_cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer)
{
    struct context *current;
    CUresult code = enter_context(CALL_cuMemGetAddressRange, &current);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    struct block *block = memory_find_any((uintptr_t)pointer);
    if (block == NULL || block->kind != BLOCK_DEVICE) {
        return leave(CUDA_ERROR_NOT_FOUND);
    }
    if (base != NULL) {
        *base = (CUdeviceptr)block->address;
    }
    if (bytes != NULL) {
        *bytes = block->bytes;
    }
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuMemGetInfo(size_t *free_bytes, size_t *total)
{
    struct context *current;
    CUresult code = enter_context(CALL_cuMemGetInfo, &current);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (free_bytes == NULL || total == NULL) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    size_t used = fake.device_bytes[current->device];
    *total = fake.device_limit;
    *free_bytes = used < fake.device_limit ? fake.device_limit - used : 0;
    return leave(CUDA_SUCCESS);
}

/* Registering and unregistering count as calls that make the host wait, but nothing is
   waited for: no rule promises it, so memory must not be unregistered under a copy. */

static CUresult CUDAAPI
fake_cuMemHostRegister(void *pointer, size_t bytes, unsigned int flags)
{
    const unsigned known = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP
                           | CU_MEMHOSTREGISTER_READ_ONLY;
    struct context *current;
    CUresult code = enter_context(CALL_cuMemHostRegister, &current);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    fake.host_syncs++;
    bool portable = flags & CU_MEMHOSTREGISTER_PORTABLE;
    return leave(flags & ~known ? CUDA_ERROR_INVALID_VALUE
                                : memory_register(current, pointer, bytes, portable));
}

static CUresult CUDAAPI
fake_cuMemHostUnregister(void *pointer)
{
    struct context *current;
    CUresult code = enter_context(CALL_cuMemHostUnregister, &current);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    fake.host_syncs++;
    struct block *block = memory_find_base(BLOCK_REGISTERED, (uintptr_t)pointer);
    if (block == NULL) {
        return leave(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    }
    memory_release(block);
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuPointerGetAttribute(void *out, CUpointer_attribute attribute,
                           CUdeviceptr pointer)
{
    CUresult code = enter(CALL_cuPointerGetAttribute);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    struct block *block = memory_find_any((uintptr_t)pointer);
    if (out == NULL || block == NULL) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    bool device = block->kind == BLOCK_DEVICE;
    switch ((int)attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)out = block->context->handle;
        break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(unsigned *)out = device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
        *(CUdeviceptr *)out = pointer;
        break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (device) {
            return leave(CUDA_ERROR_INVALID_VALUE);
        }
        *(void **)out = (void *)(uintptr_t)pointer;
        break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned *)out = 0;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)out = block->context->device;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
        *(CUdeviceptr *)out = (CUdeviceptr)block->address;
        break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
        *(size_t *)out = block->bytes;
        break;
    default:
        return leave(CUDA_ERROR_NOT_SUPPORTED);
    }
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuMemHostGetDevicePointer(CUdeviceptr *device, void *pointer, unsigned int flags)
{
    struct context *current;
    CUresult code = enter_context(CALL_cuMemHostGetDevicePointer, &current);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    struct block *block = memory_find_any((uintptr_t)pointer);
    if (device == NULL || flags != 0 || block == NULL || block->kind == BLOCK_DEVICE) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    *device = (CUdeviceptr)(uintptr_t)pointer;
    return leave(CUDA_SUCCESS);
}

/* --- copies --- */

/* Take the bytes of a pageable source now. */
static void
stage_source(struct item *item)
{
    item->staged = allocate(item->width, item->height);
    for (size_t y = 0; y < item->height; y++) {
        memcpy(item->staged + y * item->width,
               (void *)(item->src.address + y * item->src.pitch), item->width);
    }
}

/* Issue a copy. A pageable target is written before the call returns. A pageable source
   is read then, too, if `wait`, else its bytes are taken at the call. */
static void
issue_copy(struct stream *stream, const struct end *dst, const struct end *src,
           size_t width, size_t height, bool wait)
{
    bool pageable_source = src->host && src->block == NULL;
    wait = wait || (dst->host && dst->block == NULL);
    fake.host_syncs += wait;
    if (wait && pageable_source && fake.staged_htod) {
        queue_wait_stream(stream);
        wait = false;
    }
    struct item *item = item_new(ITEM_COPY, stream);
    item->dst = *dst;
    item->src = *src;
    item->width = width;
    item->height = height;
    if (pageable_source && !wait) {
        stage_source(item);
    }
    item->refs++; /* ours, for the wait */
    queue_submit(stream, item);
    if (wait) {
        queue_wait_item(item);
    }
    item_unref(item);
}

/* A copy call: which kinds its ends are, and whether it is a synchronous one. */
struct copy_form {
    enum call call;
    bool to_host, from_host, wait;
};

/* Make a copy of so many bytes. */
static CUresult
copy_bytes(const struct copy_form *form, uintptr_t to, uintptr_t from, size_t bytes,
           CUstream handle)
{
    struct context *current;
    struct stream *stream;
    CUresult code = enter_stream(form->call, handle, &current, &stream);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (stream->context != current) {
        return leave(CUDA_ERROR_INVALID_HANDLE);
    }
    if (bytes == 0) {
        return leave(CUDA_SUCCESS);
    }
    struct end dst = {.pitch = bytes}, src = {.pitch = bytes};
    int device = current->device;
    code = form->to_host ? memory_host_end((void *)to, bytes, device, &dst)
                         : memory_device_end(to, bytes, device, &dst);
    if (code == CUDA_SUCCESS) {
        code = form->from_host ? memory_host_end((void *)from, bytes, device, &src)
                               : memory_device_end(from, bytes, device, &src);
    }
    if (code == CUDA_SUCCESS) {
        issue_copy(stream, &dst, &src, bytes, 1, form->wait);
    }
    return leave(code);
}

static CUresult CUDAAPI
fake_cuMemcpyHtoD(CUdeviceptr dst, const void *src, size_t bytes)
{
    const struct copy_form form = {CALL_cuMemcpyHtoD, .from_host = true, .wait = true};
    return copy_bytes(&form, (uintptr_t)dst, (uintptr_t)src, bytes, CU_STREAM_LEGACY);
}

static CUresult CUDAAPI
fake_cuMemcpyHtoDAsync(CUdeviceptr dst, const void *src, size_t bytes, CUstream stream)
{
    const struct copy_form form = {CALL_cuMemcpyHtoDAsync, .from_host = true};
    return copy_bytes(&form, (uintptr_t)dst, (uintptr_t)src, bytes, stream);
}

static CUresult CUDAAPI
fake_cuMemcpyDtoH(void *dst, CUdeviceptr src, size_t bytes)
{
    const struct copy_form form = {CALL_cuMemcpyDtoH, .to_host = true, .wait = true};
    return copy_bytes(&form, (uintptr_t)dst, (uintptr_t)src, bytes, CU_STREAM_LEGACY);
}

static CUresult CUDAAPI
fake_cuMemcpyDtoHAsync(void *dst, CUdeviceptr src, size_t bytes, CUstream stream)
{
    const struct copy_form form = {CALL_cuMemcpyDtoHAsync, .to_host = true};
    return copy_bytes(&form, (uintptr_t)dst, (uintptr_t)src, bytes, stream);
}

static CUresult CUDAAPI
fake_cuMemcpyDtoD(CUdeviceptr dst, CUdeviceptr src, size_t bytes)
{
    const struct copy_form form = {.call = CALL_cuMemcpyDtoD};
    return copy_bytes(&form, (uintptr_t)dst, (uintptr_t)src, bytes, CU_STREAM_LEGACY);
}

static CUresult CUDAAPI
fake_cuMemcpyDtoDAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream)
{
    const struct copy_form form = {.call = CALL_cuMemcpyDtoDAsync};
    return copy_bytes(&form, (uintptr_t)dst, (uintptr_t)src, bytes, stream);
}

/* Fill in one end of a copy of rows. */
static CUresult
rows_end(CUmemorytype type, const void *host, CUdeviceptr device, size_t x, size_t y,
         size_t pitch, size_t width, size_t height, int on, struct end *out)
{
    size_t start, extent;
    bool fits = pitch <= (size_t)fake.max_pitch && x <= pitch && width <= pitch - x
                && !__builtin_mul_overflow(y, pitch, &start)
                && !__builtin_add_overflow(start, x, &start)
                && !__builtin_mul_overflow(height - 1, pitch, &extent)
                && !__builtin_add_overflow(extent, width, &extent);
    if (!fits || (type == CU_MEMORYTYPE_HOST && host == NULL)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    out->pitch = pitch;
    switch ((int)type) {
    case CU_MEMORYTYPE_HOST:
        return memory_host_end((const char *)host + start, extent, on, out);
    case CU_MEMORYTYPE_DEVICE:
        return memory_device_end(device + start, extent, on, out);
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

static CUresult CUDAAPI
fake_cuMemcpy2DAsync(const CUDA_MEMCPY2D *copy, CUstream handle)
{
    struct context *current;
    struct stream *stream;
    CUresult code = enter_stream(CALL_cuMemcpy2DAsync, handle, &current, &stream);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (copy == NULL) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    if (stream->context != current) {
        return leave(CUDA_ERROR_INVALID_HANDLE);
    }
    size_t width = copy->WidthInBytes, height = copy->Height;
    if (width == 0 || height == 0) {
        return leave(CUDA_SUCCESS);
    }
    struct end dst = {0}, src = {0};
    code = rows_end(copy->dstMemoryType, copy->dstHost, copy->dstDevice,
                    copy->dstXInBytes, copy->dstY, copy->dstPitch, width, height,
                    current->device, &dst);
    if (code == CUDA_SUCCESS) {
        code = rows_end(copy->srcMemoryType, copy->srcHost, copy->srcDevice,
                        copy->srcXInBytes, copy->srcY, copy->srcPitch, width, height,
                        current->device, &src);
    }
    if (code == CUDA_SUCCESS) {
        issue_copy(stream, &dst, &src, width, height, false);
    }
    return leave(code);
}

/* --- memsets --- */

/* Issue a memset of so many elements; no form of it is waited for. */
static CUresult
set_elements(enum call call, CUdeviceptr dst, uint32_t value, unsigned value_bytes,
             size_t count, CUstream handle)
{
    struct context *current;
    struct stream *stream;
    CUresult code = enter_stream(call, handle, &current, &stream);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (stream->context != current) {
        return leave(CUDA_ERROR_INVALID_HANDLE);
    }
    if (count == 0) {
        return leave(CUDA_SUCCESS);
    }
    struct end end = {0};
    if (count > SIZE_MAX / value_bytes || dst % value_bytes
        || memory_device_end(dst, count * value_bytes, current->device, &end)
               != CUDA_SUCCESS) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    struct item *item = item_new(ITEM_MEMSET, stream);
    item->dst = end;
    item->width = count * value_bytes;
    item->height = 1;
    item->value = value;
    item->value_bytes = value_bytes;
    queue_submit(stream, item);
    return leave(CUDA_SUCCESS);
}

static CUresult CUDAAPI
fake_cuMemsetD8(CUdeviceptr dst, unsigned char value, size_t count)
{
    return set_elements(CALL_cuMemsetD8, dst, value, 1, count, CU_STREAM_LEGACY);
}

static CUresult CUDAAPI
fake_cuMemsetD16(CUdeviceptr dst, unsigned short value, size_t count)
{
    return set_elements(CALL_cuMemsetD16, dst, value, 2, count, CU_STREAM_LEGACY);
}

static CUresult CUDAAPI
fake_cuMemsetD32(CUdeviceptr dst, unsigned int value, size_t count)
{
    return set_elements(CALL_cuMemsetD32, dst, value, 4, count, CU_STREAM_LEGACY);
}

static CUresult CUDAAPI
fake_cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t count,
                     CUstream stream)
{
    return set_elements(CALL_cuMemsetD8Async, dst, value, 1, count, stream);
}

static CUresult CUDAAPI
fake_cuMemsetD16Async(CUdeviceptr dst, unsigned short value, size_t count,
                      CUstream stream)
{
    return set_elements(CALL_cuMemsetD16Async, dst, value, 2, count, stream);
}

static CUresult CUDAAPI
fake_cuMemsetD32Async(CUdeviceptr dst, unsigned int value, size_t count,
                      CUstream stream)
{
    return set_elements(CALL_cuMemsetD32Async, dst, value, 4, count, stream);
}

/* --- handing out the entry points --- */

/* The unused second branch lets the compiler check each type against cudaTypedefs.h. */
static const struct entry {
    const char *name;
    int version, ceiling;
    void (*function)(void);
} entries[DRIVER_CALLS] = {
#define X(name, version, ceiling) \
    {#name, version, ceiling,     \
     (void (*)(void))(1 ? fake_##name : (PFN_##name##_v##version)0)},
    FAKE_ENTRIES(X)
#undef X
};

const char *
entry_name(enum call call)
{
    static const char *const cublas[] = {
#define X(name) #name,
        FAKE_CUBLAS_ENTRIES(X)
#undef X
    };
    return call < DRIVER_CALLS ? entries[call].name : cublas[call - DRIVER_CALLS];
}

/* Find an entry point for a caller that was built against that version. */
static CUdriverProcAddressQueryResult
find_entry(const char *name, int version, void **function)
{
    for (int call = 0; call < DRIVER_CALLS; call++) {
        const struct entry *entry = &entries[call];
        if (strcmp(entry->name, name) != 0 || fake.hidden[call]) {
            continue;
        }
        if (version < entry->version || fake.driver_version < entry->version
            || (entry->ceiling && version >= entry->ceiling)) {
            return CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
        }
        memcpy(function, &entry->function, sizeof(*function));
        return CU_GET_PROC_ADDRESS_SUCCESS;
    }
    return CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
}

/* Look up an entry point as the real one does: not finding it is no error, but a NULL
   pointer. */
static CUresult
look_up(const char *name, void **function, int version, cuuint64_t flags,
        CUdriverProcAddressQueryResult *status)
{
    if (fake.forked) {
        return refuse_in_child();
    }
    if (name == NULL || function == NULL
        || (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    *function = NULL;
    pthread_mutex_lock(&fake.lock);
    *status = find_entry(name, version, function);
    return leave(CUDA_SUCCESS);
}

#undef cuGetProcAddress

#ifdef FAKE_CUDA_OLD_DRIVER /* before CUDA 12 it had another name and shape */
FAKE_EXPORT CUresult CUDAAPI
cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags)
{
    CUdriverProcAddressQueryResult status;
    return look_up(name, function, version, flags, &status);
}
#else
FAKE_EXPORT CUresult CUDAAPI
cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags,
                    CUdriverProcAddressQueryResult *status)
{
    CUdriverProcAddressQueryResult ignored;
    return look_up(name, function, version, flags, status ? status : &ignored);
}
#endif
