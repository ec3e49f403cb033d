"""The balloon: holds the blocks of an engine that have no memory, so that the engine does not use them.

A slab is in one state:

    OUT      no memory is promised behind it; the balloon holds all its blocks
    COMING   memory was asked for; the balloon still holds all its blocks
    IN       the engine may use it
    LEAVING  some of its blocks are in use and the balloon holds the others; OUT when the last one is free

The slab of block 0 is always IN: engines write unused values to that block.
"""

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, Protocol

from kvik.elastic.slabs import Slabs


class Block(Protocol):
    """A block of the engine: how many use it, and the name of its content where that is in the prefix cache."""

    ref_cnt: int
    block_hash: object | None


class BlockPool(Protocol):
    """The engine's blocks: vLLM's `BlockPool`."""

    blocks: Sequence[Any]

    def touch(self, blocks: Sequence[Any]) -> None: ...
    def evict_blocks(self, block_ids: set[int]) -> None: ...
    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None: ...
    def get_num_free_blocks(self) -> int: ...


class State(Enum):
    OUT = "out"
    COMING = "coming"
    IN = "in"
    LEAVING = "leaving"


class Balloon:
    """Takes blocks out of the engine's pool and gives them back, slab by slab.

    A block that it holds is in no request and not in the prefix cache.
    """

    def __init__(self, pool: BlockPool, slabs: Slabs) -> None:
        self.pool = pool
        self.slabs = slabs
        self.states = [State.IN] * len(slabs)
        # Blocks of slabs that are LEAVING and are held already.
        self.held: dict[int, set[int]] = {}
        # Blocks that the engine must not use.
        self.n_held_blocks = 0
        # Slabs that went OUT, the last one at the end: their memory may still be there.
        self.left: dict[int, None] = {}
        for slab in range(1, len(slabs)):
            self.hold(slabs.blocks(slab))
            self.states[slab] = State.OUT

    def count(self, state: State) -> int:
        return self.states.count(state)

    @property
    def n_used_slabs(self) -> int:
        """Slabs that are not OUT."""
        return len(self.states) - self.count(State.OUT)

    def grow(self, n_slabs: int) -> list[int]:
        """Gives back what is LEAVING first, and then names slabs for which memory is to be asked; they are COMING.

        Those that went last come first, and then the lowest, so that few pages are shared with slabs that are OUT.
        """
        for slab in list(self.held)[:n_slabs]:
            self.stay(slab)
            n_slabs -= 1
        coming = [*reversed(self.left)][: max(0, n_slabs)]
        if len(coming) < n_slabs:
            chosen = set(coming)
            lowest = (
                slab for slab, state in enumerate(self.states) if state is State.OUT and slab not in chosen
            )
            coming += [slab for slab, _ in zip(lowest, range(n_slabs - len(coming)), strict=False)]
        for slab in coming:
            self.states[slab] = State.COMING
            self.left.pop(slab, None)
        return coming

    def arrived(self, slabs: Iterable[int]) -> None:
        """There is memory behind slabs that were COMING: they are IN."""
        for slab in slabs:
            assert self.states[slab] is State.COMING
            self.states[slab] = State.IN
            self.let_go(self.slabs.blocks(slab))

    def refused(self, slabs: Iterable[int]) -> None:
        """There is no memory for slabs that were COMING: they are OUT."""
        for slab in slabs:
            assert self.states[slab] is State.COMING
            self.states[slab] = State.OUT

    def shrink(self, n_slabs: int, *, drains: bool = False) -> list[int]:
        """Takes out up to `n_slabs` slabs without a block in use, and returns them: they are OUT.

        Slabs with the fewest blocks in the prefix cache come first, and of those the highest. With `drains`, slabs with
        the fewest blocks in use are LEAVING where that is not enough; those that are already LEAVING count.
        """
        out = []
        for _, slab in sorted(self.unused_slabs())[: max(0, n_slabs)]:
            self.take_out(slab)
            out.append(slab)
        if drains:
            self.drain(n_slabs - len(out) - len(self.held))
        return out

    def unused_slabs(self) -> list[tuple[tuple[int, int], int]]:
        """Slabs that are IN without a block in use, each with what it costs to take it out."""
        unused = []
        for slab, state in enumerate(self.states):
            if state is not State.IN or slab == 0:
                continue
            n_cached = 0
            for block in self.slabs.blocks(slab):
                if self.pool.blocks[block].ref_cnt > 0:
                    break
                n_cached += self.pool.blocks[block].block_hash is not None
            else:
                unused.append(((n_cached, -slab), slab))
        return unused

    def drain(self, n_slabs: int) -> None:
        """Lets `n_slabs` more slabs leave: none of their blocks is used again."""
        if n_slabs <= 0:
            return
        used = []
        for slab, state in enumerate(self.states):
            if state is State.IN and slab != 0:
                blocks = self.slabs.blocks(slab)
                used.append((sum(self.pool.blocks[block].ref_cnt > 0 for block in blocks), -slab))
        for _, slab in sorted(used)[:n_slabs]:
            self.states[-slab] = State.LEAVING
            self.held[-slab] = set()

    def settle(self) -> list[int]:
        """Takes blocks of slabs that are LEAVING as they become free; returns the slabs that are OUT now."""
        out = []
        for slab, held in list(self.held.items()):
            blocks = self.slabs.blocks(slab)
            free = [block for block in blocks if block not in held and self.pool.blocks[block].ref_cnt == 0]
            self.hold(free)
            held.update(free)
            if len(held) == len(blocks):
                del self.held[slab]
                self.note_out(slab)
                out.append(slab)
        return out

    def stay(self, slab: int) -> None:
        """A slab that is LEAVING is IN again."""
        held = self.held.pop(slab)
        self.states[slab] = State.IN
        self.let_go(sorted(held))

    def stay_all(self) -> None:
        for slab in list(self.held):
            self.stay(slab)

    def take_out(self, slab: int) -> None:
        """Takes out a slab that is IN, of which no block is in use."""
        self.hold(self.slabs.blocks(slab))
        self.note_out(slab)

    def note_out(self, slab: int) -> None:
        self.states[slab] = State.OUT
        self.left[slab] = None

    def hold(self, blocks: Sequence[int]) -> None:
        """Takes free blocks out of the pool, and what they have out of the prefix cache."""
        if len(blocks) > 0:
            self.n_held_blocks += len(blocks)
            self.pool.evict_blocks(set(blocks))
            self.pool.touch([self.pool.blocks[block] for block in blocks])

    def let_go(self, blocks: Sequence[int]) -> None:
        """Gives blocks back to the pool."""
        self.n_held_blocks -= len(blocks)
        self.pool.free_blocks([self.pool.blocks[block] for block in blocks])
