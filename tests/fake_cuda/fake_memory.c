/* Device and page-locked memory, all of it host memory.

   A block that we allocate is filled with 0xFF (NaN in every float type) and lies
   between two red zones. When it is freed it is filled with 0xFF again and kept for a
   while, so that a late read gives NaN and a late write is found: the oldest are given
   back to the C library once QUARANTINE_BYTES are kept. Registered memory belongs to
   the caller and is only written down.

   Red zones tell of writes, and later. Where the address sanitizer is in the process
   its checks of the kernels find reads, too, and at once: it is told of the zones. So:
   FAKE_CUDA_SANITIZE=address ASAN_OPTIONS=detect_leaks=0
   LD_PRELOAD=$(g++ -print-file-name=libasan.so) python -m pytest ...

   All functions are called with fake.lock held. */

#include "fake_cuda.h"

#include <stdlib.h>
#include <string.h>

enum {
    ZONE = 256,
    DEVICE_ALIGNMENT = 512,
    PAGE = 4096,
    POISON = 0xff,
    ZONE_FILL = 0xfa,
    QUARANTINE_SLOTS = 4096,
    QUARANTINE_BYTES = 32 << 20,
};

static struct {
    struct block *blocks[QUARANTINE_SLOTS]; /* owned; a ring, oldest at `first` */
    size_t first, count, bytes;
} quarantine;

/* --- red zones and poison --- */

/* Say whether all bytes have that value. */
static bool
all_bytes(const unsigned char *bytes, size_t count, unsigned char value)
{
    return count == 0
           || (bytes[0] == value && memcmp(bytes, bytes + 1, count - 1) == 0);
}

/* The sanitizer's, if it is there. */
__attribute__((weak)) void __asan_poison_memory_region(const volatile void *, size_t);
__attribute__((weak)) void __asan_unpoison_memory_region(const volatile void *, size_t);

/* Forbid the red zones of a block to all code that the sanitizer watches, or allow them
   again. */
static void
zones_forbid(const struct block *block, bool forbid)
{
    if (__asan_poison_memory_region != NULL && __asan_unpoison_memory_region != NULL) {
        void (*tell)(const volatile void *, size_t) =
            forbid ? __asan_poison_memory_region : __asan_unpoison_memory_region;
        tell((void *)(block->address - ZONE), ZONE);
        tell((void *)(block->address + block->bytes), ZONE);
    }
}

/* Return how many of a block's two red zones were written to. */
static uint64_t
block_damage(const struct block *block)
{
    if (block->raw == NULL) {
        return 0;
    }
    const unsigned char *data = (const unsigned char *)block->address;
    zones_forbid(block, false);
    uint64_t damage = !all_bytes(data - ZONE, ZONE, ZONE_FILL)
                      + (uint64_t)!all_bytes(data + block->bytes, ZONE, ZONE_FILL);
    zones_forbid(block, true);
    return damage;
}

/* Say whether a freed block was written to since; not for those of before a reset. */
static bool
block_written(const struct block *block)
{
    return !block->old
           && !all_bytes((const unsigned char *)block->address, block->bytes, POISON);
}

/* Give the oldest freed block back to the C library. */
static void
quarantine_drop(void)
{
    struct block *block = quarantine.blocks[quarantine.first];
    quarantine.first = (quarantine.first + 1) % QUARANTINE_SLOTS;
    quarantine.count--;
    quarantine.bytes -= block->bytes;
    fake.late_writes += block_written(block);
    free(block->raw);
    free(block);
}

/* Poison a block that was taken off the table, and keep it while there is room. */
static void
quarantine_add(struct block *block)
{
    memset((void *)block->address, POISON, block->bytes);
    size_t slot = (quarantine.first + quarantine.count) % QUARANTINE_SLOTS;
    quarantine.blocks[slot] = block;
    quarantine.count++;
    quarantine.bytes += block->bytes;
    while (quarantine.bytes > QUARANTINE_BYTES
           || quarantine.count == QUARANTINE_SLOTS) {
        quarantine_drop();
    }
}

/* Return how many red zones were written to: of live blocks and of those freed so far.
 */
uint64_t
memory_damaged_zones(void)
{
    uint64_t damaged = fake.damaged_zones;
    for (size_t i = 0; i < fake.block_count; i++) {
        damaged += block_damage(fake.blocks[i]);
    }
    return damaged;
}

