/* A stand-in for libascendcl: the functions npu-copy calls, with the documented signatures and checks, over streams that
 * are threads. Copies happen in stream order, later than the call. The fake_* functions are the tests' controls.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PARAM_INVALID = 107000, BAD_ALLOC = 207001 };
enum { LOCATION_HOST = 0, LOCATION_DEVICE = 1 };
enum { CURRENT_DEVICE = 3 };

typedef struct { uint32_t id; int type; } aclrtMemLocation;
typedef struct { aclrtMemLocation dstLoc; aclrtMemLocation srcLoc; uint8_t rsv[16]; } aclrtMemcpyBatchAttr;

typedef struct event { int requested, recorded, error; double time; } event;
typedef struct op {
    enum { COPY, FILL, RECORD, WAIT } kind;
    void *destination;
    const void *source;
    size_t size;
    int value; /* FILL: the byte; RECORD, WAIT: which recording of the event */
    event *event;
    struct op *next;
} op;
typedef struct stream { pthread_t thread; op *first, *last; int held, busy, error, stop; } stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct { char *address; size_t size; } pinned[256];
static size_t pinned_bytes;
static int refuse_batch, refuse_malloc, fail_next_copy, batches;

static void run(stream *s, op *o)
{
    switch (o->kind) {
    case COPY:
        if (fail_next_copy) {
            s->error = fail_next_copy;
            fail_next_copy = 0;
        } else
            memcpy(o->destination, o->source, o->size);
        break;
    case FILL:
        memset(o->destination, o->value, o->size);
        break;
    case RECORD: {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        o->event->time = now.tv_sec * 1e3 + now.tv_nsec / 1e6;
        o->event->recorded = o->value;
        o->event->error = s->error;
        s->error = 0;
        break;
    }
    case WAIT:
        break;
    }
}

static int ready(const stream *s)
{
    return s->first && !s->held && !(s->first->kind == WAIT && s->first->event->recorded < s->first->value);
}

