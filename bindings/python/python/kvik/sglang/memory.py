"""Where the pages of SGLang's host pools lie."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import kvik

# Address, bytes of a page, and bytes from a page to the next.
Piece = tuple[int, int, int]


@dataclass(frozen=True)
class PageMemory:
    """The pages of a host pool, each the same pieces at equal distances; the pieces of a page follow each other in the store."""

    pieces: tuple[Piece, ...]
    n_pages: int
    # Tokens of a page.
    page_tokens: int
    # What keeps the memory where it is.
    owner: object

    @property
    def page_bytes(self) -> int:
        return sum(n_bytes for _, n_bytes, _ in self.pieces)

    @classmethod
    def of_pool(cls, pool: Any) -> "PageMemory | None":
        """The pages of a pool; `None` where they cannot be described so, and only SGLang itself can copy them."""
        if not hasattr(pool, "get_page_buffer_meta"):
            return None
        page_tokens = pool.page_size
        n_pages = pool.size // page_tokens
        tensors = list(tensors_of(pool))
        if n_pages < 2 or not tensors or any(tensor.device.type != "cpu" for tensor in tensors):
            return None
        try:
            places = [page_places(pool, page) for page in (0, 1, n_pages - 1)]
        except (NotImplementedError, ValueError):
            return None
        pieces = []
        for first, second, last in zip(*places, strict=True):
            (address, n_bytes), stride = first, second[0] - first[0]
            if second[1] != n_bytes or last != (address + (n_pages - 1) * stride, n_bytes):
                return None
            if stride < n_bytes or not is_inside(tensors, address, (n_pages - 1) * stride + n_bytes):
                return None
            pieces.append((address, n_bytes, stride))
        return cls(tuple(pieces), n_pages, page_tokens, tensors)

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor) -> "PageMemory | None":
        """One page that is a tensor."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.nbytes == 0:
            return None
        return cls(((tensor.data_ptr(), tensor.nbytes, tensor.nbytes),), 1, 1, tensor)

    def native(self, chunk_tokens: int) -> kvik.EngineMemory:
        """The same for a store whose chunks are pages."""
        return kvik.EngineMemory(
            list(self.pieces), n_blocks=self.n_pages, block_tokens=chunk_tokens, owner=self.owner
        )

    def page_numbers(self, host_indices: torch.Tensor, n_pages: int) -> list[int] | None:
        """The pages that SGLang's places of tokens are; `None` where they are not whole pages of this pool."""
        if host_indices.numel() != n_pages * self.page_tokens:
            return None
        indices = host_indices.cpu().view(n_pages, self.page_tokens)
        firsts = indices[:, 0]
        is_whole = torch.equal(indices, firsts.unsqueeze(1) + torch.arange(self.page_tokens))
        if not is_whole or bool((firsts % self.page_tokens != 0).any()):
            return None
        return (firsts // self.page_tokens).tolist()


def page_places(pool: Any, page: int) -> list[tuple[int, int]]:
    """Addresses and lengths of the pieces of a page, as SGLang gives them to other stores."""
    indices = torch.arange(page * pool.page_size, (page + 1) * pool.page_size, dtype=torch.int64)
    addresses, lengths = pool.get_page_buffer_meta(indices)
    return list(zip(addresses, lengths, strict=True))


def tensors_of(pool: Any) -> Iterator[torch.Tensor]:
    """The tensors that a pool is made of."""
    found = [getattr(pool, "kv_buffer", None)]
    if hasattr(pool, "get_hybrid_pool_buffer"):
        found.append(pool.get_hybrid_pool_buffer())
    while found:
        one = found.pop()
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            found.extend(one)


def is_inside(tensors: list[torch.Tensor], address: int, n_bytes: int) -> bool:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return any(
        storage.data_ptr() <= address and address + n_bytes <= storage.data_ptr() + storage.nbytes()
        for storage in storages
    )
