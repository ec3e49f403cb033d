/* KV inside of blocks: tables of pointers to K and V, and conversion of a sequence out of a pool. */

#include <string.h>

#include "check.h"
#include "kvcached_trtllm.h"

#define N_LAYERS 4
#define N_HEADS 2
#define HEAD_DIM 8
#define BLOCK_TOKENS 32
#define PLANE_BYTES (N_HEADS * BLOCK_TOKENS * HEAD_DIM * sizeof(uint16_t))
#define BLOCK_BYTES (N_LAYERS * 2 * PLANE_BYTES)

static void tables(uint32_t n_buffers)
{
    kvik_config config = config_of("tables", BLOCK_BYTES / n_buffers, 64);
    config.n_buffers = n_buffers;
    kvik_pool* pool = NULL;
    CHECK(kvik_open(&config, &pool) == KVIK_OK);
    uint32_t blocks[3];
    char* keys[N_LAYERS * 3];
    char* values[N_LAYERS * 3];
    CHECK(kvik_alloc_block_indices(pool, 3, blocks) == KVIK_OK);
    CHECK(kvik_block_pointers(pool, N_LAYERS, blocks, 3, (void**) keys, (void**) values) == KVIK_OK);
    kvik_stats stats = stats_of(pool);
    uint32_t n_per_buffer = N_LAYERS * 2 / n_buffers;
    for (uint32_t plane = 0; plane < N_LAYERS * 2; ++plane) {
        for (int i = 0; i < 3; ++i) {
            char* expected = (char*) kvik_base_address(pool) + plane / n_per_buffer * stats.buffer_stride_bytes
                + blocks[i] * stats.block_bytes + plane % n_per_buffer * PLANE_BYTES;
            char* found = (plane % 2 == 0 ? keys : values)[plane / 2 * 3 + (uint32_t) i];
            CHECK(found == expected);
            memset(found, (int) plane, PLANE_BYTES);
        }
    }
    void* before = keys[0];
    uint32_t wrong[2] = {blocks[0], 1u << 20};
    CHECK(kvik_block_pointers(pool, N_LAYERS, wrong, 2, (void**) keys, (void**) values) == KVIK_ERROR_INVALID);
    CHECK(kvik_block_pointers(pool, 0, blocks, 3, (void**) keys, (void**) values) == KVIK_ERROR_INVALID);
    CHECK(kvik_block_pointers(pool, N_LAYERS, NULL, 3, (void**) keys, (void**) values) == KVIK_ERROR_INVALID);
    CHECK(kvik_block_pointers(pool, N_LAYERS, blocks, 3, NULL, (void**) values) == KVIK_ERROR_INVALID);
    CHECK(kvik_block_pointers(pool, N_LAYERS, blocks, SIZE_MAX, (void**) keys, (void**) values) == KVIK_ERROR_INVALID);
    CHECK(kvik_block_pointers(NULL, N_LAYERS, blocks, 3, (void**) keys, (void**) values) == KVIK_ERROR_HANDLE);
    CHECK(keys[0] == before);
    /* One latent a layer. */
    CHECK(kvik_block_pointers(pool, N_LAYERS * 2, blocks, 1, (void**) keys, NULL) == KVIK_OK);
    CHECK(kvik_close(pool) == KVIK_OK);
}

static void tables_by_address(void)
{
    kvcached_ctx_t ctx = kvcached_init_trtllm(-1, 4 * MIB, (int) BLOCK_BYTES);
    CHECK(ctx != NULL);
    void* blocks[2];
    void* keys[N_LAYERS * 2];
    void* values[N_LAYERS * 2];
    CHECK(kvcached_alloc_blocks_trtllm(ctx, 2, blocks) == 2);
    CHECK(kvcached_block_pointers_trtllm(ctx, N_LAYERS, blocks, 2, keys, values) == 2);
    CHECK(keys[0] == blocks[0] && keys[1] == blocks[1]);
    CHECK((char*) values[2 * 3 + 1] == (char*) blocks[1] + 7 * PLANE_BYTES);
    blocks[1] = (char*) blocks[1] + 1;
    CHECK(kvcached_block_pointers_trtllm(ctx, N_LAYERS, blocks, 2, keys, values) == 0);
    CHECK(kvcached_block_pointers_trtllm(ctx, -1, blocks, 1, keys, values) == 0);
    CHECK(kvcached_block_pointers_trtllm(ctx, 3, blocks, 1, keys, values) == 0);
    kvcached_shutdown_trtllm(ctx);
}

