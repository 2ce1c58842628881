/* A gather: the elements of an array on their way into a contiguous one. What stage.c
 * and staging_ring.c have from gather.c. */
#ifndef BRAINSTORM_DBUF_GATHER_H
#define BRAINSTORM_DBUF_GATHER_H

#include "binding.h"
#include "stage.h"

enum { GATHER_SHARE_BYTES = 256 * 1024 };

typedef struct {
    const char *src; /* element 0; borrowed from an array that the call holds */
    StageCast cast;
    size_t itemsize; /* of dest */
    size_t size;     /* elements */
    size_t share;    /* elements that a thread takes at a time */
    size_t larger;   /* bytes of dest or of src, whichever has more */
    int is_streamed;
    int is_one_block;     /* src has dest's bytes already */
    int may_raise;        /* the cast rounds or quiets: look at the exceptions */
    Axes axes;            /* of src */
    _Atomic(size_t) next; /* first element that no thread has taken */
    _Atomic(int) raised;  /* floating-point exceptions, of all threads */
} Gather;

/* Plan the gather of a src with elements as elements of `dtype`, in shares of
 * GATHER_SHARE_BYTES. Return 1, or 0 if it is for NumPy to copy. */
int gather_plan(Gather *gather, PyArray_Descr *dtype, PyArrayObject *src);

/* How many threads are to share it, for a `threads` argument of the caller's. Return
 * -1 with ValueError set if the environment's number is none. */
int gather_threads(const Gather *gather, size_t wish);

/* True if it takes no longer than letting the GIL go and taking it again. */
int gather_is_tiny(const Gather *gather);

/* Take the next share. Return how many elements it has, 0 if none was left, and the
 * first. */
size_t gather_take(Gather *gather, size_t *begin);

/* Copy elements to dest, where the first of them belongs. Needs no GIL, like
 * gather_take. */
void gather_copy(Gather *gather, size_t begin, size_t count, char *dest);

/* Once all shares are done: let NumPy say what it says of the exceptions raised, a
 * warning or an error as np.errstate has it. Return 0, or -1 with an error set. */
int gather_report(const Gather *gather);

#endif
