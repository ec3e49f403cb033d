"""A program that calls the package `kvcached` of this repository, for its tests."""

import pathlib
import sys
from types import ModuleType
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "kvcached"

sys.path.insert(0, str(FOLDER))


class Engine:
    """Tensors and a manager, in memory of this machine: 2048 blocks of 16 tokens, with 128 blocks on each of 16 pages."""

    SHAPE = (2, 2048, 16, 4, 64)
    N_LAYERS = 4

    def __init__(self, torch: ModuleType, **options: Any) -> None:
        from kvcached.integration.vllm import interfaces

        self.interfaces = interfaces
        interfaces.init_kvcached(tp_rank=0, tp_size=1, device="cpu", **options)
        self.layers = interfaces.alloc_kv_cache(self.SHAPE, 16, torch.float16, "cpu", self.N_LAYERS)
        self.manager = interfaces.get_kv_cache_manager(2048, 16, 4 * 64 * 2, self.N_LAYERS, pool_name="full")
        self.page_bytes = self.manager.memory.page_bytes
