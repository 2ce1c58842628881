/* Sums, softmax, and whether all is finite.
 *
 * A sum is one launch, or two where too few results would leave most of the device
 * idle: the first then cuts the summed axis into chunks and leaves partial sums. */
#include "reduce.h"

/* ---- sum_t ---- */

/* 1 if neighbours in memory belong to different sums. */
static int
is_by_columns(const SumLayout *sum)
{
    return sum->inner > 1 && sum->a_inner < sum->a_reduced;
}

/* How many blocks there is work for. */
static size_t
blocks_of(const SumLayout *sum)
{
    if (is_by_columns(sum)) {
        size_t tile = sum->lanes * (sum->fours ? 4 : 1);
        return sum->outer * sum->chunks * op_parts(sum->inner, tile);
    }
    return op_parts(sum->outer * sum->inner * sum->chunks, SUM_THREADS / sum->lanes);
}

/* Choose how the threads are laid out, and chunks such that there are some `wanted`
 * blocks, each thread having some 16 elements to add up at the least. */
static void
plan_sum(SumLayout *sum, CUdeviceptr a, size_t wanted)
{
    enum { EACH = 16, IN_FLIGHT = 4, WARP = 32, COLUMNS = 32, ROW = 256 };
    size_t least;
    int is_aligned = a % 16 == 0 && sum->a_outer % 4 == 0;
    if (is_by_columns(sum)) {
        sum->fours = is_aligned && sum->a_inner == 1 && sum->a_reduced % 4 == 0 &&
                     sum->inner % 4 == 0;
        /* Tall blocks, unless that leaves threads without a row. */
        unsigned int width = sum->fours ? 4 : 1, narrow = COLUMNS / width;
        unsigned int height =
            op_lanes(op_parts(sum->reduced, IN_FLIGHT), SUM_THREADS / narrow);
        sum->lanes = op_lanes(sum->inner / width, SUM_THREADS / height);
        least = SUM_THREADS / sum->lanes * EACH;
    }
    else {
        sum->fours = is_aligned && sum->a_inner % 4 == 0 && sum->a_reduced == 1;
        size_t n = sum->fours ? op_parts(sum->reduced, 4) : sum->reduced;
        sum->lanes = n > ROW ? SUM_THREADS : op_lanes(n, WARP);
        least = n > ROW ? SUM_THREADS * EACH : sum->reduced + 1;
    }
    sum->chunks = 1;
    sum->chunk = sum->reduced;
    size_t blocks = blocks_of(sum);
    size_t chunks = blocks > 0 ? wanted / blocks : 0;
    chunks = chunks < sum->reduced / least ? chunks : sum->reduced / least;
    if (chunks > 1) {
        /* In fours, lest the alignment be lost. */
        sum->chunk = op_parts(op_parts(sum->reduced, chunks), 4) * 4;
        sum->chunks = op_parts(sum->reduced, sum->chunk);
    }
}

static void
queue_sum(Op *op, SumLayout *sum, CUdeviceptr out, CUdeviceptr a)
{
    size_t blocks = blocks_of(sum), most = (size_t)op->engine->processors * 32;
    void *parameters[] = {sum, &out, &a};
    op_launch(op, is_by_columns(sum) ? KERNEL_sum_columns : KERNEL_sum_rows,
              blocks < most ? blocks : most, SUM_THREADS, 0, parameters);
}

/* Merge the axes before `first`, those before `end`, and the others. Return 1 if each
 * group merges. */
static int
merge_groups(const ArrayObject *array, int first, int end, Axis *groups)
{
    int fits = axes_merge(array, 0, first, &groups[0]);
    fits &= axes_merge(array, first, end, &groups[1]);
    fits &= axes_merge(array, end, array->ndim, &groups[2]);
    return fits;
}

static SumLayout
layout_of(const Axis *a, const Axis *out)
{
    SumLayout sum = {
        .outer = a[0].size,
        .reduced = a[1].size,
        .inner = a[2].size,
        .a_outer = a[0].stride,
        .a_reduced = a[1].stride,
        .a_inner = a[2].stride,
        .out_outer = out[0].stride,
        .out_inner = out[2].stride,
    };
    if (sum.inner == 1 && sum.outer > 1 && sum.a_outer < sum.a_reduced) {
        /* A transposed matrix. */
        sum.inner = sum.outer;
        sum.a_inner = sum.a_outer;
        sum.out_inner = sum.out_outer;
        sum.outer = 1;
        sum.a_outer = sum.out_outer = 0;
    }
    return sum;
}

