"""Measures a running server of LMCache with LMCache's own client code; runs in the environment that has LMCache.

The calls are those that LMCache's connector for vLLM makes: a worker's transfer context for stores and retrieves, and
the request client of a scheduler for lookups. One process measures one way of transfer.
"""

import argparse
import itertools
import json
import os
import pathlib
import random
import time
from collections.abc import Callable

import torch
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.transfer_context import TransferContext, create_transfer_context
from lmcache.v1.multiprocess.transport.base import RequestClient
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

CHUNK_TOKENS = 256
BLOCK_TOKENS = 16
BLOCKS_PER_CHUNK = CHUNK_TOKENS // BLOCK_TOKENS

# What is stored and read: 256 MiB in 8 chunks, 4 KiB a token and layer.
TRANSFER_TOKENS = 2048
TRANSFER_LAYERS = 32
TRANSFER_WIDTH = 2048
# Half of the blocks are stored from, half are read into: 1 GiB each, more than the processor's caches hold.
POOL_BLOCKS = 1024
LAYOUTS = ["rows", "planes"]
N_ROW_AXES = 3

# Small chunks, so that all of a long prompt are there: 64 bytes a token and layer.
LOOKUP_TOKENS = 100_000
LOOKUP_LAYERS = 2
LOOKUP_WIDTH = 32
VOCABULARY = 128_000

TIMEOUT_S = 60.0
WORLD_SIZE = 1
WORKER_ID = 0

# The server keeps what it knows of an instance by this number: each context needs its own.
INSTANCE_IDS = itertools.count(os.getpid() << 8)


class WrongAnswer(Exception):
    """The server did not do what was asked, or gave other bytes back."""


class KvMemory:
    """An engine's paged KV memory with the context that moves its blocks to and from the server."""

    def __init__(self, client: RequestClient, mode: str, model: str, layers: dict[str, torch.Tensor]) -> None:
        self.client = client
        self.model = model
        self.layers = layers
        self.context: TransferContext = create_transfer_context(
            layers, instance_id=next(INSTANCE_IDS), req_client=client, mode=mode
        )
        hints = {"kv_layout": "NHD"}
        self.context.register(layers, model, WORLD_SIZE, BLOCKS_PER_CHUNK, TIMEOUT_S, layout_hints=hints)

    def key(self, tokens: list[int], request: str, worker: int | None = WORKER_ID) -> IPCCacheServerKey:
        """The key of all whole chunks of a prompt."""
        return IPCCacheServerKey(
            model_name=self.model,
            world_size=WORLD_SIZE,
            worker_id=worker,
            token_ids=tuple(tokens),
            start=0,
            end=len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS,
            request_id=request,
            num_kv_readers=1,
        )

    def store(self, key: IPCCacheServerKey, blocks: list[int]) -> None:
        self.transfer(self.context.submit_store, key, blocks)

    def retrieve(self, key: IPCCacheServerKey, blocks: list[int]) -> None:
        """Reads what a lookup has found for this request before."""
        self.transfer(self.context.submit_retrieve, key, blocks)

    def transfer(self, submit: Callable, key: IPCCacheServerKey, blocks: list[int]) -> None:
        event = self.context.create_recorded_event()
        future = submit(key.request_id, key, self.layers, [blocks], event, BLOCKS_PER_CHUNK)
        if not future.result(timeout=TIMEOUT_S):
            raise WrongAnswer(f"{submit.__name__} failed")

    def lookup(self, tokens: list[int], request: str) -> int:
        """Chunks of the prompt that the server has; they are locked until the session ends."""
        self.client.lookup(self.key(tokens, request, worker=None), WORLD_SIZE).result(timeout=TIMEOUT_S)
        n_chunks = None
        while n_chunks is None:
            n_chunks = self.client.query_prefetch_status(request).result(timeout=TIMEOUT_S)
        return n_chunks

    def forget_request(self, tokens: list[int], request: str) -> None:
        self.client.free_lookup_locks(self.key(tokens, request, worker=None), WORLD_SIZE).result(timeout=TIMEOUT_S)
        self.client.end_session(request).result(timeout=TIMEOUT_S)

    def close(self) -> None:
        if (future := self.context.unregister()) is not None:
            future.result(timeout=TIMEOUT_S)
        self.context.close()


