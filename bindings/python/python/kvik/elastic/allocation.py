"""Answers the allocations of an engine's KV memory with memory of kvik."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import kvik


class Allocation(TorchFunctionMode):
    """While it is entered, `torch.zeros` of the KV memory's sizes and type are views of `PagedMemory`; other calls go through.

    The engine allocates buffers of `buffer_sizes` bytes, in this order. Each begins with a page. An engine may round sizes up by
    less than `rounding_bytes`. Where it allocates otherwise, leaving the context raises: memory beside kvik's would not be elastic.
    """

    def __init__(
        self,
        engine: str,
        buffer_sizes: Sequence[int],
        dtype: torch.dtype,
        page_bytes: int,
        rounding_bytes: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        self.engine = engine
        self.buffer_sizes = tuple(buffer_sizes)
        self.dtype = dtype
        self.page_bytes = page_bytes
        self.rounding_bytes = rounding_bytes
        self.options = options
        self.memory: kvik.PagedMemory | None = None
        # All pages, as bytes.
        self.buffer: torch.Tensor | None = None
        self.n_allocated = 0

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        is_typed = len(args) == 1 and kwargs.get("dtype") is self.dtype
        if function is torch.zeros and is_typed and isinstance(args[0], int | tuple | list):
            shape = (args[0],) if isinstance(args[0], int) else tuple(args[0])
            if self.is_kv(math.prod(shape) * self.dtype.itemsize):
                return self.allocate(shape, torch.device(kwargs.get("device") or "cpu"))
        return function(*args, **kwargs)

    def is_kv(self, n_bytes: int) -> bool:
        # One more than there should be is refused where it is allocated.
        buffer = min(self.n_allocated, len(self.buffer_sizes) - 1)
        return 0 <= n_bytes - self.buffer_sizes[buffer] <= max(0, self.rounding_bytes - 1)

    def allocate(self, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        n_buffers = len(self.buffer_sizes)
        if self.n_allocated == n_buffers:
            raise kvik.InvalidValueError(
                f"{self.engine} has more buffers of KV than it told; allowed with `elastic`: {n_buffers}"
            )
        if self.memory is None:
            self.open_memory(device)
        begin = sum(map(self.whole_pages, self.buffer_sizes[: self.n_allocated]))
        self.n_allocated += 1
        n_bytes = math.prod(shape) * self.dtype.itemsize
        return self.buffer[begin : begin + n_bytes].view(self.dtype).view(shape)

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
        """The bytes of the pages that a buffer of this size lies on, with what the engine may round it up to."""
        return -(-(n_bytes + self.rounding_bytes) // self.page_bytes) * self.page_bytes

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)
        if kind is None and self.n_allocated < len(self.buffer_sizes):
            raise kvik.InvalidValueError(
                f"{self.engine} allocated {self.n_allocated} of {len(self.buffer_sizes)} buffers of KV, the next one of "
                f"{self.buffer_sizes[self.n_allocated]} bytes, where it was expected; allowed with `elastic`: all of them"
            )
