/* What the kernels of the recurrent layers are given, by value. Read by C (recurrent.c,
 * lstm.c) and by the kernels.
 *
 * Step t of sequence b is row t * batch + b of every array with time in it. Arrays with
 * a context have one step more, the last: the state before step 0. */
#ifndef BRAINSTORM_DBUF_RECURRENT_KERNELS_H
#define BRAINSTORM_DBUF_RECURRENT_KERNELS_H

#include "activations.h"

#include <stddef.h>

/* Rows of floats at a distance of `pitch` elements. */
typedef struct {
    float *data;
    size_t pitch;
} Pitched;

/* ---- Recurrent and Clockwork ---- */

/* In the order of the layer's views. */
#define RECURRENT_PARAMETERS(X) X(W) X(R) X(bias) X(timing)
#define RECURRENT_INTERNALS(X) X(Ha) X(dHa) X(dHb)

enum {
#define X(name) RECURRENT_##name,
    RECURRENT_PARAMETERS(X)
#undef X
    RECURRENT_PARAMETER_COUNT
};

enum {
#define X(name) RECURRENT_##name,
    RECURRENT_INTERNALS(X)
#undef X
    RECURRENT_INTERNAL_COUNT
};

typedef struct {
    size_t steps, batch, size;
    Activation activation;
    Pitched y;
    Pitched internals[RECURRENT_INTERNAL_COUNT];
    const float *parameters[RECURRENT_PARAMETER_COUNT]; /* timing: NULL for Recurrent */
} RecurrentPass;

/* ---- Lstm and ClockworkLstm ---- */

enum { LSTM_GATES = 4 }; /* block input z, input i, forget f, output o: always so */

#define LSTM_PARAMETERS(X) \
    X(Wz) X(Wi) X(Wf) X(Wo) \
    X(pi) X(pf) X(po) \
    X(Rz) X(Ri) X(Rf) X(Ro) \
    X(bz) X(bi) X(bf) X(bo) \
    X(timing)
#define LSTM_INTERNALS(X) \
    X(Za) X(Zb) X(Ia) X(Ib) X(Fa) X(Fb) X(Oa) X(Ob) X(Ca) X(Cb) \
    X(dZa) X(dZb) X(dIa) X(dIb) X(dFa) X(dFb) X(dOa) X(dOb) X(dCa) X(dCb)

enum {
#define X(name) LSTM_##name,
    LSTM_PARAMETERS(X)
#undef X
    LSTM_PARAMETER_COUNT
};

enum {
#define X(name) LSTM_##name,
    LSTM_INTERNALS(X)
#undef X
    LSTM_INTERNAL_COUNT
};

typedef struct {
    size_t steps, batch, size;
    Activation activation;
    Pitched y;
    Pitched y_again; /* forward: where y is to be written too, or NULL */
    Pitched deltas;  /* backward: of the outputs */
    Pitched internals[LSTM_INTERNAL_COUNT];
    const float *parameters[LSTM_PARAMETER_COUNT]; /* timing: NULL for Lstm */
    /* Rows of 4 * size: a gate after the other. Forward: the gates' weighted inputs.
     * Backward: where their deltas are to be written too. */
    Pitched gates;
    /* Backward: (batch, size), the deltas that come back from step t + 1. */
    const float *recurrent;
    /* Backward, ClockworkLstm: (batch, size), the deltas of outputs that were not
     * updated, on their way to the step before. */
    float *carried;
} LstmPass;

/* ---- Sums over rows ---- */

enum { SUMS_MOST = 7 };

typedef struct {
    float *data[SUMS_MOST]; /* what the sums are added to */
} LayerSums;

#endif
