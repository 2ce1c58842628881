/* Stream: ours (created and destroyed), another library's, or a context's NULL stream.
 *
 * close() waits for the copies in flight and destroys; with another thread inside a
 * call of the stream it only closes the door, and that thread destroys when it leaves.
 * A closed stream is refused by name: its handle never turns into 0, which would mean
 * the default stream. */
#include "binding.h"

static StreamObject *
stream_new(ModuleState *state, CUstream handle, int is_ours, ContextObject *context,
           PyObject *owner)
{
    PyTypeObject *type = state->Stream_type;
    StreamObject *self = (StreamObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->state = state;
    self->handle = handle;
    self->is_ours = is_ours;
    self->context = (ContextObject *)Py_NewRef((PyObject *)context);
    self->owner = owner == Py_None ? NULL : Py_XNewRef(owner);
    self->ledger.stream = handle;
    self->ledger.is_foreign =
        !is_ours && self->owner == NULL && handle != NULL && handle != CU_STREAM_LEGACY;
    live.streams += is_ours;
    return self;
}

/* Wait for the copies in flight, then destroy. May be tried again after a failure.
 * Return the first failure, with its call, or success. */
static CUresult
stream_destroy(StreamObject *self, const char **call)
{
    CUresult status, waited = ledger_drain(&self->ledger, self->context, call);
    Scope scope;
    if (!self->is_ours || !driver_usable()) {
        return waited;
    }
    Py_BEGIN_ALLOW_THREADS
    IN_CONTEXT(scope, self->context->handle, status,
               driver.StreamDestroy(self->handle));
    Py_END_ALLOW_THREADS
    if (status == CUDA_SUCCESS || context_is_gone(status)) {
        self->is_ours = 0;
        live.streams--;
    }
    if (waited != CUDA_SUCCESS) {
        return waited;
    }
    *call = scope_call(&scope, "cuStreamDestroy");
    return status;
}

/* For the last one to leave a closed stream. */
void
stream_destroy_late(StreamObject *self)
{
    SavedError saved;
    const char *call;
    save_error(&saved);
    CUresult status = stream_destroy(self, &call);
    report_unraisable(self, call, status);
    restore_error(&saved);
}

/* ---- The `stream` argument ---- */

/* A foreign handle. Return 0, or -1 with an error set. */
static int
resolve_handle(ModuleState *state, unsigned long long value, StreamRef *ref)
{
    if (value == 2) {
        /* One number for another stream in each thread: a ledger cannot follow it. */
        PyErr_SetString(PyExc_ValueError, "the per-thread default stream (handle 2) is "
                                          "not supported; make a Stream");
        return -1;
    }
    if (driver_ready(state) < 0) {
        return -1;
    }
    if (value < 2) {
        return 0; /* NULL and CU_STREAM_LEGACY are the same stream */
    }
    CUcontext context = NULL;
    CUstream handle = (CUstream)(uintptr_t)value;
    CUresult status = driver.StreamGetCtx(handle, &context);
    if (status != CUDA_SUCCESS) {
        raise_cuda(state, "cuStreamGetCtx", status,
                   status == CUDA_ERROR_INVALID_CONTEXT ? NO_CONTEXT_ADVICE
                                                        : "stream %p",
                   (void *)handle);
        return -1;
    }
    ref->context = context_of_handle(state, context);
    ref->handle = handle;
    return ref->context == NULL ? -1 : 0;
}

/* Ask object.__cuda_stream__() for its handle. Return 0, or -1 with an error set. */
static int
resolve_protocol(ModuleState *state, PyObject *object, StreamRef *ref)
{
    PyObject *method = PyObject_GetAttr(object, state->str_cuda_stream);
    if (method == NULL) {
        if (PyErr_ExceptionMatches(PyExc_AttributeError)) {
            PyErr_Clear();
            PyErr_Format(PyExc_TypeError,
                         "stream must be a Stream, an object with __cuda_stream__, an "
                         "int or None, not %s",
                         Py_TYPE(object)->tp_name);
        }
        return -1;
    }
    PyObject *pair = PyObject_CallNoArgs(method);
    Py_DECREF(method);
    if (pair == NULL) {
        return -1;
    }
    int result = -1;
    unsigned long long value;
    if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2) {
        PyErr_SetString(PyExc_TypeError,
                        "__cuda_stream__() must return (version, handle)");
    }
    else if (address_argument("stream", PyTuple_GET_ITEM(pair, 1), &value) == 0) {
        result = resolve_handle(state, value, ref);
    }
    Py_DECREF(pair);
    return result;
}

