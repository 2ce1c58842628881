/* Operations on rows: merging and splitting along the last axis, one-hot rows, the
 * choice of one element a row, and broadcasting along an axis. */
#include "handler.h"

/* ---- merge_tt, split_add_tt ---- */

/* 1 if rows can be moved in pieces of four elements. */
static int
is_in_fours(const Rows *rows)
{
    return rows->ptr % 16 == 0 && rows->columns % 4 == 0 && rows->pitch % 4 == 0;
}

/* Return 0 if `part` has as many rows as `whole`, and the columns of `part` and `other`
 * make up those of whole; else -1 with ValueError set. All have an axis or more. */
static int
check_part(const char *operation, const char *name, const ArrayObject *part,
           const ArrayObject *other, const char *whole_name, const ArrayObject *whole)
{
    Axis part_rows, whole_rows;
    axes_merge(part, 0, part->ndim - 1, &part_rows);
    axes_merge(whole, 0, whole->ndim - 1, &whole_rows);
    Py_ssize_t columns = whole->shape[whole->ndim - 1];
    Py_ssize_t left = columns - other->shape[other->ndim - 1];
    if (part_rows.size == whole_rows.size && part->shape[part->ndim - 1] == left) {
        return 0;
    }
    PyObject *shape = shape_of(whole);
    if (shape != NULL) {
        raise_shape(operation, name, part,
                    "%zd rows, and as many columns as make up %s of shape %R",
                    (Py_ssize_t)whole_rows.size, whole_name, shape);
        Py_DECREF(shape);
    }
    return -1;
}

/* Read the arguments of merge_tt and split_add_tt: two parts and the whole, at the
 * given positions. Return their engine, or NULL with an error set. */
static EngineObject *
parts_arguments(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                PyObject *kwnames, const Signature *signature, const int *positions,
                ArrayObject **parts)
{
    PyObject *given[3] = {NULL};
    const char *operation = signature->function, *names[3];
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(signature, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    for (int i = 0; i < 3; i++) {
        names[i] = signature->names[positions[i]];
        parts[i] = array_argument(engine, operation, names[i], given[positions[i]]);
        if (parts[i] == NULL) {
            return NULL;
        }
        if (parts[i]->ndim == 0) {
            raise_shape(operation, names[i], parts[i], "at least one axis");
            return NULL;
        }
    }
    for (int i = 0; i < 2; i++) {
        if (check_part(operation, names[i], parts[i], parts[1 - i], names[2],
                       parts[2]) < 0 ||
            check_apart(operation, names[i], parts[i], names[2], parts[2]) < 0) {
            return NULL;
        }
    }
    return engine;
}

static PyObject *
merge_tt(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"a", "b", "out", NULL};
    static const Signature signature = {"merge_tt", names, 3, 3};
    static const int positions[] = {0, 1, 2};
    ArrayObject *parts[3];
    Rows a, b, out;
    Op op;
    EngineObject *engine =
        parts_arguments(self, args, nargs, kwnames, &signature, positions, parts);
    if (engine == NULL || op_init(&op, engine, "merge_tt") < 0) {
        return NULL;
    }
    if (op_rows(&op, &a, parts[0]) < 0 || op_rows(&op, &b, parts[1]) < 0 ||
        op_rows(&op, &out, parts[2]) < 0) {
        return op_end(&op);
    }
    op_begin(&op, 0);
    op_rows_load(&op, &a);
    op_rows_load(&op, &b);
    if (parts[2]->size > 0) {
        int fours = is_in_fours(&a) && is_in_fours(&b) && is_in_fours(&out);
        Tiling t = op_tile(&op, out.rows, fours ? out.columns / 4 : out.columns);
        void *parameters[] = {&out.ptr,   &a.ptr,     &b.ptr,     &out.rows,
                              &a.columns, &b.columns, &out.pitch, &a.pitch,
                              &b.pitch,   &t.lanes,   &fours};
        op_launch3(&op, KERNEL_merge_rows, t.x, t.y, 1, BLOCK_THREADS, 0, parameters);
    }
    op_rows_store(&op, &out);
    return op_end(&op);
}

static void
queue_split_add(Op *op, const Rows *a, const Rows *b, const Rows *x)
{
    CUdeviceptr a_ptr = a->ptr, b_ptr = b->ptr, x_ptr = x->ptr;
    size_t rows = x->rows, a_columns = a->columns, b_columns = b->columns;
    size_t a_pitch = a->pitch, b_pitch = b->pitch, x_pitch = x->pitch;
    size_t columns = a_columns + b_columns;
    if (rows == 0 || columns == 0) {
        return;
    }
    int fours = is_in_fours(a) && is_in_fours(b) && is_in_fours(x);
    Tiling t = op_tile(op, rows, fours ? columns / 4 : columns);
    void *parameters[] = {&a_ptr,     &b_ptr,     &x_ptr,   &rows,
                          &a_columns, &b_columns, &a_pitch, &b_pitch,
                          &x_pitch,   &t.lanes,   &fours};
    op_launch3(op, KERNEL_split_add_rows, t.x, t.y, 1, BLOCK_THREADS, 0, parameters);
}

