/* The ends of a copy: from what Python hands over to an address and a size that are
 * safe to give to the driver. Everything is checked here, before any driver call. */
#include "binding.h"

#include "../handler/handler.h"

/* Whether all fields are in this machine's byte order; -1 with an error set. */
COLD static int
is_struct_native(PyArray_Descr *descr)
{
    PyObject *native = PyObject_GetAttrString((PyObject *)descr, "isnative");
    int result = native == NULL ? -1 : PyObject_IsTrue(native);
    Py_XDECREF(native);
    return result;
}

/* A native byte order can be told from the descriptor, but for the fields of a struct.
 */
static inline int
is_native(PyArray_Descr *descr)
{
    return descr->type_num != NPY_VOID ? PyArray_ISNBO(descr->byteorder)
                                       : is_struct_native(descr);
}

COLD static void
raise_holds_objects(const char *role, PyArray_Descr *descr)
{
    PyErr_Format(PyExc_TypeError,
                 "%s: dtype %R holds Python objects: its bytes are pointers", role,
                 descr);
}

COLD static void
raise_read_only(const char *role)
{
    PyErr_Format(PyExc_ValueError, "%s is read-only", role);
}

COLD static void
raise_not_native(const char *role, PyArray_Descr *descr)
{
    PyErr_Format(PyExc_TypeError,
                 "%s: dtype %R is not in this machine's byte order; convert it with "
                 "astype(dtype.newbyteorder('='))",
                 role, descr);
}

/* As check_dtype. */
static inline int
check_dtype_inline(const char *role, PyArray_Descr *descr, int native)
{
    if (PyDataType_REFCHK(descr)) {
        raise_holds_objects(role, descr);
        return -1;
    }
    int good = native ? is_native(descr) : 1;
    if (good == 0) {
        raise_not_native(role, descr);
    }
    return good > 0 ? 0 : -1;
}

int
check_dtype(const char *role, PyArray_Descr *descr, int native)
{
    return check_dtype_inline(role, descr, native);
}

/* Set "not C-contiguous", with shape and strides. */
COLD static void
raise_not_contiguous(const char *role, PyObject *object)
{
    PyObject *shape = PyObject_GetAttrString(object, "shape");
    PyObject *strides =
        shape == NULL ? NULL : PyObject_GetAttrString(object, "strides");
    if (strides != NULL) {
        PyErr_Format(
            PyExc_ValueError,
            "%s is not C-contiguous: shape %R, strides %R; its bytes would arrive "
            "in another order (numpy.ascontiguousarray makes a copy that is)",
            role, shape, strides);
    }
    Py_XDECREF(shape);
    Py_XDECREF(strides);
}

/* ---- Host ---- */

/* PyArray_NBYTES without its calls into NumPy. */
static inline size_t
array_nbytes(PyArrayObject *array)
{
    size_t nbytes = (size_t)PyArray_ITEMSIZE(array);
    for (int i = 0; i < PyArray_NDIM(array); i++) {
        nbytes *= (size_t)PyArray_DIM(array, i);
    }
    return nbytes;
}

static inline int
host_end_of_array(ModuleState *state, const char *role, PyArrayObject *array,
                  int writable, HostEnd *end)
{
    if (!PyArray_IS_C_CONTIGUOUS(array)) {
        raise_not_contiguous(role, (PyObject *)array);
        return -1;
    }
    if (check_dtype_inline(role, PyArray_DESCR(array), 1) < 0) {
        return -1;
    }
    if (writable && !PyArray_ISWRITEABLE(array)) {
        raise_read_only(role);
        return -1;
    }
    end->ptr = PyArray_DATA(array);
    end->nbytes = array_nbytes(array);
    PyObject *owner =
        pagelocked_owner(state, array, end->ptr, (const char *)end->ptr + end->nbytes);
    end->is_locked = owner != NULL;
    end->locked_in = pagelocked_context(owner);
    end->registered = pagelocked_enter(state, array);
    /* Our own memory is held directly: arrays are unknown to the garbage collector, and
     * a copy in flight may make a cycle (context, ledger, memory, context). */
    end->hold = Py_NewRef(owner != NULL ? owner : (PyObject *)array);
    return 0;
}

/* Whether a buffer's format has object pointers ('O') or the other byte order. */
static void
scan_format(const char *format, int *has_objects, int *is_swapped)
{
    const int little = 1;
    const char swapped = *(const char *)&little ? '>' : '<';
    for (const char *at = format; at != NULL && *at != '\0'; at++) {
        if (*at == ':') { /* a field's name, up to the next colon */
            at = strchr(at + 1, ':');
            if (at == NULL) {
                return;
            }
        }
        else if (*at == 'O') {
            *has_objects = 1;
        }
        else if (*at == swapped || (*at == '!' && swapped == '>')) {
            *is_swapped = 1;
        }
    }
}

