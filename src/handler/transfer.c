/* Elements from the device to NumPy and back. Both wait for the compute stream. */
#include "array.h"

PyObject *
array_to_numpy(ArrayObject *self, const char *operation)
{
    npy_intp shape[MAX_DIMS];
    for (int i = 0; i < self->ndim; i++) {
        shape[i] = self->shape[i];
    }
    PyObject *result = PyArray_SimpleNewFromDescr(self->ndim, shape, array_dtype(self));
    if (result == NULL || self->size == 0) {
        return result;
    }
    EngineObject *engine = self->engine;
    void *data = PyArray_DATA((PyArrayObject *)result);
    size_t nbytes = (size_t)self->size * 4;
    Op op;
    if (op_init(&op, engine, operation) < 0) {
        goto error;
    }
    int is_small = 0;
    Packed packed;
    if (packed_init(&packed, &op, self) == 0) {
        /* A few bytes, such as a loss, arrive sooner in page-locked memory, if no other
         * thread is at it. */
        is_small = nbytes <= SCRATCH_BYTES && !engine->scratch_in_use;
        engine->scratch_in_use |= is_small;
        op_begin(&op, 1);
        packed_load(&packed, &op);
        op_get(&op, is_small ? engine->scratch : data, packed.ptr, nbytes);
        if (is_small && op.status == CUDA_SUCCESS) {
            memcpy(data, engine->scratch, nbytes);
        }
    }
    PyObject *done = op_end(&op);
    if (is_small) {
        engine->scratch_in_use = 0;
    }
    if (done == NULL) {
        goto error;
    }
    Py_DECREF(done);
    if (engine_check_fault(engine) < 0) {
        goto error;
    }
    return result;

error:
    Py_DECREF(result);
    return NULL;
}