static PyObject *
split_add_tt(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"x", "out_a", "out_b", NULL};
    static const Signature signature = {"split_add_tt", names, 3, 3};
    static const int positions[] = {1, 2, 0};
    ArrayObject *parts[3];
    Rows a, b, x;
    Op op;
    EngineObject *engine =
        parts_arguments(self, args, nargs, kwnames, &signature, positions, parts);
    if (engine == NULL || op_init(&op, engine, "split_add_tt") < 0) {
        return NULL;
    }
    if (op_rows(&op, &a, parts[0]) < 0 || op_rows(&op, &b, parts[1]) < 0 ||
        op_rows(&op, &x, parts[2]) < 0) {
        return op_end(&op);
    }
    op_begin(&op, 0);
    op_rows_load(&op, &x);
    op_rows_load(&op, &a);
    if (arrays_overlap(parts[0], parts[1])) {
        /* Where one array feeds both inputs of a layer, its deltas get both parts. */
        Rows nothing = b, rest = x;
        nothing.columns = 0;
        rest.ptr += 4 * a.columns;
        queue_split_add(&op, &a, &nothing, &x);
        op_rows_store(&op, &a);
        op_rows_load(&op, &b);
        queue_split_add(&op, &b, &nothing, &rest);
    }
    else {
        op_rows_load(&op, &b);
        queue_split_add(&op, &a, &b, &x);
        op_rows_store(&op, &a);
    }
    op_rows_store(&op, &b);
    return op_end(&op);
}

/* ---- binarize_v, index_m_by_v ---- */

/* Return 0 if v has one element a row of a matrix that has columns; else -1 with
 * ValueError or, since no index is in range, IndexError set. */
static int
check_indices(const char *operation, const ArrayObject *v, const char *matrix_name,
              const ArrayObject *matrix)
{
    if (matrix->ndim != 2) {
        raise_shape(operation, matrix_name, matrix, "a matrix");
        return -1;
    }
    if (v->ndim == 0 || v->ndim > 2 || v->size != matrix->shape[0] ||
        (v->ndim == 2 && v->shape[1] != 1)) {
        raise_shape(operation, "v", v, "(%zd, 1), one index for each row of %s",
                    matrix->shape[0], matrix_name);
        return -1;
    }
    if (v->size > 0 && matrix->shape[1] == 0) {
        PyErr_Format(PyExc_IndexError, "%s: %s has no columns", operation, matrix_name);
        return -1;
    }
    return 0;
}

static PyObject *
binarize_v(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"v", "out", NULL};
    static const Signature signature = {"binarize_v", names, 2, 2};
    PyObject *given[2] = {NULL};
    ArrayObject *v, *out;
    Op op;
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0 ||
        (v = array_argument(engine, "binarize_v", "v", given[0])) == NULL ||
        (out = array_argument(engine, "binarize_v", "out", given[1])) == NULL ||
        check_indices("binarize_v", v, "out", out) < 0 ||
        check_apart("binarize_v", "out", out, "v", v) < 0 ||
        op_init(&op, engine, "binarize_v") < 0) {
        return NULL;
    }
    op_begin(&op, 0);
    if (out->size > 0) {
        size_t rows = (size_t)out->shape[0], columns = (size_t)out->shape[1];
        size_t out_row = (size_t)out->strides[0], out_column = (size_t)out->strides[1];
        size_t v_stride = (size_t)v->strides[0];
        CUdeviceptr out_ptr = out->ptr, v_ptr = v->ptr;
        int *fault = (int *)engine->fault, number = FAULT_BINARIZE_V;
        Tiling t = op_tile(&op, rows, columns);
        void *parameters[] = {&out_ptr,    &v_ptr,    &rows,    &columns, &out_row,
                              &out_column, &v_stride, &t.lanes, &fault,   &number};
        op_launch3(&op, KERNEL_binarize_rows, t.x, t.y, 1, BLOCK_THREADS, 0,
                   parameters);
    }
    return op_end(&op);
}