static __attribute__((noinline)) int
host_end_of_buffer(const char *role, PyObject *object, int writable, HostEnd *end)
{
    PyObject *view = PyMemoryView_FromObject(object); /* keeps the buffer where it is */
    if (view == NULL) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            PyErr_Format(
                PyExc_TypeError,
                "%s must be a numpy array or another buffer in host memory, not %s",
                role, Py_TYPE(object)->tp_name);
        }
        return -1;
    }
    Py_buffer *buffer = PyMemoryView_GET_BUFFER(view);
    int has_objects = 0, is_swapped = 0;
    scan_format(buffer->format, &has_objects, &is_swapped);
    if (!PyBuffer_IsContiguous(buffer, 'C')) {
        raise_not_contiguous(role, view);
    }
    else if (has_objects) {
        PyErr_Format(PyExc_TypeError,
                     "%s: format '%s' holds Python objects: its bytes are pointers",
                     role, buffer->format);
    }
    else if (is_swapped) {
        PyErr_Format(PyExc_TypeError,
                     "%s: format '%s' is not in this machine's byte order", role,
                     buffer->format);
    }
    else if (writable && buffer->readonly) {
        raise_read_only(role);
    }
    else {
        end->ptr = buffer->buf;
        end->nbytes = (size_t)buffer->len;
        end->hold = view;
        return 0;
    }
    Py_DECREF(view);
    return -1;
}

int
host_end_resolve(ModuleState *state, const char *role, PyObject *object, int writable,
                 HostEnd *end)
{
    if (LIKELY(PyArray_CheckExact(object)) || PyArray_Check(object)) {
        return host_end_of_array(state, role, (PyArrayObject *)object, writable, end);
    }
    return host_end_of_buffer(role, object, writable, end);
}

/* ---- Device ---- */

/* Bytes of an interface's shape and strides. Return 0, or -1 with an error set. */
static int
measure_interface(const char *role, PyObject *shape, PyObject *strides, size_t itemsize,
                  size_t *nbytes)
{
    size_t total = itemsize;
    int is_empty = 0, is_contiguous = 1;
    if (!PyTuple_Check(shape) ||
        (strides != NULL && (!PyTuple_Check(strides) ||
                             PyTuple_GET_SIZE(strides) != PyTuple_GET_SIZE(shape)))) {
        PyErr_Format(PyExc_TypeError,
                     "%s: __cuda_array_interface__ has no valid shape and "
                     "strides",
                     role);
        return -1;
    }
    for (Py_ssize_t i = PyTuple_GET_SIZE(shape) - 1; i >= 0; i--) {
        size_t dim;
        if (size_argument("a dimension", PyTuple_GET_ITEM(shape, i), &dim) < 0) {
            return -1;
        }
        is_empty |= dim == 0;
        if (strides != NULL && dim > 1) {
            PyObject *index = index_argument("a stride", PyTuple_GET_ITEM(strides, i));
            if (index == NULL) {
                return -1;
            }
            Py_ssize_t stride = PyNumber_AsSsize_t(index, NULL); /* or the nearest */
            Py_DECREF(index);
            is_contiguous &= stride >= 0 && (size_t)stride == total;
        }
        if (dim != 0 && __builtin_mul_overflow(total, dim, &total)) {
            PyErr_Format(PyExc_ValueError, "%s: shape %R is too big", role, shape);
            return -1;
        }
    }
    if (!is_empty && !is_contiguous) {
        PyErr_Format(PyExc_ValueError, "%s is not C-contiguous: shape %R, strides %R",
                     role, shape, strides);
        return -1;
    }
    *nbytes = is_empty ? 0 : total;
    return 0;
}

/* Bytes of one element. Return 0, or -1 with an error set. */
static int
measure_typestr(const char *role, PyObject *typestr, size_t *itemsize)
{
    PyArray_Descr *descr = NULL;
    if (!PyUnicode_Check(typestr)) {
        PyErr_Format(PyExc_TypeError,
                     "%s: typestr of __cuda_array_interface__ must be a str, not %s",
                     role, Py_TYPE(typestr)->tp_name);
        return -1;
    }
    if (!PyArray_DescrConverter(typestr, &descr)) {
        return -1;
    }
    int result = check_dtype(role, descr, 0);
    *itemsize = (size_t)PyDataType_ELSIZE(descr);
    Py_DECREF(descr);
    return result;
}

