/* CUDA C++ as far as the kernels of this repository use it, for a C++17 compiler.

   Given by `-include` before the kernels. What they keep to, so that one source serves
   both compilers:

   - a kernel is written `KERNEL name(parameters)`. Parameters are copied at the launch,
     so they are trivially copyable; a pointer parameter is NULL or points into live
     device or page-locked memory (one past the end will do). Pointers within structs
     are not looked at;
   - dynamic shared memory is `DYNAMIC_SHARED(type, name);`, on the GPU `extern
     __shared__ type name[]`;
   - a kernel of a cooperative launch lets all blocks meet with `GRID_SYNC();`. Both
     kinds of shared memory stay each block's own there;
   - a thread has 64 KiB of stack;
   - threads of a block meet at the same barriers, all of them; lanes of a warp at the
     same shuffles and votes, all that there are, with a mask that has them all. Whole
     warps may end early where the others only meet in their warps. What does not keep
     to this ends the process with a message that names the kernel;
   - `#include <curand_kernel.h>` and the GPU's definitions of these macros stand under
     `#ifdef __CUDACC__`.

   Threads run one after another, each up to a place where it must wait for others, so
   that atomics are plain. Shared memory is filled with 0xFF before each block. Lanes
   that do not exist give 0xFF bytes in a shuffle. */

#ifndef CUDA_ON_CPU_H
#define CUDA_ON_CPU_H

#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <type_traits>

/* --- the language --- */

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __grid_constant__
/* One launch runs at a time and in one thread of the process, so what is local to the
   thread is the block's; cuda_on_cpu.cc finds it all in one piece. */
#define __shared__ static thread_local

#ifndef KERNEL
#define KERNEL extern "C" __global__ void
#endif
#define DYNAMIC_SHARED(type, name) \
    type *const name = static_cast<type *>(on_cpu::dynamic_shared())
#define GRID_SYNC() on_cpu::meet(on_cpu::GRID)

/* --- vectors --- */

#define ON_CPU_VECTORS(X) \
    X(int, int, 8, 4, 16) \
    X(unsigned, uint, 8, 4, 16) \
    X(float, float, 8, 4, 16) \
    X(double, double, 16, 8, 16)

#define X(type, name, two, three, four) \
    struct alignas(two) name##2 { \
        type x, y; \
    }; \
    struct alignas(three) name##3 { \
        type x, y, z; \
    }; \
    struct alignas(four) name##4 { \
        type x, y, z, w; \
    }; \
    static inline name##2 make_##name##2(type x, type y) { \
        return {x, y}; \
    } \
    static inline name##3 make_##name##3(type x, type y, type z) { \
        return {x, y, z}; \
    } \
    static inline name##4 make_##name##4(type x, type y, type z, type w) { \
        return {x, y, z, w}; \
    }
ON_CPU_VECTORS(X)
#undef X

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z)
    {
    }
};

extern uint3 threadIdx, blockIdx; /* the running thread's; cuda_on_cpu.cc sets them */
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

/* --- meeting --- */

namespace on_cpu {

enum Place { BLOCK, GRID, WARP, SHUFFLE, VOTE };

/* Wait until all threads that must come there have come. */
void meet(Place place);
/* Meet in the warp; return what its 32 lanes brought, for use before the next meeting.
   What lanes that do not exist brought has all bits set. */
const uint64_t *exchange(Place place, uint64_t brought, unsigned mask);
int lane();
void *dynamic_shared();
[[noreturn]] void fail(const char *text);

/* Bring a value, and return that of a lane. Inlined, as are its callers: the processor
   foresees no return from a function in which the stack was changed. */
template <typename T>
__forceinline__ T
shuffle(unsigned mask, T value, int from)
{
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) <= sizeof(uint64_t));
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof(value));
    memcpy(&value, &exchange(SHUFFLE, bits, mask)[from], sizeof(value));
    return value;
}

/* Return the bits of the lanes that brought true. */
static inline unsigned
ballot(unsigned mask, bool mine)
{
    const uint64_t *all = exchange(VOTE, mine, mask);
    unsigned bits = 0;
    for (int i = 0; i < warpSize; i++) {
        bits |= (unsigned)(all[i] == 1) << i;
    }
    return bits;
}

} // namespace on_cpu

static inline void
__syncthreads()
{
    on_cpu::meet(on_cpu::BLOCK);
}

static inline void
__syncwarp(unsigned mask = 0xffffffffu)
{
    on_cpu::exchange(on_cpu::WARP, 0, mask);
}

/* Shuffles stay within groups of `width` lanes, a power of two. */

template <typename T>
__forceinline__ T
__shfl_sync(unsigned mask, T value, int source, int width = 32)
{
    int first = on_cpu::lane() & ~(width - 1);
    return on_cpu::shuffle(mask, value, first + (source & (width - 1)));
}

template <typename T>
__forceinline__ T
__shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32)
{
    int own = on_cpu::lane(), from = own + (int)delta;
    return on_cpu::shuffle(mask, value, from > (own | (width - 1)) ? own : from);
}

template <typename T>
__forceinline__ T
__shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32)
{
    int own = on_cpu::lane(), from = own - (int)delta;
    return on_cpu::shuffle(mask, value, from < (own & ~(width - 1)) ? own : from);
}

