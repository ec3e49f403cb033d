/* Every function of both headers: what it does, and how it answers what it cannot do. */

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "kvcached_trtllm.h"

static kvik_pool* open_pool(const char* ipc_name, uint64_t block_bytes, uint64_t n_blocks)
{
    kvik_config config = config_of(ipc_name, block_bytes, n_blocks);
    kvik_pool* pool = NULL;
    CHECK(kvik_open(&config, &pool) == KVIK_OK);
    CHECK(pool != NULL);
    return pool;
}

static void check_refused(const kvik_config* config, kvik_status status)
{
    kvik_pool* pool = (kvik_pool*) config;
    CHECK(kvik_open(config, &pool) == status);
    CHECK(pool == NULL);
    CHECK(strlen(kvik_last_error(NULL)) > 0);
}

static void configurations(void)
{
    kvik_config config;
    CHECK(kvik_abi_version() == KVIK_ABI_VERSION);
    CHECK(kvik_config_init(NULL, sizeof config) == KVIK_ERROR_INVALID);
    CHECK(kvik_config_init(&config, 8) == KVIK_ERROR_INVALID);
    config = config_of("config", MIB, 8);
    CHECK(config.size == sizeof config && config.device == KVIK_DEVICE_HOST && config.n_buffers == 1);
    CHECK(config.weight == 1 && config.max_bytes == UINT64_MAX);

    CHECK(kvik_open(&config, NULL) == KVIK_ERROR_INVALID);
    check_refused(NULL, KVIK_ERROR_INVALID);
    kvik_config bad = config;
    bad.size = 0;
    check_refused(&bad, KVIK_ERROR_INVALID);
    bad = config;
    bad.flags = 1u << 31;
    check_refused(&bad, KVIK_ERROR_INVALID);
    bad = config;
    bad.block_bytes = 0;
    check_refused(&bad, KVIK_ERROR_INVALID);
    bad = config;
    bad.n_blocks = UINT64_MAX;
    check_refused(&bad, KVIK_ERROR_INVALID);
    bad = config;
    bad.page_bytes = MIB;
    check_refused(&bad, KVIK_ERROR_INVALID);
    bad = config;
    bad.weight = 0;
    check_refused(&bad, KVIK_ERROR_INVALID);
    bad = config;
    bad.max_bytes = MIB;
    check_refused(&bad, KVIK_ERROR_INVALID);
    bad = config;
    bad.ipc_name = "../escape";
    check_refused(&bad, KVIK_ERROR_INVALID);
    bad = config;
    bad.label = "\xff\xfe";
    check_refused(&bad, KVIK_ERROR_INVALID);
    bad = config;
    bad.directory = "/nowhere/at/all";
    check_refused(&bad, KVIK_ERROR_LEDGER);
    CHECK(strstr(kvik_last_error(NULL), "/nowhere/at/all") != NULL);
    bad = config;
    bad.device = 4711;
    check_refused(&bad, KVIK_ERROR_NO_DEVICE);

    /* A structure of a newer header works as long as what is new is not used. */
    struct {
        kvik_config known;
        uint64_t unknown;
    } newer;
    CHECK(kvik_config_init(&newer.known, sizeof newer) == KVIK_OK);
    newer.known.ipc_name = "newer";
    newer.unknown = 1;
    check_refused(&newer.known, KVIK_ERROR_INVALID);
    newer.unknown = 0;
    kvik_pool* pool = NULL;
    CHECK(kvik_open(&newer.known, &pool) == KVIK_OK);
    CHECK(kvik_close(pool) == KVIK_OK);
    CHECK(strcmp(kvik_status_name(KVIK_ERROR_FORKED), "KVIK_ERROR_FORKED") == 0);
    CHECK(strcmp(kvik_status_name(99), "unknown status") == 0);
}

