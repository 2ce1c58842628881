/* What the parts of the stand-in driver share.

   fake_objects.c  handles, contexts (one stack a thread), streams, events
   fake_queue.c    work items: who waits for whom, and when an item runs
   fake_memory.c   device and page-locked blocks, red zones, poison
   fake_cuda.c     the driver's entry points and the table that hands them out
   fake_kernels.c  modules, and launches of kernels that were compiled for the CPU
   fake_cublas.c   a cuBLAS on the same queues
   fake_control.c  what the tests use to steer the driver and to look into it

   One mutex, fake.lock, guards everything. Entry points take it in `enter` and give it
   back in `leave`; every other function here is called with it held. Only the waits of
   fake_queue.c let go of it on the way, so pointers to streams, events and blocks are
   not kept across them (contexts stay until the next reset). */

#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cuda.h>
#include <cudaTypedefs.h>

#include "kernels_on_cpu.h"

#define FAKE_EXPORT __attribute__((visibility("default")))

enum {
    MAX_DEVICES = 16,
    MAX_FAILURES = 256,
    MAX_DELAYS = 16,
    STACK_DEPTH = 64,
    DEFAULT_DRIVER_VERSION = 13000,
    LOWEST_PRIORITY = 0,
    HIGHEST_PRIORITY = -5,
    MULTIPROCESSORS = 4,
    RESIDENT_BLOCKS = 2, /* on each of them, whatever the kernel */
    MAX_BLOCK_THREADS = 1024,
    SHARED_BYTES = 48 << 10, /* that a block may have unasked, and at all */
    SHARED_BYTES_OPTIN = 227 << 10,
};

/* Every entry point: base name, the version of the ABI we offer, and the version from
   which the real driver would hand out another ABI under the same name (0: none). */
#define FAKE_ENTRIES(X)                    \
    X(cuInit, 2000, 0)                     \
    X(cuDriverGetVersion, 2020, 0)         \
    X(cuGetErrorName, 6000, 0)             \
    X(cuGetErrorString, 6000, 0)           \
    X(cuDeviceGetCount, 2000, 0)           \
    X(cuDeviceGet, 2000, 0)                \
    X(cuDeviceGetName, 2000, 0)            \
    X(cuDeviceTotalMem, 3020, 0)           \
    X(cuDeviceGetAttribute, 2000, 0)       \
    X(cuDeviceGetPCIBusId, 4010, 0)        \
    X(cuDevicePrimaryCtxRetain, 7000, 0)   \
    X(cuDevicePrimaryCtxRelease, 11000, 0) \
    X(cuCtxGetCurrent, 4000, 0)            \
    X(cuCtxSetCurrent, 4000, 0)            \
    X(cuCtxPushCurrent, 4000, 0)           \
    X(cuCtxPopCurrent, 4000, 0)            \
    X(cuCtxGetDevice, 2000, 13000)         \
    X(cuCtxSynchronize, 2000, 13000)       \
    X(cuCtxCreate, 3020, 11040)            \
    X(cuCtxDestroy, 4000, 0)               \
    X(cuStreamCreateWithPriority, 5050, 0) \
    X(cuStreamDestroy, 4000, 0)            \
    X(cuStreamQuery, 2000, 0)              \
    X(cuStreamSynchronize, 2000, 0)        \
    X(cuStreamWaitEvent, 3020, 0)          \
    X(cuStreamGetPriority, 5050, 0)        \
    X(cuStreamGetFlags, 5050, 0)           \
    X(cuStreamGetCtx, 9020, 12050)         \
    X(cuEventCreate, 2000, 0)              \
    X(cuEventDestroy, 4000, 0)             \
    X(cuEventRecord, 2000, 0)              \
    X(cuEventQuery, 2000, 0)               \
    X(cuEventSynchronize, 2000, 0)         \
    X(cuEventElapsedTime, 2000, 0)         \
    X(cuMemAlloc, 3020, 0)                 \
    X(cuMemFree, 3020, 0)                  \
    X(cuMemGetAddressRange, 3020, 0)       \
    X(cuMemGetInfo, 3020, 0)               \
    X(cuMemHostAlloc, 2020, 0)             \
    X(cuMemFreeHost, 2000, 0)              \
    X(cuMemHostRegister, 6050, 0)          \
    X(cuMemHostUnregister, 4000, 0)        \
    X(cuPointerGetAttribute, 4000, 0)      \
    X(cuMemcpyHtoD, 3020, 0)               \
    X(cuMemcpyHtoDAsync, 3020, 0)          \
    X(cuMemcpyDtoH, 3020, 0)               \
    X(cuMemcpyDtoHAsync, 3020, 0)          \
    X(cuMemcpyDtoD, 3020, 0)               \
    X(cuMemcpyDtoDAsync, 3020, 0)          \
    X(cuMemcpy2DAsync, 3020, 0)            \
    X(cuMemsetD8, 3020, 0)                 \
    X(cuMemsetD16, 3020, 0)                \
    X(cuMemsetD32, 3020, 0)                \
    X(cuMemsetD8Async, 3020, 0)            \
    X(cuMemsetD16Async, 3020, 0)           \
    X(cuMemsetD32Async, 3020, 0)           \
    X(cuMemHostGetDevicePointer, 3020, 0)  \
    X(cuModuleLoadData, 2000, 0)           \
    X(cuModuleUnload, 2000, 0)             \
    X(cuModuleGetFunction, 2000, 0)        \
    X(cuFuncGetAttribute, 2020, 0)         \
    X(cuFuncSetAttribute, 9000, 0)         \
    X(cuLaunchKernel, 4000, 0)             \
    X(cuLaunchCooperativeKernel, 9000, 0)  \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor, 6050, 0)

