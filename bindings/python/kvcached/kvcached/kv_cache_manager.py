"""Blocks for an engine, out of the memory behind its tensors."""

import threading
from collections.abc import Sequence

from kvcached.cli.utils import get_kv_cache_limit
from kvcached.kv_geometry import check_page_geometry
from kvcached.utils import PAGE_SIZE, KVCachedConfigError
from kvcached.vmm_ops import Group, group_of

UNITS = {"bytes": 0, "kb": 10, "mb": 20, "gb": 30}


class PageCounts:
    """Counts of pages, under the names of kvcached's allocator."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def get_num_total_pages(self) -> int:
        return self.group.memory.limit_bytes // self.group.memory.page_bytes

    def get_num_inuse_pages(self) -> int:
        return self.group.memory.n_used_pages

    def get_num_reserved_pages(self) -> int:
        """Pages that are mapped and free."""
        return self.group.memory.n_parked_pages

    def get_num_free_pages(self) -> int:
        return max(0, self.get_num_total_pages() - self.get_num_inuse_pages())

    def get_page_state(self) -> dict[str, int]:
        return {
            "total": self.get_num_total_pages(),
            "free": self.get_num_free_pages(),
            "inuse": self.get_num_inuse_pages(),
            "reserved": self.get_num_reserved_pages(),
        }

    def check_and_get_resize_target(self, current_mem_size: int) -> int | None:
        """Bytes of one buffer of one layer by the limit of now; `None` where they are the current ones."""
        info = get_kv_cache_limit(self.group.ipc_name)
        if info is None:
            return None
        target = info.total_size // self.group.n_layers // self.group.n_kv_buffers
        return None if target == current_mem_size else target


class KVCacheManager:
    """Takes blocks and gives them back; blocks that are not taken have no memory. Safe to call from several threads.

    A block has `block_size * cell_size` bytes in each of `num_kv_buffers` buffers of `num_layers` layers. The tensors are those of
    `alloc_kv_cache` of this process, with the same `group_id`. Block 0 is never given, with and without `reserve_null_block`.
    """

    def __init__(
        self,
        num_blocks: int | None,
        block_size: int,
        cell_size: int,
        num_layers: int,
        world_size: int = 1,
        pp_rank: int = 0,
        async_sched: bool = False,
        reserve_null_block: bool = False,
        num_kv_buffers: int = 2,
        group_id: int = 0,
        pool_name: str | None = None,
    ) -> None:
        if world_size != 1:
            raise KVCachedConfigError(f"`world_size` is {world_size}; allowed: 1, the manager is in the process of the tensors")
        self.block_mem_size = block_size * cell_size
        if (problem := check_page_geometry(self.block_mem_size * num_kv_buffers, PAGE_SIZE, block_size)) is not None:
            raise KVCachedConfigError(problem)
        group = group_of(group_id)
        if (group.block_bytes, group.n_layers) != (self.block_mem_size * num_kv_buffers, num_layers):
            raise KVCachedConfigError(
                f"a block has {self.block_mem_size * num_kv_buffers} bytes in each of {num_layers} layers; allowed: "
                f"{group.block_bytes} bytes in {group.n_layers}, as the tensors have it"
            )
        self.memory = group.memory
        self.page_allocator = PageCounts(group)
        self.pool_name = pool_name
        self.num_layers, self.num_kv_buffers = num_layers, num_kv_buffers
        self.page_size = PAGE_SIZE
        self.num_blocks = min(num_blocks or self.memory.n_blocks, self.memory.n_blocks)
        self.mem_size = self.memory.limit_bytes // num_layers // num_kv_buffers
        self.reserved_blocks: list[int] = []
        self.lock = threading.RLock()

    def alloc(self, need_size: int) -> list[int] | None:
        """Blocks that were reserved and then others; `None`, and nothing taken, where there are not so many."""
        with self.lock:
            n_new = need_size - min(need_size, len(self.reserved_blocks))
            blocks = self.memory.alloc(n_new) if n_new > 0 else []
            if blocks is None:
                return None
            n_reserved = need_size - n_new
            taken = self.reserved_blocks[:n_reserved] + blocks
            del self.reserved_blocks[:n_reserved]
            return taken

    def free(self, indices: Sequence[int]) -> None:
        """Gives blocks back, all of them or none; raises where one is not taken."""
        if 0 in indices:
            raise ValueError("block 0 is kept for values that are not used")
        self.memory.free(list(indices))

    def try_to_reserve(self, need_size: int) -> bool:
        """Takes blocks for later; says whether there were so many."""
        with self.lock:
            blocks = self.memory.alloc(need_size)
            self.reserved_blocks += blocks or []
            return blocks is not None

    def free_reserved(self) -> None:
        with self.lock:
            self.memory.free(self.reserved_blocks)
            self.reserved_blocks = []

    def available_size(self) -> int:
        """The most blocks that `alloc` would give now."""
        with self.lock:
            return self.memory.n_available_blocks + len(self.reserved_blocks)

    def resize(self, new_mem_size: int) -> bool:
        """Bounds the memory to so many bytes of one buffer of one layer; blocks in use stay. Says whether it fits already."""
        max_bytes = new_mem_size * self.num_layers * self.num_kv_buffers
        self.memory.resize(max_bytes)
        self.mem_size = new_mem_size
        return self.memory.held_bytes <= max_bytes

    def trim(self) -> None:
        """Unmaps what is kept ready."""
        self.memory.trim()

    def get_mapped_memory_size(self, unit: str = "bytes") -> float:
        if unit not in UNITS:
            raise ValueError(f"`unit` is {unit}; allowed: {', '.join(UNITS)}")
        return self.memory.held_bytes / (1 << UNITS[unit])

    def _get_num_alloced_blocks(self) -> int:
        return self.memory.n_used_blocks
