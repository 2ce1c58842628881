/* Device work: who waits for whom, and when it runs.

   Each item knows the items it waits for; they are settled when it is issued and never
   change, which is all of CUDA's ordering:

   - an item waits for the one before it in its stream;
   - in the NULL stream also for the last item of every blocking stream, and an item in
     a blocking stream for the last one in the NULL stream. Non-blocking streams take no
     part in that;
   - a wait for an event waits for the record that was the event's latest at that call.
     Recording the event again later changes nothing for it.

   An item runs once it is `wanted` and all it waits for is done. The modes differ only
   in who is wanted: late, what a thread waits for, with all that this needs; eager,
   everything at once; random, a few ready items at each driver call, of some streams
   more than of others for a while. An item with a duration is done that long after it
   could start; the waiting thread sleeps without the lock, and whoever comes by after
   that time finishes it. An item's effect happens all at once, at its end, under the
   lock.

   All functions are called with fake.lock held; those named queue_wait_ let go of it
   while they sleep. */

#include "fake_cuda.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Return the monotonic clock in ns. */
uint64_t
clock_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t
later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* --- one item --- */

/* Return a new item, counted once for its maker. Copies and memsets take the stream's
   time of hold. */
struct item *
item_new(enum item_kind kind, struct stream *stream)
{
    struct item *item = allocate(1, sizeof(*item));
    item->refs = 1;
    item->kind = kind;
    item->context = stream->context;
    item->lane = stream->lane;
    if (kind == ITEM_COPY || kind == ITEM_MEMSET) {
        item->duration = later(stream->hold, fake.hold);
    }
    return item;
}

static struct item *
item_ref(struct item *item)
{
    item->refs++;
    return item;
}

/* Stop waiting for anything. */
static void
item_drop_waits(struct item *item)
{
    for (size_t i = 0; i < item->waits_count; i++) {
        item_unref(item->waits_for[i]);
    }
    free(item->waits_for);
    item->waits_for = NULL;
    item->waits_count = item->waits_room = 0;
}

/* Give up one count; NULL is allowed. Pending items wait for pending ones only until
   they run, so this goes at most one level deep for done items. */
void
item_unref(struct item *item)
{
    if (item != NULL && --item->refs == 0) {
        item_drop_waits(item);
        free(item->staged);
        free(item->argument);
        free(item);
    }
}

/* Let `item` wait for `other`; NULL and done ones need no waiting. */
void
queue_add_wait(struct item *item, struct item *other)
{
    if (other == NULL) {
        return;
    }
    if (other->done) {
        item->ready_at = later(item->ready_at, other->finish_at);
        return;
    }
    if (item->waits_count == item->waits_room) {
        size_t room = item->waits_room ? 2 * item->waits_room : 2;
        struct item **grown = allocate(room, sizeof(*grown));
        if (item->waits_count) {
            memcpy(grown, item->waits_for, item->waits_count * sizeof(*grown));
        }
        free(item->waits_for);
        item->waits_for = grown;
        item->waits_room = room;
    }
    item->waits_for[item->waits_count++] = item_ref(other);
}

/* Say whether all the item waits for is done; forget those that are. */
static bool
item_ready(struct item *item)
{
    size_t kept = 0;
    for (size_t i = 0; i < item->waits_count; i++) {
        struct item *other = item->waits_for[i];
        if (other->done) {
            item->ready_at = later(item->ready_at, other->finish_at);
            item_unref(other);
        } else {
            item->waits_for[kept++] = other;
        }
    }
    item->waits_count = kept;
    return kept == 0;
}

/* --- effects --- */

/* Fill the rows of an end with copies of a value of 1, 2 or 4 bytes. */
static void
fill_rows(const struct end *end, size_t width, size_t height, uint32_t value,
          unsigned value_bytes)
{
    for (size_t y = 0; y < height; y++) {
        unsigned char *row = (unsigned char *)(end->address + y * end->pitch);
        if (value_bytes == 1) {
            memset(row, (int)(value & 0xff), width);
            continue;
        }
        for (size_t x = 0; x < width; x += value_bytes) {
            /* the lowest bytes of the value: the hosts of CUDA are little-endian */
            memcpy(row + x, &value, value_bytes);
        }
    }
}

/* Move the rows of a copy, from the staged bytes where there are any. */
static void
copy_rows(const struct item *item)
{
    for (size_t y = 0; y < item->height; y++) {
        const void *from = item->staged
                               ? item->staged + y * item->width
                               : (void *)(item->src.address + y * item->src.pitch);
        memmove((void *)(item->dst.address + y * item->dst.pitch), from, item->width);
    }
}

/* Do what the item is there for. One whose memory went away reads or writes nothing
   that is not there: what is left of its target gets poison, and the fault is counted.
 */
