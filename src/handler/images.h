/* What the operations on images share (images.c): their arguments, the layout of their
 * windows, and contiguous copies of arrays that have gaps. */
#ifndef BRAINSTORM_DBUF_HANDLER_IMAGES_H
#define BRAINSTORM_DBUF_HANDLER_IMAGES_H

#include "handler.h"

#include "../kernels/images.h"

/* Borrow the array in object: float32, of four dimensions, at most IMAGE_MOST elements
 * in an image. NULL with an error set. */
ArrayObject *images_argument(EngineObject *engine, const char *operation,
                             const char *name, PyObject *object);

/* Read a padding, -IMAGE_REACH to IMAGE_REACH. Return 0, or -1 with an error set. */
int padding_argument(const char *operation, PyObject *object, int32_t *padding);

/* Read a tuple or list of two integers (vertical, horizontal) from 1 to IMAGE_REACH.
 * Return 0, or -1 with an error set. */
int pair_argument(const char *operation, const char *name, PyObject *object,
                  uint32_t pair[2]);

/* Return 0, or -1 with ValueError set if one of them is longer than IMAGE_REACH. */
int check_window(const char *operation, const char *name, const ArrayObject *array,
                 Py_ssize_t height, Py_ssize_t width);

/* Whether each pixel's channels come in fours that lie aligned. */
static inline int
has_fours(Py_ssize_t channels, CUdeviceptr ptr)
{
    return channels % 4 == 0 && ptr % 16 == 0;
}

/* Fill in what follows from the sizes, a thread taking `lanes` channels. */
void finish_windows(WindowLayout *layout, int lanes);

/* Images that one launch may take, so that it has no more than 2^31 items. */
static inline size_t
images_at_once(size_t items)
{
    size_t most = ((size_t)1 << 31) / (items > 0 ? items : 1);
    return most > 0 ? most : 1;
}

#endif