int
array_from_numpy(ArrayObject *self, const char *operation, const char *name,
                 PyObject *values)
{
    if (!PyArray_Check(values)) {
        PyErr_Format(PyExc_TypeError, "%s: %s must be a NumPy array, got %.100s",
                     operation, name, Py_TYPE(values)->tp_name);
        return -1;
    }
    PyArrayObject *given = (PyArrayObject *)values;
    int equal = PyArray_NDIM(given) == self->ndim;
    for (int i = 0; equal && i < self->ndim; i++) {
        equal = PyArray_DIM(given, i) == self->shape[i];
    }
    if (!equal) {
        PyObject *shape = PyObject_GetAttrString(values, "shape");
        PyObject *own = shape_of(self);
        if (shape != NULL && own != NULL) {
            PyErr_Format(PyExc_ValueError, "%s: %s has shape %R, the array has %R",
                         operation, name, shape, own);
        }
        Py_XDECREF(shape);
        Py_XDECREF(own);
        return -1;
    }
    char kind = PyArray_DESCR(given)->kind;
    if (strchr("biuf", kind) == NULL) {
        PyErr_Format(PyExc_TypeError, "%s: %s has dtype %R, which is not a real number",
                     operation, name, (PyObject *)PyArray_DESCR(given));
        return -1;
    }
    PyArrayObject *ready = (PyArrayObject *)PyArray_FromArray(
        given, array_dtype(self),
        NPY_ARRAY_CARRAY_RO | NPY_ARRAY_FORCECAST | NPY_ARRAY_ENSUREARRAY);
    if (ready == NULL) {
        return -1;
    }
    RegisteredMemoryObject *registered = pagelocked_enter(self->engine->state, ready);
    PyObject *done = NULL;
    Op op;
    if (self->size == 0) {
        done = Py_NewRef(Py_None);
    }
    else if (op_init(&op, self->engine, operation) == 0) {
        Packed packed;
        if (packed_init(&packed, &op, self) == 0) {
            op_begin(&op, 1);
            op_set(&op, packed.ptr, PyArray_DATA(ready), (size_t)self->size * 4);
            packed_store(&packed, &op);
        }
        done = op_end(&op);
    }
    pagelocked_leave(registered);
    Py_DECREF(ready);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

PyObject *
Array_get(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    return array_to_numpy((ArrayObject *)op, "DeviceArray.get");
}

PyObject *
Array_set(PyObject *op, PyObject *values)
{
    if (array_from_numpy((ArrayObject *)op, "DeviceArray.set", "values", values) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

/* Queue dest = source, of one shape. Return a new None, or NULL with an error set. */
static PyObject *
copy_elements(ArrayObject *dest, const ArrayObject *source, const char *operation)
{
    Op op;
    if (op_init(&op, dest->engine, operation) < 0) {
        return NULL;
    }
    op_begin(&op, 0);
    op_map(&op, MAP_copy, dest, source, NULL, 0, 0);
    return op_end(&op);
}

PyObject *
Array_copy(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    ArrayObject *self = (ArrayObject *)op;
    ArrayObject *copy = array_new(self->engine, self->ndim, self->shape, self->is_int);
    if (copy != NULL) {
        PyObject *done = copy_elements(copy, self, "DeviceArray.copy");
        if (done == NULL) {
            Py_CLEAR(copy);
        }
        Py_XDECREF(done);
    }
    return (PyObject *)copy;
}

PyObject *
Array_array(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"dtype", "copy", NULL};
    static const Signature signature = {"__array__", names, 0, 2};
    PyObject *given[2] = {NULL, NULL};
    PyArray_Descr *dtype = NULL;
    if (unpack(&signature, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    if (given[1] == Py_False) {
        PyErr_SetString(PyExc_ValueError,
                        "a DeviceArray cannot be seen as a NumPy array without a copy");
        return NULL;
    }
    if (given[0] != NULL && given[0] != Py_None &&
        !PyArray_DescrConverter(given[0], &dtype)) {
        return NULL;
    }
    PyObject *result = array_to_numpy((ArrayObject *)op, "DeviceArray.__array__");
    if (result != NULL && dtype != NULL) {
        PyObject *cast = PyArray_CastToType((PyArrayObject *)result, dtype, 0);
        dtype = NULL; /* stolen */
        Py_DECREF(result);
        result = cast;
    }
    Py_XDECREF(dtype);
    return result;
}

int
Array_assign(PyObject *op, PyObject *key, PyObject *value)
{
    EngineObject *engine = ((ArrayObject *)op)->engine;
    if (value == NULL) {
        PyErr_SetString(PyExc_TypeError, "elements of a DeviceArray cannot be deleted");
        return -1;
    }
    ArrayObject *part = (ArrayObject *)PyObject_GetItem(op, key);
    if (part == NULL) {
        return -1;
    }
    int result = -1;
    PyObject *done = NULL;
    if (PyArray_Check(value)) {
        result = array_from_numpy(part, "DeviceArray", "the value", value);
    }
    else if (Py_IS_TYPE(value, Py_TYPE(op))) {
        ArrayObject *source = (ArrayObject *)value;
        if (source->engine != engine) {
            PyErr_Format(PyExc_ValueError,
                         "DeviceArray: the value is an array on device %d, the array "
                         "is on device %d",
                         (int)source->engine->context->device,
                         (int)engine->context->device);
        }
        else if (source->is_int != part->is_int) {
            PyErr_Format(PyExc_ValueError,
                         "DeviceArray: the value has dtype %s, the array has %s",
                         source->is_int ? "int32" : "float32",
                         part->is_int ? "int32" : "float32");
        }
        else if (map_check("DeviceArray", "the array", part, "the value", source) ==
                 0) {
            done = copy_elements(part, source, "DeviceArray");
        }
    }
    else if (part->is_int) {
        PyErr_Format(PyExc_TypeError,
                     "DeviceArray: int32 elements are set from arrays, got %.100s",
                     Py_TYPE(value)->tp_name);
    }
    else {
        double number;
        Op op_fill;
        if (number_argument("DeviceArray", "the value", value, &number) == 0 &&
            op_init(&op_fill, engine, "DeviceArray") == 0) {
            op_begin(&op_fill, 0);
            op_map(&op_fill, MAP_fill, part, NULL, NULL, (float)number, 0);
            done = op_end(&op_fill);
        }
    }
    if (done != NULL) {
        Py_DECREF(done);
        result = 0;
    }
    Py_DECREF(part);
    return result;
}
