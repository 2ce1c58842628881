/* Where the elements of an array lie: from where to where, as which walks through
 * memory, and whether they are rows that one copy of the driver's can move. */
#include "binding.h"

void
array_bounds(PyArrayObject *array, char **first, char **end)
{
    char *low = PyArray_BYTES(array), *high = low + PyArray_ITEMSIZE(array);
    if (PyArray_SIZE(array) == 0) {
        high = low;
    }
    else {
        for (int i = 0; i < PyArray_NDIM(array); i++) {
            npy_intp span = (PyArray_DIM(array, i) - 1) * PyArray_STRIDE(array, i);
            if (span < 0) {
                low += span;
            }
            else {
                high += span;
            }
        }
    }
    *first = low;
    *end = high;
}

void
array_axes(PyArrayObject *array, Axes *axes)
{
    int last = -1;
    for (int i = 0; i < PyArray_NDIM(array); i++) {
        size_t size = (size_t)PyArray_DIM(array, i);
        ptrdiff_t stride = PyArray_STRIDE(array, i);
        if (size == 1) {
            continue;
        }
        if (last >= 0 && axes->strides[last] == (ptrdiff_t)size * stride) {
            axes->shape[last] *= size;
            axes->strides[last] = stride;
        }
        else {
            last++;
            axes->shape[last] = size;
            axes->strides[last] = stride;
        }
    }
    if (last < 0) {
        last = 0;
        axes->shape[0] = 1;
        axes->strides[0] = PyArray_ITEMSIZE(array);
    }
    axes->ndim = last + 1;
}

int
array_rows(PyArrayObject *array, HostRows *rows)
{
    const size_t itemsize = (size_t)PyArray_ITEMSIZE(array);
    Axes axes;
    *rows = (HostRows){0};
    if (PyArray_NBYTES(array) == 0) {
        return 1;
    }
    if (PyArray_NDIM(array) > MOST_AXES) {
        return 0;
    }
    array_axes(array, &axes);
    int outer = axes.ndim; /* axes that count rows */
    rows->width = itemsize;
    if (axes.strides[outer - 1] == (ptrdiff_t)itemsize) {
        outer--;
        rows->width *= axes.shape[outer];
    }
    rows->pitch = outer > 0 ? (size_t)axes.strides[0] : rows->width;
    rows->height = outer > 0 ? axes.shape[0] : 1;
    return outer == 0 ||
           (outer == 1 && axes.strides[0] > 0 && rows->pitch >= rows->width);
}