int
sum_plan(Op *op, Sum *sum, const ArrayObject *a, int first, int end,
         const ArrayObject *out, int kept)
{
    Axis a_groups[3], out_groups[3];
    *sum = (Sum){
        .a = a,
        .out = out,
        /* Where nothing is summed a lies nowhere; it is not read then. */
        .a_ptr = a->size > 0 ? a->ptr : out->ptr,
        .out_ptr = out->ptr,
    };
    if (!merge_groups(a, first, end, a_groups) || arrays_overlap(a, out)) {
        if (op_twin(op, &sum->a_twin, a) < 0) {
            return -1;
        }
        merge_groups(&sum->a_twin, first, end, a_groups);
        sum->a_ptr = sum->a_twin.ptr;
    }
    if (!merge_groups(out, first, first + kept, out_groups)) {
        if (op_twin(op, &sum->out_twin, out) < 0) {
            return -1;
        }
        merge_groups(&sum->out_twin, first, first + kept, out_groups);
        sum->out_ptr = sum->out_twin.ptr;
    }
    SumLayout *all = &sum->all, *rest = &sum->rest;
    *all = *rest = layout_of(a_groups, out_groups);
    plan_sum(all, sum->a_ptr, (size_t)op->engine->processors * 8);
    if (all->chunks > 1) {
        sum->partial = op_temporary(op, all->outer * all->chunks * all->inner * 4);
        if (sum->partial == 0) {
            return -1;
        }
        rest->reduced = all->chunks;
        rest->a_outer = all->chunks * all->inner;
        rest->a_reduced = all->inner;
        rest->a_inner = 1;
        plan_sum(rest, sum->partial, 0);
        all->out_outer = rest->a_outer;
        all->out_chunk = rest->a_reduced;
        all->out_inner = rest->a_inner;
    }
    return 0;
}

void
op_sum(Op *op, Sum *sum)
{
    if (sum->a_twin.ptr != 0) {
        op_map(op, MAP_copy, &sum->a_twin, sum->a, NULL, 0, 0);
    }
    if (sum->all.chunks > 1) {
        queue_sum(op, &sum->all, sum->partial, sum->a_ptr);
        queue_sum(op, &sum->rest, sum->out_ptr, sum->partial);
    }
    else {
        queue_sum(op, &sum->all, sum->out_ptr, sum->a_ptr);
    }
    if (sum->out_twin.ptr != 0) {
        op_map(op, MAP_copy, sum->out, &sum->out_twin, NULL, 0, 0);
    }
}

static PyObject *
sum_t(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"a", "axis", "out", NULL};
    static const Signature signature = {"sum_t", names, 3, 3};
    PyObject *given[3] = {NULL};
    ArrayObject *a, *out;
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0 ||
        (a = array_argument(engine, "sum_t", "a", given[0])) == NULL ||
        (out = array_argument(engine, "sum_t", "out", given[2])) == NULL) {
        return NULL;
    }
    int first = 0, end = a->ndim, kept = 0;
    if (given[1] != Py_None) {
        /* As in NumPy, a scalar may be summed along its axis 0. */
        if (axis_argument("sum_t", given[1], a->ndim > 0 ? a->ndim : 1, &first) < 0) {
            return NULL;
        }
        end = a->ndim > 0 ? first + 1 : 0;
        kept = a->ndim > 0 && out->ndim == a->ndim;
    }
    Py_ssize_t shape[MAX_DIMS] = {0};
    int ndim = 0;
    for (int i = 0; i < a->ndim; i++) {
        if (i < first || i >= end || kept) {
            shape[ndim++] = i < first || i >= end ? a->shape[i] : 1;
        }
    }
    if (check_shape("sum_t", "out", out, ndim, shape) < 0) {
        return NULL;
    }
    if (out->size == 0) {
        Py_RETURN_NONE;
    }
    Op op;
    Sum sum;
    if (op_init(&op, engine, "sum_t") < 0) {
        return NULL;
    }
    if (sum_plan(&op, &sum, a, first, end, out, kept) == 0) {
        op_begin(&op, 0);
        op_sum(&op, &sum);
    }
    return op_end(&op);
}

/* ---- softmax_m ---- */

