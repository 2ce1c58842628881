/* A stand-in for cuBLAS on the stand-in driver's streams: the few calls that we make.

   It lies in the same library as the driver, so that both work on the same queues. Like
   the driver it checks what the manual demands, and a product runs as late as other
   work does. It then needs all of its matrices in live memory, else it counts a fault
   and writes nothing. A workspace that was set gets poison with each product, as it is
   nobody else's. Two threads in products of one handle are a fault: the kernels of one
   may come between those of the other, which leave sums in the workspace.

   Matrices are stored by columns. Sums run over k in ascending order in double, so a
   result does not depend on the shape around it. */

#include "fake_cuda.h"

#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef struct blas_handle_number *blas_handle; /* a number, as all handles here */

enum status {
    STATUS_SUCCESS = 0,
    STATUS_NOT_INITIALIZED = 1,
    STATUS_ALLOC_FAILED = 3,
    STATUS_INVALID_VALUE = 7,
    STATUS_ARCH_MISMATCH = 8,
    STATUS_MAPPING_ERROR = 11,
    STATUS_EXECUTION_FAILED = 13,
    STATUS_INTERNAL_ERROR = 14,
    STATUS_NOT_SUPPORTED = 15,
};

enum {
    VERSION = 130000,
    OP_N = 0,
    OP_C = 2,
    POINTER_MODE_DEVICE = 1,
    TYPE_FLOAT = 0,
    WORKSPACE_ALIGNMENT = 256,
    WORKSPACE_POISON = 4096,
};

struct blas {
    blas_handle handle;
    struct context *context; /* borrowed; takes this with it */
    CUstream stream;
    void *workspace; /* the caller's, NULL for our own */
    size_t workspace_bytes;
    bool device_scalars;
};

/* --- handles --- */

/* Begin a call. On success the lock is held. */
static enum status
enter_cublas(enum call call, struct context **current)
{
    CUresult code = enter_early(call);
    if (code != CUDA_SUCCESS && fake.forked) {
        return STATUS_NOT_INITIALIZED;
    }
    if (code != CUDA_SUCCESS) { /* planned: one of cuBLAS's, or the context is lost */
        return (int)code <= STATUS_NOT_SUPPORTED ? (enum status)code
                                                 : STATUS_EXECUTION_FAILED;
    }
    if (context_current(current) != CUDA_SUCCESS) {
        leave(CUDA_SUCCESS);
        return STATUS_NOT_INITIALIZED;
    }
    return STATUS_SUCCESS;
}

static int
leave_cublas(enum status status)
{
    leave(CUDA_SUCCESS);
    return status;
}

/* Begin a call on a handle, in its context. On success the lock is held. */
static enum status
enter_handle(enum call call, blas_handle handle, struct blas **blas)
{
    struct context *current;
    enum status status = enter_cublas(call, &current);
    if (status != STATUS_SUCCESS) {
        return status;
    }
    *blas = handle_find(&fake.blas_handles, handle);
    return *blas && (*blas)->context == current ? STATUS_SUCCESS
                                                : leave_cublas(STATUS_NOT_INITIALIZED);
}

static void
blas_free(struct blas *blas)
{
    handle_remove(&fake.blas_handles, blas->handle);
    free(blas);
}

/* Free the handles of a context, of all contexts if NULL. */
void
cublas_drop_context(struct context *context)
{
    for (size_t i = 0; i < fake.blas_handles.used; i++) {
        struct blas *blas = fake.blas_handles.objects[i];
        if (blas != NULL && (context == NULL || blas->context == context)) {
            blas_free(blas);
        }
    }
}

void
cublas_reset(void)
{
    cublas_drop_context(NULL);
    handles_clear(&fake.blas_handles);
}

/* Making and destroying a handle allocate and free, so they wait as those do. */

FAKE_EXPORT int
cublasCreate_v2(blas_handle *handle)
{
    struct context *current;
    enum status status = enter_cublas(CALL_cublasCreate_v2, &current);
    if (status != STATUS_SUCCESS) {
        return status;
    }
    if (handle == NULL) {
        return leave_cublas(STATUS_INVALID_VALUE);
    }
    fake.host_syncs++;
    queue_wait_context(current);
    if (current->destroyed) { /* by another thread while we waited */
        return leave_cublas(STATUS_NOT_INITIALIZED);
    }
    struct blas *blas = allocate(1, sizeof(*blas));
    blas->context = current;
    blas->handle = handle_add(&fake.blas_handles, blas);
    *handle = blas->handle;
    return leave_cublas(STATUS_SUCCESS);
}

