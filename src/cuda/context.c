/* Context: which context is whose, and what keeps it alive.
 *
 * For one handle there may be several Context objects; they are equal. A list holds the
 * live ones, those that keep their context alive first, so that "the current
 * context" finds the object that owns it: an array made in it then holds the real
 * owner, not just a number. A context that somebody else made and nobody handed us an
 * owner for is borrowed, and may go at any time: deallocs expect that. */
#include "binding.h"

/* Borrowed: a Context takes itself off when it dies. Not in the module state, which may
 * be gone by then: at exit the garbage collector takes module and objects in any order.
 */
static ContextObject *all_contexts;

static int
keeps_alive(ContextObject *self)
{
    return self->is_primary || self->owner != NULL;
}

/* The first live object of this module with the handle (NULL: any). Borrowed, or NULL.
 */
static ContextObject *
find_context(ModuleState *state, CUcontext handle)
{
    for (ContextObject *it = all_contexts; it != NULL; it = it->next) {
        if (Py_IS_TYPE((PyObject *)it, state->Context_type) &&
            (handle == NULL || it->handle == handle)) {
            return it;
        }
    }
    return NULL;
}

/* The live object that holds a device's primary context. Borrowed, or NULL. */
static ContextObject *
find_primary(ModuleState *state, CUdevice device)
{
    for (ContextObject *it = all_contexts; it != NULL; it = it->next) {
        if (Py_IS_TYPE((PyObject *)it, state->Context_type) && it->is_primary &&
            it->device == device) {
            return it;
        }
    }
    return NULL;
}

