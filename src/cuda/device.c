/* Device: a number and what the driver says about it. Holds no resource. */
#include "binding.h"

typedef struct {
    PyObject_HEAD
    int ordinal;
    CUdevice device;
} DeviceObject;

/* Set the ValueError that says which devices there are. Return NULL. */
COLD static PyObject *
raise_no_device(int ordinal, int count)
{
    PyObject *text =
        PyUnicode_FromFormat("there is no CUDA device %d: the driver sees %d device%s",
                             ordinal, count, count == 1 ? "" : "s");
    for (int i = 0; i < count && text != NULL; i++) {
        char name[256] = "";
        CUdevice device;
        CUresult status = driver.DeviceGet(&device, i);
        if (status == CUDA_SUCCESS) {
            status = driver.DeviceGetName(name, sizeof(name) - 1, device);
        }
        PyObject *one = PyUnicode_FromFormat("%s %d (%s)", i == 0 ? ":" : ",", i,
                                             status == CUDA_SUCCESS ? name : "unknown");
        PyUnicode_Append(&text, one); /* NULL where that fails, or one is */
        Py_XDECREF(one);
    }
    if (text != NULL) {
        PyErr_SetObject(PyExc_ValueError, text);
        Py_DECREF(text);
    }
    return NULL;
}

PyObject *
device_new(ModuleState *state, int ordinal)
{
    int count = 0;
    CUdevice device;
    if (driver_ready(state) < 0) {
        return NULL;
    }
    CUresult status = driver_count_devices(&count);
    if (status != CUDA_SUCCESS) {
        return raise_cuda(state, "cuDeviceGetCount", status, NULL);
    }
    if (ordinal < 0 || ordinal >= count) {
        return raise_no_device(ordinal, count);
    }
    status = driver.DeviceGet(&device, ordinal);
    if (status != CUDA_SUCCESS) {
        return raise_cuda(state, "cuDeviceGet", status, "device %d", ordinal);
    }
    DeviceObject *self = PyObject_New(DeviceObject, state->Device_type);
    if (self != NULL) {
        self->ordinal = ordinal;
        self->device = device;
    }
    return (PyObject *)self;
}

static PyObject *
Device_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"ordinal", NULL};
    PyObject *given = NULL;
    int ordinal = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O:Device", names, &given) ||
        int_argument("ordinal", given, &ordinal) < 0) {
        return NULL;
    }
    return device_new((ModuleState *)PyType_GetModuleState(type), ordinal);
}

static void
Device_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* One attribute of a device. Return 0, or -1 with an error set. */
static int
get_attribute(DeviceObject *self, int number, int *value)
{
    ModuleState *state = state_of(self);
    if (driver_ready(state) < 0) {
        return -1;
    }
    CUresult status =
        driver.DeviceGetAttribute(value, (CUdevice_attribute)number, self->device);
    if (status != CUDA_SUCCESS) {
        raise_cuda(state, "cuDeviceGetAttribute", status, "attribute %d of device %d",
                   number, self->ordinal);
        return -1;
    }
    return 0;
}

static PyObject *
Device_attribute(PyObject *op, PyObject *argument)
{
    int number = 0, value;
    if (int_argument("number", argument, &number) < 0) {
        return NULL;
    }
    if (number < 0) {
        return PyErr_Format(PyExc_ValueError, "there is no device attribute %d",
                            number);
    }
    if (get_attribute((DeviceObject *)op, number, &value) < 0) {
        return NULL;
    }
    return PyLong_FromLong(value);
}

static PyObject *
Device_get_ordinal(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(((DeviceObject *)op)->ordinal);
}

static PyObject *
Device_get_name(PyObject *op, void *Py_UNUSED(closure))
{
    DeviceObject *self = (DeviceObject *)op;
    ModuleState *state = state_of(self);
    char name[256] = "";
    if (driver_ready(state) < 0) {
        return NULL;
    }
    CUresult status = driver.DeviceGetName(name, sizeof(name) - 1, self->device);
    if (status != CUDA_SUCCESS) {
        return raise_cuda(state, "cuDeviceGetName", status, "device %d", self->ordinal);
    }
    return PyUnicode_FromString(name);
}

static PyObject *
Device_get_total_memory(PyObject *op, void *Py_UNUSED(closure))
{
    DeviceObject *self = (DeviceObject *)op;
    ModuleState *state = state_of(self);
    size_t bytes = 0;
    if (driver_ready(state) < 0) {
        return NULL;
    }
    CUresult status = driver.DeviceTotalMem(&bytes, self->device);
    if (status != CUDA_SUCCESS) {
        return raise_cuda(state, "cuDeviceTotalMem", status, "device %d",
                          self->ordinal);
    }
    return PyLong_FromSize_t(bytes);
}

