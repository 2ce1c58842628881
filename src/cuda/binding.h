/* What the files of brainstorm_dbuf._cuda share.
 *
 * The extension opens libcuda.so.1 by name at the first call that needs it (driver.c)
 * and wraps it in a few types. Three rules hold in every file:
 *
 * - Context. Every object holds its Context and runs each of its driver calls in it:
 *   IN_CONTEXT pushes it only if the thread has another one current, and puts the
 *   caller's back. So an object may be used and dropped on any thread.
 * - GIL. Released around whatever may wait or move bytes; in such a region there is no
 *   Python call. Calls of some 150 ns that never wait (record, wait_event, query), and
 *   the queueing of a small copy in a stream that is not full, keep it. The module's
 *   own lists and ledgers are protected by the GIL; the module does not declare itself
 *   free of it.
 * - In flight. An asynchronous copy holds both its ends in a ledger until an event
 *   recorded after it has passed (ledger.c).
 */
#ifndef BRAINSTORM_DBUF_BINDING_H
#define BRAINSTORM_DBUF_BINDING_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define PY_ARRAY_UNIQUE_SYMBOL brainstorm_dbuf_cuda_array_api
#ifndef BINDING_IMPORTS_ARRAY_API /* module.c alone */
#define NO_IMPORT_ARRAY
#endif
#ifndef NPY_NO_DEPRECATED_API
#define NPY_NO_DEPRECATED_API NPY_1_24_API_VERSION
#endif
#include <numpy/arrayobject.h>

#include <cuda.h>
#include <cudaTypedefs.h>

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* For calls whose own part is some 20 ns: what they do when nothing is special lies in
 * one piece, since much of the cost is fetching code that the driver has displaced. */
#define LIKELY(condition) __builtin_expect(!!(condition), 1)
#define COLD __attribute__((cold)) /* a function for errors and other rare ends */

/* ---- Driver table (driver.c) ---- */

/* Every entry used: name without "cu", and the version of its signature. Short names
 * because cuda.h turns cuMemAlloc into cuMemAlloc_v2 by macro: "MemAlloc" is no macro,
 * so the stringified name is always the base name that cuGetProcAddress expects. */
#define DRIVER_CALLS(X) \
    X(Init, 2000) \
    X(DriverGetVersion, 2020) \
    X(GetErrorName, 6000) \
    X(GetErrorString, 6000) \
    X(DeviceGetCount, 2000) \
    X(DeviceGet, 2000) \
    X(DeviceGetName, 2000) \
    X(DeviceTotalMem, 3020) \
    X(DeviceGetAttribute, 2000) \
    X(DeviceGetPCIBusId, 4010) \
    X(DevicePrimaryCtxRetain, 7000) \
    X(DevicePrimaryCtxRelease, 11000) \
    X(CtxGetCurrent, 4000) \
    X(CtxSetCurrent, 4000) \
    X(CtxPushCurrent, 4000) \
    X(CtxPopCurrent, 4000) \
    X(CtxGetDevice, 2000) \
    X(CtxSynchronize, 2000) \
    X(StreamCreateWithPriority, 5050) \
    X(StreamDestroy, 4000) \
    X(StreamQuery, 2000) \
    X(StreamSynchronize, 2000) \
    X(StreamWaitEvent, 3020) \
    X(StreamGetPriority, 5050) \
    X(StreamGetCtx, 9020) \
    X(EventCreate, 2000) \
    X(EventDestroy, 4000) \
    X(EventRecord, 2000) \
    X(EventQuery, 2000) \
    X(EventSynchronize, 2000) \
    X(EventElapsedTime, 2000) \
    X(MemAlloc, 3020) \
    X(MemFree, 3020) \
    X(MemGetAddressRange, 3020) \
    X(MemGetInfo, 3020) \
    X(MemHostAlloc, 2020) \
    X(MemFreeHost, 2000) \
    X(MemHostRegister, 6050) \
    X(MemHostUnregister, 4000) \
    X(PointerGetAttribute, 4000) \
    X(MemcpyHtoD, 3020) \
    X(MemcpyHtoDAsync, 3020) \
    X(MemcpyDtoH, 3020) \
    X(MemcpyDtoHAsync, 3020) \
    X(MemcpyDtoD, 3020) \
    X(MemcpyDtoDAsync, 3020) \
    X(Memcpy2DAsync, 3020) \
    X(MemsetD8, 3020) \
    X(MemsetD16, 3020) \
    X(MemsetD32, 3020) \
    X(MemsetD8Async, 3020) \
    X(MemsetD16Async, 3020) \
    X(MemsetD32Async, 3020) \
    X(ModuleLoadData, 2000) \
    X(ModuleUnload, 2000) \
    X(ModuleGetFunction, 2000) \
    X(LaunchKernel, 4000)

typedef struct {
#define X(name, version) PFN_cu##name##_v##version name;
    DRIVER_CALLS(X)
#undef X
} Driver;

/* How many devices the driver saw when it was last asked; 0 before. */
extern _Atomic(int) driver_devices;

/* Filled once, by driver_open; valid while driver_usable says so. */
extern Driver driver;

/* 1 from the end of cuInit until, in a forked child, for ever 0. */
extern _Atomic(int) driver_is_usable;

static inline int
driver_usable(void)
{
    return atomic_load_explicit(&driver_is_usable, memory_order_acquire);
}

/* ---- Module state ---- */

