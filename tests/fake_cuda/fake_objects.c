/* Handles, contexts, streams and events.

   A handle is a number that was never used before and is no address: following it
   crashes, using it after its object was destroyed is found out. Contexts are current
   per thread, in a stack; a stack from before the last reset counts as empty.

   All functions are called with fake.lock held. */

#include "fake_cuda.h"

#include <stdlib.h>
#include <string.h>

static _Thread_local struct {
    uint64_t epoch;
    uint64_t id; /* 0 until this thread first asks for its own default stream */
    size_t depth;
    struct context *stack[STACK_DEPTH]; /* borrowed; valid within one epoch */
} thread;

/* Return zeroed memory for an array; end the process where there is none. */
void *
allocate(size_t count, size_t size)
{
    void *memory = calloc(count ? count : 1, size);
    if (memory == NULL) {
        abort();
    }
    return memory;
}

/* Return a number in which every bit depends on all bits of x. */
uint64_t
random_mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Return the next number of the seeded sequence (splitmix64). */
uint64_t
random_number(void)
{
    return random_mix(fake.random += 0x9e3779b97f4a7c15u);
}

/* --- handles --- */

/* Return a new handle for the object. */
void *
handle_add(struct handles *table, void *object)
{
    if (table->used == table->room) {
        size_t room = table->room ? 2 * table->room : 64;
        void **grown = allocate(room, sizeof(*grown));
        if (table->used) {
            memcpy(grown, table->objects, table->used * sizeof(*grown));
        }
        free(table->objects);
        table->objects = grown;
        table->room = room;
    }
    size_t index = table->used++;
    table->objects[index] = object;
    table->live++;
    return (void *)(table->tag + HANDLE_STEP * (table->first + index));
}

/* Return where the table keeps the handle's object, NULL if it never had it. */
static void **
handle_slot(const struct handles *table, const void *handle)
{
    uintptr_t offset = (uintptr_t)handle - table->tag;
    size_t index = offset / HANDLE_STEP - table->first;
    if ((uintptr_t)handle < table->tag || offset % HANDLE_STEP
        || index >= table->used) {
        return NULL;
    }
    return &table->objects[index];
}

/* Return the live object of a handle, or NULL. */
void *
handle_find(const struct handles *table, const void *handle)
{
    void **slot = handle_slot(table, handle);
    return slot ? *slot : NULL;
}

/* Make the handle invalid from now on. */
void
handle_remove(struct handles *table, const void *handle)
{
    *handle_slot(table, handle) = NULL;
    table->live--;
}

/* Make all handles given out so far invalid. */
void
handles_clear(struct handles *table)
{
    table->first += table->used;
    table->used = 0;
    table->live = 0;
}

/* --- contexts --- */

/* Return the live context of a handle, or NULL. */
struct context *
context_find(CUcontext handle)
{
    return handle_find(&fake.context_handles, handle);
}

/* Empty this thread's stack if it is older than the last reset. */
static void
thread_refresh(void)
{
    if (thread.epoch != fake.epoch) {
        thread.epoch = fake.epoch;
        thread.depth = 0;
    }
}

/* Return the handle of this thread's current context, NULL if it has none. */
CUcontext
context_top(void)
{
    thread_refresh();
    return thread.depth ? thread.stack[thread.depth - 1]->handle : NULL;
}

/* Find this thread's current context: an error if there is none or it was destroyed. */
CUresult
context_current(struct context **out)
{
    thread_refresh();
    if (thread.depth == 0) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    *out = thread.stack[thread.depth - 1];
    return (*out)->destroyed ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
}

CUresult
context_push(CUcontext handle)
{
    thread_refresh();
    struct context *context = context_find(handle);
    if (context == NULL) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    if (thread.depth == STACK_DEPTH) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    thread.stack[thread.depth++] = context;
    return CUDA_SUCCESS;
}

/* Pop the current context, destroyed or not; `handle` may be NULL. */
CUresult
context_pop(CUcontext *handle)
{
    thread_refresh();
    if (thread.depth == 0) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    struct context *context = thread.stack[--thread.depth];
    if (handle != NULL) {
        *handle = context->handle;
    }
    return CUDA_SUCCESS;
}

/* Replace the top of the stack; NULL pops it, and does nothing to an empty stack. */
CUresult
context_set(CUcontext handle)
{
    thread_refresh();
    if (handle == NULL) {
        thread.depth -= thread.depth > 0;
        return CUDA_SUCCESS;
    }
    if (context_find(handle) == NULL) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    thread.depth -= thread.depth > 0;
    return context_push(handle);
}

/* Make a context, without pushing it. */
CUresult
context_create(int device, unsigned flags, bool primary, struct context **out)
{
    if (device < 0 || device >= fake.device_count) {
        return CUDA_ERROR_INVALID_DEVICE;
    }
    struct context *context = allocate(1, sizeof(*context));
    context->device = device;
    context->flags = flags;
    context->is_primary = primary;
    context->null_stream.context = context;
    context->null_stream.is_null = true;
    context->null_stream.lane = ++fake.lanes;
    context->handle = handle_add(&fake.context_handles, context);
    context->next = fake.contexts;
    fake.contexts = context;
    if (primary) {
        fake.primary[device] = context;
    }
    *out = context;
    return CUDA_SUCCESS;
}

