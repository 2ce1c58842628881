/* Shapes and strides of an elementwise operation, passed to its kernel by value. Read
 * by C (elementwise.c) and by the kernels. */
#ifndef BRAINSTORM_DBUF_MAP_LAYOUT_H
#define BRAINSTORM_DBUF_MAP_LAYOUT_H

enum { MAP_DIMS = 8 };

/* Axes from the outermost on; merged as far as all three arrays allow, so that there
 * are rarely more than two. At most 2^31 elements: larger arrays go in pieces. */
typedef struct {
    int ndim; /* at least 1 */
    unsigned int shape[MAP_DIMS];
    long long out[MAP_DIMS], a[MAP_DIMS], b[MAP_DIMS]; /* strides in elements */
} MapLayout;

#endif
