/* Convolution of the whole batch at once, as matrix products.
 *
 * The windows of all images, one after the other, make a matrix with a row (a patch)
 * for each pixel of the outputs; the weights are a matrix with a row for each filter:
 *
 *     outputs       = bias + patches weights^T
 *     weight_deltas = out_deltas^T patches        bias_deltas = column sums
 *     in_deltas    += each pixel's elements of (out_deltas weights)
 *
 * The matrix of patches lies in a temporary. Where it would be larger than
 * WORKSPACE_BYTES the rows are worked off in chunks. Where a patch is just a pixel, the
 * images are that matrix themselves.
 *
 * The sum for weight_deltas is as long as the matrix has rows, for a result that is
 * often small: it is cut into slices, whose products are made side by side and then
 * added up, always in the same order. */
#include "images.h"

enum {
    WORKSPACE_BYTES = 1 << 28,
    MOST_ROWS = 1 << 26, /* in a chunk, for cuBLAS's and the kernels' 32 bits */
    LEAST_SLICE = 128,   /* rows worth a product of their own */
    TILE = 64,           /* about what a block works on in a product */
    SUM_COLUMNS = 32,    /* of a block of conv_column_sums */
    LONG_SLICE = 256,    /* rows that keep MOST_THREADS of such a block busy */
    MOST_THREADS = 1024,
};

/* One call: its arguments, checked. All arrays are borrowed. */
typedef struct {
    const char *operation;
    ArrayObject *inputs, *weights;
    ArrayObject *outputs; /* or out_deltas, of the same shape */
    PatchLayout layout;
    size_t filters;
    size_t patch;     /* elements in a window */
    size_t rows;      /* of the matrix of patches */
    size_t chunk;     /* rows to be worked on at a time */
    int is_pointwise; /* the images are the matrix of patches */
} Convolution;

/* How many windows fit into a length with its paddings. */
static Py_ssize_t
windows_in(Py_ssize_t length, int32_t padding, Py_ssize_t window, uint32_t stride)
{
    length += 2 * (Py_ssize_t)padding;
    return length < window ? 0 : (length - window) / (Py_ssize_t)stride + 1;
}

/* Rows to be worked on at a time: whole images, if one fits. */
static size_t
rows_in_chunk(const Convolution *c)
{
    size_t most = MOST_ROWS;
    if (!c->is_pointwise) {
        size_t fit = WORKSPACE_BYTES / 4 / c->layout.pitch;
        most = fit < most ? fit : most;
    }
    if (most >= c->layout.out_pixels) {
        most -= most % c->layout.out_pixels;
    }
    most = most > 0 ? most : 1;
    return most < c->rows ? most : c->rows;
}

/* Check what both operations are given and fill in c. outputs_name names what is passed
 * for c->outputs. Return 0, or -1 with an error set. */