static void
stream_free(struct stream *stream)
{
    item_unref(stream->last);
    free(stream);
}

static void
event_free(struct event *event)
{
    item_unref(event->record);
    free(event);
}

/* Free a context's streams and events, their handles included. */
static void
context_drop_objects(struct context *context)
{
    while (context->streams != NULL) {
        struct stream *stream = context->streams;
        context->streams = stream->next;
        if (stream->thread == 0 && !stream->destroyed) {
            handle_remove(&fake.stream_handles, stream->handle);
        }
        stream_free(stream);
    }
    item_unref(context->null_stream.last);
    context->null_stream.last = NULL;
    for (size_t i = 0; i < fake.event_handles.used; i++) {
        struct event *event = fake.event_handles.objects[i];
        if (event != NULL && event->context == context) {
            event_destroy(event);
        }
    }
    modules_drop_context(context);
    cublas_drop_context(context);
}

/* Run what the context has to do, then end it and all that belongs to it. It leaves
   this thread's stack if it is on top of it; elsewhere it stays, as a destroyed one. */
CUresult
context_destroy(struct context *context)
{
    queue_wait_context(context);
    if (context->destroyed) { /* by another thread while we waited */
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    context->destroyed = true;
    if (context->is_primary) {
        fake.primary[context->device] = NULL;
    } else if (context_top() == context->handle) {
        thread.depth--;
    }
    handle_remove(&fake.context_handles, context->handle);
    memory_release_context(context);
    context_drop_objects(context);
    return CUDA_SUCCESS;
}

/* --- streams --- */

/* Add a stream to its context's list. */
static struct stream *
stream_new(struct context *context, unsigned flags, int priority)
{
    struct stream *stream = allocate(1, sizeof(*stream));
    stream->context = context;
    stream->flags = flags;
    stream->priority = priority;
    stream->lane = ++fake.lanes;
    stream->next = context->streams;
    context->streams = stream;
    return stream;
}

/* Make a stream; a priority out of range is moved to the nearest one within. */
CUresult
stream_create(struct context *context, unsigned flags, int priority,
              struct stream **out)
{
    if (flags & ~(unsigned)CU_STREAM_NON_BLOCKING) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (priority > LOWEST_PRIORITY) {
        priority = LOWEST_PRIORITY;
    } else if (priority < HIGHEST_PRIORITY) {
        priority = HIGHEST_PRIORITY;
    }
    *out = stream_new(context, flags, priority);
    (*out)->handle = handle_add(&fake.stream_handles, *out);
    return CUDA_SUCCESS;
}

/* Return this thread's own default stream of the context, a blocking one. */
static struct stream *
stream_of_thread(struct context *context)
{
    static uint64_t threads;
    if (thread.id == 0) {
        thread.id = ++threads;
    }
    for (struct stream *stream = context->streams; stream; stream = stream->next) {
        if (stream->thread == thread.id) {
            return stream;
        }
    }
    struct stream *stream = stream_new(context, 0, 0);
    stream->handle = CU_STREAM_PER_THREAD;
    stream->thread = thread.id;
    return stream;
}

/* Find a stream; the default ones are those of the current context. */
CUresult
stream_find(CUstream handle, struct context *current, struct stream **out)
{
    if (handle == NULL || handle == CU_STREAM_LEGACY) {
        *out = &current->null_stream;
    } else if (handle == CU_STREAM_PER_THREAD) {
        *out = stream_of_thread(current);
    } else {
        *out = handle_find(&fake.stream_handles, handle);
    }
    return *out ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* End a stream's handle; work already issued still runs, in its place. */
void
stream_destroy(struct stream *stream)
{
    handle_remove(&fake.stream_handles, stream->handle);
    stream->destroyed = true;
    struct stream **link = &stream->context->streams;
    while (*link != NULL) {
        struct stream *one = *link;
        if (one->destroyed && (one->last == NULL || one->last->done)) {
            *link = one->next;
            stream_free(one);
        } else {
            link = &one->next;
        }
    }
}

/* --- events --- */

struct event *
event_create(struct context *context, unsigned flags)
{
    struct event *event = allocate(1, sizeof(*event));
    event->context = context;
    event->flags = flags;
    event->handle = handle_add(&fake.event_handles, event);
    return event;
}

/* Return the live event of a handle, or NULL. */
struct event *
event_find(CUevent handle)
{
    return handle_find(&fake.event_handles, handle);
}

/* End an event; records and waits already issued stay as they are. */
void
event_destroy(struct event *event)
{
    handle_remove(&fake.event_handles, event->handle);
    event_free(event);
}

/* Forget every object; all handles are invalid and all threads' stacks empty after it.
 */
void
objects_reset(void)
{
    for (size_t i = 0; i < fake.event_handles.used; i++) {
        if (fake.event_handles.objects[i] != NULL) {
            event_free(fake.event_handles.objects[i]);
        }
    }
    handles_clear(&fake.event_handles);
    modules_reset();
    cublas_reset();
    while (fake.contexts != NULL) {
        struct context *context = fake.contexts;
        fake.contexts = context->next;
        context_drop_objects(context);
        free(context);
    }
    handles_clear(&fake.stream_handles);
    handles_clear(&fake.context_handles);
    memset(fake.primary, 0, sizeof(fake.primary));
    memset(fake.retains, 0, sizeof(fake.retains));
    fake.epoch++;
}
