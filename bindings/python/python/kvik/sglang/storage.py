"""The storage backend that SGLang loads: `module_path` is `kvik.sglang`, `class_name` is `KvikStorage`."""

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import sglang
import torch
from sglang.srt.mem_cache import utils as sglang_utils
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

import kvik
from kvik.sglang.memory import PageMemory
from kvik.sglang.names import is_replicated_pool, page_names
from kvik.sglang.pages import Pages
from kvik.sglang.pools import found_in_pools
from kvik.sglang.self_test import run_self_test
from kvik.sglang.settings import Settings
from kvik.sglang.stats import TransferStats

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host import HostKVCache

logger = logging.getLogger(f"sglang.{__name__}")


class KvikStorage(HiCacheStorage):
    """Keeps the pages of HiCache in the store of the node.

    The bytes go straight between SGLang's host pool and the store's memory where the pool's pages can be described
    (`interface_v1` is turned on then), and through SGLang's flat tensors otherwise. SGLang's keys commit to the tokens,
    the salt and the adapter; the namespace commits to the rest. Without a daemon nothing is found, and the store is used
    as soon as the daemon is there.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        del kwargs
        self.config = storage_config
        self.settings = Settings.read(storage_config.extra_config or {})
        self.stats = TransferStats()
        self.lock = threading.Lock()
        # By the name of their pool, with bytes in the order of the pool's pieces.
        self.pools: dict[str, Pages] = {}
        # The same with bytes in the order of SGLang's flat tensors, by their length.
        self.flat_pages: dict[int, Pages] = {}
        self.mem_pool_host: HostKVCache | None = None
        self.registered_pools: dict[str, HostKVCache] = {}
        refuse_old_keys()
        if storage_config.should_split_heads or storage_config.dcp_size > 1:
            raise kvik.InvalidValueError("pages are split between engines; allowed: no `tp_lcm_size`, no DCP")

    # === Pools ===

    def register_mem_pool_host(self, mem_pool_host: "HostKVCache") -> None:
        super().register_mem_pool_host(mem_pool_host)
        pages = self.register_pool(mem_pool_host, PoolName.KV)
        extra_config = self.config.extra_config
        if pages.page_memory is None and extra_config is not None and extra_config.get("interface_v1"):
            raise kvik.InvalidValueError(
                f"`interface_v1` is on with pages of {type(mem_pool_host).__name__}, {mem_pool_host.layout}; allowed: off"
            )
        if pages.page_memory is not None and extra_config is not None:
            # SGLang reads it after this call. Without it, it copies each page twice more.
            extra_config.setdefault("interface_v1", 1)
        self.log_start(pages)

    def register_mem_host_pool_v2(self, host_pool: "HostKVCache", host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool is not self.mem_pool_host:
            pages = self.register_pool(host_pool, host_pool_name)
            if pages.page_memory is None:
                raise kvik.InvalidValueError(
                    f"pool `{host_pool_name}` is {type(host_pool).__name__}; allowed: pools with pages at equal distances"
                )

    def register_pool(self, pool: Any, pool_name: str) -> Pages:
        refuse_unknown(pool, pool_name)
        memory = PageMemory.of_pool(pool)
        names = page_names(self.config, self.settings, pool, str(pool_name))
        page_bytes = pool.get_dummy_flat_data_page().nbytes if memory is None else memory.page_bytes
        pages = Pages(self.settings, names, page_bytes, memory)
        # A daemon that is there and cannot have such pages is a mistake of the settings, which the operator should see.
        if not pages.is_attached and pages.last_error is not None and "allowed:" in pages.last_error:
            raise kvik.InvalidValueError(pages.last_error)
        if self.settings.self_test and memory is not None:
            run_self_test(self.settings, names, memory, pool)
        before = self.pools.pop(str(pool_name), None)
        if before is not None:
            before.close()
        self.pools[str(pool_name)] = pages
        return pages

    def log_start(self, pages: Pages) -> None:
        state = "attached" if pages.is_attached else f"not attached, SGLang goes on without it: {pages.last_error}"
        pool, names = self.mem_pool_host, pages.names
        logger.info(
            "kvik: pages of %s are kept in the store at %s (%s): %d tokens and %d bytes a page, %s, %s, rank %d of %d, %s",
            self.config.model_name,
            self.settings.socket,
            state,
            pool.page_size,
            pages.page_bytes,
            pool.layout,
            pool.dtype,
            names.rank,
            names.n_ranks,
            "copied once" if pages.page_memory is not None else "copied by SGLang",
        )

    @property
    def kv(self) -> Pages | None:
        return self.pools.get(str(PoolName.KV))

    # === Pages of the host pool ===

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        del extra_info
        pages = self.kv_pages()
        return 0 if pages is None else pages.n_found(keys)

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        del extra_info
        return self.move_pages(self.kv, keys, host_indices, is_load=True)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        del extra_info
        if not self.config.is_storage_writer:
            # Another rank has the same bytes and stores them.
            return [True] * len(keys)
        return self.move_pages(self.kv, keys, host_indices, is_load=False)

    def move_pages(self, pages: Pages | None, keys: list[str], host_indices: torch.Tensor, is_load: bool) -> list[bool]:
        """Copies pages; which of them came, or are stored."""
        memory = None if pages is None else pages.page_memory
        numbers = None if memory is None else memory.page_numbers(host_indices, len(keys))
        if pages is None or numbers is None:
            logger.error("kvik: %d keys have places that are no pages of the pool", len(keys))
            return [False] * len(keys)
        if not numbers:
            return []
        begin_s = time.perf_counter()
        n_moved = pages.load(keys, numbers) if is_load else pages.save(keys, numbers)
        self.stats.note(is_load, n_moved, n_moved * pages.page_bytes, time.perf_counter() - begin_s)
        return [True] * n_moved + [False] * (len(keys) - n_moved)

    # === Several pools ===

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        n_found = self.batch_exists(keys, extra_info)
        return found_in_pools(keys, n_found, pool_transfers or [], self.pools)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        del extra_info
        return {transfer.name: self.move_pool(transfer, is_load=True) for transfer in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        del extra_info
        return {transfer.name: self.move_pool(transfer, is_load=False) for transfer in transfers}

    def move_pool(self, transfer: PoolTransfer, is_load: bool) -> list[bool]:
        keys = transfer.keys or []
        pages, pool = self.pools.get(str(transfer.name)), self.registered_pools.get(transfer.name)
        if pages is None or transfer.host_indices is None:
            return [False] * len(keys)
        if not is_load and not self.config.is_storage_writer and is_replicated_pool(self.config, pool, transfer.name):
            return [True] * len(keys)
        return self.move_pages(pages, keys, transfer.host_indices, is_load)

    # === Flat tensors ===

    def exists(self, key: str) -> bool:
        """Whether there is such a page, in either order of bytes."""
        if self.kv is None:
            return False
        flat = self.flat(self.mem_pool_host.get_dummy_flat_data_page().nbytes)
        return any(pages.n_found([key], is_request=False) == 1 for pages in (self.kv, flat))

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        del target_sizes
        memory = PageMemory.of_tensor(target_location) if isinstance(target_location, torch.Tensor) else None
        pages = None if memory is None else self.flat(memory.page_bytes)
        return target_location if pages is not None and pages.load([key], [0], memory) == 1 else None

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        del target_sizes
        targets = [None] * len(keys) if target_locations is None else target_locations
        return [self.get(key, target) for key, target in zip(keys, targets, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        del target_sizes
        source = target_location if value is None else value
        if not self.config.is_storage_writer:
            return True
        memory = PageMemory.of_tensor(source.cpu().contiguous()) if isinstance(source, torch.Tensor) else None
        pages = None if memory is None else self.flat(memory.page_bytes)
        return pages is not None and pages.save([key], [0], memory) == 1

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        del target_sizes
        sources = target_locations if values is None else values
        return sources is not None and all(self.set(key, source) for key, source in zip(keys, sources, strict=True))

    def kv_pages(self) -> Pages | None:
        """Where SGLang's pages are: it copies them by places in the pool, or as flat tensors."""
        extra_config = self.config.extra_config or {}
        if self.kv is None or extra_config.get("interface_v1"):
            return self.kv
        pool = self.mem_pool_host
        return self.flat(pool.get_dummy_flat_data_page().nbytes)

    def flat(self, page_bytes: int) -> Pages | None:
        """The session for flat tensors of this length; `None` before there is a pool, which names them."""
        if self.kv is None:
            return None
        with self.lock:
            if page_bytes not in self.flat_pages:
                names = self.kv.names.for_flat_pages()
                self.flat_pages[page_bytes] = Pages(self.settings, names, page_bytes, None)
            return self.flat_pages[page_bytes]

    # === Both ===

    def sessions(self) -> list[Pages]:
        with self.lock:
            return [*self.pools.values(), *self.flat_pages.values()]

    def clear(self) -> bool:
        """Forgets the pages of this engine's namespaces, of all ranks, in all tiers."""
        is_cleared = all([pages.clear() for pages in self.sessions()])
        if is_cleared:
            logger.info("kvik: the pages of %s are cleared", self.config.model_name)
        else:
            logger.warning("kvik: the pages of %s are not cleared: there is no store", self.config.model_name)
        return is_cleared

    def get_stats(self) -> Any:
        return self.stats.take() if self.config.enable_storage_metrics else None

    def close(self) -> None:
        for pages in self.sessions():
            pages.close()


def refuse_old_keys() -> None:
    """Ends the start in versions whose keys are the same for requests with different adapters and salts."""
    if not hasattr(sglang_utils, "storage_namespace_seed"):
        raise kvik.InvalidValueError(
            f"the keys of SGLang {sglang.__version__} leave adapters and salts out; allowed: 0.5.23 or newer"
        )


def refuse_unknown(pool: Any, pool_name: str) -> None:
    """Ends the start for pools whose pages are not all of this rank, or move."""
    reasons = {
        "its pages move": getattr(pool, "shared_allocation_domain", None) is not None,
        "its pages are of several ranks": hasattr(pool, "shard_rank"),
        "it has no bytes": getattr(pool, "kv_buffer", None) is None and not hasattr(pool, "get_hybrid_pool_buffer"),
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise kvik.InvalidValueError(
                f"pool `{pool_name}` is {type(pool).__name__}, and {reason}; allowed: host pools of whole pages"
            )
