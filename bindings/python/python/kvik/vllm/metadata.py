"""What the scheduler tells the workers in every step."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


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
class KvikMetadata(KVConnectorMetadata):
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    # Requests whose blocks are given to others in this step.
    preempted: set[str] = field(default_factory=set)
