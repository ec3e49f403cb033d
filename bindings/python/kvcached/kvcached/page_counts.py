"""Counts of pages, under the names of kvcached's allocator."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvcached.cli.utils import get_kv_cache_limit
from kvcached.utils import PAGE_SIZE

if TYPE_CHECKING:
    from kvcached.vmm_ops import Group


class PageCounts:
    """The pages of a group, each counted once for all layers."""

    def __init__(self, group: "Group") -> None:
        self.group = group

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return self.group.memory.page_bytes

    def get_num_total_pages(self) -> int:
        return self.group.memory.limit_bytes // self.page_bytes

    def get_num_inuse_pages(self) -> int:
        return self.group.memory.n_used_pages

    def get_num_reserved_pages(self) -> int:
        """Pages that are mapped and free."""
        return self.group.memory.n_parked_pages

    def get_num_free_pages(self) -> int:
        return max(0, self.get_num_total_pages() - self.get_num_inuse_pages())

    def get_avail_physical_pages(self) -> int:
        """Pages that may be mapped beside those that are, if others gave back what they can."""
        memory = self.group.memory
        return max(0, memory.limit_bytes - memory.held_bytes) // self.page_bytes

    def get_page_state(self) -> dict[str, int]:
        n_total, n_inuse = self.get_num_total_pages(), self.get_num_inuse_pages()
        return {
            "total_pages": n_total,
            "free_pages": max(0, n_total - n_inuse),
            "inuse_pages": n_inuse,
            "reserved_pages": self.get_num_reserved_pages(),
        }

    def get_page_id(self, block_id: int, block_mem_size: int) -> int:
        """The page that a block begins on; `block_mem_size` is as the manager has it, of one buffer."""
        return block_id * block_mem_size * self.group.n_kv_buffers // PAGE_SIZE

    def group_indices_by_page(self, indices: Sequence[int], block_mem_size: int) -> dict[int, list[int]]:
        """Blocks by their pages."""
        pages: dict[int, list[int]] = {}
        for block in indices:
            pages.setdefault(self.get_page_id(block, block_mem_size), []).append(block)
        return pages

    def get_resize_target(self) -> int:
        """A limit that is still to be taken over: none, limits hold at once."""
        return -1

    def check_and_get_resize_target(self, current_mem_size: int) -> int | None:
        """Bytes of one buffer of one layer by the limit of now; `None` where they are the current ones."""
        info = get_kv_cache_limit(self.group.ipc_name)
        if info is None:
            return None
        target = info.total_size // self.group.n_layers // self.group.n_kv_buffers
        return None if target == current_mem_size else target
