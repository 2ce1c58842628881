/* Gather and cast, or move, the elements of an array into a contiguous one.
 *
 * What np.copyto(dest, src, casting="unsafe") does, in shares that several threads may
 * take, for what minibatches are made of: numbers of any strides and either byte order,
 * to float32, float64 or their own dtype. The shares follow each other in the order of
 * dest.
 *
 * Larger arrays are cast into a buffer that stays in the first cache, and from there
 * streamed: dest is for the copy engine to read, and not to push other data out. */
#include "gather.h"
#include "thread_team.h"

#include <fenv.h>
#include <stdlib.h>
#include <string.h>

enum {
    KEEP_GIL_BYTES = 4 * 1024, /* below: as quick as letting the GIL go */
    ALONE_BYTES = 1 << 20,     /* below: done before another thread is awake */
    STREAM_BYTES = 4 << 20,
    STREAM_RUN_BYTES = 16 * 1024, /* of dest; a scattered src is better left to the
                                     caches, which overlap its reads with the stores */
    BUFFER_BYTES = 4 * 1024,
    AHEAD_BYTES = 2 * 1024, /* of src: what is asked for before it is needed */
    MOST_BY_DEFAULT = 16,   /* threads; memory is not quicker with more */
};

/* A place in src, on the way through it in the order of dest. */
typedef struct {
    size_t index[MOST_AXES];
    const char *src; /* borrowed, like the Gather's */
} Walk;

static void
walk_start(Walk *walk, const Gather *gather, size_t at)
{
    walk->src = gather->src;
    for (int i = gather->axes.ndim - 1; i >= 0; i--) {
        walk->index[i] = at % gather->axes.shape[i];
        walk->src += (ptrdiff_t)walk->index[i] * gather->axes.strides[i];
        at /= gather->axes.shape[i];
    }
}

/* Cast elements that lie `stride` apart. Where they lie side by side the processor
 * reads ahead by itself, but only to the end of each page of 4 KiB: a fifth of the time
 * of a cast from float64 was spent there. */
static void
cast_run(StageCast cast, size_t itemsize, char *dest, const char *src, ptrdiff_t stride,
         size_t count)
{
    if (stride > 0 && stride <= (ptrdiff_t)sizeof(double)) {
        const size_t some = AHEAD_BYTES / (size_t)stride;
        const size_t nbytes = some * (size_t)stride;
        while (count >= 2 * some) {
            for (size_t i = 0; i < nbytes; i += 64) {
                __builtin_prefetch(src + nbytes + i);
            }
            cast(dest, src, stride, some);
            dest += some * itemsize;
            src += nbytes;
            count -= some;
        }
    }
    cast(dest, src, stride, count);
}

/* Cast the next `count` elements to `dest`. */
static void
walk_on(Walk *walk, const Gather *gather, char *dest, size_t count)
{
    const int last = gather->axes.ndim - 1;
    const ptrdiff_t stride = gather->axes.strides[last];
    while (count > 0) {
        size_t run = gather->axes.shape[last] - walk->index[last];
        run = run < count ? run : count;
        cast_run(gather->cast, gather->itemsize, dest, walk->src, stride, run);
        dest += run * gather->itemsize;
        count -= run;
        walk->index[last] += run;
        walk->src += (ptrdiff_t)run * stride;
        for (int i = last; i > 0 && walk->index[i] == gather->axes.shape[i]; i--) {
            walk->index[i] = 0;
            walk->index[i - 1]++;
            walk->src += gather->axes.strides[i - 1] -
                         (ptrdiff_t)gather->axes.shape[i] * gather->axes.strides[i];
        }
    }
}

