/* Between the stand-in driver (C) and the library of kernels made for the CPU (C++):
   what the driver must know to check a launch, and how it runs one. */

#ifndef KERNELS_ON_CPU_H
#define KERNELS_ON_CPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* One parameter; those of a kernel lie in one buffer, each at its offset. */
struct cpu_parameter {
    uint32_t offset, bytes;
    bool is_pointer;
};

struct cpu_kernel {
    const char *name;
    size_t parameter_count;
    size_t parameter_bytes; /* of the whole buffer */
    const struct cpu_parameter *parameters;
    void (*thread)(const unsigned char *parameters); /* the work of one thread */
};

struct cpu_launch {
    const struct cpu_kernel *kernel;
    uint32_t grid[3], block[3];
    size_t dynamic_shared;
    bool cooperative;
    uint64_t order; /* 0: blocks in ascending order; else the seed of another order */
    const unsigned char *parameters; /* borrowed */
};

struct cpu_kernels {
    size_t count;
    const struct cpu_kernel *kernels;
    /* One call at a time in the process. It ends the process, with a message that
       names the kernel, where threads do not meet as CUDA demands. */
    void (*run)(const struct cpu_launch *launch);
};

/* The library's one exported name. */
const struct cpu_kernels *cpu_kernels(void);

#ifdef __cplusplus
}
#endif

#endif
