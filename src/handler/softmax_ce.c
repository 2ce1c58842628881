/* The passes of brainstorm's layer SoftmaxCE in one call each: two kernels forward, one
 * backward, where brainstorm's own passes take six and five operations. All of the
 * layer's views get the same bits.
 *
 * As in fully_connected.c, a pass answers whether it has run. */
#include "reduce.h"

typedef struct {
    EngineObject *engine;       /* borrowed */
    const char *operation;      /* of the pass, for errors */
    const ArrayObject *classes; /* borrowed: the first array, (T, B, ..., classes) */
    int is_suited;              /* so far */
} Views;

/* Read an array of the first one's shape, or with a single column instead of the
 * classes, as a matrix. Return 0, or -1 with an error set. */
static int
views_read(Views *self, const char *name, PyObject *object, int is_column,
           ArrayObject *matrix)
{
    ArrayObject *array = array_argument(self->engine, self->operation, name, object);
    if (array == NULL) {
        return -1;
    }
    if (self->classes == NULL) {
        if (array->ndim < 3) {
            raise_shape(self->operation, name, array, "(T, B, ..., classes)");
            return -1;
        }
        self->classes = array;
    }
    Py_ssize_t shape[MAX_DIMS];
    const int last = self->classes->ndim - 1;
    memcpy(shape, self->classes->shape, sizeof(shape));
    shape[last] = is_column ? 1 : shape[last];
    if (check_shape(self->operation, name, array, last + 1, shape) < 0) {
        return -1;
    }
    self->is_suited &= axes_matrix(array, last, matrix);
    return 0;
}

/* The distances from row to row. */
static size_t
pitch_of(const ArrayObject *matrix)
{
    return (size_t)matrix->strides[0];
}

static void
queue_losses(Op *op, const ArrayObject *loss, const ArrayObject *probs,
             const ArrayObject *targets)
{
    CUdeviceptr loss_ptr = loss->ptr, probs_ptr = probs->ptr;
    CUdeviceptr targets_ptr = targets->ptr;
    size_t rows = (size_t)probs->shape[0], columns = (size_t)probs->shape[1];
    size_t loss_pitch = pitch_of(loss), probs_pitch = pitch_of(probs);
    size_t targets_pitch = pitch_of(targets);
    int *fault = (int *)op->engine->fault, number = FAULT_INDEX_M_BY_V;
    void *parameters[] = {&loss_ptr,   &probs_ptr,   &targets_ptr,   &rows,  &columns,
                          &loss_pitch, &probs_pitch, &targets_pitch, &fault, &number};
    op_launch(op, KERNEL_softmax_ce_losses, op_blocks(op, rows, 1), BLOCK_THREADS, 0,
              parameters);
}

static void
queue_deltas(Op *op, const ArrayObject *dx, const ArrayObject *t_bin,
             const ArrayObject *probs, const ArrayObject *targets,
             const ArrayObject *dloss)
{
    CUdeviceptr dx_ptr = dx->ptr, t_bin_ptr = t_bin->ptr, probs_ptr = probs->ptr;
    CUdeviceptr targets_ptr = targets->ptr, dloss_ptr = dloss->ptr;
    size_t rows = (size_t)probs->shape[0], columns = (size_t)probs->shape[1];
    size_t dx_pitch = pitch_of(dx), t_bin_pitch = pitch_of(t_bin);
    size_t probs_pitch = pitch_of(probs), targets_pitch = pitch_of(targets);
    size_t dloss_pitch = pitch_of(dloss);
    int *fault = (int *)op->engine->fault, number = FAULT_BINARIZE_V;
    Tiling t = op_tile(op, rows, columns);
    void *parameters[] = {&dx_ptr,      &t_bin_ptr,   &probs_ptr,     &targets_ptr,
                          &dloss_ptr,   &rows,        &columns,       &dx_pitch,
                          &t_bin_pitch, &probs_pitch, &targets_pitch, &dloss_pitch,
                          &t.lanes,     &fault,       &number};
    op_launch3(op, KERNEL_softmax_ce_deltas, t.x, t.y, 1, BLOCK_THREADS, 0, parameters);
}

