/* Cutting an image into the patches that a convolution multiplies with its filters, and
   adding patches back onto the image.

   A patch is a kernel_h * kernel_w window of the padded image; one starts every stride
   pixels, in reading order. Its rows lie one after the other, and in each row the
   pixels with all their channels, so that a row of a patch is one run of bytes in the
   image too. Padding is zeros. Image and patches are flat arrays. */

#include "cpuop.h"

#include <limits.h>
#include <string.h>

/* Where the patches lie. Paddings may be negative (the image is cropped then). The
   products below cannot overflow once check_sizes has passed. */
struct layout {
    ptrdiff_t height, width, channels;
    ptrdiff_t kernel_h, kernel_w;
    ptrdiff_t pad_top, pad_left;
    ptrdiff_t stride_h, stride_w;
    ptrdiff_t rows, columns; /* patches down and across, 0 or more */
};

/* One patch: its upper left corner in the image, and how each of its rows is made up:
   `lead` pixels of padding, then `inside` pixels of the image, then padding again. */
struct patch {
    ptrdiff_t top, left;
    ptrdiff_t lead, inside;
};

static inline ptrdiff_t
clamp(ptrdiff_t value, ptrdiff_t lowest, ptrdiff_t highest)
{
    return value < lowest ? lowest : value > highest ? highest : value;
}

static inline struct patch
patch_at(const struct layout *l, ptrdiff_t row, ptrdiff_t column)
{
    struct patch p;
    p.top = row * l->stride_h - l->pad_top;
    p.left = column * l->stride_w - l->pad_left;
    p.lead = clamp(-p.left, 0, l->kernel_w);
    p.inside = clamp(l->width - p.left, p.lead, l->kernel_w) - p.lead;
    return p;
}

#define REAL float
#define NAME(name) name##_float
#include "patches_kernels.h"
#undef REAL
#undef NAME

#define REAL double
#define NAME(name) name##_double
#include "patches_kernels.h"
#undef REAL
#undef NAME

/* Copy all patches of image, as bytes: the same for every type of `item` bytes whose
   zero is all zero bits. */
static void
copy_patches(const struct layout *l, size_t item, const char *restrict image,
             char *restrict patches)
{
    size_t pixel = (size_t)l->channels * item;
    size_t row_size = (size_t)l->kernel_w * pixel;
    for (ptrdiff_t row = 0; row < l->rows; row++) {
        for (ptrdiff_t column = 0; column < l->columns; column++) {
            struct patch p = patch_at(l, row, column);
            size_t lead = (size_t)p.lead * pixel, inside = (size_t)p.inside * pixel;
            for (ptrdiff_t y = p.top; y < p.top + l->kernel_h; y++) {
                if (y < 0 || y >= l->height || inside == 0) {
                    memset(patches, 0, row_size);
                }
                else {
                    const char *from =
                        image + (size_t)(y * l->width + p.left + p.lead) * pixel;
                    if (inside < row_size) {
                        memset(patches, 0, lead);
                        memset(patches + lead + inside, 0, row_size - lead - inside);
                    }
                    memcpy(patches + lead, from, inside);
                }
                patches += row_size;
            }
        }
    }
}

/* How many windows of `kernel` fit into `length`, one every `stride`. */
static ptrdiff_t
windows(ptrdiff_t length, ptrdiff_t kernel, ptrdiff_t stride)
{
    return length < kernel ? 0 : (length - kernel) / stride + 1;
}

/* Multiply count sizes of 0 or more; -1 if the product is beyond every array. */
static npy_intp
product(const ptrdiff_t *sizes, int count)
{
    npy_intp result = 1;
    for (int i = 0; i < count; i++) {
        if (sizes[i] == 0) {
            return 0;
        }
        if (result >= 0) {
            result = result > NPY_MAX_INTP / sizes[i] ? -1 : result * sizes[i];
        }
    }
    return result;
}

/* Check that a flat array holds the elements that the op will touch. */
static int
check_size(PyArrayObject *array, const char *name, npy_intp needed, const char *what)
{
    npy_intp given = PyArray_SIZE(array);
    if (needed < 0) {
        PyErr_Format(PyExc_ValueError,
                     "%s cannot hold %s: they are more than any array has, and it has "
                     "shape (%zd,)",
                     name, what, (Py_ssize_t)given);
        return -1;
    }
    if (given < needed) {
        PyErr_Format(PyExc_ValueError,
                     "%s must have shape (%zd,) or longer for %s, not (%zd,)", name,
                     (Py_ssize_t)needed, what, (Py_ssize_t)given);
        return -1;
    }
    return 0;
}

