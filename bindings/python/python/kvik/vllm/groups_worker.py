"""A worker's half for a model with several groups of KV."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from vllm.logger import init_logger

import kvik
from kvik.vllm.groups import Group, GroupStores, by_blocks
from kvik.vllm.metadata import GroupsLoadOrder, GroupsSaveOrder
from kvik.vllm.worker import Running, event_of, memory_of, new_counts, number_of, pieces_of

logger = init_logger(f"vllm.{__name__}")


@dataclass
class RunningParts:
    """A load or save that was begun, in all groups that it is about."""

    parts: list[Running] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return all(part.is_done for part in self.parts)

    @property
    def n_blocks(self) -> int:
        return sum(len(part.block_ids) for part in self.parts)

    @property
    def n_loaded_blocks(self) -> int:
        return sum(part.job.result for part in self.parts if part.job is not None)

    def wait(self) -> None:
        for part in self.parts:
            if part.job is not None:
                part.job.wait()

    def stop(self) -> None:
        """Keeps from starting what has not, and waits for the rest."""
        for part in self.parts:
            if part.job is not None and not part.job.cancel():
                part.job.wait()


class GroupsWorker:
    """Loads and saves in the background. A load has come when all groups have theirs, and failed if one has not."""

    def __init__(self, stores: GroupStores, groups: Sequence[Group], waits_for_saves: bool) -> None:
        self.stores = stores
        self.groups = groups
        # Whether a save must end in the step in which it begins.
        self.waits_for_saves = waits_for_saves
        self.memories: list[kvik.EngineMemory] = []
        self.device = torch.device("cpu")
        self.loads: dict[str, RunningParts] = {}
        # Of each request by their numbers.
        self.saves: dict[str, dict[int, RunningParts]] = {}
        # Requests that ended, whose blocks wait for their saves.
        self.ended: set[str] = set()
        self.failed_requests: set[str] = set()
        self.counts = new_counts()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Learns where the blocks lie. Groups whose layers lie on the same bytes share an `EngineMemory`."""
        kv_caches = by_blocks(kv_caches, self.groups[0].geometry.n_blocks)
        by_pieces: dict[tuple[object, ...], kvik.EngineMemory] = {}
        self.memories = []
        for group, store in zip(self.groups, self.stores.stores, strict=True):
            geometry = group.geometry
            tensors = [kv_caches[name] for name in geometry.layer_names]
            pieces = list(itertools.chain.from_iterable(pieces_of(tensor) for tensor in tensors))
            place = (*group.shape, *pieces)
            if place not in by_pieces:
                memory = by_pieces[place] = memory_of(tensors, pieces, geometry.block_tokens)
                if memory.block_bytes != geometry.page_bytes * len(tensors):
                    raise kvik.InvalidValueError(
                        f"a block of group {group.number} has {memory.block_bytes} bytes; allowed: "
                        f"{geometry.page_bytes * len(tensors)}, as its configuration says"
                    )
                store.prepare(memory)
            self.memories.append(by_pieces[place])
        self.device = kv_caches[self.groups[0].geometry.layer_names[0]].device

    def begin_loads(self, orders: Sequence[GroupsLoadOrder]) -> None:
        # The blocks may have had other owners, whose work is in the engine's stream.
        event = event_of(self.device) if orders else None
        for order in orders:
            running = self.loads[order.request_id] = RunningParts()
            for part in order.parts:
                store = self.stores.stores[part.group]
                chain = store.unpack(part.chain)
                job = None
                if chain is not None and self.memories:
                    memory = self.memories[part.group]
                    job = store.start_load(chain, part.first_block, memory, part.block_ids, after=number_of(event))
                running.parts.append(Running(job, part.block_ids, event))

    def begin_saves(self, orders: Sequence[GroupsSaveOrder]) -> None:
        event = event_of(self.device) if orders else None
        for order in orders:
            # Noted in any case, so that the end of the request is answered.
            running = self.saves.setdefault(order.request_id, {})[order.number] = RunningParts()
            for part in order.parts:
                store = self.stores.stores[part.group]
                chain = store.unpack(part.chain)
                job = None
                if chain is not None and self.memories:
                    job = store.start_save(
                        chain,
                        part.first_block,
                        self.memories[part.group],
                        part.block_ids,
                        after=number_of(event),
                        pin_s=order.pin_s,
                        ttl_s=order.ttl_s,
                        priority=order.priority,
                    )
                    self.counts["saved_blocks"] += len(part.block_ids) - part.first_block
                running.parts.append(Running(job, part.block_ids, event))
            if self.waits_for_saves:
                running.wait()

    def wait_for_saves(self, numbers: set[int]) -> None:
        """Blocks that these saves read are written next. A number that is not there has ended."""
        if not numbers:
            return
        for saves in self.saves.values():
            for number in numbers & saves.keys():
                saves[number].wait()

    def wait_for_saves_of(self, request_ids: set[str]) -> None:
        """Their blocks are given to others: nothing may read them any more."""
        for request_id in request_ids:
            for save in self.saves.get(request_id, {}).values():
                save.stop()

    def finished(self, ended_request_ids: set[str]) -> tuple[set[str], set[str]]:
        """Requests whose saves are done and that have ended, and requests whose loads are done, also in vain."""
        self.ended |= ended_request_ids & self.saves.keys()
        saved = {name for name in self.ended if all(save.is_done for save in self.saves[name].values())}
        for request_id in saved:
            del self.saves[request_id]
        self.ended -= saved
        loaded = {request_id for request_id, load in self.loads.items() if load.is_done}
        for request_id in loaded:
            load = self.loads.pop(request_id)
            n_failed = load.n_blocks - load.n_loaded_blocks
            self.counts["loaded_blocks"] += load.n_loaded_blocks
            self.counts["failed_blocks"] += n_failed
            if n_failed > 0:
                self.failed_requests.add(request_id)
                logger.warning(
                    "kvik: %d of %d blocks of request %s were loaded", load.n_loaded_blocks, load.n_blocks, request_id
                )
        return saved, loaded

    def take_failed_requests(self) -> set[str]:
        failed, self.failed_requests = self.failed_requests, set()
        return failed

    def take_counts(self) -> dict[str, int]:
        counts, self.counts = self.counts, new_counts()
        return counts
