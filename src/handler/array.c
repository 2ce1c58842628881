/* DeviceArray: float32 or int32 elements on the device, with shape and strides.
 *
 * An array owns a block of its engine's pool, or it is a view: of another array, whose
 * root it holds as base, or of foreign memory. Strides are never negative. Not tracked
 * by the garbage collector: an array holds its engine and its base, and neither holds
 * arrays. */
#include "array.h"

ArrayObject *
array_bare(EngineObject *engine, int ndim, const Py_ssize_t *shape, int is_int)
{
    PyTypeObject *type = engine->state->DeviceArray_type;
    Py_ssize_t size = 1;
    if (ndim > MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "a DeviceArray has at most %d axes, not %d",
                     MAX_DIMS, ndim);
        return NULL;
    }
    for (int i = 0; i < ndim; i++) {
        if (shape[i] < 0) {
            PyErr_Format(PyExc_ValueError, "axis %d of a shape is negative: %zd", i,
                         shape[i]);
            return NULL;
        }
    }
    int is_empty = 0;
    for (int i = 0; i < ndim; i++) {
        is_empty |= shape[i] == 0;
    }
    for (int i = 0; i < ndim && !is_empty; i++) {
        if (size > PY_SSIZE_T_MAX / 4 / shape[i]) {
            PyErr_SetString(PyExc_MemoryError,
                            "the shape has more elements than any memory");
            return NULL;
        }
        size *= shape[i];
    }
    ArrayObject *self = (ArrayObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->engine = (EngineObject *)Py_NewRef((PyObject *)engine);
    self->is_int = is_int;
    self->ndim = ndim;
    self->size = is_empty ? 0 : size;
    Py_ssize_t stride = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        self->shape[i] = shape[i];
        self->strides[i] = stride;
        stride *= shape[i] > 0 ? shape[i] : 1;
    }
    return self;
}

ArrayObject *
array_new(EngineObject *engine, int ndim, const Py_ssize_t *shape, int is_int)
{
    ArrayObject *self = array_bare(engine, ndim, shape, is_int);
    if (self != NULL && self->size > 0) {
        self->block = pool_take(engine, (size_t)self->size * 4);
        if (self->block == NULL) {
            Py_CLEAR(self);
        }
        else {
            self->ptr = self->block->ptr;
        }
    }
    return self;
}

/* A new view of the same memory, to be given shape and strides. NULL with an error. */
static ArrayObject *
view_of(ArrayObject *self)
{
    Py_ssize_t none = 0;
    ArrayObject *view = array_bare(self->engine, 1, &none, self->is_int);
    if (view != NULL) {
        int is_view =
            self->base != NULL && Py_IS_TYPE(self->base, Py_TYPE((PyObject *)self));
        view->base = Py_NewRef(is_view ? self->base : (PyObject *)self);
        view->ptr = self->ptr;
    }
    return view;
}

ArrayObject *
array_root(ArrayObject *self)
{
    return self->base != NULL && Py_IS_TYPE(self->base, Py_TYPE((PyObject *)self))
               ? (ArrayObject *)self->base
               : self;
}

int
array_is_contiguous(const ArrayObject *self)
{
    Py_ssize_t stride = 1;
    if (self->size == 0) {
        return 1;
    }
    for (int i = self->ndim - 1; i >= 0; i--) {
        if (self->shape[i] != 1 && self->strides[i] != stride) {
            return 0;
        }
        stride *= self->shape[i];
    }
    return 1;
}

static void
Array_dealloc(PyObject *op)
{
    ArrayObject *self = (ArrayObject *)op;
    PyTypeObject *type = Py_TYPE(op);
    SavedError saved;
    save_error(&saved);
    if (self->block != NULL) {
        if (self->is_exported) {
            pool_free_for_good(self->engine, self->block);
        }
        else {
            pool_give(self->engine, self->block);
        }
    }
    if (self->is_foreign && driver_usable() &&
        engine_synchronize(self->engine, "DeviceArray") < 0) {
        PyErr_WriteUnraisable((PyObject *)type);
    }
    Py_XDECREF(self->base);
    Py_XDECREF(self->shape_tuple);
    Py_XDECREF(self->engine);
    restore_error(&saved);
    type->tp_free(op);
    Py_DECREF(type);
}

