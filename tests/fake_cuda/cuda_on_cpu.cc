/* Runs launches of the kernels that were compiled with cuda_on_cpu.h.

   The threads of a block run one after another, in this OS thread, each on a stack of
   its own (a fiber) once it had to wait: a fiber runs threads as plain calls as long as
   they end without meeting others, so a kernel without barriers needs one fiber. A warp
   runs until all its lanes wait at the same place, or have ended, or wait for the
   block; the block runs until all its threads wait at the same place or have ended.
   Anything else is threads that do not meet as CUDA demands, and ends the process.

   Which warps, lanes and blocks come first alternates, or depends on the launch's seed,
   so that a missing barrier shows in one order if not in the other.

   A cooperative launch keeps the fibers of all blocks alive and lets one block after
   the other run up to its next meeting of the grid; static shared memory is moved in
   and out, as all blocks have it at the same addresses. */

#include "cuda_on_cpu.h"
#include "kernels_on_cpu.h"

#include <link.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <memory>
#include <vector>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace on_cpu {
namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr size_t STACK_BYTES = 256 << 10;
#else
constexpr size_t STACK_BYTES = 64 << 10;
#endif
constexpr size_t STACKS_AT_ONCE = 64;
/* Tops of stacks a power of two apart would share few lines of the cache. */
constexpr size_t STACK_STEP = STACK_BYTES + 3 * 64;
constexpr uint64_t STACK_MARK = 0x6b63617473646e65u;
constexpr size_t ZONE = 256;
constexpr int ZONE_FILL = 0xfa, POISON = 0xff;
constexpr unsigned WARP_LANES = 32;

/* --- fibers --- */

struct Fiber {
    void *saved;     /* the stack pointer while it does not run */
    uint64_t *floor; /* the lowest word of its stack: a mark, to notice an overflow */
};

void worker();

#if defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)

/* Keep on this stack what a call must keep, and go on with another one. It jumps back,
   as the processor would foresee a return to the caller on the old stack. */
extern "C" void cuda_on_cpu_switch(void **save, void *next);
asm(R"(
    .text
    .type cuda_on_cpu_switch, @function
cuda_on_cpu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    popq %rcx
    jmpq *%rcx
    .size cuda_on_cpu_switch, . - cuda_on_cpu_switch
)");

void
fiber_prepare(Fiber *fiber, char *stack)
{
    uintptr_t top = ((uintptr_t)stack + STACK_BYTES) & ~(uintptr_t)15;
    uint64_t *words = (uint64_t *)top - 8; /* six registers, worker, no caller */
    std::fill(words, words + 8, 0);
    words[6] = (uint64_t)worker;
    fiber->saved = words;
}

void
fiber_switch(void **save, void *next)
{
    cuda_on_cpu_switch(save, next);
}

