/* Event: a mark in a stream. The driver calls a never recorded event "done"; here it is
 * refused, so that nobody takes a batch that was never copied. */
#include "binding.h"

EventObject *
event_new(ModuleState *state, ContextObject *context, unsigned int flags)
{
    PyTypeObject *type = state->Event_type;
    EventObject *self = (EventObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    CUresult status;
    Scope scope;
    self->state = state;
    self->context = (ContextObject *)Py_NewRef((PyObject *)context);
    self->timing = (flags & CU_EVENT_DISABLE_TIMING) == 0;
    IN_CONTEXT(scope, context->handle, status,
               driver.EventCreate(&self->handle, flags));
    if (status != CUDA_SUCCESS) {
        self->handle = NULL;
        raise_cuda(state, scope_call(&scope, "cuEventCreate"), status, NULL);
        Py_DECREF(self);
        return NULL;
    }
    live.events++;
    return self;
}

/* Destroy; may be tried again after a failure. cuEventDestroy never waits. */
static CUresult
event_destroy(EventObject *self, const char **call)
{
    CUresult status;
    Scope scope;
    *call = "cuEventDestroy";
    if (self->handle == NULL || !driver_usable()) {
        return CUDA_SUCCESS;
    }
    IN_CONTEXT(scope, self->context->handle, status, driver.EventDestroy(self->handle));
    if (status == CUDA_SUCCESS || context_is_gone(status)) {
        self->handle = NULL;
        live.events--;
    }
    *call = scope_call(&scope, *call);
    return status;
}

/* For the last one to leave a closed event. */
void
event_destroy_late(EventObject *self)
{
    SavedError saved;
    const char *call;
    save_error(&saved);
    CUresult status = event_destroy(self, &call);
    report_unraisable(self, call, status);
    restore_error(&saved);
}

void
event_raise_other_context(ModuleState *state, EventObject *self,
                          ContextObject *stream_context)
{
    contexts_learn_devices(state, self->context, stream_context);
    PyErr_Format(PyExc_ValueError, "the event is of %R, the stream of %R",
                 self->context, stream_context);
}

static PyObject *
Event_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"context", "timing", "blocking_sync", NULL};
    ModuleState *state = (ModuleState *)PyType_GetModuleState(type);
    PyObject *context_object = Py_None;
    int timing = 0, blocking_sync = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O$pp:Event", names,
                                     &context_object, &timing, &blocking_sync)) {
        return NULL;
    }
    ContextObject *context = context_argument(state, context_object);
    if (context == NULL) {
        return NULL;
    }
    unsigned int flags = (timing ? 0 : CU_EVENT_DISABLE_TIMING) |
                         (blocking_sync ? CU_EVENT_BLOCKING_SYNC : 0);
    EventObject *self = event_new(state, context, flags);
    Py_DECREF(context);
    return (PyObject *)self;
}

static PyObject *
Event_record(PyObject *op, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {"stream", NULL};
    static const Signature signature = {"record", names, 0, 1};
    EventObject *self = (EventObject *)op;
    ModuleState *state = self->state;
    PyObject *object = NULL;
    StreamRef stream = {0};
    int result = -1;
    if (unpack(&signature, args, nargs, kwnames, &object) < 0) {
        return NULL;
    }
    if (stream_resolve(state, object, &stream) == 0) {
        /* No context: the NULL stream, of this event's context. */
        result = event_record(state, self, stream.handle,
                              stream.context != NULL ? stream.context : self->context);
    }
    stream_release(&stream);
    return result < 0 ? NULL : Py_NewRef(op);
}

static PyObject *
Event_query(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    EventObject *self = (EventObject *)op;
    ModuleState *state = self->state;
    CUresult status;
    Scope scope;
    if (event_enter_recorded(state, self) < 0) {
        return NULL;
    }
    IN_CONTEXT(scope, self->context->handle, status, driver.EventQuery(self->handle));
    event_leave(self);
    if (status == CUDA_SUCCESS) {
        Py_RETURN_TRUE;
    }
    if (status == CUDA_ERROR_NOT_READY) {
        Py_RETURN_FALSE;
    }
    return raise_cuda(state, scope_call(&scope, "cuEventQuery"), status, NULL);
}

