"""The balloon over SGLang's free pages: it holds the pages of tokens that have no memory.

The states of a slab are those of `kvik.elastic.balloon`, without COMING: memory is taken and used in one process. SGLang knows free
pages as numbers in a tensor, so the balloon works on tensors. Page 0 is never free: SGLang writes unused values there.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kvik.elastic.balloon import State
from kvik.elastic.slabs import Slabs


class PageBalloon:
    """Takes pages out of an allocator's free ones and gives them back, slab by slab.

    A page that it holds is in no request and not in the prefix cache. The slab of page 0 is always IN.
    """

    def __init__(self, allocator: Any, slabs: Slabs) -> None:
        self.allocator = allocator
        self.slabs = slabs
        self.states = [State.IN] + [State.OUT] * (len(slabs) - 1)
        # Pages of slabs that are LEAVING and are held already.
        self.held: dict[int, list[int]] = {}
        # Slabs that went OUT, the last one at the end: their memory may still be there.
        self.left: dict[int, None] = {}
        self.hide()

    def count(self, state: State) -> int:
        return self.states.count(state)

    @property
    def n_held_pages(self) -> int:
        """Pages that SGLang must not use."""
        whole = sum(
            len(self.slabs.blocks(slab)) for slab, state in enumerate(self.states) if state is State.OUT
        )
        return whole + sum(map(len, self.held.values()))

    def hide(self) -> None:
        """Holds all pages without memory, where all pages but 0 are free."""
        self.held.clear()
        for slab, state in enumerate(self.states):
            if state is State.LEAVING:
                self.states[slab] = State.IN
        self.remove([slab for slab, state in enumerate(self.states) if state is State.OUT])

    def absent(self, n_slabs: int) -> list[int]:
        """Slabs for which memory is to be taken: those that went last, and then the lowest."""
        absent = [*reversed(self.left)][:n_slabs]
        chosen = set(absent)
        for slab, state in enumerate(self.states):
            if len(absent) >= n_slabs:
                break
            if state is State.OUT and slab not in chosen:
                absent.append(slab)
        return absent

    def arrived(self, slabs: Iterable[int]) -> None:
        """There is memory behind slabs that were OUT: they are IN."""
        for slab in slabs:
            assert self.states[slab] is State.OUT
            self.states[slab] = State.IN
            self.left.pop(slab, None)
            self.add(self.slabs.blocks(slab))

    def shrink(self, n_slabs: int) -> list[int]:
        """Takes out up to `n_slabs` slabs of which all pages are free, the highest first, and returns them: they are OUT."""
        out = self.free_slabs()[::-1][: max(0, n_slabs)]
        self.remove(out)
        for slab in out:
            self.note_out(slab)
        return out

    def free_slabs(self) -> list[int]:
        """Slabs that are IN and of which all pages are free."""
        n_free = self.free_counts()
        return [
            slab
            for slab, state in enumerate(self.states)
            if slab > 0 and state is State.IN and n_free[slab] == len(self.slabs.blocks(slab))
        ]

    def drain(self, n_slabs: int) -> None:
        """Lets `n_slabs` more slabs leave, those with most free pages: none of their pages is used again."""
        n_free = self.free_counts()
        staying = [slab for slab, state in enumerate(self.states) if slab > 0 and state is State.IN]
        for slab in sorted(staying, key=lambda slab: (-n_free[slab], -slab))[: max(0, n_slabs)]:
            self.states[slab] = State.LEAVING
            self.held[slab] = []

    def settle(self) -> list[int]:
        """Takes pages of slabs that are LEAVING as they become free; returns the slabs that are OUT now."""
        out = []
        if self.held:
            for page in self.remove(list(self.held)):
                self.held[page // self.slabs.slab_blocks].append(page)
        for slab, held in list(self.held.items()):
            if len(held) == len(self.slabs.blocks(slab)):
                del self.held[slab]
                self.note_out(slab)
                out.append(slab)
        return out

    def stay_all(self) -> None:
        """Slabs that are LEAVING are IN again."""
        for slab, held in self.held.items():
            self.states[slab] = State.IN
            self.add(held)
        self.held.clear()

    def note_out(self, slab: int) -> None:
        self.states[slab] = State.OUT
        self.left[slab] = None

    # === Free pages of the allocator ===

    def free_counts(self) -> list[int]:
        """How many pages of each slab are free."""
        slabs = self.free_pages() // self.slabs.slab_blocks
        return torch.bincount(slabs, minlength=len(self.slabs)).tolist()

    def free_pages(self) -> torch.Tensor:
        # Some of them may wait to be sorted.
        self.allocator.merge_and_sort_free()
        return self.allocator.free_pages

    def add(self, pages: Sequence[int]) -> None:
        free = self.allocator.free_pages
        added = torch.tensor([page for page in pages if page > 0], dtype=free.dtype, device=free.device)
        self.allocator.free_pages = torch.cat((free, added))

    def remove(self, slabs: Sequence[int]) -> list[int]:
        """Takes the free pages of slabs out; returns them."""
        if not slabs:
            return []
        free = self.free_pages()
        is_of_slab = torch.zeros(len(self.slabs), dtype=torch.bool, device=free.device)
        is_of_slab[torch.tensor(slabs, device=free.device)] = True
        is_removed = is_of_slab[free // self.slabs.slab_blocks]
        self.allocator.free_pages = free[~is_removed]
        return free[is_removed].tolist()
