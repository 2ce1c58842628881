/* The module: its state, types, constants, and the two functions that describe it. */
#define BINDING_IMPORTS_ARRAY_API
#include "binding.h"

#include "../handler/handler.h"

static PyObject *
sysinfo(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    int version = driver_version_if_open();
    PyObject *driver_version = version ? PyLong_FromLong(version) : Py_NewRef(Py_None);
    return Py_BuildValue("{s:s,s:O,s:i,s:N,s:s,s:i,s:s}", "library",
                         driver_library_name(), "is_open",
                         driver_usable() ? Py_True : Py_False, "compiled_cuda_version",
                         CUDA_VERSION, "driver_version", driver_version,
                         "compiled_python_version", PY_VERSION, "compiled_numpy_abi",
                         (int)NPY_VERSION, "oldest_numpy", NPY_FEATURE_VERSION_STRING);
}

static PyObject *
live_objects(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    return Py_BuildValue(
        "{s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n,s:n}", "contexts",
        (Py_ssize_t)live.contexts, "streams", (Py_ssize_t)live.streams, "events",
        (Py_ssize_t)live.events, "fences", (Py_ssize_t)live.fences, "device_memory",
        (Py_ssize_t)live.device_memory, "device_bytes", (Py_ssize_t)live.device_bytes,
        "page_locked_blocks", (Py_ssize_t)live.page_locked_blocks, "page_locked_bytes",
        (Py_ssize_t)live.page_locked_bytes, "registered", (Py_ssize_t)live.registered,
        "in_flight", (Py_ssize_t)live.in_flight);
}

static PyMethodDef module_functions[] = {
    {"sysinfo", sysinfo, METH_NOARGS,
     PyDoc_STR("sysinfo($module, /)\n--\n\n"
               "Return facts for a bug report, as a dict. Does not open the driver.")},
    {"live_objects", live_objects, METH_NOARGS,
     PyDoc_STR(
         "live_objects($module, /)\n--\n\n"
         "Return how many objects of each kind, and bytes, are held, as a dict.\n\n"
         "in_flight counts copies whose ends are still held; fences are events that "
         "tell when they are done.")},
    {NULL, NULL, 0, NULL},
};

PyTypeObject *
type_new(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type == NULL && PyErr_Occurred() == NULL) {
        PyErr_NoMemory(); /* CPython 3.11 does not always say so */
    }
    return (PyTypeObject *)type;
}

/* Make a type and add it under its name. Return 0, or -1 with an error set. */
static int
add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **place)
{
    *place = type_new(module, spec);
    return *place == NULL ? -1 : PyModule_AddType(module, *place);
}

/* Import the exception classes and add them to the module. */
static int
add_errors(PyObject *module, ModuleState *state)
{
    PyObject *errors = PyImport_ImportModule("brainstorm_dbuf.errors");
    if (errors == NULL) {
        return -1;
    }
    struct {
        const char *name;
        PyObject **place;
    } classes[] = {
        {"CudaError", &state->CudaError},
        {"CudaMemoryError", &state->CudaMemoryError},
        {"DriverError", &state->DriverError},
        {"ForkError", &state->ForkError},
    };
    int result = 0;
    for (size_t i = 0; i < Py_ARRAY_LENGTH(classes) && result == 0; i++) {
        *classes[i].place = PyObject_GetAttrString(errors, classes[i].name);
        result =
            *classes[i].place == NULL
                ? -1
                : PyModule_AddObjectRef(module, classes[i].name, *classes[i].place);
    }
    Py_DECREF(errors);
    return result;
}

