/* Copies blocks of many regions in one call, so that a piece costs a few nanoseconds and not an interpreter round.
 *
 * A work item is one pair of blocks in one region; items are numbered region-major: item = region * num_pairs + pair.
 * Several threads make the same call and share out slices of items among themselves, and one of them waits for the rest
 * here too: no thread needs the interpreter's lock before all is copied.
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

enum { PAGE = 4096, LINE = 64, SMALL = 512 };

/* Copies `bytes` from the start of each of so many neighbouring pages, a line of each in turn, by stores that bypass the
 * cache: a plain store first reads the line it overwrites, which costs a third of the memory traffic. Reads what comes
 * `ahead` into the cache meanwhile, for the processor's own prefetcher loses its way at the end of every page. A prefetch
 * cannot fault. Of a single page `bytes` may be more than a page has.
 */
static void stream_pages(char *destination, const char *source, size_t pages, size_t bytes, const char *ahead)
{
    for (size_t line = 0; line < bytes; line += LINE) {
        for (size_t page = 0; page < pages; page++) {
            size_t at = page * PAGE + line;
            const __m128i *from = (const __m128i *)(source + at);
            __m128i *to = (__m128i *)(destination + at);
            __m128i v[LINE / sizeof(__m128i)];
            _mm_prefetch(ahead + at, _MM_HINT_T0);
            for (size_t i = 0; i < LINE / sizeof *v; i++)
                v[i] = _mm_loadu_si128(from + i);
            for (size_t i = 0; i < LINE / sizeof *v; i++)
                _mm_stream_si128(to + i, v[i]);
        }
    }
}

/* Two pages at a time keep more of memory's channels busy than one. libc does the same, but only for single copies far
 * larger than a KV block. Blocks that are stored or loaded are rarely in the cache: small jobs gain as well.
 */
static void stream_copy(char *destination, const char *source, size_t size, const char *next_source)
{
    if (size < SMALL) {
        _mm_prefetch(next_source, _MM_HINT_T0);
        memcpy(destination, source, size);
        return;
    }
    size_t head = (LINE - ((uintptr_t)destination & (LINE - 1))) & (LINE - 1);
    memcpy(destination, source, head);
    destination += head, source += head, size -= head;
    for (; size >= 2 * PAGE; size -= 2 * PAGE, source += 2 * PAGE, destination += 2 * PAGE)
        stream_pages(destination, source, 2, PAGE, size < 4 * PAGE ? next_source : source + 2 * PAGE);
    size_t lines = size & ~(size_t)(LINE - 1);
    stream_pages(destination, source, 1, lines, next_source);
    memcpy(destination + lines, source + lines, size - lines);
}
static void stream_fence(void) { _mm_sfence(); }
static void relax(void) { _mm_pause(); }
#else
/* Other processors' memcpy is left to decide. */
static void stream_copy(char *destination, const char *source, size_t size, const char *next_source)
{
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
                    source_of(next_region, next_pair));
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
