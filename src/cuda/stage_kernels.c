/* The loops of stage(): casts, for the processor at hand, and streaming stores.
 *
 * The casts are compiled for any x86-64 (or whatever else) and once more for AVX2, half
 * as many instructions for narrow integers and float16; the processor is asked at run
 * time. Both give the same bits. float16 is taken apart as integers rather than by
 * F16C, which would quiet signalling NaNs where NumPy's own routine keeps them. */
#include "stage.h"

/* Else the compiler puts a call of memcpy for a loop that copies, and for runs that fit
 * into the first cache the C library may take string instructions, half as fast. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-loop-distribute-patterns")
#endif

#include <fenv.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

static inline float
float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline double
double_of(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline uint32_t
bits_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline uint64_t
bits_of_double(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

/* The exponent is moved to its new bias; all ones stay all ones. A subnormal is read as
 * 1.f * 2^-14 instead of 0.f * 2^-14, and the difference taken off: exact, and no
 * subnormal float comes in, so modes that flush those change nothing. Masks, since a
 * loop with branches is not vectorised. */
static inline uint32_t
half_to_float(uint16_t half)
{
    const uint32_t top = (uint32_t)0x7c00 << 13, one = (uint32_t)1 << 23;
    uint32_t bits = (uint32_t)(half & 0x7fff) << 13;
    uint32_t is_special = -(uint32_t)((bits & top) == top);
    uint32_t is_small = -(uint32_t)((bits & top) == 0);
    uint32_t normal = bits + 112 * one + (is_special & 112 * one);
    float small = float_of(bits + 113 * one) - float_of(113 * one);
    uint32_t sign = (uint32_t)(half & 0x8000) << 16;
    return sign | (normal & ~is_small) | (bits_of_float(small) & is_small);
}

static inline uint64_t
half_to_double(uint16_t half)
{
    const uint64_t top = (uint64_t)0x7c00 << 42, one = (uint64_t)1 << 52;
    uint64_t bits = (uint64_t)(half & 0x7fff) << 42;
    uint64_t is_special = -(uint64_t)((bits & top) == top);
    uint64_t is_small = -(uint64_t)((bits & top) == 0);
    uint64_t normal = bits + 1008 * one + (is_special & 1008 * one);
    double small = double_of(bits + 1009 * one) - double_of(1009 * one);
    uint64_t sign = (uint64_t)(half & 0x8000) << 48;
    return sign | (normal & ~is_small) | (bits_of_double(small) & is_small);
}

#define KERNEL(name) plain_##name
#include "stage_kernels.h"
#undef KERNEL

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__AVX2__)
#define HAS_AVX2_SET
#pragma GCC push_options
#pragma GCC target("avx2")
#define KERNEL(name) avx2_##name
#include "stage_kernels.h"
#undef KERNEL
#pragma GCC pop_options
#endif

StageCast
stage_cast(StageSource source, int is_swapped, StageTarget target)
{
#ifdef HAS_AVX2_SET
    if (__builtin_cpu_supports("avx2")) {
        return avx2_table[source][is_swapped][target];
    }
#endif
    return plain_table[source][is_swapped][target];
}

void
stage_stream(char *restrict dest, const char *restrict src, size_t nbytes)
{
#if defined(__SSE2__)
    for (size_t i = 0; i < nbytes; i += 16) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(src + i));
        _mm_stream_si128((__m128i *)(dest + i), bytes);
    }
#else
    memcpy(dest, src, nbytes);
#endif
}

void
stage_stream_end(void)
{
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

int
stage_take_exceptions(void)
{
#if defined(__SSE2__)
    /* fetestexcept would ask the x87 unit too, which takes longer than a small copy. */
    unsigned int word = _mm_getcsr();
    unsigned int raised = word & (FE_INVALID | FE_OVERFLOW | FE_UNDERFLOW);
    if (raised != 0) {
        _mm_setcsr(word & ~(unsigned int)_MM_EXCEPT_MASK);
    }
    return (int)raised;
#else
    int raised = fetestexcept(FE_INVALID | FE_OVERFLOW | FE_UNDERFLOW);
    if (raised != 0) {
        feclearexcept(raised);
    }
    return raised;
#endif
}
