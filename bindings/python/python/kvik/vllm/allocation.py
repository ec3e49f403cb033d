"""How vLLM allocates its KV memory."""

from typing import TYPE_CHECKING

import kvik

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

# What vLLM may round a size up to on some platforms.
ROUNDING_BYTES = 4096


def buffer_sizes(cache: "KVCacheConfig") -> list[int]:
    """The sizes of the buffers that vLLM allocates for KV, in their order."""
    tensors = cache.kv_cache_tensors
    # Since 0.32 layers are views of one buffer. Before, each has one of its own, unless blocks of all layers are packed.
    is_one = all(hasattr(tensor, "layer_stride") or tensor.block_stride > 0 for tensor in tensors)
    sizes = [tensor.size for tensor in tensors]
    if is_one and len(set(sizes)) != 1:
        raise kvik.InvalidValueError("the KV has several buffers; allowed with `elastic`: one, or one for each layer")
    return sizes[:1] if is_one else sizes
