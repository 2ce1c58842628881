/* The recurrent layers' work between the matrix products: a kernel for each step of
 * each direction, and sums of the deltas over all steps.
 *
 * In the kernels of a step a thread has one unit j, and the sequences b from its
 * block's on. All loads come before the first store, so that they are in flight
 * together: a step is too small for more than their latency to count. */
#include "common.cuh"
#include "recurrent.h"

static __device__ __forceinline__ float
activated(Activation activation, float x)
{
    switch (activation) {
    case ACTIVATION_tanh:
        return Map_tanh::of(0, x, 0, 0, 0);
    case ACTIVATION_sigmoid:
        return Map_sigmoid::of(0, x, 0, 0, 0);
    case ACTIVATION_rel:
        return Map_rel::of(0, x, 0, 0, 0);
    case ACTIVATION_el:
        return Map_el::of(0, x, 0, 0, 0);
    default:
        return x;
    }
}

/* The delta before an activation whose value is y, from the one after it. */
static __device__ __forceinline__ float
deactivated(Activation activation, float y, float dy)
{
    switch (activation) {
    case ACTIVATION_tanh:
        return Map_tanh_deriv::of(0, y, dy, 0, 0);
    case ACTIVATION_sigmoid:
        return Map_sigmoid_deriv::of(0, y, dy, 0, 0);
    case ACTIVATION_rel:
        return Map_rel_deriv::of(0, y, dy, 0, 0);
    case ACTIVATION_el:
        return Map_el_deriv::of(0, y, dy, 0, 0);
    default:
        return dy;
    }
}

/* Whether a unit's clock leaves it as it was at step t. A timing of 0 never ticks: the
 * remainder is NaN. */
static __device__ __forceinline__ bool
is_asleep(const float *timing, size_t j, size_t t)
{
    return timing != NULL && fmodf((float)t, timing[j]) != 0;
}

static __device__ __forceinline__ float &
at(const Pitched &rows, size_t row, size_t j)
{
    return rows.data[row * rows.pitch + j];
}

/* ---- Rows at other pitches ---- */

/* out = in, with zeros in the columns from `columns` to `padded`. */
KERNEL recurrent_copy_rows(Pitched out, size_t padded, Pitched in, size_t columns,
                           size_t rows)
{
    for (size_t row = blockIdx.x; row < rows; row += gridDim.x) {
        for (size_t j = threadIdx.x; j < padded; j += blockDim.x) {
            at(out, row, j) = j < columns ? at(in, row, j) : 0.0f;
        }
    }
}

KERNEL recurrent_add_rows(Pitched out, Pitched in, size_t columns, size_t rows)
{
    for (size_t row = blockIdx.x; row < rows; row += gridDim.x) {
        for (size_t j = threadIdx.x; j < columns; j += blockDim.x) {
            at(out, row, j) += at(in, row, j);
        }
    }
}

/* ---- Recurrent and Clockwork ---- */

KERNEL recurrent_forward_step(RecurrentPass pass, size_t t)
{
    const size_t j = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (j >= pass.size) {
        return;
    }
    const float bias = pass.parameters[RECURRENT_bias][j];
    const bool asleep = t > 0 && is_asleep(pass.parameters[RECURRENT_timing], j, t);
    for (size_t b = blockIdx.y; b < pass.batch; b += gridDim.y) {
        const size_t row = t * pass.batch + b;
        const float before = asleep ? at(pass.y, row - pass.batch, j) : 0;
        const float h = at(pass.internals[RECURRENT_Ha], row, j) + bias;
        at(pass.internals[RECURRENT_Ha], row, j) = h;
        at(pass.y, row, j) = asleep ? before : activated(pass.activation, h);
    }
}

/* dHb of this step is complete. */
KERNEL recurrent_backward_step(RecurrentPass pass, size_t t)
{
    const size_t j = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (j >= pass.size) {
        return;
    }
    const bool asleep = t > 0 && is_asleep(pass.parameters[RECURRENT_timing], j, t);
    const Pitched &dHb = pass.internals[RECURRENT_dHb];
    for (size_t b = blockIdx.y; b < pass.batch; b += gridDim.y) {
        const size_t row = t * pass.batch + b;
        const float dy = at(dHb, row, j);
        const float y = at(pass.y, row, j);
        float dh = deactivated(pass.activation, y, dy);
        if (asleep) { /* the output is the one of the step before */
            dh = 0;
            at(dHb, row - pass.batch, j) += dy;
        }
        at(pass.internals[RECURRENT_dHa], row, j) = dh;
    }
}

/* ---- Lstm and ClockworkLstm ---- */

