/* Minibatches that have crossed the link as narrow as they were: their elements cast to
 * float32, or their indices made one-hot rows. One launch takes all inputs of a
 * minibatch, since the small ones take less time than a launch. */
#include "common.cuh"
#include "unpack_layout.h"

/* The block's place in what it has of the grid, as EACH_ROW and EACH_COLUMN see it. */
struct Tile {
    unsigned int x, y, across, along, lanes;
};

#define EACH_ROW_OF(tile, row, rows) \
    for (size_t row = (tile).x * (size_t)ROWS_OF(blockDim.x, (tile).lanes) + \
                      ROWS_OF(threadIdx.x, (tile).lanes); \
         row < (rows); \
         row += (tile).across * (size_t)ROWS_OF(blockDim.x, (tile).lanes))

static __device__ __forceinline__ size_t
first_column(const Tile &tile)
{
    return tile.y * (size_t)tile.lanes + (threadIdx.x & (tile.lanes - 1));
}

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
         size_t columns, size_t pitch, const Tile &tile)
{
    enum { AT_ONCE = sizeof(To) == sizeof(uint4) ? 2 : 4 };
    const size_t step = tile.along * (size_t)tile.lanes;
    EACH_ROW_OF(tile, row, rows)
    {
        To *to = out + row * pitch;
        const size_t from = row * columns;
        size_t i = first_column(tile);
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
widen(const UnpackPart &part, const Tile &tile)
{
    typedef typename Cast::Element Element;
    uint32_t *out = reinterpret_cast<uint32_t *>(part.out);
    const unsigned char *source = reinterpret_cast<const unsigned char *>(part.source);
    size_t columns = part.columns;
    if (part.fours) {
        widen_as<Cast, uint4, Four<Element>, true>(reinterpret_cast<uint4 *>(out),
                                                   source, part.rows, columns / 4,
                                                   part.pitch / 4, tile);
        const size_t done = columns / 4 * 4;
        out += done;
        source += done * sizeof(Element);
        columns -= done;
    }
    if (columns == 0) {
        return;
    }
    if ((uintptr_t)source % sizeof(Element) == 0) {
        widen_as<Cast, uint32_t, Element, true>(out, source, part.rows, columns,
                                                part.pitch, tile);
    }
    else {
        widen_as<Cast, uint32_t, Element, false>(out, source, part.rows, columns,
                                                 part.pitch, tile);
    }
}

/* 1 in the column that a row's index (int32) names, if there is one, else 0. */
static __device__ __forceinline__ void
one_hot(const UnpackPart &part, const Tile &tile)
{
    float *out = reinterpret_cast<float *>(part.out);
    const unsigned char *source = reinterpret_cast<const unsigned char *>(part.source);
    const bool is_aligned = part.source % sizeof(int32_t) == 0;
    const size_t columns = part.columns, fours = part.fours ? columns / 4 : 0;
    const size_t step = tile.along * (size_t)tile.lanes;
    EACH_ROW_OF(tile, row, part.rows)
    {
        float *to = out + row * part.pitch;
        /* A negative one is beyond all columns. */
        const size_t one = (size_t)(long long)element<int32_t>(source, row, is_aligned);
        for (size_t i = first_column(tile); i < fours; i += step) {
            const size_t at = one - 4 * i;
            reinterpret_cast<float4 *>(to)[i] =
                make_float4(at == 0 ? 1.0f : 0.0f, at == 1 ? 1.0f : 0.0f,
                            at == 2 ? 1.0f : 0.0f, at == 3 ? 1.0f : 0.0f);
        }
        for (size_t i = 4 * fours + first_column(tile); i < columns; i += step) {
            to[i] = i == one ? 1.0f : 0.0f;
        }
    }
}

/* A cast of elements x to the bits of float32: integers, lest a signalling NaN become a
 * quiet one on its way through an instruction for floats. */
#define CAST(name, type, bits) \
    struct Cast_##name { \
        typedef type Element; \
        static __device__ __forceinline__ uint32_t of(type x) \
        { \
            return (bits); \
        } \
    };

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

CAST(bool, uint8_t, x != 0 ? 0x3f800000u : 0u)
CAST(i1, int8_t, __float_as_uint((float)x))
CAST(u1, uint8_t, __float_as_uint((float)x))
CAST(i2, int16_t, __float_as_uint((float)x))
CAST(u2, uint16_t, __float_as_uint((float)x))
CAST(i4, int32_t, __float_as_uint((float)x))
CAST(u4, uint32_t, __float_as_uint((float)x))
CAST(f2, uint16_t, float_bits_of_half(x))
CAST(f4, uint32_t, x)

#define WIDEN(name) \
    case UNPACK_##name: \
        widen<Cast_##name>(part, tile); \
        break;

KERNEL
unpack(const UnpackParts all)
{
    int k = 0;
    unsigned int begin = 0;
    while (k < all.count - 1 && blockIdx.x >= all.parts[k].end) {
        begin = all.parts[k].end;
        k++;
    }
    const UnpackPart &part = all.parts[k];
    const unsigned int block = blockIdx.x - begin;
    const Tile tile = {block % part.across, block / part.across, part.across,
                       part.along, part.lanes};
    switch (part.kind) {
        WIDEN(bool)
        WIDEN(i1)
        WIDEN(u1)
        WIDEN(i2)
        WIDEN(u2)
        WIDEN(i4)
        WIDEN(u4)
        WIDEN(f2)
        WIDEN(f4)
    case UNPACK_one_hot:
        one_hot(part, tile);
        break;
    }
}
