/* Modules, functions and launches.

   A module's image is not looked at. Its kernels are those of a library compiled for
   the CPU (kernel_table.cc), the one that fake_set_kernels or else the environment
   variable FAKE_CUDA_KERNELS names when the module is loaded. A launch copies its
   parameters and takes its place in the stream; when its turn comes, its pointers must
   be NULL or point into live memory, else it does not run and a fault is counted. The
   same goes for a launch whose module was unloaded meanwhile: no rule promises that
   unloading waits. Loading and unloading count as calls that make the host wait.

   All but the entry points is called with fake.lock held. */

#include "fake_cuda.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

/* --- modules --- */

/* Return the library of kernels to use, NULL where there is none. It stays loaded. */
static const struct cpu_kernels *
kernels_open(void)
{
    const char *path = fake.kernels ? fake.kernels : getenv("FAKE_CUDA_KERNELS");
    void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    void *symbol = library ? dlsym(library, "cpu_kernels") : NULL;
    if (symbol == NULL) {
        return NULL;
    }
    const struct cpu_kernels *(*get)(void);
    memcpy(&get, &symbol, sizeof(get));
    return get();
}

/* Free a module and its functions; launches that were to come are broken. */
static void
module_free(struct module *module)
{
    queue_forget_module(module);
    for (size_t i = 0; i < fake.function_handles.used; i++) {
        struct function *function = fake.function_handles.objects[i];
        if (function != NULL && function->module == module) {
            handle_remove(&fake.function_handles, function->handle);
            free(function);
        }
    }
    handle_remove(&fake.module_handles, module->handle);
    free(module);
}

/* Free the modules of a context, of all contexts if NULL. */
void
modules_drop_context(struct context *context)
{
    for (size_t i = 0; i < fake.module_handles.used; i++) {
        struct module *module = fake.module_handles.objects[i];
        if (module != NULL && (context == NULL || module->context == context)) {
            module_free(module);
        }
    }
}

void
modules_reset(void)
{
    modules_drop_context(NULL);
    handles_clear(&fake.module_handles);
    handles_clear(&fake.function_handles);
}

CUresult
fake_cuModuleLoadData(CUmodule *handle, const void *image)
{
    struct context *current;
    CUresult code = enter_context(CALL_cuModuleLoadData, &current);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (handle == NULL || image == NULL) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    fake.host_syncs++;
    const struct cpu_kernels *library = kernels_open();
    if (library == NULL) {
        return leave(CUDA_ERROR_NO_BINARY_FOR_GPU);
    }
    struct module *module = allocate(1, sizeof(*module));
    module->context = current;
    module->library = library;
    module->handle = handle_add(&fake.module_handles, module);
    *handle = module->handle;
    return leave(CUDA_SUCCESS);
}

/* Begin a call on a module. On success the lock is held. */
static CUresult
enter_module(enum call call, CUmodule handle, struct module **module)
{
    struct context *current;
    CUresult code = enter_context(call, &current);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    *module = handle_find(&fake.module_handles, handle);
    return *module && (*module)->context == current ? CUDA_SUCCESS
                                                    : leave(CUDA_ERROR_INVALID_HANDLE);
}

CUresult
fake_cuModuleUnload(CUmodule handle)
{
    struct module *module;
    CUresult code = enter_module(CALL_cuModuleUnload, handle, &module);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    fake.host_syncs++;
    module_free(module);
    return leave(CUDA_SUCCESS);
}

CUresult
fake_cuModuleGetFunction(CUfunction *handle, CUmodule module_handle, const char *name)
{
    struct module *module;
    CUresult code = enter_module(CALL_cuModuleGetFunction, module_handle, &module);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (handle == NULL || name == NULL) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    for (size_t i = 0; i < module->library->count; i++) {
        const struct cpu_kernel *kernel = &module->library->kernels[i];
        if (strcmp(kernel->name, name) == 0) {
            struct function *function = allocate(1, sizeof(*function));
            function->module = module;
            function->kernel = kernel;
            function->dynamic_limit = SHARED_BYTES;
            function->handle = handle_add(&fake.function_handles, function);
            *handle = function->handle;
            return leave(CUDA_SUCCESS);
        }
    }
    return leave(CUDA_ERROR_NOT_FOUND);
}

/* --- functions --- */

/* Find a function of the context. */
static CUresult
function_find(CUfunction handle, const struct context *current, struct function **out)
{
    *out = handle_find(&fake.function_handles, handle);
    return *out && (*out)->module->context == current ? CUDA_SUCCESS
                                                      : CUDA_ERROR_INVALID_HANDLE;
}

/* Begin a call on a function. On success the lock is held. */
static CUresult
enter_function(enum call call, CUfunction handle, struct function **function)
{
    struct context *current;
    CUresult code = enter_context(call, &current);
    if (code == CUDA_SUCCESS
        && (code = function_find(handle, current, function)) != CUDA_SUCCESS) {
        return leave(code);
    }
    return code;
}

CUresult
fake_cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction handle)
{
    struct function *function;
    CUresult code = enter_function(CALL_cuFuncGetAttribute, handle, &function);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (value == NULL || (int)attribute < 0 || attribute >= CU_FUNC_ATTRIBUTE_MAX) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    switch ((int)attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        *value = MAX_BLOCK_THREADS;
        break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
        *value = 32;
        break;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
        *value = 90;
        break;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        *value = (int)function->dynamic_limit;
        break;
    default:
        *value = 0;
    }
    return leave(CUDA_SUCCESS);
}

