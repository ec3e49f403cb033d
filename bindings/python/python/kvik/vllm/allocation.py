"""Answers the allocations of vLLM's KV memory with memory of kvik."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

import kvik

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

# What vLLM may round a size up to on some platforms.
ROUNDING_BYTES = 4096


class Allocation(TorchFunctionMode):
    """While it is entered, `torch.zeros` of the KV memory's sizes and type are views of `PagedMemory`; other calls go through.

    vLLM allocates the KV of all layers at once, or a buffer for each layer, and makes views of it. Each buffer begins with a page.
    Where vLLM allocates otherwise, leaving the context raises: memory beside kvik's would not be elastic.
    """

    def __init__(self, buffer_sizes: Sequence[int], page_bytes: int, **options: Any) -> None:
        super().__init__()
        self.buffer_sizes = tuple(buffer_sizes)
        self.page_bytes = page_bytes
        self.options = options
        self.memory: kvik.PagedMemory | None = None
        # All pages, as bytes.
        self.buffer: torch.Tensor | None = None
        self.n_allocated = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.zeros and self.is_kv(args, kwargs):
            return self.allocate(int(args[0]), torch.device(kwargs.get("device") or "cpu"))
        return function(*args, **kwargs)

    def is_kv(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if len(args) != 1 or not isinstance(args[0], int) or kwargs.get("dtype") is not torch.int8:
            return False
        # One more than there should be is refused where it is allocated.
        buffer = min(self.n_allocated, len(self.buffer_sizes) - 1)
        return 0 <= args[0] - self.buffer_sizes[buffer] < ROUNDING_BYTES

    def allocate(self, n_bytes: int, device: torch.device) -> torch.Tensor:
        n_buffers = len(self.buffer_sizes)
        if self.n_allocated == n_buffers:
            raise kvik.InvalidValueError(f"vLLM has more buffers of KV than it told; allowed with `elastic`: {n_buffers}")
        if self.memory is None:
            self.open_memory(device)
        begin = sum(map(self.whole_pages, self.buffer_sizes[: self.n_allocated]))
        self.n_allocated += 1
        return self.buffer[begin : begin + n_bytes].view(torch.int8)

    def open_memory(self, device: torch.device) -> None:
        if device.type not in ("cpu", "cuda"):
            raise kvik.InvalidValueError(f"the KV is on {device.type}; allowed with `elastic`: cpu, cuda")
        ordinal = None
        if device.type == "cuda":
            ordinal = torch.cuda.current_device() if device.index is None else device.index
        n_bytes = sum(map(self.whole_pages, self.buffer_sizes))
        self.memory = kvik.PagedMemory(
            n_bytes=n_bytes, page_bytes=self.page_bytes, cuda_device=ordinal, **self.options
        )
        self.buffer = torch.from_dlpack(self.memory).view(-1)

    def whole_pages(self, n_bytes: int) -> int:
        """The bytes of the pages that a buffer of this size lies on, with what vLLM may round it up to."""
        return -(-(n_bytes + ROUNDING_BYTES) // self.page_bytes) * self.page_bytes

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)
        if kind is None and self.n_allocated < len(self.buffer_sizes):
            raise kvik.InvalidValueError(
                f"vLLM allocated {self.n_allocated} of {len(self.buffer_sizes)} buffers of KV, the next one of "
                f"{self.buffer_sizes[self.n_allocated]} bytes, where it was expected; allowed with `elastic`: all of them"
            )


def buffer_sizes(cache: "KVCacheConfig") -> list[int]:
    """The sizes of the buffers that vLLM allocates for KV, in their order."""
    tensors = cache.kv_cache_tensors
    # Since 0.32 layers are views of one buffer. Before, each has one of its own, unless blocks of all layers are packed.
    is_one = all(hasattr(tensor, "layer_stride") or tensor.block_stride > 0 for tensor in tensors)
    sizes = [tensor.size for tensor in tensors]
    if is_one and len(set(sizes)) != 1:
        raise kvik.InvalidValueError("the KV has several buffers; allowed with `elastic`: one, or one for each layer")
    return sizes[:1] if is_one else sizes
