/* Memory shared with other libraries: the CUDA array interface (version 3), and DLPack
 * (https://dmlc.github.io/dlpack/latest/c_api.html), both ways and without a copy.
 *
 * Whoever takes an array waits, on its stream, for what this handler has queued, and
 * the other way round. A block that was exported goes back to the driver, not to the
 * pool, since its taker may have work queued on it that the pool knows nothing of. */
#include "array.h"

/* ---- DLPack's structures, of ABI 0 (unversioned capsules) ---- */

typedef struct {
    int32_t device_type;
    int32_t device_id;
} DLDevice;

typedef struct {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
} DLDataType;

typedef struct {
    void *data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor {
    DLTensor tensor;
    void *manager;
    void (*deleter)(struct DLManagedTensor *);
} DLManagedTensor;

enum { DL_CUDA = 2, DL_CUDA_MANAGED = 13, DL_INT = 0, DL_FLOAT = 2 };

typedef struct {
    DLManagedTensor managed; /* first: what the taker gets */
    int64_t shape[MAX_DIMS], strides[MAX_DIMS];
} Export;

/* ---- Streams ---- */

/* Make `waiter` wait for all that `worker` has queued. Return 0, or -1. */
static int
order(EngineObject *engine, CUstream worker, CUstream waiter)
{
    CUevent event = NULL;
    const char *call = "cuEventCreate";
    CUresult status;
    Scope scope;
    if (guard_is_closed(&engine->stream->guard)) {
        raise_closed("Stream");
        return -1;
    }
    status = scope_enter(&scope, engine->context->handle);
    if (status == CUDA_SUCCESS) {
        status = driver.EventCreate(&event, CU_EVENT_DISABLE_TIMING);
        if (status == CUDA_SUCCESS) {
            call = "cuEventRecord";
            status = driver.EventRecord(event, worker);
            if (status == CUDA_SUCCESS) {
                call = "cuStreamWaitEvent";
                status = driver.StreamWaitEvent(waiter, event, 0);
            }
            (void)driver.EventDestroy(event); /* the wait outlives it */
        }
        scope_leave(&scope);
    }
    if (status != CUDA_SUCCESS) {
        raise_cuda(engine->state, scope_call(&scope, call), status,
                   "ordering the streams of an exchanged array");
        return -1;
    }
    return 0;
}

/* A stream as both protocols write it: None or 1 the legacy default stream, 2 the
 * per-thread one, else a handle. Return 0, or -1 with an error set. */
static int
stream_number(PyObject *object, CUstream *stream)
{
    if (object == NULL || object == Py_None) {
        *stream = CU_STREAM_LEGACY;
        return 0;
    }
    unsigned long long value;
    if (address_argument("stream", object, &value) < 0) {
        return -1;
    }
    *stream = value <= 1   ? CU_STREAM_LEGACY
              : value == 2 ? CU_STREAM_PER_THREAD
                           : (CUstream)(uintptr_t)value;
    return 0;
}

/* ---- The CUDA array interface ---- */

PyObject *
Array_interface(PyObject *op, void *Py_UNUSED(closure))
{
    ArrayObject *self = (ArrayObject *)op;
    PyObject *shape = PyObject_GetAttrString(op, "shape");
    PyObject *strides = array_is_contiguous(self)
                            ? Py_NewRef(Py_None)
                            : PyObject_GetAttrString(op, "strides");
    if (shape == NULL || strides == NULL) {
        Py_XDECREF(shape);
        Py_XDECREF(strides);
        return NULL;
    }
    array_root(self)->is_exported = 1;
    return Py_BuildValue("{s:N,s:s,s:(KO),s:N,s:i,s:K}", "shape", shape, "typestr",
                         self->is_int ? "<i4" : "<f4", "data",
                         (unsigned long long)self->ptr, Py_False, "strides", strides,
                         "version", 3, "stream",
                         (unsigned long long)(uintptr_t)self->engine->stream->handle);
}

/* ---- DLPack, out ---- */

static void
delete_export(DLManagedTensor *managed)
{
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF((PyObject *)managed->manager);
    PyMem_Free(managed);
    PyGILState_Release(gil);
}

static void
delete_capsule(PyObject *capsule)
{
    /* A taker renames the capsule and calls the deleter itself. */
    if (PyCapsule_IsValid(capsule, "dltensor")) {
        DLManagedTensor *managed = PyCapsule_GetPointer(capsule, "dltensor");
        managed->deleter(managed);
    }
}

PyObject *
Array_dlpack(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"stream", "max_version", "dl_device", "copy",
                                        NULL};
    static const Signature signature = {"__dlpack__", names, 0, 0};
    ArrayObject *self = (ArrayObject *)op;
    EngineObject *engine = self->engine;
    PyObject *given[4] = {NULL};
    CUstream stream;
    if (unpack(&signature, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    if (given[3] == Py_True) {
        PyErr_SetString(
            PyExc_BufferError,
            "__dlpack__: use copy() for a copy, the memory itself is given");
        return NULL;
    }
    if (given[2] != NULL && given[2] != Py_None) {
        PyObject *own = Array_dlpack_device(op, NULL);
        int same = own == NULL ? -1 : PyObject_RichCompareBool(own, given[2], Py_EQ);
        if (same == 0) {
            PyErr_Format(PyExc_BufferError,
                         "__dlpack__: the array lies on device %R, not on %R", own,
                         given[2]);
        }
        Py_XDECREF(own);
        if (same != 1) {
            return NULL;
        }
    }
    int no_order = 0; /* the taker asks for no synchronisation with -1 */
    if (given[0] != NULL && given[0] != Py_None) {
        long value = PyLong_AsLong(given[0]);
        no_order = value == -1 && !PyErr_Occurred();
        PyErr_Clear();
    }
    if (driver_ready(engine->state) < 0 ||
        (!no_order && (stream_number(given[0], &stream) < 0 ||
                       order(engine, engine->stream->handle, stream) < 0))) {
        return NULL;
    }
    Export *export = PyMem_Calloc(1, sizeof(Export));
    if (export == NULL) {
        return PyErr_NoMemory();
    }
    for (int i = 0; i < self->ndim; i++) {
        export->shape[i] = self->shape[i];
        export->strides[i] = self->strides[i];
    }
    export->managed = (DLManagedTensor){
        .tensor = {.data = (void *)(uintptr_t)self->ptr,
                   .device = {DL_CUDA, (int32_t)engine->context->device},
                   .ndim = self->ndim,
                   .dtype = {self->is_int ? DL_INT : DL_FLOAT, 32, 1},
                   .shape = export->shape,
                   .strides = export->strides},
        .manager = op,
        .deleter = delete_export,
    };
    PyObject *capsule = PyCapsule_New(&export->managed, "dltensor", delete_capsule);
    if (capsule == NULL) {
        PyMem_Free(export);
        return NULL;
    }
    Py_INCREF(op);
    array_root(self)->is_exported = 1;
    return capsule;
}

PyObject *
Array_dlpack_device(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    return Py_BuildValue("(ii)", DL_CUDA,
                         (int)((ArrayObject *)op)->engine->context->device);
}

/* ---- In ---- */

/* Make an array over foreign memory. `base` is stolen, on failure too. Strides are in
 * elements, or NULL for contiguous memory. */
static ArrayObject *
foreign_array(EngineObject *engine, PyObject *base, CUdeviceptr ptr, int ndim,
              const Py_ssize_t *shape, const Py_ssize_t *strides, int is_int)
{
    ArrayObject *array = array_bare(engine, ndim, shape, is_int);
    if (array == NULL) {
        Py_DECREF(base);
        return NULL;
    }
    if (ptr == 0 && array->size > 0) {
        PyErr_SetString(PyExc_ValueError, "there is no device memory at address 0");
        Py_DECREF(base);
        Py_DECREF(array);
        return NULL;
    }
    array->base = base;
    array->ptr = ptr;
    for (int i = 0; i < ndim && strides != NULL; i++) {
        if (strides[i] < 0) {
            PyErr_SetString(PyExc_ValueError,
                            "arrays with negative strides cannot be taken over");
            Py_DECREF(array);
            return NULL;
        }
        array->strides[i] = strides[i];
    }
    return array;
}

/* wrap(owner, address, shape): for who makes arrays over device memory of his own. */
static PyObject *
wrap(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"owner", "address", "shape", NULL};
    static const Signature signature = {"wrap", names, 3, 3};
    PyObject *given[3] = {NULL};
    Py_ssize_t shape[MAX_DIMS];
    unsigned long long address;
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0 ||
        address_argument("address", given[1], &address) < 0) {
        return NULL;
    }
    int ndim = shape_argument("wrap", given[2], shape);
    if (ndim < 0) {
        return NULL;
    }
    if (driver_ready(engine->state) < 0 ||
        device_check_pointer(engine->state, "wrap", (CUdeviceptr)address,
                             engine->context) < 0) {
        return NULL;
    }
    return (PyObject *)foreign_array(engine, Py_NewRef(given[0]), address, ndim, shape,
                                     NULL, 0);
}

