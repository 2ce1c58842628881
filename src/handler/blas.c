/* cuBLAS, for matrix products: opened by name at the first product, never linked.
 *
 * Where BRAINSTORM_DBUF_LIBCUBLAS names a library that one is taken; else the one that
 * cuda-pathfinder finds (index packages, toolkit, system); else what the loader finds
 * under the names of CUDA 13 and 12. */
#include "handler.h"

#include <dlfcn.h>
#include <stdlib.h>

/* cuBLAS's own declarations, of the entries used; its header is not needed to build. */
typedef int Status;    /* cublasStatus_t */
typedef int Operation; /* cublasOperation_t: 0 as it is, 1 transposed */

#define BLAS_CALLS(X) \
    X(Create_v2, (void **handle)) \
    X(Destroy_v2, (void *handle)) \
    X(SetStream_v2, (void *handle, CUstream stream)) \
    X(SetWorkspace_v2, (void *handle, void *workspace, size_t nbytes)) \
    X(SetMathMode, (void *handle, int mode)) \
    X(Sgemm_v2, (void *handle, Operation transa, Operation transb, int m, int n, \
                 int k, const float *alpha, const float *a, int lda, const float *b, \
                 int ldb, const float *beta, float *c, int ldc)) \
    X(SgemmStridedBatched, \
      (void *handle, Operation transa, Operation transb, int m, int n, int k, \
       const float *alpha, const float *a, int lda, long long stride_a, \
       const float *b, int ldb, long long stride_b, const float *beta, float *c, \
       int ldc, long long stride_c, int count))

/* Of the process, as the driver's table is: filled once under the GIL. */
static struct {
    int is_open;
#define X(name, parameters) Status(*name) parameters;
    BLAS_CALLS(X)
#undef X
} blas;

enum {
    MATH_DEFAULT = 0,
    MATH_TF32 = 3,
    WORKSPACE_BYTES = 32 << 20, /* what cuBLAS recommends for Hopper */
};

static const char *
status_name(Status status)
{
    static const struct {
        int status;
        const char *name;
    } names[] = {
        {1, "CUBLAS_STATUS_NOT_INITIALIZED"}, {3, "CUBLAS_STATUS_ALLOC_FAILED"},
        {7, "CUBLAS_STATUS_INVALID_VALUE"},   {8, "CUBLAS_STATUS_ARCH_MISMATCH"},
        {11, "CUBLAS_STATUS_MAPPING_ERROR"},  {13, "CUBLAS_STATUS_EXECUTION_FAILED"},
        {14, "CUBLAS_STATUS_INTERNAL_ERROR"}, {15, "CUBLAS_STATUS_NOT_SUPPORTED"},
    };
    for (size_t i = 0; i < Py_ARRAY_LENGTH(names); i++) {
        if (names[i].status == status) {
            return names[i].name;
        }
    }
    return "CUBLAS_STATUS_UNKNOWN";
}

PyObject *
blas_raise(EngineObject *engine, const char *call, int status, const char *when)
{
    enum { ALLOC_FAILED = 3 };
    CUresult state = CUDA_SUCCESS;
    Scope scope;
    /* cuBLAS does not tell that the context is lost; the driver does. */
    IN_CONTEXT(scope, engine->context->handle, state,
               driver.StreamQuery(engine->stream->handle));
    if (context_is_lost(state)) {
        return raise_cuda(engine->state, call, state, "%s %s", status_name(status),
                          when);
    }
    return raise_plain(status == ALLOC_FAILED ? engine->state->CudaMemoryError
                                              : engine->state->CudaError,
                       call, status_name(status), "%s", when);
}

