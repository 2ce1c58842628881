/* Reading and checking the arguments of the ops.

   brainstorm's own compiled module runs without bounds checks, so whatever would have
   read or written outside an array there must be refused here, before any work, in
   words that name the argument. The GIL is held throughout this file. */

#include "cpuop.h"

#include <limits.h>

int
cpuop_read_int(PyObject *object, const char *name, int lowest, int *value)
{
    if (!PyIndex_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be an integer, not %.200s", name,
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    PyObject *number = PyNumber_Index(object); /* owned until the end */
    if (number == NULL) {
        return -1;
    }
    int status = 0, overflow = 0;
    long read = PyLong_AsLongAndOverflow(number, &overflow);
    if (overflow || read < lowest || read > INT_MAX) {
        PyErr_Format(PyExc_ValueError, "%s must be between %d and %d, not %S", name,
                     lowest, INT_MAX, number);
        status = -1;
    }
    else {
        *value = (int)read;
    }
    Py_DECREF(number);
    return status;
}

int
cpuop_read_pair(PyObject *object, const char *name, int pair[2])
{
    if (!PyTuple_Check(object) && !PyList_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be a tuple of two integers, not %.200s",
                     name, Py_TYPE(object)->tp_name);
        return -1;
    }
    PyObject *items = PySequence_Tuple(object); /* owned until the end */
    if (items == NULL) {
        return -1;
    }
    int status = -1;
    if (PyTuple_GET_SIZE(items) != 2) {
        PyErr_Format(PyExc_ValueError,
                     "%s must hold two integers (vertical, horizontal), not %zd: %R",
                     name, PyTuple_GET_SIZE(items), object);
        goto done;
    }
    for (int i = 0; i < 2; i++) {
        char item_name[64];
        PyOS_snprintf(item_name, sizeof item_name, "%s[%d]", name, i);
        if (cpuop_read_int(PyTuple_GET_ITEM(items, i), item_name, 1, &pair[i]) < 0) {
            goto done;
        }
    }
    status = 0;
done:
    Py_DECREF(items);
    return status;
}

/* Set ValueError "<name> must <rule>, but its shape is ... and its strides are ...". */
static void
set_layout_error(PyArrayObject *array, const char *name, const char *rule)
{
    int ndim = PyArray_NDIM(array);
    PyObject *shape = PyArray_IntTupleFromIntp(ndim, PyArray_DIMS(array));
    PyObject *strides = PyArray_IntTupleFromIntp(ndim, PyArray_STRIDES(array));
    if (shape != NULL && strides != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "%s must %s, but its shape is %R and its strides are %R bytes",
                     name, rule, shape, strides);
    }
    Py_XDECREF(shape);
    Py_XDECREF(strides);
}

PyArrayObject *
cpuop_read_array(PyObject *object, const char *name, int ndim)
{
    if (!PyArray_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be a numpy.ndarray, not %.200s", name,
                     Py_TYPE(object)->tp_name);
        return NULL;
    }
    PyArrayObject *array = (PyArrayObject *)object;
    int type = PyArray_TYPE(array);
    if (type != NPY_FLOAT && type != NPY_DOUBLE) {
        PyErr_Format(PyExc_TypeError, "%s must be float32 or float64, not %S", name,
                     (PyObject *)PyArray_DESCR(array));
        return NULL;
    }
    if (!PyArray_ISNOTSWAPPED(array)) {
        PyErr_Format(PyExc_TypeError, "%s must be in native byte order, not %S", name,
                     (PyObject *)PyArray_DESCR(array));
        return NULL;
    }
    if (PyArray_NDIM(array) != ndim) {
        PyObject *shape =
            PyArray_IntTupleFromIntp(PyArray_NDIM(array), PyArray_DIMS(array));
        if (shape != NULL) {
            PyErr_Format(PyExc_ValueError,
                         "%s must have %d dimension%s, not %d (its shape is %R)", name,
                         ndim, ndim == 1 ? "" : "s", PyArray_NDIM(array), shape);
            Py_DECREF(shape);
        }
        return NULL;
    }
    if (!PyArray_IS_C_CONTIGUOUS(array)) {
        set_layout_error(array, name, "be C-contiguous");
        return NULL;
    }
    if (!PyArray_ISALIGNED(array)) {
        set_layout_error(array, name, "be aligned in memory");
        return NULL;
    }
    return array;
}

PyArrayObject *
cpuop_read_array_like(PyObject *object, const char *name, int ndim,
                      PyArrayObject *model, const char *model_name)
{
    PyArrayObject *array = cpuop_read_array(object, name, ndim);
    if (array == NULL) {
        return NULL;
    }
    if (PyArray_TYPE(array) != PyArray_TYPE(model)) {
        PyErr_Format(PyExc_TypeError, "%s must be %S as %s is, not %S", name,
                     (PyObject *)PyArray_DESCR(model), model_name,
                     (PyObject *)PyArray_DESCR(array));
        return NULL;
    }
    return array;
}

int
cpuop_check_shape(PyArrayObject *array, const char *name, const npy_intp *shape,
                  const char *why)
{
    int ndim = PyArray_NDIM(array);
    if (PyArray_CompareLists(PyArray_DIMS(array), shape, ndim)) {
        return 0;
    }
    PyObject *expected = PyArray_IntTupleFromIntp(ndim, shape);
    PyObject *given = PyArray_IntTupleFromIntp(ndim, PyArray_DIMS(array));
    if (expected != NULL && given != NULL) {
        PyErr_Format(PyExc_ValueError, "%s must have shape %R %s, not %R", name,
                     expected, why, given);
    }
    Py_XDECREF(expected);
    Py_XDECREF(given);
    return -1;
}

int
cpuop_check_writeable(PyArrayObject *array, const char *name)
{
    if (!PyArray_ISWRITEABLE(array)) {
        PyErr_Format(PyExc_ValueError, "%s is written to, but it is read-only", name);
        return -1;
    }
    return 0;
}

int
cpuop_check_apart(PyArrayObject *first, const char *first_name, PyArrayObject *second,
                  const char *second_name)
{
    const char *a = PyArray_BYTES(first), *b = PyArray_BYTES(second);
    npy_intp a_size = PyArray_NBYTES(first), b_size = PyArray_NBYTES(second);
    if (a_size > 0 && b_size > 0 && a < b + b_size && b < a + a_size) {
        PyErr_Format(PyExc_ValueError, "%s and %s must not share memory", first_name,
                     second_name);
        return -1;
    }
    return 0;
}
