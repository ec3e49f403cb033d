"""Slabs: consecutive blocks that are mapped and unmapped together, and the pages that they lie on."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Slabs:
    """All blocks of an engine, in slabs of `slab_blocks`; the last one may have fewer."""

    n_blocks: int
    slab_blocks: int

    @classmethod
    def of_pages(cls, n_blocks: int, block_bytes: int, page_bytes: int) -> "Slabs":
        """Slabs with as many blocks as a page has of one layer, in which a block has `block_bytes`."""
        return cls(n_blocks, max(1, page_bytes // block_bytes))

    def __len__(self) -> int:
        return -(-self.n_blocks // self.slab_blocks)

    def blocks(self, slab: int) -> range:
        return range(slab * self.slab_blocks, min((slab + 1) * self.slab_blocks, self.n_blocks))

    def holding(self, n_blocks: int) -> int:
        """How many slabs have `n_blocks` blocks."""
        return -(-n_blocks // self.slab_blocks)


@dataclass(frozen=True, order=True)
class Piece:
    """A part of every block: `n_bytes` at `offset` of the buffer for block 0, and `stride` bytes further for each next one."""

    offset: int
    n_bytes: int
    stride: int


class PageTable:
    """Which pages of a buffer have a slab on them.

    Slabs may share pages, where blocks do not divide pages or layers do not begin with one: a page is needed while one of its
    slabs is.
    """

    def __init__(self, slabs: Slabs, pieces: Sequence[Piece], page_bytes: int) -> None:
        self.slabs = slabs
        self.pieces = tuple(pieces)
        self.page_bytes = page_bytes
        self.n_slabs_of_page: dict[int, int] = {}
        self.pages_of = lru_cache(maxsize=1024)(self.find_pages)

    def find_pages(self, slab: int) -> tuple[int, ...]:
        """The pages that a slab lies on, in order."""
        blocks = self.slabs.blocks(slab)
        pages: set[int] = set()
        for piece in self.pieces:
            first = piece.offset + blocks[0] * piece.stride
            last = piece.offset + blocks[-1] * piece.stride + piece.n_bytes - 1
            pages.update(range(first // self.page_bytes, last // self.page_bytes + 1))
        return tuple(sorted(pages))

    def missing(self, slabs: Sequence[int]) -> list[int]:
        """Pages that must be taken before these slabs are used."""
        pages = {page for slab in slabs for page in self.pages_of(slab)}
        return sorted(page for page in pages if page not in self.n_slabs_of_page)

    def add(self, slabs: Sequence[int]) -> None:
        """Notes that slabs are used, whose pages are there."""
        for slab in slabs:
            for page in self.pages_of(slab):
                self.n_slabs_of_page[page] = self.n_slabs_of_page.get(page, 0) + 1

    def remove(self, slabs: Sequence[int]) -> list[int]:
        """Notes that slabs are not used any more; returns the pages on which none is left."""
        left = []
        for slab in slabs:
            for page in self.pages_of(slab):
                n_slabs = self.n_slabs_of_page[page] - 1
                if n_slabs == 0:
                    del self.n_slabs_of_page[page]
                    left.append(page)
                else:
                    self.n_slabs_of_page[page] = n_slabs
        return sorted(left)

    def slab_bytes(self) -> int:
        """Bytes of a whole slab."""
        return self.slabs.slab_blocks * sum(piece.n_bytes for piece in self.pieces)
