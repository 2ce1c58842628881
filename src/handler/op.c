/* One operation in the making: the context, the GIL, temporaries, the first failure. */
#include "handler.h"

int
op_init(Op *op, EngineObject *engine, const char *name)
{
    if (stream_enter(engine->state, engine->stream) < 0) {
        return -1;
    }
    *op = (Op){.engine = engine, .name = name};
    return 0;
}

CUdeviceptr
op_temporary(Op *op, size_t nbytes)
{
    if (op->count == OP_TEMPORARIES) {
        PyErr_Format(PyExc_SystemError, "%s: more than %d temporaries", op->name,
                     OP_TEMPORARIES);
        return 0;
    }
    Block *block = pool_take(op->engine, nbytes > 0 ? nbytes : 1);
    if (block == NULL) {
        return 0;
    }
    op->temporaries[op->count++] = block;
    return block->ptr;
}

void
op_begin(Op *op, int is_long)
{
    op->copies = op->engine->stream->ledger.tail;
    if (is_long || op->engine->queued >= QUEUE_DEEP) {
        op->thread = PyEval_SaveThread();
    }
    op->status = scope_enter(&op->scope, op->engine->context->handle);
    op->call = op->scope.failed;
    op->begun = 1;
}

/* Remember the first failed driver call. */
static inline void
note(Op *op, CUresult status, const char *call)
{
    if (status != CUDA_SUCCESS) {
        op->status = status;
        op->call = call;
    }
}

static inline int
has_failed(const Op *op)
{
    return op->status != CUDA_SUCCESS || op->blas_status != 0;
}

void
op_launch3(Op *op, Kernel kernel, unsigned int grid_x, unsigned int grid_y,
           unsigned int grid_z, unsigned int threads, unsigned int shared_bytes,
           void **parameters)
{
    EngineObject *engine = op->engine;
    if (has_failed(op)) {
        return;
    }
    engine->queued++;
    note(op,
         driver.LaunchKernel(engine->functions[kernel], grid_x, grid_y, grid_z, threads,
                             1, 1, shared_bytes, engine->stream->handle, parameters,
                             NULL),
         "cuLaunchKernel");
}

size_t
op_blocks(const Op *op, size_t n, size_t each)
{
    size_t most = (size_t)op->engine->processors * 8;
    size_t wanted = (n + BLOCK_THREADS * each - 1) / (BLOCK_THREADS * each);
    return wanted < 1 ? 1 : wanted > most ? most : wanted;
}

Tiling
op_tile(const Op *op, size_t rows, size_t columns)
{
    enum { WARP = 32, MOST = 65535 /* along y, of CUDA */ };
    size_t most = (size_t)op->engine->processors * 32;
    /* A warp along each row, or more where there are fewer rows than warps. */
    unsigned int lanes =
        op_lanes(columns, BLOCK_THREADS / op_lanes(rows, BLOCK_THREADS / WARP));
    size_t y = op_parts(columns, lanes);
    y = y < most ? y : most;
    y = y < MOST ? y : MOST;
    size_t x = op_parts(rows, BLOCK_THREADS / lanes);
    x = x < most / y ? x : most / y;
    return (Tiling){lanes, (unsigned int)(x > 0 ? x : 1), (unsigned int)y};
}

void
op_fill_words(Op *op, CUdeviceptr dest, unsigned int word, size_t n)
{
    if (has_failed(op) || n == 0) {
        return;
    }
    op->engine->queued++;
    note(op, driver.MemsetD32Async(dest, word, n, op->engine->stream->handle),
         "cuMemsetD32Async");
}

void
op_set(Op *op, CUdeviceptr dest, const void *source, size_t nbytes)
{
    if (has_failed(op) || nbytes == 0) {
        return;
    }
    note(op, driver.MemcpyHtoDAsync(dest, source, nbytes, op->engine->stream->handle),
         "cuMemcpyHtoDAsync");
    op_wait(op);
}

void
op_get(Op *op, void *dest, CUdeviceptr source, size_t nbytes)
{
    if (has_failed(op) || nbytes == 0) {
        return;
    }
    note(op, driver.MemcpyDtoHAsync(dest, source, nbytes, op->engine->stream->handle),
         "cuMemcpyDtoHAsync");
    op_wait(op);
}

void
op_wait(Op *op)
{
    if (has_failed(op)) {
        return;
    }
    note(op, driver.StreamSynchronize(op->engine->stream->handle),
         "cuStreamSynchronize");
    op->engine->queued = 0;
    op->has_waited = 1;
}

PyObject *
op_end(Op *op)
{
    EngineObject *engine = op->engine;
    if (op->begun && op->scope.failed == NULL) {
        scope_leave(&op->scope);
    }
    if (op->thread != NULL) {
        PyEval_RestoreThread(op->thread);
    }
    if (op->has_waited && op->status == CUDA_SUCCESS) {
        ledger_settle(&engine->stream->ledger, op->copies);
    }
    for (int i = 0; i < op->count; i++) {
        pool_give(engine, op->temporaries[i]);
    }
    stream_leave(engine->stream);
    if (!op->begun) {
        return NULL; /* op_temporary has set the error */
    }
    if (op->status != CUDA_SUCCESS) {
        return raise_cuda(engine->state, op->call, op->status, "in %s", op->name);
    }
    if (op->blas_status != 0) {
        char when[80];
        snprintf(when, sizeof(when), "in %s", op->name);
        return blas_raise(engine, op->call, op->blas_status, when);
    }
    Py_RETURN_NONE;
}

PyObject *
op_end_true(Op *op)
{
    PyObject *done = op_end(op);
    if (done == NULL) {
        return NULL;
    }
    Py_DECREF(done);
    Py_RETURN_TRUE;
}
