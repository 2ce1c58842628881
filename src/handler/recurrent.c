/* Whole passes of brainstorm's recurrent layers in one call: Recurrent and Clockwork
 * here, Lstm and ClockworkLstm in lstm.c.
 *
 * They leave in all of the layer's views what brainstorm's own passes, operation by
 * operation, leave there: only sums are rounded in another order. What is done at once
 * is the input's products for all steps, and the work on a step's units between two
 * products, as one kernel. */
#include "recurrent.h"

/* ---- The views of a layer ---- */

/* Describe an array (T, B, ...) as a matrix with a row for each step and sequence. */
static void
layer_matrix(Layer *layer, const ArrayObject *array, Matrix *matrix)
{
    ArrayObject flat;
    layer->is_suited &= axes_matrix(array, 2, &flat);
    *matrix = (Matrix){.ptr = flat.ptr, .pitch = (size_t)flat.strides[0]};
}

ArrayObject *
layer_input(Layer *layer, const char *name, PyObject *object, Matrix *matrix)
{
    ArrayObject *array = array_argument(layer->engine, layer->operation, name, object);
    const ArrayObject *x = layer->input;
    if (array == NULL ||
        check_shape(layer->operation, name, array, x->ndim, x->shape) < 0) {
        return NULL;
    }
    layer_matrix(layer, array, matrix);
    return array;
}

ArrayObject *
layer_output(Layer *layer, const char *name, PyObject *object, Matrix *matrix)
{
    const Py_ssize_t shape[] = {(Py_ssize_t)layer->steps + 1, (Py_ssize_t)layer->batch,
                                (Py_ssize_t)layer->size};
    ArrayObject *array = array_argument(layer->engine, layer->operation, name, object);
    if (array == NULL || check_shape(layer->operation, name, array, 3, shape) < 0) {
        return NULL;
    }
    layer_matrix(layer, array, matrix);
    return array;
}

int
layer_open(Layer *layer, EngineObject *engine, const char *operation,
           PyObject *activation, PyObject *x, PyObject *y)
{
    layer->engine = engine;
    layer->operation = operation;
    layer->is_suited = 1;
    int number = activation_argument(operation, activation);
    if (number < 0) {
        return -1;
    }
    layer->activation = (Activation)number;
    ArrayObject *input = array_argument(engine, operation, "x", x);
    ArrayObject *output = array_argument(engine, operation, "y", y);
    if (input == NULL || output == NULL) {
        return -1;
    }
    if (input->ndim < 3) {
        raise_shape(operation, "x", input, "(T, B, ...)");
        return -1;
    }
    if (output->ndim != 3) {
        raise_shape(operation, "y", output, "(T + 1, B, size)");
        return -1;
    }
    layer->input = input;
    layer->steps = (size_t)input->shape[0];
    layer->batch = (size_t)input->shape[1];
    layer->size = (size_t)output->shape[2];
    layer->features = 1;
    for (int i = 2; i < input->ndim; i++) {
        layer->features *= (size_t)input->shape[i];
    }
    layer_matrix(layer, input, &layer->x);
    return layer_output(layer, "y", y, &layer->y) == NULL ? -1 : 0;
}

/* Make a tuple of `least` to `most` views. Borrowed; NULL with an error set. */
static PyObject *
layer_list(Layer *layer, const char *what, PyObject *object, Py_ssize_t least,
           Py_ssize_t most)
{
    PyObject *list = PySequence_Tuple(object);
    if (list == NULL) {
        return NULL;
    }
    layer->lists[layer->list_count++] = list;
    Py_ssize_t count = PyTuple_GET_SIZE(list);
    if (count < least || count > most) {
        PyErr_Format(PyExc_ValueError, "%s: %s has %zd arrays, expected %zd",
                     layer->operation, what, count, most);
        return NULL;
    }
    return list;
}

/* "<what>.<name>" for messages. */
static void
name_view(char *full, size_t size, const char *what, const char *name)
{
    PyOS_snprintf(full, size, "%s.%s", what, name);
}

