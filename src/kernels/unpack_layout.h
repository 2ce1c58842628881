/* What the kernel of unpack.cu does, passed to it by value. Read by C (unpack.c) and by
 * the kernel. */
#ifndef BRAINSTORM_DBUF_UNPACK_LAYOUT_H
#define BRAINSTORM_DBUF_UNPACK_LAYOUT_H

/* What lies at a source: elements of a dtype, or indices of one-hot rows. */
typedef enum {
    UNPACK_bool,
    UNPACK_i1,
    UNPACK_u1,
    UNPACK_i2,
    UNPACK_u2,
    UNPACK_i4,
    UNPACK_u4,
    UNPACK_f2,
    UNPACK_f4,
    UNPACK_one_hot,
} UnpackKind;

/* The source is contiguous and may start at any address; the output are rows at a
 * pitch (in elements). With `fours`, rows of the output are written four elements at a
 * time: out is aligned to 16 bytes, and where there are several rows, columns and pitch
 * are multiples of four; for a cast, the source is aligned to four of its elements.
 * Otherwise, and for the last elements of a single row, it goes one by one. */
typedef struct {
    unsigned long long out, source; /* device addresses */
    unsigned long long rows, columns, pitch;
    UnpackKind kind;
    int fours;
    /* As op_tile has it: `across` blocks along the rows, `along` along the columns. */
    unsigned int lanes, across, along;
    unsigned int end; /* the grid's block after its last one */
} UnpackPart;

enum { UNPACK_PARTS = 8 };

typedef struct {
    int count; /* at least 1 */
    UnpackPart parts[UNPACK_PARTS];
} UnpackParts;

#endif
