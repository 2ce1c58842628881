/* What asynchronous copies hold: both ends of each, until an event recorded after the
 * copy has passed.
 *
 * A fence is such an event. Small copies share one (an event costs a twelfth of a small
 * copy), large ones get their own at once, so that their memory is not held longer than
 * it must be. Events are used again: in the steady state nothing is created, and a
 * small copy makes 2/64 of a driver call for its book-keeping.
 *
 * All of it runs under the GIL. Dropping a reference may run any code, this ledger's
 * included, so each loop takes its entry out before it drops it and reads the ledger
 * anew after. */
#include "binding.h"

/* Keep an event for later. Needs a context only if there are too many already. */
static void
keep_event(Ledger *ledger, CUevent event)
{
    if (ledger->spares < LEDGER_FENCES) {
        ledger->spare[ledger->spares++] = event;
    }
    else {
        if (driver_usable()) { /* not in a forked child */
            (void)driver.EventDestroy(event);
        }
        live.fences--;
    }
}

/* Take fences off that have passed. Return the copy number that they vouch for. Called
 * in the context. An unknown error does not count as passed: the copy may still run. */
static uint64_t
pass_fences(Ledger *ledger)
{
    uint64_t upto = ledger->head;
    while (ledger->fence_head != ledger->fence_tail) {
        Fence fence = ledger->fences[ledger->fence_head % LEDGER_FENCES];
        CUresult status = driver.EventQuery(fence.event);
        if (status != CUDA_SUCCESS && !context_is_gone(status)) {
            break;
        }
        ledger->fence_head++;
        keep_event(ledger, fence.event);
        upto = fence.upto;
    }
    return upto;
}

/* Drop the references of copies below upto. */
static void
drop_copies(Ledger *ledger, uint64_t upto)
{
    while (ledger->head < upto) {
        Held *place = &ledger->held[ledger->head & (ledger->capacity - 1)];
        Held done = *place;
        place->ends[0] = place->ends[1] = NULL;
        ledger->head++;
        live.in_flight--;
        Py_XDECREF(done.ends[0]);
        Py_XDECREF(done.ends[1]);
    }
}

void
ledger_settle(Ledger *ledger, uint64_t upto)
{
    while (ledger->fence_head != ledger->fence_tail &&
           ledger->fences[ledger->fence_head % LEDGER_FENCES].upto <= upto) {
        keep_event(ledger, ledger->fences[ledger->fence_head % LEDGER_FENCES].event);
        ledger->fence_head++;
    }
    if (ledger->fenced < upto) {
        ledger->fenced = upto;
    }
    drop_copies(ledger, upto);
}

