"""vLLM's scheduler and both halves of the connector with a model that is played: of every token it writes a number that depends on
all tokens before it, and reads all that its layers would. One number that is wrong ends the program.

    hybrid_groups.py SOCKET MODEL_FOLDER SEED
"""

import itertools
import json
import random
import sys
from collections import Counter

import numpy
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvik.vllm import KvikConnector

N_BLOCKS = 110
N_LAYERS = 2
# A token has four numbers in a block of 32 tokens, and eight in one of 16.
PAGE_NUMBERS = 128
N_REQUESTS = 150


def spec(kind: type, block_tokens: int, **options: int):
    head_bytes = PAGE_NUMBERS * 8 // block_tokens
    sizes = {"block_size": block_tokens, "num_kv_heads": 1, "head_size": head_bytes // 8, "dtype": torch.float32}
    return kind(**sizes, **options)


def specs_of(seed: int) -> list:
    if seed % 3 == 0:
        return [spec(SlidingWindowSpec, 16, sliding_window=100)]
    if seed % 3 == 1:
        # Blocks of two sizes; a window shorter than a chunk and one longer.
        windows = [spec(SlidingWindowSpec, 16, sliding_window=length) for length in (40, 150)]
        return [spec(FullAttentionSpec, 32), *windows]
    # Windows behind which the last token reads another block, and sections.
    local = spec(ChunkedLocalAttentionSpec, 16, attention_chunk_size=96)
    return [spec(SlidingWindowSpec, 16, sliding_window=33), spec(FullAttentionSpec, 16), local]


def first_read(kind: object, token: int) -> int:
    """The first token that a token's layers read."""
    if isinstance(kind, SlidingWindowSpec):
        return max(0, token - kind.sliding_window + 1)
    if isinstance(kind, ChunkedLocalAttentionSpec):
        return token // kind.attention_chunk_size * kind.attention_chunk_size
    return 0


class Played:
    """The engine."""

    # More arguments of vLLM, and how often its prefix cache is emptied in a step.
    arguments: dict[str, object] = {}
    reset_share = 0.05

    def __init__(self, socket: str, model: str, seed: int, specs: list | None = None, **extra: object) -> None:
        self.rng = random.Random(seed)
        transfer = KVTransferConfig(
            kv_connector="KvikConnector",
            kv_connector_module_path="kvik.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"socket": socket, "lookup_wait_ms": 50, **extra},
        )
        arguments = EngineArgs(
            model=model,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=6,
            max_num_batched_tokens=140,
            enforce_eager=True,
            kv_transfer_config=transfer,
            async_scheduling=False,
            **self.arguments,
        )
        config = arguments.create_engine_config()
        self.specs = specs_of(seed) if specs is None else specs
        groups = [
            KVCacheGroupSpec([f"layer-{group}-{layer}" for layer in range(N_LAYERS)], kind)
            for group, kind in enumerate(self.specs)
        ]
        cache = KVCacheConfig(N_BLOCKS, [], groups, kv_cache_layout="LBHNC")
        config.cache_config.block_size = min(kind.block_size for kind in self.specs)
        block_tokens, hash_tokens = resolve_kv_cache_block_sizes(cache, config)
        config.cache_config.num_gpu_blocks = N_BLOCKS
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self.hasher = get_request_block_hasher(hash_tokens, hash_function)
        self.scheduler = Scheduler(
            config, cache, StructuredOutputManager(config), block_size=block_tokens, hash_block_size=hash_tokens
        )
        self.worker = KvikConnector(config, KVConnectorRole.WORKER, cache)
        # Groups lie on the same bytes, as in vLLM.
        self.layers = [torch.zeros(N_BLOCKS, PAGE_NUMBERS, dtype=torch.int64) for _ in range(N_LAYERS)]
        self.worker.register_kv_caches(
            {
                name: self.layers[layer].view(torch.float32).view(N_BLOCKS, 1, kind.block_size, -1)
                for group, kind in zip(groups, self.specs, strict=True)
                for layer, name in enumerate(group.layer_names)
            }
        )
        self.tables: dict[str, list[list[int]]] = {}
        self.numbers: dict[str, list[int]] = {}
        self.counts: Counter[str] = Counter()

    def add(self, name: str, tokens: list[int], n_answer_tokens: int) -> None:
        sampling = SamplingParams(temperature=0, max_tokens=n_answer_tokens, ignore_eos=True)
        self.scheduler.add_request(Request(name, tokens, sampling, None, block_hasher=self.hasher))
        self.numbers[name] = []

    def numbers_of(self, name: str, n_tokens: int) -> numpy.ndarray:
        """What the tokens of a request are written as."""
        numbers = self.numbers[name]
        tokens = self.scheduler.requests[name].all_token_ids
        for token in tokens[len(numbers) : n_tokens]:
            before = numbers[-1] if numbers else 17
            numbers.append((before * 6364136223846793005 + token * 1442695040888963407 + 11) % (1 << 62))
        return numpy.array(numbers[:n_tokens], dtype=numpy.int64)

    def slots(self, name: str, group: int, first: int, end: int) -> list[numpy.ndarray]:
        """Where some tokens lie in each layer."""
        block_tokens = self.specs[group].block_size
        tokens = numpy.arange(first, end)
        blocks = numpy.array(self.tables[name][group])[tokens // block_tokens]
        assert end == first or blocks.min() > 0, (name, group, "no block")
        width = PAGE_NUMBERS // block_tokens
        rows = blocks * block_tokens + tokens % block_tokens
        return [(layer.numpy().reshape(-1, width), rows) for layer in self.layers]

    def write(self, name: str, n_computed: int, n_tokens: int) -> None:
        numbers = self.numbers_of(name, n_computed + n_tokens)[n_computed:]
        for group in range(len(self.specs)):
            for layer, (memory, rows) in enumerate(self.slots(name, group, n_computed, n_computed + n_tokens)):
                memory[rows] = (numbers + 1000 * group + layer)[:, None]

    def read(self, name: str, n_computed: int, n_tokens: int) -> int:
        """Reads what the first token reads, and what was written behind it; the next token."""
        end = n_computed + n_tokens
        numbers = self.numbers_of(name, end)
        for group, kind in enumerate(self.specs):
            first = first_read(kind, n_computed)
            for layer, (memory, rows) in enumerate(self.slots(name, group, first, end)):
                right = numbers[first:] + 1000 * group + layer
                assert (memory[rows] == right[:, None]).all(), f"{name}: group {group} is wrong behind {n_computed}"
        return 10 + int(numbers[-1]) % 300

    def step(self) -> None:
        output = self.scheduler.schedule()
        orders = output.kv_connector_metadata
        for order in orders.group_loads:
            if self.rng.random() < 0.1 and order.parts:
                # A load that brings nothing in one group.
                self.rng.choice(order.parts).chain = b""
        self.worker.handle_preemptions(orders)
        self.worker.bind_connector_metadata(orders)
        sampled = {}
        rows = [(new.req_id, True, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        cached = output.scheduled_cached_reqs
        for name, ids, n_computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            rows.append((name, name in cached.resumed_req_ids, ids, n_computed))
        for name, is_new, ids, _ in rows:
            if is_new:
                self.tables[name] = [[] for _ in self.specs]
            for table, new in zip(self.tables[name], ids or [[]] * len(self.specs), strict=True):
                table.extend(new)
        for copy in output.kv_cache_block_copies or ():
            for layer in self.layers:
                layer[copy.dst_block_id] = layer[copy.src_block_id]
        # As in a layer: all tokens of a step are written before any is read.
        for name, _, _, n_computed in rows:
            self.write(name, n_computed, output.num_scheduled_tokens[name])
        for name, _, _, n_computed in rows:
            n_tokens = output.num_scheduled_tokens[name]
            token = self.read(name, n_computed, n_tokens)
            is_last = n_computed + n_tokens == self.scheduler.requests[name].num_tokens
            sampled[name] = [token] if is_last else []
        self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(output.finished_req_ids)
        self.counts["failed"] += len(results.failed_recving)
        self.counts["loaded"] += len(results.finished_recving)
        transfer = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.worker.get_block_ids_with_load_errors(),
        )
        self.worker.clear_connector_metadata()
        names = list(sampled)
        places = {name: place for place, name in enumerate(names)}
        made = ModelRunnerOutput(names, places, [sampled[name] for name in names], kv_connector_output=transfer)
        self.scheduler.update_from_output(output, made)
        self.counts["overtaken"] += len(orders.overtaken)

    def run(self) -> None:
        starts = [self.rng.choices(range(10, 400), k=700) for _ in range(4)]
        names = (str(number) for number in itertools.count())
        waiting = N_REQUESTS
        while waiting or self.scheduler.has_requests():
            if waiting and len(self.scheduler.requests) < 9 and self.rng.random() < 0.5:
                waiting -= 1
                start = self.rng.choice(starts)[: self.rng.choice([64, 128, 192, self.rng.randrange(1, 700)])]
                rest = self.rng.choices(range(10, 400), k=self.rng.choice([0, 1, 30]))
                self.add(next(names), start + rest, self.rng.randrange(1, 90))
            if self.rng.random() < 0.02 and self.scheduler.requests:
                name = self.rng.choice(list(self.scheduler.requests))
                self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
                self.counts["aborted"] += 1
            self.counts["preempted"] += sum(
                request.status == RequestStatus.PREEMPTED for request in self.scheduler.requests.values()
            )
            if self.rng.random() < self.reset_share:
                self.scheduler.reset_prefix_cache()
            self.step()


def main() -> None:
    played = Played(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    try:
        played.run()
    finally:
        played.worker.shutdown()
        played.scheduler.shutdown()
    print(json.dumps(dict(played.counts, **played.worker.groups_worker.counts)), flush=True)


if __name__ == "__main__":
    main()
