/* Engine: context, compute stream, kernels and memory of a device. Handlers and arrays
 * keep it alive, so it goes with the last of them. Not to be had from Python by itself.
 */
#include "kernels.h"

/* All live engines; borrowed, protected by the GIL. */
static EngineObject *engines;

/* What the driver says of a device. Return 0, or -1 with an error set. */
static int
ask_device(EngineObject *self, CUdevice device)
{
    int processors = 0;
    CUresult status = driver.DeviceGetAttribute(
        &processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
    if (status != CUDA_SUCCESS) {
        raise_cuda(self->state, "cuDeviceGetAttribute", status, NULL);
        return -1;
    }
    self->processors = (unsigned int)processors;
    return 0;
}

/* The page-locked words that kernels and small reads use. Return 0, or -1. */
static int
make_scratch(EngineObject *self)
{
    enum { BYTES = SCRATCH_BYTES + 64 };
    void *ptr = NULL;
    CUresult status;
    Scope scope;
    Py_BEGIN_ALLOW_THREADS
    IN_CONTEXT(scope, self->context->handle, status,
               driver.MemHostAlloc(
                   &ptr, BYTES, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP));
    Py_END_ALLOW_THREADS
    if (status != CUDA_SUCCESS) {
        raise_cuda(self->state, scope_call(&scope, "cuMemHostAlloc"), status,
                   "%d bytes of page-locked memory", (int)BYTES);
        return -1;
    }
    live.page_locked_blocks++;
    live.page_locked_bytes += BYTES;
    memset(ptr, 0, BYTES);
    self->scratch = ptr;
    self->fault = (volatile int *)((char *)ptr + SCRATCH_BYTES);
    return 0;
}

/* The live engine of a context that this module has made, borrowed, or NULL. Another
 * import of the module has types of its own. */
static EngineObject *
find_engine(const ModuleState *state, const ContextObject *context)
{
    for (EngineObject *it = engines; it != NULL; it = it->next) {
        if (it->state == state && it->context->handle == context->handle) {
            return it;
        }
    }
    return NULL;
}

/* A new engine in a context. NULL with an error set. */
static EngineObject *
engine_new(ModuleState *state, PyObject *module, ContextObject *context)
{
    PyTypeObject *type = state->Engine_type;
    EngineObject *self = (EngineObject *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->products = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    self->state = state;
    self->module = Py_NewRef(module);
    self->context = (ContextObject *)Py_NewRef((PyObject *)context);
    self->stream = (StreamObject *)PyObject_CallOneArg((PyObject *)state->Stream_type,
                                                       (PyObject *)context);
    if (self->stream == NULL || ask_device(self, context->device) < 0 ||
        make_scratch(self) < 0 || kernels_load(self) < 0) {
        Py_CLEAR(self);
    }
    return self;
}

EngineObject *
engine_of_device(ModuleState *state, PyObject *module, int ordinal)
{
    if (!kernels_built()) {
        PyErr_SetString(
            PyExc_RuntimeError,
            "CudaHandler: brainstorm_dbuf was built without its kernels, since no CUDA "
            "compiler was found; install nvcc (a CUDA toolkit, or the package "
            "nvidia-cuda-nvcc) and a C++ compiler, then install brainstorm_dbuf again");
        return NULL;
    }
    ContextObject *context = (ContextObject *)PyObject_CallMethod(
        (PyObject *)state->Context_type, "primary", "i", ordinal);
    if (context == NULL) {
        return NULL;
    }
    EngineObject *self = find_engine(state, context);
    if (self != NULL) {
        Py_INCREF(self);
    }
    else if ((self = engine_new(state, module, context)) != NULL) {
        EngineObject *other = find_engine(state, context); /* made by another thread */
        if (other != NULL) {
            Py_INCREF(other);
            Py_SETREF(self, other);
        }
        else {
            self->next = engines;
            engines = self;
        }
    }
    Py_DECREF(context);
    return self;
}

/* Take an engine out of the list, if it is in it. */
static void
unlist(EngineObject *self)
{
    for (EngineObject **place = &engines; *place != NULL; place = &(*place)->next) {
        if (*place == self) {
            *place = self->next;
            return;
        }
    }
}

static const char *
fault_text(int fault)
{
    switch (fault) {
    case FAULT_BINARIZE_V:
        return "binarize_v: an entry of v is no column of out";
    case FAULT_INDEX_M_BY_V:
        return "index_m_by_v: an entry of v is no column of m";
    case FAULT_MAXPOOL_ARGMAX:
        return "maxpool2d_backward_batch: an entry of argmax lies outside of its image";
    default:
        return "an unknown fault";
    }
}

int
engine_check_fault(EngineObject *self)
{
    int fault = *self->fault;
    if (fault == FAULT_NONE) {
        return 0;
    }
    *self->fault = FAULT_NONE;
    PyErr_Format(PyExc_IndexError, "%s (found out on the device by an earlier call)",
                 fault_text(fault));
    return -1;
}

int
engine_synchronize(EngineObject *self, const char *what)
{
    Op op;
    if (op_init(&op, self, what) < 0) {
        return -1;
    }
    op_begin(&op, 1);
    op_wait(&op);
    PyObject *done = op_end(&op);
    if (done == NULL) {
        return -1;
    }
    Py_DECREF(done);
    return engine_check_fault(self);
}

/* Free what the driver gave. What is queued on the stream may still use it: wait. */
static CUresult
give_up(EngineObject *self, const char **call)
{
    CUresult status = CUDA_SUCCESS, first;
    Scope scope = {0};
    *call = "cuStreamSynchronize";
    /* A closed stream was waited for. */
    if (self->stream != NULL && !guard_is_closed(&self->stream->guard) &&
        driver_usable()) {
        Py_BEGIN_ALLOW_THREADS
        IN_CONTEXT(scope, self->context->handle, status,
                   driver.StreamSynchronize(self->stream->handle));
        Py_END_ALLOW_THREADS
        *call = scope_call(&scope, *call);
    }
    first = status;
    blas_close(self);
    if (self->blas_memory != NULL) {
        pool_give(self, self->blas_memory);
        self->blas_memory = NULL;
    }
    status = pool_trim(self);
    if (first == CUDA_SUCCESS && status != CUDA_SUCCESS) {
        first = status;
        *call = "cuMemFree";
    }
    status = kernels_unload(self);
    if (first == CUDA_SUCCESS && status != CUDA_SUCCESS) {
        first = status;
        *call = "cuModuleUnload";
    }
    if (self->scratch != NULL) {
        status = CUDA_SUCCESS;
        if (driver_usable()) {
            Py_BEGIN_ALLOW_THREADS
            IN_CONTEXT(scope, self->context->handle, status,
                       driver.MemFreeHost(self->scratch));
            Py_END_ALLOW_THREADS
        }
        live.page_locked_blocks--;
        live.page_locked_bytes -= SCRATCH_BYTES + 64;
        self->scratch = NULL;
        if (first == CUDA_SUCCESS && status != CUDA_SUCCESS) {
            first = status;
            *call = "cuMemFreeHost";
        }
    }
    return first;
}

static void
Engine_dealloc(PyObject *op)
{
    EngineObject *self = (EngineObject *)op;
    PyTypeObject *type = Py_TYPE(op);
    SavedError saved;
    const char *call;
    unlist(self);
    save_error(&saved);
    CUresult status = give_up(self, &call);
    report_unraisable(op, call, status);
    restore_error(&saved);
    Py_CLEAR(self->stream);
    Py_CLEAR(self->context);
    pthread_mutex_destroy(&self->products);
    PyObject *module = self->module;
    type->tp_free(op);
    Py_DECREF(type);
    Py_XDECREF(module);
}

static PyType_Slot Engine_slots[] = {
    {Py_tp_dealloc, Engine_dealloc},
    {0, NULL},
};

PyType_Spec Engine_spec = {
    .name = "brainstorm_dbuf._cuda._Engine",
    .basicsize = sizeof(EngineObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = Engine_slots,
};
