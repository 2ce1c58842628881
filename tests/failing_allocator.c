/* Makes Python's allocations fail, for memory_attack.py.
 *
 * All of the interpreter's, NumPy's and the extension's own, in all three domains, but
 * only during one call: what prepares it and looks at it afterwards has memory. */
#include <Python.h>

#include <stdatomic.h>

static const PyMemAllocatorDomain domains[] = {PYMEM_DOMAIN_RAW, PYMEM_DOMAIN_MEM,
                                               PYMEM_DOMAIN_OBJ};
static PyMemAllocatorEx real[3];
static atomic_long number;       /* allocations of the call so far */
static long first_bad, past_bad; /* those from first_bad to before past_bad fail */

static int
fails(void)
{
    long mine = atomic_fetch_add(&number, 1);
    return mine >= first_bad && mine < past_bad;
}

static void *
counted_malloc(void *ctx, size_t size)
{
    PyMemAllocatorEx *below = ctx;
    return fails() ? NULL : below->malloc(below->ctx, size);
}

static void *
counted_calloc(void *ctx, size_t count, size_t size)
{
    PyMemAllocatorEx *below = ctx;
    return fails() ? NULL : below->calloc(below->ctx, count, size);
}

static void *
counted_realloc(void *ctx, void *block, size_t size)
{
    PyMemAllocatorEx *below = ctx;
    return fails() ? NULL : below->realloc(below->ctx, block, size);
}

static void
plain_free(void *ctx, void *block)
{
    PyMemAllocatorEx *below = ctx;
    below->free(below->ctx, block);
}

/* Call function(*args, **kwargs) while `times` allocations from number `first` on fail;
 * kwargs may be None. Return what it returns. */
PyObject *
call_without_memory(PyObject *function, PyObject *args, PyObject *kwargs, long first,
                    long times)
{
    atomic_store(&number, 0);
    first_bad = first;
    past_bad = first + times;
    for (int i = 0; i < 3; i++) {
        PyMem_GetAllocator(domains[i], &real[i]);
        PyMemAllocatorEx counted = {&real[i], counted_malloc, counted_calloc,
                                    counted_realloc, plain_free};
        PyMem_SetAllocator(domains[i], &counted);
    }
    PyObject *result = PyObject_Call(function, args, kwargs == Py_None ? NULL : kwargs);
    for (int i = 0; i < 3; i++) {
        PyMem_SetAllocator(domains[i], &real[i]);
    }
    if (result == NULL && PyErr_Occurred() == NULL) {
        PyErr_SetString(PyExc_SystemError, "an error that is none");
    }
    return result;
}

/* How many allocations the last call has asked for. */
long
allocations(void)
{
    return atomic_load(&number);
}