static int
read_convolution(Convolution *c, EngineObject *engine, PyObject *inputs,
                 PyObject *weights, const char *outputs_name, PyObject *outputs,
                 PyObject *padding_object, PyObject *stride_object)
{
    uint32_t stride[2];
    int32_t padding;
    if ((c->inputs = images_argument(engine, c->operation, "inputs", inputs)) == NULL ||
        (c->weights = array_argument(engine, c->operation, "weights", weights)) ==
            NULL ||
        (c->outputs = images_argument(engine, c->operation, outputs_name, outputs)) ==
            NULL ||
        padding_argument(c->operation, padding_object, &padding) < 0 ||
        pair_argument(c->operation, "stride", stride_object, stride) < 0) {
        return -1;
    }
    const Py_ssize_t *in = c->inputs->shape, *kernel = c->weights->shape;
    if (c->weights->ndim != 4 || kernel[3] != in[3]) {
        raise_shape(c->operation, "weights", c->weights,
                    "(filters, height, width, %zd) with the channels of inputs", in[3]);
        return -1;
    }
    if (check_window(c->operation, "weights", c->weights, kernel[1], kernel[2]) < 0) {
        return -1;
    }
    if (kernel[1] > IMAGE_MOST / kernel[2] ||
        kernel[1] * kernel[2] > IMAGE_MOST / (in[3] > 0 ? in[3] : 1)) {
        raise_shape(c->operation, "weights", c->weights,
                    "at most %d elements in a filter", IMAGE_MOST);
        return -1;
    }
    Py_ssize_t expected[4] = {in[0], windows_in(in[1], padding, kernel[1], stride[0]),
                              windows_in(in[2], padding, kernel[2], stride[1]),
                              kernel[0]};
    if (check_shape(c->operation, outputs_name, c->outputs, 4, expected) < 0) {
        return -1;
    }
    c->filters = (size_t)kernel[0];
    c->patch = (size_t)(kernel[1] * kernel[2] * kernel[3]);
    c->is_pointwise = kernel[1] == 1 && kernel[2] == 1 && stride[0] == 1 &&
                      stride[1] == 1 && padding == 0;
    if (c->outputs->size == 0) {
        c->rows = 0; /* the layout is not used, and might not fit */
        return 0;
    }
    PatchLayout *l = &c->layout;
    l->window = (WindowLayout){
        .in_h = (uint32_t)in[1],
        .in_w = (uint32_t)in[2],
        .channels = (uint32_t)in[3],
        .out_h = (uint32_t)expected[1],
        .out_w = (uint32_t)expected[2],
        .window_h = (uint32_t)kernel[1],
        .window_w = (uint32_t)kernel[2],
        .stride_h = stride[0],
        .stride_w = stride[1],
        .padding = padding,
    };
    finish_windows(&l->window, 1);
    l->out_pixels = l->window.out_h * l->window.out_w;
    l->run = l->window.window_w * l->window.channels;
    l->patch = (uint32_t)c->patch;
    l->pitch = c->is_pointwise || c->patch == 0 ? l->patch : (l->patch + 3) / 4 * 4;
    l->quads = l->pitch / 4;
    l->by_out_pixels = divisor_of(l->out_pixels);
    l->by_run = divisor_of(l->run > 0 ? l->run : 1);
    l->by_quads = divisor_of(l->quads > 0 ? l->quads : 1);
    c->rows = (size_t)in[0] * l->out_pixels;
    c->chunk = c->patch == 0 ? c->rows : rows_in_chunk(c);
    return 0;
}

/* Memory for a chunk's matrix of patches. Return 0, or -1 with an error set. */
static int
take_matrix(const Convolution *c, Op *op, CUdeviceptr *matrix)
{
    *matrix = 0;
    if (c->is_pointwise || c->patch == 0) {
        return 0;
    }
    *matrix = op_temporary(op, c->chunk * c->layout.pitch * 4);
    return *matrix == 0 ? -1 : 0;
}

/* The elements of an image of the inputs. */
static size_t
image_size(const Convolution *c)
{
    const WindowLayout *w = &c->layout.window;
    return (size_t)w->in_h * w->in_w * w->channels;
}

/* Queue writing the patches `first` to first + rows - 1 to the matrix. Return where
 * they lie: in the images themselves if these are the matrix. */
static CUdeviceptr
make_patches(const Convolution *c, Op *op, CUdeviceptr images, size_t first,
             size_t rows, CUdeviceptr matrix)
{
    if (c->is_pointwise) {
        return images + first * c->patch * 4;
    }
    PatchLayout layout = c->layout;
    images += first / layout.out_pixels * image_size(c) * 4;
    uint32_t first_row = (uint32_t)(first % layout.out_pixels);
    uint32_t items = (uint32_t)(rows * layout.quads);
    Kernel kernel = has_fours(layout.window.channels, images)
                        ? KERNEL_conv_patches_fours
                        : KERNEL_conv_patches;
    void *parameters[] = {&layout, &images, &matrix, &first_row, &items};
    op_launch(op, kernel, op_blocks(op, items, 1), BLOCK_THREADS, 0, parameters);
    return matrix;
}

