/* The pool of device memory behind an engine's arrays and temporaries.
 *
 * Blocks of one size class are kept in a list when they are given back and handed out
 * again; the classes are 1/8 of a power of two apart, so at most 1/8 is wasted. In the
 * steady state nothing is allocated or freed: cuMemAlloc and cuMemFree wait for
 * everything in the context, the copy of the next minibatch included. Protected by the
 * GIL. */
#include "handler.h"

enum {
    SMALLEST = 512, /* bytes; all classes up to SMALL_END are multiples of it */
    SMALL_END = 4096,
    SMALL_CLASSES = SMALL_END / SMALLEST,
    STEPS = 8,           /* classes between one power of two and the next */
    FIRST_EXPONENT = 12, /* 2^12 = SMALL_END */
};

/* Round nbytes up to its class. Return the class's number, -1 if there is none. */
static int
class_of(size_t nbytes, size_t *rounded)
{
    if (nbytes <= SMALL_END) {
        size_t units = (nbytes + SMALLEST - 1) / SMALLEST;
        *rounded = units * SMALLEST;
        return (int)units - 1;
    }
    int exponent = 63 - __builtin_clzll((unsigned long long)nbytes - 1);
    size_t base = (size_t)1 << exponent;
    size_t step = base / STEPS;
    size_t steps = (nbytes - base + step - 1) / step;
    int number = SMALL_CLASSES + (exponent - FIRST_EXPONENT) * STEPS + (int)steps - 1;
    *rounded = base + steps * step;
    return number < POOL_CLASSES ? number : -1;
}

/* Free a block and its memory. Takes the block out of the counts on success only. */
static CUresult
destroy(EngineObject *engine, Block *block, Scope *scope)
{
    CUresult status = CUDA_SUCCESS;
    if (driver_usable()) { /* not in a forked child */
        Py_BEGIN_ALLOW_THREADS
        IN_CONTEXT(*scope, engine->context->handle, status, driver.MemFree(block->ptr));
        Py_END_ALLOW_THREADS
    }
    live.device_memory--;
    live.device_bytes -= (Py_ssize_t)block->nbytes;
    engine->pool.bytes_held -= block->nbytes;
    PyMem_Free(block);
    return status;
}

CUresult
pool_trim(EngineObject *engine)
{
    CUresult first = CUDA_SUCCESS;
    for (int i = 0; i < POOL_CLASSES; i++) {
        Block *block;
        while ((block = engine->pool.free[i]) != NULL) {
            Scope scope = {0};
            engine->pool.free[i] = block->next;
            engine->pool.bytes_free -= block->nbytes;
            CUresult status = destroy(engine, block, &scope);
            if (first == CUDA_SUCCESS) {
                first = status;
            }
        }
    }
    return first;
}

/* Set CudaMemoryError for `nbytes` that the driver refused. */
static void
raise_short(EngineObject *engine, const Scope *scope, CUresult status, size_t nbytes)
{
    size_t available = 0, total = 0;
    CUresult told;
    Scope other;
    Py_BEGIN_ALLOW_THREADS
    IN_CONTEXT(other, engine->context->handle, told,
               driver.MemGetInfo(&available, &total));
    Py_END_ALLOW_THREADS
    if (told != CUDA_SUCCESS) {
        available = total = 0;
    }
    raise_cuda(engine->state, scope_call(scope, "cuMemAlloc"), status,
               "%zu bytes asked for; %zu of the device's %zu are free, the pool "
               "holds %zu",
               nbytes, available, total, engine->pool.bytes_held);
}

Block *
pool_take(EngineObject *engine, size_t nbytes)
{
    size_t rounded = 0;
    int number = class_of(nbytes, &rounded);
    if (number < 0) {
        PyErr_Format(PyExc_MemoryError, "%zu bytes are more than any device has",
                     nbytes);
        return NULL;
    }
    Block *block = engine->pool.free[number];
    if (block != NULL) {
        engine->pool.free[number] = block->next;
        engine->pool.bytes_free -= block->nbytes;
        return block;
    }
    if (driver_ready(engine->state) < 0) {
        return NULL;
    }
    block = PyMem_Calloc(1, sizeof(Block));
    if (block == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    block->nbytes = rounded;
    for (int attempt = 0;; attempt++) {
        CUresult status;
        Scope scope;
        Py_BEGIN_ALLOW_THREADS
        IN_CONTEXT(scope, engine->context->handle, status,
                   driver.MemAlloc(&block->ptr, rounded));
        Py_END_ALLOW_THREADS
        if (status == CUDA_SUCCESS) {
            break;
        }
        if (status != CUDA_ERROR_OUT_OF_MEMORY || attempt > 0 ||
            pool_trim(engine) != CUDA_SUCCESS) {
            raise_short(engine, &scope, status, rounded);
            PyMem_Free(block);
            return NULL;
        }
    }
    engine->pool.bytes_held += rounded;
    live.device_memory++;
    live.device_bytes += (Py_ssize_t)rounded;
    return block;
}

void
pool_give(EngineObject *engine, Block *block)
{
    size_t rounded;
    int number = class_of(block->nbytes, &rounded);
    block->next = engine->pool.free[number];
    engine->pool.free[number] = block;
    engine->pool.bytes_free += block->nbytes;
}

void
pool_free_for_good(EngineObject *engine, Block *block)
{
    Scope scope = {0};
    CUresult status = destroy(engine, block, &scope);
    SavedError saved;
    save_error(&saved);
    report_unraisable(engine, scope_call(&scope, "cuMemFree"), status);
    restore_error(&saved);
}