#define INTERNAL(name, row) at(pass.internals[LSTM_##name], row, j)
#define PARAMETER(name) (pass.parameters[LSTM_##name][j])

KERNEL lstm_forward_step(LstmPass pass, size_t t)
{
    const size_t j = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (j >= pass.size) {
        return;
    }
    const size_t before = (t > 0 ? t - 1 : pass.steps) * pass.batch;
    const bool asleep = t > 0 && is_asleep(pass.parameters[LSTM_timing], j, t);
    const float pi = PARAMETER(pi), pf = PARAMETER(pf), po = PARAMETER(po);
    const float bz = PARAMETER(bz), bi = PARAMETER(bi), bf = PARAMETER(bf),
                bo = PARAMETER(bo);
    for (size_t b = blockIdx.y; b < pass.batch; b += gridDim.y) {
        const size_t row = t * pass.batch + b;
        const float *gates = &at(pass.gates, row, j);
        const float gate_z = gates[0], gate_i = gates[pass.size],
                    gate_f = gates[2 * pass.size], gate_o = gates[3 * pass.size];
        const float c_before = INTERNAL(Ca, before + b);
        const float y_before = asleep ? at(pass.y, before + b, j) : 0;

        const float za = gate_z + bz;
        const float zb = activated(pass.activation, za);
        const float ia = gate_i + c_before * pi + bi;
        const float ib = activated(ACTIVATION_sigmoid, ia);
        const float fa = gate_f + c_before * pf + bf;
        const float fb = activated(ACTIVATION_sigmoid, fa);
        const float c = ib * zb + fb * c_before;
        const float oa = gate_o + c * po + bo;
        const float ob = activated(ACTIVATION_sigmoid, oa);
        const float cb = activated(pass.activation, c);
        const float y = asleep ? y_before : ob * cb;

        INTERNAL(Za, row) = za;
        INTERNAL(Zb, row) = zb;
        INTERNAL(Ia, row) = ia;
        INTERNAL(Ib, row) = ib;
        INTERNAL(Fa, row) = fa;
        INTERNAL(Fb, row) = fb;
        INTERNAL(Oa, row) = oa;
        INTERNAL(Ob, row) = ob;
        INTERNAL(Ca, row) = asleep ? c_before : c;
        INTERNAL(Cb, row) = cb;
        at(pass.y, row, j) = y;
        if (pass.y_again.data != NULL) {
            at(pass.y_again, row, j) = y;
        }
    }
}

KERNEL lstm_backward_step(LstmPass pass, size_t t)
{
    const size_t j = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    if (j >= pass.size) {
        return;
    }
    const size_t before = (t > 0 ? t - 1 : pass.steps) * pass.batch;
    const bool asleep = is_asleep(pass.parameters[LSTM_timing], j, t);
    const float pi = PARAMETER(pi), pf = PARAMETER(pf), po = PARAMETER(po);
    for (size_t b = blockIdx.y; b < pass.batch; b += gridDim.y) {
        const size_t row = t * pass.batch + b, next = row + pass.batch;
        float dy = at(pass.deltas, row, j) + pass.recurrent[b * pass.size + j];
        const float di_next = INTERNAL(dIa, next), df_next = INTERNAL(dFa, next);
        const float dc_next = INTERNAL(dCa, next), fb_next = INTERNAL(Fb, next);
        const float c_before = INTERNAL(Ca, before + b);
        const float zb = INTERNAL(Zb, row), ib = INTERNAL(Ib, row),
                    fb = INTERNAL(Fb, row), ob = INTERNAL(Ob, row),
                    cb = INTERNAL(Cb, row);
        float dc = 0;
        if (pass.carried != NULL) {
            dy += pass.carried[b * pass.size + j];
            dc = INTERNAL(dCa, row);
        }

        dc += di_next * pi;
        dc += df_next * pf;
        const float dob = asleep ? 0 : dy * cb;
        const float doa = deactivated(ACTIVATION_sigmoid, ob, dob);
        dc += doa * po;
        const float dcb = asleep ? 0 : deactivated(pass.activation, cb, dy * ob);
        dc += dcb;
        dc += dc_next * fb_next;
        const float dfb = dc * c_before;
        const float dfa = asleep ? 0 : deactivated(ACTIVATION_sigmoid, fb, dfb);
        const float dib = dc * zb;
        const float dia = asleep ? 0 : deactivated(ACTIVATION_sigmoid, ib, dib);
        const float dzb = dc * ib;
        const float dza = asleep ? 0 : deactivated(pass.activation, zb, dzb);

        INTERNAL(dOb, row) = dob;
        INTERNAL(dOa, row) = doa;
        INTERNAL(dCb, row) = dcb;
        INTERNAL(dCa, row) = dc;
        INTERNAL(dFb, row) = dfb;
        INTERNAL(dFa, row) = dfa;
        INTERNAL(dIb, row) = dib;
        INTERNAL(dIa, row) = dia;
        INTERNAL(dZb, row) = dzb;
        INTERNAL(dZa, row) = dza;
        float *gates = &at(pass.gates, row, j);
        gates[0] = dza;
        gates[pass.size] = dia;
        gates[2 * pass.size] = dfa;
        gates[3 * pass.size] = doa;
        if (pass.carried != NULL) {
            pass.carried[b * pass.size + j] = asleep ? dy : 0;
        }
        if (asleep) { /* cell and output are those of the step before */
            INTERNAL(dCa, before + b) += dc;
            INTERNAL(Fb, row) = 0;
        }
    }
}

