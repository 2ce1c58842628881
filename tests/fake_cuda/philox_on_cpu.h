/* cuRAND's Philox4x32-10 generator on the CPU, with the same numbers.

   The algorithm is that of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as
   easy as 1, 2, 3" (2011). The seed is the key. The low half of the counter is the
   place within a subsequence, four numbers a step, the high half the subsequence. */

#ifndef PHILOX_ON_CPU_H
#define PHILOX_ON_CPU_H

namespace on_cpu {

struct Philox {
    uint64_t place, subsequence, key;
    uint4 block;   /* the numbers at this place */
    unsigned next; /* which of them comes next, 0 to 3 */
};

/* Return the four numbers of a counter. */
static inline uint4
philox(uint64_t low, uint64_t high, uint64_t key)
{
    uint32_t c0 = (uint32_t)low, c1 = (uint32_t)(low >> 32);
    uint32_t c2 = (uint32_t)high, c3 = (uint32_t)(high >> 32);
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t even = (uint64_t)0xd2511f53u * c0, odd = (uint64_t)0xcd9e8d57u * c2;
        c0 = (uint32_t)(odd >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)odd;
        c2 = (uint32_t)(even >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)even;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    return make_uint4(c0, c1, c2, c3);
}

/* Go on by one step; the place carries into the subsequence. */
static inline void
philox_step(Philox *state)
{
    state->subsequence += ++state->place == 0;
    state->block = philox(state->place, state->subsequence, state->key);
}

/* Map to (0, 1]. */
static inline float
uniform(unsigned x)
{
    return (float)x * 0x1p-32f + 0x1p-33f;
}

/* Return two normals (Box-Muller). */
static inline float2
normals(unsigned x, unsigned y)
{
    const float turn = 6.2831855f;
    float angle = (float)y * (0x1p-32f * turn) + 0x1p-33f * turn;
    float radius = sqrtf(-2.0f * logf(uniform(x)));
    return make_float2(radius * sinf(angle), radius * cosf(angle));
}

} // namespace on_cpu

typedef on_cpu::Philox curandStatePhilox4_32_10_t;

/* Start `offset` numbers into a subsequence. */
static inline void
curand_init(unsigned long long seed, unsigned long long subsequence,
            unsigned long long offset, curandStatePhilox4_32_10_t *state)
{
    state->key = seed;
    state->subsequence = subsequence;
    state->place = offset / 4;
    state->next = (unsigned)(offset % 4);
    state->block = on_cpu::philox(state->place, subsequence, seed);
}

/* Return the next number. */
static inline unsigned
curand(curandStatePhilox4_32_10_t *state)
{
    const unsigned here[] = {state->block.x, state->block.y, state->block.z,
                             state->block.w};
    unsigned number = here[state->next];
    state->next = (state->next + 1) % 4;
    if (state->next == 0) {
        on_cpu::philox_step(state);
    }
    return number;
}

/* Return the next four. */
static inline uint4
curand4(curandStatePhilox4_32_10_t *state)
{
    uint4 out;
    out.x = curand(state);
    out.y = curand(state);
    out.z = curand(state);
    out.w = curand(state);
    return out;
}

static inline float
curand_uniform(curandStatePhilox4_32_10_t *state)
{
    return on_cpu::uniform(curand(state));
}

static inline float4
curand_uniform4(curandStatePhilox4_32_10_t *state)
{
    uint4 x = curand4(state);
    return make_float4(on_cpu::uniform(x.x), on_cpu::uniform(x.y),
                       on_cpu::uniform(x.z), on_cpu::uniform(x.w));
}

static inline float4
curand_normal4(curandStatePhilox4_32_10_t *state)
{
    uint4 x = curand4(state);
    float2 one = on_cpu::normals(x.x, x.y), two = on_cpu::normals(x.z, x.w);
    return make_float4(one.x, one.y, two.x, two.y);
}

#endif
