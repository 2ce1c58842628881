/* How operations see the axes of an array: groups of them merged into one, as rows at a
 * pitch, or by way of a contiguous twin where the strides allow neither. */
#include "handler.h"

int
axis_argument(const char *operation, PyObject *object, int ndim, int *axis)
{
    Py_ssize_t value = PyNumber_AsSsize_t(object, PyExc_IndexError);
    if (value == -1 && PyErr_Occurred()) {
        if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Format(PyExc_TypeError, "%s: axis must be an integer, got %.100s",
                         operation, Py_TYPE(object)->tp_name);
            return -1;
        }
        if (!PyErr_ExceptionMatches(PyExc_IndexError)) {
            return -1; /* of the object's own code */
        }
        PyErr_Clear();
        value = ndim;
    }
    if (value < -ndim || value >= ndim) {
        PyErr_Format(PyExc_ValueError, "%s: axis %S is out of bounds for %d axes",
                     operation, object, ndim);
        return -1;
    }
    *axis = (int)(value < 0 ? value + ndim : value);
    return 0;
}

int
axes_merge(const ArrayObject *array, int first, int end, Axis *merged)
{
    int is_one = 1;
    *merged = (Axis){.size = 1, .stride = 0};
    for (int i = end - 1; i >= first; i--) {
        size_t size = (size_t)array->shape[i], stride = (size_t)array->strides[i];
        if (size == 1) {
            continue;
        }
        if (merged->size == 1) {
            merged->stride = stride;
        }
        else if (stride != merged->size * merged->stride) {
            is_one = 0;
        }
        merged->size *= size;
    }
    return is_one || array->size == 0;
}

int
axes_matrix(const ArrayObject *array, int split, ArrayObject *matrix)
{
    Axis rows, columns;
    int fits = axes_merge(array, 0, split, &rows);
    fits &= axes_merge(array, split, array->ndim, &columns) &&
            (columns.size <= 1 || columns.stride == 1);
    size_t pitch = rows.size > 1 ? rows.stride : columns.size;
    *matrix = (ArrayObject){
        .ptr = array->ptr,
        .ndim = 2,
        .size = array->size,
        .shape = {(Py_ssize_t)rows.size, (Py_ssize_t)columns.size},
        .strides = {(Py_ssize_t)pitch, 1},
    };
    return fits && array->size > 0 && pitch >= columns.size;
}

int
op_twin(Op *op, ArrayObject *twin, const ArrayObject *array)
{
    Py_ssize_t stride = 1;
    *twin = (ArrayObject){.ndim = array->ndim, .size = array->size};
    for (int i = array->ndim - 1; i >= 0; i--) {
        twin->shape[i] = array->shape[i];
        twin->strides[i] = stride;
        stride *= array->shape[i];
    }
    twin->ptr = op_temporary(op, (size_t)array->size * 4);
    return twin->ptr != 0 ? 0 : -1;
}

int
packed_init(Packed *packed, Op *op, const ArrayObject *array)
{
    *packed = (Packed){.array = array};
    if (array->size == 0) {
        return 0;
    }
    if (array_is_contiguous(array)) {
        packed->ptr = array->ptr;
        return 0;
    }
    int status = op_twin(op, &packed->twin, array);
    packed->ptr = packed->twin.ptr;
    return status;
}

void
packed_load(const Packed *packed, Op *op)
{
    if (packed->twin.ptr != 0) {
        op_map(op, MAP_copy, &packed->twin, packed->array, NULL, 0, 0);
    }
}

void
packed_store(const Packed *packed, Op *op)
{
    if (packed->twin.ptr != 0) {
        op_map(op, MAP_copy, packed->array, &packed->twin, NULL, 0, 0);
    }
}

int
op_rows(Op *op, Rows *rows, const ArrayObject *array)
{
    const int last = array->ndim - 1;
    Axis leading, trailing;
    int fits = axes_merge(array, 0, last, &leading);
    fits &= axes_merge(array, last, array->ndim, &trailing);
    fits &= trailing.size <= 1 || trailing.stride == 1;
    *rows = (Rows){.array = array,
                   .rows = leading.size,
                   .columns = trailing.size,
                   .pitch = leading.stride,
                   .ptr = array->ptr};
    if (fits || array->size == 0) {
        return 0;
    }
    rows->is_twin = 1;
    rows->pitch = rows->columns;
    int status = op_twin(op, &rows->twin, array);
    rows->ptr = rows->twin.ptr;
    return status;
}

void
op_rows_load(Op *op, const Rows *rows)
{
    if (rows->is_twin) {
        op_map(op, MAP_copy, &rows->twin, rows->array, NULL, 0, 0);
    }
}

void
op_rows_store(Op *op, const Rows *rows)
{
    if (rows->is_twin) {
        op_map(op, MAP_copy, rows->array, &rows->twin, NULL, 0, 0);
    }
}
