/* Page-locked host memory: what an asynchronous copy needs on the host's side.
 *
 * PageLockedMemory owns a block of cuMemHostAlloc and is the base of the arrays over
 * it; RegisteredMemory page-locks an array that exists already. Both go with their last
 * view, or with the last copy in flight, on whatever thread that happens. */
#include "binding.h"

#include <sched.h>

/* Where empty arrays point to: NumPy wants an address, the driver gives none. */
static _Alignas(64) char no_bytes[64];

PyObject *
pagelocked_owner_slowly(ModuleState *state, PyArrayObject *array, const char *first,
                        const char *end)
{
    PyObject *base = PyArray_BASE(array);
    const void *ptr;
    size_t nbytes;
    while (base != NULL && !Py_IS_TYPE(base, state->PageLockedMemory_type) &&
           PyArray_Check(base)) {
        base = PyArray_BASE((PyArrayObject *)base);
    }
    if (base == NULL) {
        return NULL;
    }
    if (Py_IS_TYPE(base, state->PageLockedMemory_type)) {
        ptr = ((PageLockedMemoryObject *)base)->ptr;
        nbytes = ((PageLockedMemoryObject *)base)->nbytes;
    }
    else if (Py_IS_TYPE(base, state->RegisteredMemory_type) &&
             (!guard_is_closed(&((RegisteredMemoryObject *)base)->guard) ||
              ((RegisteredMemoryObject *)base)->nbytes == 0)) {
        ptr = ((RegisteredMemoryObject *)base)->ptr;
        nbytes = ((RegisteredMemoryObject *)base)->nbytes;
    }
    else {
        return NULL;
    }
    /* as_strided may go outside. */
    return pagelocked_has(ptr, nbytes, first, end) ? base : NULL;
}

/* One byte. A pointer that CUDA has never seen is an INVALID_VALUE. */
static CUresult
ask_one(const char *ptr, int *is_locked)
{
    unsigned int type = 0;
    CUresult status = driver.PointerGetAttribute(
        &type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(uintptr_t)ptr);
    *is_locked = status == CUDA_SUCCESS && type == CU_MEMORYTYPE_HOST;
    return status == CUDA_ERROR_INVALID_VALUE ? CUDA_SUCCESS : status;
}

CUresult
pagelocked_ask(const void *ptr, size_t nbytes, int *is_locked)
{
    CUresult status = ask_one(ptr, is_locked);
    if (status == CUDA_SUCCESS && *is_locked && nbytes > 1) {
        status = ask_one((const char *)ptr + nbytes - 1, is_locked);
    }
    return status;
}

int
pagelocked_check_device(ModuleState *state, const char *function, const char *role,
                        ContextObject *locked_in, ContextObject *context)
{
    int own, wanted;
    if (context_device(state, locked_in, &own) < 0 ||
        context_device(state, context, &wanted) < 0) {
        return -1;
    }
    if (own == wanted) {
        return 0; /* all contexts of a device address the same host memory */
    }
    PyErr_Format(PyExc_ValueError,
                 "%s: %s is page-locked for %R alone, expected memory for %R; "
                 "register_host_memory with HOST_REGISTER_PORTABLE page-locks it for "
                 "every device",
                 function, role, locked_in, context);
    return -1;
}

/* ---- PageLockedMemory ---- */

/* nbytes from cuMemHostAlloc; 0 bytes make no driver call. New reference or NULL. */
static PageLockedMemoryObject *
block_new(ModuleState *state, size_t nbytes, unsigned int flags,
          PyObject *context_object)
{
    ContextObject *context = NULL;
    if (nbytes > 0 || (context_object != NULL && context_object != Py_None)) {
        context = context_argument(state, context_object);
        if (context == NULL) {
            return NULL;
        }
    }
    PyTypeObject *type = state->PageLockedMemory_type;
    PageLockedMemoryObject *self = (PageLockedMemoryObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_XDECREF(context);
        return NULL;
    }
    self->nbytes = nbytes;
    self->context = context;
    /* Whatever the flags: "All host memory allocated in all contexts using [..]
     * cuMemHostAlloc() is always directly accessible from all contexts on all devices"
     * (CUDA Driver API, Unified Addressing). What is registered is not. */
    self->is_portable = 1;
    if (nbytes == 0) {
        return self;
    }
    void *ptr = NULL;
    CUresult status;
    Scope scope;
    Py_BEGIN_ALLOW_THREADS
    IN_CONTEXT(scope, context->handle, status,
               driver.MemHostAlloc(&ptr, nbytes, flags));
    Py_END_ALLOW_THREADS
    if (status != CUDA_SUCCESS) {
        raise_cuda(state, scope_call(&scope, "cuMemHostAlloc"), status,
                   "%zu bytes of page-locked memory asked for, %zd bytes held", nbytes,
                   (Py_ssize_t)live.page_locked_bytes);
        Py_DECREF(self);
        return NULL;
    }
    self->ptr = ptr;
    live.page_locked_blocks++;
    live.page_locked_bytes += (Py_ssize_t)nbytes;
    return self;
}

