/* StagingRing: from ordinary memory to the device, through a little page-locked memory.
 *
 * What the copy engine is to take must be gathered into page-locked memory first. Here
 * that is a ring of places, small enough to stay in the processor's caches: the gather
 * (gather.c) reads main memory once and the copy engine takes from the caches what was
 * just written. An array goes through it in pieces, each filled by the threads of a
 * team in shares that they take in order; who completes a piece queues its copy, and
 * who comes to a place whose last copy is not done waits for that one alone. So a large
 * array takes as long as the slower of gather and link, not their sum. */
#include "gather.h"
#include "thread_team.h"

#include <sched.h>

enum {
    PLACES_MOST = 64,
    LINE_BYTES = 64,
    SHARED_BYTES = 1 << 20, /* from here on, several threads fill a place */
    LARGE_BYTES = 32 << 20, /* from here on, threads take shares twice as large: fewer
                               of them write where another one has written before */
};

typedef struct {
    PyObject_HEAD
    PyObject *memory; /* owned until closed: the page-locked array of the places */
    char *start;      /* borrowed from memory */
    size_t place_bytes;
    int places;
    EventObject *copied[PLACES_MOST]; /* owned until closed: what a place was last read
                                         by; only their handles are used */
    uint64_t pieces;         /* so far: piece n goes through place n % places */
    ContextObject *context;  /* owned until dealloc */
    PyThread_type_lock lock; /* owned until dealloc; held by the call that fills places,
                                which runs no Python code meanwhile: that might want
                                the ring itself */
    Guard guard;
} StagingRingObject;

typedef struct {
    _Atomic(size_t) gathered; /* elements */
    _Atomic(int) may_fill;    /* its place is free */
    _Atomic(int) is_queued;   /* its copy, and the event behind it */
} Piece;

/* One array on its way. */
typedef struct {
    StagingRingObject *ring; /* borrowed from the call */
    Gather gather;
    size_t piece_size; /* elements of a piece, the last may have fewer */
    size_t count;      /* of pieces */
    Piece *pieces;     /* owned if there are several, else borrowed from the call */
    CUdeviceptr dest;
    CUstream stream;
    _Atomic(int) status;         /* CUresult of the first call that failed */
    const char *_Atomic(failed); /* its name */
} Passage;

static int
index_of(const Passage *passage, size_t number)
{
    return (int)((passage->ring->pieces + number) % (uint64_t)passage->ring->places);
}

static char *
place_of(const Passage *passage, size_t number)
{
    const StagingRingObject *ring = passage->ring;
    return ring->start + (size_t)index_of(passage, number) * ring->place_bytes;
}

static CUevent
event_of(const Passage *passage, size_t number)
{
    return passage->ring->copied[index_of(passage, number)]->handle;
}

static CUcontext
context_of(const Passage *passage)
{
    return passage->ring->context->handle;
}

static int
has_failed(Passage *passage)
{
    return atomic_load_explicit(&passage->status, memory_order_relaxed) != 0;
}

static void
note_failure(Passage *passage, CUresult status, const char *call)
{
    int none = CUDA_SUCCESS;
    if (atomic_compare_exchange_strong(&passage->status, &none, (int)status)) {
        atomic_store(&passage->failed, call);
    }
}

/* In the context. Mostly the event has passed, and asking is quicker than waiting. */
static CUresult
await_event(CUevent event, const char **call)
{
    CUresult status = driver.EventQuery(event);
    *call = "cuEventQuery";
    if (status == CUDA_ERROR_NOT_READY) {
        status = driver.EventSynchronize(event);
        *call = "cuEventSynchronize";
    }
    return status;
}

/* Wait until the place of a piece may be written. Return 0 if something has failed. */
static int
wait_for_place(Passage *passage, size_t number)
{
    const size_t places = (size_t)passage->ring->places;
    Piece *piece = &passage->pieces[number];
    CUresult status;
    Scope scope;
    if (atomic_load_explicit(&piece->may_fill, memory_order_acquire)) {
        return 1;
    }
    if (number >= places) {
        /* By threads that are a whole ring behind, and never wait for this one. */
        Piece *before = &passage->pieces[number - places];
        while (!atomic_load_explicit(&before->is_queued, memory_order_acquire)) {
            if (has_failed(passage)) {
                return 0;
            }
            sched_yield();
        }
    }
    const char *call = NULL;
    IN_CONTEXT(scope, context_of(passage), status,
               await_event(event_of(passage, number), &call));
    if (status != CUDA_SUCCESS) {
        note_failure(passage, status, scope_call(&scope, call));
        return 0;
    }
    atomic_store_explicit(&piece->may_fill, 1, memory_order_release);
    return 1;
}

