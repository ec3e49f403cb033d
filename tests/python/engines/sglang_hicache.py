"""SGLang's radix tree with HiCache, and kvik behind it, without a model: prompts go in as tokens.

The methods of `Tree` are the commands of a test, one JSON object a line. The tree, the pools, the controller and its threads are
SGLang's. Its kernels for copies between a GPU and the host pool need a GPU: here they are copies of rows. The KV of a token is
made from all tokens before it, its salt and its adapter, so that KV in a wrong place shows.
"""

import contextlib
import hashlib
import itertools
import json
import random
import sys
import threading
import time
import types
from array import array

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host import common
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context, get_parallel

N_TOKENS = 2048
N_LAYERS = 2
PAGE_TOKENS = 16
# Bytes of K, or V, of a token in a layer.
ROW_BYTES = 2 * 32 * 2
TIMEOUT_S = 60


def back_up(self, device_pool, host_indices, device_indices, io_backend, **_) -> None:
    for layer in range(self.layer_num):
        self.k_buffer[layer][host_indices] = self.device_k_buffers[layer][device_indices]
        self.v_buffer[layer][host_indices] = self.device_v_buffers[layer][device_indices]


def load(self, device_pool, host_indices, device_indices, layer_id, io_backend, **_) -> None:
    self.device_k_buffers[layer_id][device_indices] = self.k_buffer[layer_id][host_indices]
    self.device_v_buffers[layer_id][device_indices] = self.v_buffer[layer_id][host_indices]


# What a GPU would do; the pool is of the layout `layer_first`.
MHATokenToKVPoolHost.backup_from_device_all_layer = back_up
MHATokenToKVPoolHost.load_to_device_per_layer = load
common._cuda_host_register = lambda *_: None


class Request:
    """What the tree wants to know of a request."""

    def __init__(self, node) -> None:
        self.last_node = node
        self.rid = "request"
        self.swa_host_hit_length = 0
        self.mamba_host_hit_length = 0
        self.kv = types.SimpleNamespace(mamba_pool_idx=None)


