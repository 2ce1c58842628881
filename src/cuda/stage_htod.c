/* stage_htod_async(dest, src, staging): staging and copying to the device, at once.
 *
 * The gather (gather.c) goes into page-locked memory in shares, which the threads of a
 * team take in order. Some shares make a chunk; as soon as all of a chunk's are done
 * its copy is queued, while the next ones are being gathered. So a large minibatch
 * takes as long as the slower of the two, not their sum. Only the caller calls the
 * driver. */
#include "gather.h"
#include "thread_team.h"

enum {
    CHUNK_SHARES = 8, /* 2 MiB: at the full rate of the link, some 40 us of it */
    WHOLE_BYTES = 2 * CHUNK_SHARES * GATHER_SHARE_BYTES, /* below: one copy */
};

typedef struct {
    Gather gather;
    size_t chunk;          /* elements of one, the last may have fewer */
    size_t chunks;         /* how many there are */
    _Atomic(size_t) *done; /* owned: elements gathered of each chunk */
    size_t queued;         /* chunks whose copy has been queued */
    CUdeviceptr dest;
    CUstream stream;
    CUresult status; /* of the first copy that failed */
} Pipeline;

static size_t
chunk_size(const Pipeline *pipeline, size_t number)
{
    size_t begin = number * pipeline->chunk;
    size_t left = pipeline->gather.size - begin;
    return left < pipeline->chunk ? left : pipeline->chunk;
}

/* Take one share. Return 0 if there was none left. */
static int
gather_some(Pipeline *pipeline)
{
    Gather *gather = &pipeline->gather;
    size_t begin = gather_share(gather);
    if (begin >= gather->size) {
        return 0;
    }
    size_t left = gather->size - begin;
    atomic_fetch_add_explicit(&pipeline->done[begin / pipeline->chunk],
                              left < gather->share ? left : gather->share,
                              memory_order_release);
    return 1;
}

/* Queue the copies of the chunks that are complete, from the first that was not. */
static void
queue_chunks(Pipeline *pipeline)
{
    const size_t itemsize = pipeline->gather.itemsize;
    while (pipeline->queued < pipeline->chunks && pipeline->status == CUDA_SUCCESS) {
        size_t number = pipeline->queued, size = chunk_size(pipeline, number);
        if (atomic_load_explicit(&pipeline->done[number], memory_order_acquire) <
            size) {
            break;
        }
        size_t offset = number * pipeline->chunk * itemsize;
        pipeline->status = driver.MemcpyHtoDAsync(pipeline->dest + offset,
                                                  pipeline->gather.dest + offset,
                                                  size * itemsize, pipeline->stream);
        pipeline->queued++;
    }
}

/* The work of the team's threads. */
static void
help(void *job)
{
    while (gather_some(job)) {
    }
}

/* The work of the caller's. */
static void
gather_and_queue(void *job)
{
    while (gather_some(job)) {
        queue_chunks(job);
    }
}

/* Gather and queue all. In the context, no GIL. */
static CUresult
run_pipeline(Pipeline *pipeline, int threads)
{
    team_run(threads, help, gather_and_queue, pipeline);
    queue_chunks(pipeline);
    return pipeline->status;
}

/* Plan the chunks for a gather that is planned. Return 0, or -1 with MemoryError set.
 */
