/* Copies. Each function resolves both ends, checks sizes, contexts and page-locking,
 * and only then calls the driver, once.
 *
 * With one end on the host, the host's end says how many bytes move, and the device's
 * end must have them. An asynchronous copy goes through the stream's ledger. A copy
 * that is given no stream goes on the NULL stream, but to or from a DeviceArray on that
 * one's own, where it finds what was computed and is found by what comes. */
#include "binding.h"

Ledger *
copy_ledger(const StreamRef *stream, ContextObject *context)
{
    return stream->object != NULL ? &stream->object->ledger
                                  : context_ledger(context, stream->handle);
}

/* A DeviceArray on its own stream needs nothing held, since its memory is freed in that
 * stream's order; and the stream, which the array keeps alive, must not keep the
 * array. */
PyObject *
copy_held_end(const DeviceEnd *end, const StreamRef *stream)
{
    int is_ordered = end->stream != NULL && end->stream == stream->object;
    return Py_NewRef(LIKELY(!is_ordered) ? end->hold : Py_None);
}

int
copy_ask_locked(ModuleState *state, const char *function, const char *role,
                const char *instead, const HostEnd *host, ContextObject *context)
{
    int is_locked = 0;
    CUresult status;
    Scope scope;
    if (host->is_locked) {
        return pagelocked_check_device(state, function, role, host->locked_in, context);
    }
    IN_CONTEXT(scope, context->handle, status,
               pagelocked_ask(host->ptr, host->nbytes, &is_locked));
    if (status != CUDA_SUCCESS) {
        raise_cuda(state, scope_call(&scope, "cuPointerGetAttribute"), status, NULL);
        return -1;
    }
    if (!is_locked) {
        PyErr_Format(
            PyExc_ValueError,
            "%s: %s is not page-locked, so the copy cannot be asynchronous; use "
            "%s, or make the array with pagelocked_empty or page-lock it with "
            "register_host_memory",
            function, role, instead);
        return -1;
    }
    return 0;
}

/* The driver makes its caller wait once some 1,000 pieces of work are queued in a
 * stream. */
int
copy_is_brief(const Ledger *ledger, size_t nbytes)
{
    return nbytes < LEDGER_SMALL && ledger->tail - ledger->head < LEDGER_DEEP;
}

int
htod_check(ModuleState *state, HtodCopy *copy, size_t nbytes, const char *function,
           const char *role, const char *instead)
{
    copy->context =
        common_context(state, copy->dest.context, copy->host.context, &copy->stream);
    if (copy->context == NULL ||
        device_end_measure(state, "dest", &copy->dest, copy->context) < 0 ||
        check_fits("dest", copy->dest.nbytes, nbytes) < 0) {
        return -1;
    }
    return copy_check_locked(state, function, role, instead, &copy->host,
                             copy->context);
}

int
htod_reserve(ModuleState *state, HtodCopy *copy, size_t nbytes)
{
    copy->ledger = copy_ledger(&copy->stream, copy->context);
    if (copy->ledger == NULL) {
        return -1;
    }
    return ledger_reserve(state, copy->ledger, copy->context, nbytes, &copy->ticket);
}

void
htod_commit(HtodCopy *copy)
{
    ledger_commit(copy->ledger, copy->context, &copy->ticket,
                  copy_held_end(&copy->dest, &copy->stream), copy->host.hold);
    copy->host.hold = NULL; /* stolen */
}

void
htod_release(HtodCopy *copy)
{
    Py_CLEAR(copy->context);
    stream_release(&copy->stream);
    host_end_release(&copy->host);
    device_end_release(&copy->dest);
}

/* ---- Between host and device ---- */

typedef struct {
    Signature signature;
    int to_device; /* htod, else dtoh */
    int asynchronous;
    const char *call; /* the driver's */
} HostCopy;

/* A synchronous copy on a stream. Needs no GIL. */
static CUresult
copy_and_wait(int to_device, CUdeviceptr device, const HostEnd *host, CUstream stream)
{
    CUresult status =
        to_device ? driver.MemcpyHtoDAsync(device, host->ptr, host->nbytes, stream)
                  : driver.MemcpyDtoHAsync(host->ptr, device, host->nbytes, stream);
    return status == CUDA_SUCCESS ? driver.StreamSynchronize(stream) : status;
}

