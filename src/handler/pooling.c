/* Max and average pooling, forward and backward, a launch or two each.
 *
 * Unlike a convolution's, a pooling's windows may lie anywhere: whatever rows and
 * columns the outputs have are worked out, and a window without a pixel gives 0. */
#include "images.h"

/* One call: its arguments, checked. All arrays are borrowed. */
typedef struct {
    const char *operation;
    EngineObject *engine;
    ArrayObject *inputs, *outputs;
    WindowLayout layout;
    size_t images;
    size_t in_size, out_size; /* elements of an image */
} Pooling;

/* Check what all four operations are given and fill in p. given[] starts with inputs,
 * window, outputs, padding, stride. Return 0, or -1 with an error set. */
static int
read_pooling(Pooling *p, PyObject *self, const Signature *signature,
             PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
             PyObject **given)
{
    uint32_t window[2], stride[2];
    int32_t padding;
    p->operation = signature->function;
    p->engine = core_engine(self);
    if (p->engine == NULL || unpack(signature, args, nargs, kwnames, given) < 0 ||
        (p->inputs = images_argument(p->engine, p->operation, "inputs", given[0])) ==
            NULL ||
        pair_argument(p->operation, "window", given[1], window) < 0 ||
        (p->outputs = images_argument(p->engine, p->operation, "outputs", given[2])) ==
            NULL ||
        padding_argument(p->operation, given[3], &padding) < 0 ||
        pair_argument(p->operation, "stride", given[4], stride) < 0) {
        return -1;
    }
    const Py_ssize_t *in = p->inputs->shape, *out = p->outputs->shape;
    if (out[0] != in[0] || out[3] != in[3]) {
        raise_shape(p->operation, "outputs", p->outputs,
                    "(%zd, rows, columns, %zd) with the images and channels of inputs",
                    in[0], in[3]);
        return -1;
    }
    for (int i = 1; i < 3; i++) { /* matters where another dimension is 0 */
        if (in[i] > IMAGE_MOST || out[i] > IMAGE_MOST) {
            raise_shape(p->operation, in[i] > IMAGE_MOST ? "inputs" : "outputs",
                        in[i] > IMAGE_MOST ? p->inputs : p->outputs,
                        "at most %d rows and columns", IMAGE_MOST);
            return -1;
        }
    }
    p->layout = (WindowLayout){
        .in_h = (uint32_t)in[1],
        .in_w = (uint32_t)in[2],
        .channels = (uint32_t)in[3],
        .out_h = (uint32_t)out[1],
        .out_w = (uint32_t)out[2],
        .window_h = window[0],
        .window_w = window[1],
        .stride_h = stride[0],
        .stride_w = stride[1],
        .padding = padding,
    };
    p->images = (size_t)in[0];
    p->in_size = (size_t)(in[1] * in[2] * in[3]);
    p->out_size = (size_t)(out[1] * out[2] * out[3]);
    return 0;
}

/* Borrow an array of the shape of inputs or outputs. NULL with an error set. */
static ArrayObject *
twin_argument(const Pooling *p, const char *name, PyObject *object,
              const ArrayObject *model)
{
    ArrayObject *array = array_argument(p->engine, p->operation, name, object);
    if (array == NULL || check_shape(p->operation, name, array, 4, model->shape) < 0) {
        return NULL;
    }
    return array;
}

/* How the batch is cut into launches, and how many channels a thread takes. */
typedef struct {
    int lanes;
    size_t most; /* images in a launch */
} Plan;

/* `pointers` are all those of the launch, or-ed together. */
static Plan
plan_for(Pooling *p, CUdeviceptr pointers)
{
    int lanes = has_fours(p->layout.channels, pointers) ? 4 : 1;
    size_t larger = p->in_size > p->out_size ? p->in_size : p->out_size;
    finish_windows(&p->layout, lanes);
    return (Plan){lanes, images_at_once(larger / (size_t)lanes)};
}

