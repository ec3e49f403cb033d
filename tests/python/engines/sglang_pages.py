"""SGLang's HiCache without a model: real host pools, its controller with its threads, and kvik as its storage backend.

The methods of `Engines` are the commands of a test, one JSON object a line (`commands.py`). What SGLang's scheduler does with the
controller is done here in the same order. The content of a page follows from its key, its rank and the engine's seed, and is
written and read by SGLang's own functions for pages.
"""

import contextlib
import json
import logging
import random
import sys
import threading
from array import array

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import _mha_host_inputs, build_pool_entry
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_context, get_parallel

N_TOKENS = 1024
N_LAYERS = 3
TIMEOUT_S = 60


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def device_pool(is_mla: bool, page_tokens: int, dtype: torch.dtype, n_layers: int = N_LAYERS):
    common = {"page_size": page_tokens, "dtype": dtype, "layer_num": n_layers, "device": "cpu", "enable_memory_saver": False}
    if is_mla:
        return MLATokenToKVPool(size=N_TOKENS, kv_lora_rank=48, qk_rope_head_dim=16, **common)
    return MHATokenToKVPool(size=N_TOKENS, head_num=2, head_dim=16, **common)


def host_pool(device, is_mla: bool, page_tokens: int, layout: str):
    if is_mla:
        info = device.get_device_pool_infos()[0].buffer_info
        return MLATokenToKVPoolHost(
            info,
            2.0,
            0,
            page_tokens,
            layout,
            pin_memory=False,
            device_capacity_tokens=N_TOKENS,
            start_layer=device.start_layer,
            end_layer=device.end_layer,
            layer_shard_enabled=False,
            target_layer_num=device.layer_num,
            override_kv_cache_dim=device.kv_cache_dim,
        )
    pool_class, info, arguments = _mha_host_inputs(device)
    return pool_class(info, 2.0, 0, page_tokens, layout, pin_memory=False, **arguments)