static void blocks(void)
{
    kvik_pool* pool = open_pool("blocks", MIB, 8);
    void* taken[9];
    CHECK(kvik_alloc_blocks(pool, 8, taken) == KVIK_OK);
    for (int i = 0; i < 8; ++i) {
        memset(taken[i], i + 1, MIB);
    }
    for (int i = 0; i < 8; ++i) {
        const unsigned char* bytes = taken[i];
        CHECK(bytes[0] == i + 1 && bytes[MIB - 1] == i + 1);
        uint32_t index;
        void* address;
        CHECK(kvik_block_index(pool, bytes + 17, &index) == KVIK_OK);
        CHECK((char*) kvik_base_address(pool) + index * MIB == (char*) taken[i]);
        CHECK(kvik_block_address(pool, index, &address) == KVIK_OK && address == taken[i]);
    }
    kvik_stats stats = stats_of(pool);
    CHECK(stats.n_used_blocks == 8 && stats.n_available_blocks == 0 && stats.block_bytes == MIB);
    CHECK(stats.held_bytes == 8 * MIB && stats.n_used_pages == 4 && stats.n_blocks == 8);

    /* All or nothing, and nothing is written where nothing is given. */
    void* untouched = taken;
    CHECK(kvik_alloc_blocks(pool, 1, &untouched) == KVIK_NO_MEMORY && untouched == taken);
    CHECK(strlen(kvik_last_error(pool)) > 0);
    CHECK(kvik_alloc_blocks(pool, SIZE_MAX / 16, &untouched) == KVIK_NO_MEMORY);
    CHECK(kvik_alloc_blocks(pool, SIZE_MAX, &untouched) == KVIK_ERROR_INVALID);
    CHECK(kvik_alloc_blocks(pool, 1, NULL) == KVIK_ERROR_INVALID);
    CHECK(kvik_alloc_blocks(pool, 0, NULL) == KVIK_OK);

    /* What is not allocated frees nothing, not even the blocks beside it. */
    void* wrong[3] = {taken[0], taken[0], NULL};
    CHECK(kvik_free_blocks(pool, wrong, 2) == KVIK_ERROR_NOT_ALLOCATED);
    wrong[1] = (char*) taken[1] + 1;
    CHECK(kvik_free_blocks(pool, wrong, 2) == KVIK_ERROR_NOT_ALLOCATED);
    wrong[1] = &stats;
    CHECK(kvik_free_blocks(pool, wrong, 2) == KVIK_ERROR_NOT_ALLOCATED);
    CHECK(kvik_free_blocks(pool, NULL, 2) == KVIK_ERROR_INVALID);
    CHECK(kvik_free_blocks(pool, taken, 1000) == KVIK_ERROR_NOT_ALLOCATED);
    CHECK(stats_of(pool).n_used_blocks == 8);
    wrong[1] = NULL;
    CHECK(kvik_free_blocks(pool, wrong, 3) == KVIK_OK);
    CHECK(stats_of(pool).n_used_blocks == 7);
    CHECK(kvik_free_blocks(pool, taken, 1) == KVIK_ERROR_NOT_ALLOCATED);
    CHECK(strstr(kvik_last_error(pool), "free block") != NULL);
    CHECK(kvik_free_blocks(pool, NULL, 0) == KVIK_OK);

    /* The host has no work that an event could stand for. */
    CHECK(kvik_free_blocks_after(pool, taken + 1, 7, &stats) == KVIK_OK);
    CHECK(stats_of(pool).n_used_blocks == 0 && stats_of(pool).n_limbo_blocks == 0);

    uint32_t indices[2] = {77, 77};
    CHECK(kvik_alloc_block_indices(pool, 2, indices) == KVIK_OK);
    CHECK(indices[0] < 8 && indices[1] < 8 && indices[0] != indices[1]);
    CHECK(kvik_free_block_indices(pool, indices, 1) == KVIK_OK);
    CHECK(kvik_free_block_indices(pool, indices, 2) == KVIK_ERROR_NOT_ALLOCATED);
    CHECK(kvik_free_block_indices_after(pool, indices + 1, 1, NULL) == KVIK_OK);
    indices[0] = UINT32_MAX;
    CHECK(kvik_free_block_indices(pool, indices, 1) == KVIK_ERROR_NOT_ALLOCATED);

    uint64_t trimmed_bytes = 0;
    CHECK(kvik_trim(pool, &trimmed_bytes) == KVIK_OK && trimmed_bytes == 8 * MIB);
    CHECK(kvik_trim(pool, NULL) == KVIK_OK);
    CHECK(stats_of(pool).held_bytes == 0);

    void* address = NULL;
    uint32_t index = 0;
    CHECK(kvik_block_address(pool, 8, &address) == KVIK_ERROR_INVALID);
    CHECK(kvik_block_address(pool, 0, NULL) == KVIK_ERROR_INVALID);
    CHECK(kvik_block_index(pool, NULL, &index) == KVIK_ERROR_NOT_ALLOCATED);
    CHECK(kvik_block_index(pool, kvik_base_address(pool), NULL) == KVIK_ERROR_INVALID);
    CHECK(kvik_get_stats(pool, NULL) == KVIK_ERROR_INVALID);
    stats.size = 8;
    CHECK(kvik_get_stats(pool, &stats) == KVIK_ERROR_INVALID);
    CHECK(kvik_close(pool) == KVIK_OK);
}

