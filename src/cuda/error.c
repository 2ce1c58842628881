/* From a CUresult to a Python exception, and what deallocs do with theirs. */
#include "binding.h"

/* Set cls(call, code, name, detail). Steals detail, which may be NULL (error set). */
static void
set_error(PyObject *cls, const char *call, int code, const char *name, PyObject *detail)
{
    if (detail == NULL) {
        return;
    }
    PyObject *error = PyObject_CallFunction(cls, "sisO", call, code, name, detail);
    Py_DECREF(detail);
    if (error != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
    }
}

/* Whether an error that says that the context is lost was raised or reported: what the
 * deallocs that follow have to say is the same. The process never gets it back. */
static _Atomic(int) loss_is_known;

/* The detail of an error, and what to do about a context that is lost. Steals detail,
 * which may be NULL (error set). */
static PyObject *
add_what_to_do(PyObject *detail)
{
    atomic_store(&loss_is_known, 1);
    if (detail == NULL) {
        return NULL;
    }
    PyObject *longer = PyUnicode_FromFormat(
        "%U%sit may be the fault of earlier work on the device. No CUDA call of this "
        "process works any more: end the program and start it again",
        detail, PyUnicode_GET_LENGTH(detail) > 0 ? "; " : "");
    Py_DECREF(detail);
    return longer;
}

PyObject *
raise_cuda(ModuleState *state, const char *call, CUresult status, const char *format,
           ...)
{
    const char *name = NULL;
    const char *words = NULL;
    if (driver.GetErrorName == NULL ||
        driver.GetErrorName(status, &name) != CUDA_SUCCESS || name == NULL) {
        name = "CUDA_ERROR_UNKNOWN_CODE";
    }
    PyObject *detail;
    if (format != NULL) {
        va_list values;
        va_start(values, format);
        detail = PyUnicode_FromFormatV(format, values);
        va_end(values);
    }
    else {
        if (driver.GetErrorString == NULL ||
            driver.GetErrorString(status, &words) != CUDA_SUCCESS || words == NULL) {
            words = "";
        }
        detail = PyUnicode_FromString(words);
    }
    if (context_is_lost(status)) {
        detail = add_what_to_do(detail);
    }
    PyObject *cls = state->CudaError;
    if (status == CUDA_ERROR_OUT_OF_MEMORY) {
        cls = state->CudaMemoryError;
    }
    else if (status == CUDA_ERROR_NO_DEVICE || strcmp(call, "cuInit") == 0) {
        cls = state->DriverError;
    }
    set_error(cls, call, (int)status, name, detail);
    return NULL;
}

PyObject *
raise_plain(PyObject *cls, const char *call, const char *name, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    PyObject *detail = PyUnicode_FromFormatV(format, values);
    va_end(values);
    set_error(cls, call, 0, name, detail);
    return NULL;
}

PyObject *
raise_closed(const char *what)
{
    PyErr_Format(PyExc_ValueError, "%s is closed", what);
    return NULL;
}

int
context_is_gone(CUresult status)
{
    return status == CUDA_ERROR_DEINITIALIZED || status == CUDA_ERROR_INVALID_CONTEXT ||
           status == CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

int
context_is_lost(CUresult status)
{
    switch ((int)status) { /* not every cuda.h has all of the names */
    case 226:              /* CUDA_ERROR_CONTAINED */
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case 721: /* CUDA_ERROR_TENSOR_MEMORY_LEAK */
    case 911: /* CUDA_ERROR_EXTERNAL_DEVICE */
        return 1;
    default:
        return 0;
    }
}

void
report_unraisable(void *self, const char *call, CUresult status)
{
    if (status == CUDA_SUCCESS || context_is_gone(status) ||
        (context_is_lost(status) && atomic_load(&loss_is_known))) {
        return;
    }
    ModuleState *state = state_of(self);
    if (state == NULL || state->CudaError == NULL) {
        PyErr_Clear(); /* the module is being torn down */
        return;
    }
    raise_cuda(state, call, status, NULL);
    /* Not self: it has no references left, and a hook might keep it. */
    PyErr_WriteUnraisable((PyObject *)Py_TYPE((PyObject *)self));
}

#if PY_VERSION_HEX >= 0x030C0000
void
save_error(SavedError *saved)
{
    saved->raised = PyErr_GetRaisedException();
}

void
restore_error(SavedError *saved)
{
    PyErr_SetRaisedException(saved->raised);
}
#else
void
save_error(SavedError *saved)
{
    PyErr_Fetch(&saved->type, &saved->value, &saved->traceback);
}

void
restore_error(SavedError *saved)
{
    PyErr_Restore(saved->type, saved->value, saved->traceback);
}
#endif

PyObject *
refuse_pickling(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    return PyErr_Format(
        PyExc_TypeError,
        "cannot pickle or copy '%s' object: it is a handle that belongs "
        "to this process",
        Py_TYPE(self)->tp_name);
}
