"""A worker's half: bytes between the engine's blocks and the store."""

import itertools
from collections import defaultdict
from dataclasses import dataclass

import torch
from vllm.logger import init_logger

import kvik
from kvik.vllm.layers import LayerLoads
from kvik.vllm.metadata import LoadOrder, SaveOrder
from kvik.vllm.settings import Geometry, Settings

logger = init_logger(f"vllm.{__name__}")


@dataclass
class Running:
    """A load or save that was begun; its event lives as long as it runs."""

    job: kvik.Job | None
    block_ids: list[int]
    event: torch.cuda.Event | None

    @property
    def is_done(self) -> bool:
        return self.job is None or self.job.is_done


class WorkerHalf:
    """Loads and saves in the background; the engine's thread only begins them and asks what became of them."""

    def __init__(self, store: kvik.Store, settings: Settings, geometry: Geometry) -> None:
        self.store = store
        self.settings = settings
        self.geometry = geometry
        self.memory: kvik.EngineMemory | None = None
        self.device = torch.device("cpu")
        self.loads: dict[str, Running] = {}
        self.layers = LayerLoads(store, settings, geometry.layer_names)
        self.saves: defaultdict[str, list[Running]] = defaultdict(list)
        # Requests that ended, whose blocks wait for their saves.
        self.ended: set[str] = set()
        self.failed_blocks: set[int] = set()
        self.counts = new_counts()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learns where the blocks lie."""
        tensors = [kv_caches[name] for name in self.geometry.layer_names]
        by_layer = [pieces_of(tensor) for tensor in tensors]
        # Else nothing says which pieces are those of a layer.
        self.layers.knows_layers = len({len(pieces) for pieces in by_layer}) == 1
        pieces = list(itertools.chain.from_iterable(by_layer))
        self.device = tensors[0].device
        self.memory = memory_of(tensors, pieces, self.geometry.block_tokens)
        self.store.prepare(self.memory)

    def event(self) -> torch.cuda.Event | None:
        return event_of(self.device)

    def begin_loads(self, orders: list[LoadOrder]) -> None:
        # The blocks may have had other owners, whose work is in the engine's stream.
        event = self.event() if orders else None
        for order in orders:
            chain = self.store.unpack(order.chain)
            job = None
            if chain is not None and self.memory is not None:
                job = self.store.start_load(
                    chain, order.first_block, self.memory, order.block_ids, after=number_of(event)
                )
            self.loads[order.request_id] = Running(job, order.block_ids, event)

    def begin_step_loads(self, orders: list[LoadOrder]) -> None:
        """Begins loads that end with this step; the engine's stream is empty, since it is a CPU."""
        self.layers.begin(orders, self.memory)

    def begin_saves(self, orders: list[SaveOrder]) -> None:
        event = self.event() if orders else None
        for order in orders:
            chain = self.store.unpack(order.chain)
            job = None
            if chain is not None and self.memory is not None:
                job = self.store.start_save(
                    chain,
                    order.first_block,
                    self.memory,
                    order.block_ids,
                    after=number_of(event),
                    pin_s=order.pin_s,
                    ttl_s=order.ttl_s,
                    priority=order.priority,
                )
                self.counts["saved_blocks"] += len(order.block_ids) - order.first_block
            # Noted in any case, so that the end of the request is answered.
            self.saves[order.request_id].append(Running(job, order.block_ids, event))

    def wait_for_saves_of(self, request_ids: set[str]) -> None:
        """Their blocks are given to others: nothing may read them any more."""
        for request_id in request_ids:
            for save in self.saves.get(request_id, ()):
                if save.job is not None and not save.job.cancel():
                    save.job.wait()

    def finished(self, ended_request_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose saves are done and that have ended, and requests whose loads are done."""
        self.ended |= ended_request_ids & self.saves.keys()
        saved = {request_id for request_id in self.ended if all(save.is_done for save in self.saves[request_id])}
        for request_id in saved:
            del self.saves[request_id]
        self.ended -= saved
        loaded = {request_id for request_id, load in self.loads.items() if load.is_done}
        for request_id in loaded:
            load = self.loads.pop(request_id)
            self.note_load(request_id, load.block_ids, 0 if load.job is None else load.job.result)
        for order, n_loaded in self.layers.end_step():
            # vLLM does not wait to be told that these have ended.
            self.note_load(order.request_id, order.block_ids, n_loaded)
            self.counts["step_loaded_blocks"] += n_loaded
        return saved, loaded

    def note_load(self, request_id: str, block_ids: list[int], n_loaded: int) -> None:
        """Notes what became of a load that has ended."""
        self.failed_blocks.update(block_ids[n_loaded:])
        self.counts["loaded_blocks"] += n_loaded
        self.counts["failed_blocks"] += len(block_ids) - n_loaded
        if n_loaded < len(block_ids):
            logger.warning("kvik: %d of %d blocks of request %s were loaded", n_loaded, len(block_ids), request_id)

    def take_failed_blocks(self) -> set[int]:
        failed, self.failed_blocks = self.failed_blocks, set()
        return failed

    def take_counts(self) -> dict[str, int]:
        counts, self.counts = self.counts, new_counts()
        return counts


def memory_of(
    tensors: list[torch.Tensor], pieces: list[tuple[int, int, int]], block_tokens: int
) -> kvik.EngineMemory:
    """The blocks of layers, with one tensor each."""
    device = tensors[0].device
    return kvik.EngineMemory(
        pieces,
        n_blocks=tensors[0].shape[0],
        block_tokens=block_tokens,
        owner=tensors,
        cuda_device=device.index if device.type == "cuda" else None,
    )


def event_of(device: torch.device) -> torch.cuda.Event | None:
    """Behind all work that the engine has begun; `None` where the engine works at once."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def number_of(event: torch.cuda.Event | None) -> int | None:
    """The driver's name of an event."""
    return None if event is None else event.cuda_event


def new_counts() -> dict[str, int]:
    return {"loaded_blocks": 0, "step_loaded_blocks": 0, "failed_blocks": 0, "saved_blocks": 0}


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
