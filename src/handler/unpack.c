/* Minibatches that crossed the link narrow, as bytes or indices: made float32 on the
 * device. The source is an address, since no DeviceArray has such elements. */
#include "handler.h"
#include "../kernels/unpack_layout.h"

/* An input of a minibatch, on its way from where it lies to its array. */
typedef struct {
    ArrayObject *dest; /* borrowed from an argument */
    CUdeviceptr source;
    UnpackKind kind;
    int itemsize; /* bytes of an element at the source */
    Rows rows;
} Input;

/* Read an address that elements lie at; `what` names operation and argument. Return 0,
 * or -1 with TypeError or ValueError set. */
static int
source_argument(const char *what, PyObject *object, CUdeviceptr *source)
{
    unsigned long long address;
    if (address_argument(what, object, &address) < 0) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "%s must be a device address, got %.100s",
                         what, Py_TYPE(object)->tp_name);
        }
        return -1;
    }
    *source = address;
    return 0;
}

/* Nothing lies at address 0, and a kernel that reads there takes the context with it.
 * Return 0, or -1 with ValueError set. */
static int
check_source(const char *what, CUdeviceptr source)
{
    if (source != 0) {
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "%s 0 is not an address", what);
    return -1;
}

/* Return 1 and what a dtype's elements are, or 0 if they are nothing of ours. */
static int
kind_of(const PyArray_Descr *dtype, int itemsize, UnpackKind *kind)
{
    const int type = dtype->type_num;
    const int is_unsigned = PyTypeNum_ISUNSIGNED(type);
    if (!PyArray_ISNBO(dtype->byteorder)) {
        return 0;
    }
    if (type == NPY_BOOL) {
        *kind = UNPACK_bool;
    }
    else if (type == NPY_HALF) {
        *kind = UNPACK_f2;
    }
    else if (type == NPY_FLOAT) {
        *kind = UNPACK_f4;
    }
    else if (PyTypeNum_ISINTEGER(type) && itemsize == 1) {
        *kind = is_unsigned ? UNPACK_u1 : UNPACK_i1;
    }
    else if (PyTypeNum_ISINTEGER(type) && itemsize == 2) {
        *kind = is_unsigned ? UNPACK_u2 : UNPACK_i2;
    }
    else if (PyTypeNum_ISINTEGER(type) && itemsize == 4) {
        *kind = is_unsigned ? UNPACK_u4 : UNPACK_i4;
    }
    else {
        return 0;
    }
    return 1;
}

/* Read a dtype; `what` names it. Return 0, or -1 with TypeError set. */
static int
dtype_argument(const char *what, PyObject *object, Input *input)
{
    PyArray_Descr *dtype = NULL;
    int is_ours = 0;
    if (PyArray_DescrConverter(object, &dtype)) {
        input->itemsize = (int)PyDataType_ELSIZE(dtype);
        is_ours = kind_of(dtype, input->itemsize, &input->kind);
    }
    else if (!PyErr_ExceptionMatches(PyExc_TypeError) &&
             !PyErr_ExceptionMatches(PyExc_ValueError) &&
             !PyErr_ExceptionMatches(PyExc_SyntaxError)) {
        return -1;
    }
    if (!is_ours) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError,
                     "%s must be bool, int8, uint8, int16, uint16, int32, uint32, "
                     "float16 or float32 in native byte order, got %R",
                     what, dtype != NULL ? (PyObject *)dtype : object);
    }
    Py_XDECREF(dtype);
    return is_ours ? 0 : -1;
}

static void
mark_indices(Input *input)
{
    input->kind = UNPACK_one_hot;
    input->itemsize = sizeof(int32_t);
}

/* 1 if the rows can be written in pieces of four elements; a single one may have up to
 * three more. */
static int
is_in_fours(const Input *input)
{
    const Rows *rows = &input->rows;
    return rows->ptr % 16 == 0 &&
           (rows->rows == 1 || (rows->columns % 4 == 0 && rows->pitch % 4 == 0)) &&
           (input->kind == UNPACK_one_hot ||
            input->source % (4 * (CUdeviceptr)input->itemsize) == 0);
}

/* See an array as the longest rows that it has at one distance, by way of a twin where
 * it has none; a contiguous one is a single row. Before op_begin. Return 0, or -1 with
 * an error set (op_end follows). */
