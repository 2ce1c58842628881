/* Cutting a rectangle out of every image of a sequence of batches.

   The arrays have shape (time steps, images, height, width, channels). Each image of a
   batch has its own upper left corner, the same in all time steps. */

#include "cpuop.h"

#include <string.h>

/* Sizes for one call, those of the data in bytes. */
struct crop {
    ptrdiff_t steps, images;
    ptrdiff_t in_rows;  /* rows of a whole image */
    size_t in_row;      /* bytes in a row of a whole image */
    ptrdiff_t out_rows; /* rows of a cropped one */
    size_t out_row;     /* bytes in a row of a cropped one */
    size_t pixel;       /* bytes in a pixel: all its channels */
};

static void
copy_crops(const struct crop *c, const npy_intp *rows, const npy_intp *columns,
           const char *restrict inputs, char *restrict outputs)
{
    for (ptrdiff_t step = 0; step < c->steps; step++) {
        for (ptrdiff_t image = 0; image < c->images; image++) {
            const char *from = inputs + (size_t)rows[image] * c->in_row +
                               (size_t)columns[image] * c->pixel;
            if (c->out_row == c->in_row) {
                memcpy(outputs, from, (size_t)c->out_rows * c->out_row);
            }
            else {
                for (ptrdiff_t y = 0; y < c->out_rows; y++) {
                    memcpy(outputs + (size_t)y * c->out_row, from, c->out_row);
                    from += c->in_row;
                }
            }
            inputs += (size_t)c->in_rows * c->in_row;
            outputs += (size_t)c->out_rows * c->out_row;
        }
    }
}

/* Read one index for each image, so that a run of `extent` from there on ends within
   `limit`. Returns a new array of npy_intp that nobody else can reach: what has been
   checked here stays true while the GIL is released. */
static PyArrayObject *
read_indices(PyObject *object, const char *name, npy_intp images, npy_intp extent,
             npy_intp limit)
{
    if (!PyArray_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s must be a numpy.ndarray, not %.200s", name,
                     Py_TYPE(object)->tp_name);
        return NULL;
    }
    PyArrayObject *given = (PyArrayObject *)object; /* borrowed from the call */
    if (!PyArray_ISINTEGER(given)) {
        PyErr_Format(PyExc_TypeError, "%s must be of an integer type, not %S", name,
                     (PyObject *)PyArray_DESCR(given));
        return NULL;
    }
    if (PyArray_NDIM(given) != 1) {
        PyErr_Format(PyExc_ValueError, "%s must have 1 dimension, not %d", name,
                     PyArray_NDIM(given));
        return NULL;
    }
    if (cpuop_check_shape(given, name, &images, "(one for each image of inputs)") < 0) {
        return NULL;
    }
    /* A uint64 beyond npy_intp turns negative here, and is refused as that below. */
    PyArrayObject *indices = (PyArrayObject *)PyArray_FromArray(
        given, PyArray_DescrFromType(NPY_INTP),
        NPY_ARRAY_CARRAY | NPY_ARRAY_ENSURECOPY | NPY_ARRAY_ENSUREARRAY |
            NPY_ARRAY_FORCECAST);
    if (indices == NULL) {
        return NULL;
    }
    const npy_intp *values = PyArray_DATA(indices);
    for (npy_intp i = 0; i < images; i++) {
        if (values[i] < 0 || values[i] > limit - extent) {
            PyErr_Format(PyExc_ValueError,
                         "%s[%zd] must be between 0 and %zd (the image has %zd, the "
                         "crop %zd), not %zd",
                         name, (Py_ssize_t)i, (Py_ssize_t)(limit - extent),
                         (Py_ssize_t)limit, (Py_ssize_t)extent, (Py_ssize_t)values[i]);
            Py_DECREF(indices);
            return NULL;
        }
    }
    return indices;
}

/* Check that the crop is no larger than the images. */
static int
check_extent(const char *name, npy_intp extent, npy_intp limit)
{
    if (extent > limit) {
        PyErr_Format(PyExc_ValueError,
                     "%s must be at most %zd, the %s of inputs, not %zd", name,
                     (Py_ssize_t)limit, name, (Py_ssize_t)extent);
        return -1;
    }
    return 0;
}

PyObject *
cpuop_crop_images(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"inputs",      "height",  "width", "row_indices",
                            "col_indices", "outputs", NULL};
    PyObject *arg_inputs, *arg_height, *arg_width, *arg_rows, *arg_columns,
        *arg_outputs;                /* all borrowed from the call */
    PyArrayObject *inputs, *outputs; /* borrowed from the call */
    PyArrayObject *rows = NULL, *columns = NULL; /* owned until the end */
    PyObject *result = NULL;
    int height, width;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOO:_crop_images", names,
                                     &arg_inputs, &arg_height, &arg_width, &arg_rows,
                                     &arg_columns, &arg_outputs) ||
        (inputs = cpuop_read_array(arg_inputs, "inputs", 5)) == NULL ||
        cpuop_read_int(arg_height, "height", 0, &height) < 0 ||
        cpuop_read_int(arg_width, "width", 0, &width) < 0) {
        return NULL;
    }
    const npy_intp *in = PyArray_DIMS(inputs);
    const npy_intp expected[5] = {in[0], in[1], height, width, in[4]};
    if (check_extent("height", height, in[2]) < 0 ||
        check_extent("width", width, in[3]) < 0 ||
        (outputs = cpuop_read_array_like(arg_outputs, "outputs", 5, inputs,
                                         "inputs")) == NULL ||
        cpuop_check_shape(outputs, "outputs", expected,
                          "(as inputs, height and width say)") < 0 ||
        cpuop_check_writeable(outputs, "outputs") < 0 ||
        cpuop_check_apart(outputs, "outputs", inputs, "inputs") < 0 ||
        (rows = read_indices(arg_rows, "row_indices", in[1], height, in[2])) == NULL ||
        (columns = read_indices(arg_columns, "col_indices", in[1], width, in[3])) ==
            NULL) {
        goto done;
    }
    if (PyArray_SIZE(outputs) > 0) {
        size_t pixel = (size_t)in[4] * (size_t)PyArray_ITEMSIZE(inputs);
        struct crop crop = {
            .steps = in[0],
            .images = in[1],
            .in_rows = in[2],
            .in_row = (size_t)in[3] * pixel,
            .out_rows = height,
            .out_row = (size_t)width * pixel,
            .pixel = pixel,
        };
        const npy_intp *row_at = PyArray_DATA(rows), *column_at = PyArray_DATA(columns);
        const char *from = PyArray_BYTES(inputs);
        char *to = PyArray_BYTES(outputs);
        Py_BEGIN_ALLOW_THREADS
        copy_crops(&crop, row_at, column_at, from, to);
        Py_END_ALLOW_THREADS
    }
    result = Py_NewRef(Py_None);
done:
    Py_XDECREF(rows);
    Py_XDECREF(columns);
    return result;
}
