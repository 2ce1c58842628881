/* What the layer SoftmaxCE does beyond the softmax itself: each element is rounded
 * where the operations of brainstorm's own pass, one after another, would round it. */
#include "common.cuh"

/* The loss of each row: the negative logarithm of the probability that its target
 * names, which counts as one in a million at the least. */
KERNEL
softmax_ce_losses(float *losses, const float *probs, const float *targets, size_t rows,
                  size_t columns, size_t loss_stride, size_t probs_row,
                  size_t target_stride, int *fault, int number)
{
    GRID_STRIDE(row, rows) {
        const size_t column = column_of(targets[row * target_stride], columns);
        float p = 0;
        if (column == columns) {
            *fault = number;
        }
        else {
            p = probs[row * probs_row + column];
        }
        losses[row * loss_stride] = -logf(clipped(p, 1e-6f, 1.0f));
    }
}

/* Add (probs - one-hot targets) * dlosses to dx, and leave it in `deltas` too. A row
 * whose target names no column is left as it is. */
KERNEL
softmax_ce_deltas(float *dx, float *deltas, const float *probs, const float *targets,
                  const float *dlosses, size_t rows, size_t columns, size_t dx_row,
                  size_t deltas_row, size_t probs_row, size_t target_stride,
                  size_t dloss_stride, unsigned int lanes, int *fault, int number)
{
    EACH_ROW(row, rows, lanes) {
        const size_t one = column_of(targets[row * target_stride], columns);
        if (one == columns) {
            *fault = number;
            continue;
        }
        const float dloss = dlosses[row * dloss_stride];
        EACH_COLUMN(column, columns, lanes) {
            const float p = probs[row * probs_row + column];
            /* Not one operation with the sum below, which would round once less. */
            const float delta = __fmul_rn(column == one ? p - 1.0f : p, dloss);
            deltas[row * deltas_row + column] = delta;
            dx[row * dx_row + column] += delta;
        }
    }
}