/* ---- Sums over rows ---- */

/* In two stages, for the same bits at each call. First: block (x, y) sums 32 columns
 * over the y-th `chunk` of rows; partial is (chunks, n, columns). add(row, j, sums)
 * adds a row's terms to the n sums of column j. */
enum { LAYER_SUM_COLUMNS = 32, LAYER_SUM_LANES = 8 };

template <int n, class Add>
static __device__ __forceinline__ void
sum_over_rows(float *partial, size_t rows, size_t chunk, size_t columns, Add add)
{
    __shared__ float all[LAYER_SUM_LANES][n][LAYER_SUM_COLUMNS];
    const size_t x = threadIdx.x % LAYER_SUM_COLUMNS;
    const size_t lane = threadIdx.x / LAYER_SUM_COLUMNS;
    const size_t j = blockIdx.x * (size_t)LAYER_SUM_COLUMNS + x;
    const size_t first = blockIdx.y * chunk;
    const size_t end = rows - first < chunk ? rows : first + chunk;
    float sums[n] = {};
    if (j < columns) {
        for (size_t row = first + lane; row < end; row += LAYER_SUM_LANES) {
            add(row, j, sums);
        }
    }
    for (int k = 0; k < n; k++) {
        all[lane][k][x] = sums[k];
    }
    __syncthreads();
    if (lane < n && j < columns) {
        float sum = 0;
        for (int k = 0; k < LAYER_SUM_LANES; k++) {
            sum += all[k][lane][x];
        }
        partial[(blockIdx.y * (size_t)n + lane) * columns + j] = sum;
    }
}

/* Second: add them up, each to its own. */
KERNEL recurrent_add_sums(LayerSums sums, const float *partial, size_t chunks, size_t n,
                          size_t columns)
{
    const size_t j = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
    const size_t k = blockIdx.y;
    if (j >= columns) {
        return;
    }
    float sum = 0;
    for (size_t chunk = 0; chunk < chunks; chunk++) {
        sum += partial[(chunk * n + k) * columns + j];
    }
    sums.data[k][j] += sum;
}

KERNEL recurrent_sum_rows(float *partial, RecurrentPass pass, size_t chunk)
{
    const Pitched dHa = pass.internals[RECURRENT_dHa];
    auto add = [=](size_t row, size_t j, float *sums) { sums[0] += at(dHa, row, j); };
    sum_over_rows<1>(partial, pass.steps * pass.batch, chunk, pass.size, add);
}

/* Of biases (z, i, f, o) and peepholes (i, f, o). */
KERNEL lstm_sum_rows(float *partial, LstmPass pass, size_t chunk)
{
    const size_t rows = pass.steps * pass.batch;
    auto add = [&](size_t row, size_t j, float *sums) {
        const float *gates = &at(pass.gates, row, j);
        const float dz = gates[0], di = gates[pass.size], df = gates[2 * pass.size],
                    d_o = gates[3 * pass.size];
        const float c = INTERNAL(Ca, row);
        sums[0] += dz;
        sums[1] += di;
        sums[2] += df;
        sums[3] += d_o;
        sums[6] += c * d_o;
        if (row >= pass.batch) {
            const float before = INTERNAL(Ca, row - pass.batch);
            sums[4] += before * di;
            sums[5] += before * df;
        }
        else { /* brainstorm's: dCa instead of Ca, and di twice */
            const float before = INTERNAL(dCa, rows + row);
            sums[4] += before * di;
            sums[5] += before * di;
        }
    };
    sum_over_rows<SUMS_MOST>(partial, rows, chunk, pass.size, add);
}

#undef INTERNAL
#undef PARAMETER