typedef struct ContextObject ContextObject;

typedef struct {
    /* All owned, until the module is cleared. */
    PyTypeObject *Device_type;
    PyTypeObject *Context_type;
    PyTypeObject *Stream_type;
    PyTypeObject *Event_type;
    PyTypeObject *DeviceMemory_type;
    PyTypeObject *PageLockedMemory_type;
    PyTypeObject *RegisteredMemory_type;
    PyTypeObject *StagingRing_type;
    PyTypeObject *Engine_type;
    PyTypeObject *DeviceArray_type;
    PyTypeObject *HandlerCore_type;
    PyObject *CudaError;
    PyObject *CudaMemoryError;
    PyObject *DriverError;
    PyObject *ForkError;
    PyObject *str_cuda_array_interface;
    PyObject *str_cuda_stream;
} ModuleState;

static inline ModuleState *
module_state(PyObject *module)
{
    return (ModuleState *)PyModule_GetState(module);
}

/* Make a type of the module's (module.c). New reference, or NULL with an error set. */
PyTypeObject *type_new(PyObject *module, PyType_Spec *spec);

/* State of the module that made self's type; none of the types can be subclassed. Not
 * for deallocs: the garbage collector may have cleared type and module by then (NULL).
 * Streams and events keep it at hand: asking takes a tenth of their shortest calls. */
static inline ModuleState *
state_of(void *self)
{
    return (ModuleState *)PyType_GetModuleState(Py_TYPE((PyObject *)self));
}

/* Return 0, with the driver open; or -1 with DriverError or ForkError set. */
COLD int driver_open(ModuleState *state);

static inline int
driver_ready(ModuleState *state)
{
    return driver_usable() ? 0 : driver_open(state);
}

/* Ask the driver for the number of devices. */
CUresult driver_count_devices(int *count);

/* The driver's version (13000 for 13.0), or 0 where it is not open. Never opens it. */
int driver_version_if_open(void);

/* The name that is, or was, given to dlopen. Borrowed. */
const char *driver_library_name(void);

/* ---- Counts of live objects ---- */

#ifdef Py_GIL_DISABLED
typedef _Atomic(Py_ssize_t) Counter;
#else
typedef Py_ssize_t Counter; /* the GIL protects it */
#endif

typedef struct {
    Counter contexts;
    Counter streams; /* made by us and not yet destroyed; no foreign ones */
    Counter events;  /* the same */
    Counter fences;  /* events that belong to ledgers */
    Counter device_memory;
    Counter device_bytes;
    Counter page_locked_blocks;
    Counter page_locked_bytes;
    Counter registered;
    Counter in_flight; /* copies whose ends a ledger holds */
} LiveCounts;

extern LiveCounts live;

/* ---- Guard: closing an object while other threads are inside it ---- */

/* Bit 0: closed. The rest: how many calls are inside, times 2. New work is refused once
 * the bit is set; whoever finds the word at "closed, nobody inside" destroys. */
typedef struct {
#ifdef Py_GIL_DISABLED
    _Atomic(int) word;
#else
    int word; /* the GIL protects it */
#endif
} Guard;

static inline int
guard_is_closed(Guard *guard)
{
    return guard->word & 1;
}

/* Return 1 and count one user in, or 0 if the object is closed. */
static inline int
guard_enter(Guard *guard)
{
#ifdef Py_GIL_DISABLED
    int word = atomic_load(&guard->word);
    do {
        if (word & 1) {
            return 0;
        }
    } while (!atomic_compare_exchange_weak(&guard->word, &word, word + 2));
    return 1;
#else
    if (guard->word & 1) {
        return 0;
    }
    guard->word += 2;
    return 1;
#endif
}

/* Count one user out. Return 1 if the caller is to destroy the object. */
static inline int
guard_leave(Guard *guard)
{
#ifdef Py_GIL_DISABLED
    return atomic_fetch_sub(&guard->word, 2) == 3;
#else
    guard->word -= 2;
    return guard->word == 1;
#endif
}

/* Count one user in, though it may be closed: for who knows that nobody destroys yet.
 */
static inline void
guard_enter_closed(Guard *guard)
{
#ifdef Py_GIL_DISABLED
    atomic_fetch_add(&guard->word, 2);
#else
    guard->word += 2;
#endif
}

/* Let users in again; for who closed it with nobody inside. */
static inline void
guard_reopen(Guard *guard)
{
#ifdef Py_GIL_DISABLED
    atomic_fetch_and(&guard->word, ~1);
#else
    guard->word &= ~1;
#endif
}

/* Refuse new users from now on. Return 1 if the caller is to destroy the object. */
static inline int
guard_close(Guard *guard)
{
#ifdef Py_GIL_DISABLED
    return atomic_fetch_or(&guard->word, 1) == 0;
#else
    int before = guard->word;
    guard->word |= 1;
    return before == 0;
#endif
}

/* ---- Errors (error.c) ---- */

/* Set the Python exception for a failed driver call and return NULL. `format` says what
 * was asked for (as PyUnicode_FromFormat), or is NULL: then the driver's own words. */
COLD PyObject *raise_cuda(ModuleState *state, const char *call, CUresult status,
                          const char *format, ...);

/* Set a CudaError that no driver call made: class, call, name, detail. Return NULL. */
COLD PyObject *raise_plain(PyObject *cls, const char *call, const char *name,
                           const char *format, ...);

