/* Many threads on one pool: no block is given out twice, and a close under them is safe. */

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "check.h"

#define N_THREADS 4
#define N_ROUNDS 2000
#define BLOCK_BYTES (64 * 1024)

struct worker {
    kvik_pool* pool;
    unsigned char mark;
    pthread_t thread;
};

/* Marks its blocks and finds its marks again: no other thread has them. */
static void* take_and_free(void* argument)
{
    struct worker* worker = argument;
    void* taken[8];
    for (int round = 0; round < N_ROUNDS; ++round) {
        size_t n_blocks = 1 + (size_t) (round + worker->mark) % 8;
        kvik_status status = kvik_alloc_blocks(worker->pool, n_blocks, taken);
        if (status == KVIK_NO_MEMORY) {
            continue;
        }
        CHECK(status == KVIK_OK);
        for (size_t i = 0; i < n_blocks; ++i) {
            memset(taken[i], worker->mark, 64);
        }
        sched_yield();
        for (size_t i = 0; i < n_blocks; ++i) {
            const unsigned char* bytes = taken[i];
            CHECK(bytes[0] == worker->mark && bytes[63] == worker->mark);
        }
        CHECK(kvik_free_blocks(worker->pool, taken, n_blocks) == KVIK_OK);
        /* Words of one thread stay where they are while others fail. */
        CHECK(kvik_free_blocks(worker->pool, taken, SIZE_MAX / 16) == KVIK_ERROR_NOT_ALLOCATED);
        CHECK(strstr(kvik_last_error(worker->pool), "so many") != NULL);
    }
    return NULL;
}

static _Atomic int n_running;

/* Uses a pool until it is closed. */
static void* use_until_closed(void* argument)
{
    struct worker* worker = argument;
    ++n_running;
    for (;;) {
        uint32_t block;
        kvik_status status = kvik_alloc_block_indices(worker->pool, 1, &block);
        if (status == KVIK_ERROR_HANDLE) {
            return NULL;
        }
        CHECK(status == KVIK_OK || status == KVIK_NO_MEMORY);
        if (status == KVIK_OK) {
            status = kvik_free_block_indices(worker->pool, &block, 1);
            CHECK(status == KVIK_OK || status == KVIK_ERROR_HANDLE);
        }
    }
}

static void run(kvik_pool* pool, void* (*work)(void*), int is_closing)
{
    struct worker workers[N_THREADS];
    for (int i = 0; i < N_THREADS; ++i) {
        workers[i].pool = pool;
        workers[i].mark = (unsigned char) (i + 1);
        CHECK(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0);
    }
    if (is_closing) {
        EVENTUALLY(n_running == N_THREADS);
        CHECK(kvik_close(pool) == KVIK_OK);
    }
    for (int i = 0; i < N_THREADS; ++i) {
        CHECK(pthread_join(workers[i].thread, NULL) == 0);
    }
}

int main(void)
{
    kvik_config config = config_of("threads", BLOCK_BYTES, N_THREADS * 8 + 2);
    kvik_pool* pool = NULL;
    CHECK(kvik_open(&config, &pool) == KVIK_OK);
    run(pool, use_until_closed, 1);
    CHECK(kvik_open(&config, &pool) == KVIK_OK);
    run(pool, take_and_free, 0);
    CHECK(stats_of(pool).n_used_blocks == 0);
    CHECK(kvik_close(pool) == KVIK_OK);
    return 0;
}