/* A new object on the list. Steals nothing; the caller sets what it holds. */
static ContextObject *
context_new(ModuleState *state, CUcontext handle, PyObject *owner, int is_primary)
{
    PyTypeObject *type = state->Context_type;
    ContextObject *self = (ContextObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->handle = handle;
    self->owner = Py_XNewRef(owner);
    self->is_primary = is_primary;
    ContextObject **place = &all_contexts;
    while (*place != NULL && !keeps_alive(self)) {
        place = &(*place)->next; /* borrowed ones to the end */
    }
    self->next = *place;
    *place = self;
    live.contexts++;
    return self;
}

ContextObject *
context_of_handle(ModuleState *state, CUcontext handle)
{
    ContextObject *self = find_context(state, handle);
    if (self != NULL) {
        return (ContextObject *)Py_NewRef((PyObject *)self);
    }
    return context_new(state, handle, NULL, 0);
}

ContextObject *
context_current(ModuleState *state)
{
    CUcontext handle = NULL;
    if (driver_ready(state) < 0) {
        return NULL;
    }
    CUresult status = driver.CtxGetCurrent(&handle);
    if (status != CUDA_SUCCESS) {
        raise_cuda(state, "cuCtxGetCurrent", status, NULL);
        return NULL;
    }
    if (handle == NULL) {
        raise_cuda(state, "cuCtxGetCurrent", CUDA_ERROR_INVALID_CONTEXT,
                   NO_CONTEXT_ADVICE);
        return NULL;
    }
    return context_of_handle(state, handle);
}

ContextObject *
context_any(ModuleState *state)
{
    CUcontext current = NULL;
    if (driver_ready(state) < 0) {
        return NULL;
    }
    if (driver.CtxGetCurrent(&current) == CUDA_SUCCESS && current == NULL) {
        ContextObject *any = find_context(state, NULL);
        if (any != NULL) {
            return (ContextObject *)Py_NewRef((PyObject *)any);
        }
    }
    return context_current(state);
}

ContextObject *
context_argument(ModuleState *state, PyObject *object)
{
    if (object == NULL || object == Py_None) {
        return context_current(state);
    }
    if (!Py_IS_TYPE(object, state->Context_type)) {
        PyErr_Format(PyExc_TypeError, "context must be a Context or None, not %s",
                     Py_TYPE(object)->tp_name);
        return NULL;
    }
    if (driver_ready(state) < 0) {
        return NULL;
    }
    return (ContextObject *)Py_NewRef(object);
}

int
context_device(ModuleState *state, ContextObject *self, int *ordinal)
{
    if (!self->device_is_known) {
        CUdevice device = 0;
        CUresult status;
        Scope scope;
        IN_CONTEXT(scope, self->handle, status, driver.CtxGetDevice(&device));
        if (status != CUDA_SUCCESS) {
            raise_cuda(state, scope_call(&scope, "cuCtxGetDevice"), status, NULL);
            return -1;
        }
        self->device = device;
        self->device_is_known = 1;
    }
    *ordinal = (int)self->device;
    return 0;
}

void
contexts_learn_devices(ModuleState *state, ContextObject *first, ContextObject *second)
{
    ContextObject *contexts[] = {first, second};
    int ordinal;
    for (int i = 0; i < 2; i++) {
        if (contexts[i] != NULL && context_device(state, contexts[i], &ordinal) < 0) {
            PyErr_Clear(); /* then they have a handle alone */
        }
    }
}

void
contexts_synchronize_others(CUcontext except)
{
    ContextObject *self = (ContextObject *)Py_XNewRef((PyObject *)all_contexts);
    while (self != NULL) {
        if (self->handle != except) {
            CUresult status;
            Scope scope;
            Py_BEGIN_ALLOW_THREADS
            IN_CONTEXT(scope, self->handle, status, driver.CtxSynchronize());
            Py_END_ALLOW_THREADS(void)
            status;
        }
        /* It is on the list still: we hold it. */
        ContextObject *next = (ContextObject *)Py_XNewRef((PyObject *)self->next);
        Py_DECREF((PyObject *)self);
        self = next;
    }
}

int
context_max_pitch(ModuleState *state, ContextObject *self, size_t *pitch)
{
    if (self->max_pitch == 0) {
        const char *call = "cuCtxGetDevice";
        CUdevice device = 0;
        int value = 0;
        Scope scope;
        CUresult status = scope_enter(&scope, self->handle);
        if (status == CUDA_SUCCESS) {
            status = driver.CtxGetDevice(&device);
            if (status == CUDA_SUCCESS) {
                call = "cuDeviceGetAttribute";
                status = driver.DeviceGetAttribute(
                    &value, CU_DEVICE_ATTRIBUTE_MAX_PITCH, device);
            }
            scope_leave(&scope);
        }
        if (status != CUDA_SUCCESS) {
            raise_cuda(state, scope_call(&scope, call), status, NULL);
            return -1;
        }
        self->max_pitch = value;
    }
    *pitch = (size_t)self->max_pitch;
    return 0;
}

/* Free the ledgers with nothing left in them: their foreign streams may be gone. */
static void
sweep_ledgers(ContextObject *self)
{
    for (Ledger *it = self->ledgers; it != NULL; it = it->next) {
        it->users++; /* dropping references may run code that sweeps as well */
        ledger_poll(it, self);
        it->users--;
    }
    Ledger **place = &self->ledgers;
    while (*place != NULL) {
        Ledger *ledger = *place;
        if (ledger->stream != NULL && ledger->users == 0 &&
            ledger->head == ledger->tail) {
            const char *call;
            *place = ledger->next;
            (void)ledger_drain(ledger, self, &call);
            ledger_free(ledger);
            PyMem_Free(ledger);
        }
        else {
            place = &ledger->next;
        }
    }
}

Ledger *
context_ledger(ContextObject *self, CUstream stream)
{
    for (Ledger *it = self->ledgers; it != NULL; it = it->next) {
        if (it->stream == stream) {
            return it;
        }
    }
    sweep_ledgers(self);
    Ledger *ledger = PyMem_Calloc(1, sizeof(Ledger));
    if (ledger == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    ledger->stream = stream;
    ledger->is_foreign = stream != NULL && stream != CU_STREAM_LEGACY;
    ledger->next = self->ledgers;
    self->ledgers = ledger;
    return ledger;
}

/* Wait for what runs in the context, and let go of what its ledgers hold. What other
 * threads issue meanwhile is not waited for, so each ledger's end is noted before.
 * Return None, or NULL with an error set. */
static PyObject *
context_synchronize(ModuleState *state, ContextObject *self)
{
    CUresult status;
    Scope scope;
    Ledger *first = self->ledgers; /* new ledgers go in front of it */
    size_t count = 0;
    for (Ledger *it = first; it != NULL; it = it->next) {
        count++;
    }
    uint64_t *upto = PyMem_New(uint64_t, count);
    if (upto == NULL) {
        return PyErr_NoMemory();
    }
    size_t i = 0;
    for (Ledger *it = first; it != NULL; it = it->next) {
        it->users++; /* a ledger in use is not swept */
        upto[i++] = it->tail;
    }
    Py_BEGIN_ALLOW_THREADS
    IN_CONTEXT(scope, self->handle, status, driver.CtxSynchronize());
    Py_END_ALLOW_THREADS
    i = 0;
    for (Ledger *it = first; it != NULL; it = it->next) {
        if (status == CUDA_SUCCESS) {
            ledger_settle(it, upto[i++]);
        }
        it->users--;
    }
    PyMem_Free(upto);
    if (status != CUDA_SUCCESS) {
        return raise_cuda(state, scope_call(&scope, "cuCtxSynchronize"), status, NULL);
    }
    Py_RETURN_NONE;
}

/* ---- Class methods ---- */

static PyObject *
Context_current(PyObject *type, PyObject *Py_UNUSED(ignored))
{
    return (PyObject *)context_current(
        (ModuleState *)PyType_GetModuleState((PyTypeObject *)type));
}

static PyObject *
Context_primary(PyObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ordinal", NULL};
    ModuleState *state = (ModuleState *)PyType_GetModuleState((PyTypeObject *)type);
    PyObject *given = NULL;
    int ordinal = 0;
    CUdevice device = 0;
    CUcontext handle = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:primary", names, &given) ||
        int_argument("ordinal", given, &ordinal) < 0) {
        return NULL;
    }
    PyObject *described = device_new(state, ordinal); /* for its checks and messages */
    if (described == NULL) {
        return NULL;
    }
    Py_DECREF(described);
    CUresult status = driver.DeviceGet(&device, ordinal);
    if (status != CUDA_SUCCESS) {
        return raise_cuda(state, "cuDeviceGet", status, "device %d", ordinal);
    }
    ContextObject *self = find_primary(state, device);
    if (self != NULL) {
        return Py_NewRef((PyObject *)self);
    }
    Py_BEGIN_ALLOW_THREADS
    status = driver.DevicePrimaryCtxRetain(&handle, device);
    Py_END_ALLOW_THREADS
    if (status != CUDA_SUCCESS) {
        return raise_cuda(state, "cuDevicePrimaryCtxRetain", status, "device %d",
                          ordinal);
    }
    self = find_primary(state, device); /* another thread may have been faster */
    if (self != NULL) {
        Py_INCREF(self);
    }
    else {
        self = context_new(state, handle, NULL, 1);
        if (self != NULL) {
            self->device = device;
            self->device_is_known = 1;
            return (PyObject *)self;
        }
    }
    (void)driver.DevicePrimaryCtxRelease(device);
    return (PyObject *)self;
}

static PyObject *
Context_from_handle(PyObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"handle", "owner", NULL};
    ModuleState *state = (ModuleState *)PyType_GetModuleState((PyTypeObject *)type);
    PyObject *handle_object, *owner = Py_None;
    unsigned long long value;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O:from_handle", names,
                                     &handle_object, &owner) ||
        address_argument("handle", handle_object, &value) < 0 ||
        driver_ready(state) < 0) {
        return NULL;
    }
    if (value == 0) {
        PyErr_SetString(PyExc_ValueError, "handle is 0: that is no context");
        return NULL;
    }
    CUcontext handle = (CUcontext)(uintptr_t)value;
    if (owner == Py_None) {
        return (PyObject *)context_of_handle(state, handle);
    }
    return (PyObject *)context_new(state, handle, owner, 0);
}

