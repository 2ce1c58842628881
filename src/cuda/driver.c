/* The driver library: found and opened at the first call that needs it.
 *
 * dlsym asks for cuGetProcAddress_v2 only (CUDA 12 and later have it); that function
 * gives every other entry by base name and version. Opening takes up to seconds
 * (cuInit), so it runs without the GIL, under a mutex of its own.
 *
 * After a fork the driver's threads and device mappings are not in the child. The fork
 * handler marks the table unusable there: each call then ends in ForkError, and
 * deallocs leave the driver alone. A flag, because getpid() would cost a system call
 * each time. */
#include "binding.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

Driver driver;
_Atomic(int) driver_is_usable;
_Atomic(int) driver_devices;
LiveCounts live;

static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
static _Atomic(int) was_started; /* cuInit was, or is being, called in this process */
static _Atomic(int) was_forked;  /* by a parent that had started */

enum {
    FOUND,
    NO_LIBRARY,  /* dlopen failed; detail holds its words */
    TOO_OLD,     /* an entry is missing; detail holds its name */
    INIT_FAILED, /* status holds cuInit's result */
};

typedef struct {
    int outcome;
    CUresult status;
    char detail[512];
} Opening;

const char *
driver_library_name(void)
{
    const char *name = getenv("BRAINSTORM_DBUF_LIBCUDA");
    return name != NULL && name[0] != '\0' ? name : "libcuda.so.1";
}

static void
after_fork_in_child(void)
{
    /* A thread that is not in the child may have held it. */
    opening = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    if (atomic_load(&was_started)) {
        atomic_store(&was_forked, 1);
        atomic_store(&driver_is_usable, 0);
    }
}

/* Fill the table. Return 1, or 0 with the missing entry's name in detail. */
static int
fill_table(void *library, Opening *result)
{
    PFN_cuGetProcAddress_v12000 get = NULL;
    void *symbol = dlsym(library, "cuGetProcAddress_v2");
    memcpy(&get, &symbol, sizeof(get)); /* ISO C has no cast from object to function */
    if (get == NULL) {
        snprintf(result->detail, sizeof(result->detail), "cuGetProcAddress_v2");
        return 0;
    }
    /* The pointer is checked as well: the driver may say success and give NULL. */
#define X(name, version) \
    { \
        void *entry = NULL; \
        CUdriverProcAddressQueryResult found; \
        CUresult status = \
            get("cu" #name, &entry, version, CU_GET_PROC_ADDRESS_DEFAULT, &found); \
        if (status != CUDA_SUCCESS || entry == NULL) { \
            snprintf(result->detail, sizeof(result->detail), "cu" #name); \
            return 0; \
        } \
        memcpy(&driver.name, &entry, sizeof(entry)); \
    }
    DRIVER_CALLS(X)
#undef X
    return 1;
}

/* Under the mutex, without the GIL. */
static void
open_locked(Opening *result)
{
    static int handler_is_set = 0;
    result->outcome = FOUND;
    if (driver_usable()) {
        return; /* another thread was first */
    }
    if (!handler_is_set) {
        handler_is_set = pthread_atfork(NULL, NULL, after_fork_in_child) == 0;
    }
    void *library = dlopen(driver_library_name(), RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *words = dlerror();
        snprintf(result->detail, sizeof(result->detail), "%s",
                 words != NULL ? words : "no reason given");
        result->outcome = NO_LIBRARY;
        return;
    }
    if (!fill_table(library, result)) {
        dlclose(library);
        result->outcome = TOO_OLD;
        return;
    }
    atomic_store(&was_started, 1);
    result->status = driver.Init(0);
    if (result->status != CUDA_SUCCESS) {
        /* The library stays open: its error names are still wanted. */
        atomic_store(&was_started, 0);
        result->outcome = INIT_FAILED;
        return;
    }
    int count;
    (void)driver_count_devices(&count);
    atomic_store_explicit(&driver_is_usable, 1, memory_order_release);
}

CUresult
driver_count_devices(int *count)
{
    *count = 0;
    CUresult status = driver.DeviceGetCount(count);
    if (status == CUDA_SUCCESS) {
        atomic_store_explicit(&driver_devices, *count, memory_order_relaxed);
    }
    return status;
}

int
driver_open(ModuleState *state)
{
    if (atomic_load(&was_forked)) {
        raise_plain(state->ForkError, "CUDA", "FORKED",
                    "CUDA was started in the parent process and cannot be used in a "
                    "forked child; start the child with multiprocessing's \"spawn\"");
        return -1;
    }
    Opening result = {0};
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&opening);
    open_locked(&result);
    pthread_mutex_unlock(&opening);
    Py_END_ALLOW_THREADS

    switch (result.outcome) {
    case NO_LIBRARY:
        raise_plain(state->DriverError, "dlopen", "DRIVER_NOT_FOUND",
                    "%s could not be opened (%s); it comes with NVIDIA's driver, not "
                    "with the CUDA toolkit: install the driver, or set "
                    "BRAINSTORM_DBUF_LIBCUDA to the library's path",
                    driver_library_name(), result.detail);
        return -1;
    case TOO_OLD:
        raise_plain(
            state->DriverError, "cuGetProcAddress", "DRIVER_TOO_OLD",
            "%s has no %s: the driver is older than CUDA 12; install a newer one",
            driver_library_name(), result.detail);
        return -1;
    case INIT_FAILED:
        raise_cuda(state, "cuInit", result.status, NULL);
        return -1;
    default:
        return 0;
    }
}

int
driver_version_if_open(void)
{
    int version = 0;
    if (driver_usable() && driver.DriverGetVersion(&version) != CUDA_SUCCESS) {
        version = 0;
    }
    return version;
}