static int
longest_rows(Op *op, Rows *rows, const ArrayObject *array)
{
    for (int split = 0; split <= array->ndim; split++) {
        Axis leading, trailing;
        int fits = axes_merge(array, 0, split, &leading);
        fits &= axes_merge(array, split, array->ndim, &trailing);
        if (fits && (trailing.size == 1 || trailing.stride == 1)) {
            *rows = (Rows){.array = array,
                           .rows = leading.size,
                           .columns = trailing.size,
                           .pitch = leading.stride,
                           .ptr = array->ptr};
            return 0;
        }
    }
    *rows =
        (Rows){.array = array, .rows = 1, .columns = (size_t)array->size, .is_twin = 1};
    int status = op_twin(op, &rows->twin, array);
    rows->ptr = rows->twin.ptr;
    return status;
}

/* Queue one launch for up to UNPACK_PARTS inputs, none of which is empty. A new None,
 * or NULL with an error set. */
static PyObject *
queue(EngineObject *engine, const char *operation, Input *inputs, int count)
{
    UnpackParts all = {0};
    unsigned int blocks = 0;
    Op op;
    if (count == 0) {
        Py_RETURN_NONE;
    }
    if (op_init(&op, engine, operation) < 0) {
        return NULL;
    }
    for (int i = 0; i < count; i++) {
        Input *input = &inputs[i];
        int status = input->kind == UNPACK_one_hot
                         ? op_rows(&op, &input->rows, input->dest)
                         : longest_rows(&op, &input->rows, input->dest);
        if (status < 0) {
            return op_end(&op);
        }
        const Rows *rows = &input->rows;
        const int fours = is_in_fours(input);
        const size_t pieces = fours ? op_parts(rows->columns, 4) : rows->columns;
        const Tiling t = op_tile(&op, rows->rows, pieces);
        blocks += t.x * t.y;
        all.parts[all.count++] = (UnpackPart){.out = rows->ptr,
                                              .source = input->source,
                                              .rows = rows->rows,
                                              .columns = rows->columns,
                                              .pitch = rows->pitch,
                                              .kind = input->kind,
                                              .fours = fours,
                                              .lanes = t.lanes,
                                              .across = t.x,
                                              .along = t.y,
                                              .end = blocks};
    }
    void *parameters[] = {&all};
    op_begin(&op, 0);
    op_launch(&op, KERNEL_unpack, blocks, BLOCK_THREADS, 0, parameters);
    for (int i = 0; i < count; i++) {
        op_rows_store(&op, &inputs[i].rows);
    }
    return op_end(&op);
}

/* Read dest and source of an input whose kind is known; they are called so, or have an
 * index behind them if there is one. Return 1, 0 if nothing is to be done, or -1 with
 * an error set. */
static int
ends_arguments(EngineObject *engine, const char *operation, int index, PyObject *dest,
               PyObject *source, Input *input)
{
    char dest_name[32] = "dest", source_name[64];
    snprintf(source_name, sizeof(source_name), "%s: source", operation);
    if (index >= 0) {
        snprintf(dest_name, sizeof(dest_name), "dests[%d]", index);
        snprintf(source_name, sizeof(source_name), "%s: sources[%d]", operation, index);
    }
    input->dest = array_argument(engine, operation, dest_name, dest);
    if (input->dest == NULL ||
        source_argument(source_name, source, &input->source) < 0) {
        return -1;
    }
    if (input->kind == UNPACK_one_hot && input->dest->ndim == 0) {
        raise_shape(operation, dest_name, input->dest, "at least one axis");
        return -1;
    }
    if (input->dest->size == 0) {
        return 0;
    }
    if (check_source(source_name, input->source) < 0 ||
        device_check_pointer(engine->state, source_name, input->source,
                             engine->context) < 0) {
        return -1;
    }
    return 1;
}

static PyObject *
widen(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"dest", "source", "dtype", NULL};
    static const Signature signature = {"widen", names, 3, 3};
    PyObject *given[3] = {NULL};
    Input input = {0};
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0 ||
        dtype_argument("widen: dtype", given[2], &input) < 0) {
        return NULL;
    }
    int status = ends_arguments(engine, "widen", -1, given[0], given[1], &input);
    return status < 0 ? NULL : queue(engine, "widen", &input, status);
}

static PyObject *
one_hot(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"dest", "source", NULL};
    static const Signature signature = {"one_hot", names, 2, 2};
    PyObject *given[2] = {NULL};
    Input input = {0};
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    mark_indices(&input);
    int status = ends_arguments(engine, "one_hot", -1, given[0], given[1], &input);
    return status < 0 ? NULL : queue(engine, "one_hot", &input, status);
}

/* Read the inputs of a minibatch. Return how many there is something to do for, or -1
 * with an error set. */