/* Queue a kernel that takes the layout, three pointers (or two, with `third` 0) of
 * images or outputs, and its number of items. in_first: the first pointer is of images,
 * and the items are outputs; else the other way round, the images last. */
static void
launch_pooling(Pooling *p, Op *op, Kernel fours, Kernel ones, int in_first,
               CUdeviceptr first, CUdeviceptr second, CUdeviceptr third)
{
    Plan plan = plan_for(p, first | second | third);
    size_t size = in_first ? p->out_size : p->in_size;
    for (size_t image = 0; image < p->images; image += plan.most) {
        size_t count = p->images - image < plan.most ? p->images - image : plan.most;
        uint32_t items = (uint32_t)(count * size / (size_t)plan.lanes);
        CUdeviceptr in_at = image * p->in_size * 4, out_at = image * p->out_size * 4;
        CUdeviceptr a = first + (in_first ? in_at : out_at);
        CUdeviceptr b = second + (in_first ? out_at : in_at);
        CUdeviceptr c = third + out_at;
        void *three[] = {&p->layout, &a, &b, &c, &items};
        void *two[] = {&p->layout, &a, &b, &items};
        op_launch(op, plan.lanes == 4 ? fours : ones, op_blocks(op, items, 1),
                  BLOCK_THREADS, 0, third != 0 ? three : two);
    }
}

static PyObject *
maxpool2d_forward_batch(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames)
{
    static const char *const names[] = {"inputs", "window", "outputs", "padding",
                                        "stride", "argmax", NULL};
    static const Signature signature = {"maxpool2d_forward_batch", names, 6, 6};
    PyObject *given[6] = {NULL};
    Pooling p;
    ArrayObject *argmax;
    if (read_pooling(&p, self, &signature, args, nargs, kwnames, given) < 0 ||
        (argmax = twin_argument(&p, "argmax", given[5], p.outputs)) == NULL ||
        check_apart(p.operation, "outputs", p.outputs, "inputs", p.inputs) < 0 ||
        check_apart(p.operation, "argmax", argmax, "inputs", p.inputs) < 0 ||
        check_apart(p.operation, "argmax", argmax, "outputs", p.outputs) < 0) {
        return NULL;
    }
    if (p.outputs->size == 0) {
        Py_RETURN_NONE;
    }
    Op op;
    Packed from, to, to_argmax;
    if (op_init(&op, p.engine, p.operation) < 0) {
        return NULL;
    }
    if (packed_init(&from, &op, p.inputs) < 0 || packed_init(&to, &op, p.outputs) < 0 ||
        packed_init(&to_argmax, &op, argmax) < 0) {
        return op_end(&op);
    }
    op_begin(&op, 0);
    packed_load(&from, &op);
    launch_pooling(&p, &op, KERNEL_maxpool_forward_fours, KERNEL_maxpool_forward, 1,
                   from.ptr, to.ptr, to_argmax.ptr);
    packed_store(&to, &op);
    packed_store(&to_argmax, &op);
    return op_end(&op);
}

/* Queue both kernels of max pooling's backward pass. `strays` is a word of a temporary;
 * whatever it holds, unless it holds this call's mark: then the second kernel looks for
 * strays in vain. */