/* A sequence of 40 tokens in TensorRT-LLM's blocks of 32 becomes one in vLLM's blocks of 16, and comes back. */
static void conversion(void)
{
    enum { N_TOKENS = 40 };
    uint16_t trtllm[4 * BLOCK_BYTES / 2];
    uint16_t again[4 * BLOCK_BYTES / 2];
    uint16_t vllm[5 * BLOCK_BYTES / 4];
    for (size_t i = 0; i < sizeof trtllm / 2; ++i) {
        trtllm[i] = (uint16_t) i;
    }
    memset(vllm, 0xee, sizeof vllm);
    memcpy(again, trtllm, sizeof trtllm);
    uint32_t trtllm_table[2] = {3, 0};
    uint32_t vllm_table[3] = {4, 1, 2};
    kvik_kv_shape shape = {sizeof shape, N_LAYERS, N_TOKENS, N_HEADS, HEAD_DIM, 2, 0};
    kvik_kv_buffer source = {sizeof source, KVIK_LAYOUT_TRTLLM, BLOCK_TOKENS, trtllm, 0, 4, trtllm_table, 2};
    kvik_kv_buffer dest = {sizeof dest, KVIK_LAYOUT_KV_FIRST_NHD, 16, vllm, 0, 5, vllm_table, 3};
    CHECK(kvik_kv_bytes(&shape, &source, &source.n_bytes) == KVIK_OK && source.n_bytes == sizeof trtllm);
    CHECK(kvik_kv_bytes(&shape, &dest, &dest.n_bytes) == KVIK_OK && dest.n_bytes == sizeof vllm);
    CHECK(kvik_convert_kv(&shape, &source, &dest) == KVIK_OK);
    for (int layer = 0; layer < N_LAYERS; ++layer) {
        for (int kv = 0; kv < 2; ++kv) {
            for (int token = 0; token < N_TOKENS; ++token) {
                for (int head = 0; head < N_HEADS; ++head) {
                    size_t from = ((((size_t) trtllm_table[token / 32] * N_LAYERS + (size_t) layer) * 2 + (size_t) kv)
                                          * N_HEADS
                                      + (size_t) head)
                            * BLOCK_TOKENS
                        + (size_t) token % 32;
                    size_t to = ((((size_t) layer * 2 + (size_t) kv) * 5 + vllm_table[token / 16]) * 16
                                    + (size_t) token % 16)
                            * N_HEADS
                        + (size_t) head;
                    CHECK(memcmp(trtllm + from * HEAD_DIM, vllm + to * HEAD_DIM, HEAD_DIM * 2) == 0);
                }
            }
        }
    }
    memset(trtllm, 0, sizeof trtllm);
    CHECK(kvik_convert_kv(&shape, &dest, &source) == KVIK_OK);
    CHECK(memcmp(trtllm + 3 * BLOCK_BYTES / 2, again + 3 * BLOCK_BYTES / 2, BLOCK_BYTES) == 0);
    CHECK(kvik_convert_kv(&shape, &source, NULL) == KVIK_ERROR_INVALID);
    dest.n_bytes -= 1;
    CHECK(kvik_convert_kv(&shape, &source, &dest) == KVIK_ERROR_INVALID);
    CHECK(strstr(kvik_last_error(NULL), "`dest` has") != NULL);
}

int main(void)
{
    tables(1);
    tables(N_LAYERS);
    tables(N_LAYERS * 2);
    tables_by_address();
    conversion();
    return 0;
}