def new_layers(layout: str, n_layers: int, n_blocks: int, width: int) -> dict[str, torch.Tensor]:
    """Random KV of `width` values of 16 bits a token and layer.

    `rows` has one piece of memory for a block and layer, as models with one latent vector a token have; `planes` has
    one for keys and one for values.
    """
    shape = {
        "rows": (n_blocks, BLOCK_TOKENS, width),
        "planes": (2, n_blocks, BLOCK_TOKENS, 8, width // 16),
    }[layout]

    def new_layer() -> torch.Tensor:
        words = torch.empty(n_blocks * BLOCK_TOKENS * width // 4, dtype=torch.int64).random_()
        return words.view(torch.float16).view(shape)

    return {f"layers.{idx}": new_layer() for idx in range(n_layers)}


def blocks_of(layer: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """The bits of some blocks; as numbers, some would not be equal to themselves."""
    return layer.view(torch.int16).index_select(block_axis(layer), torch.tensor(blocks))


def block_axis(layer: torch.Tensor) -> int:
    return 0 if layer.dim() == N_ROW_AXES else 1


def new_prompt(n_tokens: int) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(n_tokens)]


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def find_stored(memory: KvMemory, tokens: list[int], request: str) -> None:
    """Looks a stored prompt up until it is found: a server that copies answers before the chunks can be found."""
    n_chunks = len(tokens) // CHUNK_TOKENS
    deadline = time.monotonic() + TIMEOUT_S
    while (n_found := memory.lookup(tokens, request)) != n_chunks:
        memory.forget_request(tokens, request)
        if deadline < time.monotonic():
            raise WrongAnswer(f"{n_found} of {n_chunks} stored chunks were found")


def measure_round(memory: KvMemory, request: str) -> tuple[float, float]:
    """Stores a prompt from random blocks, reads it into others, and compares them."""
    tokens = new_prompt(TRANSFER_TOKENS)
    key = memory.key(tokens, request)
    n_blocks = TRANSFER_TOKENS // BLOCK_TOKENS
    sources = random.sample(range(POOL_BLOCKS // 2), n_blocks)
    targets = random.sample(range(POOL_BLOCKS // 2, POOL_BLOCKS), n_blocks)
    store_s = seconds(lambda: memory.store(key, sources))

    find_stored(memory, tokens, request)
    for layer in memory.layers.values():
        layer.view(torch.int16).index_fill_(block_axis(layer), torch.tensor(targets), 0)
    retrieve_s = seconds(lambda: memory.retrieve(key, targets))
    memory.client.end_session(request).result(timeout=TIMEOUT_S)
    for name, layer in memory.layers.items():
        if not torch.equal(blocks_of(layer, sources), blocks_of(layer, targets)):
            raise WrongAnswer(f"{name} was read back with other bytes than were stored")
    return store_s, retrieve_s


def measure_transfers(client: RequestClient, mode: str, layout: str, n_rounds: int) -> dict[str, list[float]]:
    """Seconds of stores and retrieves. A first pass touches all memory; then the server is emptied and reuses it."""
    layers = new_layers(layout, TRANSFER_LAYERS, POOL_BLOCKS, TRANSFER_WIDTH)
    memory = KvMemory(client, mode, f"transfers-{layout}", layers)
    for idx in range(n_rounds):
        measure_round(memory, f"warm-up-{idx}")
    client.clear(True).result(timeout=TIMEOUT_S)
    rounds = [measure_round(memory, f"round-{idx}") for idx in range(n_rounds)]
    client.clear(True).result(timeout=TIMEOUT_S)
    memory.close()
    stores, retrieves = zip(*rounds, strict=True)
    return {"store_s": list(stores), "retrieve_s": list(retrieves)}


def measure_lookups(client: RequestClient, mode: str, n_lookups: int) -> dict[str, list[float]]:
    """Seconds of lookups, from the tokens to the number of chunks, of a prompt that is there and of others."""
    tokens = new_prompt(LOOKUP_TOKENS)
    n_chunks = LOOKUP_TOKENS // CHUNK_TOKENS
    layers = new_layers("rows", LOOKUP_LAYERS, n_chunks * BLOCKS_PER_CHUNK, LOOKUP_WIDTH)
    memory = KvMemory(client, mode, "lookups", layers)
    memory.store(memory.key(tokens, "prompt"), list(range(n_chunks * BLOCKS_PER_CHUNK)))
    find_stored(memory, tokens, "prompt")
    memory.forget_request(tokens, "prompt")

    def measure(name: str, prompt: list[int], n_wanted: int) -> float:
        begin = time.perf_counter()
        n_found = memory.lookup(prompt, name)
        lookup_s = time.perf_counter() - begin
        if n_found != n_wanted:
            raise WrongAnswer(f"{n_found} of {n_wanted} chunks were found")
        memory.forget_request(prompt, name)
        return lookup_s

    n_warm_up = 3
    hits = [measure(f"hit-{idx}", tokens, n_chunks) for idx in range(n_warm_up + n_lookups)]
    misses = [measure(f"miss-{idx}", [VOCABULARY + idx, *tokens[1:]], 0) for idx in range(n_warm_up + n_lookups)]
    client.clear(True).result(timeout=TIMEOUT_S)
    memory.close()
    return {"lookup_hit_s": hits[n_warm_up:], "lookup_miss_s": misses[n_warm_up:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--mode", choices=["engine_driven", "lmcache_driven"], required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--lookups", type=int, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True, help="where the seconds are written, as JSON")
    options = parser.parse_args()
    random.seed(1)
    torch.manual_seed(1)
    client = RequestClientFactory.create(options.url)
    n_server_tokens = client.get_chunk_size().result(timeout=TIMEOUT_S)
    if n_server_tokens != CHUNK_TOKENS:
        raise WrongAnswer(f"the server has chunks of {n_server_tokens} tokens, not of {CHUNK_TOKENS}")
    transfers = {layout: measure_transfers(client, options.mode, layout, options.rounds) for layout in LAYOUTS}
    lookups = measure_lookups(client, options.mode, options.lookups)
    client.close()
    options.output.write_text(json.dumps({"transfers": transfers, "lookups": lookups}))


if __name__ == "__main__":
    main()