/* What cuBLAS exports; counted and failed like the driver's entry points. */
#define FAKE_CUBLAS_ENTRIES(X)   \
    X(cublasCreate_v2)           \
    X(cublasDestroy_v2)          \
    X(cublasGetVersion_v2)       \
    X(cublasSetStream_v2)        \
    X(cublasSetWorkspace_v2)     \
    X(cublasSetMathMode)         \
    X(cublasSetPointerMode_v2)   \
    X(cublasSgemm_v2)            \
    X(cublasSgemv_v2)            \
    X(cublasSgemmStridedBatched) \
    X(cublasGemmEx)

enum call {
#define X(name, version, ceiling) CALL_##name,
    FAKE_ENTRIES(X)
#undef X
    DRIVER_CALLS,
    BEFORE_CUBLAS_CALLS = DRIVER_CALLS - 1,
#define X(name) CALL_##name,
    FAKE_CUBLAS_ENTRIES(X)
#undef X
    CALL_COUNT
};

enum mode { MODE_LATE, MODE_RANDOM, MODE_EAGER };

struct context;

/* A range of memory that the driver knows. */
enum block_kind { BLOCK_DEVICE, BLOCK_PAGE_LOCKED, BLOCK_REGISTERED };

struct block {
    uintptr_t address;
    size_t bytes;
    enum block_kind kind;
    struct context *context; /* borrowed; a context takes its blocks with it */
    bool portable; /* page-locked for every context, not for its own alone */
    void *raw; /* owned; NULL for registered memory, which the caller owns */
    bool old;  /* freed, and a reset came since */
};

/* One end of a copy: rows of `width` bytes, `pitch` bytes apart. */
struct end {
    uintptr_t address;
    size_t pitch;
    struct block *block; /* borrowed, NULL for pageable memory; cleared if it goes */
    bool host;
};

enum item_kind {
    ITEM_COPY,
    ITEM_MEMSET,
    ITEM_RECORD,
    ITEM_WAIT,
    ITEM_SPIN,
    ITEM_WORK
};

/* One piece of device work. It is alive while someone counts on it: the pending list,
   its stream (the last item only), an event, a later item, a waiting thread. */
struct item {
    struct item *prev, *next; /* borrowed: the pending list, in the order of issue */
    unsigned refs;
    enum item_kind kind;
    bool wanted;  /* it may run once all it waits for is done */
    bool started; /* its time runs */
    bool done;
    bool broken;             /* its memory was taken away while it was pending */
    struct context *context; /* borrowed, while pending */
    uint64_t lane;           /* the number of its stream */
    struct item **waits_for; /* owned array of counted items */
    size_t waits_count, waits_room;
    uint64_t duration;  /* ns the device is busy with it */
    uint64_t wanted_at; /* all times in ns of the monotonic clock */
    uint64_t ready_at;  /* when the last of those it waited for was done */
    uint64_t finish_at;
    struct end dst, src;
    size_t width, height;
    unsigned char *staged; /* owned: the bytes of a pageable source, else NULL */
    uint32_t value;               /* memset */
    unsigned value_bytes;         /* memset: 1, 2 or 4 */
    bool (*work)(void *argument); /* work: false if its memory is not there */
    void *argument;               /* owned: the work's, from `allocate` */
    struct module *module;        /* borrowed: of a kernel; cleared if it goes */
};

