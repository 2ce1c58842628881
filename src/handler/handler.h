/* What the files of the compute handler share.
 *
 * An Engine is all that computing on one device needs: the context, the compute stream,
 * the loaded kernels, a pool of device memory, cuBLAS. All handlers of a device share
 * one, so that arrays of one may be given to another, as with brainstorm's own
 * handlers. Arrays (array.c) own a reference to their engine. HandlerCore (core.c), the
 * base of brainstorm_dbuf.CudaHandler, owns one too and has the operations as its
 * methods; the operations lie in files of their own by kind.
 *
 * Every operation has the same shape: check the arguments, take temporaries from the
 * pool, op_begin, queue launches on the compute stream, op_end. Between op_begin and
 * op_end nothing may touch Python: the GIL may be released there. Nothing waits for the
 * device but what brings values to the host.
 *
 * Memory is freed in stream order: a block that goes back to the pool may be handed out
 * at once, since whatever used it and whatever will use it are queued on one stream. */
#ifndef BRAINSTORM_DBUF_HANDLER_H
#define BRAINSTORM_DBUF_HANDLER_H

#include "../cuda/binding.h"
#include "../kernels/activations.h"
#include "../kernels/list.h"

#include <pthread.h>

/* ---- Kernels (kernels.c) ---- */

typedef enum {
#define X(name) KERNEL_##name,
    KERNELS(X)
#undef X
        KERNEL_COUNT
} Kernel;

/* ---- Pool (pool.c) ---- */

typedef struct Block Block;

struct Block {
    CUdeviceptr ptr; /* owned by the pool */
    size_t nbytes;   /* as allocated: the size of its class */
    Block *next;     /* borrowed: next free one of its class */
};

enum { POOL_CLASSES = 400 };

typedef struct {
    Block *free[POOL_CLASSES]; /* owned: free blocks by size class */
    size_t bytes_held;         /* allocated from the driver */
    size_t bytes_free;         /* of these, in the free lists */
} Pool;

typedef struct EngineObject EngineObject;

/* A block of at least nbytes (> 0), content arbitrary. NULL with an error set. */
Block *pool_take(EngineObject *engine, size_t nbytes);

/* Give a block back; whatever is queued on the compute stream may still use it. */
void pool_give(EngineObject *engine, Block *block);

/* Give a block back to the driver, which waits for everything in the context: for
 * memory that others may still use on streams of theirs. */
void pool_free_for_good(EngineObject *engine, Block *block);

/* Return all free blocks to the driver. */
CUresult pool_trim(EngineObject *engine);

/* ---- Engine (engine.c) ---- */

struct EngineObject {
    PyObject_HEAD
    ModuleState *state;                 /* borrowed from module */
    PyObject *module;                   /* owned until dealloc: keeps `state` */
    ContextObject *context;             /* owned until dealloc */
    StreamObject *stream;               /* owned until dealloc: the compute stream */
    CUmodule image;                     /* owned, or NULL */
    CUfunction functions[KERNEL_COUNT]; /* borrowed from image */
    void *blas[2];      /* owned: cublasHandle_t for float32, and for TF32; each made at
                           the first product that wants it */
    Block *blas_memory; /* owned: cuBLAS's workspace */
    pthread_mutex_t products; /* held while a product is queued: its kernels leave sums
                                 in the workspace, and no other product's may come
                                 between; nothing that waits for the GIL */
    EngineObject *next;       /* borrowed: next in the list of all engines */
    unsigned int processors;  /* multiprocessors of the device */
    _Atomic(unsigned int) queued; /* launches since the stream was last waited for, by
                                     any thread, mostly without the GIL */
    volatile int *fault; /* owned, page-locked: a kernel's complaint, see Fault */
    void *scratch;       /* owned, page-locked: SCRATCH_BYTES for small reads */
    int scratch_in_use;  /* one thread reads into it */
    Pool pool;
};

enum { SCRATCH_BYTES = 4096 };

/* What a kernel can only find out when it runs. It writes the number into *fault; the
 * next call that brings values to the host raises IndexError and clears it. */
typedef enum {
    FAULT_NONE,
    FAULT_BINARIZE_V,
    FAULT_INDEX_M_BY_V,
    FAULT_MAXPOOL_ARGMAX,
} Fault;

