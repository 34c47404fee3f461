/* Copies blocks of many regions in one call, so that a piece costs a few nanoseconds and not an interpreter round.
 *
 * A work item is one run of consecutive blocks in one region; items are numbered region-major:
 * item = region * num_runs + run. Callers hand disjoint item ranges to several threads.
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

/* Stores that bypass the cache: a plain store first reads the line it overwrites, which costs a third of the memory
 * traffic of a large copy. libc does the same, but only for single copies far larger than a KV block. */
static void stream_copy(char *destination, const char *source, size_t size)
{
    size_t head = (64 - ((uintptr_t)destination & 63)) & 63;
    if (size < 512) {
        memcpy(destination, source, size);
        return;
    }
    memcpy(destination, source, head);
    destination += head, source += head, size -= head;
    for (; size >= 128; size -= 128, source += 128, destination += 128) {
        const __m128i *from = (const __m128i *)source;
        __m128i *to = (__m128i *)destination;
        _mm_prefetch(source + 1024, _MM_HINT_T0);
        _mm_prefetch(source + 1088, _MM_HINT_T0);
        __m128i v[8];
        for (int i = 0; i < 8; i++)
            v[i] = _mm_loadu_si128(from + i);
        for (int i = 0; i < 8; i++)
            _mm_stream_si128(to + i, v[i]);
    }
    memcpy(destination, source, size);
}
static void stream_fence(void) { _mm_sfence(); }
#else
static void stream_copy(char *destination, const char *source, size_t size) { memcpy(destination, source, size); }
static void stream_fence(void) {}
#endif

/* Version of the structs and of this signature, checked by the loader. */
int blockcopy_abi(void) { return 1; }

void blockcopy(const block_region *regions, const block_run *runs, size_t num_runs, size_t first_item, size_t end_item,
               int streaming)
{
    for (size_t item = first_item; item < end_item; item++) {
        const block_region *region = &regions[item / num_runs];
        const block_run *run = &runs[item % num_runs];
        char *destination = (char *)(uintptr_t)(region->destination + run->destination * region->destination_stride);
        const char *source = (const char *)(uintptr_t)(region->source + run->source * region->source_stride);
        size_t size = region->block_bytes;
        int64_t pieces = run->count;
        if (region->source_stride == size && region->destination_stride == size) {
            size *= pieces;
            pieces = 1;
        }
        for (; pieces > 0; pieces--, destination += region->destination_stride, source += region->source_stride) {
            if (streaming)
                stream_copy(destination, source, size);
            else
                memcpy(destination, source, size);
        }
    }
    if (streaming)
        stream_fence();
}