/* Return how many freed blocks were written to after their end. */
uint64_t
memory_late_writes(void)
{
    uint64_t written = fake.late_writes;
    for (size_t i = 0; i < quarantine.count; i++) {
        written +=
            block_written(quarantine.blocks[(quarantine.first + i) % QUARANTINE_SLOTS]);
    }
    return written;
}

/* --- the table --- */

/* Return the index of the first block that lies wholly above the address. */
static size_t
table_above(uintptr_t address)
{
    size_t low = 0, high = fake.block_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (fake.blocks[middle]->address > address) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

static void
table_add(struct block *block)
{
    if (fake.block_count == fake.block_room) {
        size_t room = fake.block_room ? 2 * fake.block_room : 64;
        struct block **grown = allocate(room, sizeof(*grown));
        if (fake.block_count) {
            memcpy(grown, fake.blocks, fake.block_count * sizeof(*grown));
        }
        free(fake.blocks);
        fake.blocks = grown;
        fake.block_room = room;
    }
    size_t index = table_above(block->address);
    memmove(&fake.blocks[index + 1], &fake.blocks[index],
            (fake.block_count - index) * sizeof(*fake.blocks));
    fake.blocks[index] = block;
    fake.block_count++;
    fake.counts[block->kind]++;
    fake.bytes[block->kind] += block->bytes;
    if (block->kind == BLOCK_DEVICE) {
        fake.device_bytes[block->context->device] += block->bytes;
    }
}

static void
table_remove(struct block *block)
{
    size_t index = table_above(block->address) - 1;
    fake.block_count--;
    memmove(&fake.blocks[index], &fake.blocks[index + 1],
            (fake.block_count - index) * sizeof(*fake.blocks));
    fake.counts[block->kind]--;
    fake.bytes[block->kind] -= block->bytes;
    if (block->kind == BLOCK_DEVICE) {
        fake.device_bytes[block->context->device] -= block->bytes;
    }
}

/* Return the block in which the address lies, or NULL. */
struct block *
memory_find_any(uintptr_t address)
{
    size_t index = table_above(address);
    if (index == 0) {
        return NULL;
    }
    struct block *block = fake.blocks[index - 1];
    return address - block->address < block->bytes ? block : NULL;
}

/* Return the block of that kind that begins at the address, or NULL. */
struct block *
memory_find_base(enum block_kind kind, uintptr_t address)
{
    struct block *block = memory_find_any(address);
    return block && block->address == address && block->kind == kind ? block : NULL;
}

/* Say whether any block has a byte in the range, which is not empty. */
static bool
range_is_touched(uintptr_t address, size_t bytes)
{
    size_t index = table_above(address);
    return memory_find_any(address) != NULL
           || (index < fake.block_count
               && fake.blocks[index]->address - address < bytes);
}

/* Say whether the whole range lies in the block. */
static bool
block_holds(const struct block *block, uintptr_t address, size_t bytes)
{
    return bytes <= block->bytes && address - block->address <= block->bytes - bytes;
}

/* Fill in an end in memory of that device; an error if not all of it lies in one live
   block. Another device's is one, too: the driver promises only of cuMemcpy and
   cuMemcpyPeer that they go from device to device. */
CUresult
memory_device_end(CUdeviceptr address, size_t extent, int device, struct end *out)
{
    struct block *block = memory_find_any((uintptr_t)address);
    if (block == NULL || block->kind != BLOCK_DEVICE
        || block->context->device != device
        || !block_holds(block, (uintptr_t)address, extent)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    out->address = (uintptr_t)address;
    out->block = block;
    out->host = false;
    return CUDA_SUCCESS;
}

/* Fill in an end in host memory: with its block where it is page-locked, without where
   it is pageable, as what is registered for another device alone is taken to be; an
   error where it is device memory or only part of it is page-locked. What was allocated
   is page-locked for all devices, portable or not (Driver API, Unified Addressing).
 */
CUresult
memory_host_end(const void *address, size_t extent, int device, struct end *out)
{
    if (address == NULL) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct block *block = memory_find_any((uintptr_t)address);
    bool inside = block != NULL && block->kind != BLOCK_DEVICE
                  && block_holds(block, (uintptr_t)address, extent);
    if (!inside && range_is_touched((uintptr_t)address, extent)) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (block != NULL && block->kind == BLOCK_REGISTERED && !block->portable
        && block->context->device != device) {
        block = NULL;
    }
    out->address = (uintptr_t)address;
    out->block = block;
    out->host = true;
    return CUDA_SUCCESS;
}

/* Say whether the device could use the whole range: one live block has all of it, even
   where it is empty, and is no other device's memory. The end of a block counts as its
   place for an empty one. */
bool
memory_is_live(const void *address, size_t bytes, int device)
{
    size_t index = table_above((uintptr_t)address);
    if (index == 0) {
        return false;
    }
    const struct block *block = fake.blocks[index - 1];
    bool reached = block->kind != BLOCK_DEVICE || block->context->device == device;
    return reached && block_holds(block, (uintptr_t)address, bytes);
}

/* --- allocation --- */

/* Say whether a limit allows that many bytes more; each device has its own. */
static bool
limit_allows(const struct context *context, enum block_kind kind, size_t bytes)
{
    size_t limit = kind == BLOCK_DEVICE ? fake.device_limit : fake.page_locked_limit;
    size_t used = kind == BLOCK_DEVICE
                      ? fake.device_bytes[context->device]
                      : fake.bytes[BLOCK_PAGE_LOCKED] + fake.bytes[BLOCK_REGISTERED];
    return used <= limit && bytes <= limit - used;
}

/* Allocate a poisoned block between red zones. */
CUresult
memory_allocate(struct context *context, enum block_kind kind, size_t bytes,
                struct block **out)
{
    size_t before = kind == BLOCK_DEVICE ? DEVICE_ALIGNMENT : PAGE;
    void *raw;
    if (!limit_allows(context, kind, bytes) || bytes > SIZE_MAX - before - ZONE
        || posix_memalign(&raw, before, before + bytes + ZONE) != 0) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    struct block *block = allocate(1, sizeof(*block));
    unsigned char *data = (unsigned char *)raw + before;
    memset(data - ZONE, ZONE_FILL, ZONE);
    memset(data, POISON, bytes);
    memset(data + bytes, ZONE_FILL, ZONE);
    *block = (struct block){.address = (uintptr_t)data,
                            .bytes = bytes,
                            .kind = kind,
                            .context = context,
                            .raw = raw};
    zones_forbid(block, true);
    table_add(block);
    *out = block;
    return CUDA_SUCCESS;
}

/* Write down that the caller's memory is page-locked. */
CUresult
memory_register(struct context *context, void *address, size_t bytes, bool portable)
{
    if (address == NULL || bytes == 0 || (uintptr_t)address > UINTPTR_MAX - bytes) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (range_is_touched((uintptr_t)address, bytes)) {
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
    if (!limit_allows(context, BLOCK_REGISTERED, bytes)) {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    struct block *block = allocate(1, sizeof(*block));
    *block = (struct block){.address = (uintptr_t)address,
                            .bytes = bytes,
                            .kind = BLOCK_REGISTERED,
                            .context = context,
                            .portable = portable};
    table_add(block);
    return CUDA_SUCCESS;
}

/* Take a block away at once, whoever uses it. */
void
memory_release(struct block *block)
{
    queue_forget_block(block);
    table_remove(block);
    fake.damaged_zones += block_damage(block);
    if (block->raw != NULL) {
        quarantine_add(block);
    } else {
        free(block);
    }
}

/* Release all blocks of a context. */
void
memory_release_context(struct context *context)
{
    for (size_t i = fake.block_count; i-- > 0;) {
        if (fake.blocks[i]->context == context) {
            memory_release(fake.blocks[i]);
        }
    }
}

/* Release everything and forget all damage. Freed blocks are kept on, as arrays of
   before the reset may still point into them, but what is written there no longer
   counts. */
void
memory_reset(void)
{
    while (fake.block_count) {
        memory_release(fake.blocks[fake.block_count - 1]);
    }
    for (size_t i = 0; i < quarantine.count; i++) {
        quarantine.blocks[(quarantine.first + i) % QUARANTINE_SLOTS]->old = true;
    }
    fake.faults = fake.damaged_zones = fake.late_writes = 0;
}