int
layer_parameters(Layer *layer, const char *what, PyObject *object, int count,
                 const char *const *names, CUdeviceptr *parameters)
{
    const Py_ssize_t size = (Py_ssize_t)layer->size;
    PyObject *list = layer_list(layer, what, object, count - 1, count);
    if (list == NULL) {
        return -1;
    }
    parameters[count - 1] = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(list); i++) {
        char name[32];
        name_view(name, sizeof(name), what, names[i]);
        ArrayObject *array = array_argument(layer->engine, layer->operation, name,
                                            PyTuple_GET_ITEM(list, i));
        if (array == NULL) {
            return -1;
        }
        /* Names tell: W and R are matrices, p (peepholes) rows, the rest vectors. */
        const char kind = names[i][0];
        Py_ssize_t shape[2] = {kind == 'p' ? 1 : size, size};
        if (kind == 'W') {
            shape[1] = (Py_ssize_t)layer->features;
        }
        const int ndim = kind == 'W' || kind == 'R' || kind == 'p' ? 2 : 1;
        if (check_shape(layer->operation, name, array, ndim, shape) < 0) {
            return -1;
        }
        layer->is_suited &= array_is_contiguous(array);
        parameters[i] = array->ptr;
    }
    return 0;
}

int
layer_internals(Layer *layer, PyObject *object, int count, const char *const *names,
                Matrix *matrices, ArrayObject **arrays)
{
    PyObject *list = layer_list(layer, "internals", object, count, count);
    if (list == NULL) {
        return -1;
    }
    for (int i = 0; i < count; i++) {
        char name[32];
        name_view(name, sizeof(name), "internals", names[i]);
        ArrayObject *array =
            layer_output(layer, name, PyTuple_GET_ITEM(list, i), &matrices[i]);
        if (array == NULL) {
            return -1;
        }
        if (arrays != NULL) {
            arrays[i] = array;
        }
    }
    return 0;
}

PyObject *
layer_close(Layer *layer, PyObject *result)
{
    for (int i = 0; i < layer->list_count; i++) {
        Py_DECREF(layer->lists[i]);
    }
    return result;
}

/* ---- Launches ---- */

static unsigned int
threads_for(size_t columns)
{
    return columns < BLOCK_THREADS ? ((unsigned int)columns + 31) / 32 * 32
                                   : BLOCK_THREADS;
}

void
op_step(Op *op, const Layer *layer, Kernel kernel, void *pass, size_t t)
{
    void *parameters[] = {pass, &t};
    unsigned int threads = threads_for(layer->size);
    size_t blocks = (layer->size + threads - 1) / threads;
    size_t rows = layer->batch < 65535 ? layer->batch : 65535;
    op_launch3(op, kernel, (unsigned int)blocks, (unsigned int)rows, 1, threads, 0,
               parameters);
}

void
op_copy_rows(Op *op, Matrix out, size_t padded, Matrix in, size_t columns, size_t rows)
{
    Pitched to = matrix_pitched(out), from = matrix_pitched(in);
    void *parameters[] = {&to, &padded, &from, &columns, &rows};
    op_launch(op, KERNEL_recurrent_copy_rows, rows < 8192 ? rows : 8192,
              threads_for(padded), 0, parameters);
}

void
op_add_rows(Op *op, Matrix out, Matrix in, size_t columns, size_t rows)
{
    Pitched to = matrix_pitched(out), from = matrix_pitched(in);
    void *parameters[] = {&to, &from, &columns, &rows};
    op_launch(op, KERNEL_recurrent_add_rows, rows < 8192 ? rows : 8192,
              threads_for(columns), 0, parameters);
}

/* The division into chunks depends on the sizes alone: the same bits on each device. */
int
op_plan_sums(Op *op, SumPlan *plan, const Layer *layer, size_t count)
{
    const size_t rows = layer->steps * layer->batch;
    size_t chunks = rows / 256;
    chunks = chunks < 1 ? 1 : chunks > 64 ? 64 : chunks;
    plan->chunk = (rows + chunks - 1) / chunks;
    plan->chunks = (rows + plan->chunk - 1) / plan->chunk;
    plan->partial = op_temporary(op, plan->chunks * count * layer->size * 4);
    return plan->partial == 0 ? -1 : 0;
}

void
op_sums(Op *op, const SumPlan *plan, const Layer *layer, Kernel kernel, void *pass,
        size_t count, const CUdeviceptr *targets)
{
    CUdeviceptr partial = plan->partial;
    size_t chunk = plan->chunk, chunks = plan->chunks, columns = layer->size;
    void *sum_parameters[] = {&partial, pass, &chunk};
    op_launch3(op, kernel, (unsigned int)((columns + 31) / 32), (unsigned int)chunks, 1,
               256, 0, sum_parameters);
    LayerSums sums;
    for (size_t i = 0; i < count; i++) {
        sums.data[i] = (float *)(uintptr_t)targets[i];
    }
    void *add_parameters[] = {&sums, &partial, &chunks, &count, &columns};
    unsigned int threads = threads_for(columns);
    op_launch3(op, KERNEL_recurrent_add_sums,
               (unsigned int)((columns + threads - 1) / threads), (unsigned int)count,
               1, threads, 0, add_parameters);
}