/* Set ValueError "<what> is closed" and return NULL. */
COLD PyObject *raise_closed(const char *what);

/* True for the errors that mean: the context is gone, and the resource went with it. */
int context_is_gone(CUresult status);

/* True for the errors after which every call of the process fails (CUDA Driver API,
 * CUresult: "the process must be terminated and relaunched"). raise_cuda says so. */
int context_is_lost(CUresult status);

/* In a dealloc: report a failed call as unraisable, unless the context is gone, or
 * known to be lost. */
void report_unraisable(void *self, const char *call, CUresult status);

/* Keep the exception that is being handled across a dealloc that may set its own. */
typedef struct {
#if PY_VERSION_HEX >= 0x030C0000
    PyObject *raised; /* owned */
#else
    PyObject *type, *value, *traceback; /* owned */
#endif
} SavedError;

void save_error(SavedError *saved);
void restore_error(SavedError *saved);

/* __reduce__ of every handle type: TypeError naming the type. */
PyObject *refuse_pickling(PyObject *self, PyObject *ignored);

#define REFUSE_PICKLING \
    {"__reduce__", refuse_pickling, METH_NOARGS, \
     PyDoc_STR("__reduce__($self, /)\n--\n\nRaise TypeError: a handle is of its " \
               "process only.")}

/* ---- Arguments (args.c) ---- */

typedef struct {
    const char *function;
    const char *const *names; /* NULL-terminated */
    int required;             /* how many must be given */
    int positional;           /* how many may be given by position */
} Signature;

/* Fill out[] (as many as there are names; NULL where not given) with borrowed
 * references. Return 0, or -1 with TypeError set. */
int unpack_slowly(const Signature *signature, PyObject *const *args, Py_ssize_t nargs,
                  PyObject *kwnames, PyObject **out);

/* The same; out[] must be zeroed by the caller. The loop has the signature's bound: the
 * compiler knows that one, and makes a few moves of it. */
static inline int
unpack(const Signature *signature, PyObject *const *args, Py_ssize_t nargs,
       PyObject *kwnames, PyObject **out)
{
    if (LIKELY(kwnames == NULL && nargs >= signature->required &&
               nargs <= signature->positional)) {
        for (int i = 0; i < signature->positional; i++) {
            if (i < nargs) {
                out[i] = args[i];
            }
        }
        return 0;
    }
    return unpack_slowly(signature, args, nargs, kwnames, out);
}

#define FASTCALL(function) \
    ((PyCFunction)(void (*)(void))(function)), METH_FASTCALL | METH_KEYWORDS

/* The integer that an object stands for. New reference, or NULL with a TypeError that
 * names it or what the object's own code raised. */
PyObject *index_argument(const char *what, PyObject *object);

/* An int; NULL leaves *value. Return 0, or -1 with TypeError or ValueError set. */
int int_argument(const char *what, PyObject *object, int *value);

/* Items of a dict under NULL-terminated names, NULL where it has none. New references,
 * to be dropped in any case: code that runs while one item is read may change the dict.
 * Return 0, or -1 with an error set. */
int dict_items(PyObject *dict, const char *const *names, PyObject **items);

/* A count of bytes or elements. Return 0, or -1 with TypeError or ValueError set. */
int size_argument(const char *what, PyObject *object, size_t *size);

/* An address or a handle: any integer that fits. Return 0, or -1 with an error set. */
int address_argument(const char *what, PyObject *object, unsigned long long *address);

/* ---- Context (context.c) ---- */

typedef struct Ledger Ledger;

struct ContextObject {
    PyObject_HEAD
    CUcontext handle;    /* counted if is_primary, else borrowed from owner */
    int is_primary;      /* we hold one retain of the device's primary context */
    CUdevice device;     /* its device, where that is known */
    int device_is_known; /* of a primary context always, else once asked for */
    PyObject *owner;     /* owned, or NULL: keeps a foreign context alive */
    Py_ssize_t pushes; /* push() less pop(); each owns a reference to this object, lest
                          a thread's current context be destroyed under it */
    int max_pitch;     /* of its device, bytes between rows; 0 until asked for */
    Ledger *ledgers;   /* owned list: streams that have no Stream object of ours */
    ContextObject *next; /* borrowed: next in the list of all contexts */
};

/* What to do about a thread without a context; no format directive in it. */
#define NO_CONTEXT_ADVICE \
    "no context is current in this thread; set one around the call, `with context:`, " \
    "or pass context=; Context.primary(0) gives a device's own, Context.current() " \
    "the one of the thread that has it"

/* The context current in this thread; new reference. NULL with CudaError set if
 * none. */
ContextObject *context_current(ModuleState *state);

/* The Context of a handle: the live one if there is one. New reference or NULL. */
ContextObject *context_of_handle(ModuleState *state, CUcontext handle);

/* The current context, or in a thread without one any that is live. New reference;
 * NULL with CudaError set if there is none at all. */
ContextObject *context_any(ModuleState *state);

/* A `context` argument; None or NULL means the current one. New reference or NULL. */
ContextObject *context_argument(ModuleState *state, PyObject *object);

/* The ledger of a stream that has no Stream object. Borrowed from the context, valid
 * until the GIL is released; NULL with MemoryError set. */
Ledger *context_ledger(ContextObject *context, CUstream stream);

/* The ordinal of the context's device, by the driver the first time where it is no
 * primary context. Return 0, or -1 with an error set. */
