/* stage(dest, src): gather and cast into a contiguous array, in one pass.
 *
 * What np.copyto(dest, src, casting="unsafe") does, on several threads, for what
 * minibatches are made of: numbers of any strides and either byte order, to float32 or
 * float64. The elements, in the order of dest, are split into shares, which the threads
 * of a team (thread_team.c) take as they come to them. Whatever else NumPy can copy is
 * left to NumPy, so that a caller never has to choose.
 *
 * Larger arrays are cast into a buffer that stays in the first cache, and from there
 * streamed: dest is for the copy engine to read, and not to push other data out. */
#include "binding.h"
#include "stage.h"
#include "thread_team.h"

#include <fenv.h>
#include <stdlib.h>
#include <string.h>

enum {
    MOST_AXES = 64,
    KEEP_GIL_BYTES = 4 * 1024, /* below: as quick as letting the GIL go */
    ALONE_BYTES = 1 << 20,     /* below: done before another thread is awake */
    STREAM_BYTES = 4 << 20,
    STREAM_RUN_BYTES = 16 * 1024, /* of dest; a scattered src is better left to the
                                     caches, which overlap its reads with the stores */
    SHARE_BYTES = 256 * 1024,
    BUFFER_BYTES = 4 * 1024,
    MOST_BY_DEFAULT = 16, /* threads; memory is not quicker with more */
};

typedef struct {
    char *dest;      /* borrowed, like src, from arrays that the call holds */
    const char *src; /* element 0 */
    StageCast cast;
    size_t itemsize; /* of dest */
    size_t size;     /* elements */
    size_t share;    /* elements that a thread takes at a time */
    int is_streamed;
    int is_one_block; /* src has dest's bytes already */
    int may_raise; /* the cast rounds or quiets: look at the exceptions */
    int ndim;      /* of src, merged; at least 1 */
    size_t shape[MOST_AXES];
    ptrdiff_t strides[MOST_AXES]; /* bytes */
    _Atomic(size_t) next;         /* first element that no thread has taken */
    _Atomic(int) raised;          /* floating-point exceptions, of all threads */
} Copy;

/* The axes of src, outermost first, with those merged that are one walk through
 * memory. */
static void
merge_axes(Copy *copy, PyArrayObject *src)
{
    int last = -1;
    for (int i = 0; i < PyArray_NDIM(src); i++) {
        size_t size = (size_t)PyArray_DIM(src, i);
        ptrdiff_t stride = PyArray_STRIDE(src, i);
        if (size == 1) {
            continue;
        }
        if (last >= 0 && copy->strides[last] == (ptrdiff_t)size * stride) {
            copy->shape[last] *= size;
            copy->strides[last] = stride;
        }
        else {
            last++;
            copy->shape[last] = size;
            copy->strides[last] = stride;
        }
    }
    if (last < 0) {
        last = 0;
        copy->shape[0] = 1;
        copy->strides[0] = PyArray_ITEMSIZE(src);
    }
    copy->ndim = last + 1;
}

/* A place in src, on the way through it in the order of dest. */
typedef struct {
    size_t index[MOST_AXES];
    const char *src; /* borrowed, like the Copy's */
} Walk;

static void
walk_start(Walk *walk, const Copy *copy, size_t at)
{
    walk->src = copy->src;
    for (int i = copy->ndim - 1; i >= 0; i--) {
        walk->index[i] = at % copy->shape[i];
        walk->src += (ptrdiff_t)walk->index[i] * copy->strides[i];
        at /= copy->shape[i];
    }
}

/* Cast the next `count` elements to `dest`. */
static void
walk_on(Walk *walk, const Copy *copy, char *dest, size_t count)
{
    const int last = copy->ndim - 1;
    const ptrdiff_t stride = copy->strides[last];
    while (count > 0) {
        size_t run = copy->shape[last] - walk->index[last];
        run = run < count ? run : count;
        copy->cast(dest, walk->src, stride, run);
        dest += run * copy->itemsize;
        count -= run;
        walk->index[last] += run;
        walk->src += (ptrdiff_t)run * stride;
        for (int i = last; i > 0 && walk->index[i] == copy->shape[i]; i--) {
            walk->index[i] = 0;
            walk->index[i - 1]++;
            walk->src +=
                copy->strides[i - 1] - (ptrdiff_t)copy->shape[i] * copy->strides[i];
        }
    }
}

