/* DeviceArray's +, -, * and / with broadcasting, and ** by a number, for the Python
 * code around networks: brainstorm's value modifiers write so, as NumPy and PyCUDA take
 * it. */
#include "array.h"

/* A one-element array that holds a number. NULL with an error set. */
static ArrayObject *
number_array(EngineObject *engine, double value)
{
    float rounded = (float)value;
    unsigned int word;
    ArrayObject *array = array_new(engine, 0, NULL, 0);
    Op op;
    if (array == NULL || op_init(&op, engine, "DeviceArray") < 0) {
        Py_XDECREF(array);
        return NULL;
    }
    memcpy(&word, &rounded, sizeof(word));
    op_begin(&op, 0);
    op_fill_words(&op, array->ptr, word, 1);
    PyObject *done = op_end(&op);
    if (done == NULL) {
        Py_CLEAR(array);
    }
    Py_XDECREF(done);
    return array;
}

/* The operand as an array on the engine: itself or a number; new reference. NULL with
 * an error set, or without one if it is neither. */
static ArrayObject *
operand(EngineObject *engine, PyObject *object)
{
    if (Py_IS_TYPE(object, engine->state->DeviceArray_type)) {
        return (ArrayObject *)Py_XNewRef(
            (PyObject *)array_argument(engine, "DeviceArray", "an operand", object));
    }
    if (!PyFloat_Check(object) && !PyLong_Check(object) &&
        !PyArray_IsScalar(object, Generic)) {
        return NULL;
    }
    double value;
    if (number_argument("DeviceArray", "an operand", object, &value) < 0) {
        return NULL;
    }
    return number_array(engine, value);
}

/* The shape that two arrays broadcast to. Return its length, or -1 with ValueError set.
 */
static int
broadcast_shape(const ArrayObject *a, const ArrayObject *b, Py_ssize_t *shape)
{
    int ndim = a->ndim > b->ndim ? a->ndim : b->ndim;
    for (int i = 1; i <= ndim; i++) {
        Py_ssize_t of_a = i <= a->ndim ? a->shape[a->ndim - i] : 1;
        Py_ssize_t of_b = i <= b->ndim ? b->shape[b->ndim - i] : 1;
        if (of_a != of_b && of_a != 1 && of_b != 1) {
            PyObject *other = shape_of(a);
            if (other != NULL) {
                raise_shape("DeviceArray", "an operand", b, "what broadcasts with %R",
                            other);
                Py_DECREF(other);
            }
            return -1;
        }
        shape[ndim - i] = of_a == 1 ? of_b : of_a;
    }
    return ndim;
}

/* Compute into `out`, or into a new array if that is NULL. */
static PyObject *
combine(PyObject *left, PyObject *right, Map map, ArrayObject *out)
{
    /* One of them is ours, or Python had not called. */
    PyObject *own =
        strcmp(Py_TYPE(left)->tp_name, DeviceArray_spec.name) == 0 ? left : right;
    EngineObject *engine = ((ArrayObject *)own)->engine;
    PyObject *result = NULL;
    Py_ssize_t shape[MAX_DIMS];
    Op op;
    ArrayObject *a = operand(engine, left);
    ArrayObject *b = a == NULL ? NULL : operand(engine, right);
    if (a == NULL || b == NULL) {
        if (!PyErr_Occurred()) {
            result = Py_NewRef(Py_NotImplemented);
        }
        goto done;
    }
    int ndim = broadcast_shape(a, b, shape);
    if (ndim < 0) {
        goto done;
    }
    out = out != NULL ? (ArrayObject *)Py_NewRef((PyObject *)out)
                      : array_new(engine, ndim, shape, 0);
    if (out != NULL &&
        map_check("DeviceArray", "the result", out, "an operand", a) == 0 &&
        map_check("DeviceArray", "the result", out, "an operand", b) == 0 &&
        op_init(&op, engine, "DeviceArray") == 0) {
        op_begin(&op, 0);
        op_map(&op, map, out, a, b, 0, 0);
        PyObject *finished = op_end(&op);
        if (finished != NULL) {
            Py_DECREF(finished);
            result = Py_NewRef((PyObject *)out);
        }
    }
    Py_XDECREF(out);
done:
    Py_XDECREF(a);
    Py_XDECREF(b);
    return result;
}

#define OPERATOR(name, map) \
    PyObject *Array_##name(PyObject *left, PyObject *right) \
    { \
        return combine(left, right, MAP_##map, NULL); \
    } \
    PyObject *Array_inplace_##name(PyObject *left, PyObject *right) \
    { \
        return combine(left, right, MAP_##map, (ArrayObject *)left); \
    }

OPERATOR(add, add)
OPERATOR(subtract, subtract)
OPERATOR(multiply, mult)
OPERATOR(divide, divide)

PyObject *
Array_power(PyObject *left, PyObject *right, PyObject *modulus)
{
    if (strcmp(Py_TYPE(left)->tp_name, DeviceArray_spec.name) != 0 ||
        modulus != Py_None ||
        !(PyFloat_Check(right) || PyLong_Check(right) ||
          PyArray_IsScalar(right, Generic))) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    EngineObject *engine = ((ArrayObject *)left)->engine;
    ArrayObject *base = array_argument(engine, "DeviceArray", "the base", left);
    double exponent;
    Op op;
    if (base == NULL ||
        number_argument("DeviceArray", "the exponent", right, &exponent) < 0) {
        return NULL;
    }
    ArrayObject *out = array_new(engine, base->ndim, base->shape, 0);
    if (out == NULL || op_init(&op, engine, "DeviceArray") < 0) {
        Py_XDECREF(out);
        return NULL;
    }
    op_begin(&op, 0);
    /* A square root is rounded right, as NumPy's is. */
    op_map(&op, exponent == 0.5 ? MAP_sqrt : MAP_power, out, base, NULL,
           (float)exponent, 0);
    PyObject *done = op_end(&op);
    if (done == NULL) {
        Py_CLEAR(out);
    }
    Py_XDECREF(done);
    return (PyObject *)out;
}
