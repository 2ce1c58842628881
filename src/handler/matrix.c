/* Matrix products by cuBLAS. */
#include "handler.h"

#include <limits.h>

/* A matrix as cuBLAS takes it: rows at a distance of `lead` elements. */
typedef struct {
    Packed packed; /* not packed where its rows lie at a distance that suits */
    CUdeviceptr ptr;
    size_t lead;
} Matrix;

/* See an array as a matrix, or set a temporary aside for it. Return 0, or -1 with an
 * error set. */
static int
as_matrix(Op *op, const ArrayObject *array, Matrix *matrix)
{
    Py_ssize_t rows = array->shape[0], columns = array->shape[1];
    int status = 0;
    *matrix = (Matrix){.packed = {.array = array, .ptr = array->ptr}};
    matrix->lead = (size_t)columns;
    if ((columns == 1 || array->strides[1] == 1) &&
        (rows == 1 || array->strides[0] >= columns)) {
        matrix->lead = (size_t)(rows == 1 ? columns : array->strides[0]);
    }
    else {
        status = packed_init(&matrix->packed, op, array);
    }
    matrix->ptr = matrix->packed.ptr;
    return status;
}

/* Check shapes; m, n and k get the sizes of the product. Return 0, or -1. */
static int
check_product(const char *operation, ArrayObject *const *arrays, int transa, int transb,
              Py_ssize_t *m, Py_ssize_t *n, Py_ssize_t *k)
{
    static const char *const names[] = {"a", "b", "out"};
    for (int i = 0; i < 3; i++) {
        if (arrays[i]->ndim != 2) {
            raise_shape(operation, names[i], arrays[i], "a matrix (two axes)");
            return -1;
        }
        for (int axis = 0; axis < 2; axis++) {
            if (arrays[i]->shape[axis] > INT_MAX ||
                arrays[i]->strides[axis] > INT_MAX) {
                raise_shape(operation, names[i], arrays[i],
                            "sizes that cuBLAS can take, up to 2147483647");
                return -1;
            }
        }
    }
    const ArrayObject *a = arrays[0], *b = arrays[1];
    *m = a->shape[transa];
    *k = a->shape[!transa];
    *n = b->shape[!transb];
    if (b->shape[transb] != *k) {
        raise_shape(operation, "b", b, "%s of length %zd, as a has %s",
                    transb ? "rows" : "columns", *k, transa ? "columns" : "rows");
        return -1;
    }
    Py_ssize_t expected[] = {*m, *n};
    if (check_shape(operation, "out", arrays[2], 2, expected) < 0 ||
        check_apart(operation, "out", arrays[2], "a", a) < 0 ||
        check_apart(operation, "out", arrays[2], "b", b) < 0) {
        return -1;
    }
    return 0;
}

static PyObject *
product(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
        const Signature *signature, float beta)
{
    const char *operation = signature->function;
    PyObject *given[5] = {NULL};
    ArrayObject *arrays[3];
    int trans[2] = {0, 0};
    Py_ssize_t m, n, k;
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(signature, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    for (int i = 0; i < 3; i++) {
        arrays[i] = array_argument(engine, operation, signature->names[i], given[i]);
        if (arrays[i] == NULL) {
            return NULL;
        }
    }
    for (int i = 0; i < 2; i++) {
        trans[i] = given[3 + i] == NULL ? 0 : PyObject_IsTrue(given[3 + i]);
        if (trans[i] < 0) {
            return NULL;
        }
    }
    if (check_product(operation, arrays, trans[0], trans[1], &m, &n, &k) < 0) {
        return NULL;
    }
    Op op;
    Matrix a, b, out;
    if (op_init(&op, engine, operation) < 0) {
        return NULL;
    }
    if (blas_ready(&op, self) == 0 && as_matrix(&op, arrays[0], &a) == 0 &&
        as_matrix(&op, arrays[1], &b) == 0 && as_matrix(&op, arrays[2], &out) == 0) {
        op_begin(&op, 0);
        if (m > 0 && n > 0 && k > 0) {
            packed_load(&a.packed, &op);
            packed_load(&b.packed, &op);
            if (beta != 0) {
                packed_load(&out.packed, &op);
            }
            op_product(&op, trans[0], trans[1], (size_t)m, (size_t)n, (size_t)k, a.ptr,
                       a.lead, b.ptr, b.lead, beta, out.ptr, out.lead);
            packed_store(&out.packed, &op);
        }
        else if (beta == 0) {
            op_map(&op, MAP_fill, arrays[2], NULL, NULL, 0, 0);
        }
    }
    return op_end(&op);
}

static const char *const product_names[] = {"a", "b", "out", "transa", "transb", NULL};

static PyObject *
dot_mm(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const Signature signature = {"dot_mm", product_names, 3, 5};
    return product(self, args, nargs, kwnames, &signature, 0);
}

static PyObject *
dot_add_mm(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const Signature signature = {"dot_add_mm", product_names, 3, 5};
    return product(self, args, nargs, kwnames, &signature, 1);
}

PyMethodDef matrix_operations[] = {
    {"dot_mm", FASTCALL(dot_mm),
     PyDoc_STR("dot_mm($self, a, b, out, transa=False, transb=False)\n--\n\n"
               "Set out to the matrix product of a (M, K) and b (K, N).\n\n"
               "With transa or transb a factor is taken transposed. float32 matrices; "
               "out must\nnot share memory with a or b. Raises ValueError naming the "
               "argument otherwise.")},
    {"dot_add_mm", FASTCALL(dot_add_mm),
     PyDoc_STR("dot_add_mm($self, a, b, out, transa=False, transb=False)\n--\n\n"
               "Add the matrix product of a (M, K) and b (K, N) to out; as dot_mm "
               "otherwise.")},
    {NULL, NULL, 0, NULL},
};
