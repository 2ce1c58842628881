/* Runs of elements cast to float32 or float64, or moved as they are, for
 * stage_kernels.c, which includes this once for each set of instructions: KERNEL(name)
 * gives a function its name.
 *
 * Elements are loaded and stored by memcpy, which compiles to a plain move: src may lie
 * at any address. What must keep the bits of a NaN is moved as an integer, as in
 * NumPy. */

/* `to` elements of expression(x), x the element's `from` value at each stride. */
#define CAST(name, from, to, expression) \
    static void KERNEL(name)(char *restrict dest, const char *restrict src, \
                             ptrdiff_t stride, size_t count) \
    { \
        if (stride == (ptrdiff_t)sizeof(from)) { \
            for (size_t i = 0; i < count; i++) { \
                from x; \
                memcpy(&x, src + i * sizeof(from), sizeof(x)); \
                to y = (expression); \
                memcpy(dest + i * sizeof(to), &y, sizeof(y)); \
            } \
        } \
        else { \
            for (size_t i = 0; i < count; i++) { \
                from x; \
                memcpy(&x, src + (ptrdiff_t)i * stride, sizeof(x)); \
                to y = (expression); \
                memcpy(dest + i * sizeof(to), &y, sizeof(y)); \
            } \
        } \
    }

CAST(bool_f4, uint8_t, float, (float)(x != 0))
CAST(bool_f8, uint8_t, double, (double)(x != 0))
CAST(u1_f4, uint8_t, float, (float)x)
CAST(u1_f8, uint8_t, double, (double)x)
CAST(i1_f4, int8_t, float, (float)x)
CAST(i1_f8, int8_t, double, (double)x)

CAST(u2_f4, uint16_t, float, (float)x)
CAST(u2_f8, uint16_t, double, (double)x)
CAST(u2s_f4, uint16_t, float, (float)__builtin_bswap16(x))
CAST(u2s_f8, uint16_t, double, (double)__builtin_bswap16(x))
CAST(i2_f4, int16_t, float, (float)x)
CAST(i2_f8, int16_t, double, (double)x)
CAST(i2s_f4, uint16_t, float, (float)(int16_t)__builtin_bswap16(x))
CAST(i2s_f8, uint16_t, double, (double)(int16_t)__builtin_bswap16(x))

CAST(u4_f4, uint32_t, float, (float)x)
CAST(u4_f8, uint32_t, double, (double)x)
CAST(u4s_f4, uint32_t, float, (float)__builtin_bswap32(x))
CAST(u4s_f8, uint32_t, double, (double)__builtin_bswap32(x))
CAST(i4_f4, int32_t, float, (float)x)
CAST(i4_f8, int32_t, double, (double)x)
CAST(i4s_f4, uint32_t, float, (float)(int32_t)__builtin_bswap32(x))
CAST(i4s_f8, uint32_t, double, (double)(int32_t)__builtin_bswap32(x))

CAST(u8_f4, uint64_t, float, (float)x)
CAST(u8_f8, uint64_t, double, (double)x)
CAST(u8s_f4, uint64_t, float, (float)__builtin_bswap64(x))
CAST(u8s_f8, uint64_t, double, (double)__builtin_bswap64(x))
CAST(i8_f4, int64_t, float, (float)x)
CAST(i8_f8, int64_t, double, (double)x)
CAST(i8s_f4, uint64_t, float, (float)(int64_t)__builtin_bswap64(x))
CAST(i8s_f8, uint64_t, double, (double)(int64_t)__builtin_bswap64(x))

CAST(f2_f4, uint16_t, uint32_t, half_to_float(x))
CAST(f2_f8, uint16_t, uint64_t, half_to_double(x))
CAST(f2s_f4, uint16_t, uint32_t, half_to_float(__builtin_bswap16(x)))
CAST(f2s_f8, uint16_t, uint64_t, half_to_double(__builtin_bswap16(x)))

CAST(f4_f8, float, double, (double)x)
CAST(f4s_f8, uint32_t, double, (double)float_of(__builtin_bswap32(x)))

CAST(f8_f4, double, float, (float)x)
CAST(f8s_f4, uint64_t, float, (float)double_of(__builtin_bswap64(x)))

/* No cast: bytes of an element, in the order of the machine. */
CAST(move1, uint8_t, uint8_t, x)
CAST(move2, uint16_t, uint16_t, x)
CAST(move2s, uint16_t, uint16_t, __builtin_bswap16(x))
CAST(move4, uint32_t, uint32_t, x)
CAST(move4s, uint32_t, uint32_t, __builtin_bswap32(x))
CAST(move8, uint64_t, uint64_t, x)
CAST(move8s, uint64_t, uint64_t, __builtin_bswap64(x))

#undef CAST

#define LOOPS(to_f4, to_f8, same) {KERNEL(to_f4), KERNEL(to_f8), KERNEL(same)}

static const StageCast KERNEL(table)[STAGE_SOURCES][2][STAGE_TARGETS] = {
    [STAGE_BOOL] = {LOOPS(bool_f4, bool_f8, move1), LOOPS(bool_f4, bool_f8, move1)},
    [STAGE_I1] = {LOOPS(i1_f4, i1_f8, move1), LOOPS(i1_f4, i1_f8, move1)},
    [STAGE_U1] = {LOOPS(u1_f4, u1_f8, move1), LOOPS(u1_f4, u1_f8, move1)},
    [STAGE_I2] = {LOOPS(i2_f4, i2_f8, move2), LOOPS(i2s_f4, i2s_f8, move2s)},
    [STAGE_U2] = {LOOPS(u2_f4, u2_f8, move2), LOOPS(u2s_f4, u2s_f8, move2s)},
    [STAGE_I4] = {LOOPS(i4_f4, i4_f8, move4), LOOPS(i4s_f4, i4s_f8, move4s)},
    [STAGE_U4] = {LOOPS(u4_f4, u4_f8, move4), LOOPS(u4s_f4, u4s_f8, move4s)},
    [STAGE_I8] = {LOOPS(i8_f4, i8_f8, move8), LOOPS(i8s_f4, i8s_f8, move8s)},
    [STAGE_U8] = {LOOPS(u8_f4, u8_f8, move8), LOOPS(u8s_f4, u8s_f8, move8s)},
    [STAGE_F2] = {LOOPS(f2_f4, f2_f8, move2), LOOPS(f2s_f4, f2s_f8, move2s)},
    [STAGE_F4] = {LOOPS(move4, f4_f8, move4), LOOPS(move4s, f4s_f8, move4s)},
    [STAGE_F8] = {LOOPS(f8_f4, move8, move8), LOOPS(f8s_f4, move8s, move8s)},
};

#undef LOOPS
