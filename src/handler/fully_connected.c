/* The passes of brainstorm's layer FullyConnected in one call each.
 *
 * They queue the very operations of brainstorm's own passes, and leave the same bits in
 * all of the layer's views; but the bias and the activation are one kernel. What is
 * saved is the host's time: of small layers it is most of a step.
 *
 * A pass answers True when it has run. It answers False, having done nothing, where
 * views have no elements, or lie in memory as brainstorm lays none out: then the
 * layer's own pass is to run, operation by operation. */
#include "reduce.h"

#include <limits.h>

typedef struct {
    EngineObject *engine;  /* borrowed */
    const char *operation; /* of the pass, for errors */
    Activation activation;
    const ArrayObject *input, *output; /* borrowed: x and y as given */
    ArrayObject x, y, dx, dy;       /* as matrices: a row for each step and sequence */
    ArrayObject W, bias, dW, dbias; /* bias and dbias as matrices of one row */
    int is_suited;                  /* so far */
    PyObject *lists[2];             /* owned tuples: keep the arrays without the GIL */
    int list_count;
} Dense;

/* Describe an array (T, B, ...) as a matrix that cuBLAS can take. */
static void
dense_matrix(Dense *self, const ArrayObject *array, ArrayObject *matrix)
{
    self->is_suited &= axes_matrix(array, 2, matrix) && matrix->shape[0] <= INT_MAX &&
                       matrix->shape[1] <= INT_MAX && matrix->strides[0] <= INT_MAX;
}

/* Read x or y. Borrowed; NULL with an error set. */
static ArrayObject *
dense_array(Dense *self, const char *name, PyObject *object, ArrayObject *matrix)
{
    ArrayObject *array = array_argument(self->engine, self->operation, name, object);
    if (array == NULL) {
        return NULL;
    }
    if (array->ndim < 3) {
        raise_shape(self->operation, name, array, "(T, B, ...)");
        return NULL;
    }
    dense_matrix(self, array, matrix);
    return array;
}

/* Read the deltas of x or y, `like` it. Return 0, or -1 with an error set. */
static int
dense_deltas(Dense *self, const char *name, PyObject *object, const ArrayObject *like,
             ArrayObject *matrix)
{
    ArrayObject *array = array_argument(self->engine, self->operation, name, object);
    if (array == NULL ||
        check_shape(self->operation, name, array, like->ndim, like->shape) < 0) {
        return -1;
    }
    dense_matrix(self, array, matrix);
    return 0;
}

/* Read the list `what` of parameters or gradients: W (size, features), bias (size,).
 * Return 0, or -1 with an error set. */
static int
dense_parameters(Dense *self, const char *what, PyObject *object, ArrayObject *W,
                 ArrayObject *bias)
{
    ArrayObject *arrays[2];
    const Py_ssize_t shape[] = {self->y.shape[1], self->x.shape[1]};
    PyObject *list = PySequence_Tuple(object);
    if (list == NULL) {
        return -1;
    }
    self->lists[self->list_count++] = list;
    if (PyTuple_GET_SIZE(list) != 2) {
        PyErr_Format(PyExc_ValueError, "%s: %s has %zd arrays, expected 2 (W, bias)",
                     self->operation, what, PyTuple_GET_SIZE(list));
        return -1;
    }
    for (int i = 0; i < 2; i++) {
        char name[32];
        PyOS_snprintf(name, sizeof(name), "%s.%s", what, i == 0 ? "W" : "bias");
        arrays[i] = array_argument(self->engine, self->operation, name,
                                   PyTuple_GET_ITEM(list, i));
        if (arrays[i] == NULL ||
            check_shape(self->operation, name, arrays[i], 2 - i, shape) < 0) {
            return -1;
        }
        self->is_suited &= array_is_contiguous(arrays[i]);
    }
    self->is_suited &= axes_matrix(arrays[0], 1, W);
    self->is_suited &= axes_matrix(arrays[1], 0, bias);
    return 0;
}

/* Read what every pass is given. Return 0, or -1 with an error set; dense_close follows
 * in any case. */
static int
dense_open(Dense *self, PyObject *const *given, PyObject *parameters)
{
    int activation = activation_argument(self->operation, given[0]);
    if (activation < 0) {
        return -1;
    }
    self->activation = (Activation)activation;
    self->is_suited = 1;
    self->input = dense_array(self, "x", given[1], &self->x);
    self->output =
        self->input == NULL ? NULL : dense_array(self, "y", given[2], &self->y);
    if (self->output == NULL) {
        return -1;
    }
    if (self->output->shape[0] != self->input->shape[0] ||
        self->output->shape[1] != self->input->shape[1]) {
        raise_shape(self->operation, "y", self->output,
                    "the time and batch sizes of x, (%zd, %zd, ...)",
                    self->input->shape[0], self->input->shape[1]);
        return -1;
    }
    return dense_parameters(self, "parameters", parameters, &self->W, &self->bias);
}

/* Return result; release what it owns. */
static PyObject *
dense_close(Dense *self, PyObject *result)
{
    for (int i = 0; i < self->list_count; i++) {
        Py_DECREF(self->lists[i]);
    }
    return result;
}

