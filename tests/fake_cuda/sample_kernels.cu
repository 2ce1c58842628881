/* Kernels for the stand-in driver's own tests: what it promises, and what it must find
   out. */

/* --- as they should be --- */

KERNEL
add_value(int *x, int value, int count)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        x[i] += value;
    }
}

/* Write down which thread of which block does what. */
KERNEL
places(int *out)
{
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    int all = blockDim.x * blockDim.y * blockDim.z;
    out[block * all + thread] = 1000 * block + thread;
}

template <typename T>
__device__ __forceinline__ T
warp_sum(T value)
{
    for (int delta = warpSize / 2; delta > 0; delta /= 2) {
        value += __shfl_down_sync(0xffffffffu, value, delta);
    }
    return value;
}

/* Return the sum over the block, in its first thread. */
template <typename T>
__device__ T
block_sum(T value)
{
    __shared__ T partial[32];
    value = warp_sum(value);
    if (threadIdx.x % warpSize == 0) {
        partial[threadIdx.x / warpSize] = value;
    }
    __syncthreads();
    value = threadIdx.x < blockDim.x / warpSize ? partial[threadIdx.x] : T(0);
    return threadIdx.x < warpSize ? warp_sum(value) : T(0); /* whole warps */
}

/* Add up float and integers; blocks are whole warps. */
KERNEL __launch_bounds__(1024)
sum(const float *__restrict__ x, int count, float *total, unsigned *number)
{
    float own = 0.0f;
    unsigned items = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += gridDim.x * blockDim.x) {
        own += __ldg(&x[i]);
        items++;
    }
    own = block_sum(own);
    items = block_sum(items);
    if (threadIdx.x == 0) {
        atomicAdd(total, own);
        atomicAdd(number, items);
    }
}

/* Turn each block's part round in dynamic shared memory. */
KERNEL
reverse(int *x)
{
    DYNAMIC_SHARED(int, kept);
    int *mine = x + blockIdx.x * blockDim.x;
    kept[threadIdx.x] = mine[threadIdx.x];
    __syncthreads();
    mine[threadIdx.x] = kept[blockDim.x - 1 - threadIdx.x];
}

struct Scaling {
    char first;
    double factor;
    int count;
};

/* Parameters of many sizes. */
KERNEL
scale_all(Scaling scaling, float *x, bool twice, float4 offsets, long long unused)
{
    const float offset[] = {offsets.x, offsets.y, offsets.z, offsets.w};
    if ((int)threadIdx.x < scaling.count) {
        float value = x[threadIdx.x] * (float)scaling.factor;
        x[threadIdx.x] = value * (twice ? 2 : 1) + offset[threadIdx.x % 4] + unused;
    }
}

/* Let the lanes of one warp exchange numbers in every way; out: (8, 32). */
KERNEL
warp_things(int *out)
{
    const unsigned all = 0xffffffffu;
    int lane = threadIdx.x;
    out[0 * 32 + lane] = __shfl_sync(all, lane, 5);
    out[1 * 32 + lane] = __shfl_up_sync(all, lane, 3);
    out[2 * 32 + lane] = __shfl_down_sync(all, lane, 3, 8);
    out[3 * 32 + lane] = __shfl_xor_sync(all, lane, 7);
    out[4 * 32 + lane] = __shfl_sync(all, lane, 9, 8);
    out[5 * 32 + lane] = (int)__ballot_sync(all, lane % 3 == 0);
    out[6 * 32 + lane] = 2 * __any_sync(all, lane == 4) + __all_sync(all, lane < 31);
    out[7 * 32 + lane] = (int)(2 * __shfl_xor_sync(all, lane + 0.5f, 1));
    __syncwarp();
}

/* out: a number drawn once by each thread, a maximum, a sum, who came last. */
KERNEL
count_atomically(int *out)
{
    int mine = blockIdx.x * blockDim.x + threadIdx.x;
    atomicMax(&out[0], mine);
    atomicAdd(&out[1], 1);
    atomicCAS(&out[2], 7, 8);
    atomicExch(&out[3], 9);
    atomicMin(&out[4], -mine);
}

/* Let each block find the largest number of its part, then all find the largest of all.
   A cooperative launch; out holds a number a block before, the result after. */
KERNEL
grid_maximum(const int *x, int *out)
{
    __shared__ int largest;
    DYNAMIC_SHARED(int, kept);
    if (threadIdx.x == 0) {
        largest = INT_MIN;
    }
    __syncthreads();
    atomicMax(&largest, x[blockIdx.x * blockDim.x + threadIdx.x]);
    kept[threadIdx.x] = blockIdx.x;
    __syncthreads();
    if (threadIdx.x == 0) {
        out[blockIdx.x] = largest;
    }
    GRID_SYNC();
    int most = out[0];
    for (unsigned i = 1; i < gridDim.x; i++) {
        most = max(most, out[i]);
    }
    GRID_SYNC();
    /* what a block keeps in shared memory is still its own */
    if (threadIdx.x == 0 && largest == out[blockIdx.x]) {
        out[blockIdx.x] = most + kept[blockDim.x - 1] - (int)blockIdx.x;
    }
}

/* --- random numbers --- */

KERNEL
philox_block(unsigned long long low, unsigned long long high, unsigned long long key,
             uint4 *out)
{
    *out = on_cpu::philox(low, high, key);
}

/* Three times four numbers, and as many normals and uniforms of the same place. */
KERNEL
random_numbers(unsigned long long seed, unsigned long long subsequence,
               unsigned long long offset, uint4 *numbers, float4 *normals,
               float4 *uniforms)
{
    curandStatePhilox4_32_10_t state;
    curand_init(seed, subsequence, offset, &state);
    curandStatePhilox4_32_10_t again = state, once_more = state;
    for (int i = 0; i < 3; i++) {
        numbers[i] = curand4(&state);
        normals[i] = curand_normal4(&again);
        uniforms[i] = curand_uniform4(&once_more);
    }
}

/* --- as they should not be --- */

/* The last thread does not come to the barrier. */
KERNEL
left_behind(int *out)
{
    if (threadIdx.x + 1 < blockDim.x) {
        __syncthreads();
    }
    *out = 1;
}

/* Some lanes wait for the block, some for the warp. */
KERNEL
two_places(int *out)
{
    if (threadIdx.x < 8) {
        __syncthreads();
    } else {
        __syncwarp();
    }
    *out = 1;
}

KERNEL
half_a_warp(int *out)
{
    if (threadIdx.x < 16) {
        *out = __shfl_sync(0xffffu, 1, 0);
    }
}

KERNEL
beyond_shared(int *out)
{
    DYNAMIC_SHARED(int, kept);
    kept[threadIdx.x + 1] = *out;
}

/* More on the stack than there is. */
KERNEL
deep(int *out)
{
    volatile char much[1 << 16];
    for (size_t i = 0; i < sizeof(much); i++) {
        much[i] = (char)i;
    }
    *out = much[*out];
}

/* --- for measuring --- */

/* Meet so many times. */
KERNEL
idle(int barriers)
{
    for (int i = 0; i < barriers; i++) {
        __syncthreads();
    }
}