class Engine:
    """One rank of an engine."""

    def __init__(
        self,
        socket: str,
        layout: str = "layer_first",
        page_tokens: int = 16,
        dtype: str = "bfloat16",
        model: str = "model",
        is_mla: bool = False,
        tp_rank: int = 0,
        tp_size: int = 1,
        seed: int = 0,
        has_side_pool: bool = False,
        extra: dict | None = None,
    ) -> None:
        torch_dtype = getattr(torch, dtype)
        self.page_tokens, self.seed = page_tokens, seed
        # The content of a replicated page is the same on all ranks.
        self.rank = 0 if is_mla else tp_rank
        device = device_pool(is_mla, page_tokens, torch_dtype)
        self.pool = host_pool(device, is_mla, page_tokens, layout)
        layers = {layer: layer for layer in range(N_LAYERS)}
        entry = {"layer_mapping": layers, "transfer_layer_id_max": N_LAYERS}
        entries = [build_pool_entry(name=PoolName.KV, host_pool=self.pool, device_pool=device, is_anchor=True, **entry)]
        self.side_pool = None
        if has_side_pool:
            side_device = device_pool(is_mla, page_tokens, torch_dtype, n_layers=1)
            self.side_pool = host_pool(side_device, is_mla, page_tokens, layout)
            entry = {"layer_mapping": {0: 0}, "transfer_layer_id_max": N_LAYERS}
            entries.append(build_pool_entry(name=PoolName.SWA, host_pool=self.side_pool, device_pool=side_device, **entry))
        allocator = TokenToKVPoolAllocator(N_TOKENS, torch_dtype, "cpu", device, need_sort=False)
        config = {"backend_name": "kvik", "module_path": "kvik.sglang", "class_name": "KvikStorage", "socket": socket}
        parallel = {"tp_rank": tp_rank, "tp_size": tp_size, "pp_rank": 0, "pp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0}
        with get_parallel().override(**parallel):
            self.controller = HybridCacheController(
                allocator,
                HostPoolGroup(entries),
                page_tokens,
                None,
                load_cache_event=threading.Event(),
                write_policy="write_through",
                io_backend="direct",
                storage_backend="dynamic",
                model_name=model,
                storage_backend_extra_config={**config, **(extra or {})},
                enable_storage_metrics=True,
            )
        self.backend = self.controller.storage_backend

    # === Content ===

    def key(self, tokens: list[int], salt: str | None) -> RadixKey:
        return RadixKey(array("q", tokens), None, cache_salt=salt)

    def hashes(self, tokens: list[int], salt: str | None) -> list[str]:
        n_tokens = len(tokens) // self.page_tokens * self.page_tokens
        return get_storage_hash_str(self.key(tokens[:n_tokens], salt), None, page_size=self.page_tokens)

    def content(self, pool, name: str) -> torch.Tensor:
        page = pool.get_dummy_flat_data_page()
        content = random.Random(f"{name}/{self.rank}/{self.seed}").randbytes(page.nbytes)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(page.dtype)

    def is_right(self, pool, index: int, name: str) -> bool:
        page = pool.get_data_page(index, flat=True).contiguous()
        return torch.equal(page.view(torch.uint8), self.content(pool, name).view(torch.uint8))

    def fill(self, pool, indices: torch.Tensor, names: list[str]) -> None:
        for place, name in enumerate(names):
            pool.set_from_flat_data_page(int(indices[place * self.page_tokens]), self.content(pool, name))

    def allocated(self, pool, n_pages: int) -> torch.Tensor:
        """Places of pages that are not neighbours."""
        taken = pool.alloc(pool.available_size())
        pages = list(taken.split(self.page_tokens))
        random.Random(n_pages).shuffle(pages)
        for page in pages[n_pages:]:
            pool.free(page)
        return torch.cat(pages[:n_pages])

    # === Commands ===

    def store(self, tokens: list[int], salt: str | None = None, side_pages: list[int] | None = None) -> dict:
        """Backs pages up, and forgets them in the host pool."""
        names = self.hashes(tokens, salt)
        indices = self.allocated(self.pool, len(names))
        self.fill(self.pool, indices, names)
        extra_pools = None
        if side_pages is not None:
            side = self.allocated(self.side_pool, len(side_pages))
            keys = [names[page] for page in side_pages]
            self.fill(self.side_pool, side, keys)
            extra_pools = [PoolTransfer(PoolName.SWA, host_indices=side, keys=keys)]
        self.controller.write_storage(indices, tokens, names, extra_pools=extra_pools)
        operation = self.controller.ack_backup_queue.get(timeout=TIMEOUT_S)
        self.fill(self.pool, indices, ["poison"] * len(names))
        self.pool.free(indices)
        if side_pages is not None:
            self.fill(self.side_pool, side, ["poison"] * len(side_pages))
            self.side_pool.free(side)
        return {"n_tokens": operation.completed_tokens}

    def fetch(self, tokens: list[int], salt: str | None = None, n_trailing: int | None = None) -> dict:
        """What a new request gets from the store: tokens found, tokens loaded, and whether every byte is right."""
        extra_pools = None
        if n_trailing is not None:
            extra_pools = [
                PoolTransfer(PoolName.SWA, keys=["?"] * n_trailing, hit_policy=PoolHitPolicy.TRAILING_PAGES)
            ]
        handle = CacheRequestHandle(rid="request", attempt_id=0)
        self.controller.prefetch(handle, self.key(tokens, salt), extra_pools=extra_pools)
        operation = self.controller.prefetch_hit_queue.get(timeout=TIMEOUT_S)
        names = operation.hash_value
        indices = self.allocated(self.pool, len(names)) if names else torch.empty(0, dtype=torch.int64)
        self.fill(self.pool, indices, ["poison"] * len(names))
        operation.host_indices = indices
        side = None
        if n_trailing is not None and names:
            side = self.allocated(self.side_pool, min(n_trailing, len(names)))
            self.fill(self.side_pool, side, ["poison"] * (len(side) // self.page_tokens))
            extra_pools[0].host_indices = side
        self.controller.prefetch_buffer.put(operation)
        n_loaded, n_side = 0, 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=TIMEOUT_S)
            n_loaded = ack.completed_tokens if ack.completed_tokens is not None else n_loaded
            n_side = (ack.pool_hits or {}).get(PoolName.SWA, n_side)
            if ack.completed_req:
                break
        is_right = all(
            self.is_right(self.pool, int(indices[place * self.page_tokens]), name)
            for place, name in enumerate(names[: n_loaded // self.page_tokens])
        )
        for place in range(n_side):
            name = names[len(names) - len(side) // self.page_tokens + place]
            is_right = is_right and self.is_right(self.side_pool, int(side[place * self.page_tokens]), name)
        for pool, places in ((self.pool, indices), (self.side_pool, side)):
            if places is not None and len(places):
                pool.free(places)
        return {"n_found": operation.storage_hit_count, "n_loaded": n_loaded, "is_right": is_right, "n_side": n_side}

    def load_all(self, tokens: list[int]) -> dict:
        """Asks for pages without a look whether they are there, as if they had left in between."""
        names = self.hashes(tokens, None)
        indices = self.allocated(self.pool, len(names))
        self.fill(self.pool, indices, ["poison"] * len(names))
        came = self.backend.batch_get_v1(names, indices)
        pages = [int(indices[place * self.page_tokens]) for place in range(len(names))]
        are_right = [self.is_right(self.pool, page, name) for page, name in zip(pages, names, strict=True)]
        are_untouched = [self.is_right(self.pool, page, "poison") for page in pages]
        self.pool.free(indices)
        return {"came": came, "are_right": are_right, "are_untouched": are_untouched}

    def wrong_places(self, tokens: list[int]) -> dict:
        """Places that are no whole pages."""
        names = self.hashes(tokens, None)
        wrong = [torch.arange(1, 1 + self.page_tokens * len(names)), torch.arange(3), torch.arange(10**6, 10**6 + self.page_tokens * len(names))]
        return {"came": [any(self.backend.batch_get_v1(names, places)) for places in wrong]}

    def plain(self, tokens: list[int]) -> dict:
        """The interface with flat tensors."""
        name = self.hashes(tokens, None)[0]
        value = self.content(self.pool, name)
        target = self.pool.get_dummy_flat_data_page()
        before = self.backend.exists(name), self.backend.get(name, target) is None
        is_set = self.backend.set(name, value)
        got = self.backend.get(name, target)
        is_right = got is not None and torch.equal(got.view(torch.uint8), value.view(torch.uint8))
        return {"before": before, "is_set": is_set, "is_right": is_right, "exists": self.backend.exists(name)}

    def clear(self) -> dict:
        return {"is_cleared": self.controller.clear_storage_backend()}

    def stats(self) -> dict:
        stats = self.backend.get_stats()
        return {"loaded": sum(stats.prefetch_pgs), "saved": sum(stats.backup_pgs)}

    def close(self) -> dict:
        self.controller.detach_storage_backend()
        return {}


class Engines:
    """Engines by name: what SGLang imports takes long, so a process has several."""

    def __init__(self) -> None:
        self.engines: dict[str, Engine] = {}
        self.server = None

    def open(self, name: str, **settings: object) -> dict:
        lines = Lines()
        logger = logging.getLogger("sglang.kvik")
        logger.setLevel(logging.INFO)
        logger.addHandler(lines)
        try:
            self.engines[name] = Engine(**settings)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        finally:
            logger.removeHandler(lines)
        return {"lines": lines.lines, "is_v1": self.engines[name].controller.page_get_func.__name__ == "_page_get_zero_copy"}

    def serve(self, **arguments: object) -> dict:
        """Engines that are opened from now on are of a server with these arguments."""
        if self.server is not None:
            self.server.restore()
        self.server = get_context().override_server_args(**arguments) if arguments else None
        if self.server is not None:
            self.server.install()
        return {}

    def load_weights(self, version: str) -> dict:
        """What SGLang notes when other weights are loaded while it runs."""
        get_context().override("scheduler.weight_version", weight_version=version)
        return {}

    def ask(self, name: str, what: str, **arguments: object) -> dict:
        return getattr(self.engines[name], what)(**arguments)

    def end(self, name: str) -> dict:
        return self.engines.pop(name).close()


def main() -> None:
    engines = Engines()
    print(json.dumps({"is_ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        with contextlib.redirect_stdout(sys.stderr):
            answer = getattr(engines, command.pop("op"))(**command)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