static void
launch_max_backward(Pooling *p, Op *op, CUdeviceptr argmax, CUdeviceptr out_deltas,
                    CUdeviceptr in_deltas, CUdeviceptr strays, uint32_t mark)
{
    Plan plan = plan_for(p, argmax | out_deltas | in_deltas);
    size_t lanes = (size_t)plan.lanes;
    volatile int *fault = p->engine->fault;
    int fault_number = FAULT_MAXPOOL_ARGMAX;
    for (size_t image = 0; image < p->images; image += plan.most) {
        size_t count = p->images - image < plan.most ? p->images - image : plan.most;
        uint32_t items = (uint32_t)(count * p->in_size / lanes);
        uint32_t out_items = (uint32_t)(count * p->out_size / lanes);
        size_t channels = count * p->layout.channels;
        CUdeviceptr argmax_at = argmax + image * p->out_size * 4;
        CUdeviceptr out_at = out_deltas + image * p->out_size * 4;
        CUdeviceptr in_at = in_deltas + image * p->in_size * 4;
        void *parameters[] = {&p->layout, &argmax_at, &out_at, &in_at, &items,
                              &out_items, &strays,    &mark,   &fault, &fault_number};
        op_launch(op,
                  plan.lanes == 4 ? KERNEL_maxpool_backward_fours
                                  : KERNEL_maxpool_backward,
                  op_blocks(op, items > out_items ? items : out_items, 1),
                  BLOCK_THREADS, 0, parameters);
        void *rest[] = {&p->layout, &argmax_at, &out_at, &in_at,
                        &channels,  &strays,    &mark};
        op_launch(op, KERNEL_maxpool_strays, op_blocks(op, channels, 1), BLOCK_THREADS,
                  0, rest);
    }
}

static PyObject *
maxpool2d_backward_batch(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames)
{
    static const char *const names[] = {"inputs",    "window",     "outputs",
                                        "padding",   "stride",     "argmax",
                                        "in_deltas", "out_deltas", NULL};
    static const Signature signature = {"maxpool2d_backward_batch", names, 8, 8};
    static uint32_t calls; /* the GIL protects it */
    PyObject *given[8] = {NULL};
    Pooling p;
    ArrayObject *argmax, *in_deltas, *out_deltas;
    if (read_pooling(&p, self, &signature, args, nargs, kwnames, given) < 0 ||
        (argmax = twin_argument(&p, "argmax", given[5], p.outputs)) == NULL ||
        (in_deltas = twin_argument(&p, "in_deltas", given[6], p.inputs)) == NULL ||
        (out_deltas = twin_argument(&p, "out_deltas", given[7], p.outputs)) == NULL ||
        check_apart(p.operation, "in_deltas", in_deltas, "argmax", argmax) < 0 ||
        check_apart(p.operation, "in_deltas", in_deltas, "out_deltas", out_deltas) <
            0) {
        return NULL;
    }
    if (p.outputs->size == 0) {
        Py_RETURN_NONE;
    }
    Op op;
    Packed from, from_argmax, to;
    CUdeviceptr strays;
    if (op_init(&op, p.engine, p.operation) < 0) {
        return NULL;
    }
    if (packed_init(&from, &op, out_deltas) < 0 ||
        packed_init(&from_argmax, &op, argmax) < 0 ||
        packed_init(&to, &op, in_deltas) < 0 ||
        (strays = op_temporary(&op, sizeof(uint32_t))) == 0) {
        return op_end(&op);
    }
    op_begin(&op, 0);
    packed_load(&from, &op);
    packed_load(&from_argmax, &op);
    packed_load(&to, &op);
    launch_max_backward(&p, &op, from_argmax.ptr, from.ptr, to.ptr, strays, ++calls);
    packed_store(&to, &op);
    return op_end(&op);
}

static PyObject *
avgpool2d_forward_batch(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                        PyObject *kwnames)
{
    static const char *const names[] = {"inputs",  "window", "outputs",
                                        "padding", "stride", NULL};
    static const Signature signature = {"avgpool2d_forward_batch", names, 5, 5};
    PyObject *given[5] = {NULL};
    Pooling p;
    if (read_pooling(&p, self, &signature, args, nargs, kwnames, given) < 0 ||
        check_apart(p.operation, "outputs", p.outputs, "inputs", p.inputs) < 0) {
        return NULL;
    }
    if (p.outputs->size == 0) {
        Py_RETURN_NONE;
    }
    Op op;
    Packed from, to;
    if (op_init(&op, p.engine, p.operation) < 0) {
        return NULL;
    }
    if (packed_init(&from, &op, p.inputs) < 0 || packed_init(&to, &op, p.outputs) < 0) {
        return op_end(&op);
    }
    op_begin(&op, 0);
    packed_load(&from, &op);
    launch_pooling(&p, &op, KERNEL_avgpool_forward_fours, KERNEL_avgpool_forward, 1,
                   from.ptr, to.ptr, 0);
    packed_store(&to, &op);
    return op_end(&op);
}

