"""Blocks for an engine, out of the memory behind its tensors."""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvcached import vmm_ops
from kvcached.errors import KVCachedConfigError
from kvcached.kv_geometry import check_page_geometry
from kvcached.memory_limit import MemoryLimit
from kvcached.observability import KVCachePoolSnapshot, build_kv_cache_pool_snapshot
from kvcached.page_counts import PageCounts
from kvcached.utils import PAGE_SIZE

UNITS = {"bytes": 0, "kb": 10, "mb": 20, "gb": 30}


class KVCacheManager:
    """Takes blocks and gives them back; blocks that are not taken have no memory. Safe to call from several threads.

    A block has `block_size * cell_size` bytes in each of `num_kv_buffers` buffers of `num_layers` layers. The tensors are those of
    `alloc_kv_cache` of this process, with the same `group_id`. Block 0 is never given, with and without `reserve_null_block`.
    Groups other than 0 have a segment of their own, with and without `own_segment`.

    With `defer_physical_release`, blocks that are freed keep their memory until the engine tells that work which was begun before
    has ended. They may be given again meanwhile.
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
        defer_physical_release: bool = False,
        own_segment: bool = False,
    ) -> None:
        if world_size != 1:
            raise KVCachedConfigError(f"`world_size` is {world_size}; allowed: 1, the manager is in the process of the tensors")
        self.block_mem_size = block_size * cell_size
        if (problem := check_page_geometry(self.block_mem_size * num_kv_buffers, PAGE_SIZE, block_size)) is not None:
            raise KVCachedConfigError(problem)
        group = vmm_ops.group_of(group_id)
        if (group.block_bytes, group.n_layers) != (self.block_mem_size * num_kv_buffers, num_layers):
            raise KVCachedConfigError(
                f"a block has {self.block_mem_size * num_kv_buffers} bytes in each of {num_layers} layers; allowed: "
                f"{group.block_bytes} bytes in {group.n_layers}, as the tensors have it"
            )
        self.memory = group.memory
        self.page_allocator = PageCounts(group)
        self.limit = MemoryLimit(group.memory)
        self.pool_name = pool_name
        self.group_id = group_id
        self.ipc_name = group.ipc_name
        self.num_layers, self.num_kv_buffers = num_layers, num_kv_buffers
        self.page_size = PAGE_SIZE
        self.num_blocks = min(num_blocks or self.memory.n_blocks, self.memory.n_blocks)
        # Bytes of one buffer of one layer.
        self.mem_size = self.memory.limit_bytes // num_layers // num_kv_buffers
        self.null_block = [0]
        # Blocks that callers have; those that are reserved are not among them.
        self.taken: set[int] = set()
        self.reserved_blocks: list[int] = []
        self.defer_physical_release = defer_physical_release
        # Called before memory goes, where release is deferred.
        self.physical_release_barrier: Callable[[], None] | None = None
        self.n_releases = 0
        # Blocks that were freed and still have their memory, each with the number of its release.
        self.retired: dict[int, int] = {}
        self.lock = threading.RLock()

    def alloc(self, need_size: int) -> list[int] | None:
        """Blocks that were reserved and then others; `None`, and nothing taken, where there are not so many."""
        with self.lock:
            n_reserved = min(need_size, len(self.reserved_blocks))
            others = self.take(need_size - n_reserved)
            if others is None:
                return None
            blocks = self.reserved_blocks[:n_reserved] + others
            del self.reserved_blocks[:n_reserved]
            self.taken.update(blocks)
            return blocks

    def take(self, n_blocks: int) -> list[int] | None:
        """Blocks out of the memory, those that still have theirs first; the caller holds the lock."""
        n_again = min(n_blocks, len(self.retired))
        others = self.memory.alloc(n_blocks - n_again) if n_blocks > n_again else []
        if others is None:
            return None
        # The last ones that were freed: the first ones go soon.
        again = [self.retired.popitem()[0] for _ in range(n_again)]
        return again + others

    def free(self, indices: Sequence[int]) -> None:
        """Gives blocks back, all of them or none; raises where one is not taken."""
        blocks = list(indices)
        with self.lock:
            self.refuse_foreign(blocks)
            self.taken.difference_update(blocks)
            self.give_back(blocks)

    def refuse_foreign(self, blocks: list[int]) -> None:
        if 0 in blocks:
            raise ValueError("block 0 is kept for values that are not used")
        if len(set(blocks)) < len(blocks) or not self.taken.issuperset(blocks):
            wrong = next(block for block in blocks if block not in self.taken or blocks.count(block) > 1)
            raise ValueError(f"block {wrong} is freed; allowed: blocks that are taken, once")

    def give_back(self, blocks: Iterable[int]) -> None:
        if not self.defer_physical_release:
            self.memory.free(list(blocks))
            return
        self.n_releases += 1
        self.retired.update(dict.fromkeys(blocks, self.n_releases))

    def capture_physical_release_marker(self) -> int:
        """A mark behind everything that was freed until now."""
        with self.lock:
            return self.n_releases

    def release_retired_pages_through(self, marker: int) -> None:
        """Lets memory of blocks go that were freed before the mark: the engine does not use it any more."""
        with self.lock:
            ended = [block for block, number in self.retired.items() if number <= marker]
            if ended and self.physical_release_barrier is not None:
                self.physical_release_barrier()
            self.memory.free(ended)
            for block in ended:
                del self.retired[block]

    def try_to_reserve(self, need_size: int) -> bool:
        """Takes blocks for later; says whether there were so many."""
        with self.lock:
            blocks = self.take(need_size)
            self.reserved_blocks += blocks or []
            return blocks is not None

    def free_reserved(self) -> None:
        with self.lock:
            blocks, self.reserved_blocks = self.reserved_blocks, []
            self.give_back(blocks)

    def clear(self) -> None:
        """Gives all blocks back and unmaps their memory: the caller knows that none of them is used."""
        with self.lock:
            self.memory.free([*self.taken, *self.reserved_blocks, *self.retired])
            self.taken.clear()
            self.retired.clear()
            self.reserved_blocks = []
            self.memory.trim()

    def shutdown(self) -> bool:
        """Gives everything back but the addresses, which go with the tensors."""
        self.clear()
        return True

    def available_size(self) -> int:
        """The most blocks that `alloc` would give now."""
        with self.lock:
            return self.memory.n_available_blocks + len(self.reserved_blocks) + len(self.retired)

    def get_page_occupancy(self, page_ids: Iterable[int]) -> dict[int, int]:
        """How many blocks of each page are taken or reserved."""
        block_bytes = self.block_mem_size * self.num_kv_buffers
        with self.lock:
            held = self.taken.union(self.reserved_blocks)
            occupancy = {}
            for page in page_ids:
                # A block that lies on two pages is never given.
                blocks = range(-(-page * PAGE_SIZE // block_bytes), (page + 1) * PAGE_SIZE // block_bytes)
                occupancy[page] = len(held.intersection(blocks))
            return occupancy

    def resize(self, new_mem_size: int) -> bool:
        """Bounds the memory to so many bytes of one buffer of one layer; blocks in use stay. Says whether it fits already."""
        with self.lock:
            self.limit.bound(new_mem_size * self.num_layers * self.num_kv_buffers)
            return not self.limit.is_exceeded

    def set_memory_limit(self, limit_bytes: int, *, revision: int) -> dict[str, Any]:
        """Bounds the memory of all layers; says what came of it (`kvcached.control`)."""
        with self.lock:
            return self.named(self.limit.set(limit_bytes, revision))

    def memory_limit_state(self) -> dict[str, Any]:
        with self.lock:
            return self.named(self.limit.state())

    def named(self, state: dict[str, Any]) -> dict[str, Any]:
        return {"pool_name": self.pool_name or "", "group_id": self.group_id, **state}

    @property
    def in_shrink(self) -> bool:
        """Whether more is in use than the limit allows."""
        return self.limit.is_exceeded

    @property
    def target_num_blocks(self) -> int | None:
        """The blocks that the limit allows, while more is in use."""
        block_bytes = self.block_mem_size * self.num_kv_buffers * self.num_layers
        return self.memory.limit_bytes // block_bytes if self.in_shrink else None

    def trim(self) -> None:
        """Unmaps what is kept ready."""
        self.memory.trim()

    def get_mapped_memory_size(self, unit: str = "bytes") -> float:
        if unit not in UNITS:
            raise ValueError(f"`unit` is {unit}; allowed: {', '.join(UNITS)}")
        return self.memory.held_bytes / (1 << UNITS[unit])

    def observability_snapshot(self, *, integration: str | None = None) -> KVCachePoolSnapshot:
        with self.lock:
            return build_kv_cache_pool_snapshot(self, integration=integration)

    def observability_snapshot_dict(self, *, integration: str | None = None) -> dict[str, Any]:
        return self.observability_snapshot(integration=integration).to_dict()

    def _get_num_alloced_blocks(self) -> int:
        """Blocks that are taken or reserved, and the one of unused values."""
        with self.lock:
            return self.memory.n_used_blocks - len(self.retired)