/* Queue out = op(a) op(b) + beta out for matrices as axes_matrix describes them. */
static void
dense_product(Op *op, int transa, int transb, const ArrayObject *a,
              const ArrayObject *b, float beta, const ArrayObject *out)
{
    op_product(op, transa, transb, (size_t)out->shape[0], (size_t)out->shape[1],
               (size_t)a->shape[!transa], a->ptr, (size_t)a->strides[0], b->ptr,
               (size_t)b->strides[0], beta, out->ptr, (size_t)out->strides[0]);
}

static PyObject *
fully_connected_forward(PyObject *core, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames)
{
    static const char *const names[] = {"activation", "x", "y", "parameters", NULL};
    static const Signature signature = {"fully_connected_forward", names, 4, 4};
    static const Map of_sum[ACTIVATION_COUNT] = {
        [ACTIVATION_tanh] = MAP_tanh_of_sum,
        [ACTIVATION_rel] = MAP_rel_of_sum,
        [ACTIVATION_sigmoid] = MAP_sigmoid_of_sum,
        [ACTIVATION_el] = MAP_el_of_sum,
        [ACTIVATION_linear] = MAP_add,
    };
    PyObject *given[4] = {NULL}, *result = NULL;
    EngineObject *engine = core_engine(core);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    Op op;
    Dense self = {.engine = engine, .operation = signature.function};
    if (dense_open(&self, given, given[3]) == 0) {
        if (!self.is_suited) {
            result = Py_NewRef(Py_False);
        }
        else if (op_init(&op, engine, self.operation) == 0) {
            if (blas_ready(&op, core) == 0) {
                op_begin(&op, 0);
                dense_product(&op, 0, 1, &self.x, &self.W, 0, &self.y);
                op_map(&op, of_sum[self.activation], &self.y, &self.y, &self.bias, 0,
                       0);
            }
            result = op_end_true(&op);
        }
    }
    return dense_close(&self, result);
}

static PyObject *
fully_connected_backward(PyObject *core, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames)
{
    static const char *const names[] = {"activation", "x",          "y",         "dx",
                                        "dy",         "parameters", "gradients", NULL};
    static const Signature signature = {"fully_connected_backward", names, 7, 7};
    static const Map derivative[ACTIVATION_COUNT] = {
        [ACTIVATION_tanh] = MAP_tanh_deriv,
        [ACTIVATION_rel] = MAP_rel_deriv,
        [ACTIVATION_sigmoid] = MAP_sigmoid_deriv,
        [ACTIVATION_el] = MAP_el_deriv,
    };
    PyObject *given[7] = {NULL}, *result = NULL;
    EngineObject *engine = core_engine(core);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    Op op;
    Sum sum;
    Dense self = {.engine = engine, .operation = signature.function};
    if (dense_open(&self, given, given[5]) == 0 &&
        dense_deltas(&self, "dx", given[3], self.input, &self.dx) == 0 &&
        dense_deltas(&self, "dy", given[4], self.output, &self.dy) == 0 &&
        dense_parameters(&self, "gradients", given[6], &self.dW, &self.dbias) == 0) {
        if (!self.is_suited) {
            result = Py_NewRef(Py_False);
        }
        else if (op_init(&op, engine, self.operation) == 0) {
            if (blas_ready(&op, core) == 0 &&
                sum_plan(&op, &sum, &self.dy, 0, 1, &self.dbias, 1) == 0) {
                op_begin(&op, 0);
                if (self.activation != ACTIVATION_linear) {
                    op_map(&op, derivative[self.activation], &self.dy, &self.y,
                           &self.dy, 0, 0);
                }
                dense_product(&op, 0, 0, &self.dy, &self.W, 1, &self.dx);
                dense_product(&op, 1, 0, &self.dy, &self.x, 0, &self.dW);
                op_sum(&op, &sum);
            }
            result = op_end_true(&op);
        }
    }
    return dense_close(&self, result);
}

#define VIEWS \
    "x (T, B, ...) is the input and y (T, B, ...) the output; parameters and\n" \
    "gradients are W (size, features) and bias (size,), with as many elements\n" \
    "as a step of y and of x has. Returns whether it was done: False, and\n" \
    "nothing is changed, where arrays have no elements or are not laid out as\n" \
    "by brainstorm. Raises TypeError or ValueError that names a wrong argument."

PyMethodDef fully_connected_operations[] = {
    {"fully_connected_backward", FASTCALL(fully_connected_backward),
     PyDoc_STR(
         "fully_connected_backward($self, activation, x, y, dx, dy, parameters, "
         "gradients)\n--\n\n"
         "Run the backward pass of a FullyConnected layer on its views.\n\n"
         "dx gets the input's deltas added, gradients are set; dy are the deltas\n"
         "of y, and become those before the activation.\n" VIEWS)},
    {"fully_connected_forward", FASTCALL(fully_connected_forward),
     PyDoc_STR("fully_connected_forward($self, activation, x, y, parameters)\n--\n\n"
               "Run the forward pass of a FullyConnected layer on its views.\n"
               "\n" VIEWS)},
    {NULL, NULL, 0, NULL},
};
