/* What only a GPU can show: blocks that are freed after an event, and chunks as the driver's handles. */

#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>

#include "check.h"
#include "kvcached_trtllm.h"

/* The driver's calls, of which there need not be a header. */
struct access {
    int location_type;
    int location_id;
    int flags;
};

static int (*cuInit)(unsigned);
static int (*cuDevicePrimaryCtxRetain)(void**, int);
static int (*cuCtxSetCurrent)(void*);
static int (*cuStreamCreate)(void**, unsigned);
static int (*cuStreamSynchronize)(void*);
static int (*cuEventCreate)(void**, unsigned);
static int (*cuEventRecord)(void*, void*);
static int (*cuEventDestroy)(void*);
static int (*cuLaunchHostFunc)(void*, void (*)(void*), void*);
static int (*cuMemsetD8)(uint64_t, unsigned char, size_t);
static int (*cuMemcpyDtoH)(void*, uint64_t, size_t);
static int (*cuMemAddressReserve)(uint64_t*, size_t, size_t, uint64_t, unsigned long long);
static int (*cuMemAddressFree)(uint64_t, size_t);
static int (*cuMemMap)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
static int (*cuMemUnmap)(uint64_t, size_t);
static int (*cuMemSetAccess)(uint64_t, size_t, const struct access*, size_t);

static void load(void* driver, const char* name, void* function)
{
    void* symbol = dlsym(driver, name);
    CHECK(symbol != NULL);
    memcpy(function, &symbol, sizeof symbol);
}

static void load_driver(void)
{
    void* driver = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(driver != NULL);
    load(driver, "cuInit", &cuInit);
    load(driver, "cuDevicePrimaryCtxRetain", &cuDevicePrimaryCtxRetain);
    load(driver, "cuCtxSetCurrent", &cuCtxSetCurrent);
    load(driver, "cuStreamCreate", &cuStreamCreate);
    load(driver, "cuStreamSynchronize", &cuStreamSynchronize);
    load(driver, "cuEventCreate", &cuEventCreate);
    load(driver, "cuEventRecord", &cuEventRecord);
    load(driver, "cuEventDestroy_v2", &cuEventDestroy);
    load(driver, "cuLaunchHostFunc", &cuLaunchHostFunc);
    load(driver, "cuMemsetD8_v2", &cuMemsetD8);
    load(driver, "cuMemcpyDtoH_v2", &cuMemcpyDtoH);
    load(driver, "cuMemAddressReserve", &cuMemAddressReserve);
    load(driver, "cuMemAddressFree", &cuMemAddressFree);
    load(driver, "cuMemMap", &cuMemMap);
    load(driver, "cuMemUnmap", &cuMemUnmap);
    load(driver, "cuMemSetAccess", &cuMemSetAccess);
    void* context;
    CHECK(cuInit(0) == 0 && cuDevicePrimaryCtxRetain(&context, 0) == 0 && cuCtxSetCurrent(context) == 0);
}

static _Atomic int may_go_on;

/* Work of a stream that is not over before it is told. */
static void wait_on_device(void* unused)
{
    (void) unused;
    while (!may_go_on) {
        sched_yield();
    }
}

static void fill_and_check(uint64_t address, unsigned char byte)
{
    unsigned char bytes[16];
    CHECK(cuMemsetD8(address, byte, MIB) == 0);
    CHECK(cuMemcpyDtoH(bytes, address + MIB - sizeof bytes, sizeof bytes) == 0);
    CHECK(bytes[0] == byte && bytes[15] == byte);
}

