/* Memory of any size and alignment: where it lies, what it costs, when it goes back, and the switch around it. */

#include <pthread.h>
#include <string.h>

#include "check.h"
#include "kvcached_trtllm.h"

static kvik_pool* open_pool(const char* ipc_name, uint64_t n_blocks, uint64_t max_bytes)
{
    kvik_config config = config_of(ipc_name, MIB, n_blocks);
    config.max_bytes = max_bytes;
    kvik_pool* pool = NULL;
    CHECK(kvik_open(&config, &pool) == KVIK_OK);
    return pool;
}

static void* take(kvik_pool* pool, uint64_t size, uint64_t alignment)
{
    void* memory = NULL;
    CHECK(kvik_alloc(pool, size, alignment, &memory) == KVIK_OK);
    CHECK(memory != NULL && (uintptr_t) memory % (alignment == 0 ? 256 : alignment) == 0);
    memset(memory, 7, size);
    return memory;
}

static void sizes_and_alignments(void)
{
    kvik_pool* pool = open_pool("sizes", 0, UINT64_MAX);
    /* Small ones share a page. */
    void* small[3] = {take(pool, 1, 1), take(pool, 1000, 0), take(pool, 100 * 1024, 4096)};
    CHECK(stats_of(pool).heap_bytes == 2 * MIB && stats_of(pool).held_bytes == 2 * MIB);
    CHECK(stats_of(pool).n_allocations == 3 && stats_of(pool).allocated_bytes == 1 + 1000 + 100 * 1024);
    /* Large ones have pages of their own. */
    void* large = take(pool, 5 * MIB, 256);
    CHECK(stats_of(pool).heap_bytes == 8 * MIB);
    void* aligned = take(pool, 100, 16 * MIB);
    CHECK(stats_of(pool).heap_bytes == 10 * MIB);
    for (int i = 0; i < 3; ++i) {
        CHECK(kvik_free(pool, small[i]) == KVIK_OK);
        CHECK(kvik_free(pool, small[i]) == KVIK_ERROR_NOT_ALLOCATED);
    }
    CHECK(kvik_free(pool, (char*) large + 256) == KVIK_ERROR_NOT_ALLOCATED);
    CHECK(strstr(kvik_last_error(pool), "no allocation of this pool starts there") != NULL);
    CHECK(kvik_free(pool, pool) == KVIK_ERROR_NOT_ALLOCATED);
    CHECK(kvik_free(pool, NULL) == KVIK_OK);
    CHECK(kvik_free(pool, large) == KVIK_OK && kvik_free(pool, aligned) == KVIK_OK);
    CHECK(stats_of(pool).n_allocations == 0 && stats_of(pool).allocated_bytes == 0);
    CHECK(kvik_trim(pool, NULL) == KVIK_OK);
    CHECK(stats_of(pool).heap_bytes == 0 && stats_of(pool).held_bytes == 0);

    void* memory = NULL;
    CHECK(kvik_alloc(pool, 0, 256, &memory) == KVIK_ERROR_INVALID);
    CHECK(kvik_alloc(pool, 1, 3, &memory) == KVIK_ERROR_INVALID);
    CHECK(strstr(kvik_last_error(pool), "`alignment` is 3") != NULL);
    CHECK(kvik_alloc(pool, 1, UINT64_C(1) << 31, &memory) == KVIK_ERROR_INVALID);
    CHECK(kvik_alloc(pool, 1, 1, NULL) == KVIK_ERROR_INVALID);
    CHECK(kvik_alloc(pool, UINT64_MAX, 1, &memory) == KVIK_NO_MEMORY);
    CHECK(kvik_alloc(NULL, 1, 1, &memory) == KVIK_ERROR_HANDLE);
    CHECK(memory == NULL);
    CHECK(kvik_close(pool) == KVIK_OK);
}

static void one_limit_with_blocks(void)
{
    kvik_pool* pool = open_pool("limit", 16, 16 * MIB);
    void* blocks[16];
    void* memory = NULL;
    void* large = take(pool, 10 * MIB, 0);
    CHECK(kvik_alloc_blocks(pool, 7, blocks) == KVIK_NO_MEMORY);
    CHECK(kvik_alloc_blocks(pool, 6, blocks) == KVIK_OK);
    CHECK(kvik_alloc(pool, 1, 0, &memory) == KVIK_NO_MEMORY && memory == NULL);
    CHECK(stats_of(pool).held_bytes == 16 * MIB);
    /* Pages that one side has idle are there for the other. */
    CHECK(kvik_free(pool, large) == KVIK_OK);
    CHECK(kvik_alloc_blocks(pool, 10, blocks + 6) == KVIK_OK);
    CHECK(kvik_free_blocks(pool, blocks, 16) == KVIK_OK);
    large = take(pool, 16 * MIB, 0);
    CHECK(kvik_free(pool, large) == KVIK_OK);
    CHECK(kvik_close(pool) == KVIK_OK);
}

