"""What SGLang calls: tensors of tokens with memory behind the blocks that its manager takes."""

import math
from typing import Any

import torch

from kvcached import vmm_ops
from kvcached.errors import KVCachedConfigError
from kvcached.integration import SUPPORTED_ATTENTION_TYPES, SUPPORTED_KV_LAYOUTS
from kvcached.integration.sglang.cells import StateCells
from kvcached.integration.state import EngineState, kv_buffers_of, ranks_of
from kvcached.kv_cache_manager import KVCacheManager
from kvcached.observability import (
    KVCachePoolSnapshot,
    RuntimeSnapshot,
    get_registered_kv_cache_pool_snapshot_dicts,
    get_registered_kv_cache_pool_snapshots,
)
from kvcached.pool_registry import clear_registered_kv_cache_pools, register_kv_cache_pool
from kvcached.utils import PAGE_SIZE

__all__ = ["SUPPORTED_ATTENTION_TYPES", "SUPPORTED_KV_LAYOUTS"]

ENGINE = "sglang"
state = EngineState(ENGINE)


def init_kvcached(
    tp_rank: int = 0,
    world_size: int | None = None,
    pp_rank: int = 0,
    device: str | None = None,
    async_sched: bool = False,
    *,
    tp_size: int | None = None,
) -> None:
    """Chooses the device: `device`, or the current GPU where there is one, or this machine."""
    global state
    n_ranks = ranks_of(tp_rank, world_size, tp_size)
    chosen = device or (f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu")
    vmm_ops.init_kvcached(chosen)
    state = EngineState(ENGINE, str(chosen), n_ranks, pp_rank, async_sched)


def shutdown_kvcached() -> bool:
    """Gives all memory back that no tensor keeps alive."""
    global state
    vmm_ops.shutdown_kvcached()
    clear_registered_kv_cache_pools(integration=ENGINE)
    state = EngineState(ENGINE)
    return True


def alloc_kv_cache(
    kvcache_shape: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    num_layers: int,
    page_size: int = 1,
    attention_type: str = "MHA",
    kv_layout: str = "NHD",
    group_id: int = 0,
) -> tuple[list[torch.Tensor], list[torch.Tensor]] | list[torch.Tensor]:
    """Keys and values of each layer, or for MLA one tensor for each layer; the first axis is that of tokens.

    A block is `page_size` tokens, and there are whole blocks, so there may be more tokens than in `kvcache_shape`. Blocks that no
    manager has taken read as zeros and must not be written.
    """
    n_kv_buffers = kv_buffers_of(attention_type, kv_layout)
    if len(kvcache_shape) < 3:
        raise KVCachedConfigError(f"`kvcache_shape` is {kvcache_shape}; allowed: tokens, heads, values of a head")
    if vmm_ops.device is None:
        vmm_ops.init_kvcached(device)
    n_tokens, *inner = kvcache_shape
    n_blocks = -(-n_tokens // page_size)
    block_bytes = page_size * n_kv_buffers * math.prod(inner) * dtype.itemsize
    buffers = vmm_ops.create_kv_buffers(n_blocks, block_bytes, num_layers, n_kv_buffers, group_id)
    if n_kv_buffers == 1:
        return [buffer.view(dtype).view(n_blocks * page_size, *inner) for buffer in buffers]
    # Keys and values of a token lie side by side.
    tensors = [buffer.view(dtype).view(n_blocks * page_size, 2, *inner) for buffer in buffers]
    return [tensor[:, 0] for tensor in tensors], [tensor[:, 1] for tensor in tensors]


def alloc_mamba_states(
    *,
    num_slots: int,
    num_mamba_layers: int,
    cache_params: Any,
    device: str,
    group_id: int = 0,
) -> tuple[list[list[torch.Tensor]], list[torch.Tensor], dict[str, Any]]:
    """States of linear layers, a slot of all kinds to a block of the manager.

    First the states of convolutions, by their shapes and then by layers, then the temporal states by layers, each with the axis of
    slots first. Last what the manager of the group is made with: blocks of one cell of `cell_size` bytes in one buffer.
    """
    cells = StateCells.of_shapes(
        [tuple(shape) for shape in cache_params.shape.conv],
        tuple(cache_params.shape.temporal),
        cache_params.dtype.conv,
        cache_params.dtype.temporal,
        PAGE_SIZE,
    )
    if vmm_ops.device is None:
        vmm_ops.init_kvcached(device)
    buffers = vmm_ops.create_kv_buffers(num_slots, cells.n_bytes, num_mamba_layers, 1, group_id)
    layout = {
        "cell_size": cells.n_bytes,
        "num_slots": num_slots,
        "num_mamba_layers": num_mamba_layers,
        "conv_offsets": [part.offset for part in cells.conv],
        "temporal_offset": cells.temporal.offset,
        "is_contiguous": False,
    }
    conv = [[part.view(buffer) for buffer in buffers] for part in cells.conv]
    return conv, [cells.temporal.view(buffer) for buffer in buffers], layout


def get_kv_cache_manager(
    num_blocks: int | None,
    block_size: int,
    cell_size: int,
    num_layers: int,
    reserve_null_block: bool = True,
    num_kv_buffers: int = 2,
    group_id: int = 0,
    pool_name: str | None = None,
) -> KVCacheManager:
    """The manager of the tensors of a group, which each rank has for itself."""
    manager = KVCacheManager(
        num_blocks,
        block_size,
        cell_size,
        num_layers,
        world_size=1,
        pp_rank=state.pp_rank,
        async_sched=state.async_sched,
        reserve_null_block=reserve_null_block,
        num_kv_buffers=num_kv_buffers,
        group_id=group_id,
        pool_name=pool_name,
        own_segment=True,
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
