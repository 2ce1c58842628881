/* Sums over an axis, softmax, and the search for what is not finite.
 *
 * Every result is added up in an order that depends on the shapes alone. Each thread
 * keeps four sums of its own, the threads of a block then add theirs up in a tree. */
#include "common.cuh"
#include "sum_layout.h"

static __device__ __forceinline__ float
sum_of(float a, float b)
{
    return a + b;
}

static __device__ __forceinline__ float4
sum_of(float4 a, float4 b)
{
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

template <typename T>
static __device__ __forceinline__ T
no_sum();

template <>
__device__ __forceinline__ float
no_sum<float>()
{
    return 0;
}

template <>
__device__ __forceinline__ float4
no_sum<float4>()
{
    return make_float4(0, 0, 0, 0);
}

/* The sum of a[i * stride] for i from first to before end in steps. Four loads are in
 * flight at a time: one after the other they would wait for memory most of the time. */
template <typename T>
static __device__ __forceinline__ T
strided_sum(const T *a, size_t stride, size_t first, size_t end, size_t step)
{
    T s0 = no_sum<T>(), s1 = no_sum<T>(), s2 = no_sum<T>(), s3 = no_sum<T>();
    const size_t jump = step * stride;
    const T *at = a + first * stride;
    for (size_t i = first; i < end; i += 4 * step, at += 4 * jump) {
        T x0 = at[0];
        T x1 = i + step < end ? at[jump] : no_sum<T>();
        T x2 = i + 2 * step < end ? at[2 * jump] : no_sum<T>();
        T x3 = i + 3 * step < end ? at[3 * jump] : no_sum<T>();
        s0 = sum_of(s0, x0);
        s1 = sum_of(s1, x1);
        s2 = sum_of(s2, x2);
        s3 = sum_of(s3, x3);
    }
    return sum_of(sum_of(s0, s1), sum_of(s2, s3));
}

enum { WARPS_MAX = 32 };

struct Plus {
    static __device__ __forceinline__ float
    of(float a, float b)
    {
        return a + b;
    }
    static __device__ __forceinline__ float
    neutral()
    {
        return 0;
    }
};

struct Larger {
    static __device__ __forceinline__ float
    of(float a, float b)
    {
        return fmaxf(a, b);
    }
    static __device__ __forceinline__ float
    neutral()
    {
        return -INFINITY;
    }
};

/* Combine the values of `lanes` neighbouring threads, at most a warp; all get it. */
template <class F>
static __device__ __forceinline__ float
over_lanes(float value, unsigned int lanes)
{
    for (unsigned int distance = lanes / 2; distance > 0; distance /= 2) {
        value = F::of(value, __shfl_xor_sync(0xffffffffu, value, distance));
    }
    return value;
}

/* Combine the values of a block of whole warps; all get it. `shared` has WARPS_MAX
 * elements and may be used again at once. */
template <class F>
static __device__ __forceinline__ float
over_block(float value, float *shared)
{
    const unsigned int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    value = over_lanes<F>(value, 32);
    __syncthreads();
    if (lane == 0) {
        shared[threadIdx.x / 32] = value;
    }
    __syncthreads();
    return over_lanes<F>(lane < warps ? shared[lane] : F::neutral(), 32);
}

/* Sums along the fast axis: `lanes` neighbouring threads (up to a warp, or the whole
 * block) step through a chunk of a row together. */
KERNEL
__launch_bounds__(SUM_THREADS) sum_rows(SumLayout sum, float *out, const float *a)
{
    __shared__ float warps[WARPS_MAX];
    const unsigned int lane = threadIdx.x & (sum.lanes - 1);
    const size_t step = blockDim.x / sum.lanes;
    const size_t results = sum.outer * sum.inner * sum.chunks;
    /* All threads stay in the loop, as they meet in it. */
    for (size_t base = blockIdx.x * step; base < results; base += gridDim.x * step) {
        size_t at = base + threadIdx.x / sum.lanes, at_out = 0;
        const bool has_result = at < results;
        float s = 0;
        if (has_result) {
            size_t chunk = 0, inner = 0;
            if (sum.chunks > 1) {
                chunk = at % sum.chunks;
                at /= sum.chunks;
            }
            if (sum.inner > 1) {
                inner = at % sum.inner;
                at /= sum.inner;
            }
            at_out = at * sum.out_outer + chunk * sum.out_chunk + inner * sum.out_inner;
            const float *row = a + at * sum.a_outer + inner * sum.a_inner;
            size_t first = chunk * sum.chunk;
            const size_t end = min(first + sum.chunk, sum.reduced);
            if (sum.fours) {
                const float4 *fours = reinterpret_cast<const float4 *>(row);
                float4 s4 = strided_sum(fours, 1, first / 4 + lane, end / 4, sum.lanes);
                s = (s4.x + s4.y) + (s4.z + s4.w);
                first = end / 4 * 4;
            }
            s += strided_sum(row, sum.a_reduced, first + lane, end, sum.lanes);
        }
        s = sum.lanes <= 32 ? over_lanes<Plus>(s, sum.lanes)
                            : over_block<Plus>(s, warps);
        if (has_result && lane == 0) {
            out[at_out] = s;
        }
    }
}

static __device__ __forceinline__ void
store_sum(float *out, size_t stride, float value)
{
    (void)stride;
    *out = value;
}

static __device__ __forceinline__ void
store_sum(float *out, size_t stride, float4 value)
{
    out[0] = value.x;
    out[stride] = value.y;
    out[2 * stride] = value.z;
    out[3 * stride] = value.w;
}

/* A block sums a chunk of `lanes` neighbouring columns (of a T each); the threads of
 * one column add up in shared memory, blockDim.x elements of `sums`. */
template <typename T>
static __device__ __forceinline__ void
sum_tiles(const SumLayout &sum, float *out, const float *a, T *sums)
{
    const unsigned int width = sizeof(T) / sizeof(float);
    const unsigned int lane = threadIdx.x & (sum.lanes - 1);
    const unsigned int y = threadIdx.x / sum.lanes, height = blockDim.x / sum.lanes;
    const size_t columns = sum.inner / width;
    const size_t tiles = (columns + sum.lanes - 1) / sum.lanes;
    const size_t items = sum.outer * sum.chunks * tiles;
    for (size_t item = blockIdx.x; item < items; item += gridDim.x) {
        const size_t column = item % tiles * sum.lanes + lane;
        const size_t chunk = item / tiles % sum.chunks;
        const size_t outer = item / tiles / sum.chunks;
        T s = no_sum<T>();
        if (column < columns) {
            const float *at = a + outer * sum.a_outer + column * width * sum.a_inner;
            const size_t first = chunk * sum.chunk;
            const size_t end = min(first + sum.chunk, sum.reduced);
            s = strided_sum(reinterpret_cast<const T *>(at), sum.a_reduced / width,
                            first + y, end, height);
        }
        sums[threadIdx.x] = s;
        for (unsigned int half = height / 2; half > 0; half /= 2) {
            __syncthreads();
            if (y < half) {
                s = sum_of(s, sums[threadIdx.x + half * sum.lanes]);
                sums[threadIdx.x] = s;
            }
        }
        if (y == 0 && column < columns) {
            store_sum(out + outer * sum.out_outer + chunk * sum.out_chunk +
                          column * width * sum.out_inner,
                      sum.out_inner, s);
        }
        __syncthreads();
    }
}

/* Sums across the fast axis: neighbouring threads take neighbouring columns. */
KERNEL
__launch_bounds__(SUM_THREADS) sum_columns(SumLayout sum, float *out, const float *a)
{
    __shared__ float4 sums[SUM_THREADS];
    if (sum.fours) {
        sum_tiles(sum, out, a, sums);
    }
    else {
        sum_tiles(sum, out, a, reinterpret_cast<float *>(sums));
    }
}

enum { SOFTMAX_HELD = 8 }; /* values that a thread keeps */

/* Softmax of rows of up to SOFTMAX_HELD * lanes elements, which stay in registers. A
 * NaN is passed over by the maximum and comes in again by the sum: NumPy's result. */
KERNEL
softmax_rows(float *out, const float *m, size_t rows, size_t columns, size_t out_row,
             size_t out_column, size_t m_row, size_t m_column, unsigned int lanes)
{
    const unsigned int lane = threadIdx.x & (lanes - 1);
    const size_t step = blockDim.x / lanes;
    for (size_t base = blockIdx.x * step; base < rows; base += gridDim.x * step) {
        const size_t row = base + threadIdx.x / lanes;
        const size_t width = row < rows ? columns : 0;
        float x[SOFTMAX_HELD], largest = -INFINITY, sum = 0;
        for (unsigned int i = 0; i < SOFTMAX_HELD; i++) {
            const size_t column = lane + i * lanes;
            x[i] = column < width ? m[row * m_row + column * m_column] : -INFINITY;
            largest = fmaxf(largest, x[i]);
        }
        largest = over_lanes<Larger>(largest, lanes);
        for (unsigned int i = 0; i < SOFTMAX_HELD; i++) {
            if (lane + i * lanes < width) {
                x[i] = expf(x[i] - largest);
                sum += x[i];
            }
        }
        sum = over_lanes<Plus>(sum, lanes);
        for (unsigned int i = 0; i < SOFTMAX_HELD; i++) {
            const size_t column = lane + i * lanes;
            if (column < width) {
                out[row * out_row + column * out_column] = x[i] / sum;
            }
        }
    }
}

/* Softmax of longer rows, a block each. The row is read three times, from the caches
 * mostly; each thread writes only where it alone has read, so out may be m. */
KERNEL
softmax_long_rows(float *out, const float *m, size_t rows, size_t columns,
                  size_t out_row, size_t out_column, size_t m_row, size_t m_column)
{
    __shared__ float warps[WARPS_MAX];
    for (size_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const float *from = m + row * m_row;
        float *to = out + row * out_row;
        float largest = -INFINITY, sum = 0;
        for (size_t i = threadIdx.x; i < columns; i += blockDim.x) {
            largest = fmaxf(largest, from[i * m_column]);
        }
        largest = over_block<Larger>(largest, warps);
        for (size_t i = threadIdx.x; i < columns; i += blockDim.x) {
            sum += expf(from[i * m_column] - largest);
        }
        sum = over_block<Plus>(sum, warps);
        for (size_t i = threadIdx.x; i < columns; i += blockDim.x) {
            to[i * out_column] = expf(from[i * m_column] - largest) / sum;
        }
    }
}

/* Set *found to 1 if an element is infinite or NaN; all who find one write the same. */
KERNEL
find_nonfinite(int *found, const float *a, size_t n)
{
    /* Of a sum of products with 0 only such an element makes a NaN. */
    float s = 0;
    const size_t fours = ((uintptr_t)a & 15) == 0 ? n / 4 : 0;
    GRID_STRIDE(i, fours) {
        const float4 x = reinterpret_cast<const float4 *>(a)[i];
        s += (x.x * 0 + x.y * 0) + (x.z * 0 + x.w * 0);
    }
    GRID_STRIDE(i, n - fours * 4) {
        s += a[fours * 4 + i] * 0;
    }
    if (s != 0) {
        *found = 1;
    }
}
