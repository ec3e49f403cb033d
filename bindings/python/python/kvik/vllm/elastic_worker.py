"""A worker's half of the elastic memory: maps and unmaps what the scheduler's half orders.

The process that holds memory is the member of the ledger that is granted it: each rank on its own device, or all of a CPU
under one name. So memory is granted once, where it is, and a process that dies gives back what it held.
"""

import threading
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

import kvik
from kvik.elastic.allocation import Allocation
from kvik.elastic.lease import LeaseTable
from kvik.elastic.slab_memory import SlabMemory, pieces_of_layer
from kvik.elastic.slabs import Piece
from kvik.vllm.allocation import ROUNDING_BYTES, buffer_sizes
from kvik.vllm.elastic_plan import ElasticPlan
from kvik.vllm.metadata import ElasticOrders, ElasticReport

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

# How long the end of the worker waits for its thread at most.
LISTEN_S = 0.5


class ElasticWorker:
    """The memory of one rank.

    Invariant: pages of every slab that the scheduler may use are taken; before the first orders, those of all blocks that
    vLLM warms up with.

    A thread listens to what others want: while the scheduler sleeps, it gives back slabs that are offered.
    """

    def __init__(self, plan: ElasticPlan, cache: "KVCacheConfig") -> None:
        self.plan = plan
        self.allocation = Allocation(
            "vLLM",
            buffer_sizes(cache),
            torch.int8,
            plan.page_bytes,
            ROUNDING_BYTES,
            max_bytes=plan.limit_bytes,
            group=plan.group,
            directory=plan.directory,
        )
        # Since 0.32 vLLM asks for the context of its allocation. Before, that is between the start of the connector and `register`.
        self.is_asked_for_context = hasattr(KVConnectorBase_V1, "get_mem_pool_context")
        if not self.is_asked_for_context:
            self.allocation.__enter__()
        # None before the tensors are known.
        self.slabs: SlabMemory | None = None
        self.report = ElasticReport()
        # Held while anything of the above is used, but by the allocation itself.
        self.lock = threading.Lock()
        self.lease: LeaseTable | None = None
        self.n_obeyed = 0
        # Bytes that others want and did not get.
        self.wanted_bytes = 0
        self.is_closed = threading.Event()
        self.listener = threading.Thread(target=self.listen, name="kvik-elastic", daemon=True)

    @property
    def memory(self) -> kvik.PagedMemory:
        memory = self.allocation.memory
        if memory is None:
            raise kvik.InvalidValueError("the KV was not allocated where `elastic` expects it")
        return memory

    def register(self, kv_caches: dict[str, torch.Tensor], n_first_blocks: int) -> None:
        """Checks that the KV lies where it was expected, and takes what is used before the first step."""
        if not self.is_asked_for_context:
            self.allocation.__exit__(None, None, None)
        begin, end = self.memory.address, self.memory.address + self.memory.n_pages * self.plan.page_bytes
        pieces: set[Piece] = set()
        for name, tensor in kv_caches.items():
            if not begin <= tensor.data_ptr() < end:
                raise kvik.InvalidValueError(f"the KV of {name} is not in the memory of kvik; allowed with `elastic`: all is")
            pieces.update(pieces_of_layer(name, tensor, self.plan.slabs.n_blocks, begin))
        self.slabs = SlabMemory(self.memory, self.allocation.buffer, self.plan.slabs, sorted(pieces))
        self.check_limit()
        first = range(self.plan.slabs.holding(min(n_first_blocks, self.plan.slabs.n_blocks)))
        if not self.slabs.take(list(first)):
            raise kvik.KvikError(
                f"there is no memory for the first {len(first)} x {self.slabs.slab_bytes} bytes of KV: "
                f"{self.memory.claimable_bytes} bytes may be held"
            )
        self.listener.start()

    def close(self) -> None:
        self.is_closed.set()
        if self.listener.is_alive():
            self.listener.join()

    def listen(self) -> None:
        while not self.is_closed.is_set():
            n_bytes = self.memory.wanted_bytes(timeout_s=LISTEN_S)
            if n_bytes > 0:
                self.lend(n_bytes)

    def lend(self, n_bytes: int) -> None:
        """Gives others slabs that are offered; the rest goes to the scheduler with the next report."""
        with self.lock:
            slab_bytes = self.slabs.slab_bytes
            slabs: list[int] = []
            if self.lease is not None:
                # What other ranks took is lost for the scheduler already.
                slabs = [slab for slab in self.lease.gone(self.n_obeyed) if slab in self.slabs.taken]
                n_missing = -(-n_bytes // slab_bytes) - len(slabs)
                slabs += self.lease.take(max(0, n_missing), self.n_obeyed)
            self.slabs.give_back([slab for slab in slabs if slab in self.slabs.taken])
            self.wanted_bytes = max(0, n_bytes - len(slabs) * slab_bytes)

    def check_limit(self) -> None:
        """A request of the greatest length must fit, as vLLM itself wants it of its KV memory."""
        n_slabs = self.plan.slabs.holding(self.plan.n_request_blocks + 1)
        pages = self.slabs.pages.missing(range(n_slabs))
        if len(pages) * self.plan.page_bytes > self.memory.limit_bytes:
            raise kvik.InvalidValueError(
                f"at most {self.memory.limit_bytes} bytes of KV may be held (`elastic_limit`, kvctl); allowed: "
                f"{len(pages) * self.plan.page_bytes} or more for one request of max_model_len, or a smaller --max-model-len"
            )

    def obey(self, orders: ElasticOrders) -> None:
        """Gives memory back and takes memory, before this step's forward pass."""
        with self.lock:
            if self.lease is None and orders.lease is not None:
                self.lease = LeaseTable.open(orders.lease, len(self.plan.slabs))
            # Before the first orders there is what vLLM warmed up with.
            first = self.slabs.taken - {0} if orders.number == 1 else ()
            self.slabs.give_back(sorted({slab for slab in orders.park if slab in self.slabs.taken}.union(first)))
            takes = [slab for slab in orders.take if slab not in self.slabs.taken]
            if takes and not self.slabs.take(takes):
                if orders.is_starved:
                    # A part of it would not help, and another engine that waits may need no more than that.
                    self.memory.note_starved()
                else:
                    for slab in takes:
                        if not self.slabs.take([slab]):
                            break
            self.report.taken.update(slab for slab in orders.take if slab in self.slabs.taken)
            self.report.refused.update(slab for slab in orders.take if slab not in self.slabs.taken)
            self.n_obeyed = orders.number

    def take_report(self) -> ElasticReport:
        """What became of the orders since the last report, and what others want."""
        with self.lock:
            report, self.report = self.report, ElasticReport()
            wanted_bytes, self.wanted_bytes = self.wanted_bytes, 0
            report.taken_bytes = self.slabs.taken_bytes
            report.can_lend = self.lease is not None
            excess_bytes = max(wanted_bytes, report.taken_bytes - self.memory.claimable_bytes)
            if excess_bytes > 0:
                n_excess = -(-excess_bytes // self.slabs.slab_bytes)
                report.most_slabs = max(1, len(self.slabs.taken) - n_excess)
            return report
