/* Max and average pooling over images, forward and backward.

   A window of kernel pixels starts every stride pixels, the first of them `padding`
   pixels above and left of the image. Pixels outside the image are not there: they are
   no candidates for a maximum and do not count in an average. A window with no pixel
   (or, for the maximum, none above the lowest finite value) gives 0.

   The pixel that held a maximum is kept in an array of the images' own type as
   (y * width + x) * channels + channel, or -1; of equal values the first in reading
   order counts. float32 holds such an index exactly up to 2**24. */

#include "cpuop.h"

#include <float.h>
#include <limits.h>
#include <stdint.h>
#include <string.h>

/* The kernels use two things beyond C11 that GCC and Clang have on every machine: this,
   and vectors of 16 bytes. */
#define ALWAYS_INLINE __attribute__((always_inline))

/* What is worked on at once, so that running values stay in registers: channels of an
   average, and vectors of channels of a maximum. */
#define MOST_CHANNELS 16
#define MOST_VECTORS 2

/* Everything about one call but the data. Each size is at most INT_MAX and the arrays
   exist in memory, so that no product of sizes below can overflow. */
struct geometry {
    ptrdiff_t images, channels;
    ptrdiff_t in_h, in_w;
    ptrdiff_t out_h, out_w;
    ptrdiff_t kernel_h, kernel_w;
    ptrdiff_t stride_h, stride_w;
    ptrdiff_t padding;
};

/* The part of a window that lies inside the image: 0 <= top <= bottom <= in_h, and the
   like for left and right. */
struct window {
    ptrdiff_t top, bottom, left, right;
};

static inline ptrdiff_t
clamp(ptrdiff_t value, ptrdiff_t highest)
{
    return value < 0 ? 0 : value > highest ? highest : value;
}

static inline struct window
window_at(const struct geometry *g, ptrdiff_t out_y, ptrdiff_t out_x)
{
    ptrdiff_t y = out_y * g->stride_h - g->padding;
    ptrdiff_t x = out_x * g->stride_w - g->padding;
    return (struct window){
        .top = clamp(y, g->in_h),
        .bottom = clamp(y + g->kernel_h, g->in_h),
        .left = clamp(x, g->in_w),
        .right = clamp(x + g->kernel_w, g->in_w),
    };
}

/* The divisor of an average: an empty window's sum is 0 whatever divides it. */
static inline ptrdiff_t
window_pixels(struct window w)
{
    ptrdiff_t pixels = (w.bottom - w.top) * (w.right - w.left);
    return pixels > 0 ? pixels : 1;
}

static inline ptrdiff_t
image_size(const struct geometry *g)
{
    return g->in_h * g->in_w * g->channels;
}

#define REAL float
#define INTEGER int32_t
#define LOWEST (-FLT_MAX)
#define NAME(name) name##_float
#include "pooling_kernels.h"
#undef REAL
#undef INTEGER
#undef LOWEST
#undef NAME

#define REAL double
#define INTEGER int64_t
#define LOWEST (-DBL_MAX)
#define NAME(name) name##_double
#include "pooling_kernels.h"
#undef REAL
#undef INTEGER
#undef LOWEST
#undef NAME

/* The arguments of any of the four ops. All pointers are borrowed from the call's own
   arguments, which outlive it. */
struct pooling {
    PyObject *arg_inputs, *arg_kernel, *arg_outputs, *arg_padding, *arg_strides;
    PyArrayObject *inputs, *outputs;
    struct geometry geometry;
};

/* Check what all four ops are given and fill in p's arrays and geometry. */
static int
read_pooling(struct pooling *p)
{
    int kernel[2], strides[2], padding;
    if ((p->inputs = cpuop_read_array(p->arg_inputs, "inputs", 4)) == NULL ||
        cpuop_read_pair(p->arg_kernel, "kernel", kernel) < 0 ||
        (p->outputs = cpuop_read_array_like(p->arg_outputs, "outputs", 4, p->inputs,
                                            "inputs")) == NULL ||
        cpuop_read_int(p->arg_padding, "padding", INT_MIN, &padding) < 0 ||
        cpuop_read_pair(p->arg_strides, "strides", strides) < 0) {
        return -1;
    }
    const npy_intp *in = PyArray_DIMS(p->inputs), *out = PyArray_DIMS(p->outputs);
    npy_intp expected[4] = {in[0], out[1], out[2], in[3]};
    if (cpuop_check_shape(p->outputs, "outputs", expected,
                          "(images and channels as inputs has)") < 0) {
        return -1;
    }
    for (int i = 0; i < 4; i++) {
        if (in[i] > INT_MAX || out[i] > INT_MAX) {
            PyErr_Format(PyExc_ValueError,
                         "%s must be at most %d long in each dimension, not %zd",
                         in[i] > INT_MAX ? "inputs" : "outputs", INT_MAX,
                         (Py_ssize_t)(in[i] > INT_MAX ? in[i] : out[i]));
            return -1;
        }
    }
    p->geometry = (struct geometry){
        .images = in[0],
        .channels = in[3],
        .in_h = in[1],
        .in_w = in[2],
        .out_h = out[1],
        .out_w = out[2],
        .kernel_h = kernel[0],
        .kernel_w = kernel[1],
        .stride_h = strides[0],
        .stride_w = strides[1],
        .padding = padding,
    };
    return 0;
}