static void null_block(void)
{
    kvik_config config = config_of("null_block", MIB, 3);
    config.flags = KVIK_FLAG_NULL_BLOCK | KVIK_FLAG_NO_PREALLOCATION;
    kvik_pool* pool = NULL;
    CHECK(kvik_open(&config, &pool) == KVIK_OK);
    uint32_t indices[3];
    CHECK(kvik_alloc_block_indices(pool, 3, indices) == KVIK_OK);
    CHECK(indices[0] != 0 && indices[1] != 0 && indices[2] != 0);
    uint32_t zero = 0;
    CHECK(kvik_free_block_indices(pool, &zero, 1) == KVIK_ERROR_NOT_ALLOCATED);
    CHECK(stats_of(pool).n_used_blocks == 4);
    CHECK(kvik_close(pool) == KVIK_OK);
}

static void buffers(void)
{
    kvik_config config = config_of("buffers", MIB, 4);
    config.n_buffers = 3;
    kvik_pool* pool = NULL;
    CHECK(kvik_open(&config, &pool) == KVIK_OK);
    kvik_stats stats = stats_of(pool);
    void* block;
    CHECK(kvik_alloc_blocks(pool, 1, &block) == KVIK_OK);
    for (int buffer = 0; buffer < 3; ++buffer) {
        memset((char*) block + (uint64_t) buffer * stats.buffer_stride_bytes, 1, MIB);
    }
    CHECK(stats_of(pool).held_bytes == 6 * MIB);
    CHECK(kvik_close(pool) == KVIK_OK);
}

struct reclaim {
    kvik_pool* pool;
    void* taken[8];
    _Atomic uint64_t asked_bytes;
    _Atomic int closed_from_inside;
};

static void on_reclaim(void* user_data, uint64_t n_bytes)
{
    struct reclaim* reclaim = user_data;
    reclaim->closed_from_inside = kvik_close(reclaim->pool);
    CHECK(kvik_free_blocks(reclaim->pool, reclaim->taken, 8) == KVIK_OK);
    CHECK(kvik_set_reclaim_callback(reclaim->pool, NULL, NULL) == KVIK_OK);
    reclaim->asked_bytes = n_bytes;
}

static void limits(void)
{
    struct reclaim reclaim;
    memset(&reclaim, 0, sizeof reclaim);
    reclaim.pool = open_pool("limits", MIB, 8);
    CHECK(kvik_alloc_blocks(reclaim.pool, 8, reclaim.taken) == KVIK_OK);
    CHECK(kvik_set_reclaim_callback(reclaim.pool, on_reclaim, &reclaim) == KVIK_OK);
    CHECK(kvik_set_limit(reclaim.pool, 2 * MIB, 5) == KVIK_OK);
    EVENTUALLY(reclaim.asked_bytes == 6 * MIB);
    CHECK(reclaim.closed_from_inside == KVIK_ERROR_INVALID);
    EVENTUALLY(stats_of(reclaim.pool).held_bytes <= 2 * MIB);
    CHECK(kvik_set_limit(reclaim.pool, 4 * MIB, 4) == KVIK_STALE);
    CHECK(kvik_set_limit(reclaim.pool, 4 * MIB, 5) == KVIK_ERROR_INVALID);
    CHECK(kvik_alloc_blocks(reclaim.pool, 3, reclaim.taken) == KVIK_NO_MEMORY);
    CHECK(strstr(kvik_last_error(reclaim.pool), "limit") != NULL);
    CHECK(kvik_set_limit(reclaim.pool, UINT64_MAX, 0) == KVIK_OK);
    EVENTUALLY(kvik_alloc_blocks(reclaim.pool, 8, reclaim.taken) == KVIK_OK);
    CHECK(kvik_close(reclaim.pool) == KVIK_OK);
}

static void on_excess(void* user_data, uint64_t n_bytes)
{
    *(_Atomic uint64_t*) user_data = n_bytes;
}