static void *work(void *argument)
{
    stream *s = argument;
    pthread_mutex_lock(&lock);
    while (!s->stop) {
        if (!ready(s)) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        op *o = s->first;
        run(s, o);
        s->first = o->next;
        if (!s->first)
            s->last = NULL;
        free(o);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

static void append(stream *s, op o)
{
    op *copy = malloc(sizeof o);
    *copy = o;
    copy->next = NULL;
    if (s->last)
        s->last->next = copy;
    else
        s->first = copy;
    s->last = copy;
    pthread_cond_broadcast(&changed);
}

static __attribute__((unused)) int is_pinned(const void *address, size_t size)
{
    for (int i = 0; i < 256; i++)
        if (pinned[i].address && (char *)address >= pinned[i].address
            && (char *)address + size <= pinned[i].address + pinned[i].size)
            return 1;
    return 0;
}

int aclrtGetDevice(int32_t *device) { return *device = CURRENT_DEVICE, 0; }

int aclrtMallocHost(void **address, size_t size)
{
    if (refuse_malloc)
        return BAD_ALLOC;
    for (int i = 0; i < 256; i++)
        if (!pinned[i].address) {
            *address = pinned[i].address = aligned_alloc(64, (size + 63) / 64 * 64);
            pinned[i].size = size;
            pinned_bytes += size;
            return 0;
        }
    return BAD_ALLOC;
}

int aclrtFreeHost(void *address)
{
    for (int i = 0; i < 256; i++)
        if (pinned[i].address == address) {
            pinned_bytes -= pinned[i].size;
            pinned[i].address = NULL;
            free(address);
            return 0;
        }
    return PARAM_INVALID;
}

#ifndef WITHOUT_BATCH
int aclrtMemcpyBatchAsync(void **dsts, size_t *destMaxs, void **srcs, size_t *sizes, size_t numBatches,
                          aclrtMemcpyBatchAttr *attrs, size_t *attrsIndexes, size_t numAttrs, size_t *failIndex,
                          void *handle)
{
    static const uint8_t zero[16];
    *failIndex = SIZE_MAX;
    if (refuse_batch)
        return refuse_batch;
    if (!handle || numBatches == 0 || numAttrs == 0 || numAttrs > numBatches || attrsIndexes[0] != 0
        || attrsIndexes[numAttrs - 1] >= numBatches)
        return PARAM_INVALID;
    for (size_t a = 1; a < numAttrs; a++)
        if (attrsIndexes[a] <= attrsIndexes[a - 1])
            return PARAM_INVALID;
    for (size_t a = 0, i = 0; a < numAttrs; a++) {
        size_t end = a + 1 < numAttrs ? attrsIndexes[a + 1] : numBatches;
        int store = attrs[a].dstLoc.type == LOCATION_HOST && attrs[a].srcLoc.type == LOCATION_DEVICE;
        int load = attrs[a].dstLoc.type == LOCATION_DEVICE && attrs[a].srcLoc.type == LOCATION_HOST;
        uint32_t device = store ? attrs[a].srcLoc.id : attrs[a].dstLoc.id;
        if (store == load || device != CURRENT_DEVICE || memcmp(attrs[a].rsv, zero, 16))
            return PARAM_INVALID;
        for (; i < end; i++) {
            const void *host = store ? dsts[i] : srcs[i];
            const void *other = store ? srcs[i] : dsts[i];
            if (sizes[i] > destMaxs[i] || !is_pinned(host, sizes[i]) || is_pinned(other, 1))
                return *failIndex = i, PARAM_INVALID;
        }
    }
    pthread_mutex_lock(&lock);
    batches++;
    for (size_t i = 0; i < numBatches; i++)
        append(handle, (op){.kind = COPY, .destination = dsts[i], .source = srcs[i], .size = sizes[i]});
    pthread_mutex_unlock(&lock);
    return 0;
}
#endif

/* CUDA's driver call of 12.8, over the same streams. */
typedef struct { unsigned type; int id; } CUmemLocation;
typedef struct { unsigned srcAccessOrder; CUmemLocation srcLocHint, dstLocHint; unsigned flags; } CUmemcpyAttributes;

int fake_cuMemcpyBatchAsync(uint64_t *dsts, uint64_t *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attrs,
                            size_t *attrsIdxs, size_t numAttrs, size_t *failIdx, void *handle)
{
    enum { INVALID_VALUE = 1, ORDER_STREAM = 1 };
    *failIdx = SIZE_MAX;
    if (!handle || count == 0 || numAttrs != 1 || attrsIdxs[0] != 0 || attrs->srcAccessOrder != ORDER_STREAM
        || attrs->flags || attrs->srcLocHint.type || attrs->dstLocHint.type)
        return INVALID_VALUE;
    if (refuse_batch)
        return refuse_batch;
    pthread_mutex_lock(&lock);
    batches++;
    for (size_t i = 0; i < count; i++)
        append(handle, (op){.kind = COPY, .destination = (void *)dsts[i], .source = (void *)srcs[i], .size = sizes[i]});
    pthread_mutex_unlock(&lock);
    return 0;
}

stream *fake_stream_create(void)
{
    stream *s = calloc(1, sizeof *s);
    pthread_create(&s->thread, NULL, work, s);
    return s;
}

void fake_stream_destroy(stream *s)
{
    pthread_mutex_lock(&lock);
    s->stop = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    pthread_join(s->thread, NULL);
    free(s);
}

/* A held stream starts nothing more until it is released. */
void fake_stream_hold(stream *s, int held)
{
    pthread_mutex_lock(&lock);
    s->held = held;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

int fake_stream_idle(stream *s)
{
    pthread_mutex_lock(&lock);
    int idle = s->first == NULL;
    pthread_mutex_unlock(&lock);
    return idle;
}

void fake_fill(stream *s, void *destination, int value, size_t size)
{
    pthread_mutex_lock(&lock);
    append(s, (op){.kind = FILL, .destination = destination, .value = value, .size = size});
    pthread_mutex_unlock(&lock);
}

void fake_copy(stream *s, void *destination, const void *source, size_t size)
{
    pthread_mutex_lock(&lock);
    append(s, (op){.kind = COPY, .destination = destination, .source = source, .size = size});
    pthread_mutex_unlock(&lock);
}

event *fake_event_create(void) { return calloc(1, sizeof(event)); }
void fake_event_destroy(event *e) { free(e); }

void fake_event_record(event *e, stream *s)
{
    pthread_mutex_lock(&lock);
    append(s, (op){.kind = RECORD, .event = e, .value = ++e->requested});
    pthread_mutex_unlock(&lock);
}

void fake_event_wait(event *e, stream *s)
{
    pthread_mutex_lock(&lock);
    append(s, (op){.kind = WAIT, .event = e, .value = e->requested});
    pthread_mutex_unlock(&lock);
}

/* 1 done, 0 not yet, an ACL error code when work before the event failed. */
int fake_event_query(event *e)
{
    pthread_mutex_lock(&lock);
    int result = e->recorded < e->requested ? 0 : e->error ? e->error : 1;
    pthread_mutex_unlock(&lock);
    return result;
}

double fake_event_ms(event *e) { return e->time; }
void fake_refuse_batch(int code) { refuse_batch = code; }
void fake_refuse_malloc(int refuse) { refuse_malloc = refuse; }
void fake_fail_next_copy(int code) { fail_next_copy = code; }
size_t fake_pinned_bytes(void) { return pinned_bytes; }
int fake_batches(void) { return batches; }
