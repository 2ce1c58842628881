/* What every kernel file needs, on nvcc and on a compiler for the CPU, where the tests'
 * stand-in driver runs the same kernels (its header comes first and defines these). */
#ifndef BRAINSTORM_DBUF_KERNELS_COMMON_CUH
#define BRAINSTORM_DBUF_KERNELS_COMMON_CUH

#include <stddef.h>
#include <stdint.h>

#ifdef __CUDACC__
#include <cooperative_groups.h>
#define KERNEL extern "C" __global__ void
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#define GRID_SYNC() cooperative_groups::this_grid().sync()
#endif

/* The first item of this thread, and the distance to its next one, in a loop over all
 * threads of a one-dimensional grid. */
#define GRID_STRIDE(i, n) \
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < (n); \
         i += (size_t)gridDim.x * blockDim.x)

#endif