static PyObject *
softmax_ce_forward(PyObject *core, PyObject *const *args, Py_ssize_t nargs,
                   PyObject *kwnames)
{
    static const char *const names[] = {"x", "targets", "predictions", "loss", NULL};
    static const Signature signature = {"softmax_ce_forward", names, 4, 4};
    PyObject *given[4] = {NULL};
    ArrayObject matrices[4];
    Op op;
    EngineObject *engine = core_engine(core);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    Views self = {.engine = engine, .operation = signature.function, .is_suited = 1};
    for (int i = 0; i < 4; i++) {
        if (views_read(&self, names[i], given[i], i % 2, &matrices[i]) < 0) {
            return NULL;
        }
    }
    if (!self.is_suited) {
        Py_RETURN_FALSE;
    }
    if (op_init(&op, engine, self.operation) < 0) {
        return NULL;
    }
    op_begin(&op, 0);
    op_softmax(&op, &matrices[0], &matrices[2]);
    queue_losses(&op, &matrices[3], &matrices[2], &matrices[1]);
    return op_end_true(&op);
}

static PyObject *
softmax_ce_backward(PyObject *core, PyObject *const *args, Py_ssize_t nargs,
                    PyObject *kwnames)
{
    static const char *const names[] = {"predictions", "targets", "dx",
                                        "dloss",       "t_bin",   NULL};
    static const Signature signature = {"softmax_ce_backward", names, 5, 5};
    PyObject *given[5] = {NULL};
    ArrayObject matrices[5];
    Op op;
    EngineObject *engine = core_engine(core);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    Views self = {.engine = engine, .operation = signature.function, .is_suited = 1};
    for (int i = 0; i < 5; i++) {
        if (views_read(&self, names[i], given[i], i % 2, &matrices[i]) < 0) {
            return NULL;
        }
    }
    if (!self.is_suited) {
        Py_RETURN_FALSE;
    }
    if (op_init(&op, engine, self.operation) < 0) {
        return NULL;
    }
    op_begin(&op, 0);
    queue_deltas(&op, &matrices[2], &matrices[4], &matrices[0], &matrices[1],
                 &matrices[3]);
    return op_end_true(&op);
}

#define VIEWS \
    "Arrays have the shape (T, B, ..., classes), targets, loss and its deltas\n" \
    "(T, B, ..., 1). Returns whether it was done: False, and nothing is changed,\n" \
    "where they have no elements or are not laid out as by brainstorm. Raises\n" \
    "TypeError or ValueError that names a wrong argument. A target that is no\n" \
    "class is only seen by the device: the next call that brings values to the\n" \
    "host raises IndexError."

PyMethodDef softmax_ce_operations[] = {
    {"softmax_ce_backward", FASTCALL(softmax_ce_backward),
     PyDoc_STR("softmax_ce_backward($self, predictions, targets, dx, dloss, t_bin)\n"
               "--\n\n"
               "Run the backward pass of a SoftmaxCE layer on its views.\n\n"
               "Sets t_bin to (predictions - one-hot targets) * dloss, and adds it\n"
               "to dx.\n" VIEWS)},
    {"softmax_ce_forward", FASTCALL(softmax_ce_forward),
     PyDoc_STR("softmax_ce_forward($self, x, targets, predictions, loss)\n--\n\n"
               "Run the forward pass of a SoftmaxCE layer on its views.\n\n"
               "Sets predictions to the softmax of each row of x, and loss to the\n"
               "negative logarithm of what is predicted for its target, which counts\n"
               "as 1e-6 at the least.\n" VIEWS)},
    {NULL, NULL, 0, NULL},
};