/* The path that cuda-pathfinder finds; a new reference, or NULL with no error set. */
static PyObject *
ask_pathfinder(void)
{
    PyObject *path = NULL;
    PyObject *module = PyImport_ImportModule("cuda.pathfinder");
    if (module != NULL) {
        PyObject *loaded =
            PyObject_CallMethod(module, "load_nvidia_dynamic_lib", "s", "cublas");
        if (loaded != NULL) {
            path = PyObject_GetAttrString(loaded, "abs_path");
            Py_DECREF(loaded);
        }
        Py_DECREF(module);
    }
    PyErr_Clear(); /* not installed, or it finds none: the loader may */
    return path;
}

static void *
open_library(void)
{
    const char *given = getenv("BRAINSTORM_DBUF_LIBCUBLAS");
    if (given != NULL && given[0] != '\0') {
        return dlopen(given, RTLD_NOW | RTLD_LOCAL);
    }
    void *library = NULL;
    PyObject *path = ask_pathfinder();
    if (path != NULL && PyUnicode_Check(path)) {
        const char *name = PyUnicode_AsUTF8(path);
        library = name == NULL ? NULL : dlopen(name, RTLD_NOW | RTLD_LOCAL);
        PyErr_Clear();
    }
    Py_XDECREF(path);
    if (library == NULL) {
        library = dlopen("libcublas.so.13", RTLD_NOW | RTLD_LOCAL);
    }
    if (library == NULL) {
        library = dlopen("libcublas.so.12", RTLD_NOW | RTLD_LOCAL);
    }
    return library;
}

