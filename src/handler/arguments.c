/* Arguments of operations, and the errors that name them. */
#include "handler.h"

#include <stdarg.h>

ArrayObject *
array_argument(EngineObject *engine, const char *operation, const char *name,
               PyObject *object)
{
    if (!Py_IS_TYPE(object, engine->state->DeviceArray_type)) {
        PyErr_Format(PyExc_TypeError, "%s: %s must be a DeviceArray, got %.100s",
                     operation, name, Py_TYPE(object)->tp_name);
        return NULL;
    }
    ArrayObject *array = (ArrayObject *)object;
    if (array->engine != engine) {
        int ordinal = array->engine->context->device;
        PyErr_Format(PyExc_ValueError,
                     "%s: %s is an array on device %d, this handler is on device %d",
                     operation, name, ordinal, (int)engine->context->device);
        return NULL;
    }
    if (array->is_int) {
        PyErr_Format(PyExc_TypeError, "%s: %s must have dtype float32, has int32",
                     operation, name);
        return NULL;
    }
    return array;
}

int
number_argument(const char *operation, const char *name, PyObject *object,
                double *value)
{
    *value = PyFloat_AsDouble(object);
    if (*value != -1 || !PyErr_Occurred()) {
        return 0;
    }
    /* What the object's own code has raised is left as it is. */
    if (PyErr_ExceptionMatches(PyExc_TypeError)) {
        PyErr_Format(PyExc_TypeError, "%s: %s must be a number, got %.100s", operation,
                     name, Py_TYPE(object)->tp_name);
    }
    else if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Format(PyExc_OverflowError, "%s: %s is too large for a float", operation,
                     name);
    }
    return -1;
}

int
activation_argument(const char *operation, PyObject *object)
{
    static const char *const names[] = {
#define X(name) #name,
        ACTIVATIONS(X)
#undef X
    };
    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: activation must be a str, got %.100s",
                     operation, Py_TYPE(object)->tp_name);
        return -1;
    }
    for (int i = 0; i < ACTIVATION_COUNT; i++) {
        if (PyUnicode_CompareWithASCIIString(object, names[i]) == 0) {
            return i;
        }
    }
    PyErr_Format(PyExc_ValueError, "%s: unknown activation %R", operation, object);
    return -1;
}

PyObject *
shape_of(const ArrayObject *array)
{
    PyObject *shape = PyTuple_New(array->ndim);
    for (int i = 0; shape != NULL && i < array->ndim; i++) {
        PyObject *size = PyLong_FromSsize_t(array->shape[i]);
        if (size == NULL) {
            Py_CLEAR(shape);
        }
        else {
            PyTuple_SET_ITEM(shape, i, size);
        }
    }
    return shape;
}

PyObject *
raise_shape(const char *operation, const char *name, const ArrayObject *array,
            const char *format, ...)
{
    va_list values;
    va_start(values, format);
    PyObject *expected = PyUnicode_FromFormatV(format, values);
    va_end(values);
    PyObject *shape = shape_of(array);
    if (expected != NULL && shape != NULL) {
        PyErr_Format(PyExc_ValueError, "%s: %s has shape %R, expected %U", operation,
                     name, shape, expected);
    }
    Py_XDECREF(expected);
    Py_XDECREF(shape);
    return NULL;
}

int
check_shape(const char *operation, const char *name, const ArrayObject *array, int ndim,
            const Py_ssize_t *shape)
{
    int equal = array->ndim == ndim;
    for (int i = 0; equal && i < ndim; i++) {
        equal = array->shape[i] == shape[i];
    }
    if (equal) {
        return 0;
    }
    ArrayObject wanted = {.ndim = ndim};
    memcpy(wanted.shape, shape, (size_t)ndim * sizeof(*shape));
    PyObject *expected = shape_of(&wanted);
    if (expected != NULL) {
        raise_shape(operation, name, array, "%R", expected);
        Py_DECREF(expected);
    }
    return -1;
}

/* First byte, and the byte after the last, of an array that is not empty. */
static void
bounds(const ArrayObject *array, CUdeviceptr *first, CUdeviceptr *end)
{
    Py_ssize_t last = 0;
    for (int i = 0; i < array->ndim; i++) {
        last += (array->shape[i] - 1) * array->strides[i];
    }
    *first = array->ptr;
    *end = array->ptr + 4 * ((CUdeviceptr)last + 1);
}

/* See an array's axes as rows of `length` elements at a distance of *pitch; a single
 * row has pitch 0. Return 0, or -1 where they do not merge into such rows. */
static int
as_rows(const ArrayObject *array, Py_ssize_t *length, Py_ssize_t *pitch)
{
    int axis = array->ndim;
    Py_ssize_t span = 0;
    *length = 1;
    *pitch = 0;
    while (axis > 0 &&
           (array->shape[axis - 1] == 1 || array->strides[axis - 1] == *length)) {
        axis--;
        *length *= array->shape[axis];
    }
    for (; axis > 0; axis--) {
        if (array->shape[axis - 1] == 1) {
            continue;
        }
        if (*pitch == 0) {
            *pitch = span = array->strides[axis - 1];
        }
        else if (array->strides[axis - 1] != span) {
            return -1;
        }
        span *= array->shape[axis - 1];
    }
    return 0;
}

int
arrays_overlap(const ArrayObject *a, const ArrayObject *b)
{
    CUdeviceptr first_a, end_a, first_b, end_b;
    if (a->size == 0 || b->size == 0) {
        return 0;
    }
    bounds(a, &first_a, &end_a);
    bounds(b, &first_b, &end_b);
    if (end_a <= first_b || end_b <= first_a) {
        return 0;
    }
    /* Columns of one buffer, side by side? */
    Py_ssize_t length_a, length_b, pitch_a, pitch_b;
    if (as_rows(a, &length_a, &pitch_a) < 0 || as_rows(b, &length_b, &pitch_b) < 0) {
        return 1;
    }
    Py_ssize_t pitch = pitch_a > pitch_b ? pitch_a : pitch_b;
    if ((pitch_a != 0 && pitch_a != pitch) || (pitch_b != 0 && pitch_b != pitch) ||
        pitch == 0) {
        return 1;
    }
    Py_ssize_t distance = ((Py_ssize_t)(b->ptr - a->ptr) / 4) % pitch;
    distance += distance < 0 ? pitch : 0;
    return !(distance >= length_a && distance + length_b <= pitch);
}

int
check_apart(const char *operation, const char *out_name, const ArrayObject *out,
            const char *name, const ArrayObject *array)
{
    if (!arrays_overlap(out, array)) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s: %s shares memory with %s", operation, out_name,
                 name);
    return -1;
}