CUresult
fake_cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value)
{
    struct function *function;
    CUresult code = enter_function(CALL_cuFuncSetAttribute, handle, &function);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    switch ((int)attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
        if (value < 0 || value > SHARED_BYTES_OPTIN) {
            return leave(CUDA_ERROR_INVALID_VALUE);
        }
        function->dynamic_limit = (size_t)value;
        return leave(CUDA_SUCCESS);
    case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
        return leave(value >= -1 && value <= 100 ? CUDA_SUCCESS
                                                 : CUDA_ERROR_INVALID_VALUE);
    default:
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
}

CUresult
fake_cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction handle,
                                                 int threads, size_t shared)
{
    struct function *function;
    CUresult code = enter_function(CALL_cuOccupancyMaxActiveBlocksPerMultiprocessor,
                                   handle, &function);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (blocks == NULL || threads < 1) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    bool fits = threads <= MAX_BLOCK_THREADS && shared <= function->dynamic_limit;
    *blocks = fits ? RESIDENT_BLOCKS : 0;
    return leave(CUDA_SUCCESS);
}

/* --- launches --- */

/* A launch with its parameters behind it. */
struct queued_launch {
    const struct cpu_kernels *library;
    int device;
    struct cpu_launch launch;
    _Alignas(16) unsigned char parameters[];
};

/* Run a launch; false if a pointer leads nowhere. */
static bool
launch_run(void *argument)
{
    struct queued_launch *queued = argument;
    const struct cpu_kernel *kernel = queued->launch.kernel;
    for (size_t i = 0; i < kernel->parameter_count; i++) {
        void *pointer;
        if (kernel->parameters[i].is_pointer) {
            memcpy(&pointer, queued->parameters + kernel->parameters[i].offset,
                   sizeof(pointer));
            if (pointer != NULL && !memory_is_live(pointer, 0, queued->device)) {
                return false;
            }
        }
    }
    queued->launch.order = fake.mode == MODE_RANDOM ? random_number() | 1u << 31 : 0;
    queued->library->run(&queued->launch);
    return true;
}

/* Say whether the device can run a launch of that shape. */
static CUresult
launch_check(const struct function *function, const struct cpu_launch *launch)
{
    const uint32_t *grid = launch->grid, *block = launch->block;
    const uint64_t most_threads = MAX_BLOCK_THREADS;
    bool valid = grid[0] >= 1 && grid[0] <= INT32_MAX && grid[1] >= 1
                 && grid[1] <= UINT16_MAX && grid[2] >= 1 && grid[2] <= UINT16_MAX
                 && block[0] >= 1 && block[0] <= most_threads && block[1] >= 1
                 && block[1] <= most_threads && block[2] >= 1 && block[2] <= 64
                 && (uint64_t)block[0] * block[1] * block[2] <= most_threads
                 && launch->dynamic_shared <= function->dynamic_limit;
    if (!valid) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    return launch->cooperative && blocks > MULTIPROCESSORS * RESIDENT_BLOCKS
               ? CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE
               : CUDA_SUCCESS;
}

/* Issue a launch; the kernel and the place of its parameters are filled in here. */
static CUresult
issue_launch(enum call call, CUfunction handle, struct cpu_launch launch,
             CUstream stream_handle, void **parameters, bool valid)
{
    struct context *current;
    struct stream *stream;
    struct function *function;
    CUresult code = enter_stream(call, stream_handle, &current, &stream);
    if (code != CUDA_SUCCESS) {
        return code;
    }
    if (stream->context != current) {
        return leave(CUDA_ERROR_INVALID_HANDLE);
    }
    code = function_find(handle, current, &function);
    if (code == CUDA_SUCCESS) {
        code = launch_check(function, &launch);
    }
    if (code != CUDA_SUCCESS) {
        return leave(code);
    }
    const struct cpu_kernel *kernel = function->kernel;
    if (!valid || (parameters == NULL && kernel->parameter_count != 0)) {
        return leave(CUDA_ERROR_INVALID_VALUE);
    }
    struct queued_launch *queued =
        allocate(1, sizeof(*queued) + kernel->parameter_bytes);
    queued->library = function->module->library;
    queued->device = current->device;
    queued->launch = launch;
    queued->launch.kernel = kernel;
    queued->launch.parameters = queued->parameters;
    for (size_t i = 0; i < kernel->parameter_count; i++) {
        const struct cpu_parameter *parameter = &kernel->parameters[i];
        memcpy(queued->parameters + parameter->offset, parameters[i], parameter->bytes);
    }
    queue_work(stream, launch_run, queued, function->module);
    return leave(CUDA_SUCCESS);
}

/* Only the form with `parameters` is there; `extra` is the older one. */
CUresult
fake_cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y,
                    unsigned grid_z, unsigned block_x, unsigned block_y,
                    unsigned block_z, unsigned shared, CUstream stream,
                    void **parameters, void **extra)
{
    struct cpu_launch launch = {.grid = {grid_x, grid_y, grid_z},
                                .block = {block_x, block_y, block_z},
                                .dynamic_shared = shared};
    return issue_launch(CALL_cuLaunchKernel, handle, launch, stream, parameters,
                        extra == NULL);
}

CUresult
fake_cuLaunchCooperativeKernel(CUfunction handle, unsigned grid_x, unsigned grid_y,
                               unsigned grid_z, unsigned block_x, unsigned block_y,
                               unsigned block_z, unsigned shared, CUstream stream,
                               void **parameters)
{
    struct cpu_launch launch = {.grid = {grid_x, grid_y, grid_z},
                                .block = {block_x, block_y, block_z},
                                .dynamic_shared = shared,
                                .cooperative = true};
    return issue_launch(CALL_cuLaunchCooperativeKernel, handle, launch, stream,
                        parameters, true);
}
