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

#endif
