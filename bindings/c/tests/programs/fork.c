/* A fork: the parent's pool is the parent's, and the child opens one of its own. */

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static _Atomic int is_over;

static void* keep_busy(void* pool)
{
    while (!is_over) {
        void* block;
        if (kvik_alloc_blocks(pool, 1, &block) == KVIK_OK) {
            CHECK(kvik_free_blocks(pool, &block, 1) == KVIK_OK);
        }
    }
    return NULL;
}

static void child(kvik_pool* parents, void* block, const kvik_config* config)
{
    uint32_t index = 0;
    uint64_t chunk = 0;
    kvik_stats stats;
    stats.size = sizeof stats;
    CHECK(kvik_alloc_blocks(parents, 1, &block) == KVIK_ERROR_FORKED);
    CHECK(kvik_alloc_block_indices(parents, 1, &index) == KVIK_ERROR_FORKED);
    CHECK(kvik_free_blocks(parents, &block, 1) == KVIK_ERROR_FORKED);
    CHECK(kvik_get_stats(parents, &stats) == KVIK_ERROR_FORKED);
    CHECK(kvik_set_limit(parents, 0, 0) == KVIK_ERROR_FORKED);
    CHECK(kvik_trim(parents, NULL) == KVIK_ERROR_FORKED);
    CHECK(kvik_acquire_chunks(parents, 1, &chunk) == KVIK_ERROR_FORKED);
    CHECK(kvik_admit(parents, 1) == KVIK_ERROR_FORKED);
    CHECK(kvik_base_address(parents) == NULL);
    CHECK(strstr(kvik_last_error(parents), "fork") != NULL);
    CHECK(kvik_close(parents) == KVIK_ERROR_FORKED);

    kvik_pool* own = NULL;
    CHECK(kvik_open(config, &own) == KVIK_OK);
    CHECK(own != parents);
    void* taken[2];
    CHECK(kvik_alloc_blocks(own, 2, taken) == KVIK_OK);
    memset(taken[0], 9, MIB);
    /* The group is shared with the parent, which holds four of its pages. */
    CHECK(stats_of(own).claimable_bytes <= 16 * MIB);
    CHECK(kvik_alloc_blocks(parents, 1, &block) == KVIK_ERROR_FORKED);
    CHECK(kvik_close(own) == KVIK_OK);
    CHECK(kvik_close(own) == KVIK_ERROR_HANDLE);
    _exit(0);
}

int main(void)
{
    kvik_config config = config_of("fork", MIB, 16);
    config.max_bytes = 24 * MIB;
    kvik_pool* pool = NULL;
    CHECK(kvik_open(&config, &pool) == KVIK_OK);
    void* taken[8];
    CHECK(kvik_alloc_blocks(pool, 8, taken) == KVIK_OK);
    for (int i = 0; i < 8; ++i) {
        memset(taken[i], i + 1, MIB);
    }
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, keep_busy, pool) == 0);
    for (int round = 0; round < 20; ++round) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            child(pool, taken[0], &config);
        }
        int status = -1;
        CHECK(waitpid(pid, &status, 0) == pid);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    is_over = 1;
    CHECK(pthread_join(thread, NULL) == 0);
    for (int i = 0; i < 8; ++i) {
        const unsigned char* bytes = taken[i];
        CHECK(bytes[0] == i + 1 && bytes[MIB - 1] == i + 1);
    }
    CHECK(stats_of(pool).n_used_blocks == 8);
    CHECK(kvik_free_blocks(pool, taken, 8) == KVIK_OK);
    CHECK(kvik_close(pool) == KVIK_OK);
    return 0;
}