/* The copy of a piece, and the event behind it; in the context. */
static CUresult
issue_piece(const Passage *passage, size_t number, size_t size, const char **call)
{
    const size_t itemsize = passage->gather.itemsize;
    CUdeviceptr to = passage->dest + number * passage->piece_size * itemsize;
    CUresult status = driver.MemcpyHtoDAsync(to, place_of(passage, number),
                                             size * itemsize, passage->stream);
    *call = "cuMemcpyHtoDAsync";
    if (status == CUDA_SUCCESS) {
        status = driver.EventRecord(event_of(passage, number), passage->stream);
        *call = "cuEventRecord";
    }
    return status;
}

/* Queue the copy of a piece that is complete. */
static void
queue_piece(Passage *passage, size_t number, size_t size)
{
    const char *call = NULL;
    CUresult status;
    Scope scope;
    IN_CONTEXT(scope, context_of(passage), status,
               issue_piece(passage, number, size, &call));
    if (status != CUDA_SUCCESS) {
        note_failure(passage, status, scope_call(&scope, call));
        return;
    }
    atomic_store_explicit(&passage->pieces[number].is_queued, 1, memory_order_release);
}

/* The work of each thread. */
static void
carry_shares(void *job)
{
    Passage *passage = job;
    Gather *gather = &passage->gather;
    size_t begin, count;
    while (!has_failed(passage) && (count = gather_take(gather, &begin)) > 0) {
        const size_t number = begin / passage->piece_size;
        const size_t first = number * passage->piece_size;
        const size_t left = gather->size - first;
        const size_t size = left < passage->piece_size ? left : passage->piece_size;
        if (!wait_for_place(passage, number)) {
            return;
        }
        gather_copy(gather, begin, count,
                    place_of(passage, number) + (begin - first) * gather->itemsize);
        if (atomic_fetch_add_explicit(&passage->pieces[number].gathered, count,
                                      memory_order_acq_rel) +
                count ==
            size) {
            queue_piece(passage, number, size);
        }
    }
}

/* After a failure a place may be in flight without an event that says so. Needs no GIL.
 */
static void
await_stream(const Passage *passage)
{
    CUresult status;
    Scope scope;
    IN_CONTEXT(scope, context_of(passage), status,
               driver.StreamSynchronize(passage->stream));
    (void)status;
}

/* Whether it is a single piece that can go at once, without waiting. */
static int
place_is_free(Passage *passage)
{
    CUresult status;
    Scope scope;
    if (passage->count != 1) {
        return 0;
    }
    IN_CONTEXT(scope, context_of(passage), status,
               driver.EventQuery(event_of(passage, 0)));
    if (status == CUDA_SUCCESS) {
        atomic_store_explicit(&passage->pieces[0].may_fill, 1, memory_order_relaxed);
    }
    return status == CUDA_SUCCESS;
}

static void
wait_for_lock(PyThread_type_lock lock)
{
    PyThread_acquire_lock(lock, WAIT_LOCK);
}

static void
take_lock(StagingRingObject *self)
{
    if (!PyThread_acquire_lock(self->lock, NOWAIT_LOCK)) {
        Py_BEGIN_ALLOW_THREADS
        wait_for_lock(self->lock);
        Py_END_ALLOW_THREADS
    }
}

/* Give memory and events back; what is in flight holds the memory until it is done. */
static void
ring_destroy(StagingRingObject *self)
{
    for (int i = 0; i < PLACES_MOST; i++) {
        Py_CLEAR(self->copied[i]);
    }
    Py_CLEAR(self->memory);
}

static void
ring_leave(StagingRingObject *self)
{
    if (guard_leave(&self->guard)) {
        ring_destroy(self);
    }
}

