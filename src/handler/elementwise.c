/* Elementwise operations: one table of which argument is what, one way to launch. */
#include "handler.h"

#include "../kernels/map_layout.h"

_Static_assert((int)MAP_DIMS == (int)MAX_DIMS, "a layout holds every array");

static const Kernel flat_kernels[MAP_COUNT] = {
#define X(name) KERNEL_##name##_flat,
    MAPS(X)
#undef X
};

static const Kernel strided_kernels[MAP_COUNT] = {
#define X(name) KERNEL_##name##_strided,
    MAPS(X)
#undef X
};

/* Strides of `array` broadcast to out's axes: 0 where it is repeated. The shapes fit.
 */
static void
broadcast_strides(const ArrayObject *out, const ArrayObject *array, Py_ssize_t *strides)
{
    for (int i = out->ndim - 1, k = array->ndim - 1; i >= 0; i--, k--) {
        strides[i] = k < 0 || array->shape[k] == 1 ? 0 : array->strides[k];
    }
}

int
map_check(const char *operation, const char *out_name, const ArrayObject *out,
          const char *name, const ArrayObject *array)
{
    int fits = array->ndim <= out->ndim;
    for (int k = array->ndim - 1, i = out->ndim - 1; k >= 0 && fits; k--, i--) {
        fits = array->shape[k] == 1 || array->shape[k] == out->shape[i];
    }
    if (!fits) {
        PyObject *shape = shape_of(out);
        if (shape != NULL) {
            raise_shape(operation, name, array, "%R as %s, or what broadcasts to it",
                        shape, out_name);
            Py_DECREF(shape);
        }
        return -1;
    }
    if (array == out || !arrays_overlap(out, array)) {
        return 0;
    }
    /* In place is fine as long as each element is read by who writes it. */
    Py_ssize_t strides[MAX_DIMS];
    int same = array->ptr == out->ptr;
    broadcast_strides(out, array, strides);
    for (int i = 0; i < out->ndim && same; i++) {
        same = out->shape[i] == 1 || strides[i] == out->strides[i];
    }
    return same ? 0 : check_apart(operation, out_name, out, name, array);
}

/* Drop axes of size 1, and merge neighbours that all three arrays step through alike.
 * Sizes stay in shape[], as they may exceed the layout's until it is cut in pieces. */
static void
make_layout(const ArrayObject *out, const Py_ssize_t *a, const Py_ssize_t *b,
            MapLayout *layout, size_t *shape)
{
    int n = 0;
    for (int i = 0; i < out->ndim; i++) {
        long long size = out->shape[i];
        if (size == 1) {
            continue;
        }
        if (n > 0 && layout->out[n - 1] == out->strides[i] * size &&
            layout->a[n - 1] == a[i] * size && layout->b[n - 1] == b[i] * size) {
            n--;
            size *= (long long)shape[n];
        }
        shape[n] = (size_t)size;
        layout->out[n] = out->strides[i];
        layout->a[n] = a[i];
        layout->b[n] = b[i];
        n++;
    }
    if (n == 0) {
        shape[0] = 1;
        layout->out[0] = layout->a[0] = layout->b[0] = 1;
        n = 1;
    }
    layout->ndim = n;
}

/* Launch the strided kernel, along the first axis in pieces of at most 2^31 elements.
 */
static void
launch_strided(Op *op, Map map, MapLayout *layout, const size_t *shape, CUdeviceptr out,
               CUdeviceptr a, CUdeviceptr b, float s, float t)
{
    size_t rest = 1;
    for (int i = 1; i < layout->ndim; i++) {
        rest *= shape[i];
        layout->shape[i] = (unsigned int)shape[i];
    }
    size_t most = ((size_t)1 << 31) / rest;
    most = most == 0 ? 1 : most;
    for (size_t start = 0; start < shape[0]; start += most) {
        size_t piece = shape[0] - start < most ? shape[0] - start : most;
        unsigned int n = (unsigned int)(piece * rest);
        CUdeviceptr out_at = out + 4 * (CUdeviceptr)((long long)start * layout->out[0]);
        CUdeviceptr a_at = a + 4 * (CUdeviceptr)((long long)start * layout->a[0]);
        CUdeviceptr b_at = b + 4 * (CUdeviceptr)((long long)start * layout->b[0]);
        layout->shape[0] = (unsigned int)piece;
        void *parameters[] = {layout, &out_at, &a_at, &b_at, &s, &t, &n};
        op_launch(op, strided_kernels[map], op_blocks(op, n, 4), BLOCK_THREADS, 0,
                  parameters);
    }
}

