/* Random fills, with the Philox generator of cuRAND's device API.
 *
 * Element i of draw d takes word i % 4 of the four that Philox gives for subsequence
 * i / 4 at offset 4 d: a function of the seed, the draw and the element alone, however
 * the threads are laid out. A draw takes those four words and no others from a
 * subsequence, so that no two draws share one. */
#include "common.cuh"

#ifdef __CUDACC__
#include <curand_kernel.h>
#endif

static __device__ __forceinline__ curandStatePhilox4_32_10_t
philox_at(unsigned long long seed, unsigned long long draw, size_t group)
{
    curandStatePhilox4_32_10_t state;
    curand_init(seed, group, 4 * draw, &state);
    return state;
}

/* Store the elements of a group of four that are there. */
static __device__ __forceinline__ void
store_group(float *out, size_t n, size_t group, float4 values)
{
    float *to = out + 4 * group;
    const size_t left = n - 4 * group;
    if (left >= 4 && ((uintptr_t)to & 15) == 0) {
        *reinterpret_cast<float4 *>(to) = values;
        return;
    }
    to[0] = values.x;
    if (left > 1) {
        to[1] = values.y;
    }
    if (left > 2) {
        to[2] = values.z;
    }
    if (left > 3) {
        to[3] = values.w;
    }
}

KERNEL
gaussian_fill(float *out, size_t n, float mean, float std, unsigned long long seed,
              unsigned long long draw)
{
    GRID_STRIDE(group, (n + 3) / 4) {
        curandStatePhilox4_32_10_t state = philox_at(seed, draw, group);
        const float4 x = curand_normal4(&state);
        store_group(out, n, group,
                    make_float4(std * x.x + mean, std * x.y + mean, std * x.z + mean,
                                std * x.w + mean));
    }
}

/* 1 with probability threshold / 2^32, else 0. */
KERNEL
probability_mask(float *out, size_t n, unsigned long long threshold,
                 unsigned long long seed, unsigned long long draw)
{
    GRID_STRIDE(group, (n + 3) / 4) {
        curandStatePhilox4_32_10_t state = philox_at(seed, draw, group);
        const uint4 x = curand4(&state);
        store_group(out, n, group,
                    make_float4(x.x < threshold ? 1.0f : 0.0f,
                                x.y < threshold ? 1.0f : 0.0f,
                                x.z < threshold ? 1.0f : 0.0f,
                                x.w < threshold ? 1.0f : 0.0f));
    }
}