static Py_ssize_t
inputs_arguments(EngineObject *engine, PyObject *const *tuples, Py_ssize_t count,
                 Input *inputs)
{
    Py_ssize_t filled = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        Input *input = &inputs[filled];
        PyObject *dtype = PyTuple_GET_ITEM(tuples[2], i);
        char what[64];
        snprintf(what, sizeof(what), "unpack: dtypes[%d]", (int)i);
        if (dtype == Py_None) {
            mark_indices(input);
        }
        else if (dtype_argument(what, dtype, input) < 0) {
            return -1;
        }
        int status =
            ends_arguments(engine, "unpack", (int)i, PyTuple_GET_ITEM(tuples[0], i),
                           PyTuple_GET_ITEM(tuples[1], i), input);
        if (status < 0) {
            return -1;
        }
        filled += status;
    }
    return filled;
}

static PyObject *
unpack_inputs(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
              PyObject *kwnames)
{
    static const char *const names[] = {"dests", "sources", "dtypes", NULL};
    static const Signature signature = {"unpack", names, 3, 3};
    PyObject *given[3] = {NULL}, *tuples[3] = {NULL}, *result = NULL;
    Input *inputs = NULL;
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    for (int i = 0; i < 3; i++) {
        if ((tuples[i] = PySequence_Tuple(given[i])) == NULL) {
            if (PyErr_ExceptionMatches(PyExc_TypeError)) {
                PyErr_Format(PyExc_TypeError,
                             "unpack: %s must be a sequence, got %.100s", names[i],
                             Py_TYPE(given[i])->tp_name);
            }
            goto done;
        }
    }
    const Py_ssize_t count = PyTuple_GET_SIZE(tuples[0]);
    if (PyTuple_GET_SIZE(tuples[1]) != count || PyTuple_GET_SIZE(tuples[2]) != count) {
        PyErr_Format(PyExc_ValueError,
                     "unpack: dests, sources and dtypes must be as many, got %zd, %zd "
                     "and %zd",
                     count, PyTuple_GET_SIZE(tuples[1]), PyTuple_GET_SIZE(tuples[2]));
        goto done;
    }
    if ((inputs = PyMem_Calloc((size_t)count, sizeof(*inputs))) == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    Py_ssize_t left = inputs_arguments(engine, tuples, count, inputs);
    Input *next = inputs;
    do {
        const int some = left < UNPACK_PARTS ? (int)left : UNPACK_PARTS;
        Py_XDECREF(result);
        result = left < 0 ? NULL : queue(engine, "unpack", next, some);
        next += some;
        left -= some;
    } while (result != NULL && left > 0);
done:
    PyMem_Free(inputs);
    for (int i = 0; i < 3; i++) {
        Py_XDECREF(tuples[i]);
    }
    return result;
}

#define SOURCE \
    "The source is read when the compute stream has come so far: it must have been\n" \
    "written for that stream to see, and stay as it is until then. It may start at\n" \
    "any address, apart from dest, in page-locked host memory as well; that the\n" \
    "memory is there is not checked. A dest without elements is left alone.\n"

PyMethodDef unpack_operations[] = {
    {"one_hot", FASTCALL(one_hot),
     PyDoc_STR("one_hot($self, dest, source)\n--\n\n"
               "Make the rows of dest one-hot: 1 at the row's index, else 0.\n\n"
               "dest is a float32 DeviceArray of shape (..., n); source is the device\n"
               "address of contiguous int32 indices from 0 to n - 1, one for each row\n"
               "in C order. An index out of range leaves its row all zeros.\n" SOURCE
               "Raises TypeError or ValueError naming the argument.")},
    {"unpack", FASTCALL(unpack_inputs),
     PyDoc_STR(
         "unpack($self, dests, sources, dtypes)\n--\n\n"
         "Do for all inputs of a minibatch what widen and one_hot do for one.\n\n"
         "Three sequences of one length: the arrays, which must not overlap, the\n"
         "addresses, and the dtypes of what lies there, None for one-hot indices.\n"
         "Up to 8 inputs take one kernel. Nothing is done if one is refused.\n" SOURCE
         "Raises TypeError or ValueError naming the argument.")},
    {"widen", FASTCALL(widen),
     PyDoc_STR(
         "widen($self, dest, source, dtype)\n--\n\n"
         "Set dest to elements of another dtype, cast as NumPy's astype does.\n\n"
         "dest is a float32 DeviceArray of any shape; source is the device\n"
         "address of as many elements in C order, without gaps; dtype is theirs:\n"
         "bool, int8, uint8, int16, uint16, int32, uint32, float16 or float32 in\n"
         "native byte order, as anything that np.dtype takes.\n" SOURCE
         "Raises TypeError or ValueError naming the argument.")},
    {NULL, NULL, 0, NULL},
};