/* ---- Recurrent and Clockwork ---- */

static const char *const recurrent_parameters[] = {
#define X(name) #name,
    RECURRENT_PARAMETERS(X)
#undef X
};
static const char *const recurrent_internals[] = {
#define X(name) #name,
    RECURRENT_INTERNALS(X)
#undef X
};

typedef struct {
    Layer layer;
    Matrix dx, deltas;
    Matrix internals[RECURRENT_INTERNAL_COUNT];
    CUdeviceptr parameters[RECURRENT_PARAMETER_COUNT];
    CUdeviceptr gradients[RECURRENT_PARAMETER_COUNT];
    RecurrentPass pass;
} Recurrent;

/* What both passes read last. Return 0, or -1 with an error set. */
static int
recurrent_read(Recurrent *self, PyObject *parameters, PyObject *internals)
{
    Layer *layer = &self->layer;
    if (layer_parameters(layer, "parameters", parameters, RECURRENT_PARAMETER_COUNT,
                         recurrent_parameters, self->parameters) < 0 ||
        layer_internals(layer, internals, RECURRENT_INTERNAL_COUNT, recurrent_internals,
                        self->internals, NULL) < 0) {
        return -1;
    }
    RecurrentPass *pass = &self->pass;
    *pass = (RecurrentPass){.steps = layer->steps,
                            .batch = layer->batch,
                            .size = layer->size,
                            .activation = layer->activation,
                            .y = matrix_pitched(layer->y)};
    for (int i = 0; i < RECURRENT_INTERNAL_COUNT; i++) {
        pass->internals[i] = matrix_pitched(self->internals[i]);
    }
    for (int i = 0; i < RECURRENT_PARAMETER_COUNT; i++) {
        pass->parameters[i] = (const float *)(uintptr_t)self->parameters[i];
    }
    return 0;
}

static void
recurrent_run_forward(Op *op, Recurrent *self)
{
    const Layer *layer = &self->layer;
    const size_t batch = layer->batch, size = layer->size, features = layer->features;
    const Matrix x = layer->x, y = layer->y, Ha = self->internals[RECURRENT_Ha];
    op_product(op, 0, 1, layer->steps * batch, size, features, x.ptr, x.pitch,
               self->parameters[RECURRENT_W], features, 0, Ha.ptr, Ha.pitch);
    for (size_t t = 0; t < layer->steps; t++) {
        size_t before = t > 0 ? t - 1 : layer->steps;
        op_product(op, 0, 1, batch, size, size, matrix_row(y, before * batch), y.pitch,
                   self->parameters[RECURRENT_R], size, 1, matrix_row(Ha, t * batch),
                   Ha.pitch);
        op_step(op, layer, KERNEL_recurrent_forward_step, &self->pass, t);
    }
}

static PyObject *
recurrent_forward(PyObject *core, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames)
{
    static const char *const names[] = {"activation", "x",         "y",
                                        "parameters", "internals", NULL};
    static const Signature signature = {"recurrent_forward", names, 5, 5};
    PyObject *given[5] = {NULL}, *result = NULL;
    EngineObject *engine = core_engine(core);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    Recurrent self = {0};
    if (layer_open(&self.layer, engine, "recurrent_forward", given[0], given[1],
                   given[2]) == 0 &&
        recurrent_read(&self, given[3], given[4]) == 0) {
        Op op;
        if (!self.layer.is_suited) {
            result = Py_NewRef(Py_False);
        }
        else if (op_init(&op, engine, "recurrent_forward") == 0) {
            if (blas_ready(&op, core) == 0) {
                op_begin(&op, 1);
                recurrent_run_forward(&op, &self);
            }
            result = op_end_true(&op);
        }
    }
    return layer_close(&self.layer, result);
}