COLD int context_device(ModuleState *state, ContextObject *self, int *ordinal);

/* Have their reprs name their devices, as far as the driver tells. Any may be NULL;
 * never an error. */
COLD void contexts_learn_devices(ModuleState *state, ContextObject *first,
                                 ContextObject *second);

/* Wait for what runs in all contexts known here but that one; those that are gone have
 * nothing to wait for. Releases the GIL. */
void contexts_synchronize_others(CUcontext except);

/* The most bytes from row to row that a copy of rows may have on the context's device,
 * by the driver the first time. Return 0, or -1 with an error set. */
int context_max_pitch(ModuleState *state, ContextObject *self, size_t *pitch);

typedef struct {
    CUcontext previous; /* borrowed */
    const char *failed; /* the call that failed in scope_enter, or NULL */
    int pushed;
} Scope;

/* Make a context current. Needs no GIL. */
static inline CUresult
scope_enter(Scope *scope, CUcontext context)
{
    scope->pushed = 0;
    scope->failed = NULL;
    CUresult status = driver.CtxGetCurrent(&scope->previous);
    if (status != CUDA_SUCCESS) {
        scope->failed = "cuCtxGetCurrent";
    }
    else if (scope->previous != context) {
        status = driver.CtxPushCurrent(context);
        if (status != CUDA_SUCCESS) {
            scope->failed = "cuCtxPushCurrent";
        }
        else {
            scope->pushed = 1;
        }
    }
    return status;
}

/* Put the caller's context back. Should the pop fail, set it: the call in between has
 * been made, and its result counts. Needs no GIL. */
static inline void
scope_leave(Scope *scope)
{
    CUcontext popped;
    if (scope->pushed && driver.CtxPopCurrent(&popped) != CUDA_SUCCESS) {
        (void)driver.CtxSetCurrent(scope->previous);
    }
}

/* The call to name in an error. */
static inline const char *
scope_call(const Scope *scope, const char *call)
{
    return scope->failed != NULL ? scope->failed : call;
}

/* status = call, made in the context. Needs no GIL. */
#define IN_CONTEXT(scope, context, status, call) \
    do { \
        (status) = scope_enter(&(scope), (context)); \
        if ((status) == CUDA_SUCCESS) { \
            (status) = (call); \
            scope_leave(&(scope)); \
        } \
    } while (0)

/* status = call, on a stream and what goes with it: these know their context, so the
 * driver wants none to be current (CUDA C++ Programming Guide, stream and event
 * behavior on several devices), and where it does after all, it gets it. The special
 * streams mean those of the current context. Saves a twentieth of a short call. Needs
 * no GIL. */
#define BY_HANDLE(scope, context, stream, status, call) \
    do { \
        (scope).failed = NULL; \
        (status) = \
            LIKELY((uintptr_t)(stream) > 2) ? (call) : CUDA_ERROR_INVALID_CONTEXT; \
        if (!LIKELY((status) == CUDA_SUCCESS) && \
            ((status) == CUDA_ERROR_INVALID_CONTEXT || \
             (status) == CUDA_ERROR_CONTEXT_IS_DESTROYED || \
             (status) == CUDA_ERROR_INVALID_HANDLE)) { \
            IN_CONTEXT(scope, context, status, call); \
        } \
    } while (0)

/* ---- Ledger (ledger.c) ---- */

enum {
    LEDGER_FENCES = 256,    /* more pending fences than this: wait for the oldest */
    LEDGER_BATCH = 64,      /* small copies that share a fence */
    LEDGER_SMALL = 1 << 20, /* bytes; larger copies get a fence of their own */
    LEDGER_DEEP = 256,      /* copies in flight: from then on queueing one may wait */
};

typedef struct {
    PyObject *ends[2]; /* owned, the second may be NULL */
} Held;

typedef struct {
    CUevent event; /* owned */
    uint64_t upto; /* copies numbered below this are done once the event has passed */
} Fence;

/* Copies in flight of one stream, numbered from 0 in the order of their issue. First
 * what every copy touches, so that it is together in the cache. */
struct Ledger {
    CUstream stream; /* borrowed: the Stream object's, or foreign */
    int is_foreign; /* stream may be destroyed while copies are held for it: each gets a
                       fence, and no call is made on the handle for their sake */
    int users;      /* calls between reserve and commit, or inside a wait */
    Held *held;     /* owned ring: copy n is held[n % capacity], head <= n < tail */
    uint64_t capacity; /* a power of two, or 0 */
    uint64_t head, tail;
    uint64_t fenced;             /* copies below this lie before a fence */
    Fence fences[LEDGER_FENCES]; /* ring: fence_head <= n < fence_tail */
    uint64_t fence_head, fence_tail;
    CUevent spare[LEDGER_FENCES]; /* owned: events to be used again */
    int spares;
    Ledger *next; /* owned: next in the context's list */
};

/* What a copy in the making has set aside. */
typedef struct {
    CUevent event; /* owned, or NULL: this copy records no fence */
} Ticket;

/* Whether a copy needs no fence of its own: most small ones do not. */
static inline int
ledger_shares_fence(const Ledger *ledger, size_t nbytes)
{
    return LIKELY(nbytes < LEDGER_SMALL) && LIKELY(!ledger->is_foreign) &&
           LIKELY(ledger->tail - ledger->fenced < LEDGER_BATCH - 1);
}