FAKE_EXPORT int
cublasDestroy_v2(blas_handle handle)
{
    struct blas *blas;
    enum status status = enter_handle(CALL_cublasDestroy_v2, handle, &blas);
    if (status != STATUS_SUCCESS) {
        return status;
    }
    fake.host_syncs++;
    queue_wait_context(blas->context);
    blas = handle_find(&fake.blas_handles, handle);
    if (blas == NULL) { /* destroyed by another thread while we waited */
        return leave_cublas(STATUS_NOT_INITIALIZED);
    }
    blas_free(blas);
    return leave_cublas(STATUS_SUCCESS);
}

FAKE_EXPORT int
cublasGetVersion_v2(blas_handle handle, int *version)
{
    struct blas *blas;
    enum status status = enter_handle(CALL_cublasGetVersion_v2, handle, &blas);
    if (status != STATUS_SUCCESS) {
        return status;
    }
    if (version == NULL) {
        return leave_cublas(STATUS_INVALID_VALUE);
    }
    *version = VERSION;
    return leave_cublas(STATUS_SUCCESS);
}

FAKE_EXPORT const char *
cublasGetStatusString(int status)
{
    switch (status) {
    case STATUS_SUCCESS:
        return "success";
    case STATUS_NOT_INITIALIZED:
        return "the library was not initialized";
    case STATUS_ALLOC_FAILED:
        return "the resource allocation failed";
    case STATUS_INVALID_VALUE:
        return "an unsupported value or parameter was passed to the function";
    case STATUS_ARCH_MISMATCH:
        return "the device lacks a feature";
    case STATUS_MAPPING_ERROR:
        return "an access to GPU memory space failed";
    case STATUS_EXECUTION_FAILED:
        return "the function failed to launch on the GPU";
    case STATUS_INTERNAL_ERROR:
        return "an internal operation failed";
    case STATUS_NOT_SUPPORTED:
        return "the functionality is not supported";
    default:
        return "unknown status";
    }
}

/* Setting the stream takes the workspace away, as the manual says. */
FAKE_EXPORT int
cublasSetStream_v2(blas_handle handle, CUstream stream_handle)
{
    struct blas *blas;
    struct stream *stream;
    enum status status = enter_handle(CALL_cublasSetStream_v2, handle, &blas);
    if (status != STATUS_SUCCESS) {
        return status;
    }
    if (stream_find(stream_handle, blas->context, &stream) != CUDA_SUCCESS
        || stream->context != blas->context) {
        return leave_cublas(STATUS_INVALID_VALUE);
    }
    blas->stream = stream_handle;
    blas->workspace = NULL;
    blas->workspace_bytes = 0;
    return leave_cublas(STATUS_SUCCESS);
}

FAKE_EXPORT int
cublasSetWorkspace_v2(blas_handle handle, void *workspace, size_t bytes)
{
    struct blas *blas;
    enum status status = enter_handle(CALL_cublasSetWorkspace_v2, handle, &blas);
    if (status != STATUS_SUCCESS) {
        return status;
    }
    if ((uintptr_t)workspace % WORKSPACE_ALIGNMENT) {
        return leave_cublas(STATUS_INVALID_VALUE);
    }
    blas->workspace = workspace;
    blas->workspace_bytes = workspace ? bytes : 0;
    return leave_cublas(STATUS_SUCCESS);
}

FAKE_EXPORT int
cublasSetMathMode(blas_handle handle, int mode)
{
    const int modes = 3, flags = 16; /* of default, pedantic, TF32; no reduced sums */
    struct blas *blas;
    enum status status = enter_handle(CALL_cublasSetMathMode, handle, &blas);
    if (status != STATUS_SUCCESS) {
        return status;
    }
    return leave_cublas(mode & ~(modes | flags) ? STATUS_INVALID_VALUE
                                                : STATUS_SUCCESS);
}

FAKE_EXPORT int
cublasSetPointerMode_v2(blas_handle handle, int mode)
{
    struct blas *blas;
    enum status status = enter_handle(CALL_cublasSetPointerMode_v2, handle, &blas);
    if (status != STATUS_SUCCESS) {
        return status;
    }
    if (mode < 0 || mode > POINTER_MODE_DEVICE) {
        return leave_cublas(STATUS_INVALID_VALUE);
    }
    blas->device_scalars = mode == POINTER_MODE_DEVICE;
    return leave_cublas(STATUS_SUCCESS);
}