/* Read ints from a sequence into values, divided by `unit`. Return 0, or -1. */
static int
read_sizes(PyObject *sequence, int ndim, Py_ssize_t unit, Py_ssize_t *values)
{
    for (int i = 0; i < ndim; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        int status = item == NULL ? -1 : axis_size("as_array", item, &values[i]);
        Py_XDECREF(item);
        if (status < 0) {
            return -1;
        }
        if (values[i] % unit != 0) {
            PyErr_SetString(PyExc_ValueError,
                            "as_array: strides that are no multiple of 4 bytes");
            return -1;
        }
        values[i] /= unit;
    }
    return 0;
}

static PyObject *
as_array(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"obj", NULL};
    static const Signature signature = {"as_array", names, 1, 1};
    enum { TYPESTR, SHAPE, DATA, STRIDES, STREAM, MASK, COUNT };
    static const char *const keys[] = {"typestr", "shape", "data", "strides",
                                       "stream",  "mask",  NULL};
    PyObject *given = NULL, *described = NULL, *items[COUNT] = {NULL};
    ArrayObject *array = NULL;
    Py_ssize_t shape[MAX_DIMS], strides[MAX_DIMS];
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, &given) < 0) {
        return NULL;
    }
    described = PyObject_GetAttr(given, engine->state->str_cuda_array_interface);
    if (described == NULL && !PyErr_ExceptionMatches(PyExc_AttributeError)) {
        goto done;
    }
    if (described == NULL || !PyDict_Check(described)) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError,
                     "as_array: expected an object with __cuda_array_interface__, got "
                     "%.100s",
                     Py_TYPE(given)->tp_name);
        goto done;
    }
    if (dict_items(described, keys, items) < 0) {
        goto done;
    }
    PyObject *typestr = items[TYPESTR], *sizes = items[SHAPE], *data = items[DATA];
    PyObject *steps = items[STRIDES], *stream = items[STREAM], *mask = items[MASK];
    if (typestr == NULL || !PyUnicode_Check(typestr) || sizes == NULL ||
        !PyTuple_Check(sizes) || data == NULL || !PyTuple_Check(data) ||
        PyTuple_GET_SIZE(data) != 2 || (mask != NULL && mask != Py_None)) {
        PyErr_SetString(PyExc_ValueError,
                        "as_array: __cuda_array_interface__ needs typestr, shape and "
                        "data, and no mask");
        goto done;
    }
    int is_int = PyUnicode_CompareWithASCIIString(typestr, "<i4") == 0;
    if (!is_int && PyUnicode_CompareWithASCIIString(typestr, "<f4") != 0) {
        PyErr_Format(PyExc_TypeError, "as_array: expected '<f4' or '<i4', got %R",
                     typestr);
        goto done;
    }
    Py_ssize_t ndim = PyTuple_GET_SIZE(sizes);
    int has_steps = steps != NULL && steps != Py_None;
    unsigned long long address;
    CUstream other;
    if (ndim > MAX_DIMS || (has_steps && PyObject_Length(steps) != ndim)) {
        PyErr_Format(
            PyExc_ValueError,
            "as_array: %zd axes, at most %d can be taken, with as many strides", ndim,
            MAX_DIMS);
        goto done;
    }
    if (read_sizes(sizes, (int)ndim, 1, shape) < 0 ||
        (has_steps && read_sizes(steps, (int)ndim, 4, strides) < 0) ||
        address_argument("as_array: data", PyTuple_GET_ITEM(data, 0), &address) < 0 ||
        driver_ready(engine->state) < 0 ||
        device_check_pointer(engine->state, "as_array", (CUdeviceptr)address,
                             engine->context) < 0 ||
        (stream != NULL && stream != Py_None &&
         (stream_number(stream, &other) < 0 ||
          order(engine, other, engine->stream->handle) < 0))) {
        goto done;
    }
    array = foreign_array(engine, Py_NewRef(given), address, (int)ndim, shape,
                          has_steps ? strides : NULL, is_int);
    if (array != NULL) {
        array->is_foreign = 1;
    }
