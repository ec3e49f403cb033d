"""What an engine calls: tensors with memory behind the blocks that its manager takes."""

import math
from typing import Any

import torch

from kvcached import vmm_ops
from kvcached.errors import KVCachedConfigError
from kvcached.integration import SUPPORTED_ATTENTION_TYPES, SUPPORTED_KV_LAYOUTS
from kvcached.integration.state import EngineState, kv_buffers_of, ranks_of, refuse_given
from kvcached.kv_cache_manager import KVCacheManager
from kvcached.observability import (
    KVCachePoolSnapshot,
    RuntimeSnapshot,
    get_registered_kv_cache_pool_snapshot_dicts,
    get_registered_kv_cache_pool_snapshots,
)
from kvcached.pool_registry import clear_registered_kv_cache_pools, register_kv_cache_pool

__all__ = ["SUPPORTED_ATTENTION_TYPES", "SUPPORTED_KV_LAYOUTS"]

ENGINE = "vllm"
state = EngineState(ENGINE)


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
    global state
    n_ranks = ranks_of(tp_rank, world_size, tp_size)
    chosen = device or (f"cuda:{tp_rank}" if torch.cuda.is_available() else "cpu")
    vmm_ops.init_kvcached(chosen)
    state = EngineState(ENGINE, str(chosen), n_ranks, pp_rank, async_sched, is_worker)


def shutdown_kvcached() -> bool:
    """Gives all memory back that no tensor keeps alive."""
    global state
    vmm_ops.shutdown_kvcached()
    clear_registered_kv_cache_pools(integration=ENGINE)
    state = EngineState(ENGINE)
    return True


def should_use_worker_ipc() -> bool:
    """Whether another process maps the memory: never, the manager is in the process of the tensors."""
    return False


def get_world_size() -> int:
    if state.device is None:
        raise KVCachedConfigError("init_kvcached was not called")
    return state.world_size


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
    refuse_given(other)
    n_kv_buffers = kv_buffers_of(attention_type, kv_layout)
    if vmm_ops.device is None:
        vmm_ops.init_kvcached(device)
    has_both = n_kv_buffers == 2
    shape = list(kvcache_shape)
    is_kv_first = has_both and shape[0] == 2
    if has_both and not is_kv_first and shape[1] != 2:
        raise KVCachedConfigError(f"`kvcache_shape` is {kvcache_shape}; allowed: 2 as the first or the second axis")
    n_blocks = shape[1] if is_kv_first else shape[0]
    inner = shape[2:] if has_both else shape[1:]
    if block_size not in inner:
        raise KVCachedConfigError(f"`block_size` is {block_size}; allowed: an axis of `kvcache_shape`, {kvcache_shape}")
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
    """The manager of the tensors of a group; block 0 is taken for good.

    Where the engine schedules ahead of the device (`async_sched`), memory of freed blocks goes when the engine says so.
    """
    manager = KVCacheManager(
        num_blocks,
        block_size,
        cell_size,
        num_layers,
        world_size=1,
        pp_rank=state.pp_rank,
        async_sched=state.async_sched,
        reserve_null_block=True,
        num_kv_buffers=num_kv_buffers,
        group_id=group_id,
        pool_name=pool_name,
        defer_physical_release=state.async_sched,
    )
    register_kv_cache_pool(manager, integration=ENGINE)
    return manager


def observability_snapshot() -> RuntimeSnapshot:
    return state.snapshot()


def observability_snapshot_dict() -> dict[str, Any]:
    return state.snapshot().to_dict()


def kv_cache_pool_snapshots() -> list[KVCachePoolSnapshot]:
    return get_registered_kv_cache_pool_snapshots(integration=ENGINE)


def kv_cache_pool_snapshot_dicts() -> list[dict[str, Any]]:
    return get_registered_kv_cache_pool_snapshot_dicts(integration=ENGINE)
