"""A worker's half of the elastic memory: has mapped and unmapped what the scheduler's half orders, and reports how far that is.

The process that holds memory is the member of the ledger that is granted it: each rank on its own device, or all of a CPU
under one name. So memory is granted once, where it is, and a process that dies gives back what it held.
"""

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

import kvik
from kvik.elastic.allocation import Allocation
from kvik.elastic.arrivals import ArrivalTable
from kvik.elastic.lease import LeaseTable
from kvik.elastic.mapper import Mapper
from kvik.elastic.slab_memory import SlabMemory, pieces_of_layer
from kvik.elastic.slabs import Piece
from kvik.vllm.allocation import ROUNDING_BYTES, buffer_sizes
from kvik.vllm.elastic_plan import ElasticPlan
from kvik.vllm.metadata import ElasticOrders, ElasticReport

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

# How long the end of the worker waits for its thread at most.
LISTEN_S = 0.5

# How long the report of a step with tokens waits for memory that the next step needs and that is being mapped. The step runs on its
# device meanwhile, for longer than this with a prompt; later the memory would come to use a step later.
REPORT_WAIT_S = 0.005

# How often it is looked whether the limit has fallen below what is held.
LIMIT_S = 0.05

# How long a step without tokens waits for memory: requests that need none may have come meanwhile.
IDLE_WAIT_S = 0.02


class ElasticWorker:
    """The memory of one rank.

    Invariant: pages of every slab that the scheduler may use are taken; before the first orders, those of all blocks that
    vLLM warms up with.

    One thread maps and unmaps. Another one listens to what others want: while the scheduler sleeps, it gives back slabs that are
    offered.
    """

    # When it is looked next whether the limit has fallen.
    limit_at = 0.0

    def __init__(self, plan: ElasticPlan, cache: "KVCacheConfig", rank: int) -> None:
        self.plan = plan
        self.rank = rank
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
        # None before the tensors are known. After that only the mapper's thread uses `slabs`.
        self.slabs: SlabMemory | None = None
        self.mapper: Mapper | None = None
        # Held while anything below is used.
        self.lock = threading.Lock()
        self.lease: LeaseTable | None = None
        self.arrivals: ArrivalTable | None = None
        self.n_obeyed = 0
        # Whether the step of the last orders computes nothing.
        self.is_idle = False
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

    def register(self, kv_caches: dict[str, torch.Tensor], n_first_blocks: int, *, is_settled: bool = False) -> None:
        """Checks that the KV lies where it was expected, and takes what is used before the first step.

        `is_settled`: memory is reported only when its zeros are written, because not only the engine's stream writes there.
        """
        if not self.is_asked_for_context:
            self.allocation.__exit__(None, None, None)
        begin, end = self.memory.address, self.memory.address + self.memory.n_pages * self.plan.page_bytes
        pieces: set[Piece] = set()
        for name, tensor in kv_caches.items():
            if not begin <= tensor.data_ptr() < end:
                raise kvik.InvalidValueError(f"the KV of {name} is not in the memory of kvik; allowed with `elastic`: all is")
            pieces.update(pieces_of_layer(name, tensor, self.plan.slabs.n_blocks, begin))
        self.slabs = SlabMemory(self.memory, self.allocation.buffer, self.plan.slabs, sorted(pieces))
        self.slabs.is_settled = is_settled
        self.check_limit()
        first = range(self.plan.slabs.holding(min(n_first_blocks, self.plan.slabs.n_blocks)))
        if not self.slabs.take(list(first)):
            raise kvik.KvikError(
                f"there is no memory for the first {len(first)} x {self.slabs.slab_bytes} bytes of KV: "
                f"{self.memory.claimable_bytes} bytes may be held"
            )
        self.mapper = Mapper(self.slabs)
        self.mapper.start()
        self.listener.start()

    def close(self) -> None:
        self.is_closed.set()
        if self.mapper is not None:
            self.mapper.close()
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
            present, n_leaving = self.mapper.counts()
            n_missing = -(-n_bytes // slab_bytes) - n_leaving
            slabs: list[int] = []
            if self.lease is not None:
                # What other ranks took is lost for the scheduler already.
                slabs = [slab for slab in self.lease.gone(self.n_obeyed) if slab in present]
                slabs += self.lease.take(max(0, n_missing - len(slabs)), self.n_obeyed)
            self.mapper.let_go(slabs)
            self.wanted_bytes = max(0, n_bytes - (n_leaving + len(slabs)) * slab_bytes)

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
        """Has the mapper do what is ordered, beside this step's forward pass, which is not begun yet."""
        with self.lock:
            if self.lease is None and orders.lease is not None:
                self.lease = LeaseTable.open(orders.lease, len(self.plan.slabs))
            if self.arrivals is None and orders.arrivals is not None and self.rank < self.plan.n_ranks:
                self.arrivals = ArrivalTable.open(orders.arrivals, self.plan.n_ranks, len(self.plan.slabs))
                if self.arrivals is not None:
                    self.mapper.note_arrived = partial(self.arrivals.note, self.rank)
            # Before the first orders there is what vLLM warmed up with.
            first = self.mapper.counts()[0] - {0} if orders.number == 1 else set()
            self.slabs.note_stream()
            self.mapper.obey(
                orders.number,
                first.union(orders.park),
                orders.take,
                orders.needed,
                is_starved=orders.is_starved,
                is_patient=orders.is_patient,
            )
            self.n_obeyed = orders.number
            self.is_idle = orders.is_idle

    def take_report(self) -> ElasticReport:
        """How far the orders are obeyed, and what others want."""
        # Not under the lock: slabs are lent meanwhile.
        self.mapper.wait_for_needed(IDLE_WAIT_S if self.is_idle else REPORT_WAIT_S, is_idle=self.is_idle)
        with self.lock:
            report = ElasticReport(self.n_obeyed, can_lend=self.lease is not None)
            with self.mapper.changed:
                self.mapper.check()
                report.missing = {*self.mapper.wanted, *self.mapper.refused}
                report.refused = set(self.mapper.refused.items())
                report.taken_bytes = self.mapper.taken_bytes
                n_present, n_leaving = len(self.mapper.present), self.mapper.n_leaving
            excess_bytes, self.wanted_bytes = self.wanted_bytes, 0
            if (now := time.monotonic()) >= self.limit_at:
                self.limit_at = now + LIMIT_S
                leaving_bytes = n_leaving * self.slabs.slab_bytes
                excess_bytes = max(excess_bytes, report.taken_bytes - leaving_bytes - self.memory.claimable_bytes)
            if excess_bytes > 0:
                n_excess = -(-excess_bytes // self.slabs.slab_bytes)
                report.most_slabs = max(1, n_present - n_excess)
            return report