done:
    for (int i = 0; i < COUNT; i++) {
        Py_XDECREF(items[i]);
    }
    Py_XDECREF(described);
    return (PyObject *)array;
}

static void
delete_taken(PyObject *holder)
{
    DLManagedTensor *managed = PyCapsule_GetPointer(holder, "brainstorm_dbuf.dltensor");
    if (managed != NULL && managed->deleter != NULL) {
        managed->deleter(managed);
    }
}

/* Return 0 if a DLPack device is the engine's, else -1 with an error set. */
static int
check_device(EngineObject *engine, int type, int ordinal)
{
    if ((type == DL_CUDA || type == DL_CUDA_MANAGED) &&
        ordinal == (int)engine->context->device) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError,
                 "from_dlpack: the array lies on device (%d, %d), this handler is on "
                 "(%d, %d)",
                 type, ordinal, DL_CUDA, (int)engine->context->device);
    return -1;
}

/* What __dlpack_device__() gave. Return 0, or -1 with an error set. */
static int
read_device(PyObject *device, int *type, int *ordinal)
{
    if (!PyTuple_Check(device) || PyTuple_GET_SIZE(device) != 2) {
        PyErr_Format(PyExc_TypeError,
                     "from_dlpack: __dlpack_device__() must return (type, ordinal), "
                     "got %.100s",
                     Py_TYPE(device)->tp_name);
        return -1;
    }
    const char *what = "from_dlpack: the device's type";
    if (int_argument(what, PyTuple_GET_ITEM(device, 0), type) < 0) {
        return -1;
    }
    what = "from_dlpack: the device's ordinal";
    return int_argument(what, PyTuple_GET_ITEM(device, 1), ordinal);
}

