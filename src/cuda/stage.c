/* stage(dest, src): gather and cast into a contiguous array, on several threads.
 *
 * The threads of a team (thread_team.c) take shares of the gather (gather.c) as they
 * come to them. Whatever else NumPy can copy is left to NumPy, so that a caller never
 * has to choose. */
#include "gather.h"
#include "thread_team.h"

typedef struct {
    Gather gather;
    char *dest; /* borrowed from an array that the call holds */
} Job;

/* The work of each thread. */
static void
take_shares(void *argument)
{
    Job *job = argument;
    Gather *gather = &job->gather;
    size_t begin, count;
    while ((count = gather_take(gather, &begin)) > 0) {
        gather_copy(gather, begin, count, job->dest + begin * gather->itemsize);
    }
}

/* Copy what is not for NumPy, on up to `threads` threads, 0: as many as are good.
 * Return 0, or -1 with an error set. */
static int
run(Job *job, size_t threads)
{
    Gather *gather = &job->gather;
    int number = gather_threads(gather, threads);
    if (number < 0) {
        return -1;
    }
    if (number == 1) {
        gather->share = gather->size;
    }
    if (gather_is_tiny(gather)) {
        take_shares(job);
    }
    else {
        Py_BEGIN_ALLOW_THREADS
        team_run(number, take_shares, job);
        Py_END_ALLOW_THREADS
    }
    return gather_report(gather);
}

/* Whether some byte may belong to both. */
static int
may_overlap(PyArrayObject *dest, PyArrayObject *src)
{
    char *low, *high, *first, *end;
    array_bounds(src, &low, &high);
    array_bounds(dest, &first, &end);
    return low < end && first < high;
}

/* Check that dest can be filled in one go, and that src has its shape. Return 0, or -1
 * with an error set. */
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
    Job job;
    if (PyArray_SIZE(dest) == 0) {
        Py_RETURN_NONE;
    }
    job.dest = PyArray_BYTES(dest);
    int is_ours =
        !may_overlap(dest, src) && gather_plan(&job.gather, PyArray_DESCR(dest), src);
    if ((is_ours ? run(&job, threads) : PyArray_CopyInto(dest, src)) < 0) {
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
         "cast to float32 and float64, or moved to their own dtype, here; anything "
         "else, and arrays\n"
         "that overlap, by NumPy.\n\n"
         "threads is the most to use, the caller's among them (64 at most); 0 means "
         "BRAINSTORM_DBUF_STAGING_THREADS,\n"
         "else the processors that the process may use, of more than four all but one, "
         "16 at most.\n"
         "Below 1 MiB it is one.\n\n"
         "Raises ValueError for another shape or layout, TypeError for what is no "
         "array.")},
    {NULL, NULL, 0, NULL},
};
