/* has_signature(data, signature): whether a minibatch looks as one before did.
 *
 * Minibatches mostly do, and what is known of one need not be found out again. Asked
 * once a minibatch, of which a small one takes some microseconds: so in C. */
#include "binding.h"

/* Whether `array` is a plain array of that shape (a tuple of ints) and dtype. */
static int
is_such_array(PyObject *array, PyObject *shape, PyObject *dtype)
{
    if (!PyArray_CheckExact(array)) {
        return 0;
    }
    PyArrayObject *self = (PyArrayObject *)array;
    int ndim = PyArray_NDIM(self);
    if (PyTuple_GET_SIZE(shape) != ndim) {
        return 0;
    }
    for (int i = 0; i < ndim; i++) {
        PyObject *item = PyTuple_GET_ITEM(shape, i);
        if (!PyLong_Check(item)) {
            PyErr_Format(PyExc_TypeError,
                         "signature: expected a shape of integers, got %.100s in it",
                         Py_TYPE(item)->tp_name);
            return 0;
        }
        Py_ssize_t size = PyLong_AsSsize_t(item);
        if (size != PyArray_DIM(self, i)) { /* -1 with an error among them: too large */
            PyErr_Clear();
            return 0;
        }
    }
    PyArray_Descr *descr = PyArray_DESCR(self);
    return (PyObject *)descr == dtype ||
           (PyArray_DescrCheck(dtype) &&
            PyArray_EquivTypes(descr, (PyArray_Descr *)dtype));
}

static PyObject *
has_signature(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || !PyTuple_CheckExact(args[1])) {
        PyErr_SetString(PyExc_TypeError,
                        "has_signature takes data and a tuple of (name, shape, dtype)");
        return NULL;
    }
    PyObject *data = args[0], *signature = args[1];
    if (!PyDict_CheckExact(data) ||
        PyDict_GET_SIZE(data) != PyTuple_GET_SIZE(signature)) {
        Py_RETURN_FALSE;
    }
    PyObject *name, *array;
    Py_ssize_t at = 0, number = 0;
    while (PyDict_Next(data, &at, &name, &array)) {
        PyObject *entry = PyTuple_GET_ITEM(signature, number);
        if (!PyTuple_CheckExact(entry) || PyTuple_GET_SIZE(entry) != 3 ||
            !PyTuple_CheckExact(PyTuple_GET_ITEM(entry, 1))) {
            PyErr_SetString(PyExc_TypeError,
                            "signature: expected tuples (name, shape, dtype)");
            return NULL;
        }
        /* Names that are equal but not the same object count as different ones where
         * they are no plain strings: comparing those could run anything. */
        PyObject *known = PyTuple_GET_ITEM(entry, 0);
        int is_same = name == known ||
                      (PyUnicode_CheckExact(name) && PyUnicode_CheckExact(known) &&
                       PyUnicode_Compare(name, known) == 0);
        if (!is_same || !is_such_array(array, PyTuple_GET_ITEM(entry, 1),
                                       PyTuple_GET_ITEM(entry, 2))) {
            if (PyErr_Occurred()) {
                return NULL;
            }
            Py_RETURN_FALSE;
        }
        number++;
    }
    Py_RETURN_TRUE;
}

PyMethodDef signature_functions[] = {
    {"has_signature", (PyCFunction)(void (*)(void))has_signature, METH_FASTCALL,
     PyDoc_STR("has_signature($module, data, signature, /)\n--\n\n"
               "Say whether a minibatch looks as one before did.\n\n"
               "That is: `data` is a dict of just the names in `signature`, a tuple of "
               "(name, shape,\n"
               "dtype), in this order, each of a plain NumPy array of that shape and "
               "dtype.")},
    {NULL, NULL, 0, NULL},
};