static void events(kvik_pool* pool)
{
    void* taken[64];
    void* stream;
    void* event;
    CHECK(kvik_alloc_blocks(pool, 32, taken) == KVIK_OK);
    for (int i = 0; i < 32; ++i) {
        fill_and_check((uint64_t) (uintptr_t) taken[i], (unsigned char) (i + 1));
    }
    enum { NON_BLOCKING = 1, DISABLE_TIMING = 2 };
    CHECK(cuStreamCreate(&stream, NON_BLOCKING) == 0 && cuEventCreate(&event, DISABLE_TIMING) == 0);
    CHECK(cuLaunchHostFunc(stream, wait_on_device, NULL) == 0 && cuEventRecord(event, stream) == 0);
    CHECK(kvik_free_blocks_after(pool, taken, 32, event) == KVIK_OK);
    /* The library has what it needs of the event. */
    CHECK(cuEventDestroy(event) == 0);
    CHECK(stats_of(pool).n_limbo_blocks == 32 && stats_of(pool).n_used_blocks == 0);
    CHECK(kvik_free_blocks(pool, taken, 32) == KVIK_ERROR_NOT_ALLOCATED);
    CHECK(kvik_alloc_blocks(pool, 64, taken) == KVIK_NO_MEMORY);
    uint64_t trimmed_bytes = 1;
    CHECK(kvik_trim(pool, &trimmed_bytes) == KVIK_OK);
    CHECK(stats_of(pool).n_limbo_blocks == 32 && stats_of(pool).n_used_pages == 16);
    may_go_on = 1;
    EVENTUALLY(stats_of(pool).n_limbo_blocks == 0);
    CHECK(kvik_alloc_blocks(pool, 64, taken) == KVIK_OK);

    /* An event that has passed frees at once, and so does none. */
    CHECK(cuEventCreate(&event, DISABLE_TIMING) == 0 && cuEventRecord(event, stream) == 0);
    CHECK(cuStreamSynchronize(stream) == 0);
    CHECK(kvik_free_blocks_after(pool, taken, 32, event) == KVIK_OK);
    CHECK(kvik_free_blocks_after(pool, taken + 32, 32, NULL) == KVIK_OK);
    EVENTUALLY(stats_of(pool).n_limbo_blocks == 0);
    CHECK(stats_of(pool).n_used_blocks == 0);
    CHECK(cuEventDestroy(event) == 0);
}

static void chunks(kvik_pool* pool)
{
    uint64_t numbers[3];
    uint64_t address;
    CHECK(kvik_acquire_chunks(pool, 3, numbers) == KVIK_OK);
    uint64_t page_bytes = stats_of(pool).page_bytes;
    CHECK(cuMemAddressReserve(&address, 3 * page_bytes, 0, 0, 0) == 0);
    for (int i = 0; i < 3; ++i) {
        CHECK(cuMemMap(address + (uint64_t) i * page_bytes, page_bytes, 0, numbers[i], 0) == 0);
    }
    enum { DEVICE = 1, READ_WRITE = 3 };
    struct access access = {DEVICE, 0, READ_WRITE};
    CHECK(cuMemSetAccess(address, 3 * page_bytes, &access, 1) == 0);
    fill_and_check(address + 2 * page_bytes - MIB / 2, 9);
    CHECK(cuMemUnmap(address, 3 * page_bytes) == 0 && cuMemAddressFree(address, 3 * page_bytes) == 0);
    CHECK(kvik_release_chunks(pool, numbers, 3) == KVIK_OK);
    CHECK(kvik_release_chunks(pool, numbers, 1) == KVIK_ERROR_NOT_ALLOCATED);
    CHECK(stats_of(pool).chunk_bytes == 0);
}

static void eight_functions(void)
{
    kvcached_ctx_t ctx = kvcached_init_trtllm(0, 256 * MIB, 1 << 20);
    CHECK(ctx != NULL);
    void* taken[64];
    CHECK(kvcached_alloc_blocks_trtllm(ctx, 64, taken) == 64);
    fill_and_check((uint64_t) (uintptr_t) taken[63], 5);
    kvcached_free_blocks_trtllm(ctx, taken, 64);
    CHECK(kvcached_used_memory_trtllm(ctx) == 0);
    kvcached_shutdown_trtllm(ctx);
}

int main(void)
{
    load_driver();
    kvik_config config = config_of("cuda", MIB, 64);
    config.device = 0;
    kvik_pool* pool = NULL;
    CHECK(kvik_open(&config, &pool) == KVIK_OK);
    CHECK(stats_of(pool).n_available_blocks == 64);
    events(pool);
    chunks(pool);
    CHECK(kvik_close(pool) == KVIK_OK);
    eight_functions();
    return 0;
}
