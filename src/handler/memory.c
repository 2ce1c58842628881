/* Making arrays, and what moves between them and NumPy. */
#include "array.h"

/* A new array filled with a value; `word` is its bit pattern. */
static PyObject *
filled(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames,
       const Signature *signature, unsigned int word)
{
    PyObject *given = NULL;
    Py_ssize_t shape[MAX_DIMS];
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(signature, args, nargs, kwnames, &given) < 0) {
        return NULL;
    }
    int ndim = shape_argument(signature->function, given, shape);
    ArrayObject *array = ndim < 0 ? NULL : array_new(engine, ndim, shape, 0);
    Op op;
    if (array == NULL || op_init(&op, engine, signature->function) < 0) {
        Py_XDECREF(array);
        return NULL;
    }
    op_begin(&op, 0);
    op_fill_words(&op, array->ptr, word, (size_t)array->size);
    PyObject *done = op_end(&op);
    if (done == NULL) {
        Py_CLEAR(array);
    }
    Py_XDECREF(done);
    return (PyObject *)array;
}

static const char *const shape_names[] = {"shape", NULL};

/* brainstorm's layers count on zeros here, as its own handlers give them. */
static PyObject *
allocate(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const Signature signature = {"allocate", shape_names, 1, 1};
    return filled(self, args, nargs, kwnames, &signature, 0);
}

static PyObject *
zeros(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const Signature signature = {"zeros", shape_names, 1, 1};
    return filled(self, args, nargs, kwnames, &signature, 0);
}

static PyObject *
ones(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const Signature signature = {"ones", shape_names, 1, 1};
    return filled(self, args, nargs, kwnames, &signature, 0x3f800000u);
}

static PyObject *
create_from_numpy(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames)
{
    static const char *const names[] = {"arr", NULL};
    static const Signature signature = {"create_from_numpy", names, 1, 1};
    PyObject *given = NULL;
    Py_ssize_t shape[MAX_DIMS] = {0};
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, &given) < 0) {
        return NULL;
    }
    int ndim = 0;
    if (PyArray_Check(given)) { /* else array_from_numpy says so */
        ndim = PyArray_NDIM((PyArrayObject *)given);
        for (int i = 0; i < ndim && i < MAX_DIMS; i++) {
            shape[i] = PyArray_DIM((PyArrayObject *)given, i);
        }
    }
    ArrayObject *array = array_new(engine, ndim, shape, 0);
    if (array != NULL &&
        array_from_numpy(array, "create_from_numpy", "arr", given) < 0) {
        Py_CLEAR(array);
    }
    return (PyObject *)array;
}

static PyObject *
set_from_numpy(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
               PyObject *kwnames)
{
    static const char *const names[] = {"mem", "arr", NULL};
    static const Signature signature = {"set_from_numpy", names, 2, 2};
    PyObject *given[2] = {NULL, NULL};
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, given) < 0) {
        return NULL;
    }
    ArrayObject *mem = array_argument(engine, "set_from_numpy", "mem", given[0]);
    if (mem == NULL || array_from_numpy(mem, "set_from_numpy", "arr", given[1]) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
get_numpy_copy(PyObject *self, PyObject *const *args, Py_ssize_t nargs,
               PyObject *kwnames)
{
    static const char *const names[] = {"mem", NULL};
    static const Signature signature = {"get_numpy_copy", names, 1, 1};
    PyObject *given = NULL;
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, &given) < 0) {
        return NULL;
    }
    ArrayObject *mem = array_argument(engine, "get_numpy_copy", "mem", given);
    return mem == NULL ? NULL : array_to_numpy(mem, "get_numpy_copy");
}

static PyObject *
synchronize(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {NULL};
    static const Signature signature = {"synchronize", names, 0, 0};
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, NULL) < 0 ||
        engine_synchronize(engine, "synchronize") < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
pool_info(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {NULL};
    static const Signature signature = {"pool_info", names, 0, 0};
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, NULL) < 0) {
        return NULL;
    }
    return Py_BuildValue("{s:n,s:n}", "bytes_held", (Py_ssize_t)engine->pool.bytes_held,
                         "bytes_free", (Py_ssize_t)engine->pool.bytes_free);
}

static PyObject *
trim_pool(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const names[] = {NULL};
    static const Signature signature = {"trim_pool", names, 0, 0};
    EngineObject *engine = core_engine(self);
    if (engine == NULL || unpack(&signature, args, nargs, kwnames, NULL) < 0 ||
        driver_ready(engine->state) < 0) {
        return NULL;
    }
    CUresult status = pool_trim(engine);
    if (status != CUDA_SUCCESS) {
        return raise_cuda(engine->state, "cuMemFree", status, "in trim_pool");
    }
    Py_RETURN_NONE;
}

PyMethodDef memory_operations[] = {
    {"allocate", FASTCALL(allocate),
     PyDoc_STR("allocate($self, shape)\n--\n\n"
               "Return a new float32 DeviceArray of zeros.\n\n"
               "Raises CudaMemoryError where the device has no memory left.")},
    {"create_from_numpy", FASTCALL(create_from_numpy),
     PyDoc_STR("create_from_numpy($self, arr)\n--\n\n"
               "Return a new float32 DeviceArray with a NumPy array's shape and "
               "values.")},
    {"get_numpy_copy", FASTCALL(get_numpy_copy),
     PyDoc_STR(
         "get_numpy_copy($self, mem)\n--\n\n"
         "Return a NumPy copy of a DeviceArray; waits until it is computed.\n\n"
         "Raises IndexError where an earlier operation met an index that does not "
         "exist.")},
    {"ones", FASTCALL(ones),
     PyDoc_STR("ones($self, shape)\n--\n\nReturn a new float32 DeviceArray of ones.")},
    {"pool_info", FASTCALL(pool_info),
     PyDoc_STR("pool_info($self)\n--\n\n"
               "Return the bytes of device memory that the handler holds, and how many "
               "of\nthese no array uses, as a dict: bytes_held, bytes_free.")},
    {"set_from_numpy", FASTCALL(set_from_numpy),
     PyDoc_STR("set_from_numpy($self, mem, arr)\n--\n\n"
               "Set a DeviceArray from a NumPy array of its shape, converted to "
               "float32.\n\nThe array may be changed as soon as this returns.")},
    {"synchronize", FASTCALL(synchronize),
     PyDoc_STR("synchronize($self)\n--\n\n"
               "Wait for everything queued on the compute stream.\n\n"
               "Raises IndexError as get_numpy_copy does.")},
    {"trim_pool", FASTCALL(trim_pool),
     PyDoc_STR("trim_pool($self)\n--\n\n"
               "Give the device memory that no array uses back to the driver.\n\n"
               "Waits for everything in the context, copies included.")},
    {"zeros", FASTCALL(zeros),
     PyDoc_STR("zeros($self, shape)\n--\n\nReturn a new float32 DeviceArray of "
               "zeros.")},
    {NULL, NULL, 0, NULL},
};
