"""What the scheduler tells the workers in every step, and what they answer."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclass
class LoadOrder:
    """Blocks of a request that come from the store."""

    request_id: str
    # The chain up to the last block, packed.
    chain: bytes
    # The first block's number in the sequence.
    first_block: int
    block_ids: list[int]


@dataclass
class SaveOrder:
    """Blocks of a request that go to the store after this step's forward pass."""

    request_id: str
    # The chain up to the last block, packed.
    chain: bytes
    # The first block's number in the sequence that is not stored yet.
    first_block: int
    # From the start of the sequence on.
    block_ids: list[int]
    # Seconds for which the chunks are not evicted from memory.
    pin_s: float | None = None
    # Seconds after which the chunks are not served any more.
    ttl_s: float | None = None
    priority: str = "normal"


@dataclass
class GroupLoad:
    """Blocks of one group that come from the store, for a model with several groups."""

    # The group's number.
    group: int
    # Its chunks, packed.
    chain: bytes
    # The first block's number in the chain.
    first_block: int
    block_ids: list[int]


@dataclass
class GroupsLoadOrder:
    """Blocks of a request in all groups that come from the store; they come all or none does."""

    request_id: str
    parts: list[GroupLoad]


@dataclass
class GroupSave:
    """Blocks of one group that go to the store."""

    group: int
    # Its chunks, packed.
    chain: bytes
    # The first block's number in the chain that is not stored yet.
    first_block: int
    # From the start of the chain on.
    block_ids: list[int]


@dataclass
class GroupsSaveOrder:
    """Blocks of a request that go to the store after this step's forward pass."""

    request_id: str
    # Counts the orders from 1 on.
    number: int
    parts: list[GroupSave]
    # As in `SaveOrder`.
    pin_s: float | None = None
    ttl_s: float | None = None
    priority: str = "normal"


@dataclass
class ElasticOrders:
    """What a worker is to do with its memory, beside this step's forward pass and those behind it.

    Slabs of `park` are not used by this step nor by later ones, until they are asked for again and have come.
    """

    # Counts the orders from 1 on.
    number: int
    # Slabs whose memory is given back; a worker that has none for one ignores it.
    park: list[int]
    # Slabs that are to get memory, in this order.
    take: list[int]
    # The file of the table in which slabs are offered while the scheduler sleeps.
    lease: str | None = None
    # The file of the table in which workers note what has come.
    arrivals: str | None = None
    # Of all slabs that were asked for and have not come, those that the next step needs.
    needed: list[int] = field(default_factory=list)
    # Whether this step computes nothing.
    is_idle: bool = False
    # Whether others may be waited for, or a refusal is wanted at once.
    is_patient: bool = True
    # Whether no request can go on without this memory.
    is_starved: bool = False


@dataclass
class ElasticReport(KVConnectorWorkerMetadata):
    """What a worker, or all of them, made of the orders up to one.

    It says how things are, and not what happened since the last report: ranks may come to have the memory of a slab in different
    steps, and the scheduler sends orders before it has seen the reports of earlier ones.
    """

    # The last orders that were seen.
    number: int
    # Slabs that were asked for by then and have no memory, and those of them that were refused, each with the orders that asked
    # for it. All others that were asked for have it.
    missing: set[int] = field(default_factory=set)
    refused: set[tuple[int, int]] = field(default_factory=set)
    # The most slabs to use, where others need memory or less may be held.
    most_slabs: int | None = None
    # Memory behind all slabs that have some.
    taken_bytes: int = 0
    # Whether slabs may be offered: the table was found.
    can_lend: bool = False
    # How many workers this is the report of.
    n_ranks: int = 1

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ElasticReport":
        """A slab has memory where no rank misses it."""
        assert isinstance(other, ElasticReport)
        bounds = [bound for bound in (self.most_slabs, other.most_slabs) if bound is not None]
        return ElasticReport(
            number=min(self.number, other.number),
            missing=self.missing | other.missing,
            refused=self.refused | other.refused,
            most_slabs=min(bounds, default=None),
            taken_bytes=self.taken_bytes + other.taken_bytes,
            can_lend=self.can_lend and other.can_lend,
            n_ranks=self.n_ranks + other.n_ranks,
        )


@dataclass
class KvikMetadata(KVConnectorMetadata):
    loads: list[LoadOrder] = field(default_factory=list)
    # Loads that this step waits for.
    step_loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    # Requests whose blocks are given to others in this step.
    preempted: set[str] = field(default_factory=set)
    # Of a model with several groups; it has no others.
    group_loads: list[GroupsLoadOrder] = field(default_factory=list)
    group_saves: list[GroupsSaveOrder] = field(default_factory=list)
    # Numbers of saves that read blocks which are written in this step.
    overtaken: set[int] = field(default_factory=set)
    # Where the memory is elastic.
    elastic: ElasticOrders | None = None