void
op_map(Op *op, Map map, const ArrayObject *out, const ArrayObject *a,
       const ArrayObject *b, float s, float t)
{
    Py_ssize_t a_strides[MAX_DIMS], b_strides[MAX_DIMS];
    size_t shape[MAX_DIMS];
    MapLayout layout;
    if (out->size == 0) {
        return;
    }
    /* An input that is not there steps as out does and is never read. */
    a = a == NULL ? out : a;
    b = b == NULL ? out : b;
    broadcast_strides(out, a, a_strides);
    broadcast_strides(out, b, b_strides);
    make_layout(out, a_strides, b_strides, &layout, shape);
    CUdeviceptr out_ptr = out->ptr, a_ptr = a->ptr, b_ptr = b->ptr;
    if (layout.ndim == 1 && layout.out[0] == 1 && layout.a[0] == 1 &&
        layout.b[0] == 1) {
        size_t n = shape[0];
        void *parameters[] = {&out_ptr, &a_ptr, &b_ptr, &s, &t, &n};
        op_launch(op, flat_kernels[map], op_blocks(op, n, 4), BLOCK_THREADS, 0,
                  parameters);
    }
    else {
        launch_strided(op, map, &layout, shape, out_ptr, a_ptr, b_ptr, s, t);
    }
}

/* What an operation's arguments are, by position: 'o' the output, 'a' and 'b' inputs,
 * 'A' and 'B' inputs that must have the output's very shape, 's' and 't' numbers, '-'
 * an array that the result does not depend on. */
typedef struct {
    Signature signature;
    Map map;
    const char *roles;
} Elementwise;

static PyObject *
run_elementwise(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                PyObject *kwnames, const Elementwise *what)
{
    const char *operation = what->signature.function;
    const char *const *names = what->signature.names;
    PyObject *given[5] = {NULL};
    ArrayObject *out = NULL, *inputs[2] = {NULL, NULL};
    const char *out_name = NULL, *input_names[2] = {NULL, NULL};
    double numbers[2] = {0, 0};
    int is_exact[2] = {0, 0};
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&what->signature, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    for (int i = 0; what->roles[i] != '\0'; i++) {
        char role = what->roles[i];
        if (role == 's' || role == 't') {
            if (number_argument(operation, names[i], given[i], &numbers[role - 's']) <
                0) {
                return NULL;
            }
            continue;
        }
        ArrayObject *array = array_argument(engine, operation, names[i], given[i]);
        if (array == NULL) {
            return NULL;
        }
        if (role == 'o') {
            out = array;
            out_name = names[i];
        }
        else if (role != '-') {
            int slot = role == 'b' || role == 'B';
            inputs[slot] = array;
            input_names[slot] = names[i];
            is_exact[slot] = role == 'A' || role == 'B';
        }
    }
    for (int i = 0; i < 2; i++) {
        if (is_exact[i] && check_shape(operation, input_names[i], inputs[i], out->ndim,
                                       out->shape) < 0) {
            return NULL;
        }
        if (inputs[i] != NULL &&
            map_check(operation, out_name, out, input_names[i], inputs[i]) < 0) {
            return NULL;
        }
    }
    Op op;
    if (op_init(&op, engine, operation) < 0) {
        return NULL;
    }
    op_begin(&op, 0);
    op_map(&op, what->map, out, inputs[0], inputs[1], (float)numbers[0],
           (float)numbers[1]);
    return op_end(&op);
}

