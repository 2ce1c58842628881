/* Minibatches that have crossed the link as narrow as they were: their elements cast to
 * float32, or their indices made one-hot rows.
 *
 * The source is contiguous and may start at any address; the output are rows at a
 * pitch. With `fours`, rows of the output are written four elements at a time: out is
 * aligned to 16 bytes, and where there are several rows, columns and pitch are
 * multiples of four; for a cast, the source is aligned to four of its elements.
 * Otherwise, and for the last elements of a single row, it goes one by one. */
#include "common.cuh"

/* Four elements that one load brings. */
template <typename T> struct alignas(4 * sizeof(T)) Four {
    T at[4];
};

template <typename T>
static __device__ __forceinline__ T
element(const unsigned char *source, size_t i, bool is_aligned)
{
    if (is_aligned) {
        return reinterpret_cast<const T *>(source)[i];
    }
    T x;
    memcpy(&x, source + i * sizeof(T), sizeof(T));
    return x;
}

template <class Cast>
static __device__ __forceinline__ uint32_t
bits_of(typename Cast::Element x)
{
    return Cast::of(x);
}

template <class Cast>
static __device__ __forceinline__ uint4
bits_of(const Four<typename Cast::Element> &x)
{
    return make_uint4(Cast::of(x.at[0]), Cast::of(x.at[1]), Cast::of(x.at[2]),
                      Cast::of(x.at[3]));
}

/* From pieces of type From to such of type To; columns and pitch count these. A thread
 * has several loads on their way before it stores, since each brings few bytes. */
template <class Cast, typename To, typename From, bool is_aligned>
static __device__ __forceinline__ void
widen_as(To *__restrict__ out, const unsigned char *__restrict__ source, size_t rows,
         size_t columns, size_t pitch, unsigned int lanes)
{
    enum { AT_ONCE = sizeof(To) == sizeof(uint4) ? 2 : 4 };
    const size_t step = gridDim.y * (size_t)lanes;
    EACH_ROW(row, rows, lanes) {
        To *to = out + row * pitch;
        const size_t from = row * columns;
        size_t i = blockIdx.y * (size_t)lanes + (threadIdx.x & (lanes - 1));
        for (; i + (AT_ONCE - 1) * step < columns; i += AT_ONCE * step) {
            From pieces[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                pieces[k] = element<From>(source, from + i + k * step, is_aligned);
            }
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                to[i + k * step] = bits_of<Cast>(pieces[k]);
            }
        }
        for (; i < columns; i += step) {
            to[i] = bits_of<Cast>(element<From>(source, from + i, is_aligned));
        }
    }
}

template <class Cast>
static __device__ __forceinline__ void
widen_rows(uint32_t *__restrict__ out, const unsigned char *__restrict__ source,
           size_t rows, size_t columns, size_t pitch, unsigned int lanes, int fours)
{
    typedef typename Cast::Element Element;
    if (fours) {
        widen_as<Cast, uint4, Four<Element>, true>(reinterpret_cast<uint4 *>(out),
                                                   source, rows, columns / 4, pitch / 4,
                                                   lanes);
        const size_t done = columns / 4 * 4;
        out += done;
        source += done * sizeof(Element);
        columns -= done;
    }
    if (columns == 0) {
        return;
    }
    if ((uintptr_t)source % sizeof(Element) == 0) {
        widen_as<Cast, uint32_t, Element, true>(out, source, rows, columns, pitch,
                                                lanes);
    }
    else {
        widen_as<Cast, uint32_t, Element, false>(out, source, rows, columns, pitch,
                                                 lanes);
    }
}

/* A cast of elements x to the bits of float32: integers, lest a signalling NaN become a
 * quiet one on its way through an instruction for floats. */
#define WIDEN(name, type, bits) \
    struct Cast_##name { \
        typedef type Element; \
        static __device__ __forceinline__ uint32_t \
        of(type x) \
        { \
            return (bits); \
        } \
    }; \
    KERNEL widen_##name(uint32_t *__restrict__ out, \
                        const unsigned char *__restrict__ source, size_t rows, \
                        size_t columns, size_t pitch, unsigned int lanes, int fours) \
    { \
        widen_rows<Cast_##name>(out, source, rows, columns, pitch, lanes, fours); \
    }

/* The exponent is moved to its new bias; all ones stay all ones. A subnormal is read as
 * 1.f * 2^-14 instead of 0.f * 2^-14, and the difference taken off, which is exact. */
static __device__ __forceinline__ uint32_t
float_bits_of_half(uint16_t half)
{
    const uint32_t top = 0x7c00u << 13, one = 1u << 23;
    const uint32_t bits = (half & 0x7fffu) << 13, exponent = bits & top;
    const float small = __uint_as_float(bits + 113 * one) - __uint_as_float(113 * one);
    const uint32_t normal = bits + (exponent == top ? 224 * one : 112 * one);
    return (half & 0x8000u) << 16 | (exponent == 0 ? __float_as_uint(small) : normal);
}

WIDEN(bool, uint8_t, x != 0 ? 0x3f800000u : 0u)
WIDEN(i1, int8_t, __float_as_uint((float)x))
WIDEN(u1, uint8_t, __float_as_uint((float)x))
WIDEN(i2, int16_t, __float_as_uint((float)x))
WIDEN(u2, uint16_t, __float_as_uint((float)x))
WIDEN(i4, int32_t, __float_as_uint((float)x))
WIDEN(u4, uint32_t, __float_as_uint((float)x))
WIDEN(f2, uint16_t, float_bits_of_half(x))
WIDEN(f4, uint32_t, x)

/* 1 in the column that a row's index (int32) names, if there is one, else 0. */
KERNEL
one_hot_rows(float *__restrict__ out, const unsigned char *__restrict__ source,
             size_t rows, size_t columns, size_t pitch, unsigned int lanes, int fours)
{
    const bool is_aligned = (uintptr_t)source % sizeof(int32_t) == 0;
    EACH_ROW(row, rows, lanes) {
        float *to = out + row * pitch;
        /* A negative one is beyond all columns. */
        const size_t one = (size_t)(long long)element<int32_t>(source, row, is_aligned);
        size_t done = 0;
        if (fours) {
            EACH_COLUMN(i, columns / 4, lanes) {
                const size_t at = one - 4 * i;
                reinterpret_cast<float4 *>(to)[i] =
                    make_float4(at == 0 ? 1.0f : 0.0f, at == 1 ? 1.0f : 0.0f,
                                at == 2 ? 1.0f : 0.0f, at == 3 ? 1.0f : 0.0f);
            }
            done = columns / 4 * 4;
        }
        EACH_COLUMN(k, columns - done, lanes) {
            to[done + k] = done + k == one ? 1.0f : 0.0f;
        }
    }
}
