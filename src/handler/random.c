/* Random fills. The numbers depend on the handler's seed, on how many fills there were
 * before, and on an element's place in its array in C order: on nothing else. */
#include "handler.h"

#include <math.h>

/* A fill in the making: its kernel fills a contiguous array, the array or a twin of it.
 */
typedef struct {
    Op op;
    Packed out;
    size_t n;
    unsigned long long seed, draw;
} Fill;

/* Return 0, or -1 with an error set; then there is nothing to end. */
static int
fill_begin(Fill *fill, CoreObject *core, const char *name, const ArrayObject *out)
{
    if (op_init(&fill->op, core->engine, name) < 0) {
        return -1;
    }
    fill->n = (size_t)out->size;
    if (packed_init(&fill->out, &fill->op, out) < 0) {
        op_end(&fill->op);
        return -1;
    }
    fill->seed = core->seed;
    fill->draw = core->draws++;
    op_begin(&fill->op, 0);
    return 0;
}

static PyObject *
fill_end(Fill *fill, Kernel kernel, void **parameters)
{
    Op *op = &fill->op;
    if (fill->n > 0) {
        op_launch(op, kernel, op_blocks(op, fill->n, 4), BLOCK_THREADS, 0, parameters);
    }
    packed_store(&fill->out, op);
    return op_end(op);
}

static PyObject *
fill_gaussian(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
              PyObject *kwnames)
{
    static const char *const names[] = {"mean", "std", "out", NULL};
    static const Signature signature = {"fill_gaussian", names, 3, 3};
    const char *const name = signature.function;
    PyObject *given[3] = {NULL};
    double mean, std;
    ArrayObject *out;
    Fill fill;
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0 ||
        number_argument(name, "mean", given[0], &mean) < 0 ||
        number_argument(name, "std", given[1], &std) < 0 ||
        (out = array_argument(engine, name, "out", given[2])) == NULL ||
        fill_begin(&fill, (CoreObject *)self, name, out) < 0) {
        return NULL;
    }
    float shift = (float)mean, scale = (float)std;
    void *parameters[] = {&fill.out.ptr, &fill.n,    &shift,
                          &scale,        &fill.seed, &fill.draw};
    return fill_end(&fill, KERNEL_gaussian_fill, parameters);
}

/* How many of the 2^32 words lie below probability * 2^32; NaN is taken for 0. */
static unsigned long long
threshold_of(double probability)
{
    if (!(probability > 0)) {
        return 0;
    }
    return (unsigned long long)ceil(ldexp(probability < 1 ? probability : 1, 32));
}

static PyObject *
generate_probability_mask(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                          PyObject *kwnames)
{
    static const char *const names[] = {"mask", "probability", NULL};
    static const Signature signature = {"generate_probability_mask", names, 2, 2};
    const char *const name = signature.function;
    PyObject *given[2] = {NULL};
    double probability;
    ArrayObject *mask;
    Fill fill;
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0 ||
        (mask = array_argument(engine, name, "mask", given[0])) == NULL ||
        number_argument(name, "probability", given[1], &probability) < 0 ||
        fill_begin(&fill, (CoreObject *)self, name, mask) < 0) {
        return NULL;
    }
    unsigned long long threshold = threshold_of(probability);
    void *parameters[] = {&fill.out.ptr, &fill.n, &threshold, &fill.seed, &fill.draw};
    return fill_end(&fill, KERNEL_probability_mask, parameters);
}

PyMethodDef random_operations[] = {
    {"fill_gaussian", FASTCALL(fill_gaussian),
     PyDoc_STR("fill_gaussian($self, mean, std, out)\n--\n\n"
               "Fill out with values drawn from a Gaussian distribution.\n\n"
               "out is a float32 DeviceArray of any shape. The values depend on the\n"
               "handler's seed and on how many random fills there were before. Raises\n"
               "TypeError or ValueError naming the argument.")},
    {"generate_probability_mask", FASTCALL(generate_probability_mask),
     PyDoc_STR("generate_probability_mask($self, mask, probability)\n--\n\n"
               "Fill mask with ones, each with the given probability, and zeros.\n\n"
               "mask is a float32 DeviceArray of any shape. All are ones from\n"
               "probability 1 on, all zeros up to 0 and for NaN. The values depend on\n"
               "the handler's seed and on how many random fills there were before.\n"
               "Raises TypeError or ValueError naming the argument.")},
    {NULL, NULL, 0, NULL},
};
