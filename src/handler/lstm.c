/* Whole passes of brainstorm's Lstm and ClockworkLstm; see recurrent.c.
 *
 * The four gates' weights lie one after the other in the buffer of parameters, so they
 * are one matrix of 4 * size rows, and the gates' weighted inputs (later their deltas)
 * are one matrix of 4 * size columns in a temporary. A step is then one product and one
 * kernel, and all that can wait, the gradients and the input's deltas, is one product
 * each over all steps.
 *
 * On an H200 an update of brainstorm's hutter_lstm takes 11.9 ms so in float32 and
 * 5.6 ms with TF32, products of each gate by itself 12.0 to 12.6 and 5.5 to 7.8 ms, and
 * without the aligned copies (see Operand) it takes 11.9 and 7.0 ms: hence the wide
 * matrices, and the copies with TF32 only. */
#include "recurrent.h"

static const char *const parameter_names[] = {
#define X(name) #name,
    LSTM_PARAMETERS(X)
#undef X
};
static const char *const internal_names[] = {
#define X(name) #name,
    LSTM_INTERNALS(X)
#undef X
};

/* ---- Operands ---- */

/* A matrix as products see it. cuBLAS's kernels for TF32 read 16 bytes at a time where
 * all addresses, pitches and sizes allow it, and are much slower otherwise;
 * brainstorm's buffers begin anywhere. So such a matrix goes through an aligned copy
 * whose rows are filled up with zeros. */
typedef struct {
    Matrix given, used;
    size_t rows, columns;
    size_t padded; /* columns, as products take them */
} Operand;

/* Before op_begin. Return 0, or -1 with an error set. */
static int
operand_plan(Op *op, Operand *operand, int is_aligning, Matrix given, size_t rows,
             size_t columns)
{
    *operand = (Operand){given, given, rows, columns, columns};
    if (!is_aligning ||
        (given.ptr % 16 == 0 && given.pitch % 4 == 0 && columns % 4 == 0)) {
        return 0;
    }
    operand->padded = (columns + 3) / 4 * 4;
    operand->used.pitch = operand->padded;
    operand->used.ptr = op_temporary(op, rows * operand->padded * 4);
    return operand->used.ptr == 0 ? -1 : 0;
}

static int
operand_is_copy(const Operand *operand)
{
    return operand->used.ptr != operand->given.ptr;
}

/* Copy `rows` rows from `row` on, for an operand that is read. */
static void
operand_load(Op *op, const Operand *operand, size_t row, size_t rows)
{
    if (operand_is_copy(operand) && rows > 0) {
        Matrix out = operand->used, in = operand->given;
        out.ptr = matrix_row(out, row);
        in.ptr = matrix_row(in, row);
        op_copy_rows(op, out, operand->padded, in, operand->columns, rows);
    }
}

/* The factor of what is there, for the first product that is added to an operand. */
static float
operand_beta(const Operand *operand)
{
    return operand_is_copy(operand) ? 0 : 1;
}

/* After the last such product. */
static void
operand_add(Op *op, const Operand *operand)
{
    if (operand_is_copy(operand)) {
        op_add_rows(op, operand->given, operand->used, operand->columns, operand->rows);
    }
}

/* ---- The layer ---- */

typedef struct {
    Layer layer;
    Matrix dx, deltas;
    Matrix internals[LSTM_INTERNAL_COUNT];
    ArrayObject *arrays[LSTM_INTERNAL_COUNT]; /* borrowed: of the internals */
    CUdeviceptr parameters[LSTM_PARAMETER_COUNT];
    CUdeviceptr gradients[LSTM_PARAMETER_COUNT];
    LstmPass pass;
    Matrix gates;       /* wide temporary: of all gates and steps */
    Operand x, W, R, y; /* W and R of all gates */
    Operand dx_sum, dW, dR;
    CUdeviceptr recurrent; /* backward: temporary, a step's product */
    SumPlan sums;
} Lstm;

/* Whether four parameters lie one after the other. */
static int
is_stack(const CUdeviceptr *parameters, int first, size_t count)
{
    for (int i = 1; i < LSTM_GATES; i++) {
        if (parameters[first + i] != parameters[first] + 4 * count * (size_t)i) {
            return 0;
        }
    }
    return 1;
}