/* From the items of an interface, NULL where it has none. Return 0, or -1 with an error
 * set. */
static int
device_end_of_items(const char *role, PyObject *shape, PyObject *typestr,
                    PyObject *data, PyObject *strides, PyObject *mask, int writable,
                    DeviceEnd *end)
{
    if (shape == NULL || typestr == NULL || data == NULL || !PyTuple_Check(data) ||
        PyTuple_GET_SIZE(data) != 2) {
        PyErr_Format(
            PyExc_TypeError,
            "%s: __cuda_array_interface__ has no valid shape, typestr and data", role);
        return -1;
    }
    if (mask != NULL && mask != Py_None) {
        PyErr_Format(PyExc_TypeError, "%s is a masked array", role);
        return -1;
    }
    size_t itemsize;
    unsigned long long address;
    int read_only = PyObject_IsTrue(PyTuple_GET_ITEM(data, 1));
    if (read_only < 0 || measure_typestr(role, typestr, &itemsize) < 0 ||
        measure_interface(role, shape, strides == Py_None ? NULL : strides, itemsize,
                          &end->nbytes) < 0 ||
        address_argument(role, PyTuple_GET_ITEM(data, 0), &address) < 0) {
        return -1;
    }
    if (writable && read_only) {
        raise_read_only(role);
        return -1;
    }
    end->ptr = (CUdeviceptr)address;
    end->size_is_known = 1;
    return 0;
}

/* From object.__cuda_array_interface__. Return 0, or -1 with an error set. */
static int
device_end_of_interface(const char *role, PyObject *interface, int writable,
                        DeviceEnd *end)
{
    if (!PyDict_Check(interface)) {
        PyErr_Format(PyExc_TypeError, "%s: __cuda_array_interface__ is no dict", role);
        return -1;
    }
    enum { SHAPE, TYPESTR, DATA, STRIDES, MASK, COUNT };
    static const char *const names[] = {"shape",   "typestr", "data",
                                        "strides", "mask",    NULL};
    PyObject *items[COUNT];
    int result = dict_items(interface, names, items);
    if (result == 0) {
        result = device_end_of_items(role, items[SHAPE], items[TYPESTR], items[DATA],
                                     items[STRIDES], items[MASK], writable, end);
    }
    for (int i = 0; i < COUNT; i++) {
        Py_XDECREF(items[i]);
    }
    return result;
}

/* From an int, or an object that stands for an address (PyCUDA's DeviceAllocation).
 * Floats have an int() as well, and are none. Return 0, or -1 with an error set. */
static int
device_end_of_address(const char *role, PyObject *object, DeviceEnd *end)
{
    PyNumberMethods *number = Py_TYPE(object)->tp_as_number;
    int is_address = PyIndex_Check(object) ||
                     (number != NULL && number->nb_int != NULL &&
                      !PyFloat_Check(object) && !PyArray_CheckScalar(object));
    if (!is_address || PyArray_Check(object) || PyBool_Check(object)) {
        PyErr_Format(PyExc_TypeError,
                     "%s must be memory on the device (DeviceMemory, an object with "
                     "__cuda_array_interface__, or an address), not %s",
                     role, Py_TYPE(object)->tp_name);
        return -1;
    }
    PyObject *integer = PyNumber_Long(object);
    unsigned long long address;
    if (integer == NULL || address_argument(role, integer, &address) < 0) {
        Py_XDECREF(integer);
        return -1;
    }
    Py_DECREF(integer);
    end->ptr = (CUdeviceptr)address;
    return 0;
}

/* From a DeviceArray. Return 0, or -1 with an error set. */
static int
device_end_of_array(const char *role, const ArrayObject *array, DeviceEnd *end)
{
    if (!array_is_contiguous(array)) {
        PyErr_Format(PyExc_ValueError, "%s is not C-contiguous: %R", role, array);
        return -1;
    }
    end->ptr = array->ptr;
    end->nbytes = (size_t)array->size * 4;
    end->size_is_known = 1;
    end->context = array->engine->context;
    end->stream = array->engine->stream;
    return 0;
}

