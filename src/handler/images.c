/* Arguments, layouts and contiguous copies for the operations on images. */
#include "images.h"

ArrayObject *
images_argument(EngineObject *engine, const char *operation, const char *name,
                PyObject *object)
{
    ArrayObject *array = array_argument(engine, operation, name, object);
    if (array == NULL) {
        return NULL;
    }
    if (array->ndim != 4) {
        raise_shape(operation, name, array,
                    "four dimensions: (images, height, width, channels)");
        return NULL;
    }
    if (array->size > 0 && array->size / array->shape[0] > IMAGE_MOST) {
        raise_shape(operation, name, array, "at most %d elements in an image",
                    IMAGE_MOST);
        return NULL;
    }
    return array;
}

/* Read an integer in [lowest, highest]; floats are refused, whole ones too. */
static int
read_int(const char *operation, const char *name, PyObject *object, int lowest,
         int highest, int *value)
{
    if (!PyIndex_Check(object)) {
        PyErr_Format(PyExc_TypeError, "%s: %s must be an integer, got %.100s",
                     operation, name, Py_TYPE(object)->tp_name);
        return -1;
    }
    PyObject *number = PyNumber_Index(object);
    if (number == NULL) {
        return -1;
    }
    int status = 0, overflow = 0;
    long read = PyLong_AsLongAndOverflow(number, &overflow);
    if (overflow || read < lowest || read > highest) {
        PyErr_Format(PyExc_ValueError, "%s: %s must be between %d and %d, got %S",
                     operation, name, lowest, highest, number);
        status = -1;
    }
    *value = (int)read;
    Py_DECREF(number);
    return status;
}

int
padding_argument(const char *operation, PyObject *object, int32_t *padding)
{
    int value;
    if (read_int(operation, "padding", object, -IMAGE_REACH, IMAGE_REACH, &value) < 0) {
        return -1;
    }
    *padding = value;
    return 0;
}

int
pair_argument(const char *operation, const char *name, PyObject *object,
              uint32_t pair[2])
{
    if (!PyTuple_Check(object) && !PyList_Check(object)) {
        PyErr_Format(PyExc_TypeError,
                     "%s: %s must be a tuple of two integers, got %.100s", operation,
                     name, Py_TYPE(object)->tp_name);
        return -1;
    }
    PyObject *items = PySequence_Tuple(object);
    if (items == NULL) {
        return -1;
    }
    int status = 0;
    if (PyTuple_GET_SIZE(items) != 2) {
        PyErr_Format(PyExc_ValueError,
                     "%s: %s must hold two integers (vertical, horizontal), got %R",
                     operation, name, object);
        status = -1;
    }
    for (int i = 0; i < 2 && status == 0; i++) {
        char item_name[64];
        int value = 0;
        PyOS_snprintf(item_name, sizeof(item_name), "%s[%d]", name, i);
        status = read_int(operation, item_name, PyTuple_GET_ITEM(items, i), 1,
                          IMAGE_REACH, &value);
        pair[i] = (uint32_t)value;
    }
    Py_DECREF(items);
    return status;
}

int
check_window(const char *operation, const char *name, const ArrayObject *array,
             Py_ssize_t height, Py_ssize_t width)
{
    if (height >= 1 && height <= IMAGE_REACH && width >= 1 && width <= IMAGE_REACH) {
        return 0;
    }
    raise_shape(operation, name, array, "windows of 1 to %d pixels", IMAGE_REACH);
    return -1;
}

/* A size as a divisor: nothing is ever divided by 0, as nothing is there then. */
static Divisor
by(uint32_t size)
{
    return divisor_of(size > 0 ? size : 1);
}

void
finish_windows(WindowLayout *layout, int lanes)
{
    layout->vectors = layout->channels / (uint32_t)lanes;
    layout->by_vectors = by(layout->vectors);
    layout->by_channels = by(layout->channels);
    layout->by_in_h = by(layout->in_h);
    layout->by_in_w = by(layout->in_w);
    layout->by_out_h = by(layout->out_h);
    layout->by_out_w = by(layout->out_w);
    layout->by_stride_h = by(layout->stride_h);
    layout->by_stride_w = by(layout->stride_w);
}