static void
check_stacks(Lstm *self, const CUdeviceptr *parameters)
{
    Layer *layer = &self->layer;
    layer->is_suited &= is_stack(parameters, LSTM_Wz, layer->size * layer->features) &&
                        is_stack(parameters, LSTM_Rz, layer->size * layer->size);
}

/* What both passes read last. Return 0, or -1 with an error set. */
static int
lstm_read(Lstm *self, PyObject *parameters, PyObject *internals)
{
    Layer *layer = &self->layer;
    if (layer_parameters(layer, "parameters", parameters, LSTM_PARAMETER_COUNT,
                         parameter_names, self->parameters) < 0 ||
        layer_internals(layer, internals, LSTM_INTERNAL_COUNT, internal_names,
                        self->internals, self->arrays) < 0) {
        return -1;
    }
    check_stacks(self, self->parameters);
    LstmPass *pass = &self->pass;
    *pass = (LstmPass){.steps = layer->steps,
                       .batch = layer->batch,
                       .size = layer->size,
                       .activation = layer->activation,
                       .y = matrix_pitched(layer->y)};
    for (int i = 0; i < LSTM_INTERNAL_COUNT; i++) {
        pass->internals[i] = matrix_pitched(self->internals[i]);
    }
    for (int i = 0; i < LSTM_PARAMETER_COUNT; i++) {
        pass->parameters[i] = (const float *)(uintptr_t)self->parameters[i];
    }
    return 0;
}

/* Whether operands are copied to be aligned: of use only if rows of `size` can be. */
static int
is_aligning(const Op *op, const Lstm *self)
{
    return op->tf32 && self->layer.size % 4 == 0;
}

/* Room for what the gates have in `steps` steps. Return 0, or -1 with an error set. */
static int
plan_gates(Op *op, Lstm *self, size_t steps)
{
    const size_t rows = steps * self->layer.batch;
    self->gates.pitch = LSTM_GATES * self->layer.size;
    self->gates.ptr = op_temporary(op, rows * self->gates.pitch * 4);
    self->pass.gates = matrix_pitched(self->gates);
    return self->gates.ptr == 0 ? -1 : 0;
}

static int
plan_factors(Op *op, Lstm *self)
{
    const Layer *layer = &self->layer;
    const size_t size = layer->size, features = layer->features;
    const int aligning = is_aligning(op, self);
    const Matrix W = {self->parameters[LSTM_Wz], features};
    const Matrix R = {self->parameters[LSTM_Rz], size};
    const size_t rows = layer->steps * layer->batch;
    return operand_plan(op, &self->x, aligning, layer->x, rows, features) < 0 ||
                   operand_plan(op, &self->W, aligning, W, LSTM_GATES * size,
                                features) < 0 ||
                   operand_plan(op, &self->R, aligning, R, LSTM_GATES * size, size) <
                       0 ||
                   operand_plan(op, &self->y, aligning, layer->y, rows + layer->batch,
                                size) < 0
               ? -1
               : 0;
}

static void
load_factors(Op *op, const Lstm *self)
{
    operand_load(op, &self->x, 0, self->x.rows);
    operand_load(op, &self->W, 0, self->W.rows);
    operand_load(op, &self->R, 0, self->R.rows);
}

/* ---- Forward ---- */

static int
plan_forward(Op *op, Lstm *self)
{
    if (plan_gates(op, self, self->layer.steps) < 0 || plan_factors(op, self) < 0) {
        return -1;
    }
    if (operand_is_copy(&self->y)) {
        self->pass.y_again = matrix_pitched(self->y.used);
    }
    return 0;
}

static void
run_forward(Op *op, Lstm *self)
{
    const Layer *layer = &self->layer;
    const size_t steps = layer->steps, batch = layer->batch, size = layer->size;
    const Matrix x = self->x.used, W = self->W.used;
    const Matrix R = self->R.used, y = self->y.used;
    const Matrix gates = self->gates;

    load_factors(op, self);
    operand_load(op, &self->y, steps * batch, batch); /* the state before step 0 */
    op_product(op, 0, 1, steps * batch, LSTM_GATES * size, self->x.padded, x.ptr,
               x.pitch, W.ptr, W.pitch, 0, gates.ptr, gates.pitch);
    for (size_t t = 0; t < steps; t++) {
        size_t before = t > 0 ? t - 1 : steps;
        op_product(op, 0, 1, batch, LSTM_GATES * size, size,
                   matrix_row(y, before * batch), y.pitch, R.ptr, R.pitch, 1,
                   matrix_row(gates, t * batch), gates.pitch);
        op_step(op, layer, KERNEL_lstm_forward_step, &self->pass, t);
    }
}