/* Room for every copy held or being made. Return 0, or -1 with MemoryError set. */
static int
make_room(Ledger *ledger)
{
    uint64_t needed = ledger->tail - ledger->head + (uint64_t)ledger->users;
    if (needed <= ledger->capacity) {
        return 0;
    }
    uint64_t capacity = ledger->capacity == 0 ? 2 * LEDGER_BATCH : 2 * ledger->capacity;
    while (capacity < needed) {
        capacity *= 2;
    }
    Held *held = PyMem_Calloc(capacity, sizeof(Held));
    if (held == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (uint64_t n = ledger->head; n < ledger->tail; n++) {
        held[n & (capacity - 1)] = ledger->held[n & (ledger->capacity - 1)];
    }
    PyMem_Free(ledger->held);
    ledger->held = held;
    ledger->capacity = capacity;
    return 0;
}

/* Wait for the oldest fence. Another thread may take it off, and even use its event
 * again, while we wait: then we wait longer, never shorter. */
static CUresult
wait_for_oldest(Ledger *ledger, ContextObject *context, Scope *scope)
{
    CUresult status;
    CUevent oldest = ledger->fences[ledger->fence_head % LEDGER_FENCES].event;
    Py_BEGIN_ALLOW_THREADS
    IN_CONTEXT(*scope, context->handle, status, driver.EventSynchronize(oldest));
    Py_END_ALLOW_THREADS
    return status;
}

/* pass_fences in the context, then drop. Dropping is done outside: it may run code that
 * must find the caller's own context. */
void
ledger_poll(Ledger *ledger, ContextObject *context)
{
    Scope scope;
    uint64_t upto = ledger->head;
    if (ledger->fence_head != ledger->fence_tail &&
        scope_enter(&scope, context->handle) == CUDA_SUCCESS) {
        upto = pass_fences(ledger);
        scope_leave(&scope);
    }
    drop_copies(ledger, upto);
}

int
ledger_reserve_slowly(ModuleState *state, Ledger *ledger, ContextObject *context,
                      size_t nbytes, Ticket *ticket)
{
    CUresult status;
    Scope scope;
    ticket->event = NULL;
    ledger->users++;
    if (make_room(ledger) < 0) {
        goto error;
    }
    if (ledger_shares_fence(ledger, nbytes)) {
        return 0;
    }
    ledger_poll(ledger, context);
    while (ledger->fence_tail - ledger->fence_head >= LEDGER_FENCES) {
        status = wait_for_oldest(ledger, context, &scope);
        if (status != CUDA_SUCCESS) {
            raise_cuda(state, scope_call(&scope, "cuEventSynchronize"), status, NULL);
            goto error;
        }
        ledger_poll(ledger, context);
    }
    if (ledger->spares > 0) {
        ticket->event = ledger->spare[--ledger->spares];
        return 0;
    }
    IN_CONTEXT(scope, context->handle, status,
               driver.EventCreate(&ticket->event, CU_EVENT_DISABLE_TIMING));
    if (status != CUDA_SUCCESS) {
        ticket->event = NULL;
        raise_cuda(state, scope_call(&scope, "cuEventCreate"), status, NULL);
        goto error;
    }
    live.fences++;
    return 0;

error:
    ledger->users--;
    return -1;
}

void
ledger_fence(Ledger *ledger, ContextObject *context, Ticket *ticket)
{
    CUresult status = CUDA_ERROR_UNKNOWN;
    Scope scope;
    if (ledger->fence_tail - ledger->fence_head < LEDGER_FENCES) {
        IN_CONTEXT(scope, context->handle, status,
                   driver.EventRecord(ticket->event, ledger->stream));
    }
    if (status == CUDA_SUCCESS) {
        Fence *fence = &ledger->fences[ledger->fence_tail++ % LEDGER_FENCES];
        fence->event = ticket->event;
        fence->upto = ledger->tail;
        ledger->fenced = ledger->tail;
    }
    else {
        keep_event(ledger, ticket->event); /* the next copy's fence covers this one */
    }
    ticket->event = NULL;
}

void
ledger_cancel(Ledger *ledger, Ticket *ticket)
{
    ledger->users--;
    if (ticket->event != NULL) {
        keep_event(ledger, ticket->event);
        ticket->event = NULL;
    }
}

CUresult
ledger_drain(Ledger *ledger, ContextObject *context, const char **call)
{
    CUresult status = CUDA_SUCCESS;
    Scope scope = {0};
    uint64_t upto = ledger->tail;
    if (ledger->head != ledger->tail && driver_usable()) {
        Py_BEGIN_ALLOW_THREADS
        IN_CONTEXT(scope, context->handle, status,
                   ledger->is_foreign ? driver.CtxSynchronize()
                                      : driver.StreamSynchronize(ledger->stream));
        Py_END_ALLOW_THREADS
    }
    *call = scope_call(&scope, ledger->is_foreign ? "cuCtxSynchronize"
                                                  : "cuStreamSynchronize");
    /* Should the wait have failed: there is no better moment to come. */
    ledger_settle(ledger, upto);
    if (ledger->spares > 0 && driver_usable() &&
        scope_enter(&scope, context->handle) == CUDA_SUCCESS) {
        while (ledger->spares > 0) {
            CUresult gone = driver.EventDestroy(ledger->spare[ledger->spares - 1]);
            if (gone != CUDA_SUCCESS && !context_is_gone(gone)) {
                break; /* the next drain, at the latest in dealloc, tries again */
            }
            ledger->spares--;
            live.fences--;
        }
        scope_leave(&scope);
    }
    return status;
}

int
ledger_traverse(Ledger *ledger, visitproc visit, void *arg)
{
    for (uint64_t n = ledger->head; n < ledger->tail; n++) {
        Held *held = &ledger->held[n & (ledger->capacity - 1)];
        Py_VISIT(held->ends[0]);
        Py_VISIT(held->ends[1]);
    }
    return 0;
}

void
ledger_free(Ledger *ledger)
{
    live.fences -= ledger->spares; /* left only where the context is gone */
    ledger->spares = 0;
    PyMem_Free(ledger->held);
    ledger->held = NULL;
    ledger->capacity = 0;
}
