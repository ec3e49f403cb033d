"""SGLang's KV pool, allocator and radix tree with elastic memory of kvik, without a model: prompts go in as tokens.

The methods of `Engine` are the commands of a test, one JSON object a line. SGLang's plugins are loaded as its server does it. What its
scheduler does for a request is done here in the same order, with the functions that it calls: its budget, its allocation, its
search for leaks. The KV of a token is made from all tokens before it, so that KV in a wrong place shows; a write to a page without
memory ends the process.
"""

import gc
import json
import random
import sys
import types
from array import array

import torch
from sglang.srt.plugins import load_plugins

load_plugins()

from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.managers.scheduler_components.invariant_checker import SchedulerInvariantChecker  # noqa: E402
from sglang.srt.managers.scheduler_components.pool_stats_observer import SchedulerPoolStatsObserver  # noqa: E402
from sglang.srt.mem_cache import memory_pool  # noqa: E402
from sglang.srt.mem_cache.allocation import alloc_token_slots  # noqa: E402
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams  # noqa: E402
from sglang.srt.mem_cache.cache_init_params import CacheInitParams  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey  # noqa: E402
from sglang.srt.runtime_context import get_parallel  # noqa: E402

import kvik  # noqa: E402
from kvik.sglang import elastic_hooks  # noqa: E402

N_LAYERS = 2


class Request:
    def __init__(self, tokens: list[int], node: object, places: torch.Tensor, n_cached: int, max_new: int) -> None:
        self.tokens = tokens
        self.node = node
        self.places = places
        self.n_cached = n_cached
        self.max_new = max_new


def values(tokens: list[int]) -> torch.Tensor:
    """A value for each token that depends on all before it; float16 has them exactly."""
    made, state = [], 1
    for token in tokens:
        state = (state * 31 + token) % 1999
        made.append(state + 1)
    return torch.tensor(made, dtype=torch.float16)


