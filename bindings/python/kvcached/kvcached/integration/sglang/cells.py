"""Where the states of linear layers lie in the cell of a slot."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcached.errors import KVCachedConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Part:
    """One state of a slot: where it begins in the cell, and what it is."""

    offset: int
    shape: tuple[int, ...]
    dtype: "torch.dtype"

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def view(self, cells: "torch.Tensor") -> "torch.Tensor":
        """The state of all slots, of cells as bytes with axes of slots and bytes."""
        return cells[:, self.offset : self.end].view(self.dtype).unflatten(1, self.shape)


@dataclass(frozen=True)
class StateCells:
    """The cell of a slot: states of convolutions side by side, and the temporal state behind them."""

    conv: tuple[Part, ...]
    temporal: Part
    n_bytes: int

    @classmethod
    def of_shapes(
        cls,
        conv_shapes: list[tuple[int, ...]],
        temporal_shape: tuple[int, ...],
        conv_dtype: "torch.dtype",
        temporal_dtype: "torch.dtype",
        page_bytes: int,
    ) -> "StateCells":
        """Cells that divide a page, so that every slot lies on one."""
        conv: list[Part] = []
        end = 0
        for shape in conv_shapes:
            conv.append(Part(aligned(end, conv_dtype.itemsize), shape, conv_dtype))
            end = conv[-1].end
        temporal = Part(aligned(end, temporal_dtype.itemsize), temporal_shape, temporal_dtype)
        if temporal.end > page_bytes:
            raise KVCachedConfigError(
                f"the states of a slot have {temporal.end} bytes in a layer; allowed: {page_bytes}, a page of KVCACHED_PAGE_SIZE_MB"
            )
        alignment = max(conv_dtype.itemsize, temporal_dtype.itemsize)
        counts = range(page_bytes // temporal.end, 0, -1)
        n_cells = next(n for n in counts if page_bytes % n == 0 and page_bytes // n % alignment == 0)
        return cls(tuple(conv), temporal, page_bytes // n_cells)


def aligned(offset: int, step: int) -> int:
    return -(-offset // step) * step