/* The engine in the primary context of a device: the live one, else a new one. New
 * reference, or NULL with an error set. */
EngineObject *engine_of_device(ModuleState *state, PyObject *module, int ordinal);

/* Raise what kernels complained about. Return 0, or -1 with IndexError set. */
int engine_check_fault(EngineObject *engine);

/* Wait for the compute stream (GIL released), then raise what kernels complained about.
 * Return 0, or -1 with an error set. `what` names the operation in the error. */
int engine_synchronize(EngineObject *engine, const char *what);

/* ---- DeviceArray (array.c) ---- */

enum { MAX_DIMS = 8 };

typedef struct {
    PyObject_HEAD
    EngineObject *engine; /* owned */
    Block *block;         /* owned, or NULL: a view, or no bytes, or foreign memory */
    PyObject *base;       /* owned, or NULL: the array or object whose memory it is */
    CUdeviceptr ptr;
    int is_int;      /* int32 elements; else float32 */
    int is_exported; /* somebody else may use the block on streams of theirs */
    int is_foreign;  /* base's memory may go with it: wait before dropping it */
    int ndim;
    Py_ssize_t size; /* number of elements */
    Py_ssize_t shape[MAX_DIMS];
    Py_ssize_t strides[MAX_DIMS]; /* in elements, never negative */
    PyObject *shape_tuple;        /* owned, or NULL: made when first asked for */
} ArrayObject;

/* A new C-contiguous array with arbitrary content. NULL with an error set. */
ArrayObject *array_new(EngineObject *engine, int ndim, const Py_ssize_t *shape,
                       int is_int);

int array_is_contiguous(const ArrayObject *array);

/* 1 if two arrays may have bytes in common, else 0; never wrong about 0. */
int arrays_overlap(const ArrayObject *a, const ArrayObject *b);

/* "(2, 3)" for messages; a new reference or NULL. */
PyObject *shape_of(const ArrayObject *array);

/* ---- Arguments of operations (arguments.c) ---- */

/* Borrow the float32 DeviceArray in object. NULL with TypeError or ValueError set,
 * which name the operation and the argument: no DeviceArray, of another handler, int32.
 */
ArrayObject *array_argument(EngineObject *engine, const char *operation,
                            const char *name, PyObject *object);

/* Read a number. Return 0, or -1 with TypeError set. */
int number_argument(const char *operation, const char *name, PyObject *object,
                    double *value);

/* Read the name of an activation. Return its number, or -1 with TypeError or ValueError
 * set. */
int activation_argument(const char *operation, PyObject *object);

/* Set ValueError "<operation>: <name> has shape (..), expected <format...>"; return
 * NULL.
 */
PyObject *raise_shape(const char *operation, const char *name, const ArrayObject *array,
                      const char *format, ...);

/* Return 0 if array has the given shape, else -1 with such a ValueError. */
int check_shape(const char *operation, const char *name, const ArrayObject *array,
                int ndim, const Py_ssize_t *shape);

/* Return 0, or -1 with ValueError set, if out shares memory with an input. */
int check_apart(const char *operation, const char *out_name, const ArrayObject *out,
                const char *name, const ArrayObject *array);

/* ---- Operations in the making (op.c) ---- */

enum { OP_TEMPORARIES = 12, QUEUE_DEEP = 256, BLOCK_THREADS = 256 };

typedef struct {
    EngineObject *engine; /* borrowed */
    const char *name;     /* of the operation, for errors */
    int tf32;        /* products may round their factors to TF32; set by blas_ready */
    int has_waited;  /* for the compute stream, since op_begin */
    uint64_t copies; /* of the binding's in the stream's ledger at op_begin */
    Scope scope;
    int begun;
    PyThreadState *thread;              /* not NULL: the GIL is released */
    CUresult status;                    /* of the first driver call that failed */
    int blas_status;                    /* of the first cuBLAS call that failed */
    const char *call;                   /* the call that failed */
    Block *temporaries[OP_TEMPORARIES]; /* owned until op_end */
    int count;
} Op;

/* Start; the compute stream stays open until op_end. Return 0, or -1 with an error set:
 * no usable driver, or the stream was closed (no op_end then). */
int op_init(Op *op, EngineObject *engine, const char *name);

