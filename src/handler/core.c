/* HandlerCore: the base of CudaHandler, with every operation as a method in C. */
#include "kernels.h"
#include "array.h"

EngineObject *
core_engine(PyObject *core)
{
    EngineObject *engine = ((CoreObject *)core)->engine;
    if (engine == NULL) {
        PyErr_Format(PyExc_RuntimeError, "%.100s.__init__ was not called",
                     Py_TYPE(core)->tp_name);
        return NULL;
    }
    return engine;
}

/* The state of the module that made HandlerCore, of which type is a subclass. */
static ModuleState *
state_of_core(PyTypeObject *type, PyObject **module)
{
    while (type != NULL) {
        if ((type->tp_flags & Py_TPFLAGS_HEAPTYPE) && type->tp_base != NULL &&
            strcmp(type->tp_name, "brainstorm_dbuf._cuda.HandlerCore") == 0) {
            *module = PyType_GetModule(type);
            return *module == NULL ? NULL : module_state(*module);
        }
        type = type->tp_base;
    }
    PyErr_SetString(PyExc_SystemError, "not a HandlerCore");
    return NULL;
}

/* Any integer, of which 64 bits count. Return 0, or -1 with an error set. */
static int
seed_argument(PyObject *object, unsigned long long *seed)
{
    if (object == NULL) {
        return 0;
    }
    PyObject *index = index_argument("seed", object);
    if (index == NULL) {
        return -1;
    }
    *seed = PyLong_AsUnsignedLongLongMask(index);
    Py_DECREF(index);
    return 0;
}

static int
Core_init(PyObject *op, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"seed", "device", "tf32", NULL};
    CoreObject *self = (CoreObject *)op;
    PyObject *module = NULL;
    unsigned long long seed = 0;
    PyObject *given_seed = NULL, *given_device = NULL;
    int device = 0, tf32 = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OOp:HandlerCore", names,
                                     &given_seed, &given_device, &tf32) ||
        seed_argument(given_seed, &seed) < 0 ||
        int_argument("device", given_device, &device) < 0) {
        return -1;
    }
    ModuleState *state = state_of_core(Py_TYPE(op), &module);
    if (state == NULL) {
        return -1;
    }
    EngineObject *engine = engine_of_device(state, module, device);
    if (engine == NULL) {
        return -1;
    }
    /* A method that is under way on another thread, or up the stack, uses the first. */
    if (self->engine != NULL && self->engine != engine) {
        PyErr_Format(PyExc_RuntimeError,
                     "%.100s.__init__ was called already, for device %d",
                     Py_TYPE(op)->tp_name, (int)self->engine->context->device);
        Py_DECREF(engine);
        return -1;
    }
    self->tf32 = tf32;
    self->seed = seed;
    self->draws = 0;
    Py_XSETREF(self->engine, engine);
    return 0;
}

static void
Core_dealloc(PyObject *op)
{
    PyTypeObject *type = Py_TYPE(op);
    Py_CLEAR(((CoreObject *)op)->engine);
    type->tp_free(op);
    Py_DECREF(type);
}

static PyObject *
Core_context(PyObject *op, void *Py_UNUSED(closure))
{
    EngineObject *engine = core_engine(op);
    return engine == NULL ? NULL : Py_NewRef((PyObject *)engine->context);
}

static PyObject *
Core_stream(PyObject *op, void *Py_UNUSED(closure))
{
    EngineObject *engine = core_engine(op);
    return engine == NULL ? NULL : Py_NewRef((PyObject *)engine->stream);
}

static PyObject *
Core_device(PyObject *op, void *Py_UNUSED(closure))
{
    EngineObject *engine = core_engine(op);
    return engine == NULL ? NULL : PyLong_FromLong(engine->context->device);
}

static PyObject *
Core_tf32(PyObject *op, void *Py_UNUSED(closure))
{
    EngineObject *engine = core_engine(op);
    return engine == NULL ? NULL : PyBool_FromLong(((CoreObject *)op)->tf32);
}

static PyGetSetDef Core_getset[] = {
    {"context", Core_context, NULL,
     PyDoc_STR("The Context that the arrays live in: the device's primary one."), NULL},
    {"stream", Core_stream, NULL,
     PyDoc_STR("The Stream on which everything is computed."), NULL},
    {"device", Core_device, NULL, PyDoc_STR("Ordinal of the device."), NULL},
    {"tf32", Core_tf32, NULL,
     PyDoc_STR("True if matrix products may round their factors to TF32."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef Core_methods[] = {
    REFUSE_PICKLING,
    {NULL, NULL, 0, NULL},
};

static PyType_Slot Core_slots[] = {
    {Py_tp_doc, PyDoc_STR("HandlerCore(seed=0, device=0, tf32=False)\n--\n\n"
                          "Operations of a brainstorm handler on one CUDA device.")},
    {Py_tp_init, Core_init},
    {Py_tp_dealloc, Core_dealloc},
    {Py_tp_getset, Core_getset},
    {Py_tp_methods, Core_methods},
    {0, NULL},
};

static PyType_Spec Core_spec = {
    .name = "brainstorm_dbuf._cuda.HandlerCore",
    .basicsize = sizeof(CoreObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = Core_slots,
};

PyTypeObject *
core_type(PyObject *module)
{
    PyMethodDef *tables[] = {
        memory_operations,    exchange_operations,        elementwise_operations,
        matrix_operations,    reduce_operations,          row_operations,
        random_operations,    convolution_operations,     pooling_operations,
        recurrent_operations, fully_connected_operations, softmax_ce_operations,
        unpack_operations};
    PyTypeObject *type = type_new(module, &Core_spec);
    for (size_t i = 0; i < Py_ARRAY_LENGTH(tables) && type != NULL; i++) {
        for (PyMethodDef *entry = tables[i]; entry->ml_name != NULL; entry++) {
            PyObject *method = PyDescr_NewMethod(type, entry);
            if (method == NULL ||
                PyObject_SetAttrString((PyObject *)type, entry->ml_name, method) < 0) {
                Py_XDECREF(method);
                Py_CLEAR(type);
                break;
            }
            Py_DECREF(method);
        }
    }
    return type;
}