/* ---- Indexing and reshaping ---- */

/* Apply one integer or slice to axis `from` of self; the view gets one axis less or the
 * same number. Return 0, or -1 with an error set. */
static int
index_axis(ArrayObject *self, ArrayObject *view, PyObject *key, int from)
{
    Py_ssize_t size = self->shape[from], stride = self->strides[from];
    if (PySlice_Check(key)) {
        Py_ssize_t start, stop, step;
        if (PySlice_Unpack(key, &start, &stop, &step) < 0) {
            return -1;
        }
        if (step < 1) {
            PyErr_Format(PyExc_ValueError,
                         "DeviceArray: the step of a slice must be positive, not %zd",
                         step);
            return -1;
        }
        Py_ssize_t length = PySlice_AdjustIndices(size, &start, &stop, step);
        view->shape[view->ndim] = length;
        view->strides[view->ndim] = stride * step;
        view->ndim++;
        view->ptr += length > 0 ? 4 * (CUdeviceptr)(start * stride) : 0;
        return 0;
    }
    if (!PyIndex_Check(key) || PyBool_Check(key)) {
        PyErr_Format(PyExc_TypeError,
                     "DeviceArray: an index must be an integer, a slice or ..., not "
                     "%.100s",
                     Py_TYPE(key)->tp_name);
        return -1;
    }
    Py_ssize_t index = PyNumber_AsSsize_t(key, PyExc_IndexError);
    if (index == -1 && PyErr_Occurred()) {
        return -1;
    }
    if (index < -size || index >= size) {
        PyErr_Format(PyExc_IndexError,
                     "DeviceArray: index %zd is out of bounds for axis %d of size %zd",
                     index, from, size);
        return -1;
    }
    view->ptr += 4 * (CUdeviceptr)((index < 0 ? index + size : index) * stride);
    return 0;
}

static void
count_elements(ArrayObject *self)
{
    self->size = 1;
    for (int i = 0; i < self->ndim; i++) {
        self->size *= self->shape[i];
    }
}

static PyObject *
Array_subscript(PyObject *op, PyObject *key)
{
    ArrayObject *self = (ArrayObject *)op;
    PyObject *single[1] = {key};
    PyObject **keys = single;
    Py_ssize_t count = 1, given = 0;
    int ellipses = 0, axis = 0;
    if (PyTuple_Check(key)) {
        keys = ((PyTupleObject *)key)->ob_item;
        count = PyTuple_GET_SIZE(key);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        ellipses += keys[i] == Py_Ellipsis;
        given += keys[i] != Py_Ellipsis;
    }
    if (given > self->ndim || ellipses > 1) {
        PyErr_Format(PyExc_IndexError,
                     "DeviceArray: %zd indices and %d ellipses for %d axes", given,
                     ellipses, self->ndim);
        return NULL;
    }
    ArrayObject *view = view_of(self);
    if (view == NULL) {
        return NULL;
    }
    view->ndim = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        int skip = keys[i] == Py_Ellipsis ? self->ndim - (int)given : 0;
        for (int k = 0; k < skip; k++, axis++) {
            view->shape[view->ndim] = self->shape[axis];
            view->strides[view->ndim++] = self->strides[axis];
        }
        if (keys[i] != Py_Ellipsis && index_axis(self, view, keys[i], axis++) < 0) {
            Py_DECREF(view);
            return NULL;
        }
    }
    for (; axis < self->ndim; axis++) {
        view->shape[view->ndim] = self->shape[axis];
        view->strides[view->ndim++] = self->strides[axis];
    }
    count_elements(view);
    return (PyObject *)view;
}

/* Find strides that give the elements of self in another shape without a copy. Axes of
 * both shapes are matched in groups of equal size; within a group the old axes must
 * step like one. Return 0, or -1 if there are none. */