/* Queue adding the matrix of the patches `first` to first + rows - 1 to the images. */
static void
add_patches(const Convolution *c, Op *op, CUdeviceptr matrix, size_t first, size_t rows,
            CUdeviceptr images)
{
    PatchLayout layout = c->layout;
    size_t pixels = layout.out_pixels;
    int fours = has_fours(layout.window.channels, images);
    finish_windows(&layout.window, fours ? 4 : 1);
    size_t vectors = image_size(c) / (fours ? 4 : 1);
    size_t most = images_at_once(vectors);
    size_t end = (first + rows + pixels - 1) / pixels;
    for (size_t image = first / pixels; vectors > 0 && image < end; image += most) {
        size_t count = end - image < most ? end - image : most;
        CUdeviceptr at = images + image * image_size(c) * 4;
        /* Less than 0 where the first row belongs to an earlier launch: as in the
         * kernel, modulo 2^32. */
        uint32_t first_row = (uint32_t)(first - image * pixels);
        uint32_t row_count = (uint32_t)rows, items = (uint32_t)(count * vectors);
        void *parameters[] = {&layout, &matrix, &at, &first_row, &row_count, &items};
        op_launch(op, fours ? KERNEL_conv_add_patches_fours : KERNEL_conv_add_patches,
                  op_blocks(op, items, 1), BLOCK_THREADS, 0, parameters);
    }
}

/* Queue outputs = bias, for each pixel. */
static void
fill_bias(const Convolution *c, Op *op, CUdeviceptr outputs, CUdeviceptr bias)
{
    int fours = has_fours((Py_ssize_t)c->filters, outputs | bias);
    uint32_t vectors = (uint32_t)(c->filters / (fours ? 4 : 1));
    size_t n = c->rows * vectors;
    /* Threads in multiples of the vectors: what the kernel relies on. */
    uint32_t step = vectors;
    for (uint32_t threads = BLOCK_THREADS; step % 2 == 0 && threads > 1; threads /= 2) {
        step /= 2;
    }
    size_t blocks = (op_blocks(op, n, 4) + step - 1) / step * step;
    void *parameters[] = {&outputs, &bias, &vectors, &n};
    op_launch(op, fours ? KERNEL_conv_bias_fours : KERNEL_conv_bias, blocks,
              BLOCK_THREADS, 0, parameters);
}

/* Queue the products for `rows` pixels of the outputs, which hold the bias. */
static void
forward_rows(const Convolution *c, Op *op, CUdeviceptr images, CUdeviceptr weights,
             CUdeviceptr outputs, CUdeviceptr matrix, size_t first, size_t rows)
{
    matrix = make_patches(c, op, images, first, rows, matrix);
    op_product(op, 0, 1, rows, c->filters, c->patch, matrix, c->layout.pitch, weights,
               c->patch, 1, outputs + first * c->filters * 4, c->filters);
}