int ledger_reserve_slowly(ModuleState *state, Ledger *ledger, ContextObject *context,
                          size_t nbytes, Ticket *ticket);

/* Before a copy: make room, and have an event if this copy is to record one. May
 * release the GIL. Return 0, or -1 with an error set and nothing set aside. */
static inline int
ledger_reserve(ModuleState *state, Ledger *ledger, ContextObject *context,
               size_t nbytes, Ticket *ticket)
{
    uint64_t in_use = ledger->tail - ledger->head + (uint64_t)ledger->users;
    if (ledger_shares_fence(ledger, nbytes) && LIKELY(in_use < ledger->capacity)) {
        ticket->event = NULL;
        ledger->users++;
        return 0;
    }
    return ledger_reserve_slowly(state, ledger, context, nbytes, ticket);
}

/* Record the ticket's event behind all copies committed so far. */
void ledger_fence(Ledger *ledger, ContextObject *context, Ticket *ticket);

/* After the copy was issued: hold its ends (references are stolen). Never fails. */
static inline void
ledger_commit(Ledger *ledger, ContextObject *context, Ticket *ticket, PyObject *first,
              PyObject *second)
{
    Held *place = &ledger->held[ledger->tail & (ledger->capacity - 1)];
    place->ends[0] = first;
    place->ends[1] = second;
    ledger->tail++;
    ledger->users--;
    live.in_flight++;
    if (!LIKELY(ticket->event == NULL)) {
        ledger_fence(ledger, context, ticket);
    }
}

/* After the copy failed: put back what was set aside. */
void ledger_cancel(Ledger *ledger, Ticket *ticket);

/* Let go of what is done, as far as cuEventQuery says. Never waits. */
void ledger_poll(Ledger *ledger, ContextObject *context);

/* Let go of all copies numbered below upto: the caller knows that they are done. */
void ledger_settle(Ledger *ledger, uint64_t upto);

/* Wait for all copies (GIL released), let go of them, and give the events back. In a
 * forked child only the references are dropped. The ledger may be used again. Return
 * the result of the wait, with the call that it is of. */
CUresult ledger_drain(Ledger *ledger, ContextObject *context, const char **call);

int ledger_traverse(Ledger *ledger, visitproc visit, void *arg);

/* Free the memory of a drained ledger (not the struct itself). */
void ledger_free(Ledger *ledger);

/* ---- Stream (stream.c) ---- */

typedef struct {
    PyObject_HEAD
    ModuleState *state;     /* borrowed: state_of it */
    CUstream handle;        /* owned if is_ours, else borrowed from owner */
    int is_ours;            /* we destroy it */
    ContextObject *context; /* owned, until dealloc */
    PyObject *owner;        /* owned, or NULL: keeps a foreign stream alive */
    Guard guard;
    Ledger ledger;
} StreamObject;

/* Begin a call. Return 0, or -1 with an error set: closed, or no usable driver. */
static inline int
stream_enter(ModuleState *state, StreamObject *self)
{
    if (driver_ready(state) < 0) {
        return -1;
    }
    if (!guard_enter(&self->guard)) {
        raise_closed("Stream");
        return -1;
    }
    return 0;
}

COLD void stream_destroy_late(StreamObject *self);

/* End a call; the last one after close() destroys. Keeps the current exception. */
static inline void
stream_leave(StreamObject *self)
{
    if (guard_leave(&self->guard)) {
        stream_destroy_late(self);
    }
}

/* A resolved `stream` argument. */
typedef struct {
    CUstream handle;
    StreamObject *object; /* borrowed and entered, or NULL: no Stream object of ours */
    ContextObject *context; /* borrowed from object; else owned, or NULL: the NULL
                               stream of whatever context */
} StreamRef;

int stream_resolve_slowly(ModuleState *state, PyObject *object, StreamRef *ref);

/* Resolve None, a Stream, an object with __cuda_stream__ or an int. The StreamRef must
 * be zeroed. Return 0, or -1 with an error set; stream_release in both cases. */
static inline int
stream_resolve(ModuleState *state, PyObject *object, StreamRef *ref)
{
    if (!LIKELY(object != NULL && Py_IS_TYPE(object, state->Stream_type))) {
        return stream_resolve_slowly(state, object, ref);
    }
    StreamObject *stream = (StreamObject *)object;
    if (stream_enter(state, stream) < 0) {
        return -1;
    }
    ref->object = stream;
    ref->handle = stream->handle;
    ref->context = stream->context;
    return 0;
}

static inline void
stream_release(StreamRef *ref)
{
    if (LIKELY(ref->object != NULL)) {
        stream_leave(ref->object);
        ref->object = NULL;
        ref->context = NULL;
    }
    else {
        Py_CLEAR(ref->context);
    }
}

/* ---- Event (event.c) ---- */

typedef struct {
    PyObject_HEAD
    ModuleState *state;     /* borrowed: state_of it */
    CUevent handle;         /* owned */
    ContextObject *context; /* owned, until dealloc */
    Guard guard;
    int timing;   /* made with timing */
    int recorded; /* recorded at least once */
} EventObject;

EventObject *event_new(ModuleState *state, ContextObject *context, unsigned int flags);

/* Begin a call. Return 0, or -1 with an error set: closed, or no usable driver. */
static inline int
event_enter(ModuleState *state, EventObject *self)
{
    if (driver_ready(state) < 0) {
        return -1;
    }
    if (!guard_enter(&self->guard)) {
        raise_closed("Event");
        return -1;
    }
    return 0;
}

