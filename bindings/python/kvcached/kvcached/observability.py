"""What can be seen of engines and their managers, as records of plain values."""

from dataclasses import asdict, dataclass, fields
from typing import Any

from kvcached.integration import SUPPORTED_ATTENTION_TYPES, SUPPORTED_KV_LAYOUTS
from kvcached.pool_registry import get_registered_kv_cache_pools
from kvcached.utils import PAGE_SIZE

# Names and meanings of the fields are those of kvcached.
SCHEMA_VERSION = "kvcached.observability.v1"


@dataclass(frozen=True)
class RuntimeSnapshot:
    """How an engine has set up this package in its process."""

    schema_version: str
    engine: str
    initialized: bool
    device: str | None
    world_size: int
    pp_rank: int
    async_sched: bool
    contiguous_layout: bool
    is_worker: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class KVCachePoolSnapshot:
    """The state of one manager.

    Reserved blocks are allocated, and the first ones that are given, so both other counts of blocks include them. A page is
    counted once for all layers; `mapped_bytes` are those of all of them. Counts are of moments close to each other.
    """

    schema_version: str
    pool_type: str
    integration: str | None
    pool_name: str | None
    group_id: int
    num_layers: int
    num_kv_buffers: int
    page_size_bytes: int
    # In one buffer of one layer.
    block_size_bytes: int
    total_blocks: int
    available_blocks: int
    allocated_blocks: int
    reserved_blocks: int
    available_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    null_block_reserved: bool
    # Addresses, of all buffers of a layer, and of all layers.
    virtual_per_layer_bytes: int
    virtual_total_bytes: int
    mapped_bytes: int
    total_pages: int | None
    free_pages: int | None
    inuse_pages: int | None
    # Mapped and free.
    reserved_pages: int | None
    # What more could be mapped.
    available_physical_pages: int | None
    effective_free_pages: int | None
    # Whether more is in use than the limit allows, and how many blocks it allows.
    in_shrink: bool
    shrink_target_blocks: int | None
    resize_target_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def get_capabilities() -> dict[str, Any]:
    """What this package can do, for programs that ask instead of comparing versions. What is missing is `False`."""
    return {
        "schema_version": SCHEMA_VERSION,
        "features": {
            "runtime_snapshot": True,
            "kv_cache_pool_snapshot": True,
            "registered_kv_cache_pool_snapshots": True,
            "read_only": True,
            "policy_control": False,
            "instance_memory_limit": True,
            "operation_counters": False,
            "runtime_reservation_reporting": False,
        },
        "backends": {
            "kv_pooling": True,
            "elastic_capacity": True,
            "resize": True,
            "trim": True,
            "default_page_size_bytes": PAGE_SIZE,
            "contiguous_layout_default": False,
            "non_kv_memory_management": False,
        },
        "integrations": {
            "vllm": integration(pools_states=False),
            "sglang": integration(pools_states=True),
        },
        "pool_snapshot_fields": [field.name for field in fields(KVCachePoolSnapshot)],
        "runtime_snapshot_fields": [field.name for field in fields(RuntimeSnapshot)],
        "operation_counter_names": [],
    }


def integration(*, pools_states: bool) -> dict[str, Any]:
    """What the interface for an engine takes; `pools_states` where it has memory for the states of linear layers too."""
    return {
        "attention_types": list(SUPPORTED_ATTENTION_TYPES),
        "kv_layouts": list(SUPPORTED_KV_LAYOUTS),
        "hybrid_linear_state_pooling": pools_states,
        "hybrid_linear_state_pooling_mode": "separate_allocation" if pools_states else None,
        # These are of patches of the engines, which are not here.
        "prefix_caching": False,
        "page_aware_eviction": False,
        "worker_ipc": False,
    }


def build_runtime_snapshot(**state: Any) -> RuntimeSnapshot:
    """A snapshot of the fields of `RuntimeSnapshot`."""
    return RuntimeSnapshot(schema_version=SCHEMA_VERSION, **state)


