/* Copies blocks of many regions in one call, so that a piece costs a few nanoseconds and not an interpreter round.
 *
 * A work item is one run of consecutive blocks in one region; items are numbered region-major:
 * item = region * num_runs + run. Several threads make the same call and share out slices of items among themselves,
 * so that none of them needs the interpreter's lock before all is copied.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    uint64_t destination; /* address of block 0 */
    uint64_t source;
    uint64_t destination_stride; /* bytes from a block to the next */
    uint64_t source_stride;
    uint64_t block_bytes;
} block_region;

typedef struct {
    int64_t source; /* first block */
    int64_t destination;
    int64_t count; /* consecutive blocks on both sides */
} block_run;

#if defined(__x86_64__)
#include <emmintrin.h>

enum { PAGE = 4096, AHEAD = 8192, SMALL = 512 };

/* Stores that bypass the cache: a plain store first reads the line it overwrites, which costs a third of the memory
 * traffic of a large copy. libc does the same, but only for single copies far larger than a KV block. Blocks that are
 * stored or loaded are rarely in the cache: small jobs gain as well.
 *
 * The processor's own prefetcher loses its way at the end of every piece, so the reads AHEAD go on into the next piece.
 * Pages to be written are touched two pages early, those of the next piece at once: a miss in the translation cache
 * costs as much as a kilobyte copied. A prefetch cannot fault.
 */
static void stream_copy(char *destination, const char *source, size_t size, const char *next_destination,
                        const char *next_source)
{
    _mm_prefetch(next_destination, _MM_HINT_T0);
    _mm_prefetch(next_destination + PAGE, _MM_HINT_T0);
    _mm_prefetch(next_source + PAGE, _MM_HINT_T0);
    if (size < SMALL) {
        _mm_prefetch(next_source, _MM_HINT_T0);
        memcpy(destination, source, size);
        return;
    }
    size_t head = (64 - ((uintptr_t)destination & 63)) & 63;
    memcpy(destination, source, head);
    destination += head, source += head, size -= head;
    for (; size >= 128; size -= 128, source += 128, destination += 128) {
        const char *ahead = size > AHEAD ? source + AHEAD : next_source + (AHEAD - size);
        const __m128i *from = (const __m128i *)source;
        __m128i *to = (__m128i *)destination;
        __m128i v[8];
        if (((uintptr_t)destination & (PAGE - 1)) < 128 && size > 2 * PAGE)
            _mm_prefetch(destination + 2 * PAGE, _MM_HINT_T0);
        _mm_prefetch(ahead, _MM_HINT_T0);
        _mm_prefetch(ahead + 64, _MM_HINT_T0);
        for (int i = 0; i < 8; i++)
            v[i] = _mm_loadu_si128(from + i);
        for (int i = 0; i < 8; i++)
            _mm_stream_si128(to + i, v[i]);
    }
    memcpy(destination, source, size);
}
static void stream_fence(void) { _mm_sfence(); }
#else
/* Other processors' memcpy is left to decide. */
static void stream_copy(char *destination, const char *source, size_t size, const char *next_destination,
                        const char *next_source)
{
    __builtin_prefetch(next_destination, 1);
    __builtin_prefetch(next_source);
    memcpy(destination, source, size);
}
static void stream_fence(void) {}
#endif

/* Version of the structs and of this signature, checked by the loader. */
int blockcopy_abi(void) { return 3; }

static char *destination_of(const block_region *region, const block_run *run)
{
    return (char *)(uintptr_t)(region->destination + run->destination * region->destination_stride);
}

static const char *source_of(const block_region *region, const block_run *run)
{
    return (const char *)(uintptr_t)(region->source + run->source * region->source_stride);
}

static void copy_items(const block_region *regions, const block_run *runs, size_t num_runs, size_t item, size_t end)
{
    for (; item < end; item++) {
        const block_region *region = &regions[item / num_runs];
        const block_run *run = &runs[item % num_runs];
        size_t following = item + 1 < end ? item + 1 : item;
        const block_region *next_region = &regions[following / num_runs];
        const block_run *next_run = &runs[following % num_runs];
        char *destination = destination_of(region, run);
        const char *source = source_of(region, run);
        size_t size = region->block_bytes;
        int64_t pieces = run->count;
        if (region->source_stride == size && region->destination_stride == size) {
            size *= pieces;
            pieces = 1;
        }
        for (; pieces > 0; pieces--) {
            int last = pieces == 1;
            char *next_destination = last ? destination_of(next_region, next_run)
                                          : destination + region->destination_stride;
            const char *next_source = last ? source_of(next_region, next_run) : source + region->source_stride;
            stream_copy(destination, source, size, next_destination, next_source);
            destination = next_destination;
            source = next_source;
        }
    }
}

/* next_item starts at 0 and is shared by the threads of one job. */
void blockcopy(const block_region *regions, const block_run *runs, size_t num_runs, size_t num_items, size_t slice,
               size_t *next_item)
{
    size_t first;
    while ((first = __atomic_fetch_add(next_item, slice, __ATOMIC_RELAXED)) < num_items)
        copy_items(regions, runs, num_runs, first, num_items - first < slice ? num_items : first + slice);
    stream_fence();
}
