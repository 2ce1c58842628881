/* stage(dest, src): gather and cast into a contiguous array, on several threads.
 *
 * The threads of a team (thread_team.c) take shares of the gather (gather.c) as they
 * come to them. Whatever else NumPy can copy is left to NumPy, so that a caller never
 * has to choose. */
#include "gather.h"
#include "thread_team.h"

/* The work of each thread. */
static void
take_shares(void *job)
{
    Gather *gather = job;
    while (gather_share(gather) < gather->size) {
    }
}

/* Copy what is not for NumPy, on up to `threads` threads, 0: as many as are good.
 * Return 0, or -1 with an error set. */
static int
run_gather(Gather *gather, size_t threads)
{
    int number = gather_threads(gather, threads);
    if (number < 0) {
        return -1;
    }
    if (number == 1) {
        gather->share = gather->size;
    }
    if (gather_is_tiny(gather)) {
        take_shares(gather);
    }
    else {
        Py_BEGIN_ALLOW_THREADS
        team_run(number, take_shares, take_shares, gather);
        Py_END_ALLOW_THREADS
    }
    return gather_report(gather);
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
        gather_check("stage", "dest", given[DEST], given[SRC]) < 0) {
        return NULL;
    }
    PyArrayObject *dest = (PyArrayObject *)given[DEST];
    PyArrayObject *src = (PyArrayObject *)given[SRC];
    Gather gather;
    if (PyArray_SIZE(dest) == 0) {
        Py_RETURN_NONE;
    }
    if ((gather_plan(&gather, dest, src) ? run_gather(&gather, threads)
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
         "cast to float32 and float64, or moved to their own dtype, here; anything "
         "else, and arrays\n"
         "that overlap, by NumPy.\n\n"
         "threads is the most to use, the caller's among them (64 at most); 0 means "
         "BRAINSTORM_DBUF_STAGING_THREADS,\n"
         "else the processors that the process may use, 16 at most. Below 1 MiB it is "
         "one.\n\n"
         "Raises ValueError for another shape or layout, TypeError for what is no "
         "array.")},
    {NULL, NULL, 0, NULL},
};
