"""One chunk that is written, read back and compared before the engine serves."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

import kvik
from kvik.vllm.groups import Group, by_blocks
from kvik.vllm.settings import Geometry, Settings, attach, layout_name
from kvik.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")

TIMEOUT_S = 10.0


def run_self_test(
    config: "VllmConfig", settings: Settings, geometry: Geometry, kv_caches: dict[str, torch.Tensor]
) -> None:
    """Moves the first blocks to the store and back. They are free at the start, and zero again afterwards.

    A store that is not there, or has no room, is not tested. One that gives other bytes back ends the start: it would give
    wrong KV to requests.
    """
    store = attach(
        config, settings, geometry, 0, n_ranks=1, layout=f"{layout_name(config, geometry)}/self-test"
    )
    with store:
        chunk_tokens = store.chunk_tokens
        if chunk_tokens is None:
            return
        n_blocks = chunk_tokens // geometry.block_tokens
        blocks = list(range(1, 1 + n_blocks))
        tensors = [kv_caches[name] for name in geometry.layer_names]
        if tensors[0].shape[0] <= n_blocks:
            return
        half = WorkerHalf(store, settings, geometry)
        half.register(kv_caches)
        expected = [torch.randint(0, 256, byte_view(tensor, blocks).shape, dtype=torch.uint8) for tensor in tensors]
        for tensor, pattern in zip(tensors, expected, strict=True):
            write_bytes(tensor, blocks, pattern)
        # Tokens of this process alone: an older chunk must not be found.
        chain = store.chain([int.from_bytes(os.urandom(2)) for _ in range(chunk_tokens)])
        save = store.start_save(chain, 0, half.memory, blocks)
        save.wait(TIMEOUT_S)
        for tensor in tensors:
            tensor[blocks] = 0
        if save.result == n_blocks:
            load = store.start_load(chain, 0, half.memory, blocks)
            load.wait(TIMEOUT_S)
            if load.is_done and load.result == n_blocks:
                for tensor, pattern in zip(tensors, expected, strict=True):
                    if not torch.equal(byte_view(tensor, blocks).cpu(), pattern):
                        raise kvik.KvikError("the store gave other bytes back than were written")
                logger.info("kvik: a chunk was written, read back and is the same")
            if not load.is_done:
                load.wait()
        for tensor in tensors:
            tensor[blocks] = 0


def run_group_tests(
    config: "VllmConfig", settings: Settings, groups: Sequence[Group], kv_caches: dict[str, torch.Tensor]
) -> None:
    """Tests one group of each shape."""
    kv_caches = by_blocks(kv_caches, groups[0].geometry.n_blocks)
    for group in {group.shape: group for group in groups}.values():
        run_self_test(config, settings, group.geometry, kv_caches)


def byte_view(tensor: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    """The bytes of some blocks, copied; as numbers, some would not be equal to themselves."""
    return tensor[blocks].contiguous().view(torch.uint8)


def write_bytes(tensor: torch.Tensor, blocks: list[int], pattern: torch.Tensor) -> None:
    tensor[blocks] = pattern.view(tensor.dtype).to(tensor.device)
