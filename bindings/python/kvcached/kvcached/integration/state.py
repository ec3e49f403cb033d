"""What an engine said when it set up its interface, and what its interface shows of it."""

from dataclasses import dataclass
from typing import Any

from kvcached.errors import KVCachedConfigError
from kvcached.integration import SUPPORTED_ATTENTION_TYPES, SUPPORTED_KV_LAYOUTS
from kvcached.observability import RuntimeSnapshot, build_runtime_snapshot


@dataclass
class EngineState:
    """The state of one interface in this process."""

    engine: str
    device: str | None = None
    world_size: int = 1
    pp_rank: int = 0
    async_sched: bool = False
    is_worker: bool | None = None

    def snapshot(self) -> RuntimeSnapshot:
        return build_runtime_snapshot(
            engine=self.engine,
            initialized=self.device is not None,
            device=self.device,
            world_size=self.world_size,
            pp_rank=self.pp_rank,
            async_sched=self.async_sched,
            # Each layer has its own buffer.
            contiguous_layout=False,
            is_worker=self.is_worker,
        )


def ranks_of(tp_rank: int, world_size: int | None, tp_size: int | None) -> int:
    """The number of ranks; `tp_size` is an older name of `world_size`."""
    if world_size is not None and tp_size is not None and world_size != tp_size:
        raise KVCachedConfigError(f"`tp_size` is {tp_size}; allowed: as `world_size`, {world_size}")
    n_ranks = world_size or tp_size or 1
    if not 0 <= tp_rank < n_ranks:
        raise KVCachedConfigError(f"`tp_rank` is {tp_rank}; allowed: below `world_size`, {n_ranks}")
    return n_ranks


def kv_buffers_of(attention_type: str, kv_layout: str) -> int:
    """Buffers of a layer: 2 for keys and values, or 1 for both together."""
    if attention_type not in SUPPORTED_ATTENTION_TYPES:
        allowed = ", ".join(SUPPORTED_ATTENTION_TYPES)
        raise KVCachedConfigError(f"`attention_type` is {attention_type}; allowed: {allowed}")
    if kv_layout not in SUPPORTED_KV_LAYOUTS:
        raise KVCachedConfigError(f"`kv_layout` is {kv_layout}; allowed: {', '.join(SUPPORTED_KV_LAYOUTS)}")
    return 1 if attention_type == "MLA" else 2


def refuse_given(other: dict[str, Any]) -> None:
    if given := [name for name, value in other.items() if value not in (None, False)]:
        raise KVCachedConfigError(f"{', '.join(given)} are given; allowed: none of them")