/* Keep the memory page-locked during a call. Return 0, or -1 with an error set. */
static int
ring_enter_memory(ModuleState *state, StagingRingObject *self, HostEnd *host)
{
    char *end = self->start + (size_t)self->places * self->place_bytes;
    PyObject *owner =
        pagelocked_owner(state, (PyArrayObject *)self->memory, self->start, end);
    if (owner == NULL) {
        PyErr_SetString(PyExc_ValueError, "the StagingRing's memory was unregistered");
        return -1;
    }
    host->registered = pagelocked_enter(state, (PyArrayObject *)self->memory);
    host->hold = Py_NewRef(self->memory);
    return 0;
}

/* Plan the gather as elements of `dtype`. *copied: what NumPy had to cast, or NULL.
 * Return 0, or -1 with an error set. */
static int
plan(Gather *gather, PyArray_Descr *dtype, PyArrayObject *src, PyArrayObject **copied)
{
    if (gather_plan(gather, dtype, src)) {
        return 0;
    }
    *copied = (PyArrayObject *)PyArray_FromArray(
        src, (PyArray_Descr *)Py_NewRef((PyObject *)dtype),
        NPY_ARRAY_CARRAY_RO | NPY_ARRAY_FORCECAST);
    if (*copied == NULL) {
        return -1;
    }
    if (!gather_plan(gather, dtype, *copied)) {
        PyErr_Format(PyExc_TypeError,
                     "dtype: expected numbers of up to 64 bits in the machine's byte "
                     "order, got %R",
                     (PyObject *)dtype);
        return -1;
    }
    return 0;
}

/* The dtype to copy an array as; None or NULL is its own. NULL with an error set. */
static PyArray_Descr *
dtype_on_device(PyObject *object, PyArrayObject *src)
{
    PyArray_Descr *dtype = NULL;
    if (object == NULL || object == Py_None) {
        return PyArray_DescrNewByteorder(PyArray_DESCR(src), NPY_NATIVE);
    }
    (void)PyArray_DescrConverter(object, &dtype);
    return dtype;
}

/* Of dest; of a broadcast array it may be more than there can be. */
static size_t
bytes_of(const Gather *gather)
{
    return gather->size > SIZE_MAX / gather->itemsize ? SIZE_MAX
                                                      : gather->size * gather->itemsize;
}

/* The copy engine had best find a place in the caches. But while there is little to do,
 * threads spend most of it on fetching lines that others have written before. */
static int
streams(const Gather *gather, size_t nbytes)
{
    return gather->is_one_block && nbytes >= SHARED_BYTES && nbytes < LARGE_BYTES;
}