#define ELEMENTWISE(name, map, roles, count, ...) \
    static PyObject *do_##name(PyObject *self, PyObject *const *args, \
                               Py_ssize_t nargs, PyObject *kwnames) \
    { \
        static const char *const names[] = {__VA_ARGS__, NULL}; \
        static const Elementwise what = { \
            {#name, names, count, count}, MAP_##map, roles}; \
        return run_elementwise(self, args, nargs, kwnames, &what); \
    }

ELEMENTWISE(abs_t, abs, "ao", 2, "a", "out")
ELEMENTWISE(add_into_if, add_if, "AoB", 3, "a", "out", "cond")
ELEMENTWISE(add_mv, add, "abo", 3, "m", "v", "out")
ELEMENTWISE(add_st, add_scalar, "sao", 3, "s", "t", "out")
ELEMENTWISE(add_tt, add, "abo", 3, "a", "b", "out")
ELEMENTWISE(clip_t, clip, "asto", 4, "a", "a_min", "a_max", "out")
ELEMENTWISE(copy_to, copy, "ao", 2, "src", "dest")
ELEMENTWISE(copy_to_if, copy_if, "AoB", 3, "src", "dest", "cond")
ELEMENTWISE(divide_mv, divide, "abo", 3, "m", "v", "out")
ELEMENTWISE(divide_tt, divide, "abo", 3, "a", "b", "out")
ELEMENTWISE(el, el, "ao", 2, "x", "y")
ELEMENTWISE(el_deriv, el_deriv, "-abo", 4, "x", "y", "dy", "dx")
ELEMENTWISE(fill, fill, "os", 2, "mem", "val")
ELEMENTWISE(fill_if, fill_if, "osA", 3, "mem", "val", "cond")
ELEMENTWISE(log_t, log, "ao", 2, "a", "out")
ELEMENTWISE(modulo_tt, modulo, "abo", 3, "a", "b", "out")
ELEMENTWISE(mult_add_mv, mult_add, "abo", 3, "m", "v", "out")
ELEMENTWISE(mult_add_st, mult_add_scalar, "sao", 3, "s", "t", "out")
ELEMENTWISE(mult_add_tt, mult_add, "abo", 3, "a", "b", "out")
ELEMENTWISE(mult_mv, mult, "abo", 3, "m", "v", "out")
ELEMENTWISE(mult_st, mult_scalar, "sao", 3, "s", "t", "out")
ELEMENTWISE(mult_tt, mult, "abo", 3, "a", "b", "out")
ELEMENTWISE(rel, rel, "ao", 2, "x", "y")
ELEMENTWISE(rel_deriv, rel_deriv, "-abo", 4, "x", "y", "dy", "dx")
ELEMENTWISE(sigmoid, sigmoid, "Ao", 2, "x", "y")
ELEMENTWISE(sigmoid_deriv, sigmoid_deriv, "-abo", 4, "x", "y", "dy", "dx")
ELEMENTWISE(sign_t, sign, "ao", 2, "a", "out")
ELEMENTWISE(sqrt_t, sqrt, "ao", 2, "a", "out")
ELEMENTWISE(subtract_mv, subtract, "abo", 3, "m", "v", "out")
ELEMENTWISE(subtract_tt, subtract, "ABo", 3, "a", "b", "out")
ELEMENTWISE(tanh, tanh, "ao", 2, "x", "y")
ELEMENTWISE(tanh_deriv, tanh_deriv, "-abo", 4, "x", "y", "dy", "dx")

/* What the docstrings have in common; each adds its formula. */
#define FLOATS \
    "\n\nAll arrays are float32 DeviceArrays; inputs broadcast to the output where " \
    "NumpyHandler's do,\nand may be the output itself. Raises TypeError or " \
    "ValueError naming the argument\notherwise."

#define ENTRY(name, arguments, formula) \
    {#name, FASTCALL(do_##name), \
     PyDoc_STR(#name "($self, " arguments ")\n--\n\n" formula FLOATS)}

PyMethodDef elementwise_operations[] = {
    ENTRY(abs_t, "a, out", "Set out = abs(a)."),
    ENTRY(add_into_if, "a, out, cond", "Add a to out where cond != 0."),
    ENTRY(add_mv, "m, v, out",
          "Set out = m + v; v is a row (1, N) or a column (M, 1)."),
    ENTRY(add_st, "s, t, out", "Set out = s + t for a number s."),
    ENTRY(add_tt, "a, b, out", "Set out = a + b."),
    ENTRY(clip_t, "a, a_min, a_max, out",
          "Set out to a, limited to [a_min, a_max]; NaN stays."),
    ENTRY(copy_to, "src, dest", "Copy src into dest."),
    ENTRY(copy_to_if, "src, dest, cond", "Copy src into dest where cond != 0."),
    ENTRY(divide_mv, "m, v, out",
          "Set out = m / v; v is a row (1, N) or a column (M, 1)."),
    ENTRY(divide_tt, "a, b, out", "Set out = a / b."),
    ENTRY(el, "x, y", "Set y = x where x > 0, else exp(x) - 1."),
    ENTRY(el_deriv, "x, y, dy, dx",
          "Set dx = dy where y > 0, else dy * (y + 1); x is not read."),
    ENTRY(fill, "mem, val", "Set all of mem to the number val."),
    ENTRY(fill_if, "mem, val, cond", "Set mem to val where cond != 0."),
    ENTRY(log_t, "a, out", "Set out = log(a), the natural one."),
    ENTRY(modulo_tt, "a, b, out",
          "Set out to the remainder of a / b, with the sign of a (C's fmod)."),
    ENTRY(mult_add_mv, "m, v, out",
          "Add m * v to out; v is a row (1, N) or a column (M, 1)."),
    ENTRY(mult_add_st, "s, t, out", "Add s * t to out, s a number."),
    ENTRY(mult_add_tt, "a, b, out", "Add a * b to out."),
    ENTRY(mult_mv, "m, v, out",
          "Set out = m * v; v is a row (1, N) or a column (M, 1)."),
    ENTRY(mult_st, "s, t, out", "Set out = s * t for a number s."),
    ENTRY(mult_tt, "a, b, out", "Set out = a * b."),
    ENTRY(rel, "x, y", "Set y = x where x > 0, else 0; NaN stays."),
    ENTRY(rel_deriv, "x, y, dy, dx", "Set dx = dy where y > 0, else 0; x is not read."),
    ENTRY(sigmoid, "x, y", "Set y = 1 / (1 + exp(-x)); NaN stays."),
    ENTRY(sigmoid_deriv, "x, y, dy, dx", "Set dx = dy * y * (1 - y); x is not read."),
    ENTRY(sign_t, "a, out", "Set out to -1, 0 or 1 by a's sign; NaN stays."),
    ENTRY(sqrt_t, "a, out", "Set out = sqrt(a)."),
    ENTRY(subtract_mv, "m, v, out",
          "Set out = m - v; v is a row (1, N) or a column (M, 1)."),
    ENTRY(subtract_tt, "a, b, out", "Set out = a - b."),
    ENTRY(tanh, "x, y", "Set y = tanh(x)."),
    ENTRY(tanh_deriv, "x, y, dy, dx", "Set dx = dy * (1 - y * y); x is not read."),
    {NULL, NULL, 0, NULL},
};
