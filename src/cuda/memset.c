/* Filling device memory with a value of 1, 2 or 4 bytes. */
#include "binding.h"

typedef struct {
    Signature signature;
    size_t width; /* bytes an element: 1, 2 or 4 */
    int asynchronous;
    const char *call; /* the driver's */
} Fill;

/* The driver call itself; needs no GIL. Without a stream (of an asynchronous call, or
 * of a DeviceArray) on the NULL stream. */
static CUresult
fill_call(const Fill *fill, int on_stream, CUdeviceptr ptr, unsigned int value,
          size_t count, CUstream stream)
{
    switch (fill->width) {
    case 1:
        return on_stream
                   ? driver.MemsetD8Async(ptr, (unsigned char)value, count, stream)
                   : driver.MemsetD8(ptr, (unsigned char)value, count);
    case 2:
        return on_stream
                   ? driver.MemsetD16Async(ptr, (unsigned short)value, count, stream)
                   : driver.MemsetD16(ptr, (unsigned short)value, count);
    default:
        return on_stream ? driver.MemsetD32Async(ptr, value, count, stream)
                         : driver.MemsetD32(ptr, value, count);
    }
}

/* An element's bit pattern. Return 0, or -1 with an error set. */
static int
value_argument(PyObject *object, size_t width, unsigned int *value)
{
    unsigned long long wide;
    if (address_argument("value", object, &wide) < 0) {
        return -1;
    }
    if (wide >> (8 * width) != 0) {
        PyErr_Format(PyExc_ValueError, "value %R does not fit into %zu bits", object,
                     8 * width);
        return -1;
    }
    *value = (unsigned int)wide;
    return 0;
}

static PyObject *
fill_memory(PyObject *module, const Fill *fill, PyObject *const *args, Py_ssize_t nargs,
            PyObject *kwnames)
{
    ModuleState *state = module_state(module);
    PyObject *given[4] = {NULL};
    DeviceEnd dest = {0};
    StreamRef stream = {0};
    ContextObject *context = NULL;
    Ledger *ledger = NULL;
    Ticket ticket = {NULL};
    PyObject *result = NULL;
    unsigned int value;
    size_t count, nbytes;
    if (unpack(&fill->signature, args, nargs, kwnames, given) < 0 ||
        value_argument(given[1], fill->width, &value) < 0 ||
        size_argument("count", given[2], &count) < 0 ||
        device_end_resolve(state, "dest", given[0], 1, &dest) < 0 ||
        stream_resolve(state,
                       dest.stream != NULL && (given[3] == NULL || given[3] == Py_None)
                           ? (PyObject *)dest.stream
                           : given[3],
                       &stream) < 0) {
        goto done;
    }
    if (__builtin_mul_overflow(count, fill->width, &nbytes)) {
        PyErr_Format(PyExc_ValueError, "count %zu is too big", count);
        goto done;
    }
    if (nbytes == 0) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    if (dest.ptr % fill->width != 0) {
        PyErr_Format(PyExc_ValueError, "dest %p is not a multiple of %zu",
                     (void *)(uintptr_t)dest.ptr, fill->width);
        goto done;
    }
    context = common_context(state, dest.context, NULL, &stream);
    if (context == NULL || device_end_measure(state, "dest", &dest, context) < 0 ||
        check_fits("dest", dest.nbytes, nbytes) < 0) {
        goto done;
    }
    int on_stream = fill->asynchronous || stream.object != NULL;
    if (on_stream) {
        ledger = stream.object != NULL ? &stream.object->ledger
                                       : context_ledger(context, stream.handle);
        if (ledger == NULL ||
            ledger_reserve(state, ledger, context, nbytes, &ticket) < 0) {
            goto done;
        }
    }
    CUresult status;
    Scope scope;
    Py_BEGIN_ALLOW_THREADS
    IN_CONTEXT(scope, context->handle, status,
               fill_call(fill, on_stream, dest.ptr, value, count, stream.handle));
    Py_END_ALLOW_THREADS
    if (status != CUDA_SUCCESS) {
        if (ledger != NULL) {
            ledger_cancel(ledger, &ticket);
        }
        raise_cuda(state, scope_call(&scope, fill->call), status, "%zu bytes", nbytes);
        goto done;
    }
    if (ledger != NULL) {
        /* A DeviceArray on its own stream needs no holding, as in copy.c. */
        int is_ordered = dest.stream != NULL && dest.stream == stream.object;
        ledger_commit(ledger, context, &ticket,
                      Py_NewRef(is_ordered ? Py_None : dest.hold), NULL);
    }
    result = Py_NewRef(Py_None);
done:
    Py_XDECREF(context);
    stream_release(&stream);
    device_end_release(&dest);
    return result;
}

static const char *const fill_names[] = {"dest", "value", "count", NULL};
static const char *const fill_async_names[] = {"dest", "value", "count", "stream",
                                               NULL};

#define FILL(name, names, most, width, asynchronous, call) \
    static PyObject *name(PyObject *module, PyObject *const *args, Py_ssize_t nargs, \
                          PyObject *kwnames) \
    { \
        static const Fill fill = {{#name, names, 3, most}, width, asynchronous, call}; \
        return fill_memory(module, &fill, args, nargs, kwnames); \
    }

FILL(memset_d8, fill_names, 3, 1, 0, "cuMemsetD8")
FILL(memset_d16, fill_names, 3, 2, 0, "cuMemsetD16")
FILL(memset_d32, fill_names, 3, 4, 0, "cuMemsetD32")
FILL(memset_d8_async, fill_async_names, 4, 1, 1, "cuMemsetD8Async")
FILL(memset_d16_async, fill_async_names, 4, 2, 1, "cuMemsetD16Async")
FILL(memset_d32_async, fill_async_names, 4, 4, 1, "cuMemsetD32Async")

#define FILL_ENTRY(bits, bytes) \
    {"memset_d" #bits, FASTCALL(memset_d##bits), \
     PyDoc_STR("memset_d" #bits "($module, /, dest, value, count)\n--\n\n" \
               "Fill device memory with `count` elements of " bytes ", on the NULL " \
               "stream. The host does not wait.")}, \
    { \
        "memset_d" #bits "_async", FASTCALL(memset_d##bits##_async), \
            PyDoc_STR("memset_d" #bits \
                      "_async($module, /, dest, value, count, stream=None)\n" \
                      "--\n\n" \
                      "Queue a fill of device memory with `count` elements of " bytes \
                      ".") \
    }

PyMethodDef memset_functions[] = {
    FILL_ENTRY(8, "1 byte"),
    FILL_ENTRY(16, "2 bytes"),
    FILL_ENTRY(32, "4 bytes"),
    {NULL, NULL, 0, NULL},
};