/* Read the eleven integers between the two arrays of either op. */
static int
read_layout(PyObject *const numbers[11], struct layout *l)
{
    static const struct {
        const char *name;
        int lowest;
    } rules[11] = {
        {"height", 0},      {"width", 0},       {"channels", 0},    {"kernel_h", 1},
        {"kernel_w", 1},    {"pad_t", INT_MIN}, {"pad_l", INT_MIN}, {"pad_b", INT_MIN},
        {"pad_r", INT_MIN}, {"stride_h", 1},    {"stride_w", 1},
    };
    int values[11];
    for (int i = 0; i < 11; i++) {
        if (cpuop_read_int(numbers[i], rules[i].name, rules[i].lowest, &values[i]) <
            0) {
            return -1;
        }
    }
    ptrdiff_t height = values[0], width = values[1];
    ptrdiff_t pad_t = values[5], pad_l = values[6], pad_b = values[7],
              pad_r = values[8];
    *l = (struct layout){
        .height = height,
        .width = width,
        .channels = values[2],
        .kernel_h = values[3],
        .kernel_w = values[4],
        .pad_top = pad_t,
        .pad_left = pad_l,
        .stride_h = values[9],
        .stride_w = values[10],
        .rows = windows(height + pad_t + pad_b, values[3], values[9]),
        .columns = windows(width + pad_l + pad_r, values[4], values[10]),
    };
    return 0;
}

/* Check both flat arrays of either op against the layout. */
static int
check_sizes(const struct layout *l, PyArrayObject *flat_in, PyArrayObject *flat_col)
{
    const ptrdiff_t image[] = {l->height, l->width, l->channels};
    const ptrdiff_t patches[] = {l->rows, l->columns, l->kernel_h, l->kernel_w,
                                 l->channels};
    if (check_size(flat_in, "flat_in", product(image, 3),
                   "height * width * channels elements") < 0 ||
        check_size(flat_col, "flat_col", product(patches, 5),
                   "all patches of this image") < 0) {
        return -1;
    }
    return 0;
}

static bool
is_empty(const struct layout *l)
{
    return l->rows == 0 || l->columns == 0 || l->channels == 0;
}

PyObject *
cpuop_im2col(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"flat_in",  "height",   "width",    "channels", "kernel_h",
                            "kernel_w", "pad_t",    "pad_l",    "pad_b",    "pad_r",
                            "stride_h", "stride_w", "flat_col", NULL};
    PyObject *arg_in, *arg_col, *n[11]; /* all borrowed from the call */
    PyArrayObject *flat_in, *flat_col;
    struct layout layout;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOOOOOOOOOO:im2col", names, &arg_in, &n[0], &n[1], &n[2],
            &n[3], &n[4], &n[5], &n[6], &n[7], &n[8], &n[9], &n[10], &arg_col) ||
        (flat_in = cpuop_read_array(arg_in, "flat_in", 1)) == NULL ||
        read_layout(n, &layout) < 0 ||
        (flat_col = cpuop_read_array_like(arg_col, "flat_col", 1, flat_in,
                                          "flat_in")) == NULL ||
        check_sizes(&layout, flat_in, flat_col) < 0 ||
        cpuop_check_writeable(flat_col, "flat_col") < 0 ||
        cpuop_check_apart(flat_in, "flat_in", flat_col, "flat_col") < 0) {
        return NULL;
    }
    if (!is_empty(&layout)) {
        size_t item = (size_t)PyArray_ITEMSIZE(flat_in);
        const char *image = PyArray_BYTES(flat_in);
        char *patches = PyArray_BYTES(flat_col);
        Py_BEGIN_ALLOW_THREADS
        copy_patches(&layout, item, image, patches);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

PyObject *
cpuop_col2im(PyObject *Py_UNUSED(module), PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"flat_col", "height",   "width",   "channels", "kernel_h",
                            "kernel_w", "pad_t",    "pad_l",   "pad_b",    "pad_r",
                            "stride_h", "stride_w", "flat_in", NULL};
    PyObject *arg_in, *arg_col, *n[11]; /* all borrowed from the call */
    PyArrayObject *flat_in, *flat_col;
    struct layout layout;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OOOOOOOOOOOOO:col2im", names, &arg_col, &n[0], &n[1], &n[2],
            &n[3], &n[4], &n[5], &n[6], &n[7], &n[8], &n[9], &n[10], &arg_in) ||
        (flat_col = cpuop_read_array(arg_col, "flat_col", 1)) == NULL ||
        read_layout(n, &layout) < 0 ||
        (flat_in = cpuop_read_array_like(arg_in, "flat_in", 1, flat_col,
                                         "flat_col")) == NULL ||
        check_sizes(&layout, flat_in, flat_col) < 0 ||
        cpuop_check_writeable(flat_in, "flat_in") < 0 ||
        cpuop_check_apart(flat_in, "flat_in", flat_col, "flat_col") < 0) {
        return NULL;
    }
    if (!is_empty(&layout)) {
        bool is_float = PyArray_TYPE(flat_in) == NPY_FLOAT;
        const void *patches = PyArray_DATA(flat_col);
        void *image = PyArray_DATA(flat_in);
        Py_BEGIN_ALLOW_THREADS
        if (is_float) {
            add_patches_float(&layout, patches, image);
        }
        else {
            add_patches_double(&layout, patches, image);
        }
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}
