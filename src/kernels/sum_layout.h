/* A sum over one axis, as reduce.c describes it to the kernels of reduce.cu.
 *
 * The array is seen as (outer, reduced, inner). The reduced axis is cut into chunks of
 * which each gives a result of its own, so that the results are (outer, chunks, inner):
 * with one chunk the sums, else partial sums that a second launch adds up. All strides
 * are in elements. */
#ifndef BRAINSTORM_DBUF_SUM_LAYOUT_H
#define BRAINSTORM_DBUF_SUM_LAYOUT_H

#include <stddef.h>

enum { SUM_THREADS = 256 }; /* of a block */

typedef struct {
    size_t outer, reduced, inner; /* sizes */
    size_t a_outer, a_reduced, a_inner;
    size_t out_outer, out_chunk, out_inner;
    size_t chunks;      /* results an (outer, inner) pair */
    size_t chunk;       /* of the reduced axis in each; the last may be short */
    unsigned int lanes; /* a power of two: neighbouring threads along the fast axis */
    int fours;          /* the fast axis may be read four elements at a time */
} SumLayout;

#endif