static PyObject *
Event_synchronize(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    EventObject *self = (EventObject *)op;
    ModuleState *state = self->state;
    CUresult status;
    Scope scope;
    if (event_enter_recorded(state, self) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    IN_CONTEXT(scope, self->context->handle, status,
               driver.EventSynchronize(self->handle));
    Py_END_ALLOW_THREADS
    event_leave(self);
    if (status != CUDA_SUCCESS) {
        return raise_cuda(state, scope_call(&scope, "cuEventSynchronize"), status,
                          NULL);
    }
    Py_RETURN_NONE;
}

static PyObject *
Event_elapsed_time(PyObject *op, PyObject *end_object)
{
    EventObject *self = (EventObject *)op;
    EventObject *end = (EventObject *)end_object;
    ModuleState *state = self->state;
    float milliseconds = 0;
    CUresult status;
    Scope scope;
    if (!Py_IS_TYPE(end_object, state->Event_type)) {
        return PyErr_Format(PyExc_TypeError, "end must be an Event, not %s",
                            Py_TYPE(end_object)->tp_name);
    }
    if (!self->timing || !end->timing) {
        PyErr_Format(PyExc_ValueError,
                     "the %s event has timing off; make it with "
                     "Event(timing=True)",
                     self->timing ? "end" : "start");
        return NULL;
    }
    if (self->context->handle != end->context->handle) {
        int start_device, end_device;
        if (context_device(state, self->context, &start_device) < 0 ||
            context_device(state, end->context, &end_device) < 0) {
            return NULL;
        }
        if (start_device != end_device) {
            return PyErr_Format(PyExc_ValueError,
                                "the start event is of %R, the end event of %R",
                                self->context, end->context);
        }
    }
    if (event_enter_recorded(state, self) < 0) {
        return NULL;
    }
    if (event_enter_recorded(state, end) < 0) {
        event_leave(self);
        return NULL;
    }
    IN_CONTEXT(scope, self->context->handle, status,
               driver.EventElapsedTime(&milliseconds, self->handle, end->handle));
    event_leave(end);
    event_leave(self);
    if (status == CUDA_ERROR_NOT_READY) {
        return raise_cuda(state, "cuEventElapsedTime", status,
                          "an event has not finished; call its synchronize() first");
    }
    if (status != CUDA_SUCCESS) {
        return raise_cuda(state, scope_call(&scope, "cuEventElapsedTime"), status,
                          NULL);
    }
    return PyFloat_FromDouble((double)milliseconds);
}

static PyObject *
Event_close(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    EventObject *self = (EventObject *)op;
    ModuleState *state = self->state;
    const char *call;
    if (guard_is_closed(&self->guard)) {
        Py_RETURN_NONE;
    }
    if (driver_ready(state) < 0) {
        return NULL;
    }
    if (guard_close(&self->guard)) {
        CUresult status = event_destroy(self, &call);
        if (status != CUDA_SUCCESS && !context_is_gone(status)) {
            return raise_cuda(state, call, status, NULL);
        }
    }
    Py_RETURN_NONE;
}

static PyObject *
Event_enter(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    if (guard_is_closed(&((EventObject *)op)->guard)) {
        return raise_closed("Event");
    }
    return Py_NewRef(op);
}

static PyObject *
Event_exit(PyObject *op, PyObject *Py_UNUSED(args))
{
    return Event_close(op, NULL);
}

static PyObject *
Event_get_handle(PyObject *op, void *Py_UNUSED(closure))
{
    EventObject *self = (EventObject *)op;
    if (guard_is_closed(&self->guard)) {
        return raise_closed("Event");
    }
    return PyLong_FromVoidPtr((void *)self->handle);
}

static PyObject *
Event_get_context(PyObject *op, void *Py_UNUSED(closure))
{
    return Py_NewRef((PyObject *)((EventObject *)op)->context);
}

static PyObject *
Event_get_recorded(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(((EventObject *)op)->recorded);
}

static PyObject *
Event_get_closed(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(guard_is_closed(&((EventObject *)op)->guard));
}

static PyObject *
Event_repr(PyObject *op)
{
    EventObject *self = (EventObject *)op;
    if (guard_is_closed(&self->guard)) {
        return PyUnicode_FromString("<Event closed>");
    }
    return PyUnicode_FromFormat("<Event %p of %R, %s>", (void *)self->handle,
                                self->context,
                                self->recorded ? "recorded" : "never recorded");
}

static int
Event_traverse(PyObject *op, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((EventObject *)op)->context); /* until dealloc, which needs it */
    return 0;
}