/* `left` elements from begin on, to dest. */
static void
copy_range(const Gather *gather, size_t begin, size_t left, char *dest)
{
    _Alignas(64) char buffer[BUFFER_BYTES];
    const size_t line = 64 / gather->itemsize, most = BUFFER_BYTES / gather->itemsize;
    Walk walk;
    walk_start(&walk, gather, begin);
    if (gather->is_streamed) {
        size_t head = (64 - (uintptr_t)dest % 64) % 64 / gather->itemsize;
        head = head < left ? head : left;
        walk_on(&walk, gather, dest, head);
        dest += head * gather->itemsize;
        left -= head;
        if (gather->is_one_block) {
            size_t whole = left / line * line, nbytes = whole * gather->itemsize;
            stage_stream(dest, walk.src, nbytes);
            walk.src += nbytes;
            walk.index[0] += whole;
            dest += nbytes;
            left -= whole;
        }
        while (left >= line) {
            size_t some = left < most ? left / line * line : most;
            walk_on(&walk, gather, buffer, some);
            stage_stream(dest, buffer, some * gather->itemsize);
            dest += some * gather->itemsize;
            left -= some;
        }
    }
    walk_on(&walk, gather, dest, left);
}

size_t
gather_take(Gather *gather, size_t *begin)
{
    *begin =
        atomic_fetch_add_explicit(&gather->next, gather->share, memory_order_relaxed);
    if (*begin >= gather->size) {
        return 0;
    }
    size_t left = gather->size - *begin;
    return left < gather->share ? left : gather->share;
}

void
gather_copy(Gather *gather, size_t begin, size_t count, char *dest)
{
    if (gather->may_raise) {
        (void)stage_take_exceptions(); /* what others have left */
    }
    copy_range(gather, begin, count, dest);
    if (gather->is_streamed) {
        stage_stream_end();
    }
    if (gather->may_raise) {
        atomic_fetch_or_explicit(&gather->raised, stage_take_exceptions(),
                                 memory_order_relaxed);
    }
}

/* By casting numbers that raise the same. */
int
gather_report(const Gather *gather)
{
    const int raised = atomic_load_explicit(&gather->raised, memory_order_relaxed);
    static const struct {
        int exception;
        uint64_t bits; /* of a float64 that raises it when cast to float32 */
    } raisers[] = {
        {FE_OVERFLOW, 0x7fe0000000000000},
        {FE_UNDERFLOW, 0x0010000000000001},
        {FE_INVALID, 0x7ff0000000000001},
    };
    if (raised == 0) {
        return 0;
    }
    uint64_t bits[Py_ARRAY_LENGTH(raisers)] = {0};
    float floats[Py_ARRAY_LENGTH(raisers)];
    npy_intp count = Py_ARRAY_LENGTH(raisers);
    for (npy_intp i = 0; i < count; i++) {
        bits[i] = raised & raisers[i].exception ? raisers[i].bits : 0;
    }
    PyObject *from = PyArray_SimpleNewFromData(1, &count, NPY_FLOAT64, bits);
    PyObject *to = PyArray_SimpleNewFromData(1, &count, NPY_FLOAT32, floats);
    int result = -1;
    if (from != NULL && to != NULL) {
        result = PyArray_CopyInto((PyArrayObject *)to, (PyArrayObject *)from);
    }
    Py_XDECREF(from);
    Py_XDECREF(to);
    return result;
}

/* Return 1 and which of ours a dtype is, or 0 if it is none. */
static int
dtype_of(PyArray_Descr *dtype, StageSource *source)
{
    const int type = dtype->type_num;
    const npy_intp itemsize = PyDataType_ELSIZE(dtype);
    const int is_integer = PyTypeNum_ISINTEGER(type);
    const int is_unsigned = PyTypeNum_ISUNSIGNED(type);
    if (type == NPY_BOOL) {
        *source = STAGE_BOOL;
    }
    else if (type == NPY_HALF) {
        *source = STAGE_F2;
    }
    else if (type == NPY_FLOAT) {
        *source = STAGE_F4;
    }
    else if (type == NPY_DOUBLE) {
        *source = STAGE_F8;
    }
    else if (is_integer && itemsize == 1) {
        *source = is_unsigned ? STAGE_U1 : STAGE_I1;
    }
    else if (is_integer && itemsize == 2) {
        *source = is_unsigned ? STAGE_U2 : STAGE_I2;
    }
    else if (is_integer && itemsize == 4) {
        *source = is_unsigned ? STAGE_U4 : STAGE_I4;
    }
    else if (is_integer && itemsize == 8) {
        *source = is_unsigned ? STAGE_U8 : STAGE_I8;
    }
    else {
        return 0;
    }
    return 1;
}

