"""What an engine calls: tensors with memory behind the blocks that its manager takes."""

import math
from typing import Any

import torch

from kvcached import vmm_ops
from kvcached.kv_cache_manager import KVCacheManager
from kvcached.utils import KVCachedConfigError


def init_kvcached(
    tp_rank: int = 0,
    world_size: int | None = None,
    pp_rank: int = 0,
    is_worker: bool = False,
    device: str | None = None,
    async_sched: bool = False,
    *,
    tp_size: int | None = None,
) -> None:
    """Chooses the device: `device`, or the GPU of the rank where there is one, or this machine.

    `tp_size` is an older name of `world_size`.
    """
    if world_size is not None and tp_size is not None and world_size != tp_size:
        raise KVCachedConfigError(f"`tp_size` is {tp_size}; allowed: as `world_size`, {world_size}")
    size = world_size or tp_size or 1
    if not 0 <= tp_rank < size:
        raise KVCachedConfigError(f"`tp_rank` is {tp_rank}; allowed: below `world_size`, {size}")
    default = f"cuda:{tp_rank}" if torch.cuda.is_available() else "cpu"
    vmm_ops.init_kvcached(device or default)


def shutdown_kvcached() -> bool:
    return vmm_ops.shutdown_kvcached()


def alloc_kv_cache(
    kvcache_shape: tuple[int, ...],
    block_size: int,
    dtype: torch.dtype,
    device: str,
    num_layers: int,
    attention_type: str = "MHA",
    kv_layout: str = "NHD",
    group_id: int = 0,
    **other: Any,
) -> list[torch.Tensor]:
    """One tensor of `kvcache_shape` for each layer. Blocks that no manager has taken read as zeros and must not be written.

    For MHA and GQA one of the first two axes is 2, for keys and values, and the other that of the blocks; for MLA the first is
    that of the blocks.
    """
    if any(value not in (None, False) for value in other.values()):
        raise KVCachedConfigError(f"{', '.join(other)} are given; allowed: none of them")
    if kv_layout != "NHD":
        raise KVCachedConfigError(f"`kv_layout` is {kv_layout}; allowed: NHD")
    if vmm_ops.device is None:
        vmm_ops.init_kvcached(device)
    has_both = attention_type in ("MHA", "GQA")
    if not has_both and attention_type != "MLA":
        raise KVCachedConfigError(f"`attention_type` is {attention_type}; allowed: MHA, GQA, MLA")
    shape = list(kvcache_shape)
    is_kv_first = has_both and shape[0] == 2
    if has_both and not is_kv_first and shape[1] != 2:
        raise KVCachedConfigError(f"`kvcache_shape` is {kvcache_shape}; allowed: 2 as the first or the second axis")
    n_blocks = shape[1] if is_kv_first else shape[0]
    inner = shape[2:] if has_both else shape[1:]
    if block_size not in inner:
        raise KVCachedConfigError(f"`block_size` is {block_size}; allowed: an axis of `kvcache_shape`, {kvcache_shape}")
    n_kv_buffers = 2 if has_both else 1
    block_bytes = n_kv_buffers * math.prod(inner) * dtype.itemsize
    buffers = vmm_ops.create_kv_buffers(n_blocks, block_bytes, num_layers, n_kv_buffers, group_id)
    block_shape = [2, *inner] if has_both else inner
    # Keys and values of a block lie side by side.
    tensors = [buffer.view(dtype).view(n_blocks, *block_shape) for buffer in buffers]
    return [tensor.transpose(0, 1) for tensor in tensors] if is_kv_first else tensors


def get_kv_cache_manager(
    num_blocks: int | None,
    block_size: int,
    cell_size: int,
    num_layers: int,
    num_kv_buffers: int = 2,
    group_id: int = 0,
    pool_name: str | None = None,
) -> KVCacheManager:
    """The manager of the tensors of a group; block 0 is taken for good."""
    return KVCacheManager(
        num_blocks,
        block_size,
        cell_size,
        num_layers,
        reserve_null_block=True,
        num_kv_buffers=num_kv_buffers,
        group_id=group_id,
        pool_name=pool_name,
    )