/* The elements from begin to before end. */
static void
copy_range(const Copy *copy, size_t begin, size_t end)
{
    _Alignas(64) char buffer[BUFFER_BYTES];
    const size_t line = 64 / copy->itemsize, most = BUFFER_BYTES / copy->itemsize;
    char *dest = copy->dest + begin * copy->itemsize;
    size_t left = end - begin;
    Walk walk;
    walk_start(&walk, copy, begin);
    if (copy->is_streamed) {
        size_t head = (64 - (uintptr_t)dest % 64) % 64 / copy->itemsize;
        head = head < left ? head : left;
        walk_on(&walk, copy, dest, head);
        dest += head * copy->itemsize;
        left -= head;
        if (copy->is_one_block) {
            size_t whole = left / line * line, nbytes = whole * copy->itemsize;
            stage_stream(dest, walk.src, nbytes);
            walk.src += nbytes;
            walk.index[0] += whole;
            dest += nbytes;
            left -= whole;
        }
        while (left >= line) {
            size_t some = left < most ? left / line * line : most;
            walk_on(&walk, copy, buffer, some);
            stage_stream(dest, buffer, some * copy->itemsize);
            dest += some * copy->itemsize;
            left -= some;
        }
    }
    walk_on(&walk, copy, dest, left);
}

/* Take shares until there are none left: the work of each thread. */
static void
copy_shares(void *job)
{
    Copy *copy = job;
    if (copy->may_raise) {
        (void)stage_take_exceptions();
    }
    for (;;) {
        size_t begin = atomic_fetch_add_explicit(&copy->next, copy->share,
                                                 memory_order_relaxed);
        if (begin >= copy->size) {
            break;
        }
        size_t left = copy->size - begin;
        copy_range(copy, begin, begin + (left < copy->share ? left : copy->share));
    }
    if (copy->is_streamed) {
        stage_stream_end();
    }
    if (copy->may_raise) {
        atomic_fetch_or(&copy->raised, stage_take_exceptions());
    }
}

/* Let NumPy say what it says of such a cast, a warning or an error as np.errstate has
 * it, by casting numbers that raise the same. Return 0, or -1 with an error set. */
static int
report_exceptions(int raised)
{
    static const struct {
        int exception;
        uint64_t bits; /* of a float64 that raises it when cast to float32 */
    } raisers[] = {
        {FE_OVERFLOW, 0x7fe0000000000000},
        {FE_UNDERFLOW, 0x0010000000000001},
        {FE_INVALID, 0x7ff0000000000001},
    };
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

/* Return 1 and which dtype src is, or 0 if it is none of ours. */
static int
source_of(PyArrayObject *src, StageSource *source)
{
    const int type = PyArray_TYPE(src);
    const npy_intp itemsize = PyArray_ITEMSIZE(src);
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

/* Whether some byte may belong to both. */
static int
may_overlap(PyArrayObject *dest, PyArrayObject *src)
{
    const char *low = PyArray_BYTES(src), *high = low + PyArray_ITEMSIZE(src);
    const char *first = PyArray_BYTES(dest), *end = first + PyArray_NBYTES(dest);
    for (int i = 0; i < PyArray_NDIM(src); i++) {
        npy_intp span = (PyArray_DIM(src, i) - 1) * PyArray_STRIDE(src, i);
        low += span < 0 ? span : 0;
        high += span < 0 ? 0 : span;
    }
    return low < end && first < high;
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
            threads = allowed < MOST_BY_DEFAULT ? allowed : MOST_BY_DEFAULT;
        }
    }
    return threads;
}

/* Check dest, and src against it. Return 0, or -1 with an error set. */
static int
check_arrays(PyObject *dest, PyObject *src)
{
    if (!PyArray_Check(dest) || !PyArray_Check(src)) {
        PyErr_Format(PyExc_TypeError, "stage: %s must be a numpy array, not %s",
                     PyArray_Check(dest) ? "src" : "dest",
                     Py_TYPE(PyArray_Check(dest) ? src : dest)->tp_name);
        return -1;
    }
    PyArrayObject *to = (PyArrayObject *)dest, *from = (PyArrayObject *)src;
    if (!PyArray_ISWRITEABLE(to) || !PyArray_IS_C_CONTIGUOUS(to) ||
        !PyArray_ISALIGNED(to)) {
        PyErr_Format(PyExc_ValueError, "stage: dest is not %s",
                     !PyArray_ISWRITEABLE(to)       ? "writable"
                     : !PyArray_IS_C_CONTIGUOUS(to) ? "C-contiguous"
                                                    : "aligned");
        return -1;
    }
    if (!PyArray_SAMESHAPE(to, from)) {
        PyObject *shapes[] = {PyObject_GetAttrString(dest, "shape"),
                              PyObject_GetAttrString(src, "shape")};
        if (shapes[0] != NULL && shapes[1] != NULL) {
            PyErr_Format(PyExc_ValueError,
                         "stage: dest has the shape %R, src the shape %R", shapes[0],
                         shapes[1]);
        }
        Py_XDECREF(shapes[0]);
        Py_XDECREF(shapes[1]);
        return -1;
    }
    return 0;
}