/* Fill the table. Return 0, or -1 with DriverError set. */
static int
open_blas(ModuleState *state)
{
    void *library = open_library();
    if (library == NULL) {
        const char *why = dlerror();
        raise_plain(state->DriverError, "dlopen", "CUBLAS_NOT_FOUND",
                    "matrix products need cuBLAS, which could not be opened (%s); "
                    "`pip install brainstorm-dbuf[cuda]` brings it, or "
                    "BRAINSTORM_DBUF_LIBCUBLAS names it",
                    why == NULL ? "no reason given" : why);
        return -1;
    }
#define X(name, parameters) \
    *(void **)&blas.name = dlsym(library, "cublas" #name); \
    if (blas.name == NULL) { \
        raise_plain(state->DriverError, "dlsym", "CUBLAS_TOO_OLD", \
                    "the cuBLAS found has no cublas" #name); \
        dlclose(library); \
        return -1; \
    }
    BLAS_CALLS(X)
#undef X
    blas.is_open = 1; /* the library stays open */
    return 0;
}

/* Make the handle; in the context, without the GIL. */
static Status
make_handle(EngineObject *engine, int tf32, void **handle, const char **call)
{
    *call = "cublasCreate";
    Status status = blas.Create_v2(handle);
    if (status == 0) {
        *call = "cublasSetStream";
        status = blas.SetStream_v2(*handle, engine->stream->handle);
    }
    if (status == 0) { /* after the stream, which would put cuBLAS's own back */
        *call = "cublasSetWorkspace";
        status = blas.SetWorkspace_v2(*handle, (void *)engine->blas_memory->ptr,
                                      WORKSPACE_BYTES);
    }
    if (status == 0) {
        *call = "cublasSetMathMode";
        status = blas.SetMathMode(*handle, tf32 ? MATH_TF32 : MATH_DEFAULT);
    }
    if (status != 0 && *handle != NULL) {
        (void)blas.Destroy_v2(*handle);
        *handle = NULL;
    }
    return status;
}

/* Memory for cuBLAS to work in, if there is none yet. Return 0, or -1 with an error
 * set. */
static int
take_workspace(EngineObject *engine)
{
    if (engine->blas_memory != NULL) {
        return 0;
    }
    Block *block = pool_take(engine, WORKSPACE_BYTES);
    if (block == NULL) {
        return -1;
    }
    if (engine->blas_memory == NULL) {
        engine->blas_memory = block;
    }
    else { /* another thread was quicker */
        pool_give(engine, block);
    }
    return 0;
}

/* Give the engine its handle of one precision. Return 0, or -1 with an error set. */
static int
set_up(EngineObject *engine, int tf32)
{
    void *handle = NULL;
    const char *call = NULL;
    Status made = 0;
    CUresult entered;
    Scope scope;
    Py_BEGIN_ALLOW_THREADS
    entered = scope_enter(&scope, engine->context->handle);
    if (entered == CUDA_SUCCESS) {
        made = make_handle(engine, tf32, &handle, &call);
        scope_leave(&scope);
    }
    Py_END_ALLOW_THREADS
    if (entered != CUDA_SUCCESS) {
        raise_cuda(engine->state, scope.failed, entered, "cuBLAS could not be set up");
        return -1;
    }
    if (handle == NULL) {
        blas_raise(engine, call, made, "while cuBLAS was set up");
        return -1;
    }
    if (engine->blas[tf32] == NULL) {
        engine->blas[tf32] = handle;
        return 0;
    }
    Py_BEGIN_ALLOW_THREADS /* another thread was quicker */
    if (scope_enter(&scope, engine->context->handle) == CUDA_SUCCESS) {
        (void)blas.Destroy_v2(handle);
        scope_leave(&scope);
    }
    Py_END_ALLOW_THREADS
    return 0;
}

int
blas_ready(Op *op, PyObject *core)
{
    EngineObject *engine = op->engine;
    op->tf32 = ((CoreObject *)core)->tf32;
    if (engine->blas[op->tf32] != NULL) {
        return 0;
    }
    if ((!blas.is_open && open_blas(engine->state) < 0) || take_workspace(engine) < 0) {
        return -1;
    }
    return set_up(engine, op->tf32);
}

void
blas_close(EngineObject *engine)
{
    Scope scope;
    Py_BEGIN_ALLOW_THREADS
    for (int tf32 = 0; tf32 < 2; tf32++) {
        if (engine->blas[tf32] != NULL && driver_usable() &&
            scope_enter(&scope, engine->context->handle) == CUDA_SUCCESS) {
            (void)blas.Destroy_v2(engine->blas[tf32]);
            scope_leave(&scope);
        }
        engine->blas[tf32] = NULL;
    }
    Py_END_ALLOW_THREADS
}

/* cuBLAS's matrices are column-major: a row-major product is that of the transposed
 * factors in the other order, and a row-major matrix is its own transpose there. */
void
op_products(Op *op, int count, int transa, int transb, size_t m, size_t n, size_t k,
            CUdeviceptr a, size_t lda, size_t a_distance, CUdeviceptr b, size_t ldb,
            size_t b_distance, float beta, CUdeviceptr out, size_t ldo,
            size_t out_distance)
{
    static const float one = 1;
    if (op->status != CUDA_SUCCESS || op->blas_status != 0) {
        return;
    }
    op->engine->queued++;
    pthread_mutex_lock(&op->engine->products);
    if (count == 1) {
        op->blas_status =
            blas.Sgemm_v2(op->engine->blas[op->tf32], transb != 0, transa != 0, (int)n,
                          (int)m, (int)k, &one, (const float *)b, (int)ldb,
                          (const float *)a, (int)lda, &beta, (float *)out, (int)ldo);
        op->call = "cublasSgemm";
    }
    else {
        op->blas_status = blas.SgemmStridedBatched(
            op->engine->blas[op->tf32], transb != 0, transa != 0, (int)n, (int)m,
            (int)k, &one, (const float *)b, (int)ldb, (long long)b_distance,
            (const float *)a, (int)lda, (long long)a_distance, &beta, (float *)out,
            (int)ldo, (long long)out_distance, count);
        op->call = "cublasSgemmStridedBatched";
    }
    pthread_mutex_unlock(&op->engine->products);
}

void
op_product(Op *op, int transa, int transb, size_t m, size_t n, size_t k, CUdeviceptr a,
           size_t lda, CUdeviceptr b, size_t ldb, float beta, CUdeviceptr out,
           size_t ldo)
{
    op_products(op, 1, transa, transb, m, n, k, a, lda, 0, b, ldb, 0, beta, out, ldo,
                0);
}