/* --- products --- */

/* A matrix of a product as it is stored: rows down, columns `step` elements apart. */
struct matrix {
    float *data;
    int64_t rows, columns;
    int64_t step;
    int64_t stride; /* to the one of the next product of a batch */
};

/* c = alpha * op(a) * op(b) + beta * c, for each of a batch. A vector is a matrix of
   one row, with its increment as the step; see vector_matrix. */
struct product {
    struct matrix a, b, c;
    bool a_transposed, b_transposed;
    int64_t depth;
    int batch;
    int device;
    const float *device_alpha, *device_beta; /* NULL: they are given by value */
    float alpha, beta;
    void *workspace;
    size_t workspace_bytes;
};

/* Say whether the product's device can use all of a matrix, in each of the batch. */
static bool
matrix_is_live(const struct matrix *matrix, const struct product *p)
{
    if (matrix->rows == 0 || matrix->columns == 0) {
        return true;
    }
    int64_t last = (matrix->columns - 1) * matrix->step;
    const float *lowest = matrix->data + (last < 0 ? last : 0);
    size_t count = (size_t)(llabs(last) + matrix->rows);
    for (int i = 0; i < p->batch; i++) {
        if (!memory_is_live(lowest + i * matrix->stride, count * sizeof(float),
                            p->device)) {
            return false;
        }
    }
    return true;
}

enum { TILE = 4 };

/* Copy op(matrix) to rows of `width` doubles, a multiple of TILE, padded with 0: row i
   is the i-th along the depth. */
static double *
pack(const struct matrix *matrix, const float *data, bool depth_is_down, int64_t depth,
     int64_t count, int64_t width)
{
    double *packed = allocate((size_t)(depth * width), sizeof(*packed));
    if (depth_is_down) {
        for (int64_t j = 0; j < count; j++) {
            for (int64_t i = 0; i < depth; i++) {
                packed[i * width + j] = data[j * matrix->step + i];
            }
        }
    } else {
        for (int64_t i = 0; i < depth; i++) {
            for (int64_t j = 0; j < count; j++) {
                packed[i * width + j] = data[i * matrix->step + j];
            }
        }
    }
    return packed;
}

/* Multiply TILE columns of the packed left side with TILE of the right one. */
static void
multiply_tile(const double *restrict a, int64_t a_width, const double *restrict b,
              int64_t b_width, int64_t depth, double sums[TILE][TILE])
{
    double out[TILE][TILE] = {{0}};
    for (int64_t k = 0; k < depth; k++, a += a_width, b += b_width) {
        for (int j = 0; j < TILE; j++) {
            for (int i = 0; i < TILE; i++) {
                out[j][i] += a[i] * b[j];
            }
        }
    }
    memcpy(sums, out, sizeof(out));
}

/* Write one element. What beta = 0 would multiply is not read. */
static void
write_element(float *c, double sum, float alpha, float beta)
{
    double value = alpha == 0 ? 0 : alpha * sum;
    *c = (float)(beta == 0 ? value : value + (double)beta * *c);
}

static int64_t
tiles(int64_t count)
{
    return (count + TILE - 1) / TILE * TILE;
}

static int64_t
smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Compute product number `i` of a batch. */
static void
multiply(const struct product *p, int i, float alpha, float beta)
{
    int64_t m = p->c.rows, n = p->c.columns;
    int64_t depth = alpha == 0 ? 0 : p->depth; /* then a and b are not read */
    int64_t a_width = tiles(m), b_width = tiles(n);
    double *a = pack(&p->a, p->a.data + i * p->a.stride, p->a_transposed, depth, m,
                     a_width);
    double *b = pack(&p->b, p->b.data + i * p->b.stride, !p->b_transposed, depth, n,
                     b_width);
    float *c = p->c.data + i * p->c.stride;
    for (int64_t x = 0; x < n; x += TILE) {
        for (int64_t y = 0; y < m; y += TILE) {
            double sums[TILE][TILE];
            multiply_tile(a + y, a_width, b + x, b_width, depth, sums);
            for (int64_t j = 0; j < smaller(TILE, n - x); j++) {
                for (int64_t k = 0; k < smaller(TILE, m - y); k++) {
                    write_element(c + (x + j) * p->c.step + y + k, sums[j][k], alpha,
                                  beta);
                }
            }
        }
    }
    free(a);
    free(b);
}

