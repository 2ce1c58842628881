/* DeviceMemory: one block from cuMemAlloc. The driver's free waits for all work in the
 * context, so a copy in flight never writes into memory that is somebody else's. */
#include "binding.h"

static DeviceMemoryObject *
device_memory_new(ModuleState *state, size_t nbytes, ContextObject *context)
{
    PyTypeObject *type = state->DeviceMemory_type;
    DeviceMemoryObject *self = (DeviceMemoryObject *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->nbytes = nbytes;
        self->context = (ContextObject *)Py_XNewRef((PyObject *)context);
    }
    return self;
}

/* Free; may be tried again after a failure. */
static CUresult
device_memory_destroy(DeviceMemoryObject *self, const char **call)
{
    CUresult status;
    Scope scope;
    *call = "cuMemFree";
    if (self->ptr == 0 || !driver_usable()) {
        return CUDA_SUCCESS;
    }
    Py_BEGIN_ALLOW_THREADS
    IN_CONTEXT(scope, self->context->handle, status, driver.MemFree(self->ptr));
    Py_END_ALLOW_THREADS
    if (status == CUDA_SUCCESS || context_is_gone(status)) {
        self->ptr = 0;
        live.device_memory--;
        live.device_bytes -= (Py_ssize_t)self->nbytes;
    }
    *call = scope_call(&scope, *call);
    return status;
}

/* For the last one to leave freed memory. */
void
device_memory_destroy_late(DeviceMemoryObject *self)
{
    SavedError saved;
    const char *call;
    save_error(&saved);
    CUresult status = device_memory_destroy(self, &call);
    report_unraisable(self, call, status);
    restore_error(&saved);
}

static PyObject *
mem_alloc(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"nbytes", "context", NULL};
    static const Signature signature = {"mem_alloc", names, 1, 2};
    ModuleState *state = module_state(module);
    PyObject *given[2] = {NULL, NULL};
    ContextObject *context = NULL;
    DeviceMemoryObject *self = NULL;
    CUdeviceptr ptr = 0;
    size_t nbytes;
    CUresult status;
    Scope scope;
    if (unpack(&signature, args, nargs, kwnames, given) < 0 ||
        size_argument("nbytes", given[0], &nbytes) < 0) {
        return NULL;
    }
    if (nbytes > 0 || (given[1] != NULL && given[1] != Py_None)) {
        context = context_argument(state, given[1]);
        if (context == NULL) {
            return NULL;
        }
    }
    self = device_memory_new(state, nbytes, context); /* first: it takes what we get */
    if (self == NULL || nbytes == 0) {
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    IN_CONTEXT(scope, context->handle, status, driver.MemAlloc(&ptr, nbytes));
    Py_END_ALLOW_THREADS
    if (status != CUDA_SUCCESS) {
        size_t free_bytes = 0, total = 0;
        CUresult told;
        Scope other;
        Py_BEGIN_ALLOW_THREADS
        IN_CONTEXT(other, context->handle, told,
                   driver.MemGetInfo(&free_bytes, &total));
        Py_END_ALLOW_THREADS
        if (told == CUDA_SUCCESS) {
            raise_cuda(state, scope_call(&scope, "cuMemAlloc"), status,
                       "%zu bytes asked for, %zu of the device's %zu are free", nbytes,
                       free_bytes, total);
        }
        else {
            raise_cuda(state, scope_call(&scope, "cuMemAlloc"), status,
                       "%zu bytes asked for", nbytes);
        }
        Py_CLEAR(self);
        goto done;
    }
    self->ptr = ptr;
    live.device_memory++;
    live.device_bytes += (Py_ssize_t)nbytes;
done:
    Py_XDECREF(context);
    return (PyObject *)self;
}

