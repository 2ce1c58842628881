/* What the files of brainstorm_dbuf._cpuop share.

   The module holds the array operations that brainstorm's NumpyHandler and RandomCrop
   take from a compiled module. Each op is one Python function in three steps: read and
   check every argument (arguments.c), then let go of the GIL, then run a plain C kernel
   that knows no Python and can no longer fail. Nothing is written before all checks
   have passed.

   Images are C-contiguous, channels last: (images, height, width, channels). */

#ifndef CPUOP_H
#define CPUOP_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define PY_ARRAY_UNIQUE_SYMBOL brainstorm_dbuf_cpuop_ARRAY_API
#ifndef CPUOP_IMPORTS_NUMPY /* defined by module.c alone */
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include <stdbool.h>
#include <stddef.h>

/* ---- arguments.c: every function here returns -1 or NULL with an exception set that
        names the argument, what was expected and what was given ---- */

/* Read an integer in [lowest, INT_MAX]. Floats are refused, whole ones too. */
int cpuop_read_int(PyObject *object, const char *name, int lowest, int *value);

/* Read a tuple or list of two integers of at least 1, as (vertical, horizontal). */
int cpuop_read_pair(PyObject *object, const char *name, int pair[2]);

/* Check that object is an aligned, C-contiguous ndarray of native float32 or float64
   with ndim dimensions. Returns it, borrowed, so nothing is to be released. */
PyArrayObject *cpuop_read_array(PyObject *object, const char *name, int ndim);

/* The same, but of the dtype of another array. */
PyArrayObject *cpuop_read_array_like(PyObject *object, const char *name, int ndim,
                                     PyArrayObject *model, const char *model_name);

/* Check that array has just this shape. `why` ends the sentence: "as outputs has". */
int cpuop_check_shape(PyArrayObject *array, const char *name, const npy_intp *shape,
                      const char *why);

/* Check that array, which the op writes, is writeable. */
int cpuop_check_writeable(PyArrayObject *array, const char *name);

/* Check that two C-contiguous arrays share no byte, one of them being written. */
int cpuop_check_apart(PyArrayObject *first, const char *first_name,
                      PyArrayObject *second, const char *second_name);

/* ---- one file for each family of ops: the Python functions ---- */

PyObject *cpuop_maxpool_forward(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *cpuop_maxpool_backward(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *cpuop_avgpool_forward(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *cpuop_avgpool_backward(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *cpuop_im2col(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *cpuop_col2im(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *cpuop_crop_images(PyObject *module, PyObject *args, PyObject *kwargs);

#endif
