/* The passes of brainstorm's layer SoftmaxCE in one call each: two kernels forward, one
 * backward, where brainstorm's own passes take six and five operations. All of the
 * layer's views get the same bits.
 *
 * As in fully_connected.c, a pass answers whether it has run. */
#include "reduce.h"

enum { VIEWS_MOST = 5 };

/* Read the arrays of a pass as matrices: the first (T, B, ..., classes), of the others
 * every other one alike, and those between with a single column. Begin the pass. Return
 * 1; 0 where the arrays do not suit; -1 with an error set. */
static int
pass_begin(Op *op, ArrayObject *matrices, const Signature *signature, PyObject *core,
           PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    const char *const operation = signature->function;
    PyObject *given[VIEWS_MOST] = {NULL};
    Py_ssize_t shape[MAX_DIMS];
    Py_ssize_t classes = 0;
    int last = 0, is_suited = 1;
    EngineObject *engine = core_engine(core);
    if (engine == NULL || unpack(signature, args, nargs, kwnames, given) < 0) {
        return -1;
    }
    for (int i = 0; signature->names[i] != NULL; i++) {
        const char *const name = signature->names[i];
        ArrayObject *array = array_argument(engine, operation, name, given[i]);
        if (array == NULL) {
            return -1;
        }
        if (i == 0) {
            if (array->ndim < 3) {
                raise_shape(operation, name, array, "(T, B, ..., classes)");
                return -1;
            }
            memcpy(shape, array->shape, sizeof(shape));
            last = array->ndim - 1;
            classes = shape[last];
        }
        shape[last] = i % 2 ? 1 : classes;
        if (check_shape(operation, name, array, last + 1, shape) < 0) {
            return -1;
        }
        is_suited &= axes_matrix(array, last, &matrices[i]);
    }
    if (!is_suited) {
        return 0;
    }
    if (op_init(op, engine, operation) < 0) {
        return -1;
    }
    op_begin(op, 0);
    return 1;
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
    ArrayObject views[VIEWS_MOST];
    Op op;
    int begun = pass_begin(&op, views, &signature, core, args, nargs, kwnames);
    if (begun <= 0) {
        return begun < 0 ? NULL : Py_NewRef(Py_False);
    }
    op_softmax(&op, &views[0], &views[2]);
    queue_losses(&op, &views[3], &views[2], &views[1]);
    return op_end_true(&op);
}

static PyObject *
softmax_ce_backward(PyObject *core, PyObject *const *args, Py_ssize_t nargs,
                    PyObject *kwnames)
{
    static const char *const names[] = {"predictions", "targets", "dx",
                                        "dloss",       "t_bin",   NULL};
    static const Signature signature = {"softmax_ce_backward", names, 5, 5};
    ArrayObject views[VIEWS_MOST];
    Op op;
    int begun = pass_begin(&op, views, &signature, core, args, nargs, kwnames);
    if (begun <= 0) {
        return begun < 0 ? NULL : Py_NewRef(Py_False);
    }
    queue_deltas(&op, &views[2], &views[4], &views[0], &views[1], &views[3]);
    return op_end_true(&op);
}

#define VIEWS_TEXT \
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
               "to dx.\n" VIEWS_TEXT)},
    {"softmax_ce_forward", FASTCALL(softmax_ce_forward),
     PyDoc_STR("softmax_ce_forward($self, x, targets, predictions, loss)\n--\n\n"
               "Run the forward pass of a SoftmaxCE layer on its views.\n\n"
               "Sets predictions to the softmax of each row of x, and loss to the\n"
               "negative logarithm of what is predicted for its target, which counts\n"
               "as 1e-6 at the least.\n" VIEWS_TEXT)},
    {NULL, NULL, 0, NULL},
};