static PyObject *
conv2d_forward_batch(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                     PyObject *kwnames)
{
    static const char *const names[] = {"inputs",  "weights", "bias", "outputs",
                                        "padding", "stride",  NULL};
    static const Signature signature = {"conv2d_forward_batch", names, 6, 6};
    PyObject *given[6] = {NULL};
    Convolution c = {.operation = "conv2d_forward_batch"};
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0 ||
        read_convolution(&c, engine, given[0], given[1], "outputs", given[3], given[4],
                         given[5]) < 0) {
        return NULL;
    }
    ArrayObject *bias = array_argument(engine, c.operation, "bias", given[2]);
    if (bias == NULL ||
        check_shape(c.operation, "bias", bias, 1, c.weights->shape) < 0 ||
        check_apart(c.operation, "outputs", c.outputs, "inputs", c.inputs) < 0 ||
        check_apart(c.operation, "outputs", c.outputs, "weights", c.weights) < 0 ||
        check_apart(c.operation, "outputs", c.outputs, "bias", bias) < 0) {
        return NULL;
    }
    if (c.outputs->size == 0) {
        Py_RETURN_NONE;
    }
    Op op;
    Packed packed_inputs, packed_weights, packed_bias, packed_outputs;
    CUdeviceptr matrix;
    if (op_init(&op, engine, c.operation) < 0) {
        return NULL;
    }
    if ((c.patch > 0 && blas_ready(&op, self) < 0) ||
        packed_init(&packed_inputs, &op, c.inputs) < 0 ||
        packed_init(&packed_weights, &op, c.weights) < 0 ||
        packed_init(&packed_bias, &op, bias) < 0 ||
        packed_init(&packed_outputs, &op, c.outputs) < 0 ||
        take_matrix(&c, &op, &matrix) < 0) {
        return op_end(&op);
    }
    op_begin(&op, c.chunk < c.rows);
    packed_load(&packed_inputs, &op);
    packed_load(&packed_weights, &op);
    packed_load(&packed_bias, &op);
    fill_bias(&c, &op, packed_outputs.ptr, packed_bias.ptr);
    for (size_t first = 0; c.patch > 0 && first < c.rows; first += c.chunk) {
        size_t rows = c.rows - first < c.chunk ? c.rows - first : c.chunk;
        forward_rows(&c, &op, packed_inputs.ptr, packed_weights.ptr, packed_outputs.ptr,
                     matrix, first, rows);
    }
    packed_store(&packed_outputs, &op);
    return op_end(&op);
}

/* How the rows of a chunk are cut for weight_deltas. */
typedef struct {
    size_t count; /* slices */
    size_t rows;  /* in each but the last, which may be shorter */
} Slices;

/* As many slices as keep the device busy; rather a few more, if they come out even. */
static Slices
slices_of(const Convolution *c, const EngineObject *engine, size_t rows)
{
    size_t tiles = ((c->filters + TILE - 1) / TILE) * ((c->patch + TILE - 1) / TILE);
    size_t count = 2 * (size_t)engine->processors / (tiles > 0 ? tiles : 1);
    size_t most = (rows + LEAST_SLICE - 1) / LEAST_SLICE;
    count = count < 1 ? 1 : count;
    count = count > most ? most : count;
    for (size_t more = count; more < 2 * count; more++) {
        if (rows % more == 0) {
            count = more;
            break;
        }
    }
    size_t each = (rows + count - 1) / count;
    return (Slices){(rows + each - 1) / each, each};
}

/* Elements of the slices' results, enough for each chunk. */
static size_t
partial_size(const Convolution *c, const EngineObject *engine)
{
    size_t most = slices_of(c, engine, c->chunk).count;
    if (c->rows % c->chunk > 0) {
        size_t last = slices_of(c, engine, c->rows % c->chunk).count;
        most = last > most ? last : most;
    }
    return most * c->filters * (c->patch + 1);
}

/* Queue out = the sums of a matrix's columns, a row of sums for each slice. Sums from
 * column `split` on go to `rest` instead. */
static void
sum_columns(Op *op, CUdeviceptr matrix, size_t rows, size_t columns, Slices slices,
            CUdeviceptr out, size_t out_pitch, CUdeviceptr rest, size_t split,
            int is_added)
{
    void *parameters[] = {&matrix,    &rows, &columns, &slices.rows, &out,
                          &out_pitch, &rest, &split,   &is_added};
    /* A warp for every few rows, as long as that leaves the blocks small. */
    unsigned int threads = slices.rows < LONG_SLICE ? BLOCK_THREADS : MOST_THREADS;
    op_launch3(op, KERNEL_conv_column_sums,
               (unsigned int)((columns + SUM_COLUMNS - 1) / SUM_COLUMNS),
               (unsigned int)slices.count, 1, threads, 0, parameters);
}

/* The arrays of a backward pass, contiguous, and its temporaries. */
typedef struct {
    CUdeviceptr images, weights, in_deltas, out_deltas, weight_deltas, bias_deltas;
    CUdeviceptr matrix;
    CUdeviceptr partial; /* a row for each slice: its weight_deltas, then bias_deltas */
} Backward;