static PyObject *
PageLockedMemory_get_ptr(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromVoidPtr(((PageLockedMemoryObject *)op)->ptr);
}

static PyObject *
PageLockedMemory_get_nbytes(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(((PageLockedMemoryObject *)op)->nbytes);
}

static PyObject *
PageLockedMemory_get_context(PyObject *op, void *Py_UNUSED(closure))
{
    PyObject *context = (PyObject *)((PageLockedMemoryObject *)op)->context;
    return Py_NewRef(context != NULL ? context : Py_None);
}

static PyObject *
PageLockedMemory_repr(PyObject *op)
{
    PageLockedMemoryObject *self = (PageLockedMemoryObject *)op;
    return PyUnicode_FromFormat("<PageLockedMemory of %zu bytes at %p>", self->nbytes,
                                self->ptr);
}

static int
PageLockedMemory_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(
        ((PageLockedMemoryObject *)op)->context); /* until dealloc, which needs it */
    return 0;
}

static void
PageLockedMemory_dealloc(PyObject *op)
{
    PageLockedMemoryObject *self = (PageLockedMemoryObject *)op;
    PyTypeObject *type = Py_TYPE(op);
    SavedError saved;
    PyObject_GC_UnTrack(op);
    save_error(&saved);
    if (self->ptr != NULL && driver_usable()) {
        CUresult status;
        Scope scope;
        Py_BEGIN_ALLOW_THREADS
        IN_CONTEXT(scope, self->context->handle, status, driver.MemFreeHost(self->ptr));
        Py_END_ALLOW_THREADS
        live.page_locked_blocks--;
        live.page_locked_bytes -= (Py_ssize_t)self->nbytes;
        report_unraisable(self, scope_call(&scope, "cuMemFreeHost"), status);
    }
    Py_CLEAR(self->context);
    restore_error(&saved);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyMethodDef PageLockedMemory_methods[] = {
    REFUSE_PICKLING,
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef PageLockedMemory_getset[] = {
    {"ptr", PageLockedMemory_get_ptr, NULL, PyDoc_STR("Its address, as an int."), NULL},
    {"nbytes", PageLockedMemory_get_nbytes, NULL, PyDoc_STR("Its size in bytes."),
     NULL},
    {"context", PageLockedMemory_get_context, NULL,
     PyDoc_STR("Its Context; None for 0 bytes."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot PageLockedMemory_slots[] = {
    {Py_tp_doc,
     PyDoc_STR("The memory of a pagelocked_empty() array: the array's base.\n\n"
               "Freed with its last view or copy in flight.")},
    {Py_tp_dealloc, PageLockedMemory_dealloc},
    {Py_tp_traverse, PageLockedMemory_traverse},
    {Py_tp_repr, PageLockedMemory_repr},
    {Py_tp_methods, PageLockedMemory_methods},
    {Py_tp_getset, PageLockedMemory_getset},
    {0, NULL},
};

PyType_Spec PageLockedMemory_spec = {
    .name = "brainstorm_dbuf._cuda.PageLockedMemory",
    .basicsize = sizeof(PageLockedMemoryObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = PageLockedMemory_slots,
};

/* ---- Arrays over it ---- */

/* Bytes of an array. Return 0, or -1 with ValueError set. */
static int
count_bytes(int ndim, const npy_intp *dims, npy_intp itemsize, size_t *nbytes)
{
    npy_intp total = itemsize;
    int is_empty = 0, is_too_big = 0;
    for (int i = 0; i < ndim; i++) {
        if (dims[i] < 0) {
            PyErr_Format(PyExc_ValueError, "shape has a negative dimension, %zd",
                         (Py_ssize_t)dims[i]);
            return -1;
        }
        is_empty |= dims[i] == 0;
        is_too_big |= dims[i] != 0 && __builtin_mul_overflow(total, dims[i], &total);
    }
    if (is_too_big) {
        PyErr_SetString(PyExc_ValueError,
                        "shape has more bytes than an address can count");
        return -1;
    }
    *nbytes = is_empty ? 0 : (size_t)total;
    return 0;
}

/* An array over a new block. Steals descr. */
static PyObject *
array_new(ModuleState *state, int ndim, npy_intp *dims, PyArray_Descr *descr,
          int fortran, unsigned int flags, PyObject *context_object, int zeroed)
{
    size_t nbytes;
    PageLockedMemoryObject *block = NULL;
    if (check_dtype("dtype", descr, 0) < 0) {
        goto error;
    }
    if (PyDataType_ELSIZE(descr) == 0) {
        /* NumPy would silently widen it, beyond what was allocated. */
        PyErr_Format(PyExc_ValueError, "dtype %R has no size", descr);
        goto error;
    }
    if (count_bytes(ndim, dims, PyDataType_ELSIZE(descr), &nbytes) < 0) {
        goto error;
    }
    block = block_new(state, nbytes, flags, context_object);
    if (block == NULL) {
        goto error;
    }
    if (zeroed && nbytes > 0) {
        Py_BEGIN_ALLOW_THREADS
        memset(block->ptr, 0, nbytes);
        Py_END_ALLOW_THREADS
    }
    /* NumPy derives the strides; descr is stolen, whatever happens. */
    PyObject *array = PyArray_NewFromDescr(
        &PyArray_Type, descr, ndim, dims, NULL, nbytes > 0 ? block->ptr : no_bytes,
        NPY_ARRAY_WRITEABLE |
            (fortran ? NPY_ARRAY_F_CONTIGUOUS : NPY_ARRAY_C_CONTIGUOUS),
        NULL);
    if (array == NULL) {
        Py_DECREF(block);
        return NULL;
    }
    /* block is stolen, whatever happens. */
    if (PyArray_SetBaseObject((PyArrayObject *)array, (PyObject *)block) < 0) {
        Py_DECREF(array);
        return NULL;
    }
    return array;

error:
    Py_DECREF(descr);
    return NULL;
}

/* mem_flags. Return 0, or -1 with an error set. */
static int
flags_argument(const char *what, PyObject *object, unsigned int allowed,
               unsigned int *flags)
{
    *flags = 0;
    if (object == NULL) {
        return 0;
    }
    size_t value;
    if (size_argument(what, object, &value) < 0) {
        return -1;
    }
    if ((value & ~(size_t)allowed) != 0) {
        PyErr_Format(PyExc_ValueError, "%s %zu has bits other than those of %u", what,
                     value, allowed);
        return -1;
    }
    *flags = (unsigned int)value;
    return 0;
}

/* order, "C" or "F". Return 1 for "F", 0 for "C", or -1 with an error set. */
static int
order_argument(PyObject *object)
{
    if (object == NULL) {
        return 0;
    }
    if (!PyUnicode_Check(object)) {
        PyErr_Format(PyExc_TypeError, "order must be \"C\" or \"F\", not %s",
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    if (PyUnicode_CompareWithASCIIString(object, "C") == 0) {
        return 0;
    }
    if (PyUnicode_CompareWithASCIIString(object, "F") == 0) {
        return 1;
    }
    PyErr_Format(PyExc_ValueError, "order must be \"C\" or \"F\", not %R", object);
    return -1;
}

/* pagelocked_empty and pagelocked_zeros. */
static PyObject *
array_from_arguments(PyObject *module, const Signature *signature,
                     PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
                     int zeroed)
{
    enum { SHAPE, DTYPE, ORDER, MEM_FLAGS, CONTEXT, COUNT };
    ModuleState *state = module_state(module);
    PyObject *given[COUNT] = {NULL};
    PyArray_Dims shape = {NULL, 0};
    PyArray_Descr *descr = NULL;
    PyObject *result = NULL;
    unsigned int flags;
    if (unpack(signature, args, nargs, kwnames, given) < 0 ||
        flags_argument("mem_flags", given[MEM_FLAGS], 7, &flags) < 0) {
        return NULL;
    }
    int fortran = order_argument(given[ORDER]);
    if (fortran < 0) {
        return NULL;
    }
    if (given[SHAPE] == Py_None) {
        PyErr_SetString(PyExc_TypeError, "shape must be an int or a sequence of ints");
        return NULL;
    }
    if (!PyArray_IntpConverter(given[SHAPE], &shape)) {
        if (PyErr_ExceptionMatches(PyExc_OverflowError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_ValueError, "shape %R is out of range", given[SHAPE]);
        }
        else if (PyErr_ExceptionMatches(PyExc_TypeError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError,
                         "shape must be an int or a sequence of ints, not %R",
                         given[SHAPE]);
        }
        return NULL;
    }
    if (given[DTYPE] == NULL) {
        descr = PyArray_DescrFromType(NPY_FLOAT32);
    }
    else if (!PyArray_DescrConverter(given[DTYPE], &descr)) {
        descr = NULL;
    }
    if (descr != NULL) {
        result = array_new(state, shape.len, shape.ptr, descr, fortran, flags,
                           given[CONTEXT], zeroed);
    }
    PyDimMem_FREE(shape.ptr);
    return result;
}

static const char *const empty_names[] = {"shape",     "dtype",   "order",
                                          "mem_flags", "context", NULL};

static PyObject *
pagelocked_empty(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                 PyObject *kwnames)
{
    static const Signature signature = {"pagelocked_empty", empty_names, 1, 4};
    return array_from_arguments(module, &signature, args, nargs, kwnames, 0);
}

static PyObject *
pagelocked_zeros(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                 PyObject *kwnames)
{
    static const Signature signature = {"pagelocked_zeros", empty_names, 1, 4};
    return array_from_arguments(module, &signature, args, nargs, kwnames, 1);
}

/* The array in an argument. Borrowed; NULL with TypeError set. */
static PyArrayObject *
array_argument(PyObject *object)
{
    if (!PyArray_Check(object)) {
        PyErr_Format(PyExc_TypeError, "array must be a numpy array, not %s",
                     Py_TYPE(object)->tp_name);
        return NULL;
    }
    return (PyArrayObject *)object;
}

static PyObject *
pagelocked_empty_like(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                      PyObject *kwnames)
{
    static const char *const names[] = {"array", "mem_flags", "context", NULL};
    static const Signature signature = {"pagelocked_empty_like", names, 1, 2};
    PyObject *given[3] = {NULL};
    unsigned int flags;
    if (unpack(&signature, args, nargs, kwnames, given) < 0 ||
        flags_argument("mem_flags", given[1], 7, &flags) < 0) {
        return NULL;
    }
    PyArrayObject *array = array_argument(given[0]);
    if (array == NULL) {
        return NULL;
    }
    PyArray_Descr *descr = PyArray_DESCR(array);
    Py_INCREF(descr);
    int fortran = PyArray_IS_F_CONTIGUOUS(array) && !PyArray_IS_C_CONTIGUOUS(array);
    return array_new(module_state(module), PyArray_NDIM(array), PyArray_DIMS(array),
                     descr, fortran, flags, given[2], 0);
}

/* ---- RegisteredMemory ---- */

static PyObject *
register_host_memory(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
                     PyObject *kwnames)
{
    static const char *const names[] = {"array", "flags", "context", NULL};
    static const Signature signature = {"register_host_memory", names, 1, 2};
    ModuleState *state = module_state(module);
    PyObject *given[3] = {NULL};
    unsigned int flags;
    if (unpack(&signature, args, nargs, kwnames, given) < 0 ||
        flags_argument("flags", given[1], 15, &flags) < 0) {
        return NULL;
    }
    PyArrayObject *array = array_argument(given[0]);
    if (array == NULL || check_dtype("array", PyArray_DESCR(array), 0) < 0) {
        return NULL;
    }
    if (!PyArray_IS_C_CONTIGUOUS(array) && !PyArray_IS_F_CONTIGUOUS(array)) {
        PyErr_SetString(PyExc_ValueError,
                        "array is neither C- nor F-contiguous: only one "
                        "piece of memory can be page-locked");
        return NULL;
    }
    size_t nbytes = (size_t)PyArray_NBYTES(array);
    ContextObject *context = NULL;
    if (nbytes > 0 || (given[2] != NULL && given[2] != Py_None)) {
        context = context_argument(state, given[2]);
        if (context == NULL) {
            return NULL;
        }
    }
    PyTypeObject *type = state->RegisteredMemory_type;
    RegisteredMemoryObject *self = (RegisteredMemoryObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        Py_XDECREF(context);
        return NULL;
    }
    self->array = Py_NewRef((PyObject *)array);
    self->context = context;
    self->ptr = PyArray_DATA(array);
    self->nbytes = nbytes;
    self->is_portable = (flags & CU_MEMHOSTREGISTER_PORTABLE) != 0;
    if (nbytes > 0) {
        CUresult status;
        Scope scope;
        Py_BEGIN_ALLOW_THREADS
        IN_CONTEXT(scope, context->handle, status,
                   driver.MemHostRegister(self->ptr, nbytes, flags));
        Py_END_ALLOW_THREADS
        if (status != CUDA_SUCCESS) {
            raise_cuda(state, scope_call(&scope, "cuMemHostRegister"), status,
                       "%zu bytes at %p", nbytes, self->ptr);
            Py_DECREF(self);
            return NULL;
        }
        self->is_registered = 1;
        live.registered++;
    }
    PyArray_Descr *descr = PyArray_DESCR(array);
    Py_INCREF(descr);
    PyObject *view = PyArray_NewFromDescr(
        &PyArray_Type, descr, PyArray_NDIM(array), PyArray_DIMS(array),
        PyArray_STRIDES(array), PyArray_DATA(array),
        PyArray_FLAGS(array) & NPY_ARRAY_WRITEABLE, NULL);
    if (view == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    if (PyArray_SetBaseObject((PyArrayObject *)view, (PyObject *)self) < 0) {
        Py_DECREF(view);
        return NULL;
    }
    return view;
}

/* Unregister; may be tried again after a failure. `wait`: copies may be in flight, and
 * must be done before the pages may move. */
static CUresult
unregister(RegisteredMemoryObject *self, int wait, const char **call)
{
    CUresult status;
    Scope scope;
    *call = "cuMemHostUnregister";
    if (!self->is_registered || !driver_usable()) {
        return CUDA_SUCCESS;
    }
    self->is_registered = 0;
    self->is_unregistering = 1; /* until then no copy of the memory may begin */
    if (wait && self->is_portable) {
        contexts_synchronize_others(self->context->handle);
    }
    Py_BEGIN_ALLOW_THREADS
    status = scope_enter(&scope, self->context->handle);
    if (status == CUDA_SUCCESS) {
        if (wait) {
            status = driver.CtxSynchronize();
            *call = status != CUDA_SUCCESS ? "cuCtxSynchronize" : *call;
        }
        if (status == CUDA_SUCCESS) {
            status = driver.MemHostUnregister(self->ptr);
        }
        scope_leave(&scope);
    }
    Py_END_ALLOW_THREADS
    self->is_unregistering = 0;
    *call = scope_call(&scope, *call);
    if (status == CUDA_SUCCESS || context_is_gone(status)) {
        live.registered--;
    }
    else {
        self->is_registered = 1;
    }
    return status;
}

RegisteredMemoryObject *
pagelocked_enter_slowly(ModuleState *state, PyObject *base)
{
    while (base != NULL && PyArray_Check(base)) {
        base = PyArray_BASE((PyArrayObject *)base);
    }
    if (base == NULL || !Py_IS_TYPE(base, state->RegisteredMemory_type)) {
        return NULL;
    }
    RegisteredMemoryObject *self = (RegisteredMemoryObject *)Py_NewRef(base);
    while (self->is_unregistering) {
        Py_BEGIN_ALLOW_THREADS
        sched_yield();
        Py_END_ALLOW_THREADS
    }
    if (!self->is_registered) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    guard_enter_closed(&self->guard);
    return self;
}

void
pagelocked_unregister_late(RegisteredMemoryObject *self)
{
    SavedError saved;
    const char *call;
    save_error(&saved);
    CUresult status = unregister(self, 1, &call);
    report_unraisable(self, call, status);
    restore_error(&saved);
}

static PyObject *
RegisteredMemory_unregister(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    RegisteredMemoryObject *self = (RegisteredMemoryObject *)op;
    ModuleState *state = state_of(self);
    const char *call;
    if (self->is_registered && driver_ready(state) < 0) {
        return NULL;
    }
    /* From here on no new copy takes it for page-locked. */
    if (!guard_is_closed(&self->guard) && guard_close(&self->guard)) {
        CUresult status = unregister(self, 1, &call);
        if (status != CUDA_SUCCESS && !context_is_gone(status)) {
            guard_reopen(&self->guard);
            return raise_cuda(state, call, status, "%zu bytes at %p", self->nbytes,
                              self->ptr);
        }
    }
    Py_RETURN_NONE;
}

static PyObject *
RegisteredMemory_get_ptr(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromVoidPtr(((RegisteredMemoryObject *)op)->ptr);
}

static PyObject *
RegisteredMemory_get_nbytes(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(((RegisteredMemoryObject *)op)->nbytes);
}

static PyObject *
RegisteredMemory_get_context(PyObject *op, void *Py_UNUSED(closure))
{
    PyObject *context = (PyObject *)((RegisteredMemoryObject *)op)->context;
    return Py_NewRef(context != NULL ? context : Py_None);
}

static PyObject *
RegisteredMemory_get_array(PyObject *op, void *Py_UNUSED(closure))
{
    return Py_NewRef(((RegisteredMemoryObject *)op)->array);
}

static PyObject *
RegisteredMemory_get_registered(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((RegisteredMemoryObject *)op)->is_registered);
}

static PyObject *
RegisteredMemory_repr(PyObject *op)
{
    RegisteredMemoryObject *self = (RegisteredMemoryObject *)op;
    return PyUnicode_FromFormat("<RegisteredMemory of %zu bytes at %p%s>", self->nbytes,
                                self->ptr, self->is_registered ? "" : ", unregistered");
}

static int
RegisteredMemory_traverse(PyObject *op, visitproc visit, void *arg)
{
    RegisteredMemoryObject *self = (RegisteredMemoryObject *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->array);   /* both until dealloc: the memory must be there to be */
    Py_VISIT(self->context); /* unregistered */
    return 0;
}

static void
RegisteredMemory_dealloc(PyObject *op)
{
    RegisteredMemoryObject *self = (RegisteredMemoryObject *)op;
    PyTypeObject *type = Py_TYPE(op);
    SavedError saved;
    const char *call;
    PyObject_GC_UnTrack(op);
    save_error(&saved);
    CUresult status = unregister(self, 0, &call);
    report_unraisable(self, call, status);
    live.registered -= self->is_registered; /* lost, but no object of ours any more */
    Py_CLEAR(self->array);
    Py_CLEAR(self->context);
    restore_error(&saved);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyMethodDef RegisteredMemory_methods[] = {
    {"unregister", RegisteredMemory_unregister, METH_NOARGS,
     PyDoc_STR(
         "unregister($self, /)\n--\n\n"
         "Make the memory ordinary again, once all work in the context is done: in all "
         "contexts\nwhere it was page-locked for all.\n\n"
         "A call that is copying in another thread does so at its end. Twice is "
         "harmless; the array\nstays valid.")},
    REFUSE_PICKLING,
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef RegisteredMemory_getset[] = {
    {"ptr", RegisteredMemory_get_ptr, NULL, PyDoc_STR("Its address, as an int."), NULL},
    {"nbytes", RegisteredMemory_get_nbytes, NULL, PyDoc_STR("Its size in bytes."),
     NULL},
    {"context", RegisteredMemory_get_context, NULL,
     PyDoc_STR("Its Context; None for 0 bytes."), NULL},
    {"array", RegisteredMemory_get_array, NULL,
     PyDoc_STR("The array whose memory it is."), NULL},
    {"registered", RegisteredMemory_get_registered, NULL,
     PyDoc_STR("Whether the driver has it page-locked."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot RegisteredMemory_slots[] = {
    {Py_tp_doc, PyDoc_STR("The base of a register_host_memory() array.\n\n"
                          "Unregistered with its last view or copy in flight.")},
    {Py_tp_dealloc, RegisteredMemory_dealloc},
    {Py_tp_traverse, RegisteredMemory_traverse},
    {Py_tp_repr, RegisteredMemory_repr},
    {Py_tp_methods, RegisteredMemory_methods},
    {Py_tp_getset, RegisteredMemory_getset},
    {0, NULL},
};

PyType_Spec RegisteredMemory_spec = {
    .name = "brainstorm_dbuf._cuda.RegisteredMemory",
    .basicsize = sizeof(RegisteredMemoryObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = RegisteredMemory_slots,
};

/* ---- The question ---- */

/* Whether memory of ours is page-locked for an argument's context. */
static PyObject *
is_locked_for(ModuleState *state, PyObject *owner, PyObject *context_object)
{
    ContextObject *locked_in = pagelocked_context(owner);
    if (locked_in == NULL || context_object == NULL || context_object == Py_None) {
        Py_RETURN_TRUE;
    }
    ContextObject *context = context_argument(state, context_object);
    if (context == NULL) {
        return NULL;
    }
    int own = 0, wanted = 0;
    int status = locked_in->handle == context->handle ? 0
                 : context_device(state, locked_in, &own) < 0
                     ? -1
                     : context_device(state, context, &wanted);
    Py_DECREF(context);
    return status < 0 ? NULL : PyBool_FromLong(own == wanted);
}

static PyObject *
is_pagelocked(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
              PyObject *kwnames)
{
    static const char *const names[] = {"array", "context", NULL};
    static const Signature signature = {"is_pagelocked", names, 1, 1};
    ModuleState *state = module_state(module);
    PyObject *given[2] = {NULL, NULL};
    if (unpack(&signature, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    PyArrayObject *array = array_argument(given[0]);
    if (array == NULL) {
        return NULL;
    }
    char *first, *end;
    array_bounds(array, &first, &end);
    PyObject *owner = pagelocked_owner(state, array, first, end);
    if (owner != NULL) {
        return is_locked_for(state, owner, given[1]);
    }
    if (first == end) {
        Py_RETURN_FALSE;
    }
    ContextObject *context = context_any(state); /* page-locked for all */
    if (context == NULL) {
        return NULL;
    }
    int is_locked = 0;
    CUresult status;
    Scope scope;
    IN_CONTEXT(scope, context->handle, status,
               pagelocked_ask(first, (size_t)(end - first), &is_locked));
    Py_DECREF(context);
    if (status != CUDA_SUCCESS) {
        return raise_cuda(state, scope_call(&scope, "cuPointerGetAttribute"), status,
                          NULL);
    }
    return PyBool_FromLong(is_locked);
}

PyMethodDef pagelocked_functions[] = {
    {"pagelocked_empty", FASTCALL(pagelocked_empty),
     PyDoc_STR(
         "pagelocked_empty($module, /, shape, dtype=\"float32\", order=\"C\", "
         "mem_flags=0, *, context=None)\n--\n\n"
         "Return an array in page-locked memory; its contents are undefined.\n\n"
         "mem_flags is a sum of HOST_ALLOC_PORTABLE, HOST_ALLOC_DEVICEMAP and "
         "HOST_ALLOC_WRITECOMBINED.\n"
         "The memory is freed with the last view or copy in flight.\n\n"
         "Raises CudaMemoryError if there is not enough, TypeError for dtypes that "
         "hold objects, ValueError for impossible shapes.")},
    {"pagelocked_zeros", FASTCALL(pagelocked_zeros),
     PyDoc_STR(
         "pagelocked_zeros($module, /, shape, dtype=\"float32\", order=\"C\", "
         "mem_flags=0, *, context=None)\n--\n\n"
         "Return an array of zeros in page-locked memory: see pagelocked_empty().")},
    {"pagelocked_empty_like", FASTCALL(pagelocked_empty_like),
     PyDoc_STR(
         "pagelocked_empty_like($module, /, array, mem_flags=0, *, context=None)\n"
         "--\n\n"
         "Return a page-locked array of the same shape, dtype and order.")},
    {"register_host_memory", FASTCALL(register_host_memory),
     PyDoc_STR(
         "register_host_memory($module, /, array, flags=0, *, context=None)\n--\n\n"
         "Page-lock an array's memory where it lies; return a view that keeps it "
         "so.\n\n"
         "The array must be C- or F-contiguous. The view's base has unregister().\n"
         "Without HOST_REGISTER_PORTABLE it is for copies of the context's device "
         "alone.\n\n"
         "Raises CudaError if it, or a part of it, is registered already.")},
    {"is_pagelocked", FASTCALL(is_pagelocked),
     PyDoc_STR("is_pagelocked($module, /, array, *, context=None)\n--\n\n"
               "Return whether an array lies in page-locked memory, from its first "
               "byte to its last.\n\n"
               "It need not be contiguous. With a context: for copies there; what this "
               "package has\npage-locked for another device alone is not.")},
    {NULL, NULL, 0, NULL},
};