/* All but a Stream. */
int
stream_resolve_slowly(ModuleState *state, PyObject *object, StreamRef *ref)
{
    if (object == NULL || object == Py_None) {
        return 0;
    }
    if (PyLong_Check(object)) {
        unsigned long long value;
        if (address_argument("stream", object, &value) < 0) {
            return -1;
        }
        return resolve_handle(state, value, ref);
    }
    return resolve_protocol(state, object, ref);
}

/* ---- Making ---- */

static PyObject *
Stream_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"context", "non_blocking", "priority", NULL};
    ModuleState *state = (ModuleState *)PyType_GetModuleState(type);
    PyObject *context_object = Py_None, *given = NULL;
    int non_blocking = 1, priority = 0;
    CUstream handle = NULL;
    CUresult status;
    Scope scope;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O$pO:Stream", names,
                                     &context_object, &non_blocking, &given) ||
        int_argument("priority", given, &priority) < 0) {
        return NULL;
    }
    ContextObject *context = context_argument(state, context_object);
    if (context == NULL) {
        return NULL;
    }
    unsigned int flags = non_blocking ? CU_STREAM_NON_BLOCKING : CU_STREAM_DEFAULT;
    Py_BEGIN_ALLOW_THREADS
    IN_CONTEXT(scope, context->handle, status,
               driver.StreamCreateWithPriority(&handle, flags, priority));
    Py_END_ALLOW_THREADS
    StreamObject *self = NULL;
    if (status != CUDA_SUCCESS) {
        raise_cuda(state, scope_call(&scope, "cuStreamCreateWithPriority"), status,
                   NULL);
    }
    else {
        self = stream_new(state, handle, 1, context, NULL);
        if (self == NULL) {
            IN_CONTEXT(scope, context->handle, status, driver.StreamDestroy(handle));
        }
    }
    Py_DECREF(context);
    return (PyObject *)self;
}

static PyObject *
Stream_legacy(PyObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"context", NULL};
    ModuleState *state = (ModuleState *)PyType_GetModuleState((PyTypeObject *)type);
    PyObject *context_object = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:legacy", names,
                                     &context_object)) {
        return NULL;
    }
    ContextObject *context = context_argument(state, context_object);
    if (context == NULL) {
        return NULL;
    }
    StreamObject *self = stream_new(state, NULL, 0, context, NULL);
    Py_DECREF(context);
    return (PyObject *)self;
}

static PyObject *
Stream_from_handle(PyObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"handle", "owner", "context", NULL};
    ModuleState *state = (ModuleState *)PyType_GetModuleState((PyTypeObject *)type);
    PyObject *handle, *owner = Py_None, *context_object = Py_None;
    unsigned long long value;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|OO:from_handle", names, &handle,
                                     &owner, &context_object) ||
        address_argument("handle", handle, &value) < 0) {
        return NULL;
    }
    StreamRef ref = {0};
    StreamObject *self = NULL;
    if (resolve_handle(state, value, &ref) < 0) {
        goto done;
    }
    if (context_object != Py_None || ref.context == NULL) {
        ContextObject *context = context_argument(state, context_object);
        if (context == NULL) {
            goto done;
        }
        if (ref.context != NULL && ref.context->handle != context->handle) {
            PyErr_Format(PyExc_ValueError, "stream %p belongs to %R, not to %R",
                         (void *)ref.handle, ref.context, context);
            Py_DECREF(context);
            goto done;
        }
        Py_XDECREF(ref.context);
        ref.context = context; /* the one given: it may be the one that has an owner */
    }
    self = stream_new(state, ref.handle, 0, ref.context, owner);