static int
restride(const ArrayObject *self, int ndim, const Py_ssize_t *shape,
         Py_ssize_t *strides)
{
    int old = 0, new = 0;
    Py_ssize_t filler = 1;
    if (self->size == 0) {
        for (int i = ndim - 1; i >= 0; i--) {
            strides[i] = filler;
            filler *= shape[i] > 0 ? shape[i] : 1;
        }
        return 0;
    }
    while (old < self->ndim || new < ndim) {
        while (old < self->ndim && self->shape[old] == 1) {
            old++;
        }
        int old_end = old, new_end = new;
        Py_ssize_t old_size = 1, new_size = 1;
        if (old_end < self->ndim) {
            old_size = self->shape[old_end++];
        }
        if (new_end < ndim) {
            new_size = shape[new_end++];
        }
        while (old_size != new_size) {
            if (old_size < new_size) {
                old_size *= self->shape[old_end++];
            }
            else {
                new_size *= shape[new_end++];
            }
        }
        Py_ssize_t stride = 1;
        int last = -1; /* the group's last axis that is longer than 1 */
        for (int i = old; i < old_end; i++) {
            if (self->shape[i] == 1) {
                continue;
            }
            if (last >= 0 && self->strides[last] != self->strides[i] * self->shape[i]) {
                return -1;
            }
            last = i;
            stride = self->strides[i];
        }
        for (int i = new_end - 1; i >= new; i--) {
            strides[i] = stride;
            stride *= shape[i];
        }
        old = old_end;
        new = new_end;
    }
    return 0;
}

int
axis_size(const char *operation, PyObject *object, Py_ssize_t *size)
{
    if (!PyIndex_Check(object)) {
        PyErr_Format(PyExc_TypeError,
                     "%s: a shape and strides are integers, got %.100s in them",
                     operation, Py_TYPE(object)->tp_name);
        return -1;
    }
    PyObject *index = PyNumber_Index(object);
    if (index == NULL) {
        return -1;
    }
    *size = PyLong_AsSsize_t(index);
    int status = *size == -1 && PyErr_Occurred() ? -1 : 0;
    if (status < 0 && PyErr_ExceptionMatches(PyExc_OverflowError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_OverflowError,
                     "%s: %R in a shape or strides is out of range", operation, index);
    }
    Py_DECREF(index);
    return status;
}

/* Read a shape: a tuple or list of integers, or one integer. Return its length, or -1
 * with an error set. */