/* Copy what is not for NumPy, on up to `threads` threads, 0: as many as are good.
 * Return 0, or -1 with an error set. */
static int
copy_elements(PyArrayObject *dest, PyArrayObject *src, StageSource source,
              size_t threads)
{
    const int to_double = PyArray_TYPE(dest) == NPY_DOUBLE;
    Copy copy;
    copy.dest = PyArray_BYTES(dest);
    copy.src = PyArray_BYTES(src);
    copy.cast = stage_cast(source, !PyArray_ISNOTSWAPPED(src), to_double);
    copy.itemsize = (size_t)PyArray_ITEMSIZE(dest);
    copy.size = (size_t)PyArray_SIZE(dest);
    copy.may_raise = source == (to_double ? STAGE_F4 : STAGE_F8);
    merge_axes(&copy, src);
    copy.is_one_block = source == (to_double ? STAGE_F8 : STAGE_F4) &&
                        PyArray_ISNOTSWAPPED(src) && copy.ndim == 1 &&
                        copy.strides[0] == PyArray_ITEMSIZE(src);
    const size_t nbytes = copy.size * copy.itemsize;
    const size_t larger = nbytes > (size_t)PyArray_NBYTES(src)
                              ? nbytes
                              : (size_t)PyArray_NBYTES(src);
    const int last = copy.ndim - 1;
    copy.is_streamed = nbytes > STREAM_BYTES &&
                       copy.strides[last] == PyArray_ITEMSIZE(src) &&
                       copy.shape[last] * copy.itemsize >= STREAM_RUN_BYTES;
    if (larger < ALONE_BYTES) {
        threads = 1;
    }
    else if (threads == 0) {
        int number = default_threads();
        if (number < 0) {
            return -1;
        }
        threads = (size_t)number;
    }
    copy.share = threads == 1 ? copy.size : SHARE_BYTES / copy.itemsize;
    atomic_init(&copy.next, 0);
    atomic_init(&copy.raised, 0);
    if (larger < KEEP_GIL_BYTES) {
        copy_shares(&copy);
    }
    else {
        Py_BEGIN_ALLOW_THREADS
        team_run(threads < TEAM_MOST ? (int)threads : TEAM_MOST, copy_shares, &copy);
        Py_END_ALLOW_THREADS
    }
    int raised = atomic_load(&copy.raised);
    return raised == 0 ? 0 : report_exceptions(raised);
}

static PyObject *
stage(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs,
      PyObject *kwnames)
{
    enum { DEST, SRC, THREADS, COUNT };
    static const char *const names[] = {"dest", "src", "threads", NULL};
    static const Signature signature = {"stage", names, 2, 3};
    PyObject *given[COUNT] = {NULL};
    size_t threads = 0;
    if (unpack(&signature, args, nargs, kwnames, given) < 0 ||
        (given[THREADS] != NULL &&
         size_argument("threads", given[THREADS], &threads) < 0) ||
        check_arrays(given[DEST], given[SRC]) < 0) {
        return NULL;
    }
    PyArrayObject *dest = (PyArrayObject *)given[DEST];
    PyArrayObject *src = (PyArrayObject *)given[SRC];
    StageSource source;
    if (PyArray_SIZE(dest) == 0) {
        Py_RETURN_NONE;
    }
    const int type = PyArray_TYPE(dest);
    int is_ours = (type == NPY_FLOAT || type == NPY_DOUBLE) &&
                  PyArray_ISNOTSWAPPED(dest) && source_of(src, &source) &&
                  PyArray_NDIM(src) <= MOST_AXES && !may_overlap(dest, src);
    if ((is_ours ? copy_elements(dest, src, source, threads)
                 : PyArray_CopyInto(dest, src)) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyMethodDef stage_functions[] = {
    {"stage", FASTCALL(stage),
     PyDoc_STR(
         "stage($module, /, dest, src, threads=0)\n--\n\n"
         "Gather and cast an array into a contiguous one, on several threads.\n\n"
         "Gives the bytes of np.copyto(dest, src, casting=\"unsafe\"). dest must be "
         "writable, aligned,\n"
         "C-contiguous and of src's shape. Numbers up to 64 bits, of any strides and "
         "byte order, are\n"
         "cast to float32 and float64 here; anything else, and arrays that overlap, by "
         "NumPy.\n\n"
         "threads is the most to use, the caller's among them (64 at most); 0 means "
         "BRAINSTORM_DBUF_STAGING_THREADS,\n"
         "else the processors that the process may use, 16 at most. Below 1 MiB it is "
         "one.\n\n"
         "Raises ValueError for another shape or layout, TypeError for what is no "
         "array.")},
    {NULL, NULL, 0, NULL},
};
