/* Sums and the softmax, for operations that are made of several. In reduce.c. */
#ifndef BRAINSTORM_DBUF_HANDLER_REDUCE_H
#define BRAINSTORM_DBUF_HANDLER_REDUCE_H

#include "../kernels/sum_layout.h"
#include "handler.h"

/* A sum over some axes of an array, in one launch or two. */
typedef struct {
    const ArrayObject *a, *out;   /* borrowed */
    ArrayObject a_twin, out_twin; /* used where their ptr is not 0 */
    SumLayout all, rest;          /* the latter of partial sums, if there are some */
    CUdeviceptr a_ptr, out_ptr, partial;
} Sum;

/* Plan the sum of a over its axes from first to before end, into out, which has
 * elements and a's axes without these, or with `kept` axis of size 1 instead; the
 * shapes fit. Before op_begin. Return 0, or -1 with an error set (op_end follows). */
int sum_plan(Op *op, Sum *sum, const ArrayObject *a, int first, int end,
             const ArrayObject *out, int kept);

/* Queue it; after op_begin. */
void op_sum(Op *op, Sum *sum);

/* Queue the softmax of each row of the matrix m into out, of the same shape, which may
 * be m. */
void op_softmax(Op *op, const ArrayObject *m, const ArrayObject *out);

#endif