PyObject *
lstm_forward(PyObject *core, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"activation", "x",         "y",
                                        "parameters", "internals", NULL};
    static const Signature signature = {"lstm_forward", names, 5, 5};
    PyObject *given[5] = {NULL}, *result = NULL;
    EngineObject *engine = core_engine(core);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    Lstm self = {0};
    if (layer_open(&self.layer, engine, "lstm_forward", given[0], given[1], given[2]) ==
            0 &&
        lstm_read(&self, given[3], given[4]) == 0) {
        Op op;
        if (!self.layer.is_suited) {
            result = Py_NewRef(Py_False);
        }
        else if (op_init(&op, engine, "lstm_forward") == 0) {
            if (blas_ready(&op, core) == 0 && plan_forward(&op, &self) == 0) {
                op_begin(&op, 1);
                run_forward(&op, &self);
            }
            result = op_end_true(&op);
        }
    }
    return layer_close(&self.layer, result);
}

/* ---- Backward ---- */

static int
plan_backward(Op *op, Lstm *self)
{
    const Layer *layer = &self->layer;
    const size_t batch = layer->batch, size = layer->size, features = layer->features;
    const int aligning = is_aligning(op, self);
    const Matrix dW = {self->gradients[LSTM_Wz], features};
    const Matrix dR = {self->gradients[LSTM_Rz], size};
    if (plan_gates(op, self, layer->steps + 1) < 0 || plan_factors(op, self) < 0 ||
        operand_plan(op, &self->dx_sum, aligning, self->dx, layer->steps * batch,
                     features) < 0 ||
        operand_plan(op, &self->dW, aligning, dW, LSTM_GATES * size, features) < 0 ||
        operand_plan(op, &self->dR, aligning, dR, LSTM_GATES * size, size) < 0 ||
        op_plan_sums(op, &self->sums, layer, SUMS_MOST) < 0) {
        return -1;
    }
    self->recurrent = op_temporary(op, batch * size * 4);
    if (self->recurrent == 0) {
        return -1;
    }
    self->pass.recurrent = (const float *)(uintptr_t)self->recurrent;
    self->pass.deltas = matrix_pitched(self->deltas);
    if (self->parameters[LSTM_timing] != 0) {
        CUdeviceptr carried = op_temporary(op, batch * size * 4);
        self->pass.carried = (float *)(uintptr_t)carried;
        return carried == 0 ? -1 : 0;
    }
    return 0;
}

/* The gates' deltas are also read from the wide temporary: set those after the last
 * step, which brainstorm reads from the context rows, and has them zero. */
static void
load_next_deltas(Op *op, const Lstm *self)
{
    static const int names[] = {LSTM_dZa, LSTM_dIa, LSTM_dFa, LSTM_dOa};
    const Layer *layer = &self->layer;
    const size_t last = layer->steps * layer->batch;
    for (size_t i = 0; i < LSTM_GATES; i++) {
        Matrix in = self->internals[names[i]], out = self->gates;
        in.ptr = matrix_row(in, last);
        out.ptr = matrix_row(out, last) + 4 * i * layer->size;
        op_copy_rows(op, out, layer->size, in, layer->size, layer->batch);
    }
}

/* The deltas of each step, from the last to the first. */
static void
run_back_in_time(Op *op, Lstm *self)
{
    const Layer *layer = &self->layer;
    const size_t batch = layer->batch, size = layer->size;
    const Matrix R = self->R.used, gates = self->gates;
    if (self->pass.carried != NULL) {
        op_fill_words(op, (CUdeviceptr)(uintptr_t)self->pass.carried, 0, batch * size);
    }
    op_map(op, MAP_fill, self->arrays[LSTM_dCa], NULL, NULL, 0, 0);
    for (size_t t = layer->steps; t-- > 0;) {
        op_product(op, 0, 0, batch, size, LSTM_GATES * size,
                   matrix_row(gates, (t + 1) * batch), gates.pitch, R.ptr, R.pitch, 0,
                   self->recurrent, size);
        op_step(op, layer, KERNEL_lstm_backward_step, &self->pass, t);
    }
}