/* Device memory until op_end, at least 256-byte aligned; GIL held, before op_begin.
 * 0 with an error set if there is none (op_end follows all the same). */
CUdeviceptr op_temporary(Op *op, size_t nbytes);

/* Enter the context; release the GIL if `is_long` or if the queue is deep, when a
 * launch may wait. From here to op_end: no Python. */
void op_begin(Op *op, int is_long);

/* Queue a kernel on the compute stream. After a failure nothing more is queued. */
void op_launch3(Op *op, Kernel kernel, unsigned int grid_x, unsigned int grid_y,
                unsigned int grid_z, unsigned int threads, unsigned int shared_bytes,
                void **parameters);

static inline void
op_launch(Op *op, Kernel kernel, size_t blocks, unsigned int threads,
          unsigned int shared_bytes, void **parameters)
{
    op_launch3(op, kernel, (unsigned int)blocks, 1, 1, threads, shared_bytes,
               parameters);
}

/* Blocks of BLOCK_THREADS for n items, each thread taking `each` in a grid-stride loop:
 * at least 1, at most some 8 a multiprocessor. */
size_t op_blocks(const Op *op, size_t n, size_t each);

/* How many parts of `each` hold n. */
static inline size_t
op_parts(size_t n, size_t each)
{
    return (n + each - 1) / each;
}

/* Threads side by side along an axis of n: the smallest power of two that is not less,
 * at most `most`. */
static inline unsigned int
op_lanes(size_t n, unsigned int most)
{
    unsigned int lanes = 1;
    while (lanes < n && lanes < most) {
        lanes *= 2;
    }
    return lanes;
}

/* How a launch of blocks of BLOCK_THREADS covers a matrix: x blocks along its rows, y
 * along its columns, and in each block `lanes` threads (a power of two) along a row;
 * see EACH_ROW in common.cuh. */
typedef struct {
    unsigned int lanes, x, y;
} Tiling;

/* For at least one row and one column. */
Tiling op_tile(const Op *op, size_t rows, size_t columns);

/* Queue out = op(a) op(b) + beta out (row-major float32 matrices with leading
 * dimensions in elements; op(a) is m x k, op(b) k x n). blas_ready must have returned 0
 * before op_begin. Nothing may be empty but k, which may be 0. */
void op_product(Op *op, int transa, int transb, size_t m, size_t n, size_t k,
                CUdeviceptr a, size_t lda, CUdeviceptr b, size_t ldb, float beta,
                CUdeviceptr out, size_t ldo);

/* The same for `count` products whose matrices lie at fixed distances (in elements). */
void op_products(Op *op, int count, int transa, int transb, size_t m, size_t n,
                 size_t k, CUdeviceptr a, size_t lda, size_t a_distance, CUdeviceptr b,
                 size_t ldb, size_t b_distance, float beta, CUdeviceptr out, size_t ldo,
                 size_t out_distance);

/* Queue filling n 4-byte words. */
void op_fill_words(Op *op, CUdeviceptr dest, unsigned int word, size_t n);

/* Copy from or to host memory and wait for it, or only wait for the compute stream.
 * op_begin must have been told that it is long. */
void op_set(Op *op, CUdeviceptr dest, const void *source, size_t nbytes);
void op_get(Op *op, void *dest, CUdeviceptr source, size_t nbytes);
void op_wait(Op *op);

/* Leave the context, take the GIL back, give the temporaries back. Return a new None,
 * or NULL with an error set: one set before (by op_temporary), or of a failed call. */
PyObject *op_end(Op *op);

/* The same, with True for None: the answer of what can also say that it has not run. */
PyObject *op_end_true(Op *op);

/* ---- cuBLAS (blas.c) ---- */

/* Make products possible in an operation of the handler `core`, with its precision:
 * open cuBLAS and make the engine's handle if that is not done yet. After op_init,
 * before op_begin. Return 0, or -1 with an error set (op_end follows). */
int blas_ready(Op *op, PyObject *core);
void blas_close(EngineObject *engine);

/* Set the exception for a call of cuBLAS that failed; `when`: "in dot_mm". NULL. */
COLD PyObject *blas_raise(EngineObject *engine, const char *call, int status,
                          const char *when);

/* ---- Elementwise (elementwise.c) ---- */

typedef enum {
#define X(name) MAP_##name,
    MAPS(X)
#undef X
        MAP_COUNT
} Map;

