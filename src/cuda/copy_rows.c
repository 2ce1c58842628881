/* memcpy_htod_rows_async(dest, src): a copy to the device from page-locked memory that
 * is rows at one distance, as the minibatches of a data set of sequences are.
 *
 * The copy engine takes such rows as they lie, with no work for the host (some 50 GB/s
 * of PCIe 5.0's 55 from rows of 400 bytes on). */
#include "binding.h"

/* Whether they are one copy of the driver's for rows. */
static int
is_pitched(const HostRows *rows, size_t most_pitch)
{
    return rows->height > 1 && rows->pitch <= most_pitch;
}

/* Queue the copy of the rows to contiguous memory at dest. In the context, no GIL. */
static CUresult
queue_rows(CUdeviceptr dest, char *src, const HostRows *rows, size_t most_pitch,
           CUstream stream)
{
    CUresult status = CUDA_SUCCESS;
    if (is_pitched(rows, most_pitch)) {
        CUDA_MEMCPY2D copy = {
            .srcMemoryType = CU_MEMORYTYPE_HOST,
            .srcHost = src,
            .srcPitch = rows->pitch,
            .dstMemoryType = CU_MEMORYTYPE_DEVICE,
            .dstDevice = dest,
            .dstPitch = rows->width,
            .WidthInBytes = rows->width,
            .Height = rows->height,
        };
        return driver.Memcpy2DAsync(&copy, stream);
    }
    for (size_t i = 0; i < rows->height && status == CUDA_SUCCESS; i++) {
        status = driver.MemcpyHtoDAsync(dest + i * rows->width, src + i * rows->pitch,
                                        rows->width, stream);
    }
    return status;
}

/* Return 0 and the rows of `src`, or -1 with TypeError or ValueError set. */
static int
rows_argument(const char *function, PyObject *src, HostRows *rows)
{
    if (!PyArray_Check(src)) {
        PyErr_Format(PyExc_TypeError, "%s: src must be a numpy array, not %s", function,
                     Py_TYPE(src)->tp_name);
        return -1;
    }
    PyArrayObject *array = (PyArrayObject *)src;
    if (check_dtype("src", PyArray_DESCR(array), 1) < 0) {
        return -1;
    }
    if (!array_rows(array, rows)) {
        PyObject *shape = PyObject_GetAttrString(src, "shape");
        PyObject *strides = PyObject_GetAttrString(src, "strides");
        if (shape != NULL && strides != NULL) {
            PyErr_Format(PyExc_ValueError,
                         "%s: src is not rows of one length at one distance: shape %R, "
                         "strides %R",
                         function, shape, strides);
        }
        Py_XDECREF(shape);
        Py_XDECREF(strides);
        return -1;
    }
    return 0;
}

static PyObject *
memcpy_htod_rows_async(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                       PyObject *kwnames)
{
    enum { DEST, SRC, STREAM, COUNT };
    static const char *const names[] = {"dest", "src", "stream", NULL};
    static const Signature signature = {"memcpy_htod_rows_async", names, 2, 3};
    ModuleState *state = module_state(module);
    PyObject *given[COUNT] = {NULL};
    HtodCopy copy = {0};
    PyObject *result = NULL;
    HostRows rows;
    if (unpack(&signature, args, nargs, kwnames, given) < 0 ||
        device_end_resolve(state, "dest", given[DEST], 1, &copy.dest) < 0 ||
        copy_stream(state, given[STREAM], &copy.dest, &copy.dest, &copy.stream) < 0 ||
        /* Last: the others may run code, which may resize src. */
        rows_argument(signature.function, given[SRC], &rows) < 0) {
        goto done;
    }
    if (rows.width == 0) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    PyArrayObject *array = (PyArrayObject *)given[SRC];
    size_t nbytes = rows.width * rows.height, most_pitch;
    char *first, *end;
    array_bounds(array, &first, &end);
    PyObject *owner = pagelocked_owner(state, array, first, end);
    copy.host.ptr = first;
    copy.host.nbytes = (size_t)(end - first);
    copy.host.is_locked = owner != NULL;
    copy.host.locked_in = pagelocked_context(owner);
    copy.host.registered = pagelocked_enter(state, array);
    copy.host.hold = Py_NewRef(owner != NULL ? owner : given[SRC]);
    if (htod_check(state, &copy, nbytes, signature.function, "src", "memcpy_htod") <
            0 ||
        context_max_pitch(state, copy.context, &most_pitch) < 0 ||
        htod_reserve(state, &copy, nbytes) < 0) {
        goto done;
    }
    CUresult status;
    Scope scope;
    Py_BEGIN_ALLOW_THREADS
    IN_CONTEXT(scope, copy.context->handle, status,
               queue_rows(copy.dest.ptr, first, &rows, most_pitch, copy.stream.handle));
    Py_END_ALLOW_THREADS
    htod_commit(&copy);
    if (status != CUDA_SUCCESS) {
        const char *call =
            is_pitched(&rows, most_pitch) ? "cuMemcpy2DAsync" : "cuMemcpyHtoDAsync";
        raise_cuda(state, scope_call(&scope, call), status, "%zu rows of %zu bytes",
                   rows.height, rows.width);
        goto done;
    }
    result = Py_NewRef(Py_None);
done:
    htod_release(&copy);
    return result;
}

static PyObject *
row_bytes(PyObject *Py_UNUSED(module), PyObject *object)
{
    HostRows rows;
    if (!PyArray_Check(object)) {
        return PyErr_Format(PyExc_TypeError, "row_bytes takes a numpy array, not %s",
                            Py_TYPE(object)->tp_name);
    }
    return PyLong_FromSize_t(array_rows((PyArrayObject *)object, &rows) ? rows.width
                                                                        : 0);
}

static PyObject *
extent(PyObject *Py_UNUSED(module), PyObject *object)
{
    char *first, *end;
    if (!PyArray_Check(object)) {
        return PyErr_Format(PyExc_TypeError, "extent takes a numpy array, not %s",
                            Py_TYPE(object)->tp_name);
    }
    array_bounds((PyArrayObject *)object, &first, &end);
    return Py_BuildValue("KK", (unsigned long long)(uintptr_t)first,
                         (unsigned long long)(uintptr_t)end);
}

PyMethodDef copy_rows_functions[] = {
    {"memcpy_htod_rows_async", FASTCALL(memcpy_htod_rows_async),
     PyDoc_STR(
         "memcpy_htod_rows_async($module, /, dest, src, stream=None)\n--\n\n"
         "Queue a copy of a page-locked array to contiguous memory of the device.\n\n"
         "src is a NumPy array that is C-contiguous or rows of one length at one "
         "distance, as\n"
         "data[:steps, first:last] is. Rows too far apart for the device's copy engine "
         "are one copy\n"
         "each. Both ends are kept alive until it is done; src must not be changed "
         "until then.\n\n"
         "Raises ValueError if src is not page-locked or no such rows, if dest is "
         "smaller, or stream or\n"
         "dest of another context.")},
    {"row_bytes", row_bytes, METH_O,
     PyDoc_STR("row_bytes($module, array, /)\n--\n\n"
               "Return how many bytes a row has that memcpy_htod_rows_async would "
               "copy.\n\n"
               "All of them for a C-contiguous array, 0 for one that it would "
               "refuse.")},
    {"extent", extent, METH_O,
     PyDoc_STR("extent($module, array, /)\n--\n\n"
               "Return the addresses where an array's bytes begin and where they have "
               "ended.\n\n"
               "Whatever its strides; the same twice for an array without elements.")},
    {NULL, NULL, 0, NULL},
};