static void chunks_and_admission(void)
{
    kvik_config config = config_of("chunks", 0, 0);
    config.max_bytes = 8 * MIB;
    kvik_pool* pool = NULL;
    CHECK(kvik_open(&config, &pool) == KVIK_OK);
    CHECK(kvik_base_address(pool) == NULL);
    void* block;
    CHECK(kvik_alloc_blocks(pool, 1, &block) == KVIK_NO_MEMORY);

    uint64_t page_bytes = stats_of(pool).page_bytes;
    uint64_t chunks[5];
    CHECK(kvik_acquire_chunks(pool, 5, chunks) == KVIK_NO_MEMORY);
    CHECK(kvik_acquire_chunks(pool, 1, NULL) == KVIK_ERROR_INVALID);
    CHECK(kvik_acquire_chunks(pool, SIZE_MAX / 16, chunks) == KVIK_NO_MEMORY);
    CHECK(kvik_acquire_chunks(pool, 2, chunks) == KVIK_OK);
    CHECK(stats_of(pool).chunk_bytes == 2 * page_bytes && stats_of(pool).held_bytes == 2 * page_bytes);
    for (int i = 0; i < 2; ++i) {
        char* bytes = mmap(NULL, page_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, (int) chunks[i], 0);
        CHECK(bytes != MAP_FAILED);
        memset(bytes, 7, page_bytes);
        CHECK(munmap(bytes, page_bytes) == 0);
    }
    uint64_t wrong[2] = {chunks[0], chunks[0]};
    CHECK(kvik_release_chunks(pool, wrong, 2) == KVIK_ERROR_NOT_ALLOCATED);
    wrong[1] = 1000000;
    CHECK(kvik_release_chunks(pool, wrong, 2) == KVIK_ERROR_NOT_ALLOCATED);
    CHECK(stats_of(pool).chunk_bytes == 2 * page_bytes);
    CHECK(kvik_release_chunks(pool, chunks, 1) == KVIK_OK);
    CHECK(kvik_release_chunks(pool, chunks, 1) == KVIK_ERROR_NOT_ALLOCATED);
    CHECK(stats_of(pool).held_bytes == page_bytes);

    CHECK(kvik_admit(pool, 8 * MIB) == KVIK_NO_MEMORY);
    CHECK(kvik_admit(pool, UINT64_MAX) == KVIK_NO_MEMORY);
    CHECK(kvik_admit(pool, 1) == KVIK_OK);
    CHECK(kvik_admit(pool, 4 * MIB) == KVIK_OK);
    CHECK(stats_of(pool).admitted_bytes == 6 * MIB && stats_of(pool).held_bytes == 8 * MIB);
    CHECK(kvik_admit(pool, 1) == KVIK_NO_MEMORY);

    /* A limit below what was admitted asks for it. */
    _Atomic uint64_t asked_bytes = 0;
    CHECK(kvik_set_reclaim_callback(pool, on_excess, &asked_bytes) == KVIK_OK);
    CHECK(kvik_set_limit(pool, 2 * MIB, 0) == KVIK_OK);
    EVENTUALLY(asked_bytes == 6 * MIB);
    CHECK(kvik_retire(pool, 8 * MIB) == KVIK_ERROR_NOT_ALLOCATED);
    CHECK(kvik_retire(pool, 6 * MIB) == KVIK_OK);
    CHECK(kvik_retire(pool, 1) == KVIK_ERROR_NOT_ALLOCATED);
    CHECK(stats_of(pool).held_bytes == page_bytes);
    CHECK(kvik_close(pool) == KVIK_OK);
}

/* Idle pages of the pool itself are no reason to refuse. */
static void parked_pages_make_room(void)
{
    kvik_config config = config_of("room", MIB, 8);
    config.max_bytes = 8 * MIB;
    kvik_pool* pool = NULL;
    CHECK(kvik_open(&config, &pool) == KVIK_OK);
    void* taken[8];
    CHECK(kvik_alloc_blocks(pool, 8, taken) == KVIK_OK);
    CHECK(kvik_admit(pool, 2 * MIB) == KVIK_NO_MEMORY);
    CHECK(kvik_free_blocks(pool, taken, 8) == KVIK_OK);
    CHECK(kvik_admit(pool, 8 * MIB) == KVIK_OK);
    CHECK(kvik_close(pool) == KVIK_OK);
}