/* Cut it into pieces. Return 0, or -1 with MemoryError set. */
static int
cut(Passage *passage, Piece *single)
{
    Gather *gather = &passage->gather;
    passage->piece_size = passage->ring->place_bytes / gather->itemsize;
    if (gather->size * gather->itemsize >= LARGE_BYTES &&
        passage->piece_size % (2 * gather->share) == 0) {
        gather->share *= 2;
    }
    if (gather->share > passage->piece_size) {
        gather->share = passage->piece_size;
    }
    passage->count = (gather->size + passage->piece_size - 1) / passage->piece_size;
    passage->pieces = passage->count == 1
                          ? single
                          : PyMem_Calloc(passage->count, sizeof(*passage->pieces));
    if (passage->pieces == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static PyObject *
StagingRing_memcpy_htod_async(PyObject *op, PyObject *const *args, Py_ssize_t nargs,
                              PyObject *kwnames)
{
    enum { DEST, SRC, DTYPE, STREAM, THREADS, COUNT };
    static const char *const names[] = {"dest",   "src",     "dtype",
                                        "stream", "threads", NULL};
    static const Signature signature = {"memcpy_htod_async", names, 2, COUNT};
    StagingRingObject *self = (StagingRingObject *)op;
    ModuleState *state = state_of(self);
    PyObject *given[COUNT] = {NULL};
    HtodCopy copy = {0};
    Passage passage = {.ring = self};
    Piece single = {0};
    PyArray_Descr *dtype = NULL;
    PyArrayObject *copied = NULL;
    PyObject *result = NULL;
    size_t threads = 0;
    int number;
    if (unpack(&signature, args, nargs, kwnames, given) < 0 ||
        (given[THREADS] != NULL &&
         size_argument("threads", given[THREADS], &threads) < 0) ||
        driver_ready(state) < 0) {
        return NULL;
    }
    if (!PyArray_Check(given[SRC])) {
        return PyErr_Format(PyExc_TypeError,
                            "memcpy_htod_async: src must be a numpy array, not %s",
                            Py_TYPE(given[SRC])->tp_name);
    }
    PyArrayObject *src = (PyArrayObject *)given[SRC];
    if (!guard_enter(&self->guard)) {
        return raise_closed("StagingRing");
    }
    if ((dtype = dtype_on_device(given[DTYPE], src)) == NULL ||
        device_end_resolve(state, "dest", given[DEST], 1, &copy.dest) < 0 ||
        copy_stream(state, given[STREAM], &copy.dest, &copy.dest, &copy.stream) < 0) {
        goto done;
    }
    if (PyArray_SIZE(src) == 0) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    if (plan(&passage.gather, dtype, src, &copied) < 0 ||
        (number = gather_threads(&passage.gather, threads)) < 0) {
        goto done;
    }
    const size_t nbytes = bytes_of(&passage.gather);
    copy.host.is_locked = 1;
    copy.host.context = self->context;
    if (htod_check(state, &copy, nbytes, signature.function, "src", "memcpy_htod") <
            0 ||
        cut(&passage, &single) < 0 || htod_reserve(state, &copy, nbytes) < 0) {
        goto done;
    }
    if (ring_enter_memory(state, self, &copy.host) < 0) {
        ledger_cancel(copy.ledger, &copy.ticket);
        goto done;
    }
    passage.gather.is_streamed = streams(&passage.gather, nbytes);
    passage.dest = copy.dest.ptr;
    passage.stream = copy.stream.handle;
    take_lock(self);
    if (gather_is_tiny(&passage.gather) && copy_is_brief(copy.ledger, nbytes) &&
        place_is_free(&passage)) {
        carry_shares(&passage);
    }
    else {
        Py_BEGIN_ALLOW_THREADS
        team_run(number, carry_shares, &passage);
        Py_END_ALLOW_THREADS
    }
    if (has_failed(&passage)) {
        Py_BEGIN_ALLOW_THREADS
        await_stream(&passage);
        Py_END_ALLOW_THREADS
    }
    self->pieces += passage.count;
    htod_commit(&copy);
    PyThread_release_lock(self->lock);
    if (has_failed(&passage)) {
        raise_cuda(state, atomic_load(&passage.failed),
                   (CUresult)atomic_load(&passage.status), "%zu bytes", nbytes);
        goto done;
    }
    if (gather_report(&passage.gather) == 0) {
        result = Py_NewRef(Py_None);
    }
done:
    if (passage.pieces != &single) {
        PyMem_Free((void *)passage.pieces);
    }
    ring_leave(self);
    Py_XDECREF(copied);
    Py_XDECREF(dtype);
    htod_release(&copy);
    return result;
}

/* ---- several arrays in one place ---- */

/* One of them. */
typedef struct {
    PyArrayObject *src;    /* borrowed from the call's tuple */
    PyArray_Descr *dtype;  /* owned: as what it is copied */
    PyArrayObject *copied; /* owned, or NULL: what NumPy had to cast */
    size_t offset;         /* bytes, from dest and from the place */
    Gather gather;
} Parcel;

/* Read what the caller has said of one of them. Return 0, or -1 with an error set. */
static int
parcel_read(Parcel *parcel, Py_ssize_t index, PyObject *src, PyObject *offset,
            PyObject *dtype)
{
    char what[40];
    if (!PyArray_Check(src)) {
        PyErr_Format(PyExc_TypeError,
                     "memcpy_htod_packed_async: srcs[%zd] must be a numpy array, not "
                     "%.100s",
                     index, Py_TYPE(src)->tp_name);
        return -1;
    }
    parcel->src = (PyArrayObject *)src;
    snprintf(what, sizeof(what), "offsets[%zd]", index);
    if (size_argument(what, offset, &parcel->offset) < 0) {
        return -1;
    }
    parcel->dtype = dtype_on_device(dtype, parcel->src);
    return parcel->dtype == NULL ? -1 : 0;
}

/* Plan the gathers of all of them. Return the bytes of the copy, or -1 with an error
 * set. */
static Py_ssize_t
parcels_plan(const StagingRingObject *self, Parcel *parcels, Py_ssize_t count)
{
    size_t end = 0;
    /* What NumPy casts may run Python code: only then it is known where arrays lie. */
    for (Py_ssize_t i = 0; i < count; i++) {
        Parcel *parcel = &parcels[i];
        if (PyArray_SIZE(parcel->src) > 0 &&
            plan(&parcel->gather, parcel->dtype, parcel->src, &parcel->copied) < 0) {
            return -1;
        }
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Parcel *parcel = &parcels[i];
        PyArrayObject *src = parcel->copied != NULL ? parcel->copied : parcel->src;
        parcel->gather = (Gather){0};
        if (parcel->offset < end) {
            PyErr_Format(PyExc_ValueError,
                         "memcpy_htod_packed_async: offsets[%zd] is %zu, but the array "
                         "before ends at byte %zu",
                         i, parcel->offset, end);
            return -1;
        }
        if (PyArray_SIZE(src) > 0) {
            (void)gather_plan(&parcel->gather, parcel->dtype, src);
            const size_t nbytes = bytes_of(&parcel->gather);
            const int fits = nbytes <= SIZE_MAX - parcel->offset;
            end = fits ? parcel->offset + nbytes : SIZE_MAX;
        }
    }
    if (end > self->place_bytes) {
        PyErr_Format(
            PyExc_ValueError,
            "memcpy_htod_packed_async: the arrays end at byte %zu, a place has "
            "%zu",
            end, self->place_bytes);
        return -1;
    }
    return (Py_ssize_t)end;
}

/* Fill a place with all of them, and queue its copy. Needs no GIL. */
static void
carry_parcels(Passage *passage, Parcel *parcels, Py_ssize_t count, size_t nbytes)
{
    if (!wait_for_place(passage, 0)) {
        return;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Gather *gather = &parcels[i].gather;
        if (gather->size > 0) {
            gather_copy(gather, 0, gather->size,
                        place_of(passage, 0) + parcels[i].offset);
        }
    }
    queue_piece(passage, 0, nbytes);
    if (has_failed(passage)) {
        await_stream(passage);
    }
}

/* Read the three sequences as tuples of one length. Return it, or -1 with an error set.
 */
static Py_ssize_t
parcels_arguments(const Signature *signature, PyObject *const *given, PyObject **tuples)
{
    for (int i = 0; i < 3; i++) {
        if ((tuples[i] = PySequence_Tuple(given[1 + i])) == NULL) {
            if (PyErr_ExceptionMatches(PyExc_TypeError)) {
                PyErr_Format(PyExc_TypeError, "%s: %s must be a sequence, got %.100s",
                             signature->function, signature->names[1 + i],
                             Py_TYPE(given[1 + i])->tp_name);
            }
            return -1;
        }
    }
    const Py_ssize_t count = PyTuple_GET_SIZE(tuples[0]);
    if (PyTuple_GET_SIZE(tuples[1]) != count || PyTuple_GET_SIZE(tuples[2]) != count) {
        PyErr_Format(PyExc_ValueError,
                     "%s: srcs, offsets and dtypes must be as many, got %zd, %zd and "
                     "%zd",
                     signature->function, count, PyTuple_GET_SIZE(tuples[1]),
                     PyTuple_GET_SIZE(tuples[2]));
        return -1;
    }
    return count;
}

static PyObject *
StagingRing_memcpy_htod_packed_async(PyObject *op, PyObject *const *args,
                                     Py_ssize_t nargs, PyObject *kwnames)
{
    enum { DEST, SRCS, OFFSETS, DTYPES, STREAM, COUNT };
    static const char *const names[] = {"dest",   "srcs",   "offsets",
                                        "dtypes", "stream", NULL};
    static const Signature signature = {"memcpy_htod_packed_async", names, 4, COUNT};
    StagingRingObject *self = (StagingRingObject *)op;
    ModuleState *state = state_of(self);
    PyObject *given[COUNT] = {NULL}, *tuples[3] = {NULL}, *result = NULL;
    HtodCopy copy = {0};
    Piece single = {0};
    /* What is copied is bytes. */
    Passage passage = {
        .ring = self, .count = 1, .pieces = &single, .gather = {.itemsize = 1}};
    Parcel *parcels = NULL;
    Py_ssize_t count = 0, nbytes;
    if (unpack(&signature, args, nargs, kwnames, given) < 0 ||
        driver_ready(state) < 0) {
        return NULL;
    }
    if (!guard_enter(&self->guard)) {
        return raise_closed("StagingRing");
    }
    if ((count = parcels_arguments(&signature, given, tuples)) < 0) {
        count = 0;
        goto done;
    }
    if ((parcels = PyMem_Calloc((size_t)count, sizeof(*parcels))) == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (parcel_read(&parcels[i], i, PyTuple_GET_ITEM(tuples[0], i),
                        PyTuple_GET_ITEM(tuples[1], i),
                        PyTuple_GET_ITEM(tuples[2], i)) < 0) {
            goto done;
        }
    }
    if (device_end_resolve(state, "dest", given[DEST], 1, &copy.dest) < 0 ||
        copy_stream(state, given[STREAM], &copy.dest, &copy.dest, &copy.stream) < 0 ||
        (nbytes = parcels_plan(self, parcels, count)) < 0) {
        goto done;
    }
    if (nbytes == 0) {
        result = Py_NewRef(Py_None);
        goto done;
    }
    copy.host.is_locked = 1;
    copy.host.context = self->context;
    if (htod_check(state, &copy, (size_t)nbytes, signature.function, "srcs",
                   "memcpy_htod") < 0 ||
        htod_reserve(state, &copy, (size_t)nbytes) < 0) {
        goto done;
    }
    if (ring_enter_memory(state, self, &copy.host) < 0) {
        ledger_cancel(copy.ledger, &copy.ticket);
        goto done;
    }
    passage.dest = copy.dest.ptr;
    passage.stream = copy.stream.handle;
    take_lock(self);
    Py_BEGIN_ALLOW_THREADS
    carry_parcels(&passage, parcels, count, (size_t)nbytes);
    Py_END_ALLOW_THREADS
    self->pieces++;
    htod_commit(&copy);
    PyThread_release_lock(self->lock);
    if (has_failed(&passage)) {
        raise_cuda(state, atomic_load(&passage.failed),
                   (CUresult)atomic_load(&passage.status), "%zd bytes", nbytes);
        goto done;
    }
    result = Py_NewRef(Py_None);
    for (Py_ssize_t i = 0; i < count && result != NULL; i++) {
        if (gather_report(&parcels[i].gather) < 0) {
            Py_CLEAR(result);
        }
    }
done:
    for (Py_ssize_t i = 0; i < count && parcels != NULL; i++) {
        Py_XDECREF(parcels[i].dtype);
        Py_XDECREF(parcels[i].copied);
    }
    PyMem_Free(parcels);
    for (int i = 0; i < 3; i++) {
        Py_XDECREF(tuples[i]);
    }
    ring_leave(self);
    htod_release(&copy);
    return result;
}

/* Check the array whose memory is to be the places. Return 0, or -1 with an error set.
 */
static int
check_memory(ModuleState *state, PyObject *object, Py_ssize_t places)
{
    if (!PyArray_Check(object)) {
        PyErr_Format(PyExc_TypeError, "memory must be a numpy array, not %s",
                     Py_TYPE(object)->tp_name);
        return -1;
    }
    PyArrayObject *memory = (PyArrayObject *)object;
    char *first, *end;
    array_bounds(memory, &first, &end);
    if (!PyArray_ISWRITEABLE(memory) || !PyArray_IS_C_CONTIGUOUS(memory) ||
        PyArray_NBYTES(memory) == 0 ||
        pagelocked_owner(state, memory, first, end) == NULL) {
        PyErr_SetString(PyExc_ValueError,
                        "memory must be a writable, C-contiguous array with elements, "
                        "made by pagelocked_empty");
        return -1;
    }
    if ((uintptr_t)first % LINE_BYTES != 0) {
        PyErr_Format(PyExc_ValueError, "memory must begin at a multiple of %d bytes",
                     LINE_BYTES);
        return -1;
    }
    if (places < 1 || places > PLACES_MOST ||
        PyArray_NBYTES(memory) / places < LINE_BYTES) {
        PyErr_Format(PyExc_ValueError,
                     "places: expected from 1 to %d, of at least %d bytes each, got "
                     "%zd of %zd bytes in all",
                     PLACES_MOST, LINE_BYTES, places,
                     (Py_ssize_t)PyArray_NBYTES(memory));
        return -1;
    }
    return 0;
}

/* Return 0 if the memory is page-locked for the context, else -1 with an error set. */
static int
check_device(ModuleState *state, PyObject *memory, ContextObject *context)
{
    char *first, *end;
    array_bounds((PyArrayObject *)memory, &first, &end);
    ContextObject *locked_in = pagelocked_context(
        pagelocked_owner(state, (PyArrayObject *)memory, first, end));
    return locked_in == NULL || locked_in->handle == context->handle
               ? 0
               : pagelocked_check_device(state, "StagingRing", "memory", locked_in,
                                         context);
}

static PyObject *
StagingRing_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"memory", "places", "context", NULL};
    ModuleState *state = (ModuleState *)PyType_GetModuleState(type);
    PyObject *memory, *given = NULL, *context_object = Py_None;
    int places = 16;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|OO:StagingRing", names, &memory,
                                     &given, &context_object) ||
        int_argument("places", given, &places) < 0 ||
        check_memory(state, memory, places) < 0) {
        return NULL;
    }
    ContextObject *context = context_argument(state, context_object);
    if (context == NULL) {
        return NULL;
    }
    StagingRingObject *self = NULL;
    if (check_device(state, memory, context) == 0) {
        self = (StagingRingObject *)type->tp_alloc(type, 0);
    }
    if (self == NULL) {
        Py_DECREF(context);
        return NULL;
    }
    self->context = context;
    self->memory = Py_NewRef(memory);
    self->start = PyArray_BYTES((PyArrayObject *)memory);
    self->places = places;
    /* Shares must not lie across the end of a place. */
    self->place_bytes = (size_t)(PyArray_NBYTES((PyArrayObject *)memory) / places);
    self->place_bytes -= self->place_bytes % (self->place_bytes >= GATHER_SHARE_BYTES
                                                  ? (size_t)GATHER_SHARE_BYTES
                                                  : (size_t)LINE_BYTES);
    self->lock = PyThread_allocate_lock();
    if (self->lock == NULL) {
        PyErr_NoMemory();
        goto error;
    }
    for (int i = 0; i < self->places; i++) {
        self->copied[i] =
            event_new(state, context, CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
        if (self->copied[i] == NULL) {
            goto error;
        }
    }
    return (PyObject *)self;
error:
    Py_DECREF(self);
    return NULL;
}

