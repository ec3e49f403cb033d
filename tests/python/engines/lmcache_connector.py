"""LMCache's own connector for `lm://` servers, with its memory, as one process: lmcache_connector.py PORT.

Chunks have bytes that follow from their number, so that what comes back is compared without being remembered.
"""

import asyncio
import sys
import threading

import torch
from commands import obey
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

CHUNK_TOKENS = 64
N_LAYERS = 4
HIDDEN = 1024


def shape_of(n_tokens: int) -> torch.Size:
    return torch.Size([2, N_LAYERS, n_tokens, HIDDEN])


class Engine:
    """What commands call; each answers with a dictionary."""

    n_batches = 0

    def __init__(self, port: int) -> None:
        config = LMCacheEngineConfig.from_defaults(chunk_size=CHUNK_TOKENS, local_cpu=False, max_local_cpu_size=0.25)
        metadata = LMCacheMetadata(
            model_name="kvik/test-model",
            world_size=2,
            local_world_size=2,
            worker_id=1,
            local_worker_id=1,
            kv_dtype=torch.bfloat16,
            kv_shape=(N_LAYERS, 2, CHUNK_TOKENS, 8, HIDDEN // 8),
        )
        metadata.chunk_size = CHUNK_TOKENS
        self.backend = LocalCPUBackend(config, metadata, dst_device="cpu")
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.connector = LMCServerConnector("127.0.0.1", port, self.loop, self.backend)

    def call(self, coroutine) -> object:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    @staticmethod
    def key(number: int) -> CacheEngineKey:
        return CacheEngineKey("kvik/test-model", 2, 1, number, torch.bfloat16)

    @staticmethod
    def content(number: int, n_tokens: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(number)
        shape = shape_of(n_tokens)
        return torch.randint(0, 1 << 15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)

    def put(self, numbers: list[int], n_tokens: int = CHUNK_TOKENS) -> dict:
        for number in numbers:
            memory = self.backend.allocate(shape_of(n_tokens), torch.bfloat16, MemoryFormat.KV_2LTD)
            assert memory is not None
            memory.tensor.copy_(self.content(number, n_tokens))
            self.call(self.connector.put(self.key(number), memory))
            memory.ref_count_down()
        # The connection is in order: this answers behind all of them.
        return {"is_there": self.call(self.connector.exists(self.key(numbers[-1])))}

    def exists(self, numbers: list[int]) -> dict:
        return {"there": [number for number in numbers if self.call(self.connector.exists(self.key(number)))]}

    def get(self, numbers: list[int], n_tokens: int = CHUNK_TOKENS) -> dict:
        """The numbers that were there; all bytes must be right."""
        found = []
        for number in numbers:
            memory = self.call(self.connector.get(self.key(number)))
            if memory is None:
                continue
            assert memory.get_shape() == shape_of(n_tokens), memory.get_shape()
            assert memory.get_dtype() == torch.bfloat16
            assert memory.get_memory_format() == MemoryFormat.KV_2LTD
            is_right = torch.equal(memory.tensor.view(torch.int16), self.content(number, n_tokens).view(torch.int16))
            assert is_right, number
            memory.ref_count_down()
            found.append(number)
        return {"found": found}


if __name__ == "__main__":
    obey(Engine(int(sys.argv[1])))
