/* Arguments of METH_FASTCALL functions: the cases that the inline fast path leaves. */
#include "binding.h"

#include <limits.h>

int
unpack_slowly(const Signature *signature, PyObject *const *args, Py_ssize_t nargs,
              PyObject *kwnames, PyObject **out)
{
    if (nargs > signature->positional) {
        PyErr_Format(PyExc_TypeError,
                     "%s() takes at most %d positional arguments (%zd given)",
                     signature->function, signature->positional, nargs);
        return -1;
    }
    for (Py_ssize_t i = 0; i < nargs; i++) {
        out[i] = args[i];
    }
    Py_ssize_t nkw = kwnames == NULL ? 0 : PyTuple_GET_SIZE(kwnames);
    for (Py_ssize_t k = 0; k < nkw; k++) {
        PyObject *name = PyTuple_GET_ITEM(kwnames, k);
        int i = 0;
        while (signature->names[i] != NULL &&
               PyUnicode_CompareWithASCIIString(name, signature->names[i]) != 0) {
            i++;
        }
        if (signature->names[i] == NULL) {
            PyErr_Format(PyExc_TypeError,
                         "%s() got an unexpected keyword argument '%U'",
                         signature->function, name);
            return -1;
        }
        if (out[i] != NULL) {
            PyErr_Format(PyExc_TypeError, "%s() got multiple values for argument '%s'",
                         signature->function, signature->names[i]);
            return -1;
        }
        out[i] = args[nargs + k];
    }
    for (int i = 0; i < signature->required; i++) {
        if (out[i] == NULL) {
            PyErr_Format(PyExc_TypeError, "%s() missing required argument '%s'",
                         signature->function, signature->names[i]);
            return -1;
        }
    }
    return 0;
}

PyObject *
index_argument(const char *what, PyObject *object)
{
    if (!PyIndex_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be an integer, not %.200s", what,
                     Py_TYPE(object)->tp_name);
        return NULL;
    }
    return PyNumber_Index(object);
}

int
dict_items(PyObject *dict, const char *const *names, PyObject **items)
{
    int result = 0;
    for (int i = 0; names[i] != NULL; i++) {
        /* Not PyDict_GetItemString: for it an error is an item that is not there. */
        PyObject *name = result < 0 ? NULL : PyUnicode_FromString(names[i]);
        items[i] = name == NULL ? NULL : PyDict_GetItemWithError(dict, name);
        Py_XINCREF(items[i]);
        Py_XDECREF(name);
        if (items[i] == NULL && PyErr_Occurred()) {
            result = -1;
        }
    }
    return result;
}

int
int_argument(const char *what, PyObject *object, int *value)
{
    if (object == NULL) {
        return 0;
    }
    PyObject *index = index_argument(what, object);
    if (index == NULL) {
        return -1;
    }
    int overflow = 0;
    long wide = PyLong_AsLongAndOverflow(index, &overflow);
    int fits = !overflow && wide >= INT_MIN && wide <= INT_MAX;
    if (fits) {
        *value = (int)wide;
    }
    else {
        PyErr_Format(PyExc_ValueError, "%s %R is out of range", what, index);
    }
    Py_DECREF(index);
    return fits ? 0 : -1;
}

int
size_argument(const char *what, PyObject *object, size_t *size)
{
    PyObject *index = index_argument(what, object);
    if (index == NULL) {
        return -1;
    }
    Py_ssize_t value = PyLong_AsSsize_t(index);
    if (value < 0) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_OverflowError)) {
            Py_DECREF(index);
            return -1;
        }
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s must be from 0 to %zd, not %R", what,
                     PY_SSIZE_T_MAX, index);
        Py_DECREF(index);
        return -1;
    }
    Py_DECREF(index);
    *size = (size_t)value;
    return 0;
}

int
address_argument(const char *what, PyObject *object, unsigned long long *address)
{
    PyObject *index = index_argument(what, object);
    if (index == NULL) {
        return -1;
    }
    *address = PyLong_AsUnsignedLongLong(index);
    if (*address == (unsigned long long)-1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_ValueError, "%s %R is not an address", what, index);
        }
        Py_DECREF(index);
        return -1;
    }
    Py_DECREF(index);
    return 0;
}
