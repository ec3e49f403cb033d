"""Answers the one allocation of vLLM's KV memory with memory of kvik."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

import kvik

# What vLLM may round the size up to on some platforms.
ROUNDING_BYTES = 4096


class Allocation(TorchFunctionMode):
    """While it is entered, `torch.zeros` of the KV memory's size and type is a view of `PagedMemory`; other calls go through.

    vLLM allocates the KV of all layers at once, and makes views of it. Where it does not, leaving the context raises: memory
    beside kvik's would not be elastic.
    """

    def __init__(self, n_bytes: int, **options: Any) -> None:
        super().__init__()
        self.n_bytes = n_bytes
        self.options = options
        self.memory: kvik.PagedMemory | None = None
        self.buffer: torch.Tensor | None = None

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is torch.zeros and self.is_kv(args, kwargs):
            return self.allocate(int(args[0]), torch.device(kwargs.get("device") or "cpu"))
        return function(*args, **kwargs)

    def is_kv(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        is_flat = len(args) == 1 and isinstance(args[0], int) and kwargs.get("dtype") is torch.int8
        return is_flat and 0 <= args[0] - self.n_bytes < ROUNDING_BYTES

    def allocate(self, n_bytes: int, device: torch.device) -> torch.Tensor:
        if self.memory is not None:
            raise kvik.InvalidValueError("vLLM has several buffers of KV; allowed with `elastic`: one")
        if device.type not in ("cpu", "cuda"):
            raise kvik.InvalidValueError(f"the KV is on {device.type}; allowed with `elastic`: cpu, cuda")
        ordinal = None
        if device.type == "cuda":
            ordinal = torch.cuda.current_device() if device.index is None else device.index
        self.memory = kvik.PagedMemory(n_bytes=n_bytes, cuda_device=ordinal, **self.options)
        self.buffer = torch.from_dlpack(self.memory).view(-1)[:n_bytes].view(torch.int8)
        return self.buffer

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        super().__exit__(kind, value, trace)
        if kind is None and self.memory is None:
            raise kvik.InvalidValueError(
                f"vLLM did not allocate its {self.n_bytes} bytes of KV as one buffer; allowed with `elastic`: that it does"
            )