/* ---- Methods ---- */

static PyObject *
Context_push(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    ContextObject *self = (ContextObject *)op;
    ModuleState *state = state_of(self);
    if (driver_ready(state) < 0) {
        return NULL;
    }
    CUresult status = driver.CtxPushCurrent(self->handle);
    if (status != CUDA_SUCCESS) {
        return raise_cuda(state, "cuCtxPushCurrent", status, NULL);
    }
    self->pushes++;
    Py_INCREF(self);
    Py_RETURN_NONE;
}

/* End a push. */
static void
drop_push(ContextObject *self)
{
    if (self->pushes > 0) { /* 0: another library pushed it */
        self->pushes--;
        Py_DECREF(self);
    }
}

/* Raise for a pop that failed. The context counts as current still, and is held; not
 * where it is lost: no work of this process needs it any more. */
static PyObject *
raise_unpopped(ModuleState *state, ContextObject *self, const char *call,
               CUresult status)
{
    if (context_is_lost(status)) {
        drop_push(self);
    }
    return raise_cuda(state, call, status, NULL);
}

static PyObject *
Context_pop(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    ContextObject *self = (ContextObject *)op;
    ModuleState *state = state_of(self);
    CUcontext handle = NULL;
    if (driver_ready(state) < 0) {
        return NULL;
    }
    CUresult status = driver.CtxGetCurrent(&handle);
    if (status != CUDA_SUCCESS) {
        return raise_unpopped(state, self, "cuCtxGetCurrent", status);
    }
    if (handle != self->handle) {
        return PyErr_Format(PyExc_ValueError,
                            "context %p is not the one current in this thread (%p)",
                            (void *)self->handle, (void *)handle);
    }
    status = driver.CtxPopCurrent(&handle);
    if (status != CUDA_SUCCESS) {
        return raise_unpopped(state, self, "cuCtxPopCurrent", status);
    }
    drop_push(self);
    Py_RETURN_NONE;
}

