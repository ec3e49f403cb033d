"""A worker's half: bytes between the engine's blocks and the store."""

import itertools
from collections import defaultdict

import torch
from vllm.logger import init_logger

import kvik
from kvik.vllm.metadata import KvikMetadata, LoadOrder, SaveOrder
from kvik.vllm.settings import Geometry, Settings

logger = init_logger(__name__)


class WorkerHalf:
    """Loads and saves in the background; the engine's thread only begins them and asks what became of them."""

    def __init__(self, store: kvik.Store, settings: Settings, geometry: Geometry) -> None:
        self.store = store
        self.settings = settings
        self.geometry = geometry
        self.memory: kvik.EngineMemory | None = None
        self.loads: dict[str, tuple[kvik.Job | None, list[int]]] = {}
        self.saves: defaultdict[str, list[kvik.Job]] = defaultdict(list)
        # Requests that ended, whose blocks wait for their saves.
        self.ended: set[str] = set()
        self.failed_blocks: set[int] = set()
        self.counts = new_counts()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learns where the blocks lie."""
        tensors = [kv_caches[name] for name in self.geometry.layer_names]
        n_blocks = tensors[0].shape[0]
        pieces = list(itertools.chain.from_iterable(pieces_of(tensor) for tensor in tensors))
        self.memory = kvik.EngineMemory(
            pieces, n_blocks=n_blocks, block_tokens=self.geometry.block_tokens, owner=tensors
        )

    def begin_loads(self, orders: list[LoadOrder]) -> None:
        for order in orders:
            chain = self.store.unpack(order.chain)
            job = None
            if chain is not None and self.memory is not None:
                job = self.store.start_load(chain, order.first_block, self.memory, order.block_ids)
            self.loads[order.request_id] = (job, order.block_ids)

    def begin_saves(self, orders: list[SaveOrder]) -> None:
        for order in orders:
            chain = self.store.unpack(order.chain)
            if chain is None or self.memory is None:
                # Noted, so that the end of the request is answered.
                self.saves[order.request_id] += []
                continue
            job = self.store.start_save(chain, order.first_block, self.memory, order.block_ids)
            self.saves[order.request_id].append(job)
            self.counts["saved_blocks"] += len(order.block_ids) - order.first_block

    def wait_for_saves_of(self, request_ids: set[str]) -> None:
        """Their blocks are given to others: nothing may read them any more."""
        for request_id in request_ids:
            for job in self.saves.get(request_id, ()):
                if not job.cancel():
                    job.wait()

    def finished(self, ended_request_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose saves are done and that have ended, and requests whose loads are done."""
        self.ended |= ended_request_ids & self.saves.keys()
        saved = {request_id for request_id in self.ended if all(job.is_done for job in self.saves[request_id])}
        for request_id in saved:
            del self.saves[request_id]
        self.ended -= saved
        loaded = set()
        for request_id, (job, block_ids) in list(self.loads.items()):
            if job is not None and not job.is_done:
                continue
            n_loaded = 0 if job is None else job.result
            self.failed_blocks.update(block_ids[n_loaded:])
            self.counts["loaded_blocks"] += n_loaded
            self.counts["failed_blocks"] += len(block_ids) - n_loaded
            if n_loaded < len(block_ids):
                logger.warning(
                    "kvik: %d of %d blocks of request %s could be loaded", n_loaded, len(block_ids), request_id
                )
            loaded.add(request_id)
            del self.loads[request_id]
        return saved, loaded

    def take_failed_blocks(self) -> set[int]:
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed

    def take_counts(self) -> dict[str, int]:
        counts, self.counts = self.counts, new_counts()
        return counts


def new_counts() -> dict[str, int]:
    return {"loaded_blocks": 0, "failed_blocks": 0, "saved_blocks": 0}


def pieces_of(tensor: torch.Tensor) -> list[tuple[int, int, int]]:
    """Where the blocks of a layer lie: address, bytes of a block and bytes to the next, one for each contiguous piece.

    The first axis is that of the blocks. The order of the others in memory is any; what is contiguous in a block is
    one piece.
    """
    size = tensor.element_size()
    axes = sorted(range(1, tensor.dim()), key=lambda axis: tensor.stride(axis))
    n_bytes = size
    while axes and tensor.stride(axes[0]) * size == n_bytes:
        n_bytes *= tensor.shape[axes.pop(0)]
    block_stride = tensor.stride(0) * size
    offsets = [0]
    for axis in reversed(axes):
        steps = range(tensor.shape[axis])
        offsets = [offset + step * tensor.stride(axis) * size for offset in offsets for step in steps]
    return [(tensor.data_ptr() + offset, n_bytes, block_stride) for offset in offsets]
