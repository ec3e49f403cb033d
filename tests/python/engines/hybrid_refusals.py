"""What kvik says of groups of KV that it does not store, one line of JSON; the specs are vLLM's own."""

import dataclasses
import json
from types import SimpleNamespace

import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

import kvik
import kvik.vllm.groups as module
from kvik.vllm.groups import has_windows, read_groups
from kvik.vllm.settings import Settings

SIZES = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL = FullAttentionSpec(**SIZES)
WINDOW = SlidingWindowSpec(**SIZES, sliding_window=100)
MAMBA = MambaSpec(block_size=16, shapes=((2, 2),), dtypes=(torch.float32,))
SINK = SinkFullAttentionSpec(**SIZES, sink_len=4)
PLAIN = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "tensor_parallel_size": 2}


def cache_of(specs: list) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer-{number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(8, [], groups, kv_cache_layout="LBHNC")


def older_answer(specs: list) -> str:
    """What a vLLM before 0.30 gets."""
    module.KNOWS_FAILED_LOADS = False
    try:
        return str(has_windows(Settings(), cache_of(specs)))
    except kvik.InvalidValueError as error:
        return str(error)
    finally:
        module.KNOWS_FAILED_LOADS = True


def answer(specs: list, settings: Settings = Settings(), **parallel: int) -> str:
    config = SimpleNamespace(parallel_config=SimpleNamespace(**(PLAIN | parallel)))
    try:
        read = read_groups(config, settings, cache_of(specs))
    except kvik.InvalidValueError as error:
        return str(error)
    return f"{len(read)} groups of {len({group.shape for group in read})} shapes: {read[0].geometry.layout}"


wider = dataclasses.replace(WINDOW, sliding_window=101)
answers = {
    "window": answer([FULL, WINDOW]),
    "wider": answer([FULL, wider]),
    "alone": answer([WINDOW]),
    "has_windows": [has_windows(Settings(), cache_of(specs)) for specs in ([FULL], [WINDOW], [FULL, WINDOW])],
    "memory_alone": has_windows(Settings(elastic=True, store=False), cache_of([WINDOW])),
    "older": [older_answer(specs) for specs in ([FULL], [FULL, WINDOW], [WINDOW])],
    "mamba": answer([FULL, MAMBA]),
    "sink": answer([SINK, WINDOW]),
    "elastic": answer([FULL, WINDOW], Settings(elastic=True)),
    "stages": answer([FULL, WINDOW], pipeline_parallel_size=2),
    "context": answer([FULL, WINDOW], decode_context_parallel_size=2),
}
print(json.dumps(answers), flush=True)