static PyObject *
Device_get_compute_capability(PyObject *op, void *Py_UNUSED(closure))
{
    DeviceObject *self = (DeviceObject *)op;
    int major, minor;
    if (get_attribute(self, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, &major) < 0 ||
        get_attribute(self, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, &minor) < 0) {
        return NULL;
    }
    return Py_BuildValue("(ii)", major, minor);
}

static PyObject *
Device_get_pci_bus_id(PyObject *op, void *Py_UNUSED(closure))
{
    DeviceObject *self = (DeviceObject *)op;
    ModuleState *state = state_of(self);
    char id[64] = "";
    if (driver_ready(state) < 0) {
        return NULL;
    }
    CUresult status = driver.DeviceGetPCIBusId(id, sizeof(id) - 1, self->device);
    if (status != CUDA_SUCCESS) {
        return raise_cuda(state, "cuDeviceGetPCIBusId", status, "device %d",
                          self->ordinal);
    }
    return PyUnicode_FromString(id);
}

static PyObject *
Device_repr(PyObject *op)
{
    return PyUnicode_FromFormat("Device(%d)", ((DeviceObject *)op)->ordinal);
}

static Py_hash_t
Device_hash(PyObject *op)
{
    return ((DeviceObject *)op)->ordinal;
}

static PyObject *
Device_richcompare(PyObject *op, PyObject *other, int operation)
{
    if (!Py_IS_TYPE(other, Py_TYPE(op)) || (operation != Py_EQ && operation != Py_NE)) {
        Py_RETURN_NOTIMPLEMENTED;
    }
    int equal = ((DeviceObject *)op)->ordinal == ((DeviceObject *)other)->ordinal;
    return PyBool_FromLong(equal == (operation == Py_EQ));
}

static PyMethodDef Device_methods[] = {
    {"attribute", Device_attribute, METH_O,
     PyDoc_STR("attribute($self, number, /)\n--\n\n"
               "Return a device attribute by its CU_DEVICE_ATTRIBUTE number.")},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef Device_getset[] = {
    {"ordinal", Device_get_ordinal, NULL, PyDoc_STR("Its number, from 0."), NULL},
    {"name", Device_get_name, NULL, PyDoc_STR("Its name, as the driver gives it."),
     NULL},
    {"total_memory", Device_get_total_memory, NULL, PyDoc_STR("Its memory in bytes."),
     NULL},
    {"compute_capability", Device_get_compute_capability, NULL,
     PyDoc_STR("(major, minor)."), NULL},
    {"pci_bus_id", Device_get_pci_bus_id, NULL,
     PyDoc_STR("domain:bus:device.function."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot Device_slots[] = {
    {Py_tp_doc,
     PyDoc_STR("Device(ordinal=0)\n--\n\n"
               "A CUDA device.\n\n"
               "Raises ValueError if there is no such device, DriverError if "
               "there is no driver or no device at all.")},
    {Py_tp_new, Device_new},
    {Py_tp_dealloc, Device_dealloc},
    {Py_tp_repr, Device_repr},
    {Py_tp_hash, Device_hash},
    {Py_tp_richcompare, Device_richcompare},
    {Py_tp_methods, Device_methods},
    {Py_tp_getset, Device_getset},
    {0, NULL},
};

PyType_Spec Device_spec = {
    .name = "brainstorm_dbuf._cuda.Device",
    .basicsize = sizeof(DeviceObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = Device_slots,
};

static PyObject *
driver_version(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    ModuleState *state = module_state(module);
    int version = 0;
    if (driver_ready(state) < 0) {
        return NULL;
    }
    CUresult status = driver.DriverGetVersion(&version);
    if (status != CUDA_SUCCESS) {
        return raise_cuda(state, "cuDriverGetVersion", status, NULL);
    }
    return PyLong_FromLong(version);
}

static PyObject *
device_count(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    ModuleState *state = module_state(module);
    int count = 0;
    if (driver_ready(state) < 0) {
        return NULL;
    }
    CUresult status = driver_count_devices(&count);
    if (status != CUDA_SUCCESS) {
        return raise_cuda(state, "cuDeviceGetCount", status, NULL);
    }
    return PyLong_FromLong(count);
}

PyMethodDef device_functions[] = {
    {"driver_version", driver_version, METH_NOARGS,
     PyDoc_STR("driver_version($module, /)\n--\n\n"
               "Return the driver's CUDA version: 13000 for 13.0.\n\n"
               "Raises DriverError if there is no driver.")},
    {"device_count", device_count, METH_NOARGS,
     PyDoc_STR("device_count($module, /)\n--\n\n"
               "Return how many devices the driver sees.\n\n"
               "Raises DriverError if there is no driver.")},
    {NULL, NULL, 0, NULL},
};