def build_kv_cache_pool_snapshot(manager: Any, *, integration: str | None = None) -> KVCachePoolSnapshot:
    """The state of a manager, or of an object with its attributes."""
    pages = page_state(manager.page_allocator)
    n_buffers = manager.num_layers * manager.num_kv_buffers
    block_bytes = manager.block_mem_size * n_buffers
    # Counts that are not of one moment may differ by more than there is.
    n_available = max(0, manager.available_size())
    n_allocated = max(0, manager._get_num_alloced_blocks())
    n_reserved = len(manager.reserved_blocks)
    n_physical = manager.page_allocator.get_avail_physical_pages()
    return KVCachePoolSnapshot(
        schema_version=SCHEMA_VERSION,
        pool_type="kv_cache",
        integration=integration,
        pool_name=manager.pool_name,
        group_id=manager.group_id,
        num_layers=manager.num_layers,
        num_kv_buffers=manager.num_kv_buffers,
        page_size_bytes=manager.page_size,
        block_size_bytes=manager.block_mem_size,
        total_blocks=manager.num_blocks,
        available_blocks=n_available,
        allocated_blocks=n_allocated,
        reserved_blocks=n_reserved,
        available_bytes=n_available * block_bytes,
        allocated_bytes=n_allocated * block_bytes,
        reserved_bytes=n_reserved * block_bytes,
        null_block_reserved=getattr(manager, "null_block", None) is not None,
        virtual_per_layer_bytes=manager.mem_size * manager.num_kv_buffers,
        virtual_total_bytes=manager.mem_size * n_buffers,
        mapped_bytes=mapped_bytes(manager, pages),
        **pages,
        available_physical_pages=n_physical,
        effective_free_pages=min(pages["free_pages"], n_physical + pages["reserved_pages"]),
        in_shrink=bool(getattr(manager, "in_shrink", False)),
        shrink_target_blocks=getattr(manager, "target_num_blocks", None),
        resize_target_bytes=manager.page_allocator.get_resize_target(),
    )


def page_state(allocator: Any) -> dict[str, int]:
    """The counts of pages, of one moment where the allocator gives them so."""
    if hasattr(allocator, "get_page_state"):
        state = allocator.get_page_state()
        return {name: state[name] for name in ("total_pages", "free_pages", "inuse_pages", "reserved_pages")}
    return {
        "total_pages": allocator.get_num_total_pages(),
        "free_pages": allocator.get_num_free_pages(),
        "inuse_pages": allocator.get_num_inuse_pages(),
        "reserved_pages": allocator.get_num_reserved_pages(),
    }


def mapped_bytes(manager: Any, pages: dict[str, int]) -> int:
    """Bytes of the pages with a block in use."""
    page_bytes = getattr(manager.page_allocator, "page_bytes", None)
    if page_bytes is None:
        page_bytes = manager.page_size * manager.num_layers * manager.num_kv_buffers
    return pages["inuse_pages"] * page_bytes


def get_registered_kv_cache_pool_snapshots(*, integration: str | None = None) -> list[KVCachePoolSnapshot]:
    """The states of the managers of an engine, or of all, by engine, name and group."""
    snapshots = []
    for manager, known_as in get_registered_kv_cache_pools(integration=integration):
        if hasattr(manager, "observability_snapshot"):
            snapshots.append(manager.observability_snapshot(integration=known_as))
        else:
            snapshots.append(build_kv_cache_pool_snapshot(manager, integration=known_as))
    return sorted(snapshots, key=lambda one: (one.integration or "", one.pool_name or "", one.group_id))


def get_registered_kv_cache_pool_snapshot_dicts(*, integration: str | None = None) -> list[dict[str, Any]]:
    return [snapshot.to_dict() for snapshot in get_registered_kv_cache_pool_snapshots(integration=integration)]
