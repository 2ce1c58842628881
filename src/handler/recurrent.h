/* What the passes of the recurrent layers have in common: reading the layer's views,
 * and launches of the kernels in recurrent.cu. In recurrent.c, used by lstm.c too.
 *
 * A pass answers True when it has run. It answers False, having done nothing, where the
 * views lie in memory as it does not expect them (brainstorm lays none out so) or have
 * no elements: then the layer's own pass is to run, operation by operation. */
#ifndef BRAINSTORM_DBUF_HANDLER_RECURRENT_H
#define BRAINSTORM_DBUF_HANDLER_RECURRENT_H

#include "../kernels/recurrent.h"
#include "handler.h"

typedef struct {
    CUdeviceptr ptr;
    size_t pitch; /* elements from row to row */
} Matrix;

static inline CUdeviceptr
matrix_row(Matrix matrix, size_t row)
{
    return matrix.ptr + 4 * row * matrix.pitch;
}

static inline Pitched
matrix_pitched(Matrix matrix)
{
    return (Pitched){(float *)(uintptr_t)matrix.ptr, matrix.pitch};
}

/* ---- The views of a layer ---- */

enum { LAYER_LISTS = 3 };

typedef struct {
    EngineObject *engine;  /* borrowed */
    const char *operation; /* of the pass, for errors */
    size_t steps, batch, size;
    size_t features; /* of a step's input, all its axes together */
    Activation activation;
    Matrix x;                     /* steps * batch rows of features */
    Matrix y;                     /* (steps + 1) * batch rows of size */
    const ArrayObject *input;     /* borrowed: x */
    int is_suited;                /* so far */
    PyObject *lists[LAYER_LISTS]; /* owned tuples: keep the arrays without the GIL */
    int list_count;
} Layer;

/* Fill a zeroed Layer from what every pass is given. Return 0, or -1 with an error set;
 * layer_close follows in any case. */
int layer_open(Layer *layer, EngineObject *engine, const char *operation,
               PyObject *activation, PyObject *x, PyObject *y);

/* Read an array of x's shape, or of y's. Borrowed; NULL with an error set. */
ArrayObject *layer_input(Layer *layer, const char *name, PyObject *object,
                         Matrix *matrix);
ArrayObject *layer_output(Layer *layer, const char *name, PyObject *object,
                          Matrix *matrix);

/* Read the list `what` of parameters or gradients, which have the given names; the last
 * (timing) may be missing and is 0 then. Return 0, or -1 with an error set. */
int layer_parameters(Layer *layer, const char *what, PyObject *object, int count,
                     const char *const *names, CUdeviceptr *parameters);

/* Read the list of internals; all have y's shape. arrays may be NULL. */
int layer_internals(Layer *layer, PyObject *object, int count, const char *const *names,
                    Matrix *matrices, ArrayObject **arrays);

/* Return result; release what the layer owns. */
PyObject *layer_close(Layer *layer, PyObject *result);

/* ---- Launches; between op_begin and op_end ---- */

/* A kernel of (pass, t): a thread for each unit, and some or all sequences. */
void op_step(Op *op, const Layer *layer, Kernel kernel, void *pass, size_t t);

/* Copy `rows` rows of `columns` and set the columns from there to `padded` to 0. */
void op_copy_rows(Op *op, Matrix out, size_t padded, Matrix in, size_t columns,
                  size_t rows);
void op_add_rows(Op *op, Matrix out, Matrix in, size_t columns, size_t rows);

/* Sums over the rows of all steps, for which room is taken before op_begin. */
typedef struct {
    size_t chunk, chunks; /* rows summed by one block, and how many such */
    CUdeviceptr partial;  /* borrowed temporary */
} SumPlan;

int op_plan_sums(Op *op, SumPlan *plan, const Layer *layer, size_t count);

/* Run a kernel of (partial, pass, chunk) that makes `count` sums for each unit, and add
 * them to targets. */
void op_sums(Op *op, const SumPlan *plan, const Layer *layer, Kernel kernel, void *pass,
             size_t count, const CUdeviceptr *targets);

/* ---- Methods of HandlerCore that lie in lstm.c ---- */

PyObject *lstm_forward(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                       PyObject *kwnames);
PyObject *lstm_backward(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames);

#endif