static void check_no_handle(kvik_pool* pool)
{
    void* block = NULL;
    uint32_t index = 0;
    uint64_t chunk = 0;
    kvik_stats stats;
    stats.size = sizeof stats;
    CHECK(kvik_alloc_blocks(pool, 1, &block) == KVIK_ERROR_HANDLE && block == NULL);
    CHECK(kvik_alloc_block_indices(pool, 1, &index) == KVIK_ERROR_HANDLE);
    CHECK(kvik_free_blocks(pool, &block, 1) == KVIK_ERROR_HANDLE);
    CHECK(kvik_free_block_indices(pool, &index, 1) == KVIK_ERROR_HANDLE);
    CHECK(kvik_free_blocks_after(pool, &block, 1, NULL) == KVIK_ERROR_HANDLE);
    CHECK(kvik_free_block_indices_after(pool, &index, 1, NULL) == KVIK_ERROR_HANDLE);
    CHECK(kvik_base_address(pool) == NULL);
    CHECK(kvik_block_address(pool, 0, &block) == KVIK_ERROR_HANDLE);
    CHECK(kvik_block_index(pool, &block, &index) == KVIK_ERROR_HANDLE);
    CHECK(kvik_get_stats(pool, &stats) == KVIK_ERROR_HANDLE);
    CHECK(kvik_set_limit(pool, 0, 0) == KVIK_ERROR_HANDLE);
    CHECK(kvik_set_reclaim_callback(pool, NULL, NULL) == KVIK_ERROR_HANDLE);
    CHECK(kvik_trim(pool, NULL) == KVIK_ERROR_HANDLE);
    CHECK(kvik_acquire_chunks(pool, 1, &chunk) == KVIK_ERROR_HANDLE);
    CHECK(kvik_release_chunks(pool, &chunk, 1) == KVIK_ERROR_HANDLE);
    CHECK(kvik_admit(pool, 1) == KVIK_ERROR_HANDLE);
    CHECK(kvik_retire(pool, 1) == KVIK_ERROR_HANDLE);
    CHECK(kvik_last_error(pool) != NULL);
}

static void handles(void)
{
    kvik_pool* pool = open_pool("handles", MIB, 8);
    CHECK(kvik_close(pool) == KVIK_OK);
    check_no_handle(pool);
    check_no_handle(NULL);
    check_no_handle((kvik_pool*) (uintptr_t) 0xdeadbeef);
    check_no_handle((kvik_pool*) (uintptr_t) &pool);
    CHECK(kvik_close(pool) == KVIK_ERROR_HANDLE);
    CHECK(kvik_close(NULL) == KVIK_OK);
    /* The place of a closed pool is used again, and its old handle still refused. */
    kvik_pool* next = open_pool("handles", MIB, 8);
    check_no_handle(pool);
    CHECK(kvik_close(next) == KVIK_OK);
}

