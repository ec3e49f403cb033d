/*
 * Elastic KV memory for TensorRT-LLM: the smallest interface, on top of the library of kvik.h.
 *
 * A context is a kvik_pool: after a cast, every function of kvik.h takes it, and
 * kvik_last_error((kvik_pool*) ctx) has words about a call that failed. Contexts are numbers, not
 * addresses: NULL, closed and inherited ones (after fork) are refused, never followed. Any thread may
 * call any function. The engines of one IPC name (KVIK_MEMORY_IPC_NAME or KVCACHED_IPC_NAME; by default
 * a name of the process group) share one limit.
 */

#ifndef KVCACHED_TRTLLM_H
#define KVCACHED_TRTLLM_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvcached_ctx* kvcached_ctx_t;
typedef kvcached_ctx_t kvcached_context_t;

/*
 * Opens a context without blocks, for kvcached_alloc: device_id and max_memory as in kvcached_init_trtllm.
 */
kvcached_ctx_t kvcached_init(int device_id, size_t max_memory);

/*
 * Takes size bytes at a multiple of alignment, a power of two up to 1 GiB; 0 is 256. Any context will do: its
 * blocks and its allocations are under one limit. Returns NULL where size is 0 or there is no memory now.
 */
void* kvcached_alloc(kvcached_ctx_t ctx, size_t size, size_t alignment);

/*
 * Frees what kvcached_alloc gave and returns 1, also for NULL, which does nothing. Returns 0, and changes nothing,
 * where ptr is not allocated or was freed before.
 */
int kvcached_free(kvcached_ctx_t ctx, void* ptr);

/*
 * With is_bypassed not 0, kvcached_alloc takes memory of the device's own allocator from now on, without a grant
 * and beyond any limit; with 0 it takes pages again. KVIK_MEMORY_BYPASS=1 in the environment starts contexts
 * bypassed. Returns 1, or 0 where ctx is no context.
 */
int kvcached_set_bypass(kvcached_ctx_t ctx, int is_bypassed);

/*
 * Opens a context on CUDA device device_id, or in the memory of the host with -1.
 *
 * max_memory is the limit of the group in bytes, where this engine is its first, and how many bytes of
 * blocks the context has addresses for. block_size is the bytes of one block. Addresses are reserved
 * here; memory is taken when blocks are. Returns NULL on failure; kvik_last_error(NULL) says why.
 */
kvcached_ctx_t kvcached_init_trtllm(
    int device_id,
    size_t max_memory,
    int block_size
);

/* Closes a context: its blocks are gone and its memory is free for all engines. NULL does nothing. */
void kvcached_shutdown_trtllm(kvcached_ctx_t ctx);

/*
 * Takes one block; NULL where there is no memory now. Blocks lie at multiples of block_size from
 * kvik_base_address, so the index of a block is (ptr - base) / block_size.
 */
void* kvcached_alloc_block_trtllm(kvcached_ctx_t ctx);

/* Frees one block. NULL does nothing; what is not allocated, or was freed before, is left alone. */
void kvcached_free_block_trtllm(kvcached_ctx_t ctx, void* ptr);

/* Takes num_blocks blocks or none; returns how many, which is num_blocks or 0. */
int kvcached_alloc_blocks_trtllm(
    kvcached_ctx_t ctx,
    int num_blocks,
    void** out_ptrs
);

/*
 * Frees num_blocks blocks, NULL among them passed over. If one is not allocated or is listed twice,
 * none is freed.
 */
void kvcached_free_blocks_trtllm(
    kvcached_ctx_t ctx,
    void** ptrs,
    int num_blocks
);

/*
 * Fills tables with the addresses of K and V of each layer: those of layer l and blocks[i] are
 * k_ptrs[l * num_blocks + i] and v_ptrs[l * num_blocks + i]. A block has, layer by layer, K and then V of its
 * tokens, all of one size; with v_ptrs NULL it has one latent a layer. Returns num_blocks, or 0 where a pointer is
 * no block or block_size cannot be divided so; then nothing is written.
 */
int kvcached_block_pointers_trtllm(
    kvcached_ctx_t ctx,
    int num_layers,
    void** blocks,
    int num_blocks,
    void** k_ptrs,
    void** v_ptrs
);

/* Bytes of blocks that one call would get now, by the limit and by what other engines hold. */
size_t kvcached_available_memory_trtllm(kvcached_ctx_t ctx);

/* Bytes of blocks that this context has taken. */
size_t kvcached_used_memory_trtllm(kvcached_ctx_t ctx);

#ifdef __cplusplus
}
#endif

#endif /* KVCACHED_TRTLLM_H */
