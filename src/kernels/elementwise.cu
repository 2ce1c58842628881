/* Elementwise operations: out = f(out, a, b; s, t).
 *
 * Each is an expression of o (the old value of out), a, b and the scalars s and t. Its
 * flat kernel takes contiguous arrays, four elements at a time where they are aligned;
 * its strided kernel takes any strides, 0 included (broadcasting). An input that an
 * expression does not use may be any valid pointer and is not read. */
#include "common.cuh"
#include "map_layout.h"

template <class F>
static __device__ __forceinline__ void
map_flat(float *out, const float *a, const float *b, float s, float t, size_t n)
{
    size_t done = 0;
    if ((((uintptr_t)out | (uintptr_t)a | (uintptr_t)b) & 15) == 0) {
        size_t fours = n / 4;
        GRID_STRIDE(i, fours) {
            float4 x = {0, 0, 0, 0}, y = {0, 0, 0, 0}, z = {0, 0, 0, 0};
            if (F::reads_a) {
                x = reinterpret_cast<const float4 *>(a)[i];
            }
            if (F::reads_b) {
                y = reinterpret_cast<const float4 *>(b)[i];
            }
            if (F::reads_out) {
                z = reinterpret_cast<const float4 *>(out)[i];
            }
            z.x = F::of(z.x, x.x, y.x, s, t);
            z.y = F::of(z.y, x.y, y.y, s, t);
            z.z = F::of(z.z, x.z, y.z, s, t);
            z.w = F::of(z.w, x.w, y.w, s, t);
            reinterpret_cast<float4 *>(out)[i] = z;
        }
        done = fours * 4;
    }
    GRID_STRIDE(k, n - done) {
        size_t i = done + k;
        out[i] = F::of(F::reads_out ? out[i] : 0, F::reads_a ? a[i] : 0,
                       F::reads_b ? b[i] : 0, s, t);
    }
}

template <class F>
static __device__ __forceinline__ void
map_strided(const MapLayout &layout, float *out, const float *a, const float *b,
            float s, float t, unsigned int n)
{
    GRID_STRIDE(i, n) {
        unsigned int rest = (unsigned int)i;
        long long at_out = 0, at_a = 0, at_b = 0;
        for (int axis = layout.ndim - 1; axis > 0; axis--) {
            unsigned int size = layout.shape[axis];
            unsigned int above = rest / size;
            unsigned int k = rest - above * size;
            rest = above;
            at_out += k * layout.out[axis];
            at_a += k * layout.a[axis];
            at_b += k * layout.b[axis];
        }
        at_out += rest * layout.out[0];
        at_a += rest * layout.a[0];
        at_b += rest * layout.b[0];
        out[at_out] = F::of(F::reads_out ? out[at_out] : 0, F::reads_a ? a[at_a] : 0,
                            F::reads_b ? b[at_b] : 0, s, t);
    }
}

enum { READS_OUT = 1, READS_A = 2, READS_B = 4 };

#define MAP(name, reads, expression) \
    struct Map_##name { \
        static constexpr bool reads_out = ((reads) & READS_OUT) != 0; \
        static constexpr bool reads_a = ((reads) & READS_A) != 0; \
        static constexpr bool reads_b = ((reads) & READS_B) != 0; \
        static __device__ __forceinline__ float \
        of(float o, float a, float b, float s, float t) \
        { \
            (void)o, (void)a, (void)b, (void)s, (void)t; \
            return (expression); \
        } \
    }; \
    KERNEL name##_flat(float *out, const float *a, const float *b, float s, float t, \
                       size_t n) \
    { \
        map_flat<Map_##name>(out, a, b, s, t, n); \
    } \
    KERNEL name##_strided(MapLayout layout, float *out, const float *a, \
                          const float *b, float s, float t, unsigned int n) \
    { \
        map_strided<Map_##name>(layout, out, a, b, s, t, n); \
    }

/* NumPy's: a NaN is kept, and the upper limit wins where they cross. */
static __device__ __forceinline__ float
clipped(float x, float low, float high)
{
    if (x != x) {
        return x;
    }
    x = x < low ? low : x;
    return x > high ? high : x;
}

/* Without overflow on either side. */
static __device__ __forceinline__ float
logistic(float x)
{
    float e = expf(-fabsf(x));
    return (x >= 0 ? 1.0f : e) / (1.0f + e);
}

static __device__ __forceinline__ float
sign_of(float x)
{
    return x > 0 ? 1.0f : x < 0 ? -1.0f : x == 0 ? 0.0f : x;
}

MAP(abs, READS_A, fabsf(a))
MAP(accumulate, READS_OUT | READS_A, o + a)
MAP(add, READS_A | READS_B, a + b)
MAP(add_if, READS_OUT | READS_A | READS_B, b != 0 ? o + a : o)
MAP(add_scalar, READS_A, a + s)
MAP(clip, READS_A, clipped(a, s, t))
MAP(copy, READS_A, a)
MAP(copy_if, READS_OUT | READS_A | READS_B, b != 0 ? a : o)
MAP(divide, READS_A | READS_B, a / b)
MAP(el, READS_A, a > 0 ? a : expm1f(a))
MAP(el_deriv, READS_A | READS_B, a > 0 ? b : b * (a + 1.0f))
MAP(el_of_sum, READS_A | READS_B, Map_el::of(o, a + b, 0, s, t))
MAP(fill, 0, s)
MAP(fill_if, READS_OUT | READS_A, a != 0 ? s : o)
MAP(log, READS_A, logf(a))
MAP(modulo, READS_A | READS_B, fmodf(a, b))
MAP(mult, READS_A | READS_B, a * b)
MAP(mult_add, READS_OUT | READS_A | READS_B, o + a * b)
MAP(mult_add_scalar, READS_OUT | READS_A, o + s * a)
MAP(mult_scalar, READS_A, s * a)
MAP(power, READS_A, powf(a, s))
MAP(rel, READS_A, a * (a > 0 ? 1.0f : 0.0f))
MAP(rel_deriv, READS_A | READS_B, b * (a > 0 ? 1.0f : 0.0f))
MAP(rel_of_sum, READS_A | READS_B, Map_rel::of(o, a + b, 0, s, t))
MAP(sigmoid, READS_A, logistic(a))
MAP(sigmoid_deriv, READS_A | READS_B, b * a * (1.0f - a))
MAP(sigmoid_of_sum, READS_A | READS_B, Map_sigmoid::of(o, a + b, 0, s, t))
MAP(sign, READS_A, sign_of(a))
MAP(sqrt, READS_A, sqrtf(a))
MAP(subtract, READS_A | READS_B, a - b)
MAP(tanh, READS_A, tanhf(a))
MAP(tanh_deriv, READS_A | READS_B, b * (1.0f - a * a))
MAP(tanh_of_sum, READS_A | READS_B, Map_tanh::of(o, a + b, 0, s, t))