static PyObject *
StagingRing_close(PyObject *op, PyObject *Py_UNUSED(ignored))
{
    StagingRingObject *self = (StagingRingObject *)op;
    if (!guard_is_closed(&self->guard) && guard_close(&self->guard)) {
        ring_destroy(self);
    }
    Py_RETURN_NONE;
}

static PyObject *
StagingRing_get_nbytes(PyObject *op, void *Py_UNUSED(closure))
{
    StagingRingObject *self = (StagingRingObject *)op;
    return PyLong_FromSize_t(
        guard_is_closed(&self->guard) ? 0 : self->place_bytes * (size_t)self->places);
}

static PyObject *
StagingRing_get_place_nbytes(PyObject *op, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(((StagingRingObject *)op)->place_bytes);
}

static PyObject *
StagingRing_get_closed(PyObject *op, void *Py_UNUSED(closure))
{
    return PyBool_FromLong(guard_is_closed(&((StagingRingObject *)op)->guard));
}

static PyObject *
StagingRing_repr(PyObject *op)
{
    StagingRingObject *self = (StagingRingObject *)op;
    if (guard_is_closed(&self->guard)) {
        return PyUnicode_FromString("<StagingRing closed>");
    }
    return PyUnicode_FromFormat("<StagingRing of %d places of %zu bytes>", self->places,
                                self->place_bytes);
}