/* The input's deltas and the weights' gradients, over all steps. */
static void
run_gradients(Op *op, Lstm *self)
{
    const Layer *layer = &self->layer;
    const size_t batch = layer->batch, size = layer->size, steps = layer->steps;
    const size_t rows = steps * batch, width = LSTM_GATES * size;
    const Matrix gates = self->gates;
    const Matrix x = self->x.used, y = self->y.used, W = self->W.used;
    const Matrix dx = self->dx_sum.used, dW = self->dW.used, dR = self->dR.used;
    const size_t features = self->x.padded;

    op_product(op, 0, 0, rows, features, width, gates.ptr, gates.pitch, W.ptr, W.pitch,
               operand_beta(&self->dx_sum), dx.ptr, dx.pitch);
    operand_add(op, &self->dx_sum);

    op_product(op, 1, 0, width, features, rows, gates.ptr, gates.pitch, x.ptr, x.pitch,
               operand_beta(&self->dW), dW.ptr, dW.pitch);
    operand_add(op, &self->dW);

    float beta = operand_beta(&self->dR);
    if (steps > 1) {
        op_product(op, 1, 0, width, size, rows - batch, matrix_row(gates, batch),
                   gates.pitch, y.ptr, y.pitch, beta, dR.ptr, dR.pitch);
        beta = 1;
    }
    /* brainstorm takes the deltas of the outputs before step 0 for these outputs
     * themselves; without clocks they are zero. */
    if (self->pass.carried != NULL) {
        op_product(op, 1, 0, width, size, batch, gates.ptr, gates.pitch,
                   (CUdeviceptr)(uintptr_t)self->pass.carried, size, beta, dR.ptr,
                   dR.pitch);
        beta = 1;
    }
    if (beta == 1) {
        operand_add(op, &self->dR);
    }
}

static void
run_backward(Op *op, Lstm *self)
{
    const CUdeviceptr *gradients = self->gradients;
    const CUdeviceptr sums[SUMS_MOST] = {
        gradients[LSTM_bz], gradients[LSTM_bi], gradients[LSTM_bf], gradients[LSTM_bo],
        gradients[LSTM_pi], gradients[LSTM_pf], gradients[LSTM_po],
    };
    load_factors(op, self);
    operand_load(op, &self->y, 0, (self->layer.steps - 1) * self->layer.batch);
    load_next_deltas(op, self);
    run_back_in_time(op, self);
    run_gradients(op, self);
    op_sums(op, &self->sums, &self->layer, KERNEL_lstm_sum_rows, &self->pass, SUMS_MOST,
            sums);
}

PyObject *
lstm_backward(PyObject *core, PyObject *const *args, Py_ssize_t nargs,
              PyObject *kwnames)
{
    static const char *const names[] = {"activation", "x",         "y",
                                        "dx",         "dy",        "parameters",
                                        "gradients",  "internals", NULL};
    static const Signature signature = {"lstm_backward", names, 8, 8};
    PyObject *given[8] = {NULL}, *result = NULL;
    EngineObject *engine = core_engine(core);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    Lstm self = {0};
    Layer *layer = &self.layer;
    if (layer_open(layer, engine, "lstm_backward", given[0], given[1], given[2]) == 0 &&
        layer_input(layer, "dx", given[3], &self.dx) != NULL &&
        layer_output(layer, "dy", given[4], &self.deltas) != NULL &&
        layer_parameters(layer, "gradients", given[6], LSTM_PARAMETER_COUNT,
                         parameter_names, self.gradients) == 0 &&
        lstm_read(&self, given[5], given[7]) == 0) {
        Op op;
        check_stacks(&self, self.gradients);
        if (!layer->is_suited) {
            result = Py_NewRef(Py_False);
        }
        else if (op_init(&op, engine, "lstm_backward") == 0) {
            if (blas_ready(&op, core) == 0 && plan_backward(&op, &self) == 0) {
                op_begin(&op, 1);
                run_backward(&op, &self);
            }
            result = op_end_true(&op);
        }
    }
    return layer_close(layer, result);
}