static int
module_exec(PyObject *module)
{
    ModuleState *state = module_state(module);
    PyMethodDef *functions[] = {
        module_functions,     device_functions,    device_memory_functions,
        pagelocked_functions, copy_functions,      copy_rows_functions,
        memset_functions,     signature_functions, stage_functions};
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        /* Of those with a GIL of their own Python 3.12 says it, of others nobody. */
        PyErr_SetString(PyExc_ImportError, "module brainstorm_dbuf._cuda does not "
                                           "support loading in subinterpreters");
        return -1;
    }
    if (PyArray_ImportNumPyAPI() < 0 || add_errors(module, state) < 0) {
        return -1;
    }
    state->str_cuda_array_interface =
        PyUnicode_InternFromString("__cuda_array_interface__");
    state->str_cuda_stream = PyUnicode_InternFromString("__cuda_stream__");
    if (state->str_cuda_array_interface == NULL || state->str_cuda_stream == NULL ||
        add_type(module, &Device_spec, &state->Device_type) < 0 ||
        add_type(module, &Context_spec, &state->Context_type) < 0 ||
        add_type(module, &Stream_spec, &state->Stream_type) < 0 ||
        add_type(module, &Event_spec, &state->Event_type) < 0 ||
        add_type(module, &DeviceMemory_spec, &state->DeviceMemory_type) < 0 ||
        add_type(module, &PageLockedMemory_spec, &state->PageLockedMemory_type) < 0 ||
        add_type(module, &RegisteredMemory_spec, &state->RegisteredMemory_type) < 0 ||
        add_type(module, &StagingRing_spec, &state->StagingRing_type) < 0 ||
        add_type(module, &DeviceArray_spec, &state->DeviceArray_type) < 0) {
        return -1;
    }
    /* Else NumPy's numbers would take an array to the host as their operand. */
    if (PyObject_SetAttrString((PyObject *)state->DeviceArray_type, "__array_ufunc__",
                               Py_None) < 0) {
        return -1;
    }
    state->Engine_type = type_new(module, &Engine_spec);
    if (state->Engine_type == NULL) {
        return -1;
    }
    state->HandlerCore_type = core_type(module);
    if (state->HandlerCore_type == NULL ||
        PyModule_AddType(module, state->HandlerCore_type) < 0) {
        return -1;
    }
    for (size_t i = 0; i < Py_ARRAY_LENGTH(functions); i++) {
        if (PyModule_AddFunctions(module, functions[i]) < 0) {
            return -1;
        }
    }
    if (PyModule_AddIntConstant(module, "HOST_ALLOC_PORTABLE",
                                CU_MEMHOSTALLOC_PORTABLE) < 0 ||
        PyModule_AddIntConstant(module, "HOST_ALLOC_DEVICEMAP",
                                CU_MEMHOSTALLOC_DEVICEMAP) < 0 ||
        PyModule_AddIntConstant(module, "HOST_ALLOC_WRITECOMBINED",
                                CU_MEMHOSTALLOC_WRITECOMBINED) < 0 ||
        PyModule_AddIntConstant(module, "HOST_REGISTER_PORTABLE",
                                CU_MEMHOSTREGISTER_PORTABLE) < 0 ||
        PyModule_AddIntConstant(module, "HOST_REGISTER_DEVICEMAP",
                                CU_MEMHOSTREGISTER_DEVICEMAP) < 0 ||
        PyModule_AddIntConstant(module, "HOST_REGISTER_IOMEMORY",
                                CU_MEMHOSTREGISTER_IOMEMORY) < 0 ||
        PyModule_AddIntConstant(module, "HOST_REGISTER_READ_ONLY",
                                CU_MEMHOSTREGISTER_READ_ONLY) < 0) {
        return -1;
    }
    return 0;
}

/* The owned references of the state; the list of contexts is borrowed. */
#define EACH_REFERENCE(state, DO) \
    DO((state)->Device_type); \
    DO((state)->Context_type); \
    DO((state)->Stream_type); \
    DO((state)->Event_type); \
    DO((state)->DeviceMemory_type); \
    DO((state)->PageLockedMemory_type); \
    DO((state)->RegisteredMemory_type); \
    DO((state)->StagingRing_type); \
    DO((state)->Engine_type); \
    DO((state)->DeviceArray_type); \
    DO((state)->HandlerCore_type); \
    DO((state)->CudaError); \
    DO((state)->CudaMemoryError); \
    DO((state)->DriverError); \
    DO((state)->ForkError); \
    DO((state)->str_cuda_array_interface); \
    DO((state)->str_cuda_stream)

static int
module_traverse(PyObject *module, visitproc visit, void *arg)
{
    ModuleState *state = module_state(module);
    EACH_REFERENCE(state, Py_VISIT);
    return 0;
}

static int
module_clear(PyObject *module)
{
    ModuleState *state = module_state(module);
    EACH_REFERENCE(state, Py_CLEAR);
    return 0;
}

static void
module_free(void *module)
{
    (void)module_clear((PyObject *)module);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#if PY_VERSION_HEX >= 0x030D0000
    {Py_mod_gil, Py_MOD_GIL_USED}, /* ledgers and lists are protected by it */
#endif
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "brainstorm_dbuf._cuda",
    .m_doc =
        PyDoc_STR("The CUDA Driver API: contexts, streams, events, memory, copies.\n\n"
                  "The driver is opened at the first call that needs it."),
    .m_size = sizeof(ModuleState),
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC
PyInit__cuda(void)
{
    return PyModuleDef_Init(&module_definition);
}