class Engine:
    def __init__(self) -> None:
        self.pool = self.allocator = self.tree = None
        self.running: dict[str, Request] = {}

    # === Start and end ===

    def open(self, kind: str = "mha", page_tokens: int = 1, n_tokens: int = 4096) -> dict:
        """A new engine in place of the one before; what is wrong with it, where it cannot be made."""
        self.pool = self.allocator = self.tree = self.observer = self.checker = self.scheduler = None
        self.running = {}
        gc.collect()
        try:
            self.make(kind, page_tokens, n_tokens)
        except kvik.InvalidValueError as error:
            return {"error": str(error)}
        return {"allocator": type(self.allocator).__name__, **(self.counts() if self.allocator.pages else {})}

    def make(self, kind: str, page_tokens: int, n_tokens: int) -> None:
        options = {"dtype": torch.float16, "layer_num": N_LAYERS, "device": "cpu", "enable_memory_saver": False}
        if kind == "mla":
            latent = {"kv_lora_rank": 1984, "qk_rope_head_dim": 64}
            self.pool = memory_pool.MLATokenToKVPool(n_tokens, page_tokens, **latent, **options)
        elif kind == "unknown":
            # A pool with buffers of its own.
            self.pool = memory_pool.NoOpMHATokenToKVPool(n_tokens, page_tokens, head_num=8, head_dim=256, **options)
        else:
            heads = {"head_num": 8, "head_dim": 256, "v_head_dim": 128 if kind == "uneven" else 256}
            self.pool = memory_pool.MHATokenToKVPool(n_tokens, page_tokens, **heads, **options)
        same = {"dtype": torch.float16, "device": "cpu", "kvcache": self.pool, "need_sort": False}
        if page_tokens == 1:
            self.allocator = TokenToKVPoolAllocator(n_tokens, **same)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(n_tokens, page_tokens, **same)
        self.tree = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=types.SimpleNamespace(),
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_tokens,
            )
        )
        parts = {"tree_cache": self.tree, "token_to_kv_pool_allocator": self.allocator, "req_to_token_pool": None}
        kinds = {"is_hybrid_swa": False, "is_hybrid_ssm": False, "full_tokens_per_layer": None, "swa_tokens_per_layer": None}
        self.observer = SchedulerPoolStatsObserver(
            **parts, **kinds, session_controller=None, hisparse_coordinator=None, enable_hisparse=False, max_total_num_tokens=n_tokens
        )
        self.checker = SchedulerInvariantChecker(
            **parts,
            **kinds,
            disaggregation_mode=None,
            page_size=page_tokens,
            max_total_num_tokens=n_tokens,
            pool_stats_observer=self.observer,
            get_last_batch=lambda: None,
            get_running_batch=lambda: None,
            scheduler_stage_metrics=None,
        )
        self.scheduler = types.SimpleNamespace(
            **parts,
            waiting_queue=[],
            chunked_req=None,
            disaggregation_mode=types.SimpleNamespace(name="NULL"),
            running_batch=types.SimpleNamespace(is_empty=lambda: not self.running, batch_is_full=False),
            is_fully_idle=lambda: not self.running,
        )

    def second_pool(self) -> dict:
        try:
            self.make("mha", 1, 4096)
        except kvik.InvalidValueError as error:
            return {"error": str(error)}
        return {}

    # === What the scheduler does ===

    def start(self, name: str, tokens: list[int], max_new: int = 0) -> dict:
        """Admits a request and computes its prompt; false where there is no memory for it."""
        key = RadixKey(array("q", tokens), None)
        match = self.tree.match_prefix(MatchPrefixParams(key=key))
        n_cached, node = match.device_prefix_len, match.last_device_node
        self.tree.inc_lock_ref(node)
        budget = self.allocator.create_prefill_budget(self.tree)
        budget.total_offset += sum(request.max_new for request in self.running.values())
        n_new = len(tokens) - n_cached
        is_admitted, _ = budget.check_prefill(
            extend_input_len=n_new,
            total_tokens=n_new + max_new,
            max_new_tokens=max_new,
            input_tokens=len(tokens),
            swa_host_hit_length=0,
            chunk_limit=None,
        )
        if not is_admitted:
            self.tree.dec_lock_ref(node)
            return {"is_admitted": False}
        prefix = self.tree.path_device_indices(node)
        places = torch.cat((prefix, self.allocate(prefix, len(tokens))))
        self.running[name] = Request(tokens, node, places, n_cached, max_new)
        self.write(self.running[name], n_cached)
        return {"is_admitted": True, "n_cached": n_cached}

    def allocate(self, before: torch.Tensor, n_tokens: int) -> torch.Tensor:
        """Places for the tokens behind those that have one."""
        n_before = len(before)
        if self.allocator.page_size == 1:
            return alloc_token_slots(self.tree, n_tokens - n_before)
        lengths = torch.tensor([n_before]), torch.tensor([n_tokens])
        self.allocator.evict_to_free_tokens(self.tree, n_tokens - n_before + self.allocator.page_size)
        last = before[-1:] if n_before else torch.tensor([-1])
        places = self.allocator.alloc_extend(lengths[0], lengths[0], lengths[1], lengths[1], last, n_tokens - n_before)
        assert places is not None, "memory that was admitted is gone"
        return places

    def decode(self, name: str, tokens: list[int]) -> dict:
        """Computes tokens of an answer, as far as there is memory for them."""
        request = self.running[name]
        page_tokens = self.allocator.page_size
        n_decoded = 0
        for token in tokens:
            n_needed = page_tokens if len(request.tokens) % page_tokens == 0 else 0
            if not self.allocator.check_decode_capacity(num_tokens=n_needed, tree_cache=self.tree):
                break
            request.tokens = [*request.tokens, token]
            request.max_new = max(0, request.max_new - 1)
            if page_tokens == 1:
                places = alloc_token_slots(self.tree, 1)
            else:
                length = torch.tensor([len(request.tokens)])
                places = self.allocator.alloc_decode(length, length, request.places[-1:])
            request.places = torch.cat((request.places, places))
            self.write(request, len(request.tokens) - 1)
            n_decoded += 1
        return {"n_decoded": n_decoded}

    def finish(self, name: str) -> dict:
        """Ends a request; its whole pages stay in the prefix cache."""
        is_right = self.is_right(self.running[name])
        request = self.running.pop(name)
        page_tokens = self.allocator.page_size
        n_whole = len(request.tokens) // page_tokens * page_tokens
        key = RadixKey(array("q", request.tokens[:n_whole]), None)
        result = self.tree.insert(InsertParams(key=key, value=request.places[:n_whole].clone()))
        # What another request has put there meanwhile, and the page that is not whole.
        self.allocator.free(request.places[request.n_cached : result.prefix_len])
        self.allocator.free(request.places[n_whole:])
        self.tree.dec_lock_ref(request.node)
        return {"is_right": is_right}

    def step(self, n_waiting: int = 0) -> dict:
        self.scheduler.waiting_queue = [None] * n_waiting
        elastic_hooks.before_step(self.scheduler)
        return self.counts()

    def idle(self) -> dict:
        """A turn of the scheduler's loop without a request."""
        self.scheduler.waiting_queue = []
        elastic_hooks.before_step(self.scheduler)
        elastic_hooks.before_idle(self.scheduler)
        return self.counts()

    def start_scheduler(self) -> dict:
        """What the hook behind the scheduler's start says of this engine."""
        try:
            elastic_hooks.after_start(None, self.scheduler)
        except kvik.InvalidValueError as error:
            return {"error": str(error)}
        return {}

    def flush(self) -> dict:
        self.tree.reset()
        self.allocator.clear()
        return self.counts()

    def hooks(self) -> dict:
        names = ("__init__", "get_next_batch_to_run", "update_running_batch", "on_idle")
        return {"hooked": [name for name in names if hasattr(getattr(Scheduler, name), "__wrapped__")]}

    def most_new_tokens(self, n_input: int, n_new: int) -> dict:
        capacity = {"token_capacity": self.allocator.size, "sliding_window_size": None, "chunk_size": None}
        return {"n_tokens": self.allocator.max_new_tokens_for_memory(n_input, n_new, **capacity)}

    def next_chunk(self, n_tokens: int) -> dict:
        """How much of the next part of a long prompt may be computed, and whether others may be admitted."""
        budget = self.allocator.create_prefill_budget(self.tree)
        n_allowed = budget.available_chunk_tokens(n_tokens)
        fits = budget.can_allocate_prefill(paged_input=n_tokens, extend_input_len=n_tokens, max_new_tokens=0, chunk_limit=None)
        return {"n_tokens": n_allowed, "fits": fits, "has_capacity": budget.has_capacity()}

    def looks_again(self) -> dict:
        """Whether a step lets SGLang look at waiting requests again."""
        self.scheduler.running_batch.batch_is_full = True
        self.step(n_waiting=1)
        return {"is_so": not self.scheduler.running_batch.batch_is_full}

    def decode_alone(self, is_there: bool) -> dict:
        """A step of a batch of one request, with memory for it and without."""
        batch = types.SimpleNamespace(batch_size=lambda: 1, check_decode_mem=lambda: is_there)
        return {"updated": elastic_hooks.around_decode(lambda _, batch: True, self.scheduler, batch)}

    # === What is checked ===

    def counts(self) -> dict:
        """Bytes that are taken, tokens that SGLang sees, and whether its search for leaks finds one."""
        pages = self.allocator.pages
        stats = self.observer.get_pool_stats()
        n_private = sum(
            -(-len(request.tokens) // self.allocator.page_size) * self.allocator.page_size - request.n_cached
            for request in self.running.values()
        )
        has_leak, messages = self.checker._check_all_pools(stats, uncached=n_private)
        return {
            "taken_bytes": pages.memory.taken_bytes,
            "slab_bytes": pages.memory.slab_bytes,
            "slab_tokens": pages.slab_tokens,
            "n_available": self.allocator.available_size(),
            "n_used": stats.full_num_used,
            "n_evictable": self.tree.evictable_size(),
            "leak": messages if has_leak else None,
        }

    def write(self, request: Request, begin: int) -> None:
        made = values(request.tokens)[begin:]
        for number, buffer in enumerate(self.buffers()):
            buffer[request.places[begin:]] = (made + number)[:, None, None]

    def is_right(self, request: Request) -> bool:
        made = values(request.tokens)
        return all(
            bool((buffer[request.places] == (made + number)[:, None, None]).all())
            for number, buffer in enumerate(self.buffers())
        )

    def buffers(self) -> list[torch.Tensor]:
        if isinstance(self.pool, memory_pool.MLATokenToKVPool):
            return self.pool.kv_buffer
        return [*self.pool.k_buffer, *self.pool.v_buffer]

    def load(self, seed: int, n_steps: int, n_tokens: int) -> dict:
        """Random requests that share prefixes, answers and ends; every byte is compared and leaks are looked for in each step."""
        chance = random.Random(seed)
        n_refused = n_decoded = n_hits = n_started = 0
        taken: list[int] = []
        for number in range(n_steps):
            self.step()
            names = list(self.running)
            if chance.random() < 0.5:
                family = random.Random(chance.randrange(4)).choices(range(1, 500), k=n_tokens)
                own = chance.choices(range(1, 500), k=chance.randrange(1, n_tokens))
                answer = self.start(f"{number}", family[: chance.randrange(n_tokens)] + own, chance.randrange(64))
                n_started += answer["is_admitted"]
                n_hits += answer.get("n_cached", 0)
                n_refused += not answer["is_admitted"]
                # SGLang retracts a request where there is no room for others.
                if not answer["is_admitted"] and names and chance.random() < 0.5:
                    assert self.finish(chance.choice(names))["is_right"], "bytes of a request are wrong"
            elif names and chance.random() < 0.7:
                n_decoded += self.decode(chance.choice(names), chance.choices(range(1, 500), k=20))["n_decoded"]
            elif names:
                assert self.finish(chance.choice(names))["is_right"], "bytes of a request are wrong"
            counts = self.counts()
            assert counts["leak"] is None, counts["leak"]
            taken.append(counts["taken_bytes"])
        assert all(map(self.is_right, self.running.values()))
        for name in list(self.running):
            assert self.finish(name)["is_right"], "bytes of a request are wrong"
        return {"n_refused": n_refused, "n_decoded": n_decoded, "n_hits": n_hits, "n_started": n_started, "taken": taken}


def main() -> None:
    get_parallel().override_permanently(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, dcp_enabled=False)
    engine = Engine()
    print(json.dumps({"is_ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(engine, command.pop("op"))(**command)), flush=True)


if __name__ == "__main__":
    main()