static void
Event_dealloc(PyObject *op)
{
    EventObject *self = (EventObject *)op;
    PyTypeObject *type = Py_TYPE(op);
    SavedError saved;
    const char *call;
    PyObject_GC_UnTrack(op);
    save_error(&saved);
    CUresult status = event_destroy(self, &call);
    report_unraisable(self, call, status);
    live.events -= self->handle != NULL; /* lost, but no object of ours any more */
    Py_CLEAR(self->context);
    restore_error(&saved);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyMethodDef Event_methods[] = {
    {"record", FASTCALL(Event_record),
     PyDoc_STR(
         "record($self, stream=None)\n--\n\n"
         "Record the event behind all work issued so far on a stream; return it.\n\n"
         "None is the NULL stream of the event's context.\n\n"
         "Raises ValueError if the stream is closed or of another context.")},
    {"query", Event_query, METH_NOARGS,
     PyDoc_STR("query($self, /)\n--\n\n"
               "Return whether what was recorded is done.\n\n"
               "Raises ValueError if the event was never recorded.")},
    {"synchronize", Event_synchronize, METH_NOARGS,
     PyDoc_STR("synchronize($self, /)\n--\n\n"
               "Wait for what was recorded, with the GIL released.\n\n"
               "Raises ValueError if the event was never recorded.")},
    {"elapsed_time", Event_elapsed_time, METH_O,
     PyDoc_STR(
         "elapsed_time($self, end, /)\n--\n\n"
         "Return the milliseconds from this event to `end`.\n\n"
         "Raises ValueError if one has timing off, was never recorded or is of another "
         "device, CudaError "
         "(CUDA_ERROR_NOT_READY) if one has not finished.")},
    {"close", Event_close, METH_NOARGS,
     PyDoc_STR("close($self, /)\n--\n\nDestroy the event. Twice is harmless.")},
    {"__enter__", Event_enter, METH_NOARGS,
     PyDoc_STR("__enter__($self, /)\n--\n\nReturn the event.")},
    {"__exit__", Event_exit, METH_VARARGS,
     PyDoc_STR("__exit__($self, /, *args)\n--\n\nclose().")},
    REFUSE_PICKLING,
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef Event_getset[] = {
    {"handle", Event_get_handle, NULL, PyDoc_STR("The CUevent, as an int."), NULL},
    {"context", Event_get_context, NULL, PyDoc_STR("Its Context."), NULL},
    {"recorded", Event_get_recorded, NULL,
     PyDoc_STR("Whether it was recorded at least once."), NULL},
    {"closed", Event_get_closed, NULL, PyDoc_STR("Whether close() was called."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot Event_slots[] = {
    {Py_tp_doc,
     PyDoc_STR("Event(context=None, *, timing=False, blocking_sync=False)\n--\n\n"
               "A mark in a stream's work, to wait for or to measure from.")},
    {Py_tp_new, Event_new},
    {Py_tp_dealloc, Event_dealloc},
    {Py_tp_traverse, Event_traverse},
    {Py_tp_repr, Event_repr},
    {Py_tp_methods, Event_methods},
    {Py_tp_getset, Event_getset},
    {0, NULL},
};

PyType_Spec Event_spec = {
    .name = "brainstorm_dbuf._cuda.Event",
    .basicsize = sizeof(EventObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = Event_slots,
};