static void
item_run(struct item *item)
{
    if (item->broken) {
        fake.faults++;
        if (item->dst.block != NULL) {
            fill_rows(&item->dst, item->width, item->height, 0xff, 1);
        }
    } else if (item->kind == ITEM_COPY) {
        copy_rows(item);
    } else if (item->kind == ITEM_MEMSET) {
        fill_rows(&item->dst, item->width, item->height, item->value,
                  item->value_bytes);
    } else if (item->kind == ITEM_WORK) {
        fake.faults += !item->work(item->argument);
    }
}

/* --- the pending list --- */

/* Take an item off the list; the list's count goes to the caller. */
static void
list_remove(struct item *item)
{
    *(item->prev ? &item->prev->next : &fake.first_item) = item->next;
    *(item->next ? &item->next->prev : &fake.last_item) = item->prev;
    item->prev = item->next = NULL;
    fake.pending--;
    fake.wanted -= item->wanted;
}

/* Mark an item done, with or without its effect, and forget it. */
static void
item_finish(struct item *item, bool run)
{
    if (run) {
        item_run(item);
    }
    list_remove(item);
    item->done = true;
    item->context = NULL;
    item_drop_waits(item);
    free(item->staged);
    free(item->argument);
    item->staged = item->argument = NULL;
    item_unref(item);
}

/* Let an item run as soon as it is ready. */
static void
item_want(struct item *item, uint64_t now)
{
    if (!item->done && !item->wanted) {
        item->wanted = true;
        item->wanted_at = now;
        fake.wanted++;
    }
}

/* Want all that the wanted items up to and including `last` wait for. Items wait for
   earlier ones only, so one pass backwards does it. */
static void
want_what_is_needed(struct item *last)
{
    uint64_t now = clock_now();
    for (struct item *item = last; item != NULL; item = item->prev) {
        for (size_t i = 0; item->wanted && i < item->waits_count; i++) {
            item_want(item->waits_for[i], now);
        }
    }
}

/* Want an item and all that it needs; NULL and done ones are fine. */
static void
want(struct item *item)
{
    if (item != NULL && !item->done && !item->wanted) {
        item_want(item, clock_now());
        want_what_is_needed(item);
    }
}

/* Want every pending item of a context (of all, if NULL) and what they need. */
static void
want_context(const struct context *context)
{
    uint64_t now = clock_now();
    for (struct item *item = fake.first_item; item != NULL; item = item->next) {
        if (context == NULL || item->context == context) {
            item_want(item, now);
        }
    }
    want_what_is_needed(fake.last_item);
}

/* Start and finish whatever may by now. Order of issue is a legal order, so one pass is
   enough. */
static void
advance(void)
{
    if (fake.wanted == 0) {
        return;
    }
    uint64_t now = clock_now();
    bool finished = false;
    struct item *next;
    for (struct item *item = fake.first_item; item != NULL; item = next) {
        next = item->next;
        if (item->wanted && !item->started && item_ready(item)) {
            item->started = true;
            item->finish_at = later(item->wanted_at, item->ready_at) + item->duration;
        }
        if (item->started && item->finish_at <= now) {
            item_finish(item, true);
            finished = true;
        }
    }
    if (finished && fake.waiters) {
        pthread_cond_broadcast(&fake.changed);
    }
}

/* Random mode: say whether the item's stream stands still for now. About half of them
   do, until the next change of moods. */
static bool
item_stands_still(const struct item *item)
{
    return random_mix(fake.moods + item->lane * 0x9e3779b97f4a7c15u) % 2;
}

/* Return the number of items that random mode may start; store the one with number
   `pick` among them. */
static size_t
count_idle(size_t pick, struct item **out)
{
    size_t count = 0;
    for (struct item *item = fake.first_item; item != NULL; item = item->next) {
        if (!item->wanted && !item_stands_still(item) && item_ready(item)) {
            if (count++ == pick) {
                *out = item;
            }
        }
    }
    return count;
}

/* Let a random number of ready items run, each drawn at random: at half of the calls
   none, else up to all there are. Some streams stand still meanwhile, now these, now
   those, so that one may fall far behind another. */
static void
random_steps(void)
{
    if (random_number() % 16 == 0) {
        fake.moods = random_number();
    }
    if (fake.pending == 0 || random_number() % 2) {
        return;
    }
    for (size_t left = random_number() % (fake.pending + 1); left > 0; left--) {
        struct item *item = NULL;
        size_t idle = count_idle(SIZE_MAX, &item);
        if (idle == 0) {
            return;
        }
        count_idle(random_number() % idle, &item);
        item_want(item, clock_now());
        advance();
    }
}

/* What the device may do at any driver call. */
void
queue_step(void)
{
    advance();
    if (fake.mode == MODE_RANDOM) {
        random_steps();
    }
}