static PyObject *
avgpool2d_backward_batch(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                         PyObject *kwnames)
{
    static const char *const names[] = {"inputs", "window",    "outputs",    "padding",
                                        "stride", "in_deltas", "out_deltas", NULL};
    static const Signature signature = {"avgpool2d_backward_batch", names, 7, 7};
    PyObject *given[7] = {NULL};
    Pooling p;
    ArrayObject *in_deltas, *out_deltas;
    if (read_pooling(&p, self, &signature, args, nargs, kwnames, given) < 0 ||
        (in_deltas = twin_argument(&p, "in_deltas", given[5], p.inputs)) == NULL ||
        (out_deltas = twin_argument(&p, "out_deltas", given[6], p.outputs)) == NULL ||
        check_apart(p.operation, "in_deltas", in_deltas, "out_deltas", out_deltas) <
            0) {
        return NULL;
    }
    if (p.outputs->size == 0 || p.inputs->size == 0) {
        Py_RETURN_NONE;
    }
    Op op;
    Packed from, to;
    if (op_init(&op, p.engine, p.operation) < 0) {
        return NULL;
    }
    if (packed_init(&from, &op, out_deltas) < 0 ||
        packed_init(&to, &op, in_deltas) < 0) {
        return op_end(&op);
    }
    op_begin(&op, 0);
    packed_load(&from, &op);
    packed_load(&to, &op);
    launch_pooling(&p, &op, KERNEL_avgpool_backward_fours, KERNEL_avgpool_backward, 0,
                   from.ptr, to.ptr, 0);
    packed_store(&to, &op);
    return op_end(&op);
}

/* What the docstrings have in common. */
#define IMAGES \
    "\n\ninputs has shape (images, height, width, channels), outputs (images, rows, " \
    "columns,\nchannels). window and stride are tuples (vertical, horizontal), " \
    "padding the number\nof pixels around each image that are not there. All arrays " \
    "are float32 DeviceArrays\nof this handler. Raises TypeError or ValueError " \
    "naming " \
    "the argument."

#define ENTRY(name, arguments, text) \
    {#name, FASTCALL(name), \
     PyDoc_STR(#name "($self, " arguments ")\n--\n\n" text IMAGES)}

PyMethodDef pooling_operations[] = {
    ENTRY(maxpool2d_forward_batch, "inputs, window, outputs, padding, stride, argmax",
          "Set outputs to each window's maximum, argmax to its index in the image.\n\n"
          "The first of equal ones counts, and NaN never does; 0 and -1 where there is "
          "none.\nAn index is (y * width + x) * channels + channel, as a float32."),
    ENTRY(maxpool2d_backward_batch,
          "inputs, window, outputs, padding, stride, argmax, in_deltas, out_deltas",
          "Add each of out_deltas to the pixel of in_deltas that argmax names.\n\n"
          "Of inputs and outputs only the shapes count. An argmax below 0 names none; "
          "one\nbeyond the image is left out, and the next call that brings values to "
          "the host\nraises IndexError."),
    ENTRY(avgpool2d_forward_batch, "inputs, window, outputs, padding, stride",
          "Set outputs to the mean of each window's pixels; 0 where it has none."),
    ENTRY(avgpool2d_backward_batch,
          "inputs, window, outputs, padding, stride, in_deltas, out_deltas",
          "Add to in_deltas each pixel's share of the windows over it.\n\n"
          "Of inputs and outputs only the shapes count."),
    {NULL, NULL, 0, NULL},
};