#else

} // namespace
} // namespace on_cpu
#include <ucontext.h>
namespace on_cpu {
namespace {

void
fiber_prepare(Fiber *fiber, char *stack)
{
    ucontext_t *context = new ucontext_t;
    getcontext(context);
    context->uc_stack.ss_sp = stack;
    context->uc_stack.ss_size = STACK_BYTES;
    makecontext(context, worker, 0);
    fiber->saved = context;
}

void
fiber_switch(void **save, void *next)
{
    if (*save == NULL) {
        *save = new ucontext_t;
    }
    swapcontext((ucontext_t *)*save, (ucontext_t *)next);
}

#endif

/* Fibers are made when needed and kept for ever. */
auto &idle_fibers = *new std::vector<Fiber *>;

void
fibers_make()
{
    size_t bytes = STACKS_AT_ONCE * STACK_STEP;
    char *stacks = (char *)mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) {
        fail("no memory for stacks");
    }
    for (size_t i = 0; i < STACKS_AT_ONCE; i++) {
        char *stack = stacks + i * STACK_STEP;
        Fiber *fiber = new Fiber;
        fiber->floor = (uint64_t *)stack;
        *fiber->floor = STACK_MARK;
        fiber_prepare(fiber, stack);
        idle_fibers.push_back(fiber);
    }
}

/* --- the state of a launch --- */

/* Where a thread is. `waits` of a place is WAITS + place. */
enum State : uint8_t { FRESH, READY, ENDED, WAITS };

struct Block {
    uint3 index;
    unsigned phase;                  /* how often all of it met */
    std::vector<uint8_t> states;     /* by thread */
    std::vector<Fiber *> fibers;     /* of threads that wait or are ready */
    std::vector<uint64_t> brought;   /* to the next meeting of the warp */
    std::vector<uint64_t> exchanged; /* what was brought to the last one, and ones */
    std::unique_ptr<char[]> dynamic; /* and a red zone behind it */
    std::unique_ptr<char[]> statics; /* kept here while another block runs */
};

struct {
    const cpu_launch *job;
    std::vector<uint3> indices; /* by thread of a block */
    unsigned threads;           /* of a block */
    Block *block;
    unsigned first, lanes; /* the warp that runs: its first thread, its size */
    unsigned fresh;        /* how many of the warp have not been started */
    bool descending;       /* the order of this warp's lanes */
    unsigned thread;
    Fiber *fiber;
    void *scheduler; /* its stack pointer while a fiber runs */
} now;

uint64_t
mix(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* --- static shared memory --- */

thread_local char shared_anchor;

struct Shared {
    size_t before; /* bytes of the module's thread-local memory before the anchor */
    size_t bytes;
};

/* Find the module's thread-local segment, which holds nothing but shared memory. */
int
find_shared(dl_phdr_info *info, size_t, void *out)
{
    uintptr_t anchor = (uintptr_t)&shared_anchor, data = (uintptr_t)info->dlpi_tls_data;
    for (int i = 0; data && i < info->dlpi_phnum; i++) {
        size_t bytes = info->dlpi_phdr[i].p_memsz;
        if (info->dlpi_phdr[i].p_type == PT_TLS && anchor - data < bytes) {
            *(Shared *)out = {anchor - data, bytes};
            return 1;
        }
    }
    return 0;
}

/* Return this OS thread's static shared memory and its size. */
char *
static_shared(size_t *bytes)
{
    static Shared shared;
    shared_anchor = 0; /* the first touch allocates it */
    if (shared.bytes == 0 && !dl_iterate_phdr(find_shared, &shared)) {
        fail("static shared memory not found");
    }
    *bytes = shared.bytes;
    return &shared_anchor - shared.before;
}

/* --- threads --- */

/* Take the warp's next thread that was not started; the caller is its fiber. */
void
take_fresh()
{
    now.fresh--;
    now.thread = now.descending ? now.first + now.fresh
                                : now.first + now.lanes - 1 - now.fresh;
    threadIdx = now.indices[now.thread];
}

/* What a fiber does: run threads until the warp has none left, then rest until it is
   given another warp. */
void
worker()
{
    for (;;) {
        while (now.fresh) {
            take_fresh();
            now.job->kernel->thread(now.job->parameters);
            now.block->states[now.thread] = ENDED;
        }
        idle_fibers.push_back(now.fiber);
        fiber_switch(&now.fiber->saved, now.scheduler);
    }
}

/* Let a fiber run until it rests or its thread waits. */
void
resume(Fiber *fiber)
{
    now.fiber = fiber;
    fiber_switch(&now.scheduler, fiber->saved);
    if (*fiber->floor != STACK_MARK) {
        fail("a thread's stack overflowed");
    }
}

/* Run what can run of the warp once. */
void
warp_step()
{
    while (now.fresh) {
        if (idle_fibers.empty()) {
            fibers_make();
        }
        Fiber *fiber = idle_fibers.back();
        idle_fibers.pop_back();
        resume(fiber);
    }
    for (unsigned i = 0; i < now.lanes; i++) {
        unsigned thread = now.first + (now.descending ? now.lanes - 1 - i : i);
        if (now.block->states[thread] == READY) {
            now.thread = thread;
            threadIdx = now.indices[thread];
            resume(now.block->fibers[thread]);
        }
    }
}

const char *const PLACES[] = {"__syncthreads", "GRID_SYNC", "__syncwarp", "a shuffle",
                              "a vote"};

/* Say where the threads of a range are, and end the process. */
[[noreturn]] void
fail_apart(const char *who, unsigned first, unsigned count)
{
    const uint8_t *states = &now.block->states[first];
    char text[400];
    int used = snprintf(text, sizeof(text), "the threads of a %s do not meet:", who);
    auto add = [&](unsigned state, const char *where) {
        auto number = std::count(states, states + count, state);
        if (number && used < (int)sizeof(text)) {
            used += snprintf(text + used, sizeof(text) - used, " %d %s;", (int)number,
                             where);
        }
    };
    add(ENDED, "have ended");
    for (int place = BLOCK; place <= VOTE; place++) {
        char where[40];
        snprintf(where, sizeof(where), "are at %s", PLACES[place]);
        add(WAITS + place, where);
    }
    text[std::min(used, (int)sizeof(text)) - 1] = '\0';
    fail(text);
}

/* Return the state that all threads of a range have, -1 if they differ. */
int
common_state(unsigned first, unsigned count)
{
    const uint8_t *states = &now.block->states[first];
    bool same = count == 1 || memcmp(states, states + 1, count - 1) == 0;
    return same ? states[0] : -1;
}

/* Run a warp until all its lanes have ended or wait for others than the warp. */
void
warp_run(unsigned first)
{
    Block *block = now.block;
    now.first = first;
    now.lanes = std::min(WARP_LANES, now.threads - first);
    now.fresh = block->states[first] == FRESH ? now.lanes : 0;
    uint64_t order = now.job->order;
    now.descending = order ? mix(order + first + 4096 * block->phase) & 1
                           : (block->index.x + block->phase) & 1;
    for (;;) {
        warp_step();
        int state = common_state(first, now.lanes);
        if (state == ENDED || state == WAITS + BLOCK || state == WAITS + GRID) {
            return;
        }
        if (state == -1) {
            fail_apart("warp", first, now.lanes);
        }
        std::copy_n(&block->brought[first], now.lanes, &block->exchanged[first]);
        std::fill_n(&block->states[first], now.lanes, READY);
    }
}

/* Run a block until all its threads have ended or wait for the grid; return which. */
int
block_run(Block *block)
{
    now.block = block;
    blockIdx = block->index;
    for (;;) {
        unsigned warps = (now.threads + WARP_LANES - 1) / WARP_LANES;
        bool descending = (block->index.x + block->phase) & 1;
        for (unsigned i = 0; i < warps; i++) {
            warp_run(WARP_LANES * (descending ? warps - 1 - i : i));
        }
        int state = common_state(0, now.threads);
        if (state == ENDED || state == WAITS + GRID) {
            return state;
        }
        if (state == -1) {
            fail_apart("block", 0, now.threads);
        }
        block->phase++;
        std::fill(block->states.begin(), block->states.end(), READY);
    }
}

/* --- blocks --- */

void
block_start(Block *block, uint64_t number)
{
    const uint32_t *grid = now.job->grid;
    block->index = make_uint3(number % grid[0], number / grid[0] % grid[1],
                              number / grid[0] / grid[1]);
    block->phase = 0;
    std::fill(block->states.begin(), block->states.end(), FRESH);
    memset(block->dynamic.get(), POISON, now.job->dynamic_shared);
}

void
block_make(Block *block)
{
    size_t bytes = now.job->dynamic_shared;
    block->states.resize(now.threads);
    block->fibers.resize(now.threads);
    block->brought.resize(now.threads);
    block->exchanged.assign(now.threads + WARP_LANES, UINT64_MAX);
    block->dynamic.reset(new char[bytes + ZONE]);
    memset(&block->dynamic[bytes], ZONE_FILL, ZONE);
}

void
block_check(Block *block)
{
    const char *zone = &block->dynamic[now.job->dynamic_shared];
    if (std::count(zone, zone + ZONE, (char)ZONE_FILL) != (ptrdiff_t)ZONE) {
        now.block = block;
        fail("wrote beyond its dynamic shared memory");
    }
}

/* Run one block after the other. */
void
run_plain(uint64_t blocks)
{
    Block block;
    block_make(&block);
    size_t shared_bytes;
    char *shared = static_shared(&shared_bytes);
    uint64_t start = now.job->order ? mix(now.job->order) % blocks : 0;
    bool descending = now.job->order & 1;
    for (uint64_t i = 0; i < blocks; i++) {
        uint64_t number = (start + (descending ? blocks - i : i)) % blocks;
        block_start(&block, number);
        memset(shared, POISON, shared_bytes);
        if (block_run(&block) != ENDED) {
            fail("GRID_SYNC needs a cooperative launch");
        }
        block_check(&block);
    }
}

/* Run all blocks up to each meeting of the grid in turn. */
void
run_cooperative(uint64_t count)
{
    std::vector<Block> blocks(count);
    size_t shared_bytes;
    char *shared = static_shared(&shared_bytes);
    for (uint64_t i = 0; i < count; i++) {
        block_make(&blocks[i]);
        block_start(&blocks[i], i);
        blocks[i].statics.reset(new char[shared_bytes]);
        memset(blocks[i].statics.get(), POISON, shared_bytes);
    }
    for (uint64_t ended = 0, round = 0; ended == 0; round++) {
        for (uint64_t i = 0; i < count; i++) {
            Block *block = &blocks[(now.job->order + round) & 1 ? count - 1 - i : i];
            memcpy(shared, block->statics.get(), shared_bytes);
            ended += block_run(block) == ENDED;
            memcpy(block->statics.get(), shared, shared_bytes);
        }
        if (ended != 0 && ended != count) {
            fail("blocks do not meet: some have ended, some are at GRID_SYNC");
        }
        for (uint64_t i = 0; ended == 0 && i < count; i++) {
            blocks[i].phase++;
            std::fill(blocks[i].states.begin(), blocks[i].states.end(), READY);
        }
    }
    for (Block &block : blocks) {
        block_check(&block);
    }
}

void
run(const cpu_launch *launch)
{
    const uint32_t *grid = launch->grid, *block = launch->block;
    now.job = launch;
    gridDim = dim3(grid[0], grid[1], grid[2]);
    blockDim = dim3(block[0], block[1], block[2]);
    now.threads = block[0] * block[1] * block[2];
    now.indices.clear();
    for (unsigned z = 0; z < block[2]; z++) {
        for (unsigned y = 0; y < block[1]; y++) {
            for (unsigned x = 0; x < block[0]; x++) {
                now.indices.push_back(make_uint3(x, y, z));
            }
        }
    }
    uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
    launch->cooperative ? run_cooperative(blocks) : run_plain(blocks);
    now.job = NULL;
    now.block = NULL;
}

/* Leave the running thread until it may go on. */
inline void
wait_at(Place place)
{
    now.block->states[now.thread] = WAITS + place;
    now.block->fibers[now.thread] = now.fiber;
    fiber_switch(&now.fiber->saved, now.scheduler);
}

} // namespace

/* --- what kernels call --- */

void
meet(Place place)
{
    if (now.threads == 1 && place == BLOCK) {
        return;
    }
    wait_at(place);
}

const uint64_t *
exchange(Place place, uint64_t brought, unsigned mask)
{
    unsigned all = now.lanes < WARP_LANES ? (1u << now.lanes) - 1 : 0xffffffffu;
    if ((mask & all) != all) {
        fail("masks of part of a warp are not emulated");
    }
    now.block->brought[now.thread] = brought;
    wait_at(place);
    return &now.block->exchanged[now.first];
}

int
lane()
{
    return (int)(now.thread - now.first);
}

void *
dynamic_shared()
{
    return now.block->dynamic.get();
}

void
fail(const char *text)
{
    fprintf(stderr, "cuda_on_cpu: kernel %s", now.job ? now.job->kernel->name : "?");
    if (now.block) {
        uint3 index = now.block->index;
        fprintf(stderr, ", block (%u, %u, %u)", index.x, index.y, index.z);
    }
    fprintf(stderr, ": %s\n", text);
    abort();
}

} // namespace on_cpu

extern "C" void
cuda_on_cpu_run(const cpu_launch *launch)
{
    on_cpu::run(launch);
}
