/* The kernels' image: embedded by the build, loaded into an engine's context. */
#include "kernels.h"

#ifdef BRAINSTORM_DBUF_KERNEL_IMAGE

/* nvcc has compiled src/kernels/kernels.cu to this file. */
__asm__(".pushsection .rodata\n"
        ".balign 64\n"
        ".local kernel_image\n"
        "kernel_image:\n"
        ".incbin \"" BRAINSTORM_DBUF_KERNEL_IMAGE "\"\n"
        ".byte 0\n"
        ".popsection\n");
extern const unsigned char kernel_image[] __attribute__((visibility("hidden")));

int
kernels_built(void)
{
    return 1;
}

#else

static const unsigned char kernel_image[1];

int
kernels_built(void)
{
    return 0;
}

#endif

static const char *const kernel_names[KERNEL_COUNT] = {
#define X(name) #name,
    KERNELS(X)
#undef X
};

int
kernels_load(EngineObject *engine)
{
    CUresult status;
    Scope scope;
    const char *call = "cuModuleLoadData";
    const char *name = "the kernels' image";
    Py_BEGIN_ALLOW_THREADS
    status = scope_enter(&scope, engine->context->handle);
    if (status == CUDA_SUCCESS) {
        status = driver.ModuleLoadData(&engine->image, kernel_image);
        for (int i = 0; i < KERNEL_COUNT && status == CUDA_SUCCESS; i++) {
            call = "cuModuleGetFunction";
            name = kernel_names[i];
            status = driver.ModuleGetFunction(&engine->functions[i], engine->image,
                                              kernel_names[i]);
        }
        scope_leave(&scope);
    }
    Py_END_ALLOW_THREADS
    if (status != CUDA_SUCCESS) {
        raise_cuda(engine->state, scope_call(&scope, call), status, "%s%s", name,
                   status == CUDA_ERROR_NO_BINARY_FOR_GPU ||
                           status == CUDA_ERROR_UNSUPPORTED_PTX_VERSION
                       ? ": built for other GPUs, or by a CUDA compiler that is newer "
                         "than the driver; build again on this machine"
                       : "");
        return -1;
    }
    return 0;
}

CUresult
kernels_unload(EngineObject *engine)
{
    CUresult status = CUDA_SUCCESS;
    Scope scope;
    if (engine->image != NULL && driver_usable()) {
        Py_BEGIN_ALLOW_THREADS
        IN_CONTEXT(scope, engine->context->handle, status,
                   driver.ModuleUnload(engine->image));
        Py_END_ALLOW_THREADS
    }
    engine->image = NULL;
    return status;
}