#define THREADS_VARIABLE "BRAINSTORM_DBUF_STAGING_THREADS"

/* How many threads a copy gets that names no number. Found once. Return -1 with
 * ValueError set if the environment's own number is none. */
static int
default_threads(void)
{
    static int threads = 0; /* under the GIL */
    if (threads == 0) {
        const char *wish = getenv(THREADS_VARIABLE);
        if (wish != NULL && *wish != '\0') {
            char *end;
            long number = strtol(wish, &end, 10);
            if (*end != '\0' || number < 1 || number > TEAM_MOST) {
                PyErr_Format(PyExc_ValueError,
                             THREADS_VARIABLE
                             " must be a whole number from 1 to %d, not \"%.100s\"",
                             TEAM_MOST, wish);
                return -1;
            }
            threads = (int)number;
        }
        else {
            int allowed = cpu_allowance("/proc/self/cgroup", "/sys/fs/cgroup");
            allowed -= allowed > 4; /* the thread that trains has work as well */
            threads = allowed < MOST_BY_DEFAULT ? allowed : MOST_BY_DEFAULT;
        }
    }
    return threads;
}

int
gather_plan(Gather *gather, PyArray_Descr *dtype, PyArrayObject *src)
{
    StageSource from, to;
    if (!dtype_of(PyArray_DESCR(src), &from) || !dtype_of(dtype, &to) ||
        !PyArray_ISNBO(dtype->byteorder) || PyArray_NDIM(src) > MOST_AXES) {
        return 0;
    }
    const int is_swapped = !PyArray_ISNOTSWAPPED(src);
    StageTarget target = STAGE_TO_SAME;
    if (to != from) {
        if (to != STAGE_F4 && to != STAGE_F8) {
            return 0;
        }
        target = to == STAGE_F4 ? STAGE_TO_F4 : STAGE_TO_F8;
    }
    const size_t from_itemsize = (size_t)PyArray_ITEMSIZE(src);
    gather->src = PyArray_BYTES(src);
    gather->cast = stage_cast(from, is_swapped, target);
    gather->itemsize = (size_t)PyDataType_ELSIZE(dtype);
    gather->size = (size_t)PyArray_SIZE(src);
    gather->share = GATHER_SHARE_BYTES / gather->itemsize;
    gather->may_raise =
        (to == STAGE_F4 && from == STAGE_F8) || (to == STAGE_F8 && from == STAGE_F4);
    array_axes(src, &gather->axes);
    const int last = gather->axes.ndim - 1;
    const int has_runs = gather->axes.strides[last] == (ptrdiff_t)from_itemsize;
    const size_t nbytes = gather->size * gather->itemsize;
    const size_t from_nbytes = gather->size * from_itemsize;
    gather->larger = nbytes > from_nbytes ? nbytes : from_nbytes;
    gather->is_one_block =
        target == STAGE_TO_SAME && !is_swapped && last == 0 && has_runs;
    gather->is_streamed =
        nbytes > STREAM_BYTES && has_runs &&
        gather->axes.shape[last] * gather->itemsize >= STREAM_RUN_BYTES;
    atomic_init(&gather->next, 0);
    atomic_init(&gather->raised, 0);
    return 1;
}

int
gather_threads(const Gather *gather, size_t wish)
{
    if (gather->larger < ALONE_BYTES) {
        return 1;
    }
    if (wish == 0) {
        return default_threads();
    }
    return wish < TEAM_MOST ? (int)wish : TEAM_MOST;
}

int
gather_is_tiny(const Gather *gather)
{
    return gather->larger < KEEP_GIL_BYTES;
}
