/* DeviceArray, for the files that make arrays: array.c, transfer.c, exchange.c,
 * memory.c.
 */
#ifndef BRAINSTORM_DBUF_HANDLER_ARRAY_H
#define BRAINSTORM_DBUF_HANDLER_ARRAY_H

#include "handler.h"

/* An array of the given shape, contiguous, without memory. NULL with an error set. */
ArrayObject *array_bare(EngineObject *engine, int ndim, const Py_ssize_t *shape,
                        int is_int);

/* The array whose memory a view is of, or the array itself. Borrowed. */
ArrayObject *array_root(ArrayObject *self);

/* A new reference to the dtype. */
PyArray_Descr *array_dtype(const ArrayObject *self);

/* One size or stride. Return 0, or -1 with an error set. */
int axis_size(const char *operation, PyObject *object, Py_ssize_t *size);

/* Read a shape: a tuple or list of integers, or one integer. Return its length, or -1
 * with an error set. */
int shape_argument(const char *operation, PyObject *object, Py_ssize_t *shape);

/* ---- To and from the host (transfer.c) ---- */

/* A NumPy copy of an array; new reference, or NULL with an error set. */
PyObject *array_to_numpy(ArrayObject *self, const char *operation);

/* Set an array from any NumPy array of its shape. Return 0, or -1 with an error set. */
int array_from_numpy(ArrayObject *self, const char *operation, const char *name,
                     PyObject *values);

PyObject *Array_get(PyObject *op, PyObject *ignored);
PyObject *Array_set(PyObject *op, PyObject *values);
PyObject *Array_copy(PyObject *op, PyObject *ignored);
PyObject *Array_array(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                      PyObject *kwnames);
int Array_assign(PyObject *op, PyObject *key, PyObject *value);

/* ---- Arithmetic (arithmetic.c) ---- */

PyObject *Array_add(PyObject *left, PyObject *right);
PyObject *Array_subtract(PyObject *left, PyObject *right);
PyObject *Array_multiply(PyObject *left, PyObject *right);
PyObject *Array_divide(PyObject *left, PyObject *right);
PyObject *Array_power(PyObject *left, PyObject *right, PyObject *modulus);
PyObject *Array_inplace_add(PyObject *left, PyObject *right);
PyObject *Array_inplace_subtract(PyObject *left, PyObject *right);
PyObject *Array_inplace_multiply(PyObject *left, PyObject *right);
PyObject *Array_inplace_divide(PyObject *left, PyObject *right);

/* ---- To and from other libraries (exchange.c) ---- */

PyObject *Array_interface(PyObject *op, void *closure);
PyObject *Array_dlpack(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                       PyObject *kwnames);
PyObject *Array_dlpack_device(PyObject *op, PyObject *ignored);

extern PyMethodDef exchange_operations[];

#endif