struct stream {
    CUstream handle;
    struct context *context; /* borrowed; owns this stream */
    struct stream *next;     /* owned by the context's list */
    struct item *last;       /* counted; the last item issued, NULL before the first */
    unsigned flags;
    int priority;
    bool is_null;
    bool destroyed;  /* stays in the list until its last item is done */
    uint64_t thread; /* the owner of a per-thread default stream, else 0 */
    uint64_t lane;   /* 1 for the first made since the reset, and so on */
    uint64_t hold;   /* ns that copies and memsets issued from now on take */
};

struct event {
    CUevent handle;
    struct context *context; /* borrowed; owns this event */
    struct item *record;     /* counted; the latest record, NULL before the first */
    unsigned flags;
};

/* A loaded image, whose functions are the kernels of the library that was set when it
   was loaded. */
struct module {
    CUmodule handle;
    struct context *context;           /* borrowed; owns this module */
    const struct cpu_kernels *library; /* borrowed, for ever */
};

struct function {
    CUfunction handle;
    struct module *module;           /* borrowed; owns this function */
    const struct cpu_kernel *kernel; /* borrowed, for ever */
    size_t dynamic_limit;            /* of shared memory */
};

struct context {
    CUcontext handle;
    struct context *next; /* owned by fake.contexts, until the next reset */
    int device;
    unsigned flags;
    unsigned primary_refs; /* 0 for one made by cuCtxCreate */
    bool is_primary;
    bool destroyed;
    struct stream null_stream;
    struct stream *streams; /* owned list: all but the NULL stream */
};

struct failure {
    enum call call;
    uint64_t first, last; /* fails while first <= number of the call < last */
    CUresult code;
};

/* One call that does not return for a while. */
struct delay {
    enum call call;
    uint64_t number; /* of the call */
    uint64_t ns;     /* at most; 0 once it has begun */
};

/* Handles are numbers never used twice, so a destroyed one is known as such for ever.
 */
struct handles {
    uintptr_t tag;
    size_t first, used, room, live;
    void **objects; /* owned array of borrowed objects, NULL where destroyed */
};

struct fake {
    pthread_mutex_t lock;
    pthread_cond_t changed; /* items were done; for the waiters of fake_queue.c */
    volatile bool forked;   /* this process is a fork of one that had the driver */
    uint64_t *child_calls;  /* owned, in memory shared with forked children */
    bool initialised;
    uint64_t epoch; /* one more at each reset: older context stacks are void */

    int driver_version, device_count;
    enum mode mode;
    uint64_t random;  /* the state of the seeded sequence */
    uint64_t moods;   /* random mode: which streams stand still for now */
    uint64_t lanes;   /* streams made since the reset */
    uint64_t hold;    /* like stream.hold, for every stream */
    bool staged_htod; /* pageable cuMemcpyHtoD returns once the bytes are taken */
    size_t device_limit, page_locked_limit;
    int max_pitch; /* of copies of rows */

    uint64_t calls[CALL_COUNT];
    bool hidden[CALL_COUNT];
    struct failure failures[MAX_FAILURES];
    size_t failure_count;
    uint64_t all_calls;  /* of all entry points that need a context */
    uint64_t lost_from;  /* from this one of them on it is lost */
    uint64_t lost_calls; /* that have failed so */
    CUresult lost_code;
    struct delay delays[MAX_DELAYS];
    size_t delay_count;
    uint64_t releases;   /* how often those that wait were let go */
    size_t delayed;      /* calls that wait now */
    uint64_t begun_delays, ended_delays; /* the latter: by time, not let go */
    uint64_t host_syncs;

    struct handles context_handles, stream_handles, event_handles;
    struct handles module_handles, function_handles, blas_handles;
    char *kernels; /* owned: the path of their library, NULL for the environment's */
    struct context *contexts;             /* owned list, destroyed ones too */
    struct context *primary[MAX_DEVICES]; /* borrowed, NULL while inactive */
    uint64_t retains[MAX_DEVICES];        /* of the primary contexts, since the reset */

    struct item *first_item, *last_item; /* counted: pending items in order of issue */
    size_t pending, wanted, waiters;

    struct block **blocks; /* owned array of owned blocks, sorted by address */
    size_t block_count, block_room;
    size_t counts[3], bytes[3]; /* live blocks and their bytes, by enum block_kind */
    size_t device_bytes[MAX_DEVICES]; /* of device memory, by device */
    uint64_t faults;            /* items whose memory went before they ran */
    uint64_t damaged_zones; /* found at free; live blocks are looked at on request */
    uint64_t late_writes;   /* writes to freed memory, found so far */
};