/* The driver call, in the context. Needs no GIL. */
static inline __attribute__((always_inline)) CUresult
issue_host_copy(const HostCopy *copy, Scope *scope, ContextObject *context,
                const DeviceEnd *device, const HostEnd *host, CUstream stream)
{
    CUresult status;
    if (copy->to_device && copy->asynchronous) {
        BY_HANDLE(*scope, context->handle, stream, status,
                  driver.MemcpyHtoDAsync(device->ptr, host->ptr, host->nbytes, stream));
    }
    else if (device->stream != NULL) {
        IN_CONTEXT(*scope, context->handle, status,
                   copy_and_wait(copy->to_device, device->ptr, host, stream));
    }
    else if (copy->to_device) {
        IN_CONTEXT(*scope, context->handle, status,
                   driver.MemcpyHtoD(device->ptr, host->ptr, host->nbytes));
    }
    else if (copy->asynchronous) {
        BY_HANDLE(*scope, context->handle, stream, status,
                  driver.MemcpyDtoHAsync(host->ptr, device->ptr, host->nbytes, stream));
    }
    else {
        IN_CONTEXT(*scope, context->handle, status,
                   driver.MemcpyDtoH(host->ptr, device->ptr, host->nbytes));
    }
    return status;
}

/* Inlined into each of the four, so that what they do not need drops out. */
static inline __attribute__((always_inline)) PyObject *
copy_host(PyObject *module, const HostCopy *copy, PyObject *const *args,
          Py_ssize_t nargs, PyObject *kwnames)
{
    ModuleState *state = module_state(module);
    PyObject *given[3] = {NULL};
    DeviceEnd device = {0};
    HostEnd host = {0};
    StreamRef stream = {0};
    ContextObject *context = NULL;
    Ledger *ledger = NULL;
    Ticket ticket = {NULL};
    PyObject *result = NULL;
    if (unpack(&copy->signature, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    const char *device_role = copy->to_device ? "dest" : "src";
    const char *host_role = copy->to_device ? "src" : "dest";
    if (device_end_resolve(state, device_role, given[copy->to_device ? 0 : 1],
                           copy->to_device, &device) < 0 ||
        copy_stream(state, given[2], &device, &device, &stream) < 0 ||
        /* Last: the others may run code, which may resize what the host's end is. */
        host_end_resolve(state, host_role, given[copy->to_device ? 1 : 0],
                         !copy->to_device, &host) < 0) {
        goto done;
    }
    if (host.nbytes == 0) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    context = common_context(state, device.context, NULL, &stream);
    if (context == NULL ||
        device_end_measure(state, device_role, &device, context) < 0 ||
        check_fits(device_role, device.nbytes, host.nbytes) < 0) {
        goto done;
    }
    if (copy->asynchronous) {
        if (copy_check_locked(state, copy->signature.function, host_role,
                              copy->to_device ? "memcpy_htod" : "memcpy_dtoh", &host,
                              context) < 0) {
            goto done;
        }
        ledger = copy_ledger(&stream, context);
        if (ledger == NULL ||
            ledger_reserve(state, ledger, context, host.nbytes, &ticket) < 0) {
            goto done;
        }
    }
    CUresult status;
    Scope scope;
    if (LIKELY(ledger != NULL) && LIKELY(copy_is_brief(ledger, host.nbytes))) {
        status = issue_host_copy(copy, &scope, context, &device, &host, stream.handle);
    }
    else {
        Py_BEGIN_ALLOW_THREADS
        status = issue_host_copy(copy, &scope, context, &device, &host, stream.handle);
        Py_END_ALLOW_THREADS
    }
    if (!LIKELY(status == CUDA_SUCCESS)) {
        if (ledger != NULL) {
            ledger_cancel(ledger, &ticket);
        }
        raise_cuda(state, scope_call(&scope, copy->call), status, "%zu bytes",
                   host.nbytes);
        goto done;
    }
    if (ledger != NULL) {
        ledger_commit(ledger, context, &ticket, copy_held_end(&device, &stream),
                      host.hold);
        host.hold = NULL; /* stolen */
    }
    result = Py_NewRef(Py_None);
done:
    Py_XDECREF(context);
    stream_release(&stream);
    host_end_release(&host);
    device_end_release(&device);
    return result;
}

static const char *const copy_names[] = {"dest", "src", NULL};
static const char *const copy_async_names[] = {"dest", "src", "stream", NULL};

#define HOST_COPY(name, names, most, to_device, asynchronous, call) \
    static PyObject *name(PyObject *module, PyObject *const *args, Py_ssize_t nargs, \
                          PyObject *kwnames) \
    { \
        static const HostCopy copy = { \
            {#name, names, 2, most}, to_device, asynchronous, call}; \
        return copy_host(module, &copy, args, nargs, kwnames); \
    }

HOST_COPY(memcpy_htod, copy_names, 2, 1, 0, "cuMemcpyHtoD")
HOST_COPY(memcpy_htod_async, copy_async_names, 3, 1, 1, "cuMemcpyHtoDAsync")
HOST_COPY(memcpy_dtoh, copy_names, 2, 0, 0, "cuMemcpyDtoH")
HOST_COPY(memcpy_dtoh_async, copy_async_names, 3, 0, 1, "cuMemcpyDtoHAsync")

/* ---- Device to device ---- */

/* What the three device-to-device copies share. */
typedef struct {
    DeviceEnd dest, src;
    StreamRef stream;
    ContextObject *context; /* owned */
} DevicePair;

static void
pair_release(DevicePair *pair)
{
    Py_CLEAR(pair->context);
    stream_release(&pair->stream);
    device_end_release(&pair->src);
    device_end_release(&pair->dest);
}

static int
pair_resolve(ModuleState *state, PyObject *dest, PyObject *src, PyObject *stream,
             DevicePair *pair)
{
    if (device_end_resolve(state, "dest", dest, 1, &pair->dest) < 0 ||
        device_end_resolve(state, "src", src, 0, &pair->src) < 0 ||
        copy_stream(state, stream, &pair->dest, &pair->src, &pair->stream) < 0) {
        return -1;
    }
    return 0;
}

/* Find the context and check that both ends have what is needed. Not for 0 bytes. */
static int
pair_check(ModuleState *state, DevicePair *pair, size_t dest_needs, size_t src_needs)
{
    pair->context =
        common_context(state, pair->dest.context, pair->src.context, &pair->stream);
    if (pair->context == NULL ||
        device_end_measure(state, "dest", &pair->dest, pair->context) < 0 ||
        device_end_measure(state, "src", &pair->src, pair->context) < 0 ||
        check_fits("dest", pair->dest.nbytes, dest_needs) < 0 ||
        check_fits("src", pair->src.nbytes, src_needs) < 0) {
        return -1;
    }
    return 0;
}

/* One driver call on the pair's stream, its ends held by the ledger: status = call. */
#define LEDGERED(state, pair, size, name, status, call) \
    do { \
        Scope scope; \
        Ticket ticket; \
        Ledger *ledger = copy_ledger(&(pair)->stream, (pair)->context); \
        if (ledger == NULL || \
            ledger_reserve((state), ledger, (pair)->context, (size), &ticket) < 0) { \
            (status) = CUDA_ERROR_UNKNOWN; /* the error is set */ \
            break; \
        } \
        Py_BEGIN_ALLOW_THREADS \
        IN_CONTEXT(scope, (pair)->context->handle, (status), (call)); \
        Py_END_ALLOW_THREADS \
        if ((status) == CUDA_SUCCESS) { \
            ledger_commit(ledger, (pair)->context, &ticket, \
                          copy_held_end(&(pair)->dest, &(pair)->stream), \
                          copy_held_end(&(pair)->src, &(pair)->stream)); \
        } \
        else { \
            ledger_cancel(ledger, &ticket); \
            raise_cuda((state), scope_call(&scope, (name)), (status), "%zu bytes", \
                       (size)); \
        } \
    } while (0)

/* memcpy_dtod and its asynchronous form. */
static PyObject *
copy_device(PyObject *module, const Signature *signature, int asynchronous,
            PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    ModuleState *state = module_state(module);
    PyObject *given[4] = {NULL};
    DevicePair pair = {0};
    PyObject *result = NULL;
    CUresult status;
    size_t size = 0;
    if (unpack(signature, args, nargs, kwnames, given) < 0 ||
        pair_resolve(state, given[0], given[1], given[3], &pair) < 0) {
        goto done;
    }
    if (given[2] != NULL && given[2] != Py_None) {
        if (size_argument("size", given[2], &size) < 0) {
            goto done;
        }
    }
    else if (pair.dest.size_is_known && pair.src.size_is_known) {
        size = pair.src.nbytes;
    }
    else {
        PyErr_Format(PyExc_TypeError, "%s() needs size: %s is an address",
                     signature->function, pair.dest.size_is_known ? "src" : "dest");
        goto done;
    }
    if (size > 0) {
        if (pair_check(state, &pair, size, size) < 0) {
            goto done;
        }
        /* Neither waits, so on a stream of a DeviceArray both are the same. */
        if (asynchronous || pair.stream.object != NULL) {
            LEDGERED(state, &pair, size, "cuMemcpyDtoDAsync", status,
                     driver.MemcpyDtoDAsync(pair.dest.ptr, pair.src.ptr, size,
                                            pair.stream.handle));
        }
        else {
            Scope scope;
            Py_BEGIN_ALLOW_THREADS
            IN_CONTEXT(scope, pair.context->handle, status,
                       driver.MemcpyDtoD(pair.dest.ptr, pair.src.ptr, size));
            Py_END_ALLOW_THREADS
            if (status != CUDA_SUCCESS) {
                raise_cuda(state, scope_call(&scope, "cuMemcpyDtoD"), status,
                           "%zu bytes", size);
            }
        }
        if (status != CUDA_SUCCESS) {
            goto done;
        }
    }
    result = Py_NewRef(Py_None);
done:
    pair_release(&pair);
    return result;
}

static PyObject *
memcpy_dtod(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
            PyObject *kwnames)
{
    static const char *const names[] = {"dest", "src", "size", NULL};
    static const Signature signature = {"memcpy_dtod", names, 2, 3};
    return copy_device(module, &signature, 0, args, nargs, kwnames);
}

static PyObject *
memcpy_dtod_async(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames)
{
    static const char *const names[] = {"dest", "src", "size", "stream", NULL};
    static const Signature signature = {"memcpy_dtod_async", names, 2, 4};
    return copy_device(module, &signature, 1, args, nargs, kwnames);
}

/* Bytes from the first to the last row's end. Return 0, or -1 with ValueError set. */
static int
pitched_extent(const char *role, size_t pitch, size_t width, size_t height,
               size_t *extent)
{
    if (pitch < width) {
        PyErr_Format(PyExc_ValueError, "%s_pitch %zu is less than the width %zu", role,
                     pitch, width);
        return -1;
    }
    if (__builtin_mul_overflow(height - 1, pitch, extent) ||
        __builtin_add_overflow(*extent, width, extent)) {
        PyErr_Format(PyExc_ValueError, "%s: %zu rows of %zu bytes are too many", role,
                     height, pitch);
        return -1;
    }
    return 0;
}

static PyObject *
memcpy_dtod_2d_async(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                     PyObject *kwnames)
{
    enum { DEST, DEST_PITCH, SRC, SRC_PITCH, WIDTH, HEIGHT, STREAM, COUNT };
    static const char *const names[] = {"dest",  "dest_pitch", "src",    "src_pitch",
                                        "width", "height",     "stream", NULL};
    static const Signature signature = {"memcpy_dtod_2d_async", names, 6, 7};
    ModuleState *state = module_state(module);
    PyObject *given[COUNT] = {NULL};
    DevicePair pair = {0};
    PyObject *result = NULL;
    CUresult status;
    size_t dest_pitch, src_pitch, width, height, dest_extent, src_extent;
    if (unpack(&signature, args, nargs, kwnames, given) < 0 ||
        pair_resolve(state, given[DEST], given[SRC], given[STREAM], &pair) < 0 ||
        size_argument("dest_pitch", given[DEST_PITCH], &dest_pitch) < 0 ||
        size_argument("src_pitch", given[SRC_PITCH], &src_pitch) < 0 ||
        size_argument("width", given[WIDTH], &width) < 0 ||
        size_argument("height", given[HEIGHT], &height) < 0) {
        goto done;
    }
    if (width > 0 && height > 0) {
        if (pitched_extent("dest", dest_pitch, width, height, &dest_extent) < 0 ||
            pitched_extent("src", src_pitch, width, height, &src_extent) < 0 ||
            pair_check(state, &pair, dest_extent, src_extent) < 0) {
            goto done;
        }
        CUDA_MEMCPY2D rows = {
            .srcMemoryType = CU_MEMORYTYPE_DEVICE,
            .srcDevice = pair.src.ptr,
            .srcPitch = src_pitch,
            .dstMemoryType = CU_MEMORYTYPE_DEVICE,
            .dstDevice = pair.dest.ptr,
            .dstPitch = dest_pitch,
            .WidthInBytes = width,
            .Height = height,
        };
        size_t size = width * height; /* no more than the extents, which fit */
        LEDGERED(state, &pair, size, "cuMemcpy2DAsync", status,
                 driver.Memcpy2DAsync(&rows, pair.stream.handle));
        if (status != CUDA_SUCCESS) {
            goto done;
        }
    }
    result = Py_NewRef(Py_None);
done:
    pair_release(&pair);
    return result;
}

PyMethodDef copy_functions[] = {
    {"memcpy_htod", FASTCALL(memcpy_htod),
     PyDoc_STR(
         "memcpy_htod($module, /, dest, src)\n--\n\n"
         "Copy all of src (C-contiguous host memory) to the device.\n\n"
         "On the NULL stream; src may be changed when the call returns. From pageable "
         "memory the\nlast of it may reach the device later, which a non-blocking "
         "stream does not wait for (CUDA\nDriver API, API synchronization behavior): "
         "synchronize first, or use memcpy_htod_async.\n\n"
         "Raises ValueError if dest is smaller or src not C-contiguous, TypeError "
         "for objects and foreign byte order.")},
    {"memcpy_htod_async", FASTCALL(memcpy_htod_async),
     PyDoc_STR(
         "memcpy_htod_async($module, /, dest, src, stream=None)\n--\n\n"
         "Queue a copy of all of src (page-locked) to the device.\n\n"
         "Both ends are kept alive until it is done; src must not be changed until "
         "then.\n\n"
         "Raises ValueError if src is not page-locked or not C-contiguous, if dest "
         "is smaller, or stream or dest of another context; or if src is page-locked "
         "for another device alone (HOST_ALLOC_PORTABLE: for every device).")},
    {"memcpy_dtoh", FASTCALL(memcpy_dtoh),
     PyDoc_STR(
         "memcpy_dtoh($module, /, dest, src)\n--\n\n"
         "Fill dest (writable, C-contiguous host memory) from the device, and wait.\n\n"
         "Raises ValueError if src is smaller or dest not C-contiguous or read-only.")},
    {"memcpy_dtoh_async", FASTCALL(memcpy_dtoh_async),
     PyDoc_STR("memcpy_dtoh_async($module, /, dest, src, stream=None)\n--\n\n"
               "Queue a copy from the device that fills dest (page-locked).\n\n"
               "Both ends are kept alive until it is done.\n\n"
               "Raises ValueError as memcpy_htod_async.")},
    {"memcpy_dtod", FASTCALL(memcpy_dtod),
     PyDoc_STR("memcpy_dtod($module, /, dest, src, size=None)\n--\n\n"
               "Copy `size` bytes on the device, on the NULL stream. The host does not "
               "wait.\n\n"
               "size is all of src, where neither end is a bare address.")},
    {"memcpy_dtod_async", FASTCALL(memcpy_dtod_async),
     PyDoc_STR(
         "memcpy_dtod_async($module, /, dest, src, size=None, stream=None)\n--\n\n"
         "Queue a copy of `size` bytes on the device.\n\n"
         "Both ends are kept alive until it is done.")},
    {"memcpy_dtod_2d_async", FASTCALL(memcpy_dtod_2d_async),
     PyDoc_STR(
         "memcpy_dtod_2d_async($module, /, dest, dest_pitch, src, src_pitch, width, "
         "height, stream=None)\n--\n\n"
         "Queue a copy of `height` rows of `width` bytes, `pitch` bytes apart.")},
    {NULL, NULL, 0, NULL},
};