int
shape_argument(const char *operation, PyObject *object, Py_ssize_t *shape)
{
    if (PyIndex_Check(object)) {
        return axis_size(operation, object, shape) < 0 ? -1 : 1;
    }
    if (!PySequence_Check(object)) {
        PyErr_Format(PyExc_TypeError,
                     "%s: a shape must be a tuple of integers, got %.100s", operation,
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    /* A copy: reading an item may run code that changes a list. */
    PyObject *sequence = PySequence_Tuple(object);
    if (sequence == NULL) {
        return -1;
    }
    Py_ssize_t ndim = PyTuple_GET_SIZE(sequence);
    if (ndim > MAX_DIMS) {
        PyErr_Format(PyExc_ValueError, "%s: a shape has at most %d axes, not %zd",
                     operation, MAX_DIMS, ndim);
        ndim = -1;
    }
    for (Py_ssize_t i = 0; i < ndim; i++) {
        if (axis_size(operation, PyTuple_GET_ITEM(sequence, i), &shape[i]) < 0) {
            ndim = -1;
        }
    }
    Py_DECREF(sequence);
    return (int)ndim;
}

static PyObject *
Array_reshape(PyObject *op, PyObject *args)
{
    ArrayObject *self = (ArrayObject *)op;
    Py_ssize_t shape[MAX_DIMS], strides[MAX_DIMS], known = 1;
    PyObject *wanted = PyTuple_GET_SIZE(args) == 1 ? PyTuple_GET_ITEM(args, 0) : args;
    int ndim = shape_argument("reshape", wanted, shape), open = -1, bad = 0;
    if (ndim < 0) {
        return NULL;
    }
    for (int i = 0; i < ndim; i++) {
        if (shape[i] == -1) {
            bad |= open >= 0;
            open = i;
        }
        else {
            bad |= shape[i] < 0 || (shape[i] > 0 && known > PY_SSIZE_T_MAX / shape[i]);
            known *= bad ? 1 : shape[i];
        }
    }
    if (open >= 0 && !bad) {
        bad = known == 0 || self->size % known != 0;
        shape[open] = bad ? 0 : self->size / known;
        known *= shape[open];
    }
    if (bad || known != self->size) {
        return raise_shape("reshape", "the array", self, "%zd elements for %R",
                           self->size, wanted);
    }
    if (restride(self, ndim, shape, strides) < 0) {
        return raise_shape("reshape", "the array", self,
                           "contiguous memory for %R (a view cannot be made; copy() "
                           "first)",
                           wanted);
    }
    ArrayObject *view = view_of(self);
    if (view != NULL) {
        view->ndim = ndim;
        view->size = self->size;
        memcpy(view->shape, shape, sizeof(shape));
        memcpy(view->strides, strides, sizeof(strides));
    }
    return (PyObject *)view;
}

static Py_ssize_t
Array_length(PyObject *op)
{
    ArrayObject *self = (ArrayObject *)op;
    if (self->ndim == 0) {
        PyErr_SetString(PyExc_TypeError, "len() of a DeviceArray without axes");
        return -1;
    }
    return self->shape[0];
}

/* ---- Attributes ---- */

static PyObject *
Array_shape(PyObject *op, void *Py_UNUSED(closure))
{
    ArrayObject *self = (ArrayObject *)op;
    if (self->shape_tuple == NULL) {
        self->shape_tuple = shape_of(self);
    }
    return Py_XNewRef(self->shape_tuple);
}

static PyObject *
Array_strides(PyObject *op, void *Py_UNUSED(closure))
{
    ArrayObject *self = (ArrayObject *)op;
    PyObject *strides = PyTuple_New(self->ndim);
    for (int i = 0; strides != NULL && i < self->ndim; i++) {
        PyObject *stride = PyLong_FromSsize_t(self->strides[i] * 4);
        if (stride == NULL) {
            Py_CLEAR(strides);
        }
        else {
            PyTuple_SET_ITEM(strides, i, stride);
        }
    }
    return strides;
}

static PyObject *
Array_ndim(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(((ArrayObject *)op)->ndim);
}

static PyObject *
Array_size(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(((ArrayObject *)op)->size);
}

static PyObject *
Array_nbytes(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSsize_t(((ArrayObject *)op)->size * 4);
}

static PyObject *
Array_itemsize(PyObject *Py_UNUSED(op), void *Py_UNUSED(closure))
{
    return PyLong_FromLong(4);
}

static PyObject *
Array_ptr(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLongLong(((ArrayObject *)op)->ptr);
}

static PyObject *
Array_dtype(PyObject *op, void *Py_UNUSED(closure))
{
    return (PyObject *)array_dtype((ArrayObject *)op);
}

PyArray_Descr *
array_dtype(const ArrayObject *self)
{
    return PyArray_DescrFromType(self->is_int ? NPY_INT32 : NPY_FLOAT32);
}

static PyObject *
Array_repr(PyObject *op)
{
    ArrayObject *self = (ArrayObject *)op;
    PyObject *shape = Array_shape(op, NULL);
    if (shape == NULL) {
        return NULL;
    }
    PyObject *text =
        PyUnicode_FromFormat("<DeviceArray of shape %R, %s, %s%p on device %d>", shape,
                             self->is_int ? "int32" : "float32",
                             array_is_contiguous(self) ? "at " : "strided, at ",
                             (void *)self->ptr, (int)self->engine->context->device);
    Py_DECREF(shape);
    return text;
}

static PyGetSetDef Array_getset[] = {
    {"shape", Array_shape, NULL, PyDoc_STR("Lengths of the axes."), NULL},
    {"strides", Array_strides, NULL, PyDoc_STR("Bytes from item to item, by axis."),
     NULL},
    {"ndim", Array_ndim, NULL, PyDoc_STR("Number of axes."), NULL},
    {"size", Array_size, NULL, PyDoc_STR("Number of elements."), NULL},
    {"nbytes", Array_nbytes, NULL, PyDoc_STR("Bytes that the elements take."), NULL},
    {"itemsize", Array_itemsize, NULL, PyDoc_STR("Bytes of one element: 4."), NULL},
    {"ptr", Array_ptr, NULL, PyDoc_STR("Device address of the first element."), NULL},
    {"dtype", Array_dtype, NULL, PyDoc_STR("numpy.float32 or numpy.int32."), NULL},
    {"__cuda_array_interface__", Array_interface, NULL,
     PyDoc_STR("CUDA array interface, version 3, with the compute stream."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef Array_methods[] = {
    {"reshape", Array_reshape, METH_VARARGS,
     PyDoc_STR("reshape($self, *shape)\n--\n\n"
               "Return a view of another shape; one axis may be -1.\n\n"
               "Raises ValueError where the sizes differ or a copy would be needed.")},
    {"get", Array_get, METH_NOARGS,
     PyDoc_STR("get($self, /)\n--\n\n"
               "Return a copy as a NumPy array, once the device has computed it.")},
    {"set", Array_set, METH_O,
     PyDoc_STR("set($self, values, /)\n--\n\n"
               "Set all elements from a NumPy array of the same shape; it is converted "
               "to\nthis array's dtype.")},
    {"copy", Array_copy, METH_NOARGS,
     PyDoc_STR("copy($self, /)\n--\n\nReturn a new contiguous array with the same "
               "elements.")},
    {"__array__", FASTCALL(Array_array),
     PyDoc_STR("__array__($self, dtype=None, copy=None)\n--\n\n"
               "Return a copy as a NumPy array; copy=False is refused.")},
    {"__dlpack__", FASTCALL(Array_dlpack),
     PyDoc_STR("__dlpack__($self, /, *, stream=None, max_version=None, dl_device=None, "
               "copy=None)\n--\n\n"
               "Export the memory; `stream` is made to wait for what is computed.")},
    {"__dlpack_device__", Array_dlpack_device, METH_NOARGS,
     PyDoc_STR("__dlpack_device__($self, /)\n--\n\nReturn (kDLCUDA, device ordinal).")},
    REFUSE_PICKLING,
    {NULL, NULL, 0, NULL},
};

static PyType_Slot Array_slots[] = {
    {Py_tp_doc,
     PyDoc_STR("An array on a CUDA device: float32, or int32 for indices.\n\n"
               "Made by a CudaHandler. Indexing and reshaping give views, which keep "
               "the\nmemory alive. Work on it is queued on the handler's compute "
               "stream; get() and\nnumpy.asarray() wait for it.")},
    {Py_tp_dealloc, Array_dealloc},
    {Py_tp_repr, Array_repr},
    {Py_tp_getset, Array_getset},
    {Py_tp_methods, Array_methods},
    {Py_mp_subscript, Array_subscript},
    {Py_mp_ass_subscript, Array_assign},
    {Py_mp_length, Array_length},
    {Py_nb_add, Array_add},
    {Py_nb_subtract, Array_subtract},
    {Py_nb_multiply, Array_multiply},
    {Py_nb_true_divide, Array_divide},
    {Py_nb_power, Array_power},
    {Py_nb_inplace_add, Array_inplace_add},
    {Py_nb_inplace_subtract, Array_inplace_subtract},
    {Py_nb_inplace_multiply, Array_inplace_multiply},
    {Py_nb_inplace_true_divide, Array_inplace_divide},
    {0, NULL},
};

PyType_Spec DeviceArray_spec = {
    .name = "brainstorm_dbuf._cuda.DeviceArray",
    .basicsize = sizeof(ArrayObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = Array_slots,
};
