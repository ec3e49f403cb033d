"""Puts the buffers of SGLang's KV pools into memory of kvik."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

import kvik
from kvik.elastic.allocation import Allocation
from kvik.elastic.slab_memory import SlabMemory, pieces_of_layer
from kvik.elastic.slabs import Slabs
from kvik.sglang.elastic_settings import ElasticSettings

# Where a pool has its memory.
ATTRIBUTE = "kvik_slab_memory"

# The pools of this process with memory of kvik. One allocator has the books of one of them.
elastic_pools: "weakref.WeakSet[Any]" = weakref.WeakSet()


def slab_memory_of(pool: Any) -> SlabMemory | None:
    """The memory of a pool; `None` where it is not kvik's."""
    return getattr(pool, ATTRIBUTE, None)


def create_buffers(settings: ElasticSettings, create: Callable[[Any], None], pool: Any) -> None:
    """Runs SGLang's `_create_buffers` of a pool with memory of kvik, and takes what is behind the first page of tokens.

    SGLang writes unused values to that page.
    """
    refuse_unknown(pool)
    sizes = buffer_sizes(pool)
    options = {"max_bytes": settings.limit_bytes, "group": settings.group, "directory": settings.directory}
    with Allocation("SGLang", sizes, pool.store_dtype, settings.page_bytes, **options) as allocation:
        create(pool)
    buffers = named_buffers(pool)
    n_blocks = pool.size // pool.page_size + 1
    begin = allocation.memory.address
    pieces = [piece for name, tensor in buffers for piece in pieces_of_layer(name, tensor, n_blocks, begin)]
    block_bytes = max(piece.n_bytes for piece in pieces)
    slabs = Slabs.of_pages(n_blocks, block_bytes, settings.page_bytes)
    memory = SlabMemory(allocation.memory, allocation.buffer, slabs, sorted(pieces))
    if not memory.take([0]):
        raise kvik.KvikError(
            f"there is no memory for the first {memory.slab_bytes} bytes of KV: "
            f"{allocation.memory.claimable_bytes} bytes may be held"
        )
    setattr(pool, ATTRIBUTE, memory)
    elastic_pools.add(pool)


def refuse_unknown(pool: Any) -> None:
    """Ends the start for pools whose tokens are not all of one allocator, or that allocate in another way."""
    reasons = {
        "is of another kind": type(pool) not in (MHATokenToKVPool, MLATokenToKVPool),
        "is the second one": len(elastic_pools) > 0,
        "is quantized": getattr(pool, "is_quantized_kv_cache", False),
        "gets its memory after the capture of graphs": pool.post_capture_active,
        "has a layout of vectors": getattr(pool, "kv_cache_layout", "nhd") not in ("nhd", "hnd"),
        "has a memory pool of its own": bool(pool.custom_mem_pool),
        "is shared by the memory saver": pool.memory_saver_adapter.enabled,
        "has tokens that are no whole pages": pool.size % pool.page_size != 0,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise kvik.InvalidValueError(
                f"a KV pool, {type(pool).__name__}, {reason}; allowed with elastic memory: one MHATokenToKVPool or "
                "MLATokenToKVPool, without speculation, --enable-memory-saver and quantized KV"
            )


def buffer_sizes(pool: Any) -> list[int]:
    """The bytes of the buffers that SGLang allocates for a pool, in their order."""
    n_slots = pool.size + pool.page_size
    item_bytes = pool.store_dtype.itemsize
    if isinstance(pool, MLATokenToKVPool):
        return [n_slots * pool.kv_cache_dim * item_bytes] * pool.layer_num
    key_bytes, value_bytes = (n_slots * pool.head_num * dim * item_bytes for dim in (pool.head_dim, pool.v_head_dim))
    if key_bytes == value_bytes:
        # Keys and values of a layer are halves of one buffer.
        return [2 * key_bytes] * pool.layer_num
    return [key_bytes] * pool.layer_num + [value_bytes] * pool.layer_num


def named_buffers(pool: Any) -> list[tuple[str, torch.Tensor]]:
    if isinstance(pool, MLATokenToKVPool):
        return [(f"layer {layer}", tensor) for layer, tensor in enumerate(pool.kv_buffer)]
    both = zip(pool.k_buffer, pool.v_buffer, strict=True)
    return [(f"layer {layer}", tensor) for layer, pair in enumerate(both) for tensor in pair]