COLD void event_destroy_late(EventObject *self);

/* End a call; the last one after close() destroys. Keeps the current exception. */
static inline void
event_leave(EventObject *self)
{
    if (guard_leave(&self->guard)) {
        event_destroy_late(self);
    }
}

/* As event_enter, for what makes sense on a recorded event only. */
static inline int
event_enter_recorded(ModuleState *state, EventObject *self)
{
    if (event_enter(state, self) < 0) {
        return -1;
    }
    if (!LIKELY(self->recorded)) {
        PyErr_SetString(PyExc_ValueError, "Event was never recorded");
        event_leave(self);
        return -1;
    }
    return 0;
}

/* Set the ValueError for a stream of another context. */
COLD void event_raise_other_context(ModuleState *state, EventObject *self,
                                    ContextObject *stream_context);

/* Record on a stream of the event's own context. Return 0, or -1 with an error set. */
static inline int
event_record(ModuleState *state, EventObject *self, CUstream stream,
             ContextObject *stream_context)
{
    CUresult status;
    Scope scope;
    if (event_enter(state, self) < 0) {
        return -1;
    }
    if (stream_context->handle != self->context->handle) {
        event_raise_other_context(state, self, stream_context);
        event_leave(self);
        return -1;
    }
    BY_HANDLE(scope, self->context->handle, stream, status,
              driver.EventRecord(self->handle, stream));
    if (status == CUDA_SUCCESS) {
        self->recorded = 1;
    }
    event_leave(self);
    if (status != CUDA_SUCCESS) {
        raise_cuda(state, scope_call(&scope, "cuEventRecord"), status, NULL);
        return -1;
    }
    return 0;
}

/* Make a stream wait. Return 0, or -1 with an error set. */
static inline int
event_wait_on(ModuleState *state, EventObject *self, CUstream stream,
              ContextObject *stream_context)
{
    CUresult status;
    Scope scope;
    if (event_enter_recorded(state, self) < 0) {
        return -1;
    }
    /* The event may be of another context: the driver orders the two. */
    BY_HANDLE(scope, stream_context->handle, stream, status,
              driver.StreamWaitEvent(stream, self->handle, CU_EVENT_WAIT_DEFAULT));
    event_leave(self);
    if (status != CUDA_SUCCESS) {
        raise_cuda(state, scope_call(&scope, "cuStreamWaitEvent"), status, NULL);
        return -1;
    }
    return 0;
}

/* ---- Layout of arrays (layout.c) ---- */

enum { MOST_AXES = 64 }; /* NumPy 2 has no more */

/* An array's axes, outermost first, with those merged that are one walk through
 * memory, and without those of one element. */
typedef struct {
    int ndim; /* at least 1 */
    size_t shape[MOST_AXES];
    ptrdiff_t strides[MOST_AXES]; /* bytes */
} Axes;

/* Of an array with elements and at most MOST_AXES axes. */
void array_axes(PyArrayObject *array, Axes *axes);

/* First byte and one past the last of an array, whatever its strides. */
void array_bounds(PyArrayObject *array, char **first, char **end);

/* Rows of one length at one distance. */
typedef struct {
    size_t width; /* bytes of a row; like height 0 for an array without bytes */
    size_t pitch; /* bytes from one row's begin to the next one's; at least width */
    size_t height;
} HostRows;

/* Return 1 and the rows that the array's bytes are in its own order, one if it is
 * C-contiguous; or 0 if they are no such rows. */
int array_rows(PyArrayObject *array, HostRows *rows);

/* ---- Memory ---- */

typedef struct {
    PyObject_HEAD
    CUdeviceptr ptr; /* owned; 0 for no bytes, and once freed */
    size_t nbytes;
    ContextObject *context; /* owned until dealloc; NULL only if nbytes is 0 */
    Guard guard;
} DeviceMemoryObject;

COLD void device_memory_destroy_late(DeviceMemoryObject *self);

/* Count a user out; the last one after free() frees. */
static inline void
device_memory_leave(DeviceMemoryObject *self)
{
    if (guard_leave(&self->guard)) {
        device_memory_destroy_late(self);
    }
}

typedef struct {
    PyObject_HEAD
    void *ptr; /* owned: cuMemHostAlloc; NULL for no bytes */
    size_t nbytes;
    ContextObject *context; /* owned until dealloc; NULL only if nbytes is 0 */
    int is_portable;        /* page-locked for every context, not for its own alone */
} PageLockedMemoryObject;

/* Begins as the other. */
typedef struct {
    PyObject_HEAD
    void *ptr; /* borrowed from array; page-locked while is_registered */
    size_t nbytes;
    ContextObject *context; /* owned until dealloc; NULL only if nbytes is 0 */
    int is_portable;        /* page-locked for every context, not for its own alone */
    PyObject *array;        /* owned until dealloc: whose memory it is */
    int is_registered;      /* the driver has it; cuMemHostUnregister is due */
    int is_unregistering;   /* by a thread that has released the GIL meanwhile */
    Guard guard; /* closed by unregister(); inside are calls that copy from or to it */
} RegisteredMemoryObject;