void
op_softmax(Op *op, const ArrayObject *m, const ArrayObject *out)
{
    enum { SHORT = 256, LONG = 4096 };
    size_t rows = (size_t)m->shape[0], columns = (size_t)m->shape[1];
    size_t most = (size_t)op->engine->processors * 32;
    unsigned int lanes = op_lanes(columns, 32);
    CUdeviceptr out_ptr = out->ptr, m_ptr = m->ptr;
    size_t out_row = (size_t)out->strides[0], out_column = (size_t)out->strides[1];
    size_t m_row = (size_t)m->strides[0], m_column = (size_t)m->strides[1];
    void *parameters[] = {&out_ptr,    &m_ptr, &rows,     &columns, &out_row,
                          &out_column, &m_row, &m_column, &lanes};
    if (m->size > 0 && columns <= SHORT) {
        size_t blocks = op_parts(rows, BLOCK_THREADS / lanes);
        op_launch(op, KERNEL_softmax_rows, blocks < most ? blocks : most, BLOCK_THREADS,
                  0, parameters);
    }
    else if (m->size > 0) {
        op_launch(op, KERNEL_softmax_long_rows, rows < most ? rows : most,
                  columns < LONG ? BLOCK_THREADS : 4 * BLOCK_THREADS, 0, parameters);
    }
}

static PyObject *
softmax_m(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"m", "out", NULL};
    static const Signature signature = {"softmax_m", names, 2, 2};
    PyObject *given[2] = {NULL};
    ArrayObject *m, *out;
    Op op;
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0 ||
        (m = array_argument(engine, "softmax_m", "m", given[0])) == NULL ||
        (out = array_argument(engine, "softmax_m", "out", given[1])) == NULL) {
        return NULL;
    }
    if (m->ndim != 2) {
        return raise_shape("softmax_m", "m", m, "a matrix");
    }
    if (check_shape("softmax_m", "out", out, 2, m->shape) < 0 ||
        map_check("softmax_m", "out", out, "m", m) < 0) {
        return NULL;
    }
    if (op_init(&op, engine, "softmax_m") < 0) {
        return NULL;
    }
    op_begin(&op, 0);
    op_softmax(&op, m, out);
    return op_end(&op);
}

/* ---- is_fully_finite ---- */

static PyObject *
is_fully_finite(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                PyObject *kwnames)
{
    static const char *const names[] = {"a", NULL};
    static const Signature signature = {"is_fully_finite", names, 1, 1};
    PyObject *given[1] = {NULL};
    ArrayObject *a;
    Packed packed;
    Op op;
    int found = 0;
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0 ||
        (a = array_argument(engine, "is_fully_finite", "a", given[0])) == NULL ||
        op_init(&op, engine, "is_fully_finite") < 0) {
        return NULL;
    }
    size_t n = (size_t)a->size;
    CUdeviceptr flag = op_temporary(&op, sizeof(found));
    if (flag == 0 || packed_init(&packed, &op, a) < 0) {
        return op_end(&op);
    }
    op_begin(&op, 1);
    op_fill_words(&op, flag, 0, 1);
    packed_load(&packed, &op);
    if (n > 0) {
        void *parameters[] = {&flag, &packed.ptr, &n};
        op_launch(&op, KERNEL_find_nonfinite, op_blocks(&op, n, 16), BLOCK_THREADS, 0,
                  parameters);
    }
    op_get(&op, &found, flag, sizeof(found));
    PyObject *done = op_end(&op);
    if (done == NULL) {
        return NULL;
    }
    Py_DECREF(done);
    return engine_check_fault(engine) < 0 ? NULL : PyBool_FromLong(!found);
}

PyMethodDef reduce_operations[] = {
    {"is_fully_finite", FASTCALL(is_fully_finite),
     PyDoc_STR("is_fully_finite($self, a)\n--\n\n"
               "Return whether no element of a is infinite or NaN.\n\n"
               "a is a float32 DeviceArray of any shape. Waits for the device. Raises\n"
               "IndexError if an operation before has met an index out of range.")},
    {"softmax_m", FASTCALL(softmax_m),
     PyDoc_STR("softmax_m($self, m, out)\n--\n\n"
               "Set each row of out to the softmax of the same row of m.\n\n"
               "Both are float32 DeviceArrays of one shape (M, N); out may be m. A\n"
               "row with NaN or +inf becomes NaN. Raises TypeError or ValueError\n"
               "naming the argument.")},
    {"sum_t", FASTCALL(sum_t),
     PyDoc_STR("sum_t($self, a, axis, out)\n--\n\n"
               "Set out to the sum of a along an axis, or of all its elements.\n\n"
               "Both are float32 DeviceArrays. With axis None, out has shape (). With\n"
               "an axis (negative ones count from the end), out has a's shape without\n"
               "that axis or with size 1 there. The sum over an empty axis is 0. The\n"
               "same call gives the same bits. Raises TypeError or ValueError naming\n"
               "the argument.")},
    {NULL, NULL, 0, NULL},
};