static void bypass(void)
{
    kvik_pool* pool = open_pool("bypass", 0, 4 * MIB);
    void* elastic = take(pool, 3 * MIB, 0);
    CHECK(kvik_set_bypass(pool, 1) == KVIK_OK);
    /* Beyond the limit, and aligned as well. */
    void* plain = take(pool, 8 * MIB, 2 * MIB);
    CHECK(stats_of(pool).bypassed_bytes == 8 * MIB && stats_of(pool).allocated_bytes == 3 * MIB);
    CHECK(stats_of(pool).held_bytes == 4 * MIB && stats_of(pool).n_allocations == 2);
    CHECK(kvik_set_bypass(pool, 0) == KVIK_OK);
    void* memory = NULL;
    CHECK(kvik_alloc(pool, 8 * MIB, 0, &memory) == KVIK_NO_MEMORY);
    /* Each goes back where it came from. */
    CHECK(kvik_free(pool, plain) == KVIK_OK && kvik_free(pool, elastic) == KVIK_OK);
    CHECK(kvik_free(pool, plain) == KVIK_ERROR_NOT_ALLOCATED);
    CHECK(kvik_set_bypass(NULL, 1) == KVIK_ERROR_HANDLE);
    /* What is left at the end goes with the pool. */
    CHECK(kvik_set_bypass(pool, 1) == KVIK_OK);
    take(pool, 100, 0);
    CHECK(kvik_close(pool) == KVIK_OK);
}

static void kvcached_functions(void)
{
    CHECK(kvcached_init(-1, 0) == NULL && kvcached_init(-2, MIB) == NULL);
    kvcached_context_t ctx = kvcached_init(-1, 8 * MIB);
    CHECK(ctx != NULL);
    void* memory = kvcached_alloc(ctx, 3 * MIB, 512);
    CHECK(memory != NULL && (uintptr_t) memory % 512 == 0);
    memset(memory, 1, 3 * MIB);
    CHECK(kvcached_alloc(ctx, 5 * MIB, 0) == NULL);
    CHECK(kvcached_alloc(ctx, 0, 0) == NULL && kvcached_alloc(NULL, 1, 0) == NULL);
    CHECK(kvcached_free(ctx, memory) == 1 && kvcached_free(ctx, memory) == 0 && kvcached_free(ctx, NULL) == 1);
    CHECK(kvcached_set_bypass(ctx, 1) == 1 && kvcached_set_bypass(NULL, 1) == 0);
    memory = kvcached_alloc(ctx, 20 * MIB, 0);
    CHECK(memory != NULL && kvcached_free(ctx, memory) == 1);
    CHECK(kvcached_alloc_block_trtllm(ctx) == NULL);
    kvcached_shutdown_trtllm(ctx);
}

/* A program of the first version of kvik_stats: what it does not know is not written. */
static void older_statistics(void)
{
    kvik_pool* pool = open_pool("older", 0, UINT64_MAX);
    kvik_stats stats;
    memset(&stats, 0xee, sizeof stats);
    stats.size = offsetof(kvik_stats, heap_bytes);
    CHECK(kvik_get_stats(pool, &stats) == KVIK_OK);
    CHECK(stats.held_bytes == 0 && stats.heap_bytes == UINT64_C(0xeeeeeeeeeeeeeeee));
    stats.size = offsetof(kvik_stats, heap_bytes) - 1;
    CHECK(kvik_get_stats(pool, &stats) == KVIK_ERROR_INVALID);
    CHECK(kvik_close(pool) == KVIK_OK);
}

#define N_THREADS 4
#define N_ROUNDS 1500
#define N_KEPT 8

struct worker {
    kvik_pool* pool;
    unsigned char mark;
    pthread_t thread;
};

/* Marks its memory and finds its marks again: no other thread has it. */
static void* take_and_free(void* argument)
{
    struct worker* worker = argument;
    unsigned char* kept[N_KEPT] = {NULL};
    uint64_t kept_bytes[N_KEPT] = {0};
    uint64_t random = worker->mark;
    for (int round = 0; round < N_ROUNDS; ++round) {
        random = random * UINT64_C(6364136223846793005) + 1442695040888963407;
        int place = round % N_KEPT;
        if (kept[place] != NULL) {
            CHECK(kept[place][0] == worker->mark && kept[place][kept_bytes[place] - 1] == worker->mark);
            CHECK(kvik_free(worker->pool, kept[place]) == KVIK_OK);
            kept[place] = NULL;
        }
        /* Mostly small, sometimes pages. */
        uint64_t size = 1 + (random >> 33) % ((random >> 20) % 8 == 0 ? 3 * MIB : 64 * 1024);
        void* memory = NULL;
        kvik_status status = kvik_alloc(worker->pool, size, UINT64_C(1) << (random >> 60), &memory);
        if (status == KVIK_NO_MEMORY) {
            continue;
        }
        CHECK(status == KVIK_OK);
        kept[place] = memory;
        kept_bytes[place] = size;
        kept[place][0] = kept[place][size - 1] = worker->mark;
    }
    for (int place = 0; place < N_KEPT; ++place) {
        CHECK(kvik_free(worker->pool, kept[place]) == KVIK_OK);
    }
    return NULL;
}

static void many_threads(void)
{
    kvik_pool* pool = open_pool("threads", 0, 48 * MIB);
    struct worker workers[N_THREADS];
    for (int i = 0; i < N_THREADS; ++i) {
        workers[i].pool = pool;
        workers[i].mark = (unsigned char) (i + 1);
        CHECK(pthread_create(&workers[i].thread, NULL, take_and_free, &workers[i]) == 0);
    }
    for (int i = 0; i < N_THREADS; ++i) {
        CHECK(pthread_join(workers[i].thread, NULL) == 0);
    }
    CHECK(stats_of(pool).n_allocations == 0);
    CHECK(kvik_trim(pool, NULL) == KVIK_OK && stats_of(pool).held_bytes == 0);
    CHECK(kvik_close(pool) == KVIK_OK);
}

int main(void)
{
    sizes_and_alignments();
    one_limit_with_blocks();
    bypass();
    kvcached_functions();
    older_statistics();
    many_threads();
    return 0;
}
