/* What every kernel file needs, on nvcc and on a compiler for the CPU, where the tests'
 * stand-in driver runs the same kernels (its header comes first and defines it). */
#ifndef BRAINSTORM_DBUF_KERNELS_COMMON_CUH
#define BRAINSTORM_DBUF_KERNELS_COMMON_CUH

#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#define KERNEL extern "C" __global__ void
#endif

/* The first item of this thread, and the distance to its next one, in a loop over all
 * threads of a one-dimensional grid. */
#define GRID_STRIDE(i, n) \
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < (n); \
         i += (size_t)gridDim.x * blockDim.x)

/* Loops over the rows and the columns of a matrix, for a launch that op_tile has made.
 * Blocks are seen as two-dimensional: `lanes` neighbouring threads (a power of two) lie
 * along a row, the others on further rows, and the grid likewise (x the rows, y the
 * columns), so that finding an element takes no division. */
#define EACH_ROW(row, rows, lanes) \
    for (size_t row = blockIdx.x * (size_t)ROWS_OF(blockDim.x, lanes) + \
                      ROWS_OF(threadIdx.x, lanes); \
         row < (rows); row += gridDim.x * (size_t)ROWS_OF(blockDim.x, lanes))

#define EACH_COLUMN(column, columns, lanes) \
    for (size_t column = blockIdx.y * (size_t)(lanes) + (threadIdx.x & ((lanes) - 1)); \
         column < (columns); column += gridDim.y * (size_t)(lanes))

/* How many rows of lanes so many threads fill. */
#define ROWS_OF(threads, lanes) ((threads) >> (__ffs((int)(lanes)) - 1))

#endif
