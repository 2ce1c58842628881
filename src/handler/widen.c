/* Minibatches that crossed the link narrow, as bytes or indices: made float32 on the
 * device. The source is an address, since no DeviceArray has such elements. */
#include "handler.h"

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

/* 1 if rows can be written in pieces of four elements; a single one may have up to
 * three more. */
static int
is_in_fours(const Rows *rows)
{
    return rows->ptr % 16 == 0 &&
           (rows->rows == 1 || (rows->columns % 4 == 0 && rows->pitch % 4 == 0));
}

/* Queue a kernel of widen.cu. */
static void
queue(Op *op, Kernel kernel, const Rows *dest, CUdeviceptr source, int fours)
{
    CUdeviceptr ptr = dest->ptr;
    size_t rows = dest->rows, columns = dest->columns, pitch = dest->pitch;
    Tiling t = op_tile(op, rows, fours ? op_parts(columns, 4) : columns);
    void *parameters[] = {&ptr, &source, &rows, &columns, &pitch, &t.lanes, &fours};
    op_launch3(op, kernel, t.x, t.y, 1, BLOCK_THREADS, 0, parameters);
}

/* ---- widen ---- */

/* Return 1 and the kernel for a dtype's elements, or 0 if there is none. */
static int
kernel_of(const PyArray_Descr *dtype, int itemsize, Kernel *kernel)
{
    const int type = dtype->type_num;
    const int is_unsigned = PyTypeNum_ISUNSIGNED(type);
    if (!PyArray_ISNBO(dtype->byteorder)) {
        return 0;
    }
    if (type == NPY_BOOL) {
        *kernel = KERNEL_widen_bool;
    }
    else if (type == NPY_HALF) {
        *kernel = KERNEL_widen_f2;
    }
    else if (type == NPY_FLOAT) {
        *kernel = KERNEL_widen_f4;
    }
    else if (PyTypeNum_ISINTEGER(type) && itemsize == 1) {
        *kernel = is_unsigned ? KERNEL_widen_u1 : KERNEL_widen_i1;
    }
    else if (PyTypeNum_ISINTEGER(type) && itemsize == 2) {
        *kernel = is_unsigned ? KERNEL_widen_u2 : KERNEL_widen_i2;
    }
    else if (PyTypeNum_ISINTEGER(type) && itemsize == 4) {
        *kernel = is_unsigned ? KERNEL_widen_u4 : KERNEL_widen_i4;
    }
    else {
        return 0;
    }
    return 1;
}

/* Read `dtype`: the kernel for it, and the bytes of an element. Return 0, or -1 with
 * TypeError set. */
static int
dtype_argument(const char *operation, PyObject *object, Kernel *kernel, int *itemsize)
{
    PyArray_Descr *dtype = NULL;
    int is_ours = 0;
    if (PyArray_DescrConverter(object, &dtype)) {
        *itemsize = (int)PyDataType_ELSIZE(dtype);
        is_ours = kernel_of(dtype, *itemsize, kernel);
    }
    else if (!PyErr_ExceptionMatches(PyExc_TypeError) &&
             !PyErr_ExceptionMatches(PyExc_ValueError) &&
             !PyErr_ExceptionMatches(PyExc_SyntaxError)) {
        return -1;
    }
    if (!is_ours) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError,
                     "%s: dtype must be bool, int8, uint8, int16, uint16, int32, "
                     "uint32, float16 or float32 in native byte order, got %R",
                     operation, dtype != NULL ? (PyObject *)dtype : object);
    }
    Py_XDECREF(dtype);
    return is_ours ? 0 : -1;
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

static PyObject *
widen(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"dest", "source", "dtype", NULL};
    static const Signature signature = {"widen", names, 3, 3};
    PyObject *given[3] = {NULL};
    ArrayObject *dest;
    CUdeviceptr source;
    Kernel kernel;
    int itemsize;
    Rows rows;
    Op op;
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0 ||
        (dest = array_argument(engine, "widen", "dest", given[0])) == NULL ||
        source_argument("widen: source", given[1], &source) < 0 ||
        dtype_argument("widen", given[2], &kernel, &itemsize) < 0) {
        return NULL;
    }
    if (dest->size == 0) {
        Py_RETURN_NONE;
    }
    if (check_source("widen: source", source) < 0 ||
        op_init(&op, engine, "widen") < 0) {
        return NULL;
    }
    if (longest_rows(&op, &rows, dest) < 0) {
        return op_end(&op);
    }
    op_begin(&op, 0);
    queue(&op, kernel, &rows, source,
          is_in_fours(&rows) && source % (4 * (CUdeviceptr)itemsize) == 0);
    op_rows_store(&op, &rows);
    return op_end(&op);
}

/* ---- one_hot ---- */

static PyObject *
one_hot(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"dest", "source", NULL};
    static const Signature signature = {"one_hot", names, 2, 2};
    PyObject *given[2] = {NULL};
    ArrayObject *dest;
    CUdeviceptr source;
    Rows rows;
    Op op;
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0 ||
        (dest = array_argument(engine, "one_hot", "dest", given[0])) == NULL ||
        source_argument("one_hot: source", given[1], &source) < 0) {
        return NULL;
    }
    if (dest->ndim == 0) {
        return raise_shape("one_hot", "dest", dest, "at least one axis");
    }
    if (dest->size == 0) {
        Py_RETURN_NONE;
    }
    if (check_source("one_hot: source", source) < 0 ||
        op_init(&op, engine, "one_hot") < 0) {
        return NULL;
    }
    if (op_rows(&op, &rows, dest) < 0) {
        return op_end(&op);
    }
    op_begin(&op, 0);
    queue(&op, KERNEL_one_hot_rows, &rows, source, is_in_fours(&rows));
    op_rows_store(&op, &rows);
    return op_end(&op);
}

#define SOURCE \
    "The source is read when the compute stream has come so far: it must have been\n" \
    "written for that stream to see, and stay as it is until then. It may start at\n" \
    "any address, apart from dest, in page-locked host memory as well; that the\n" \
    "memory is there is not checked. A dest without elements is left alone.\n"

PyMethodDef widen_operations[] = {
    {"one_hot", FASTCALL(one_hot),
     PyDoc_STR("one_hot($self, dest, source)\n--\n\n"
               "Make the rows of dest one-hot: 1 at the row's index, else 0.\n\n"
               "dest is a float32 DeviceArray of shape (..., n); source is the device\n"
               "address of contiguous int32 indices from 0 to n - 1, one for each row\n"
               "in C order. An index out of range leaves its row all zeros.\n" SOURCE
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