/* Run a queued product; false if not all of its memory is there. */
static bool
product_run(void *argument)
{
    const struct product *p = argument;
    const float *scalars[] = {p->device_alpha, p->device_beta};
    float values[] = {p->alpha, p->beta};
    for (int i = 0; i < 2; i++) {
        if (scalars[i] != NULL) {
            if (!memory_is_live(scalars[i], sizeof(float), p->device)) {
                return false;
            }
            values[i] = *scalars[i];
        }
    }
    bool reads = values[0] != 0;
    if (!matrix_is_live(&p->c, p)
        || (reads && (!matrix_is_live(&p->a, p) || !matrix_is_live(&p->b, p)))
        || (p->workspace
            && !memory_is_live(p->workspace, p->workspace_bytes, p->device))) {
        return false;
    }
    if (p->workspace != NULL) {
        size_t bytes = p->workspace_bytes;
        memset(p->workspace, 0xff, bytes < WORKSPACE_POISON ? bytes : WORKSPACE_POISON);
    }
    for (int i = 0; i < p->batch; i++) {
        multiply(p, i, values[0], values[1]);
    }
    return true;
}

/* Queue a product on the handle's stream, and leave. `alpha` and `beta` are where the
   handle's pointer mode says. */
static int
submit(struct blas *blas, struct product product, const float *alpha, const float *beta)
{
    struct stream *stream;
    if (alpha == NULL || beta == NULL) {
        return leave_cublas(STATUS_INVALID_VALUE);
    }
    if (stream_find(blas->stream, blas->context, &stream) != CUDA_SUCCESS) {
        return leave_cublas(STATUS_EXECUTION_FAILED); /* destroyed since it was set */
    }
    if (product.c.rows == 0 || product.c.columns == 0 || product.batch == 0) {
        return leave_cublas(STATUS_SUCCESS);
    }
    if (blas->device_scalars) {
        product.device_alpha = alpha;
        product.device_beta = beta;
    } else {
        product.alpha = *alpha;
        product.beta = *beta;
    }
    product.device = blas->context->device;
    product.workspace = blas->workspace;
    product.workspace_bytes = blas->workspace_bytes;
    struct product *queued = allocate(1, sizeof(*queued));
    *queued = product;
    queue_work(stream, product_run, queued, NULL);
    return leave_cublas(STATUS_SUCCESS);
}

/* Say whether a leading dimension is right for that many rows. */
static bool
step_is_valid(int step, int rows)
{
    return step >= 1 && step >= rows;
}

/* --- matrix times matrix --- */

/* What the calls of this kind have in common. */
struct gemm {
    int trans_a, trans_b, m, n, k;
    const float *alpha, *a;
    int lda;
    long long stride_a;
    const float *b;
    int ldb;
    long long stride_b;
    const float *beta;
    float *c;
    int ldc;
    long long stride_c;
    int batch;
};

static int
gemm(struct blas *blas, const struct gemm *g)
{
    bool ta = g->trans_a != OP_N, tb = g->trans_b != OP_N;
    if (g->trans_a < OP_N || g->trans_a > OP_C || g->trans_b < OP_N || g->trans_b > OP_C
        || g->m < 0 || g->n < 0 || g->k < 0 || g->batch < 0
        || !step_is_valid(g->lda, ta ? g->k : g->m)
        || !step_is_valid(g->ldb, tb ? g->n : g->k) || !step_is_valid(g->ldc, g->m)) {
        return leave_cublas(STATUS_INVALID_VALUE);
    }
    struct product product = {
        .a = {(float *)g->a, ta ? g->k : g->m, ta ? g->m : g->k, g->lda, g->stride_a},
        .b = {(float *)g->b, tb ? g->n : g->k, tb ? g->k : g->n, g->ldb, g->stride_b},
        .c = {g->c, g->m, g->n, g->ldc, g->stride_c},
        .a_transposed = ta,
        .b_transposed = tb,
        .depth = g->k,
        .batch = g->batch,
    };
    return submit(blas, product, g->alpha, g->beta);
}

/* How many threads are in a product of a handle, or of another with the same place. */
static _Atomic int inside[1024];

static bool
product_begin(blas_handle handle)
{
    bool is_alone = atomic_fetch_add(&inside[(uintptr_t)handle / HANDLE_STEP % 1024], 1) == 0;
    sched_yield(); /* others may come */
    return is_alone;
}

static int
product_end(blas_handle handle, int status)
{
    atomic_fetch_sub(&inside[(uintptr_t)handle / HANDLE_STEP % 1024], 1);
    return status;
}