/* Whether the bytes from first to before end lie in memory of ours; none always do. */
static inline int
pagelocked_has(const void *ptr, size_t nbytes, const char *first, const char *end)
{
    const char *start = ptr;
    return (first >= start && end <= start + nbytes) || first == end;
}

PyObject *pagelocked_owner_slowly(ModuleState *state, PyArrayObject *array,
                                  const char *first, const char *end);

/* The object of ours (borrowed) in whose page-locked memory the bytes of an array lie,
 * from first to before end. NULL if there is none; never an error. */
static inline PyObject *
pagelocked_owner(ModuleState *state, PyArrayObject *array, const char *first,
                 const char *end)
{
    PyObject *base = PyArray_BASE(array);
    if (LIKELY(base != NULL && Py_IS_TYPE(base, state->PageLockedMemory_type))) {
        PageLockedMemoryObject *memory = (PageLockedMemoryObject *)base;
        return pagelocked_has(memory->ptr, memory->nbytes, first, end) ? base : NULL;
    }
    return pagelocked_owner_slowly(state, array, first, end);
}

/* The context for which what pagelocked_owner has found is page-locked. Borrowed; NULL
 * where that is every context. */
static inline ContextObject *
pagelocked_context(PyObject *owner)
{
    PageLockedMemoryObject *memory = (PageLockedMemoryObject *)owner;
    return owner == NULL || memory->is_portable ? NULL : memory->context;
}

/* Refuse memory that is page-locked in one context for copies in another one, of
 * another device. Return 0, or -1 with ValueError set. */
COLD int pagelocked_check_device(ModuleState *state, const char *function,
                                 const char *role, ContextObject *locked_in,
                                 ContextObject *context);

/* Keep the memory of an array from being unregistered during a call: the driver takes
 * it for page-locked until its copy is queued, whether the call does or not. May
 * release the GIL. A new reference, or NULL where nothing can be unregistered; never an
 * error. */
RegisteredMemoryObject *pagelocked_enter_slowly(ModuleState *state, PyObject *base);

static inline RegisteredMemoryObject *
pagelocked_enter(ModuleState *state, PyArrayObject *array)
{
    PyObject *base = PyArray_BASE(array);
    if (LIKELY(base == NULL || Py_IS_TYPE(base, state->PageLockedMemory_type))) {
        return NULL;
    }
    return pagelocked_enter_slowly(state, base);
}

/* The other end of pagelocked_enter, for what it has returned: NULL too. The last one
 * after unregister() unregisters. Keeps the current exception. */
COLD void pagelocked_unregister_late(RegisteredMemoryObject *self);

static inline void
pagelocked_leave(RegisteredMemoryObject *self)
{
    if (!LIKELY(self == NULL)) {
        if (guard_leave(&self->guard)) {
            pagelocked_unregister_late(self);
        }
        Py_DECREF((PyObject *)self);
    }
}

/* Ask the driver about first and last byte; in a context. Needs no GIL. */
CUresult pagelocked_ask(const void *ptr, size_t nbytes, int *is_locked);

/* ---- Ends of a copy (ends.c) ---- */

typedef struct {
    CUdeviceptr ptr;
    size_t nbytes;
    int size_is_known;          /* 0: an address; device_end_measure asks the driver */
    PyObject *hold;             /* owned: what keeps the memory alive */
    DeviceMemoryObject *memory; /* entered and borrowed from hold, or NULL: foreign */
    ContextObject *context;     /* borrowed from hold, or NULL: not known */
    StreamObject *stream;       /* borrowed from hold, or NULL: a DeviceArray's, which
                                   copies that are given no stream go on */
} DeviceEnd;

typedef struct {
    void *ptr;
    size_t nbytes;
    PyObject *hold;                     /* owned: what keeps the memory alive */
    RegisteredMemoryObject *registered; /* owned and entered, or NULL */
    int is_locked;            /* known to be page-locked (0: ask the driver) */
    ContextObject *locked_in; /* borrowed from hold, or NULL: for every context */
    ContextObject *context;   /* borrowed, or NULL: any will do */
} HostEnd;

/* Set TypeError and return -1 if elements of this dtype must not be moved as bytes:
 * object pointers, and, if `native` is asked for, the other byte order. Else 0. */
int check_dtype(const char *role, PyArray_Descr *descr, int native);

int device_end_resolve_slowly(ModuleState *state, const char *role, PyObject *object,
                              int writable, DeviceEnd *end);

/* Resolve an argument; the struct must be zeroed. `role` is "dest" or "src", for the
 * message. Return 0, or -1 with an error set; release in both cases. */
static inline int
device_end_resolve(ModuleState *state, const char *role, PyObject *object, int writable,
                   DeviceEnd *end)
{
    if (!LIKELY(Py_IS_TYPE(object, state->DeviceMemory_type))) {
        return device_end_resolve_slowly(state, role, object, writable, end);
    }
    DeviceMemoryObject *memory = (DeviceMemoryObject *)object;
    if (!guard_enter(&memory->guard)) {
        raise_closed("DeviceMemory");
        return -1;
    }
    end->ptr = memory->ptr;
    end->nbytes = memory->nbytes;
    end->size_is_known = 1;
    end->hold = Py_NewRef(object);
    end->memory = memory;
    end->context = memory->context;
    return 0;
}

static inline void
device_end_release(DeviceEnd *end)
{
    if (LIKELY(end->memory != NULL)) {
        device_memory_leave(end->memory);
        end->memory = NULL;
    }
    Py_CLEAR(end->hold);
}