static PyObject *
Context_enter(PyObject *op, PyObject *ignored)
{
    PyObject *none = Context_push(op, ignored);
    if (none == NULL) {
        return NULL;
    }
    Py_DECREF(none);
    return Py_NewRef(op);
}

static PyObject *
Context_exit(PyObject *op, PyObject *Py_UNUSED(args))
{
    return Context_pop(op, NULL);
}

static PyObject *
Context_synchronize(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    ContextObject *self = (ContextObject *)op;
    ModuleState *state = state_of(self);
    if (driver_ready(state) < 0) {
        return NULL;
    }
    return context_synchronize(state, self);
}

static PyObject *
Context_get_handle(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromVoidPtr((void *)((ContextObject *)op)->handle);
}

static PyObject *
Context_get_device(PyObject *op, void *Py_UNUSED(closure))
{
    ContextObject *self = (ContextObject *)op;
    ModuleState *state = state_of(self);
    CUdevice device = 0, candidate = 0;
    CUresult status;
    Scope scope;
    if (driver_ready(state) < 0) {
        return NULL;
    }
    IN_CONTEXT(scope, self->handle, status, driver.CtxGetDevice(&device));
    if (status != CUDA_SUCCESS) {
        return raise_cuda(state, scope_call(&scope, "cuCtxGetDevice"), status, NULL);
    }
    int ordinal = 0;
    while ((status = driver.DeviceGet(&candidate, ordinal)) == CUDA_SUCCESS &&
           candidate != device) {
        ordinal++;
    }
    if (status != CUDA_SUCCESS) {
        return raise_cuda(state, "cuDeviceGet", status, "device %d", ordinal);
    }
    return device_new(state, ordinal);
}

static PyObject *
Context_repr(PyObject *op)
{
    ContextObject *self = (ContextObject *)op;
    const char *primary = self->is_primary ? " (primary)" : "";
    if (self->device_is_known) {
        return PyUnicode_FromFormat("<Context %p%s of device %d>", (void *)self->handle,
                                    primary, (int)self->device);
    }
    return PyUnicode_FromFormat("<Context %p%s>", (void *)self->handle, primary);
}

static Py_hash_t
Context_hash(PyObject *op)
{
    Py_hash_t hash = (Py_hash_t)((uintptr_t)((ContextObject *)op)->handle >> 4);
    return hash == -1 ? -2 : hash;
}

static PyObject *
Context_richcompare(PyObject *op, PyObject *other, int operation)
{
    if (!Py_IS_TYPE(other, Py_TYPE(op)) || (operation != Py_EQ && operation != Py_NE)) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    int equal = ((ContextObject *)op)->handle == ((ContextObject *)other)->handle;
    return PyBool_FromLong(equal == (operation == Py_EQ));
}

/* ---- Life ---- */

static int
Context_traverse(PyObject *op, visitproc visit, void *arg)
{
    ContextObject *self = (ContextObject *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->owner);
    for (Ledger *it = self->ledgers; it != NULL; it = it->next) {
        int stop = ledger_traverse(it, visit, arg);
        if (stop) {
            return stop;
        }
    }
    return 0;
}

/* Wait for what is in flight on streams without an object; first failure, or success.
 */
static CUresult
drain_ledgers(ContextObject *self, const char **call)
{
    CUresult first = CUDA_SUCCESS;
    *call = NULL;
    for (Ledger *it = self->ledgers; it != NULL; it = it->next) {
        const char *its_call;
        it->users++; /* not to be swept while we wait */
        CUresult status = ledger_drain(it, self, &its_call);
        it->users--;
        if (first == CUDA_SUCCESS) {
            first = status;
            *call = its_call;
        }
    }
    return first;
}

static int
Context_clear(PyObject *op)
{
    ContextObject *self = (ContextObject *)op;
    const char *call;
    (void)drain_ledgers(self, &call);
    Py_CLEAR(self->owner);
    return 0;
}