/* Queue the parameters' deltas for `rows` pixels from `first` on. */
static void
parameter_deltas(const Convolution *c, Op *op, const Backward *b, CUdeviceptr patches,
                 CUdeviceptr out_deltas, size_t rows, int is_added)
{
    Slices slices = slices_of(c, op->engine, rows);
    size_t weights = c->filters * c->patch, pitch = weights + c->filters;
    CUdeviceptr partial = b->partial;
    if (c->patch > 0) {
        size_t whole = rows / slices.rows, rest = rows % slices.rows;
        op_products(op, (int)whole, 1, 0, c->filters, c->patch, slices.rows, out_deltas,
                    c->filters, slices.rows * c->filters, patches, c->layout.pitch,
                    slices.rows * c->layout.pitch, 0, partial, c->patch, pitch);
        if (rest > 0) {
            size_t done = whole * slices.rows;
            op_product(op, 1, 0, c->filters, c->patch, rest,
                       out_deltas + done * c->filters * 4, c->filters,
                       patches + done * c->layout.pitch * 4, c->layout.pitch, 0,
                       partial + whole * pitch * 4, c->patch);
        }
    }
    sum_columns(op, out_deltas, rows, c->filters, slices, partial + weights * 4, pitch,
                0, c->filters, 0);
    sum_columns(op, partial, slices.count, pitch, (Slices){1, slices.count},
                b->weight_deltas, 0, b->bias_deltas, weights, is_added);
}

/* Queue all that `rows` pixels of the outputs, from `first` on, contribute. */
static void
backward_rows(const Convolution *c, Op *op, const Backward *b, size_t first,
              size_t rows)
{
    CUdeviceptr out_deltas = b->out_deltas + first * c->filters * 4;
    CUdeviceptr patches = 0;
    if (c->patch > 0) {
        patches = make_patches(c, op, b->images, first, rows, b->matrix);
    }
    parameter_deltas(c, op, b, patches, out_deltas, rows, first > 0);
    if (c->patch == 0) {
        return;
    }
    if (c->is_pointwise) {
        op_product(op, 0, 0, rows, c->patch, c->filters, out_deltas, c->filters,
                   b->weights, c->patch, 1, b->in_deltas + first * c->patch * 4,
                   c->patch);
        return;
    }
    op_product(op, 0, 0, rows, c->patch, c->filters, out_deltas, c->filters, b->weights,
               c->patch, 0, b->matrix, c->layout.pitch);
    add_patches(c, op, b->matrix, first, rows, b->in_deltas);
}

/* The arrays that are written must be apart from all others. Return 0 or -1. */
static int
check_deltas(const Convolution *c, ArrayObject *in_deltas, ArrayObject *weight_deltas,
             ArrayObject *bias_deltas)
{
    ArrayObject *const arrays[] = {in_deltas, weight_deltas, bias_deltas,
                                   c->inputs, c->weights,    c->outputs};
    static const char *const names[] = {"in_deltas", "weight_deltas", "bias_deltas",
                                        "inputs",    "weights",       "out_deltas"};
    for (int i = 0; i < 3; i++) {
        for (int k = i + 1; k < 6; k++) {
            if (check_apart(c->operation, names[i], arrays[i], names[k], arrays[k]) <
                0) {
                return -1;
            }
        }
    }
    return 0;
}

