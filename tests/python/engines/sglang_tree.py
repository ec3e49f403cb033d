"""SGLang's radix tree and its publisher of events, without a model: prompts go in as tokens.

The methods of `Engine` from `start` to `held` are the commands of a test (`commands.py`). Of the memory behind the tree only the number of
tokens is kept. What the engine's scheduler does with the tree for a request is done here in the same order.
"""

import argparse
import json
import time
from array import array

import torch
from commands import new_parser, obey
from sglang.srt.disaggregation.kv_events import EventPublisherFactory, KVEventBatch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode


class Memory:
    """Counts the tokens that have a place."""

    device = "cpu"

    def __init__(self, n_tokens: int) -> None:
        self.n_free = n_tokens

    def free_segment(self, places: torch.Tensor, start_pos: int) -> None:
        del start_pos
        self.n_free += len(places)


class Engine:
    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings = settings
        self.memory = Memory(settings.n_tokens)
        self.tree = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.memory,
                page_size=settings.page_tokens,
                is_eagle=settings.eagle,
                enable_kv_cache_events=True,
            )
        )
        self.publisher = EventPublisherFactory.create(
            json.dumps(
                {
                    "publisher": "zmq",
                    "endpoint": settings.endpoint,
                    "replay_endpoint": settings.replay_endpoint,
                    "buffer_steps": settings.buffer_steps,
                    "topic": settings.topic,
                }
            )
        )
        self.running: dict[str, TreeNode] = {}
        self.n_batches = 0
        # An empty tree begins with an event that says so.
        self.step()

    def step(self) -> None:
        """The end of a scheduler's step."""
        if events := self.tree.take_events():
            self.publisher.publish(KVEventBatch(ts=time.time(), events=events))
            self.n_batches += 1

    def key(self, tokens: list[int], salt: str | None = None) -> RadixKey:
        return RadixKey(array("q", tokens), None, cache_salt=salt)

    def insert(self, key: RadixKey) -> TreeNode | None:
        """Finds room for what the tree has not of a key, and puts it in; `None` if there is none."""
        n_held = self.tree.match_prefix(MatchPrefixParams(key=key)).device_prefix_len
        n_new = len(key.page_aligned(self.settings.page_tokens)) - n_held
        if n_new > self.memory.n_free:
            self.tree.evict(EvictParams(num_tokens=n_new - self.memory.n_free))
        # What was held may have had to leave too.
        n_held = self.tree.match_prefix(MatchPrefixParams(key=key)).device_prefix_len
        n_new = len(key.page_aligned(self.settings.page_tokens)) - n_held
        if n_new > self.memory.n_free:
            return None
        value = torch.zeros(len(key.token_ids), dtype=torch.int64)
        result = self.tree.insert(InsertParams(key=key, value=value))
        self.memory.n_free -= len(key.page_aligned(self.settings.page_tokens)) - result.prefix_len
        return self.tree.match_prefix(MatchPrefixParams(key=key)).last_device_node

    def start(self, name: str, tokens: list[int], output: list[int], chunk: int, salt: str | None = None) -> dict:
        """Computes a prompt, `chunk` tokens a step, and an answer, and keeps it; false if there is no room."""
        n_cached = self.tree.match_prefix(MatchPrefixParams(key=self.key(tokens, salt))).device_prefix_len
        ends = list(range(min(n_cached + chunk, len(tokens)), len(tokens), chunk))
        node = None
        for end in [*ends, len(tokens), len(tokens) + len(output)]:
            last = self.insert(self.key([*tokens, *output][:end], salt))
            self.step()
            if node is not None:
                self.tree.dec_lock_ref(node)
                node = None
            if last is None:
                return {"is_taken": False}
            self.tree.inc_lock_ref(last)
            node = last
        self.running[name] = node
        return {"is_taken": True, "n_cached": n_cached}

    def finish(self, name: str) -> dict:
        self.tree.dec_lock_ref(self.running.pop(name))
        self.step()
        return {}

    def reset(self) -> dict:
        if self.running:
            return {"is_done": False}
        self.tree.reset()
        self.memory.n_free = self.settings.n_tokens
        self.step()
        return {"is_done": True}

    def held(self, prompts: list[list[int]]) -> dict:
        """Tokens of each prompt that a request would find computed."""
        keys = [self.key(tokens) for tokens in prompts]
        return {"n_tokens": [self.tree.match_prefix(MatchPrefixParams(key=key)).device_prefix_len for key in keys]}


def main() -> None:
    parser = new_parser("kv@sglang-0@tiny")
    parser.add_argument("--n-tokens", type=int, default=1024)
    parser.add_argument("--page-tokens", type=int, default=16)
    parser.add_argument("--eagle", action="store_true", help="with a draft model: keys of pairs of tokens")
    engine = Engine(parser.parse_args())
    obey(engine)


if __name__ == "__main__":
    main()