template <typename T>
__forceinline__ T
__shfl_xor_sync(unsigned mask, T value, int bits, int width = 32)
{
    int own = on_cpu::lane(), from = own ^ bits;
    return on_cpu::shuffle(mask, value, from > (own | (width - 1)) ? own : from);
}

static inline unsigned
__ballot_sync(unsigned mask, int predicate)
{
    return on_cpu::ballot(mask, predicate != 0);
}

static inline int
__any_sync(unsigned mask, int predicate)
{
    return on_cpu::ballot(mask, predicate != 0) != 0;
}

static inline int
__all_sync(unsigned mask, int predicate)
{
    return on_cpu::ballot(mask, predicate == 0) == 0;
}

static inline void
__threadfence()
{
}

static inline void
__threadfence_block()
{
}

/* --- memory --- */

template <typename T>
T
__ldg(const T *address)
{
    return *address;
}

/* Atomic as no thread stops within one; each returns the old value. The value's type
   takes no part in the choice of T, as in CUDA's overloads. */

#define ON_CPU_ATOMICS(X) \
    X(atomicAdd, old + value) \
    X(atomicSub, old - value) \
    X(atomicExch, value) \
    X(atomicMin, value < old ? value : old) \
    X(atomicMax, value > old ? value : old) \
    X(atomicAnd, old & value) \
    X(atomicOr, old | value) \
    X(atomicXor, old ^ value)

#define X(name, result) \
    template <typename T> T name(T *address, std::common_type_t<T> value) \
    { \
        T old = *address; \
        *address = (result); \
        return old; \
    }
ON_CPU_ATOMICS(X)
#undef X

template <typename T>
T
atomicCAS(T *address, std::common_type_t<T> expected, std::common_type_t<T> value)
{
    T old = *address;
    if (old == expected) {
        *address = value;
    }
    return old;
}

/* --- arithmetic --- */

#define ON_CPU_ORDERED(X) \
    X(int) \
    X(unsigned) \
    X(long) \
    X(unsigned long) \
    X(long long) \
    X(unsigned long long)

#define X(type) \
    static inline type min(type a, type b) \
    { \
        return b < a ? b : a; \
    } \
    static inline type max(type a, type b) \
    { \
        return a < b ? b : a; \
    }
ON_CPU_ORDERED(X)
#undef X

static inline float
min(float a, float b)
{
    return fminf(a, b);
}

static inline float
max(float a, float b)
{
    return fmaxf(a, b);
}

static inline double
min(double a, double b)
{
    return fmin(a, b);
}

static inline double
max(double a, double b)
{
    return fmax(a, b);
}

template <typename To, typename From>
To
on_cpu_bits(From value)
{
    static_assert(sizeof(To) == sizeof(From));
    To out;
    memcpy(&out, &value, sizeof(out));
    return out;
}

/* The C library declares some of these names for itself, hence macros. */
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __sincosf(x, s, c) sincosf(x, s, c)

#define __fdividef(x, y) ((float)(x) / (float)(y))
#define __fdiv_rn(x, y) ((float)(x) / (float)(y))
#define __fadd_rn(x, y) ((float)(x) + (float)(y))
#define __fsub_rn(x, y) ((float)(x) - (float)(y))
#define __fmul_rn(x, y) ((float)(x) * (float)(y))
#define __fmaf_rn(x, y, z) fmaf(x, y, z)
#define __frcp_rn(x) (1.0f / (float)(x))
#define __fsqrt_rn(x) sqrtf(x)
#define __frsqrt_rn(x) (1.0f / sqrtf(x))
#define __saturatef(x) fminf(fmaxf(x, 0.0f), 1.0f)
#define rsqrtf(x) (1.0f / sqrtf(x))
#define rsqrt(x) (1.0 / sqrt(x))

#define __float_as_int(x) on_cpu_bits<int>((float)(x))
#define __float_as_uint(x) on_cpu_bits<unsigned>((float)(x))
#define __int_as_float(x) on_cpu_bits<float>((int)(x))
#define __uint_as_float(x) on_cpu_bits<float>((unsigned)(x))
#define __float2int_rn(x) ((int)rintf(x))
#define __float2int_rz(x) ((int)(float)(x))
#define __float2int_rd(x) ((int)floorf(x))
#define __float2int_ru(x) ((int)ceilf(x))
#define __float2uint_rn(x) ((unsigned)rintf(x))
#define __float2uint_rz(x) ((unsigned)(float)(x))
#define __int2float_rn(x) ((float)(int)(x))
#define __uint2float_rn(x) ((float)(unsigned)(x))

#define __umulhi(x, y) ((unsigned)(((uint64_t)(unsigned)(x) * (unsigned)(y)) >> 32))
#define __mulhi(x, y) ((int)(((int64_t)(int)(x) * (int)(y)) >> 32))
#define __umul64hi(x, y) \
    ((unsigned long long)(((unsigned __int128)(uint64_t)(x) * (uint64_t)(y)) >> 64))
#define __popc(x) __builtin_popcount((unsigned)(x))
#define __ffs(x) __builtin_ffs((int)(x))

static inline int
__clz(int x)
{
    return x ? __builtin_clz((unsigned)x) : 32;
}

#include "philox_on_cpu.h"

#endif