static PyObject *
conv2d_backward_batch(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                      PyObject *kwnames)
{
    static const char *const names[] = {"inputs",        "weights",     "padding",
                                        "stride",        "in_deltas",   "out_deltas",
                                        "weight_deltas", "bias_deltas", NULL};
    static const Signature signature = {"conv2d_backward_batch", names, 8, 8};
    PyObject *given[8] = {NULL};
    Convolution c = {.operation = "conv2d_backward_batch"};
    ArrayObject *in_deltas, *weight_deltas, *bias_deltas;
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0 ||
        read_convolution(&c, engine, given[0], given[1], "out_deltas", given[5],
                         given[2], given[3]) < 0 ||
        (in_deltas = images_argument(engine, c.operation, "in_deltas", given[4])) ==
            NULL ||
        (weight_deltas =
             array_argument(engine, c.operation, "weight_deltas", given[6])) == NULL ||
        (bias_deltas = array_argument(engine, c.operation, "bias_deltas", given[7])) ==
            NULL ||
        check_shape(c.operation, "in_deltas", in_deltas, 4, c.inputs->shape) < 0 ||
        check_shape(c.operation, "weight_deltas", weight_deltas, 4, c.weights->shape) <
            0 ||
        check_shape(c.operation, "bias_deltas", bias_deltas, 1, c.weights->shape) < 0 ||
        check_deltas(&c, in_deltas, weight_deltas, bias_deltas) < 0) {
        return NULL;
    }
    Op op;
    Packed images, weights, to_images, from, to_weights, to_bias;
    Backward b = {0};
    if (op_init(&op, engine, c.operation) < 0) {
        return NULL;
    }
    if (c.rows == 0) { /* no pixel of the outputs: sums of nothing */
        op_begin(&op, 0);
        op_map(&op, MAP_fill, weight_deltas, NULL, NULL, 0, 0);
        op_map(&op, MAP_fill, bias_deltas, NULL, NULL, 0, 0);
        return op_end(&op);
    }
    if ((c.patch > 0 && blas_ready(&op, self) < 0) ||
        packed_init(&images, &op, c.inputs) < 0 ||
        packed_init(&weights, &op, c.weights) < 0 ||
        packed_init(&to_images, &op, in_deltas) < 0 ||
        packed_init(&from, &op, c.outputs) < 0 ||
        packed_init(&to_weights, &op, weight_deltas) < 0 ||
        packed_init(&to_bias, &op, bias_deltas) < 0 ||
        take_matrix(&c, &op, &b.matrix) < 0 ||
        (b.partial = op_temporary(&op, partial_size(&c, engine) * 4)) == 0) {
        return op_end(&op);
    }
    b.images = images.ptr;
    b.weights = weights.ptr;
    b.in_deltas = to_images.ptr;
    b.out_deltas = from.ptr;
    b.weight_deltas = to_weights.ptr;
    b.bias_deltas = to_bias.ptr;
    op_begin(&op, c.chunk < c.rows);
    packed_load(&images, &op);
    packed_load(&weights, &op);
    packed_load(&to_images, &op);
    packed_load(&from, &op);
    for (size_t first = 0; first < c.rows; first += c.chunk) {
        size_t rows = c.rows - first < c.chunk ? c.rows - first : c.chunk;
        backward_rows(&c, &op, &b, first, rows);
    }
    packed_store(&to_images, &op);
    packed_store(&to_weights, &op);
    packed_store(&to_bias, &op);
    return op_end(&op);
}

PyMethodDef convolution_operations[] = {
    {"conv2d_forward_batch", FASTCALL(conv2d_forward_batch),
     PyDoc_STR(
         "conv2d_forward_batch($self, inputs, weights, bias, outputs, padding, stride)"
         "\n--\n\n"
         "Set outputs to the convolution of inputs with the weights, plus bias.\n\n"
         "inputs has shape (images, height, width, channels), weights (filters, height,"
         "\nwidth, channels), bias (filters,), outputs (images, rows, columns, filters)"
         "\nfor the windows that fit. padding is the number of zeros around each image,"
         "\nstride a tuple (vertical, horizontal). All arrays are float32 DeviceArrays "
         "of\nthis handler. Raises TypeError or ValueError naming the argument.")},
    {"conv2d_backward_batch", FASTCALL(conv2d_backward_batch),
     PyDoc_STR(
         "conv2d_backward_batch($self, inputs, weights, padding, stride, in_deltas, "
         "out_deltas, weight_deltas, bias_deltas)\n--\n\n"
         "Set weight_deltas and bias_deltas to a convolution's gradients, and add "
         "those "
         "of\nits inputs to in_deltas.\n\n"
         "out_deltas has the shape of its outputs, the others that of what they are "
         "deltas\nof. Raises TypeError or ValueError naming the argument.")},
    {NULL, NULL, 0, NULL},
};
