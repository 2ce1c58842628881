/* What gather.c has from stage_kernels.c: loops over runs of elements, no Python. */
#ifndef BRAINSTORM_DBUF_STAGE_H
#define BRAINSTORM_DBUF_STAGE_H

#include <stddef.h>

/* The dtypes that are cast, or moved, here, by NumPy's letters. */
typedef enum {
    STAGE_BOOL,
    STAGE_I1,
    STAGE_U1,
    STAGE_I2,
    STAGE_U2,
    STAGE_I4,
    STAGE_U4,
    STAGE_I8,
    STAGE_U8,
    STAGE_F2,
    STAGE_F4,
    STAGE_F8,
    STAGE_SOURCES
} StageSource;

/* What to. */
typedef enum {
    STAGE_TO_F4,
    STAGE_TO_F8,
    STAGE_TO_SAME, /* the source's own dtype, in the byte order of the machine */
    STAGE_TARGETS
} StageTarget;

/* Cast `count` elements, `stride` bytes apart in src and side by side in dest. */
typedef void (*StageCast)(char *restrict dest, const char *restrict src,
                          ptrdiff_t stride, size_t count);

/* The loop for this processor. */
StageCast stage_cast(StageSource source, int is_swapped, StageTarget target);

/* Move nbytes, by stores that do not pull dest into the caches where the processor has
 * such. dest must lie on 16 bytes, and nbytes be a multiple of them. Other threads see
 * the bytes after stage_stream_end. */
void stage_stream(char *restrict dest, const char *restrict src, size_t nbytes);
void stage_stream_end(void);

/* The floating-point exceptions (FE_...) raised in this thread since the last call;
 * they are cleared. Only FE_INVALID, FE_OVERFLOW and FE_UNDERFLOW. */
int stage_take_exceptions(void);

#endif