static PyObject *
index_m_by_v(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"m", "v", "out", NULL};
    static const Signature signature = {"index_m_by_v", names, 3, 3};
    const char *const name = signature.function;
    PyObject *given[3] = {NULL};
    ArrayObject *m, *v, *out;
    Op op;
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0 ||
        (m = array_argument(engine, name, "m", given[0])) == NULL ||
        (v = array_argument(engine, name, "v", given[1])) == NULL ||
        (out = array_argument(engine, name, "out", given[2])) == NULL ||
        check_indices(name, v, "m", m) < 0) {
        return NULL;
    }
    Py_ssize_t shape[] = {m->shape[0], 1};
    if (check_shape(name, "out", out, 2, shape) < 0 ||
        check_apart(name, "out", out, "m", m) < 0 ||
        check_apart(name, "out", out, "v", v) < 0 || op_init(&op, engine, name) < 0) {
        return NULL;
    }
    op_begin(&op, 0);
    if (out->size > 0) {
        size_t rows = (size_t)m->shape[0], columns = (size_t)m->shape[1];
        size_t m_row = (size_t)m->strides[0], m_column = (size_t)m->strides[1];
        size_t out_stride = (size_t)out->strides[0], v_stride = (size_t)v->strides[0];
        CUdeviceptr out_ptr = out->ptr, m_ptr = m->ptr, v_ptr = v->ptr;
        int *fault = (int *)engine->fault, number = FAULT_INDEX_M_BY_V;
        void *parameters[] = {&out_ptr,  &m_ptr,      &v_ptr, &rows,
                              &columns,  &out_stride, &m_row, &m_column,
                              &v_stride, &fault,      &number};
        op_launch(&op, KERNEL_index_rows, op_blocks(&op, rows, 1), BLOCK_THREADS, 0,
                  parameters);
    }
    return op_end(&op);
}

/* ---- broadcast_t ---- */

static PyObject *
broadcast_t(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"a", "axis", "out", NULL};
    static const Signature signature = {"broadcast_t", names, 3, 3};
    PyObject *given[3] = {NULL};
    ArrayObject *a, *out;
    Py_ssize_t shape[MAX_DIMS];
    int axis;
    Op op;
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0 ||
        (a = array_argument(engine, "broadcast_t", "a", given[0])) == NULL ||
        (out = array_argument(engine, "broadcast_t", "out", given[2])) == NULL ||
        axis_argument("broadcast_t", given[1], out->ndim, &axis) < 0) {
        return NULL;
    }
    memcpy(shape, out->shape, sizeof(shape));
    shape[axis] = 1;
    if (check_shape("broadcast_t", "a", a, out->ndim, shape) < 0 ||
        map_check("broadcast_t", "out", out, "a", a) < 0 ||
        op_init(&op, engine, "broadcast_t") < 0) {
        return NULL;
    }
    op_begin(&op, 0);
    op_map(&op, MAP_copy, out, a, NULL, 0, 0);
    return op_end(&op);
}

#define INDICES \
    "What is behind the point of an index is cut off, and -1 is the last column.\n" \
    "An index out of range leaves its row as it is; as only the device sees it,\n" \
    "the next call that brings values to the host raises IndexError."
#define RAISES "Raises TypeError or ValueError naming the argument."

PyMethodDef row_operations[] = {
    {"binarize_v", FASTCALL(binarize_v),
     PyDoc_STR("binarize_v($self, v, out)\n--\n\n"
               "Make row i of out one-hot: 1 in column v[i, 0], else 0.\n\n"
               "Both are float32 DeviceArrays: v of shape (M, 1) or (M,), and out\n"
               "(M, N).\n" INDICES "\n" RAISES)},
    {"broadcast_t", FASTCALL(broadcast_t),
     PyDoc_STR("broadcast_t($self, a, axis, out)\n--\n\n"
               "Set out to a, repeated along an axis.\n\n"
               "Both are float32 DeviceArrays; a has out's shape, but size 1 along\n"
               "the axis (negative ones count from the end).\n" RAISES)},
    {"index_m_by_v", FASTCALL(index_m_by_v),
     PyDoc_STR("index_m_by_v($self, m, v, out)\n--\n\n"
               "Set out[i, 0] to m[i, v[i, 0]].\n\n"
               "All are float32 DeviceArrays: m of shape (M, N), v (M, 1) or (M,),\n"
               "out (M, 1), apart from the others.\n" INDICES "\n" RAISES)},
    {"merge_tt", FASTCALL(merge_tt),
     PyDoc_STR("merge_tt($self, a, b, out)\n--\n\n"
               "Lay a and b side by side along the last axis of out.\n\n"
               "All are float32 DeviceArrays with as many rows (the product of all\n"
               "axes but the last), and out has the columns of both.\n" RAISES)},
    {"split_add_tt", FASTCALL(split_add_tt),
     PyDoc_STR("split_add_tt($self, x, out_a, out_b)\n--\n\n"
               "Split x along the last axis; add the parts to out_a and out_b.\n\n"
               "All are float32 DeviceArrays with as many rows (the product of all\n"
               "axes but the last), and x has the columns of both. out_a and out_b\n"
               "may be one array.\n" RAISES)},
    {NULL, NULL, 0, NULL},
};