/* Check that an index into one image fits the 32 bits that it is counted in. */
static int
check_image_size(const struct pooling *p)
{
    const struct geometry *g = &p->geometry;
    if (PyArray_SIZE(p->inputs) > 0 && image_size(g) > INT_MAX) {
        PyErr_Format(PyExc_ValueError,
                     "inputs must have at most %d elements in an image, not %zd",
                     INT_MAX, (Py_ssize_t)image_size(g));
        return -1;
    }
    return 0;
}

/* Read an array of the dtype of inputs and the shape of `model`. */
static PyArrayObject *
read_twin(const struct pooling *p, PyObject *object, const char *name,
          PyArrayObject *model, const char *why)
{
    PyArrayObject *array =
        cpuop_read_array_like(object, name, 4, p->inputs, "inputs");
    if (array == NULL || cpuop_check_shape(array, name, PyArray_DIMS(model), why) < 0) {
        return NULL;
    }
    return array;
}

PyObject *
cpuop_maxpool_forward(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"inputs",  "kernel",  "outputs", "padding",
                            "strides", "argmax", NULL};
    struct pooling p;
    PyObject *arg_argmax;
    PyArrayObject *argmax;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOO:maxpool_forward", names,
                                     &p.arg_inputs, &p.arg_kernel, &p.arg_outputs,
                                     &p.arg_padding, &p.arg_strides, &arg_argmax) ||
        read_pooling(&p) < 0 || check_image_size(&p) < 0 ||
        (argmax = read_twin(&p, arg_argmax, "argmax", p.outputs, "as outputs has")) ==
            NULL ||
        cpuop_check_writeable(p.outputs, "outputs") < 0 ||
        cpuop_check_writeable(argmax, "argmax") < 0 ||
        cpuop_check_apart(p.outputs, "outputs", p.inputs, "inputs") < 0 ||
        cpuop_check_apart(argmax, "argmax", p.inputs, "inputs") < 0 ||
        cpuop_check_apart(argmax, "argmax", p.outputs, "outputs") < 0) {
        return NULL;
    }
    if (PyArray_SIZE(p.outputs) > 0) {
        bool is_float = PyArray_TYPE(p.inputs) == NPY_FLOAT;
        const void *inputs = PyArray_DATA(p.inputs);
        void *outputs = PyArray_DATA(p.outputs), *positions = PyArray_DATA(argmax);
        Py_BEGIN_ALLOW_THREADS
        if (is_float) {
            maxpool_forward_float(&p.geometry, inputs, outputs, positions);
        }
        else {
            maxpool_forward_double(&p.geometry, inputs, outputs, positions);
        }
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

/* Set ValueError for the index at `place` in flattened argmax. */
static void
set_argmax_error(const struct pooling *p, PyArrayObject *argmax, ptrdiff_t place)
{
    const char *item = PyArray_BYTES(argmax) + place * PyArray_ITEMSIZE(argmax);
    PyObject *index = PyArray_GETITEM(argmax, item);
    if (index != NULL) {
        PyErr_Format(PyExc_ValueError,
                     "argmax must hold indices below %zd, the number of elements in an "
                     "image of inputs, not %S",
                     (Py_ssize_t)image_size(&p->geometry), index);
        Py_DECREF(index);
    }
}

PyObject *
cpuop_maxpool_backward(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"inputs",  "kernel", "outputs",   "padding",    "strides",
                            "argmax", "in_deltas", "out_deltas", NULL};
    struct pooling p;
    PyObject *arg_argmax, *arg_in_deltas, *arg_out_deltas;
    PyArrayObject *argmax, *in_deltas, *out_deltas;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOOOOO:maxpool_backward", names, &p.arg_inputs,
            &p.arg_kernel, &p.arg_outputs, &p.arg_padding, &p.arg_strides, &arg_argmax,
            &arg_in_deltas, &arg_out_deltas) ||
        read_pooling(&p) < 0 || check_image_size(&p) < 0 ||
        (argmax = read_twin(&p, arg_argmax, "argmax", p.outputs, "as outputs has")) ==
            NULL ||
        (in_deltas = read_twin(&p, arg_in_deltas, "in_deltas", p.inputs,
                               "as inputs has")) == NULL ||
        (out_deltas = read_twin(&p, arg_out_deltas, "out_deltas", p.outputs,
                                "as outputs has")) == NULL ||
        cpuop_check_writeable(in_deltas, "in_deltas") < 0 ||
        cpuop_check_apart(in_deltas, "in_deltas", argmax, "argmax") < 0 ||
        cpuop_check_apart(in_deltas, "in_deltas", out_deltas, "out_deltas") < 0) {
        return NULL;
    }
    if (PyArray_SIZE(p.outputs) > 0) {
        bool is_float = PyArray_TYPE(p.inputs) == NPY_FLOAT;
        ptrdiff_t outside;
        const void *positions = PyArray_DATA(argmax), *from = PyArray_DATA(out_deltas);
        void *to = PyArray_DATA(in_deltas);
        Py_BEGIN_ALLOW_THREADS
        outside = is_float ? find_outside_float(&p.geometry, positions)
                           : find_outside_double(&p.geometry, positions);
        if (outside < 0 && is_float) {
            maxpool_backward_float(&p.geometry, positions, to, from);
        }
        else if (outside < 0) {
            maxpool_backward_double(&p.geometry, positions, to, from);
        }
        Py_END_ALLOW_THREADS
        if (outside >= 0) {
            set_argmax_error(&p, argmax, outside);
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

PyObject *
cpuop_avgpool_forward(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"inputs", "kernel", "outputs", "padding", "strides", NULL};
    struct pooling p;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOO:avgpool_forward", names,
                                     &p.arg_inputs, &p.arg_kernel, &p.arg_outputs,
                                     &p.arg_padding, &p.arg_strides) ||
        read_pooling(&p) < 0 || cpuop_check_writeable(p.outputs, "outputs") < 0 ||
        cpuop_check_apart(p.outputs, "outputs", p.inputs, "inputs") < 0) {
        return NULL;
    }
    if (PyArray_SIZE(p.outputs) > 0) {
        bool is_float = PyArray_TYPE(p.inputs) == NPY_FLOAT;
        const void *inputs = PyArray_DATA(p.inputs);
        void *outputs = PyArray_DATA(p.outputs);
        Py_BEGIN_ALLOW_THREADS
        if (is_float) {
            avgpool_forward_float(&p.geometry, inputs, outputs);
        }
        else {
            avgpool_forward_double(&p.geometry, inputs, outputs);
        }
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

PyObject *
cpuop_avgpool_backward(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"inputs",  "kernel",    "outputs",    "padding",
                            "strides", "in_deltas", "out_deltas", NULL};
    struct pooling p;
    PyObject *arg_in_deltas, *arg_out_deltas;
    PyArrayObject *in_deltas, *out_deltas;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOO:avgpool_backward", names,
                                     &p.arg_inputs, &p.arg_kernel, &p.arg_outputs,
                                     &p.arg_padding, &p.arg_strides, &arg_in_deltas,
                                     &arg_out_deltas) ||
        read_pooling(&p) < 0 ||
        (in_deltas = read_twin(&p, arg_in_deltas, "in_deltas", p.inputs,
                               "as inputs has")) == NULL ||
        (out_deltas = read_twin(&p, arg_out_deltas, "out_deltas", p.outputs,
                                "as outputs has")) == NULL ||
        cpuop_check_writeable(in_deltas, "in_deltas") < 0 ||
        cpuop_check_apart(in_deltas, "in_deltas", out_deltas, "out_deltas") < 0) {
        return NULL;
    }
    if (PyArray_SIZE(p.outputs) > 0) {
        bool is_float = PyArray_TYPE(p.inputs) == NPY_FLOAT;
        const void *from = PyArray_DATA(out_deltas);
        void *to = PyArray_DATA(in_deltas);
        Py_BEGIN_ALLOW_THREADS
        if (is_float) {
            avgpool_backward_float(&p.geometry, to, from);
        }
        else {
            avgpool_backward_double(&p.geometry, to, from);
        }
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}