int host_end_resolve(ModuleState *state, const char *role, PyObject *object,
                     int writable, HostEnd *end);

static inline void
host_end_release(HostEnd *end)
{
    pagelocked_leave(end->registered);
    end->registered = NULL;
    Py_CLEAR(end->hold);
}

/* Refuse memory of another device than the context's; `role` is for the message. The
 * driver is asked, but not where it has but one device. Return 0, or -1 with an error
 * set. */
int device_check_pointer(ModuleState *state, const char *role, CUdeviceptr ptr,
                         ContextObject *context);

int device_end_ask(ModuleState *state, const char *role, DeviceEnd *end,
                   ContextObject *context);

/* Of memory that is not ours, check that it is of the context's device and ask the
 * driver how many bytes follow an address. Return 0, or -1 with an error set. */
static inline int
device_end_measure(ModuleState *state, const char *role, DeviceEnd *end,
                   ContextObject *context)
{
    return LIKELY(end->context != NULL) ? 0 : device_end_ask(state, role, end, context);
}

ContextObject *common_context_slowly(ModuleState *state, ContextObject *first,
                                     ContextObject *second, const StreamRef *stream);

/* The context of a copy: what the ends and the stream say, else the current one. New
 * reference; NULL with ValueError set if two of them differ. Any argument may be NULL.
 */
static inline ContextObject *
common_context(ModuleState *state, ContextObject *first, ContextObject *second,
               const StreamRef *stream)
{
    if (LIKELY(first != NULL && second == NULL && stream != NULL &&
               stream->context == first && driver_usable())) {
        return (ContextObject *)Py_NewRef((PyObject *)first);
    }
    return common_context_slowly(state, first, second, stream);
}

COLD void raise_does_not_fit(const char *role, size_t nbytes, size_t needed);

/* Return 0 if `needed` bytes fit into an end of `nbytes`, else -1 with ValueError set.
 */
static inline int
check_fits(const char *role, size_t nbytes, size_t needed)
{
    if (needed > nbytes) {
        raise_does_not_fit(role, nbytes, needed);
        return -1;
    }
    return 0;
}

/* ---- What the files with copies share (copy.c) ---- */

/* The `stream` argument: where none is given, a DeviceArray's own. As stream_resolve.
 */
static inline int
copy_stream(ModuleState *state, PyObject *given, const DeviceEnd *first,
            const DeviceEnd *second, StreamRef *stream)
{
    const DeviceEnd *end = first->stream != NULL ? first : second;
    if (!LIKELY(given != NULL && given != Py_None) && end->stream != NULL) {
        given = (PyObject *)end->stream;
    }
    return stream_resolve(state, given, stream);
}

/* The ledger of a resolved stream. Borrowed; NULL with MemoryError set. */
Ledger *copy_ledger(const StreamRef *stream, ContextObject *context);

/* What the ledger holds for a device end; new reference. */
PyObject *copy_held_end(const DeviceEnd *end, const StreamRef *stream);

int copy_ask_locked(ModuleState *state, const char *function, const char *role,
                    const char *instead, const HostEnd *host, ContextObject *context);

/* Refuse a host end that is not page-locked: the driver would copy synchronously, or
 * read it later than the caller thinks. `instead` is the copy that takes any memory.
 * Return 0, or -1 with an error set. */
static inline int
copy_check_locked(ModuleState *state, const char *function, const char *role,
                  const char *instead, const HostEnd *host, ContextObject *context)
{
    return LIKELY(host->is_locked) && LIKELY(host->locked_in == NULL ||
                                             host->locked_in->handle == context->handle)
               ? 0
               : copy_ask_locked(state, function, role, instead, host, context);
}

/* An asynchronous copy to the device that takes more than one call of the driver's, or
 * none at once: resolve the three ends, then check, reserve, queue, commit; release in
 * any case. */
typedef struct {
    DeviceEnd dest;
    HostEnd host;
    StreamRef stream;
    ContextObject *context; /* owned, or NULL */
    Ledger *ledger;         /* borrowed from stream or context */
    Ticket ticket;
} HtodCopy;

/* Find the context; `nbytes` must fit into dest, and host be page-locked (the other
 * arguments as of copy_check_locked). Return 0, or -1 with an error set. */
int htod_check(ModuleState *state, HtodCopy *copy, size_t nbytes, const char *function,
               const char *role, const char *instead);

/* As ledger_reserve; htod_commit must follow. */
int htod_reserve(ModuleState *state, HtodCopy *copy, size_t nbytes);

/* Hold both ends, however much was queued. Never fails. */
void htod_commit(HtodCopy *copy);

void htod_release(HtodCopy *copy);

/* True if queueing a copy takes no longer than letting go of the GIL and taking it
 * again is worth: a small one, in a stream whose queue is far from full. */
int copy_is_brief(const Ledger *ledger, size_t nbytes);

/* ---- Tables of the other files ---- */

extern PyType_Spec Device_spec, Context_spec, Stream_spec, Event_spec,
    DeviceMemory_spec, PageLockedMemory_spec, RegisteredMemory_spec, StagingRing_spec;

PyObject *device_new(ModuleState *state, int ordinal);

extern PyMethodDef device_functions[], device_memory_functions[],
    pagelocked_functions[], copy_functions[], copy_rows_functions[], memset_functions[],
    signature_functions[], stage_functions[];

#endif
