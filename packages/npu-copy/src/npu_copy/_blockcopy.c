/* Copies blocks of many regions in one call, so that a piece costs a few nanoseconds and not an interpreter round.
 *
 * A work item is one pair of blocks in one region; items are numbered region-major: item = region * num_pairs + pair.
 * Several threads make the same call and share out slices of items among themselves,
 * and one of them waits for the rest here too: no thread needs the interpreter's lock before all is copied.
 */
#define _POSIX_C_SOURCE 199309L /* clock_gettime, nanosleep */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

typedef struct {
    uint64_t destination; /* address of block 0 */
    uint64_t source;
    uint64_t destination_stride; /* bytes from a block to the next */
    uint64_t source_stride;
    uint64_t block_bytes;
} block_region;

typedef struct {
    int64_t source;
    int64_t destination;
} block_pair;

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
static void relax(void) { _mm_pause(); }
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
static void relax(void) {}
#endif

/* Version of the structs and of this signature, checked by the loader. */
int blockcopy_abi(void) { return 4; }

static char *destination_of(const block_region *region, const block_pair *pair)
{
    return (char *)(uintptr_t)(region->destination + pair->destination * region->destination_stride);
}

static const char *source_of(const block_region *region, const block_pair *pair)
{
    return (const char *)(uintptr_t)(region->source + pair->source * region->source_stride);
}

/* How many of at most `most` pairs are blocks that follow each other on both sides. */
static size_t consecutive(const block_pair *pairs, size_t most)
{
    size_t count = 1;
    while (count < most && pairs[count].source == pairs[count - 1].source + 1 &&
           pairs[count].destination == pairs[count - 1].destination + 1)
        count++;
    return count;
}

static void copy_items(const block_region *regions, const block_pair *pairs, size_t num_pairs, size_t item, size_t end)
{
    while (item < end) {
        const block_region *region = &regions[item / num_pairs];
        const block_pair *pair = &pairs[item % num_pairs];
        size_t size = region->block_bytes, count = 1;
        if (region->source_stride == size && region->destination_stride == size) {
            size_t left = num_pairs - item % num_pairs;
            count = consecutive(pair, left < end - item ? left : end - item);
        }
        size_t following = item + count < end ? item + count : item;
        const block_region *next_region = &regions[following / num_pairs];
        const block_pair *next_pair = &pairs[following % num_pairs];
        stream_copy(destination_of(region, pair), source_of(region, pair), size * count,
                    destination_of(next_region, next_pair), source_of(next_region, next_pair));
        item += count;
    }
}

/* Shared by the threads of one job; starts at 0, 0. */
typedef struct {
    size_t next; /* the first item that no thread has taken */
    size_t done; /* items copied */
} block_progress;

void blockcopy(const block_region *regions, const block_pair *pairs, size_t num_pairs, size_t num_items, size_t slice,
               block_progress *progress)
{
    size_t first;
    while ((first = __atomic_fetch_add(&progress->next, slice, __ATOMIC_RELAXED)) < num_items) {
        size_t count = num_items - first < slice ? num_items - first : slice;
        copy_items(regions, pairs, num_pairs, first, first + count);
        stream_fence();
        __atomic_fetch_add(&progress->done, count, __ATOMIC_RELEASE);
    }
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (int64_t)1000000000 + now.tv_nsec;
}

/* Waits for the slices that other threads have taken. They end about now: to sleep and be woken would take longer than
 * they do. A thread that the system has suspended gets the processor instead.
 */
void blockcopy_wait(const block_progress *progress, size_t num_items)
{
    enum { SPIN_NS = 100000, SLEEP_NS = 50000 };
    int64_t start = now_ns();
    while (__atomic_load_n(&progress->done, __ATOMIC_ACQUIRE) < num_items) {
        if (now_ns() - start < SPIN_NS)
            relax();
        else
            nanosleep(&(struct timespec){.tv_nsec = SLEEP_NS}, NULL);
    }
}