done:
    stream_release(&ref);
    return (PyObject *)self;
}

/* ---- Methods ---- */

static PyObject *
Stream_query(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    StreamObject *self = (StreamObject *)op;
    ModuleState *state = self->state;
    CUresult status;
    Scope scope;
    if (stream_enter(state, self) < 0) {
        return NULL;
    }
    uint64_t upto = self->ledger.tail;
    IN_CONTEXT(scope, self->context->handle, status, driver.StreamQuery(self->handle));
    if (status == CUDA_SUCCESS) {
        ledger_settle(&self->ledger, upto);
    }
    else if (status == CUDA_ERROR_NOT_READY) {
        ledger_poll(&self->ledger, self->context);
    }
    else {
        raise_cuda(state, scope_call(&scope, "cuStreamQuery"), status, NULL);
    }
    stream_leave(self);
    if (status == CUDA_SUCCESS) {
        Py_RETURN_TRUE;
    }
    if (status == CUDA_ERROR_NOT_READY) {
        Py_RETURN_FALSE;
    }
    return NULL;
}

static PyObject *
Stream_synchronize(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    StreamObject *self = (StreamObject *)op;
    ModuleState *state = self->state;
    CUresult status;
    Scope scope;
    if (stream_enter(state, self) < 0) {
        return NULL;
    }
    uint64_t upto =
        self->ledger.tail; /* what others issue meanwhile is not waited for */
    Py_BEGIN_ALLOW_THREADS
    IN_CONTEXT(scope, self->context->handle, status,
               driver.StreamSynchronize(self->handle));
    Py_END_ALLOW_THREADS
    if (status == CUDA_SUCCESS) {
        ledger_settle(&self->ledger, upto);
    }
    else {
        raise_cuda(state, scope_call(&scope, "cuStreamSynchronize"), status, NULL);
    }
    stream_leave(self);
    if (status != CUDA_SUCCESS) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
Stream_wait_event(PyObject *op, PyObject *event)
{
    StreamObject *self = (StreamObject *)op;
    ModuleState *state = self->state;
    if (!LIKELY(Py_IS_TYPE(event, state->Event_type))) {
        return PyErr_Format(PyExc_TypeError, "event must be an Event, not %s",
                            Py_TYPE(event)->tp_name);
    }
    if (stream_enter(state, self) < 0) {
        return NULL;
    }
    int result =
        event_wait_on(state, (EventObject *)event, self->handle, self->context);
    stream_leave(self);
    if (result < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
Stream_record(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"event", NULL};
    static const Signature signature = {"record", names, 0, 1};
    StreamObject *self = (StreamObject *)op;
    ModuleState *state = self->state;
    PyObject *event = NULL;
    if (unpack(&signature, args, nargs, kwnames, &event) < 0) {
        return NULL;
    }
    if (event != NULL && event != Py_None && !Py_IS_TYPE(event, state->Event_type)) {
        return PyErr_Format(PyExc_TypeError, "event must be an Event or None, not %s",
                            Py_TYPE(event)->tp_name);
    }
    if (stream_enter(state, self) < 0) {
        return NULL;
    }
    EventObject *result;
    if (event == NULL || event == Py_None) {
        result = event_new(state, self->context, CU_EVENT_DISABLE_TIMING);
    }
    else {
        result = (EventObject *)Py_NewRef(event);
    }
    if (result != NULL &&
        event_record(state, result, self->handle, self->context) < 0) {
        Py_CLEAR(result);
    }
    stream_leave(self);
    return (PyObject *)result;
}

static PyObject *
Stream_close(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    StreamObject *self = (StreamObject *)op;
    ModuleState *state = self->state;
    const char *call;
    if (guard_is_closed(&self->guard)) {
        Py_RETURN_NONE;
    }
    if (driver_ready(state) < 0) {
        return NULL;
    }
    if (guard_close(&self->guard)) {
        CUresult status = stream_destroy(self, &call);
        if (status != CUDA_SUCCESS && !context_is_gone(status)) {
            return raise_cuda(state, call, status, NULL);
        }
    }
    Py_RETURN_NONE;
}

static PyObject *
Stream_enter(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    if (guard_is_closed(&((StreamObject *)op)->guard)) {
        return raise_closed("Stream");
    }
    return Py_NewRef(op);
}

static PyObject *
Stream_exit(PyObject *op, PyObject *Py_UNUSED(args))
{
    return Stream_close(op, NULL);
}

static PyObject *
Stream_cuda_stream(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    StreamObject *self = (StreamObject *)op;
    if (guard_is_closed(&self->guard)) {
        return raise_closed("Stream");
    }
    return Py_BuildValue("(iN)", 0, PyLong_FromVoidPtr((void *)self->handle));
}

static PyObject *
Stream_get_handle(PyObject *op, void *Py_UNUSED(closure))
{
    StreamObject *self = (StreamObject *)op;
    if (guard_is_closed(&self->guard)) {
        return raise_closed("Stream");
    }
    return PyLong_FromVoidPtr((void *)self->handle);
}

static PyObject *
Stream_get_context(PyObject *op, void *Py_UNUSED(closure))
{
    return Py_NewRef((PyObject *)((StreamObject *)op)->context);
}

static PyObject *
Stream_get_closed(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(guard_is_closed(&((StreamObject *)op)->guard));
}

static PyObject *
Stream_get_priority(PyObject *op, void *Py_UNUSED(closure))
{
    StreamObject *self = (StreamObject *)op;
    ModuleState *state = self->state;
    int priority = 0;
    CUresult status;
    Scope scope;
    if (stream_enter(state, self) < 0) {
        return NULL;
    }
    IN_CONTEXT(scope, self->context->handle, status,
               driver.StreamGetPriority(self->handle, &priority));
    stream_leave(self);
    if (status != CUDA_SUCCESS) {
        return raise_cuda(state, scope_call(&scope, "cuStreamGetPriority"), status,
                          NULL);
    }
    return PyLong_FromLong(priority);
}

static PyObject *
Stream_repr(PyObject *op)
{
    StreamObject *self = (StreamObject *)op;
    if (guard_is_closed(&self->guard)) {
        return PyUnicode_FromString("<Stream closed>");
    }
    if (self->handle == NULL) {
        return PyUnicode_FromFormat("<Stream legacy of %R>", self->context);
    }
    return PyUnicode_FromFormat("<Stream %p of %R>", (void *)self->handle,
                                self->context);
}

/* ---- Life ---- */

static int
Stream_traverse(PyObject *op, visitproc visit, void *arg)
{
    StreamObject *self = (StreamObject *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->context);
    Py_VISIT(self->owner);
    return ledger_traverse(&self->ledger, visit, arg);
}

/* The context stays until dealloc, which needs it; a Context breaks cycles itself. */
static int
Stream_clear(PyObject *op)
{
    StreamObject *self = (StreamObject *)op;
    if (self->context != NULL) {
        const char *call;
        (void)ledger_drain(&self->ledger, self->context, &call);
    }
    Py_CLEAR(self->owner);
    return 0;
}

static void
Stream_dealloc(PyObject *op)
{
    StreamObject *self = (StreamObject *)op;
    PyTypeObject *type = Py_TYPE(op);
    SavedError saved;
    PyObject_GC_UnTrack(op);
    save_error(&saved);
    if (self->context != NULL) {
        const char *call;
        CUresult status = stream_destroy(self, &call);
        report_unraisable(self, call, status);
    }
    live.streams -= self->is_ours; /* lost, but no object of ours any more */
    ledger_free(&self->ledger);
    Py_CLEAR(self->owner);
    Py_CLEAR(self->context);
    restore_error(&saved);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyMethodDef Stream_methods[] = {
    {"legacy", (PyCFunction)(void (*)(void))Stream_legacy,
     METH_CLASS | METH_VARARGS | METH_KEYWORDS,
     PyDoc_STR("legacy($type, context=None)\n--\n\n"
               "Return the NULL stream of a context, the current one by default.")},
    {"from_handle", (PyCFunction)(void (*)(void))Stream_from_handle,
     METH_CLASS | METH_VARARGS | METH_KEYWORDS,
     PyDoc_STR("from_handle($type, handle, owner=None, context=None)\n--\n\n"
               "Wrap another library's stream; close() does not destroy it.\n\n"
               "`owner` is kept alive; the context is asked from the driver.")},
    {"query", Stream_query, METH_NOARGS,
     PyDoc_STR("query($self, /)\n--\n\nReturn whether all its work is done.")},
    {"synchronize", Stream_synchronize, METH_NOARGS,
     PyDoc_STR("synchronize($self, /)\n--\n\n"
               "Wait for all its work, with the GIL released.")},
    {"wait_event", Stream_wait_event, METH_O,
     PyDoc_STR("wait_event($self, event, /)\n--\n\n"
               "Let all later work of the stream wait for what the event recorded.\n\n"
               "Raises ValueError if the event was never recorded.")},
    {"record", FASTCALL(Stream_record),
     PyDoc_STR("record($self, event=None)\n--\n\n"
               "Record an event behind all work issued so far, and return it.\n\n"
               "Without one a new Event is made, without timing.")},
    {"close", Stream_close, METH_NOARGS,
     PyDoc_STR(
         "close($self, /)\n--\n\n"
         "Wait for the copies in flight and destroy the stream. Twice is harmless.")},
    {"__enter__", Stream_enter, METH_NOARGS,
     PyDoc_STR("__enter__($self, /)\n--\n\nReturn the stream.")},
    {"__exit__", Stream_exit, METH_VARARGS,
     PyDoc_STR("__exit__($self, /, *args)\n--\n\nclose().")},
    {"__cuda_stream__", Stream_cuda_stream, METH_NOARGS,
     PyDoc_STR("__cuda_stream__($self, /)\n--\n\n"
               "Return (0, handle), for other CUDA libraries.")},
    REFUSE_PICKLING,
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef Stream_getset[] = {
    {"handle", Stream_get_handle, NULL,
     PyDoc_STR("The CUstream as an int; 0 is the NULL stream."), NULL},
    {"context", Stream_get_context, NULL, PyDoc_STR("Its Context."), NULL},
    {"closed", Stream_get_closed, NULL, PyDoc_STR("Whether close() was called."), NULL},
    {"priority", Stream_get_priority, NULL,
     PyDoc_STR("Its priority: lower numbers go first."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot Stream_slots[] = {
    {Py_tp_doc,
     PyDoc_STR(
         "Stream(context=None, *, non_blocking=True, priority=0)\n--\n\n"
         "A queue of work on the device.\n\n"
         "A non-blocking stream is not ordered with the NULL stream: use events.")},
    {Py_tp_new, Stream_new},
    {Py_tp_dealloc, Stream_dealloc},
    {Py_tp_traverse, Stream_traverse},
    {Py_tp_clear, Stream_clear},
    {Py_tp_repr, Stream_repr},
    {Py_tp_methods, Stream_methods},
    {Py_tp_getset, Stream_getset},
    {0, NULL},
};

PyType_Spec Stream_spec = {
    .name = "brainstorm_dbuf._cuda.Stream",
    .basicsize = sizeof(StreamObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = Stream_slots,
};