/* Put an item at the end of a stream. Takes over the maker's count. */
void
queue_submit(struct stream *stream, struct item *item)
{
    queue_add_wait(item, stream->last);
    struct context *context = stream->context;
    if (stream->is_null) {
        for (struct stream *other = context->streams; other; other = other->next) {
            if (!(other->flags & CU_STREAM_NON_BLOCKING)) {
                queue_add_wait(item, other->last);
            }
        }
    } else if (!(stream->flags & CU_STREAM_NON_BLOCKING)) {
        queue_add_wait(item, context->null_stream.last);
    }
    item_unref(stream->last);
    stream->last = item_ref(item);

    item->prev = fake.last_item;
    *(fake.last_item ? &fake.last_item->next : &fake.first_item) = item;
    fake.last_item = item;
    fake.pending++;
    if (fake.mode == MODE_EAGER) {
        want(item);
        advance();
    }
}

/* Queue work that is neither a copy nor a memset. Takes over its argument; `module` is
   what it needs besides, or NULL. */
void
queue_work(struct stream *stream, bool (*work)(void *), void *argument,
           struct module *module)
{
    struct item *item = item_new(ITEM_WORK, stream);
    item->work = work;
    item->argument = argument;
    item->module = module;
    queue_submit(stream, item);
}

/* --- waiting --- */

/* Return the time at which the next started item is done. */
static uint64_t
next_finish(void)
{
    uint64_t first = UINT64_MAX;
    for (struct item *item = fake.first_item; item != NULL; item = item->next) {
        if (item->started && item->finish_at < first) {
            first = item->finish_at;
        }
    }
    assert(first != UINT64_MAX);
    return first;
}

/* Sleep without the lock until that time, or until something has changed. */
void
sleep_until(uint64_t time)
{
    struct timespec until = {.tv_sec = (time_t)(time / 1000000000u),
                             .tv_nsec = (long)(time % 1000000000u)};
    fake.waiters++;
    pthread_cond_timedwait(&fake.changed, &fake.lock, &until);
    fake.waiters--;
}

/* Run an item and all it needs, and return when it is done; NULL is done. */
void
queue_wait_item(struct item *item)
{
    if (item == NULL || item->done) {
        return;
    }
    item_ref(item);
    want(item);
    for (advance(); !item->done; advance()) {
        sleep_until(next_finish());
    }
    item_unref(item);
}

static bool
last_is_done(const struct stream *stream)
{
    return stream->last == NULL || stream->last->done;
}

/* Say whether a wait for the stream would return at once. The NULL stream stands for
   the blocking ones too. */
bool
queue_stream_done(const struct stream *stream)
{
    bool done = last_is_done(stream);
    if (stream->is_null) {
        struct stream *other = stream->context->streams;
        for (; done && other != NULL; other = other->next) {
            done = (other->flags & CU_STREAM_NON_BLOCKING) || last_is_done(other);
        }
    }
    return done;
}

/* Wait for all that was issued to the stream before this call; in the NULL stream also
   for what was issued to the blocking streams. A blocking stream is waited for alone:
   the wait is no work in it, so later work of the NULL stream may go on. */
void
queue_wait_stream(struct stream *stream)
{
    if (queue_stream_done(stream)) {
        return;
    }
    if (!stream->is_null) {
        queue_wait_item(stream->last);
        return;
    }
    /* An empty item in the NULL stream waits for just these. */
    struct item *mark = item_new(ITEM_WAIT, stream);
    item_ref(mark);
    queue_submit(stream, mark);
    queue_wait_item(mark);
    item_unref(mark);
}

/* Wait for all work of a context. */
void
queue_wait_context(struct context *context)
{
    for (;;) {
        struct item *last = fake.last_item;
        while (last != NULL && last->context != context) {
            last = last->prev;
        }
        if (last == NULL) {
            return;
        }
        want_context(context);
        queue_wait_item(last);
    }
}

/* Run everything, all contexts', as far as it takes no time. */
void
queue_want_all(void)
{
    want_context(NULL);
    advance();
}

/* --- taking things away --- */

/* A block is about to go: break the pending items that would touch it. */
void
queue_forget_block(struct block *block)
{
    for (struct item *item = fake.first_item; item != NULL; item = item->next) {
        struct end *ends[] = {&item->dst, &item->src};
        for (int i = 0; i < 2; i++) {
            if (ends[i]->block == block) {
                ends[i]->block = NULL;
                item->broken = true;
            }
        }
    }
}

/* A module is about to go: break the pending items that need it. */
void
queue_forget_module(struct module *module)
{
    for (struct item *item = fake.first_item; item != NULL; item = item->next) {
        if (item->module == module) {
            item->module = NULL;
            item->broken = true;
        }
    }
}

/* Mark everything done without running it; who waits for it goes on. */
void
queue_cancel_all(void)
{
    while (fake.first_item != NULL) {
        item_finish(fake.first_item, false);
    }
    pthread_cond_broadcast(&fake.changed);
}
