"""How vLLM allocates its KV memory."""

from typing import TYPE_CHECKING

import kvik

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

# What vLLM may round a size up to on some platforms.
ROUNDING_BYTES = 4096


def is_one_buffer(cache: "KVCacheConfig") -> bool:
    """Whether layers are views of one buffer, as since 0.32. Before, each has one of its own, unless blocks of all layers are packed."""
    return all(hasattr(tensor, "layer_stride") or tensor.block_stride > 0 for tensor in cache.kv_cache_tensors)


def buffer_sizes(cache: "KVCacheConfig") -> list[int]:
    """The sizes of the buffers that vLLM allocates for KV, in their order."""
    sizes = [tensor.size for tensor in cache.kv_cache_tensors]
    if not is_one_buffer(cache):
        return sizes
    if len(set(sizes)) != 1:
        raise kvik.InvalidValueError("the KV has several buffers; allowed with `elastic`: one, or one for each layer")
    return sizes[:1]
