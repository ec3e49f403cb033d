"""vLLM's cache of blocks and its publisher of events, without a model: prompts go in as tokens.

The methods of `Engine` from `start` to `held` are the commands of a test (`commands.py`). What the engine's scheduler does with the
cache for a request is done here in the same order, and events are published after each step, as there.
"""

import argparse
import time

import torch
from commands import new_parser, obey
from vllm.config.kv_events import KVEventsConfig
from vllm.distributed.kv_events import EventPublisherFactory, KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

# No token of a prompt.
FILLER = (1 << 31) - 1


class Engine:
    def __init__(self, settings: argparse.Namespace) -> None:
        hash_function = get_hash_fn_by_name(settings.hash)
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(settings.block_tokens, hash_function)
        sizes = {"block_size": settings.block_tokens, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        specs = [FullAttentionSpec(**sizes)]
        if settings.window:
            specs.insert(settings.window_group, SlidingWindowSpec(**sizes, sliding_window=settings.window))
        groups = [KVCacheGroupSpec([f"layer{place}"], spec) for place, spec in enumerate(specs)]
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=settings.n_blocks, kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=1 << 20,
            scheduler_block_size=settings.block_tokens,
            hash_block_size=settings.block_tokens,
            enable_caching=True,
            enable_kv_cache_events=True,
        )
        self.publisher = EventPublisherFactory.create(
            KVEventsConfig(
                enable_kv_cache_events=True,
                publisher="zmq",
                endpoint=settings.endpoint,
                replay_endpoint=settings.replay_endpoint,
                buffer_steps=settings.buffer_steps,
                topic=settings.topic,
            )
        )
        self.running: dict[str, Request] = {}
        self.n_requests = 0
        self.n_batches = 0

    def step(self) -> None:
        """The end of a scheduler's step."""
        if events := self.manager.take_events():
            self.publisher.publish(KVEventBatch(ts=time.time(), events=events))
            self.n_batches += 1

    def request(self, tokens: list[int], salt: str | None = None) -> Request:
        self.n_requests += 1
        sampling = SamplingParams(max_tokens=1 << 16)
        return Request(str(self.n_requests), tokens, sampling, None, cache_salt=salt, block_hasher=self.hasher)

    def start(self, name: str, tokens: list[int], output: list[int], chunk: int, salt: str | None = None) -> dict:
        """Computes a prompt, `chunk` tokens a step, and an answer, and keeps it; false if there is no room."""
        request = self.request(tokens, salt)
        computed, n_cached, _ = self.manager.get_computed_blocks(request)
        cached = {"num_new_computed_tokens": n_cached, "new_computed_blocks": computed}
        # The tokens behind the cached ones, in pieces, then those of the answer one by one.
        lengths = [min(chunk, len(tokens) - place) for place in range(n_cached, len(tokens), chunk)]
        for n_tokens in lengths:
            if self.manager.allocate_slots(request, n_tokens, **cached) is None:
                return self.give_up(request)
            request.num_computed_tokens += n_tokens + cached.get("num_new_computed_tokens", 0)
            cached = {}
            self.step()
        for token in output:
            request.append_output_token_ids([token])
            if self.manager.allocate_slots(request, 1) is None:
                return self.give_up(request)
            request.num_computed_tokens += 1
            self.step()
        self.running[name] = request
        return {"is_taken": True, "n_cached": n_cached}

    def give_up(self, request: Request) -> dict:
        self.manager.free(request)
        self.step()
        return {"is_taken": False}

    def finish(self, name: str) -> dict:
        self.manager.free(self.running.pop(name))
        self.step()
        return {}

    def reset(self) -> dict:
        is_done = self.manager.reset_prefix_cache()
        self.step()
        return {"is_done": is_done}

    def held(self, prompts: list[list[int]]) -> dict:
        """Tokens of each prompt that a request would find computed. A request computes at least one token, hence one
        more than the prompt has."""
        requests = [self.request([*tokens, FILLER]) for tokens in prompts]
        return {"n_tokens": [self.manager.get_computed_blocks(request)[1] for request in requests]}


def main() -> None:
    parser = new_parser("kv@vllm-0@tiny")
    parser.add_argument("--n-blocks", type=int, default=64)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--hash", default="sha256")
    parser.add_argument("--window", type=int, default=0, help="tokens of a second, sliding group; 0 for none")
    parser.add_argument("--window-group", type=int, default=1, help="the number of that group")
    engine = Engine(parser.parse_args())
    obey(engine)
    engine.publisher.shutdown()


if __name__ == "__main__":
    main()