/* All but DeviceMemory. */
int
device_end_resolve_slowly(ModuleState *state, const char *role, PyObject *object,
                          int writable, DeviceEnd *end)
{
    end->hold = Py_NewRef(object);
    if (Py_IS_TYPE(object, state->DeviceArray_type)) {
        return device_end_of_array(role, (ArrayObject *)object, end);
    }
    if (!PyLong_CheckExact(object) && !PyArray_Check(object)) {
        PyObject *interface = PyObject_GetAttr(object, state->str_cuda_array_interface);
        if (interface != NULL) {
            int result = device_end_of_interface(role, interface, writable, end);
            Py_DECREF(interface);
            return result;
        }
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) {
            return -1;
        }
        PyErr_Clear();
    }
    return device_end_of_address(role, object, end);
}

int
device_check_pointer(ModuleState *state, const char *role, CUdeviceptr ptr,
                     ContextObject *context)
{
    int expected, ordinal = -1;
    unsigned int type = 0, is_managed = 0;
    const char *call = "cuPointerGetAttribute";
    CUresult status;
    Scope scope;
    if (ptr == 0 || atomic_load_explicit(&driver_devices, memory_order_relaxed) < 2) {
        return 0;
    }
    if (context_device(state, context, &expected) < 0) {
        return -1;
    }
    IN_CONTEXT(
        scope, context->handle, status,
        driver.PointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ptr));
    if (status == CUDA_ERROR_INVALID_VALUE || ordinal == expected) {
        return 0; /* who uses what the driver does not know finds that out */
    }
    if (status == CUDA_SUCCESS) {
        IN_CONTEXT(
            scope, context->handle, status,
            driver.PointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ptr));
    }
    if (status == CUDA_SUCCESS) {
        IN_CONTEXT(scope, context->handle, status,
                   driver.PointerGetAttribute(&is_managed,
                                              CU_POINTER_ATTRIBUTE_IS_MANAGED, ptr));
    }
    if (status != CUDA_SUCCESS) {
        raise_cuda(state, scope_call(&scope, call), status, NULL);
        return -1;
    }
    if (ordinal < 0 || type != CU_MEMORYTYPE_DEVICE || is_managed) {
        return 0; /* for every device */
    }
    PyErr_Format(PyExc_ValueError,
                 "%s: the memory at %p is of device %d, expected memory of %R", role,
                 (void *)(uintptr_t)ptr, ordinal, context);
    return -1;
}

/* Return 0 and the bytes that follow the address, or -1 with an error set. */
static int
ask_size(ModuleState *state, const char *role, DeviceEnd *end, ContextObject *context)
{
    CUdeviceptr base = 0;
    size_t size = 0;
    CUresult status;
    Scope scope;
    IN_CONTEXT(scope, context->handle, status,
               driver.MemGetAddressRange(&base, &size, end->ptr));
    if (status == CUDA_ERROR_NOT_FOUND || status == CUDA_ERROR_INVALID_VALUE) {
        raise_cuda(state, "cuMemGetAddressRange", status,
                   "%s: the driver knows no device memory at %p", role,
                   (void *)(uintptr_t)end->ptr);
        return -1;
    }
    if (status != CUDA_SUCCESS) {
        raise_cuda(state, scope_call(&scope, "cuMemGetAddressRange"), status, NULL);
        return -1;
    }
    end->nbytes = size - (size_t)(end->ptr - base);
    end->size_is_known = 1;
    return 0;
}

int
device_end_ask(ModuleState *state, const char *role, DeviceEnd *end,
               ContextObject *context)
{
    if (device_check_pointer(state, role, end->ptr, context) < 0) {
        return -1;
    }
    return end->size_is_known ? 0 : ask_size(state, role, end, context);
}

/* ---- Both ---- */

ContextObject *
common_context_slowly(ModuleState *state, ContextObject *first, ContextObject *second,
                      const StreamRef *stream)
{
    ContextObject *known[] = {first, second, stream == NULL ? NULL : stream->context};
    ContextObject *common = NULL;
    for (int i = 0; i < 3; i++) {
        if (known[i] == NULL) {
            continue;
        }
        if (common == NULL) {
            common = known[i];
        }
        else if (common->handle != known[i]->handle) {
            contexts_learn_devices(state, common, known[i]);
            PyErr_Format(PyExc_ValueError, "%s of different contexts: %R and %R",
                         i == 2 ? "memory and stream are" : "dest and src are", common,
                         known[i]);
            return NULL;
        }
    }
    if (common == NULL) {
        return context_current(state);
    }
    if (driver_ready(state) < 0) {
        return NULL;
    }
    return (ContextObject *)Py_NewRef((PyObject *)common);
}

void
raise_does_not_fit(const char *role, size_t nbytes, size_t needed)
{
    PyErr_Format(PyExc_ValueError, "%s has %zu bytes, the copy needs %zu", role, nbytes,
                 needed);
}