static int
StagingRing_traverse(PyObject *op, visitproc visit, void *arg)
{
    StagingRingObject *self = (StagingRingObject *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->memory);
    Py_VISIT(self->context);
    for (int i = 0; i < PLACES_MOST; i++) {
        Py_VISIT(self->copied[i]);
    }
    return 0;
}

static void
StagingRing_dealloc(PyObject *op)
{
    StagingRingObject *self = (StagingRingObject *)op;
    PyTypeObject *type = Py_TYPE(op);
    PyObject_GC_UnTrack(op);
    ring_destroy(self);
    Py_CLEAR(self->context);
    if (self->lock != NULL) {
        PyThread_free_lock(self->lock);
    }
    type->tp_free(op);
    Py_DECREF(type);
}

static PyMethodDef StagingRing_methods[] = {
    {"memcpy_htod_async", FASTCALL(StagingRing_memcpy_htod_async),
     PyDoc_STR(
         "memcpy_htod_async($self, /, dest, src, dtype=None, stream=None, threads=0)\n"
         "--\n\n"
         "Gather and cast an array, and queue its copy to the device.\n\n"
         "dest gets the bytes of src.astype(dtype, \"C\"); None is src's own dtype. "
         "src "
         "may lie in any\nmemory, with any strides, and may be changed when the call "
         "returns. It goes piece by piece\nthrough the ring's places: the call waits "
         "until there is a free one for the last of them.\ndest is kept alive until "
         "the "
         "copy is done.\n\n"
         "threads is as for stage().\n\n"
         "Raises ValueError if dest is smaller or the ring is closed, TypeError for "
         "what is no array,\n"
         "or a dtype that is no number of up to 64 bits. Of a cast that NumPy would "
         "warn of, the copy\n"
         "has been queued by then.")},
    {"memcpy_htod_packed_async", FASTCALL(StagingRing_memcpy_htod_packed_async),
     PyDoc_STR(
         "memcpy_htod_packed_async($self, /, dest, srcs, offsets, dtypes, "
         "stream=None)\n"
         "--\n\n"
         "Gather and cast several small arrays, and queue one copy to the device.\n\n"
         "What memcpy_htod_async does for each of srcs, to as many bytes behind dest "
         "as\n"
         "offsets says (ascending; bytes in between may be changed), as dtypes says. "
         "All of\nit must fit into one place of the ring.\n\n"
         "Raises as memcpy_htod_async, and ValueError where offsets overlap or a place "
         "is too small.")},
    {"close", StagingRing_close, METH_NOARGS,
     PyDoc_STR(
         "close($self, /)\n--\n\n"
         "Let the memory go, once what is in flight is done. Twice is harmless.")},
    REFUSE_PICKLING,
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef StagingRing_getset[] = {
    {"nbytes", StagingRing_get_nbytes, NULL,
     PyDoc_STR("Page-locked bytes of all places; 0 once closed."), NULL},
    {"place_nbytes", StagingRing_get_place_nbytes, NULL,
     PyDoc_STR("Bytes of one place, the most that is copied at a time."), NULL},
    {"closed", StagingRing_get_closed, NULL, PyDoc_STR("Whether close() was called."),
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot StagingRing_slots[] = {
    {Py_tp_doc,
     PyDoc_STR("StagingRing(memory, places=16, context=None)\n--\n\n"
               "Page-locked memory through which arrays go to the device.\n\n"
               "memory is an array of pagelocked_empty, of as many equal places (64 at "
               "most). A ring that\n"
               "fits into the processor's last cache with room to spare serves best: "
               "places of 4 MiB.\n"
               "May be used from any thread; one array goes through it at a time.")},
    {Py_tp_new, StagingRing_new},
    {Py_tp_dealloc, StagingRing_dealloc},
    {Py_tp_traverse, StagingRing_traverse},
    {Py_tp_repr, StagingRing_repr},
    {Py_tp_methods, StagingRing_methods},
    {Py_tp_getset, StagingRing_getset},
    {0, NULL},
};

PyType_Spec StagingRing_spec = {
    .name = "brainstorm_dbuf._cuda.StagingRing",
    .basicsize = sizeof(StagingRingObject),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = StagingRing_slots,
};