FAKE_EXPORT int
cublasSgemm_v2(blas_handle handle, int trans_a, int trans_b, int m, int n, int k,
               const float *alpha, const float *a, int lda, const float *b, int ldb,
               const float *beta, float *c, int ldc)
{
    struct blas *blas;
    bool is_alone = product_begin(handle);
    enum status status = enter_handle(CALL_cublasSgemm_v2, handle, &blas);
    if (status != STATUS_SUCCESS) {
        return product_end(handle, status);
    }
    fake.faults += !is_alone;
    const struct gemm g = {trans_a, trans_b, m, n,    k, alpha, a,   lda, 0,
                           b,       ldb,     0, beta, c, ldc,   0, 1};
    return product_end(handle, gemm(blas, &g));
}

FAKE_EXPORT int
cublasSgemmStridedBatched(blas_handle handle, int trans_a, int trans_b, int m, int n,
                          int k, const float *alpha, const float *a, int lda,
                          long long stride_a, const float *b, int ldb,
                          long long stride_b, const float *beta, float *c, int ldc,
                          long long stride_c, int batch)
{
    struct blas *blas;
    bool is_alone = product_begin(handle);
    enum status status = enter_handle(CALL_cublasSgemmStridedBatched, handle, &blas);
    if (status != STATUS_SUCCESS) {
        return product_end(handle, status);
    }
    fake.faults += !is_alone;
    const struct gemm g = {trans_a, trans_b, m,        n,    k, alpha, a,        lda,
                           stride_a, b,      ldb,      stride_b, beta, c, ldc, stride_c,
                           batch};
    return product_end(handle, gemm(blas, &g));
}

/* Only float, computed as float or in one of its faster ways. */
FAKE_EXPORT int
cublasGemmEx(blas_handle handle, int trans_a, int trans_b, int m, int n, int k,
             const void *alpha, const void *a, int a_type, int lda, const void *b,
             int b_type, int ldb, const void *beta, void *c, int c_type, int ldc,
             int compute_type, int algorithm)
{
    struct blas *blas;
    enum status status = enter_handle(CALL_cublasGemmEx, handle, &blas);
    if (status != STATUS_SUCCESS) {
        return status;
    }
    /* CUBLAS_COMPUTE_32F, _PEDANTIC, _FAST_16F, _FAST_16BF, _FAST_TF32 */
    bool computes_float = compute_type == 68 || compute_type == 69 || compute_type == 74
                          || compute_type == 75 || compute_type == 77;
    (void)algorithm;
    if (a_type != TYPE_FLOAT || b_type != TYPE_FLOAT || c_type != TYPE_FLOAT
        || !computes_float) {
        return leave_cublas(STATUS_NOT_SUPPORTED);
    }
    const struct gemm g = {trans_a, trans_b, m, n,    k, alpha, a,   lda, 0,
                           b,       ldb,     0, beta, c, ldc,   0, 1};
    return gemm(blas, &g);
}

/* --- matrix times vector --- */

/* Return a vector as a matrix of one row. One with a negative increment has its first
   element at the far end. */
static struct matrix
vector_matrix(const float *data, int count, int increment)
{
    int64_t first = increment < 0 && count > 0 ? (int64_t)(1 - count) * increment : 0;
    return (struct matrix){(float *)data + first, 1, count, increment, 0};
}

/* y = alpha * op(a) * x + beta * y, computed as the product of rows: x' * op(a)'. */
FAKE_EXPORT int
cublasSgemv_v2(blas_handle handle, int trans, int m, int n, const float *alpha,
               const float *a, int lda, const float *x, int incx, const float *beta,
               float *y, int incy)
{
    struct blas *blas;
    enum status status = enter_handle(CALL_cublasSgemv_v2, handle, &blas);
    if (status != STATUS_SUCCESS) {
        return status;
    }
    if (trans < OP_N || trans > OP_C || m < 0 || n < 0 || incx == 0 || incy == 0
        || !step_is_valid(lda, m)) {
        return leave_cublas(STATUS_INVALID_VALUE);
    }
    if (m == 0 || n == 0) {
        return leave_cublas(STATUS_SUCCESS);
    }
    bool transposed = trans != OP_N;
    int from = transposed ? m : n, to = transposed ? n : m;
    struct product product = {
        .a = vector_matrix(x, from, incx),
        .b = {(float *)a, m, n, lda, 0},
        .c = vector_matrix(y, to, incy),
        .b_transposed = !transposed,
        .depth = from,
        .batch = 1,
    };
    return submit(blas, product, alpha, beta);
}