extern struct fake fake;

/* fake_objects.c */
enum { HANDLE_STEP = 64 }; /* between the numbers of two handles */
void *allocate(size_t count, size_t size);
void *handle_add(struct handles *table, void *object);
void *handle_find(const struct handles *table, const void *handle);
void handle_remove(struct handles *table, const void *handle);
void handles_clear(struct handles *table);
uint64_t random_mix(uint64_t x);
uint64_t random_number(void);
CUresult context_create(int device, unsigned flags, bool primary, struct context **out);
CUresult context_destroy(struct context *context);
struct context *context_find(CUcontext handle);
CUresult context_current(struct context **out);
CUcontext context_top(void);
CUresult context_push(CUcontext handle);
CUresult context_pop(CUcontext *handle);
CUresult context_set(CUcontext handle);
CUresult stream_create(struct context *context, unsigned flags, int priority,
                       struct stream **out);
CUresult stream_find(CUstream handle, struct context *current, struct stream **out);
void stream_destroy(struct stream *stream);
struct event *event_create(struct context *context, unsigned flags);
struct event *event_find(CUevent handle);
void event_destroy(struct event *event);
void objects_reset(void);

/* fake_queue.c */
uint64_t clock_now(void);
void sleep_until(uint64_t time);
struct item *item_new(enum item_kind kind, struct stream *stream);
void item_unref(struct item *item);
void queue_submit(struct stream *stream, struct item *item);
void queue_add_wait(struct item *item, struct item *other);
void queue_step(void);
bool queue_stream_done(const struct stream *stream);
void queue_wait_item(struct item *item);
void queue_wait_stream(struct stream *stream);
void queue_wait_context(struct context *context);
void queue_want_all(void);
void queue_work(struct stream *stream, bool (*work)(void *), void *argument,
                struct module *module);
void queue_forget_block(struct block *block);
void queue_forget_module(struct module *module);
void queue_cancel_all(void);

/* fake_memory.c */
CUresult memory_allocate(struct context *context, enum block_kind kind, size_t bytes,
                         struct block **out);
CUresult memory_register(struct context *context, void *address, size_t bytes,
                         bool portable);
void memory_release(struct block *block);
struct block *memory_find_base(enum block_kind kind, uintptr_t address);
struct block *memory_find_any(uintptr_t address);
CUresult memory_device_end(CUdeviceptr address, size_t extent, int device,
                           struct end *out);
CUresult memory_host_end(const void *address, size_t extent, int device,
                         struct end *out);
bool memory_is_live(const void *address, size_t bytes, int device);
void memory_release_context(struct context *context);
void memory_reset(void);
uint64_t memory_damaged_zones(void);
uint64_t memory_late_writes(void);

/* fake_cuda.c */
CUresult enter_early(enum call call);
CUresult enter_context(enum call call, struct context **current);
CUresult enter_stream(enum call call, CUstream handle, struct context **current,
                      struct stream **stream);
CUresult leave(CUresult code);
const char *entry_name(enum call call);

/* fake_kernels.c */
CUresult fake_cuModuleLoadData(CUmodule *handle, const void *image);
CUresult fake_cuModuleUnload(CUmodule handle);
CUresult fake_cuModuleGetFunction(CUfunction *handle, CUmodule module_handle,
                                  const char *name);
CUresult fake_cuFuncGetAttribute(int *value, CUfunction_attribute attribute,
                                 CUfunction handle);
CUresult fake_cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute,
                                 int value);
CUresult fake_cuLaunchKernel(CUfunction handle, unsigned grid_x, unsigned grid_y,
                             unsigned grid_z, unsigned block_x, unsigned block_y,
                             unsigned block_z, unsigned shared, CUstream stream,
                             void **parameters, void **extra);
CUresult fake_cuLaunchCooperativeKernel(CUfunction handle, unsigned grid_x,
                                        unsigned grid_y, unsigned grid_z,
                                        unsigned block_x, unsigned block_y,
                                        unsigned block_z, unsigned shared,
                                        CUstream stream, void **parameters);
CUresult fake_cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks,
                                                          CUfunction handle,
                                                          int threads, size_t shared);
void modules_drop_context(struct context *context);
void modules_reset(void);

/* fake_cublas.c */
void cublas_drop_context(struct context *context);
void cublas_reset(void);

#endif