static PyObject *
mem_get_info(PyObject *module, PyObject *const *args, Py_ssize_t nargs,
             PyObject *kwnames)
{
    static const char *const names[] = {"context", NULL};
    static const Signature signature = {"mem_get_info", names, 0, 1};
    ModuleState *state = module_state(module);
    PyObject *given = NULL;
    size_t free_bytes = 0, total = 0;
    CUresult status;
    Scope scope;
    if (unpack(&signature, args, nargs, kwnames, &given) < 0) {
        return NULL;
    }
    ContextObject *context = context_argument(state, given);
    if (context == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    IN_CONTEXT(scope, context->handle, status, driver.MemGetInfo(&free_bytes, &total));
    Py_END_ALLOW_THREADS
    Py_DECREF(context);
    if (status != CUDA_SUCCESS) {
        return raise_cuda(state, scope_call(&scope, "cuMemGetInfo"), status, NULL);
    }
    return Py_BuildValue("(KK)", (unsigned long long)free_bytes,
                         (unsigned long long)total);
}

static PyObject *
DeviceMemory_free(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    DeviceMemoryObject *self = (DeviceMemoryObject *)op;
    ModuleState *state = state_of(self);
    const char *call;
    if (guard_is_closed(&self->guard)) {
        Py_RETURN_NONE;
    }
    if (self->ptr != 0 && driver_ready(state) < 0) {
        return NULL;
    }
    if (guard_close(&self->guard)) {
        CUresult status = device_memory_destroy(self, &call);
        if (status != CUDA_SUCCESS && !context_is_gone(status)) {
            return raise_cuda(state, call, status, "%zu bytes", self->nbytes);
        }
    }
    Py_RETURN_NONE;
}

static PyObject *
DeviceMemory_int(PyObject *op)
{
    DeviceMemoryObject *self = (DeviceMemoryObject *)op;
    if (guard_is_closed(&self->guard)) {
        return raise_closed("DeviceMemory");
    }
    return PyLong_FromUnsignedLongLong(self->ptr);
}

static PyObject *
DeviceMemory_get_ptr(PyObject *op, void *Py_UNUSED(closure))
{
    return DeviceMemory_int(op);
}

static PyObject *
DeviceMemory_get_nbytes(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(((DeviceMemoryObject *)op)->nbytes);
}

static PyObject *
DeviceMemory_get_context(PyObject *op, void *Py_UNUSED(closure))
{
    PyObject *context = (PyObject *)((DeviceMemoryObject *)op)->context;
    return Py_NewRef(context != NULL ? context : Py_None);
}

static PyObject *
DeviceMemory_get_closed(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(guard_is_closed(&((DeviceMemoryObject *)op)->guard));
}

static PyObject *
DeviceMemory_get_interface(PyObject *op, void *Py_UNUSED(closure))
{
    DeviceMemoryObject *self = (DeviceMemoryObject *)op;
    if (guard_is_closed(&self->guard)) {
        return raise_closed("DeviceMemory");
    }
    return Py_BuildValue("{s(K)sss(KO)sOsi}", "shape", (unsigned long long)self->nbytes,
                         "typestr", "|u1", "data", (unsigned long long)self->ptr,
                         Py_False, "strides", Py_None, "version", 3);
}

static PyObject *
DeviceMemory_repr(PyObject *op)
{
    DeviceMemoryObject *self = (DeviceMemoryObject *)op;
    if (guard_is_closed(&self->guard)) {
        return PyUnicode_FromFormat("<DeviceMemory of %zu bytes, freed>", self->nbytes);
    }
    return PyUnicode_FromFormat("<DeviceMemory of %zu bytes at %p>", self->nbytes,
                                (void *)(uintptr_t)self->ptr);
}

static int
DeviceMemory_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((DeviceMemoryObject *)op)->context); /* until dealloc, which needs it */
    return 0;
}

static void
DeviceMemory_dealloc(PyObject *op)
{
    DeviceMemoryObject *self = (DeviceMemoryObject *)op;
    PyTypeObject *type = Py_TYPE(op);
    SavedError saved;
    const char *call;
    PyObject_GC_UnTrack(op);
    save_error(&saved);
    CUresult status = device_memory_destroy(self, &call);
    report_unraisable(self, call, status);
    if (self->ptr != 0) { /* lost, but no object of ours any more */
        live.device_memory--;
        live.device_bytes -= (Py_ssize_t)self->nbytes;
    }
    Py_CLEAR(self->context);
    restore_error(&saved);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyMethodDef DeviceMemory_methods[] = {
    {"free", DeviceMemory_free, METH_NOARGS,
     PyDoc_STR("free($self, /)\n--\n\n"
               "Free it, once all work in the context is done. Twice is harmless.")},
    REFUSE_PICKLING,
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef DeviceMemory_getset[] = {
    {"ptr", DeviceMemory_get_ptr, NULL, PyDoc_STR("Its address, as an int."), NULL},
    {"nbytes", DeviceMemory_get_nbytes, NULL, PyDoc_STR("Its size in bytes."), NULL},
    {"context", DeviceMemory_get_context, NULL,
     PyDoc_STR("Its Context; None for 0 bytes."), NULL},
    {"closed", DeviceMemory_get_closed, NULL, PyDoc_STR("Whether free() was called."),
     NULL},
    {"__cuda_array_interface__", DeviceMemory_get_interface, NULL,
     PyDoc_STR("One dimension of bytes, for other CUDA libraries."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot DeviceMemory_slots[] = {
    {Py_tp_doc, PyDoc_STR("Memory on a device: see mem_alloc().\n\n"
                          "int() gives its address. Freed with its last reference.")},
    {Py_tp_dealloc, DeviceMemory_dealloc},
    {Py_tp_traverse, DeviceMemory_traverse},
    {Py_tp_repr, DeviceMemory_repr},
    {Py_nb_int, DeviceMemory_int},
    {Py_nb_index, DeviceMemory_int},
    {Py_tp_methods, DeviceMemory_methods},
    {Py_tp_getset, DeviceMemory_getset},
    {0, NULL},
};

PyType_Spec DeviceMemory_spec = {
    .name = "brainstorm_dbuf._cuda.DeviceMemory",
    .basicsize = sizeof(DeviceMemoryObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = DeviceMemory_slots,
};

PyMethodDef device_memory_functions[] = {
    {"mem_alloc", FASTCALL(mem_alloc),
     PyDoc_STR("mem_alloc($module, nbytes, context=None)\n--\n\n"
               "Return DeviceMemory of so many bytes; its contents are undefined.\n\n"
               "Waits for all work in the context. 0 bytes make no driver call.\n\n"
               "Raises CudaMemoryError if the device has not as much left.")},
    {"mem_get_info", FASTCALL(mem_get_info),
     PyDoc_STR("mem_get_info($module, context=None)\n--\n\n"
               "Return (free, total) bytes of the context's device.")},
    {NULL, NULL, 0, NULL},
};