static PyObject *
from_dlpack(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"obj", NULL};
    static const Signature signature = {"from_dlpack", names, 1, 1};
    PyObject *given = NULL, *capsule = NULL;
    ArrayObject *array = NULL;
    Py_ssize_t shape[MAX_DIMS], strides[MAX_DIMS];
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, &given) < 0) {
        return NULL;
    }
    PyObject *method = PyObject_GetAttrString(given, "__dlpack__");
    PyObject *device =
        method == NULL ? NULL : PyObject_CallMethod(given, "__dlpack_device__", NULL);
    if (device == NULL && !PyErr_ExceptionMatches(PyExc_AttributeError)) {
        Py_XDECREF(method);
        return NULL;
    }
    if (device == NULL) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError,
                     "from_dlpack: expected an object with __dlpack__ and "
                     "__dlpack_device__, got %.100s",
                     Py_TYPE(given)->tp_name);
        Py_XDECREF(method);
        return NULL;
    }
    /* Asked first: NumPy's arrays take no stream. */
    int type = 0, ordinal = 0, is_read = read_device(device, &type, &ordinal) == 0;
    Py_DECREF(device);
    if (!is_read || check_device(engine, type, ordinal) < 0) {
        Py_DECREF(method);
        return NULL;
    }
    PyObject *empty = PyTuple_New(0);
    PyObject *options = Py_BuildValue(
        "{s:K}", "stream", (unsigned long long)(uintptr_t)engine->stream->handle);
    if (empty != NULL && options != NULL) {
        capsule = PyObject_Call(method, empty, options);
    }
    Py_DECREF(method);
    Py_XDECREF(empty);
    Py_XDECREF(options);
    if (capsule == NULL) {
        return NULL;
    }
    if (!PyCapsule_IsValid(capsule, "dltensor")) {
        PyErr_SetString(PyExc_ValueError,
                        "from_dlpack: __dlpack__ gave no unused 'dltensor' capsule");
        goto done;
    }
    DLManagedTensor *managed = PyCapsule_GetPointer(capsule, "dltensor");
    DLTensor *tensor = &managed->tensor;
    int is_int = tensor->dtype.code == DL_INT;
    if (check_device(engine, tensor->device.device_type, tensor->device.device_id) <
        0) {
        goto done;
    }
    if ((!is_int && tensor->dtype.code != DL_FLOAT) || tensor->dtype.bits != 32 ||
        tensor->dtype.lanes != 1) {
        PyErr_Format(PyExc_TypeError,
                     "from_dlpack: expected float32 or int32, got type code %d with %d "
                     "bits",
                     (int)tensor->dtype.code, (int)tensor->dtype.bits);
        goto done;
    }
    if (tensor->ndim < 0 || tensor->ndim > MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "from_dlpack: %d axes, at most %d can be taken",
                     (int)tensor->ndim, MAX_DIMS);
        goto done;
    }
    for (int i = 0; i < tensor->ndim; i++) {
        shape[i] = (Py_ssize_t)tensor->shape[i];
        strides[i] = tensor->strides == NULL ? 0 : (Py_ssize_t)tensor->strides[i];
    }
    PyObject *holder = PyCapsule_New(managed, "brainstorm_dbuf.dltensor", delete_taken);
    if (holder == NULL) {
        goto done;
    }
    (void)PyCapsule_SetName(capsule, "used_dltensor"); /* its deleter is ours now */
    array = foreign_array(
        engine, holder, (CUdeviceptr)(uintptr_t)tensor->data + tensor->byte_offset,
        tensor->ndim, shape, tensor->strides == NULL ? NULL : strides, is_int);
    if (array != NULL) {
        array->is_foreign = 1;
    }
done:
    Py_DECREF(capsule);
    return (PyObject *)array;
}

PyMethodDef exchange_operations[] = {
    {"as_array", FASTCALL(as_array),
     PyDoc_STR("as_array($self, obj)\n--\n\n"
               "Return a DeviceArray over the memory of an object with "
               "__cuda_array_interface__.\n\n"
               "float32 or int32, without a copy; the compute stream waits for the "
               "object's\nstream. Raises TypeError or ValueError for what cannot be "
               "taken.")},
    {"from_dlpack", FASTCALL(from_dlpack),
     PyDoc_STR("from_dlpack($self, obj)\n--\n\n"
               "Return a DeviceArray over the memory of an object with __dlpack__.\n\n"
               "float32 or int32 on this handler's device, without a copy. Raises "
               "TypeError or\nValueError for what cannot be taken.")},
    {"wrap", FASTCALL(wrap),
     PyDoc_STR("wrap($self, owner, address, shape)\n--\n\n"
               "Return a contiguous float32 DeviceArray at a device address.\n\n"
               "It keeps `owner` alive; that the memory is large enough is not "
               "checked.")},
    {NULL, NULL, 0, NULL},
};