static void
recurrent_run_backward(Op *op, Recurrent *self, const SumPlan *plan)
{
    const Layer *layer = &self->layer;
    const size_t batch = layer->batch, size = layer->size, features = layer->features;
    const size_t steps = layer->steps, rows = steps * batch;
    const Matrix x = layer->x, y = layer->y, dx = self->dx;
    const Matrix dHa = self->internals[RECURRENT_dHa];
    const Matrix dHb = self->internals[RECURRENT_dHb];
    const CUdeviceptr dR = self->gradients[RECURRENT_R];

    op_copy_rows(op, dHb, size, self->deltas, size, rows + batch);
    for (size_t t = steps; t-- > 0;) {
        if (t + 1 < steps) {
            op_product(op, 0, 0, batch, size, size, matrix_row(dHa, (t + 1) * batch),
                       dHa.pitch, self->parameters[RECURRENT_R], size, 1,
                       matrix_row(dHb, t * batch), dHb.pitch);
        }
        op_step(op, layer, KERNEL_recurrent_backward_step, &self->pass, t);
    }
    op_product(op, 0, 0, rows, features, size, dHa.ptr, dHa.pitch,
               self->parameters[RECURRENT_W], features, 1, dx.ptr, dx.pitch);
    op_product(op, 1, 0, size, features, rows, dHa.ptr, dHa.pitch, x.ptr, x.pitch, 1,
               self->gradients[RECURRENT_W], features);
    op_sums(op, plan, layer, KERNEL_recurrent_sum_rows, &self->pass, 1,
            &self->gradients[RECURRENT_bias]);
    if (steps > 1) {
        op_product(op, 1, 0, size, size, rows - batch, matrix_row(dHa, batch),
                   dHa.pitch, y.ptr, y.pitch, 1, dR, size);
    }
    op_product(op, 1, 0, size, size, batch, dHa.ptr, dHa.pitch, matrix_row(y, rows),
               y.pitch, 1, dR, size);
}

static PyObject *
recurrent_backward(PyObject *core, PyObject *const *args, Py_ssize_t nargs,
                   PyObject *kwnames)
{
    static const char *const names[] = {"activation", "x",         "y",
                                        "dx",         "dy",        "parameters",
                                        "gradients",  "internals", NULL};
    static const Signature signature = {"recurrent_backward", names, 8, 8};
    PyObject *given[8] = {NULL}, *result = NULL;
    EngineObject *engine = core_engine(core);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    Recurrent self = {0};
    Layer *layer = &self.layer;
    if (layer_open(layer, engine, "recurrent_backward", given[0], given[1], given[2]) ==
            0 &&
        layer_input(layer, "dx", given[3], &self.dx) != NULL &&
        layer_output(layer, "dy", given[4], &self.deltas) != NULL &&
        layer_parameters(layer, "gradients", given[6], RECURRENT_PARAMETER_COUNT,
                         recurrent_parameters, self.gradients) == 0 &&
        recurrent_read(&self, given[5], given[7]) == 0) {
        Op op;
        SumPlan plan;
        if (!layer->is_suited) {
            result = Py_NewRef(Py_False);
        }
        else if (op_init(&op, engine, "recurrent_backward") == 0) {
            if (blas_ready(&op, core) == 0 && op_plan_sums(&op, &plan, layer, 1) == 0) {
                op_begin(&op, 1);
                recurrent_run_backward(&op, &self, &plan);
            }
            result = op_end_true(&op);
        }
    }
    return layer_close(layer, result);
}

/* ---- Table ---- */

#define FORWARD_TEXT \
    "($self, activation, x, y, parameters, internals)\n--\n\n" \
    "Run a layer's forward pass on its views; return whether it was done.\n\n" \
    "x (T, B, ...) is the input, y (T + 1, B, size) the output; parameters and " \
    "internals\nare lists in the layer's order. False, and nothing is changed, where " \
    "they have no\nelements or are not laid out as by brainstorm. Raises TypeError " \
    "or ValueError\nthat names a wrong argument."
#define BACKWARD_TEXT \
    "($self, activation, x, y, dx, dy, parameters, gradients, internals)\n--\n\n" \
    "Run a layer's backward pass on its views; return whether it was done.\n\n" \
    "dx gets the input's deltas added, gradients the parameters'; dy are the deltas " \
    "of y.\nThe rest is as in the forward pass."

PyMethodDef recurrent_operations[] = {
    {"lstm_backward", FASTCALL(lstm_backward),
     PyDoc_STR("lstm_backward" BACKWARD_TEXT)},
    {"lstm_forward", FASTCALL(lstm_forward), PyDoc_STR("lstm_forward" FORWARD_TEXT)},
    {"recurrent_backward", FASTCALL(recurrent_backward),
     PyDoc_STR("recurrent_backward" BACKWARD_TEXT)},
    {"recurrent_forward", FASTCALL(recurrent_forward),
     PyDoc_STR("recurrent_forward" FORWARD_TEXT)},
    {NULL, NULL, 0, NULL},
};