static int
plan_chunks(Pipeline *pipeline)
{
    Gather *gather = &pipeline->gather;
    pipeline->chunk = gather->size * gather->itemsize < WHOLE_BYTES
                          ? gather->size
                          : CHUNK_SHARES * gather->share;
    pipeline->chunks = (gather->size + pipeline->chunk - 1) / pipeline->chunk;
    pipeline->done = PyMem_Calloc(pipeline->chunks, sizeof(*pipeline->done));
    if (pipeline->done == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

/* What NumPy has to copy is one chunk, and done. Return as plan_chunks, or -1 with
 * NumPy's error. */
static int
plan_copied(Pipeline *pipeline, PyArrayObject *staging, PyArrayObject *src)
{
    Gather *gather = &pipeline->gather;
    if (PyArray_CopyInto(staging, src) < 0) {
        return -1;
    }
    *gather = (Gather){
        .dest = PyArray_BYTES(staging),
        .itemsize = (size_t)PyArray_ITEMSIZE(staging),
        .size = (size_t)PyArray_SIZE(staging),
        .share = (size_t)PyArray_SIZE(staging),
        .next = (size_t)PyArray_SIZE(staging),
    };
    if (plan_chunks(pipeline) < 0) {
        return -1;
    }
    for (size_t i = 0; i < pipeline->chunks; i++) {
        pipeline->done[i] = chunk_size(pipeline, i);
    }
    return 0;
}

static PyObject *
stage_htod_async(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                 PyObject *kwnames)
{
    enum { DEST, SRC, STAGING, STREAM, THREADS, COUNT };
    static const char *const names[] = {"dest",   "src",     "staging",
                                        "stream", "threads", NULL};
    static const Signature signature = {"stage_htod_async", names, 3, 5};
    ModuleState *state = module_state(module);
    PyObject *given[COUNT] = {NULL};
    HtodCopy copy = {0};
    Pipeline pipeline = {0};
    PyObject *result = NULL;
    size_t threads = 0;
    if (unpack(&signature, args, nargs, kwnames, given) < 0 ||
        (given[THREADS] != NULL &&
         size_argument("threads", given[THREADS], &threads) < 0) ||
        gather_check(signature.function, "staging", given[STAGING], given[SRC]) < 0 ||
        device_end_resolve(state, "dest", given[DEST], 1, &copy.dest) < 0 ||
        host_end_resolve(state, "staging", given[STAGING], 1, &copy.host) < 0 ||
        copy_stream(state, given[STREAM], &copy.dest, &copy.dest, &copy.stream) < 0) {
        goto done;
    }
    const size_t nbytes = copy.host.nbytes;
    if (nbytes == 0) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    PyArrayObject *staging = (PyArrayObject *)given[STAGING];
    PyArrayObject *src = (PyArrayObject *)given[SRC];
    if (htod_check(state, &copy, nbytes, signature.function, "staging",
                   "stage and memcpy_htod") < 0) {
        goto done;
    }
    int is_ours = gather_plan(&pipeline.gather, staging, src);
    int number = is_ours ? gather_threads(&pipeline.gather, threads) : 1;
    if (number < 0 ||
        (is_ours ? plan_chunks(&pipeline) : plan_copied(&pipeline, staging, src)) < 0 ||
        htod_reserve(state, &copy, nbytes) < 0) {
        goto done;
    }
    pipeline.dest = copy.dest.ptr;
    pipeline.stream = copy.stream.handle;
    CUresult status;
    Scope scope;
    Py_BEGIN_ALLOW_THREADS
    IN_CONTEXT(scope, copy.context->handle, status, run_pipeline(&pipeline, number));
    Py_END_ALLOW_THREADS
    htod_commit(&copy);
    if (status != CUDA_SUCCESS) {
        raise_cuda(state, scope_call(&scope, "cuMemcpyHtoDAsync"), status, "%zu bytes",
                   nbytes);
        goto done;
    }
    if (!is_ours || gather_report(&pipeline.gather) == 0) {
        result = Py_NewRef(Py_None);
    }
done:
    PyMem_Free((void *)pipeline.done);
    htod_release(&copy);
    return result;
}

PyMethodDef stage_htod_functions[] = {
    {"stage_htod_async", FASTCALL(stage_htod_async),
     PyDoc_STR(
         "stage_htod_async($module, /, dest, src, staging, stream=None, threads=0)\n"
         "--\n\n"
         "Gather and cast an array into page-locked memory, and queue its copy to the "
         "device.\n\n"
         "As stage(staging, src, threads) and memcpy_htod_async(dest, staging, "
         "stream), but each\n"
         "piece of 2 MiB is queued as soon as it is there. src may be changed when the "
         "call returns,\n"
         "staging only once the copy is done; dest and staging are kept alive until "
         "then.\n\n"
         "Raises what those two raise. Of a cast that NumPy would warn of, the copy "
         "has been queued\n"
         "by then.")},
    {NULL, NULL, 0, NULL},
};
