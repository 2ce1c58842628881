/* The activations that fused passes know. Read by C and by the kernels. */
#ifndef BRAINSTORM_DBUF_ACTIVATIONS_H
#define BRAINSTORM_DBUF_ACTIVATIONS_H

/* Names as in brainstorm's act_func. */
#define ACTIVATIONS(X) X(tanh) X(sigmoid) X(rel) X(el) X(linear)

typedef enum {
#define X(name) ACTIVATION_##name,
    ACTIVATIONS(X)
#undef X
    ACTIVATION_COUNT
} Activation;

#endif