static void eight_functions(void)
{
    CHECK(kvcached_init_trtllm(-1, 16 * MIB, 0) == NULL);
    CHECK(kvcached_init_trtllm(-1, 16 * MIB, -1) == NULL);
    CHECK(kvcached_init_trtllm(-2, 16 * MIB, 1 << 20) == NULL);
    CHECK(kvcached_init_trtllm(-1, 0, 1 << 20) == NULL);
    CHECK(kvcached_init_trtllm(-1, MIB, 1 << 20) == NULL);
    CHECK(strstr(kvik_last_error(NULL), "2097152") != NULL);

    CHECK(setenv("KVIK_MEMORY_IPC_NAME", "eight", 1) == 0);
    kvcached_ctx_t ctx = kvcached_init_trtllm(-1, 8 * MIB, 1 << 20);
    CHECK(ctx != NULL);
    char file[4096];
    snprintf(file, sizeof file, "%s/eight", getenv("KVIK_MEMORY_DIR"));
    CHECK(access(file, F_OK) == 0);
    CHECK(kvcached_available_memory_trtllm(ctx) == 8 * MIB);
    CHECK(kvcached_used_memory_trtllm(ctx) == 0);
    void* block = kvcached_alloc_block_trtllm(ctx);
    CHECK(block != NULL && block == kvik_base_address((kvik_pool*) ctx));
    memset(block, 1, MIB);
    void* taken[8] = {0};
    CHECK(kvcached_alloc_blocks_trtllm(ctx, 8, taken) == 0 && taken[0] == NULL);
    CHECK(kvcached_alloc_blocks_trtllm(ctx, 7, taken) == 7);
    CHECK(kvcached_alloc_blocks_trtllm(ctx, 0, taken) == 0);
    CHECK(kvcached_alloc_blocks_trtllm(ctx, -1, taken) == 0);
    CHECK(kvcached_alloc_blocks_trtllm(ctx, 1, NULL) == 0);
    CHECK(kvcached_alloc_block_trtllm(ctx) == NULL);
    CHECK(kvcached_used_memory_trtllm(ctx) == 8 * MIB && kvcached_available_memory_trtllm(ctx) == 0);
    kvcached_free_block_trtllm(ctx, block);
    kvcached_free_block_trtllm(ctx, block);
    kvcached_free_block_trtllm(ctx, NULL);
    kvcached_free_block_trtllm(ctx, &block);
    CHECK(kvcached_used_memory_trtllm(ctx) == 7 * MIB);
    kvcached_free_blocks_trtllm(ctx, taken, -1);
    kvcached_free_blocks_trtllm(ctx, NULL, 7);
    CHECK(kvcached_used_memory_trtllm(ctx) == 7 * MIB);
    kvcached_free_blocks_trtllm(ctx, taken, 7);
    CHECK(kvcached_used_memory_trtllm(ctx) == 0 && kvcached_available_memory_trtllm(ctx) == 8 * MIB);
    kvcached_shutdown_trtllm(ctx);
    kvcached_shutdown_trtllm(ctx);
    CHECK(access(file, F_OK) != 0);

    for (int i = 0; i < 2; ++i) {
        kvcached_ctx_t none = i == 0 ? NULL : ctx;
        kvcached_shutdown_trtllm(none);
        CHECK(kvcached_alloc_block_trtllm(none) == NULL);
        kvcached_free_block_trtllm(none, block);
        CHECK(kvcached_alloc_blocks_trtllm(none, 1, taken) == 0);
        kvcached_free_blocks_trtllm(none, taken, 1);
        CHECK(kvcached_available_memory_trtllm(none) == 0 && kvcached_used_memory_trtllm(none) == 0);
    }

    /* Without a name there is a default, and settings that are wrong are told. */
    CHECK(unsetenv("KVIK_MEMORY_IPC_NAME") == 0);
    ctx = kvcached_init_trtllm(-1, 8 * MIB, 3 << 20);
    CHECK(ctx != NULL && kvcached_alloc_block_trtllm(ctx) != NULL);
    kvcached_shutdown_trtllm(ctx);
    CHECK(setenv("KVCACHED_PAGE_SIZE_MB", "3", 1) == 0);
    CHECK(kvcached_init_trtllm(-1, 8 * MIB, 1 << 20) == NULL);
    CHECK(strstr(kvik_last_error(NULL), "KVCACHED_PAGE_SIZE_MB") != NULL);
    CHECK(unsetenv("KVCACHED_PAGE_SIZE_MB") == 0);
}

/* A signal that the engine's threads block waits for them; no thread of the library takes it. */
static void signals(void)
{
    kvik_pool* pool = open_pool("signals", MIB, 8);
    sigset_t mask;
    CHECK(sigemptyset(&mask) == 0 && sigaddset(&mask, SIGUSR1) == 0);
    CHECK(pthread_sigmask(SIG_BLOCK, &mask, NULL) == 0);
    CHECK(kill(getpid(), SIGUSR1) == 0);
    /* A thread that takes it does so at once, and ends the program. */
    struct timespec start;
    struct timespec now;
    CHECK(clock_gettime(CLOCK_MONOTONIC, &start) == 0);
    do {
        sigset_t pending;
        CHECK(sigpending(&pending) == 0 && sigismember(&pending, SIGUSR1));
        sched_yield();
        CHECK(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
    } while ((now.tv_sec - start.tv_sec) * 1000 + (now.tv_nsec - start.tv_nsec) / 1000000 < 200);
    int signal = 0;
    CHECK(sigwait(&mask, &signal) == 0 && signal == SIGUSR1);
    CHECK(pthread_sigmask(SIG_UNBLOCK, &mask, NULL) == 0);
    CHECK(kvik_close(pool) == KVIK_OK);
}

int main(void)
{
    signals();
    configurations();
    blocks();
    null_block();
    buffers();
    limits();
    chunks_and_admission();
    parked_pages_make_room();
    handles();
    eight_functions();
    return 0;
}