/* Queue out = map(out; a, b; s, t); a and b (may be NULL) broadcast to out as in NumPy.
 * Between op_begin and op_end; shapes and overlap were checked (map_check). */
void op_map(Op *op, Map map, const ArrayObject *out, const ArrayObject *a,
            const ArrayObject *b, float s, float t);

/* Return 0 if `array` broadcasts to out and shares no memory with it other than element
 * by element; else -1 with ValueError set. */
int map_check(const char *operation, const char *out_name, const ArrayObject *out,
              const char *name, const ArrayObject *array);

/* ---- Axes of arrays (axes.c) ---- */

/* Read an axis of an array of ndim axes; negative ones count from the end. Return 0, or
 * -1 with TypeError or ValueError set. */
int axis_argument(const char *operation, PyObject *object, int ndim, int *axis);

typedef struct {
    size_t size;
    size_t stride; /* in elements; 0 where the size is 1 */
} Axis;

/* Merge the axes from first to before end into one. Return 1, or 0 if one stride does
 * not reach all of their elements; the size is right in both cases. */
int axes_merge(const ArrayObject *array, int first, int end, Axis *merged);

/* Describe an array as a matrix: the axes before `split` as its rows, the others,
 * without gaps, as its columns. Return 1, or 0 where the array has no elements or its
 * strides do not allow that. No Python object, good for op_map and sum_plan alone. */
int axes_matrix(const ArrayObject *array, int split, ArrayObject *matrix);

/* Describe a contiguous temporary of an array's shape: no Python object, good for
 * op_map and sum_plan alone. Before op_begin. Return 0, or -1 with an error set (op_end
 * follows). */
int op_twin(Op *op, ArrayObject *twin, const ArrayObject *array);

/* An array's elements without gaps: where they lie themselves, or in a twin. */
typedef struct {
    const ArrayObject *array; /* borrowed */
    CUdeviceptr ptr;          /* of the array, or of the twin; 0 if it is empty */
    ArrayObject twin;         /* if twin.ptr is not 0 */
} Packed;

/* Find the memory, before op_begin. Return 0, or -1 with an error set. */
int packed_init(Packed *packed, Op *op, const ArrayObject *array);

/* Queue the copy from the array, or back to it, where one is needed. */
void packed_load(const Packed *packed, Op *op);
void packed_store(const Packed *packed, Op *op);

/* An array of at least one axis as rows: the last axis, without gaps, and all others as
 * one. Where its strides do not allow that, it is a contiguous twin. */
typedef struct {
    const ArrayObject *array; /* borrowed */
    CUdeviceptr ptr;          /* of the array, or of the twin */
    size_t rows, columns;
    size_t pitch; /* from row to row, in elements; 0 where there is one row */
    int is_twin;
    ArrayObject twin;
} Rows;

/* Before op_begin. Return 0, or -1 with an error set (op_end follows). */
int op_rows(Op *op, Rows *rows, const ArrayObject *array);

/* After op_begin, for an array that is read, and that was written: copy to and from the
 * twin, if there is one. */
void op_rows_load(Op *op, const Rows *rows);
void op_rows_store(Op *op, const Rows *rows);

/* ---- HandlerCore (core.c) ---- */

typedef struct {
    PyObject_HEAD
    EngineObject *engine;     /* owned until dealloc; NULL before __init__ */
    int tf32;                 /* products may round their factors to TF32 */
    unsigned long long seed;  /* of the random numbers */
    unsigned long long draws; /* how many random operations there were */
} CoreObject;

/* The engine of a handler; NULL with an error set if it was never initialised. */
EngineObject *core_engine(PyObject *core);

extern PyType_Spec Engine_spec, DeviceArray_spec;

/* Make the type HandlerCore with the operations of all files. NULL with an error set.
 */
PyTypeObject *core_type(PyObject *module);

/* Tables of the other files, all METH_FASTCALL | METH_KEYWORDS methods of HandlerCore.
 */
extern PyMethodDef memory_operations[], elementwise_operations[], matrix_operations[],
    reduce_operations[], row_operations[], random_operations[],
    convolution_operations[], pooling_operations[], recurrent_operations[],
    fully_connected_operations[], softmax_ce_operations[], unpack_operations[];

#endif