class Tree:
    def __init__(self) -> None:
        self.tree: UnifiedRadixCache | None = None
        self.names = itertools.count()

    def open(self, socket: str) -> dict:
        """An engine with an empty cache, in place of the one before."""
        if self.tree is not None:
            self.tree.cache_controller.detach_storage_backend()
        extra = {"backend_name": "kvik", "module_path": "kvik.sglang", "class_name": "KvikStorage", "socket": socket}
        arguments = {
            "enable_hierarchical_cache": True,
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": json.dumps({**extra, "prefetch_threshold": 1}),
            "hicache_ratio": 2.0,
            "hicache_size": 0,
            "hicache_mem_layout": "layer_first",
            "hicache_io_backend": "direct",
            "hicache_write_policy": "write_through",
            "hicache_storage_prefetch_policy": "wait_complete",
        }
        server_args = get_context().override_server_args(**arguments).install()
        get_parallel().override_permanently(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_dcp_size=1, attn_dcp_rank=0, attn_tp_rank=0, attn_tp_size=1
        )
        self.device = MHATokenToKVPool(
            size=N_TOKENS,
            page_size=PAGE_TOKENS,
            dtype=torch.bfloat16,
            head_num=2,
            head_dim=32,
            layer_num=N_LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
        self.allocator = PagedTokenToKVPoolAllocator(
            N_TOKENS, PAGE_TOKENS, torch.bfloat16, "cpu", self.device, need_sort=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE_TOKENS,
            tree_components=(ComponentType.FULL,),
        )
        self.tree = UnifiedRadixCache(params)
        self.tree.init_hicache(server_args, params)
        return {"is_v1": self.tree.cache_controller.page_get_func.__name__ == "_page_get_zero_copy"}

    # === Content ===

    def rows(self, tokens: list[int], salt: str | None, adapter: str | None) -> torch.Tensor:
        """The KV of tokens, by token, K or V, and layer."""
        digest = hashlib.sha256(f"{salt}/{adapter}".encode())
        rows = []
        for token in tokens:
            digest.update(token.to_bytes(8, "little"))
            rows.append(random.Random(digest.digest()).randbytes(2 * N_LAYERS * ROW_BYTES))
        content = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8)
        return content.view(len(tokens), 2, N_LAYERS, ROW_BYTES)

    def write(self, places: torch.Tensor, rows: torch.Tensor) -> None:
        for layer in range(N_LAYERS):
            for kind, buffers in enumerate((self.device.k_buffer, self.device.v_buffer)):
                row = buffers[layer][0]
                buffers[layer][places] = rows[:, kind, layer].contiguous().view(row.dtype).view(-1, *row.shape)

    def is_right(self, places: torch.Tensor, rows: torch.Tensor) -> bool:
        for layer in range(N_LAYERS):
            for kind, buffers in enumerate((self.device.k_buffer, self.device.v_buffer)):
                found = buffers[layer][places].contiguous().view(torch.uint8).view(len(places), ROW_BYTES)
                if not torch.equal(found, rows[: len(places), kind, layer]):
                    return False
        return True

    # === Commands ===

    def serve(self, tokens: list[int], salt: str | None = None, adapter: str | None = None) -> dict:
        """A request: what the engine has or loads of it, and whether that is right; the rest is computed and kept."""
        tree = self.tree
        tokens = tokens[: len(tokens) // PAGE_TOKENS * PAGE_TOKENS]
        key = RadixKey(array("q", tokens), adapter, cache_salt=salt)
        handle = CacheRequestHandle(rid=f"request-{next(self.names)}", attempt_id=0)
        match = tree.match_prefix(MatchPrefixParams(key=key))
        n_local = match.device_prefix_len + match.host_hit_length
        node = match.last_host_node
        if n_local < len(tokens) and (tree.is_backuped(node) or tree.is_root(node)):
            tree.prefetch_from_storage(
                handle,
                node,
                array("q", tokens[n_local:]),
                tree.get_last_hash_value(node),
                None,
                matched_prefix_tokens=tokens[:n_local],
                extra_key=adapter,
                cache_salt=salt,
            )
            self.poll(lambda: tree.check_prefetch_progress(handle))
        match = tree.match_prefix(MatchPrefixParams(key=key))
        n_on_host = match.host_hit_length
        if n_on_host:
            request = Request(match.last_device_node)
            tree.init_load_back(InitLoadBackParams(match.best_match_node, n_on_host, req=request))
            tree.ready_to_load_host_cache()
            self.poll(lambda: not tree.ongoing_load_back)
            match = tree.match_prefix(MatchPrefixParams(key=key))
        n_cached = match.device_prefix_len
        rows = self.rows(tokens, salt, adapter)
        cached = tree.path_device_indices(match.last_device_node)[:n_cached]
        is_right = self.is_right(cached, rows)
        if n_cached < len(tokens):
            # The request's own pages are in use while others leave for it.
            lock = tree.inc_lock_ref(match.last_device_node).to_dec_params()
            n_missing = len(tokens) - n_cached - self.allocator.available_size()
            if n_missing > 0:
                tree.evict(EvictParams(num_tokens=n_missing))
            computed = self.allocator.alloc(len(tokens) - n_cached)
            self.write(computed, rows[n_cached:])
            # The tree frees what it has already behind the prefix that the request got from it.
            tree.insert(InsertParams(key=key, value=torch.cat([cached, computed]), prev_prefix_len=n_cached))
            tree.dec_lock_ref(match.last_device_node, lock)
            self.poll(lambda: not tree.ongoing_write_through and not tree.ongoing_backup)
        return {"n_local": n_local, "n_cached": n_cached, "n_loaded": n_cached - n_local, "is_right": is_right}

    def forget(self) -> dict:
        """Empties the tree and poisons all memory of the engine."""
        self.tree.reset()
        self.allocator.clear()
        for buffer in (*self.device.k_buffer, *self.device.v_buffer, self.tree.host_pool_group.anchor_entry.host_pool.kv_buffer):
            buffer.view(torch.uint8).fill_(0xEE)
        return {}

    def poll(self, is_done) -> None:
        """What the scheduler does in each step."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            self.tree.check_hicache_events()
            if is_done():
                return
            assert time.monotonic() < deadline_s, "the tree waits too long"
            threading.Event().wait(0.001)


def main() -> None:
    tree = Tree()
    print(json.dumps({"is_ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        with contextlib.redirect_stdout(sys.stderr):
            answer = getattr(tree, command.pop("op"))(**command)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