static void
Context_dealloc(PyObject *op)
{
    ContextObject *self = (ContextObject *)op;
    PyTypeObject *type = Py_TYPE(op);
    SavedError saved;
    PyObject_GC_UnTrack(op);
    save_error(&saved);
    for (ContextObject **place = &all_contexts; *place != NULL;
         place = &(*place)->next) {
        if (*place == self) { /* first of all: nobody may find it any more */
            *place = self->next;
            break;
        }
    }
    const char *call;
    CUresult waited = drain_ledgers(self, &call);
    report_unraisable(self, call, waited);
    while (self->ledgers != NULL) {
        Ledger *ledger = self->ledgers;
        self->ledgers = ledger->next;
        ledger_free(ledger);
        PyMem_Free(ledger);
    }
    if (self->is_primary && driver_usable()) {
        CUresult status;
        Py_BEGIN_ALLOW_THREADS
        status = driver.DevicePrimaryCtxRelease(self->device);
        Py_END_ALLOW_THREADS
        report_unraisable(self, "cuDevicePrimaryCtxRelease", status);
    }
    Py_CLEAR(self->owner);
    live.contexts--;
    restore_error(&saved);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyMethodDef Context_methods[] = {
    {"current", Context_current, METH_CLASS | METH_NOARGS,
     PyDoc_STR("current($type, /)\n--\n\n"
               "Return the context current in this thread.\n\n"
               "Raises CudaError (CUDA_ERROR_INVALID_CONTEXT) if there is none.")},
    {"primary", (PyCFunction)(void (*)(void))Context_primary,
     METH_CLASS | METH_VARARGS | METH_KEYWORDS,
     PyDoc_STR(
         "primary($type, ordinal=0)\n--\n\n"
         "Return the primary context of a device, which the CUDA runtime uses too.\n\n"
         "It is retained until the last object that holds it is gone. It is not "
         "made current: use `with context:`.\n\n"
         "Raises ValueError if there is no such device, DriverError without a "
         "driver.")},
    {"from_handle", (PyCFunction)(void (*)(void))Context_from_handle,
     METH_CLASS | METH_VARARGS | METH_KEYWORDS,
     PyDoc_STR("from_handle($type, handle, owner=None)\n--\n\n"
               "Wrap a context that another library made.\n\n"
               "`owner` is kept alive as long as anything of ours uses the context.")},
    {"push", Context_push, METH_NOARGS,
     PyDoc_STR("push($self, /)\n--\n\n"
               "Make it current in this thread; pop() puts the one before back.\n\n"
               "The object lives until then, even if nothing else refers to it.")},
    {"pop", Context_pop, METH_NOARGS,
     PyDoc_STR("pop($self, /)\n--\n\n"
               "Undo push().\n\nRaises ValueError if another context is current.")},
    {"synchronize", Context_synchronize, METH_NOARGS,
     PyDoc_STR("synchronize($self, /)\n--\n\n"
               "Wait for all work in the context, with the GIL released.")},
    {"__enter__", Context_enter, METH_NOARGS,
     PyDoc_STR("__enter__($self, /)\n--\n\npush(), and return the context.")},
    {"__exit__", Context_exit, METH_VARARGS,
     PyDoc_STR("__exit__($self, /, *args)\n--\n\npop().")},
    REFUSE_PICKLING,
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef Context_getset[] = {
    {"handle", Context_get_handle, NULL, PyDoc_STR("The CUcontext, as an int."), NULL},
    {"device", Context_get_device, NULL, PyDoc_STR("Its Device."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot Context_slots[] = {
    {Py_tp_doc,
     PyDoc_STR("A CUDA context: see current(), primary() and from_handle().\n\n"
               "Contexts with the same handle are equal. Each stream, event "
               "and piece of memory holds its context.")},
    {Py_tp_dealloc, Context_dealloc},
    {Py_tp_traverse, Context_traverse},
    {Py_tp_clear, Context_clear},
    {Py_tp_repr, Context_repr},
    {Py_tp_hash, Context_hash},
    {Py_tp_richcompare, Context_richcompare},
    {Py_tp_methods, Context_methods},
    {Py_tp_getset, Context_getset},
    {0, NULL},
};

PyType_Spec Context_spec = {
    .name = "brainstorm_dbuf._cuda.Context",
    .basicsize = sizeof(ContextObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE |
             Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = Context_slots,
};
