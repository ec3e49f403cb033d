"""Limits by revisions, and what can be seen of managers, in kvcached's interface over kvik."""

import gc
import json

import pytest

from kvcached_engine import Engine
from polling import eventually

from kvcached import control, observability, pool_registry


class Pool:
    """What `control` needs of a manager."""

    def __init__(self, name: str, capacity: int, status: str = "applied") -> None:
        self.pool_name, self.group_id = name, 0
        self.mem_size, self.num_layers, self.num_kv_buffers = capacity, 1, 1
        self.status = status

    def set_memory_limit(self, limit_bytes: int, *, revision: int) -> dict:
        self.given = (limit_bytes, revision)
        return {"status": self.status, "mapped_bytes": 2, "effective_limit_bytes": limit_bytes}


@pytest.fixture(autouse=True)
def no_pools():
    pool_registry.clear_registered_kv_cache_pools()
    yield
    pool_registry.clear_registered_kv_cache_pools()


@pytest.fixture
def engine():
    engine = Engine(pytest.importorskip("torch"))
    yield engine
    engine.interfaces.shutdown_kvcached()


def test_managers_are_known_while_they_are_used_and_by_their_engine():
    first, second = Pool("a", 1), Pool("b", 1)
    pool_registry.register_kv_cache_pool(first, integration="vllm")
    pool_registry.register_kv_cache_pool(second, integration="sglang")
    pool_registry.register_kv_cache_pool(second, integration="sglang")
    assert pool_registry.get_registered_kv_cache_pools(integration="sglang") == [(second, "sglang")]
    del first
    gc.collect()
    assert pool_registry.get_registered_kv_cache_pools() == [(second, "sglang")]
    pool_registry.clear_registered_kv_cache_pools(integration="vllm")
    assert len(pool_registry.get_registered_kv_cache_pools()) == 1
    pool_registry.clear_registered_kv_cache_pools(integration="sglang")
    assert pool_registry.get_registered_kv_cache_pools() == []


def test_a_limit_of_a_process_is_split_by_capacity_and_all_of_it_is_given():
    pools = [Pool("b", 100), Pool("a", 200), Pool("c", 3)]
    for pool in pools:
        pool_registry.register_kv_cache_pool(pool)
    state = control.set_instance_memory_limit(100, revision=5)
    assert [pool.given for pool in pools] == [(33, 5), (66, 5), (1, 5)]
    assert (state["status"], state["effective_limit_bytes"], state["mapped_bytes"]) == ("applied", 100, 6)
    # More than there are addresses for is as much as there are.
    control.set_instance_memory_limit(10_000, revision=6)
    assert [pool.given[0] for pool in pools] == [100, 200, 3]


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        (["applied", "deferred"], "deferred"),
        (["deferred", "rejected"], "rejected"),
        (["rejected", "stale"], "stale"),
        (["conflict", "applied"], "conflict"),
        ([], "unavailable"),
    ],
)
def test_the_state_of_a_process_is_the_worst_of_its_managers(statuses, status):
    pools = [Pool(str(number), 10, one) for number, one in enumerate(statuses)]
    for pool in pools:
        pool_registry.register_kv_cache_pool(pool)
    state = control.set_instance_memory_limit(10, revision=1)
    assert (state["status"], len(state["pools"])) == (status, len(statuses))
    with pytest.raises(ValueError, match="`revision` is -1; allowed: 0 or more"):
        control.set_instance_memory_limit(10, revision=-1)


def test_a_limit_holds_at_once_and_is_in_whole_pages(engine):
    manager, page_bytes = engine.manager, engine.page_bytes
    state = manager.set_memory_limit(3 * page_bytes + 5, revision=7)
    assert (state["status"], state["revision"], state["pool_name"]) == ("applied", 7, "full")
    assert (state["limit_bytes"], state["effective_limit_bytes"]) == (3 * page_bytes + 5, 3 * page_bytes)
    assert state["current_capacity_bytes"] == 3 * page_bytes
    # 128 blocks on each page, one of them for unused values.
    assert manager.alloc(384) is None
    blocks = manager.alloc(383)
    assert len(blocks) == 383
    manager.free(blocks)


def test_a_limit_below_what_is_used_waits_and_takes_nothing_away(engine):
    manager, page_bytes = engine.manager, engine.page_bytes
    blocks = manager.alloc(511)
    state = manager.set_memory_limit(2 * page_bytes, revision=1)
    assert (state["status"], state["reason"]) == ("deferred", "inuse_capacity_above_limit")
    assert (state["overage_bytes"], manager.in_shrink, manager.target_num_blocks) == (2 * page_bytes, True, 256)
    assert manager.alloc(1) is None
    for layer in engine.layers:
        layer[:, blocks] = 1
    manager.free(blocks)
    eventually(lambda: manager.memory_limit_state()["overage_bytes"] == 0)
    assert (manager.memory_limit_state()["status"], manager.in_shrink) == ("applied", False)


def test_earlier_revisions_and_other_limits_of_the_same_one_are_refused(engine):
    manager, page_bytes = engine.manager, engine.page_bytes
    manager.set_memory_limit(4 * page_bytes, revision=9)
    assert manager.set_memory_limit(4 * page_bytes, revision=9)["status"] == "applied"
    conflict = manager.set_memory_limit(3 * page_bytes, revision=9)
    assert (conflict["status"], conflict["reason"]) == ("conflict", "revision_reused_with_different_limit")
    stale = manager.set_memory_limit(2 * page_bytes, revision=8)
    assert (stale["status"], stale["revision"], stale["effective_limit_bytes"]) == ("stale", 9, 4 * page_bytes)
    # It grows again, and not beyond its addresses.
    assert manager.set_memory_limit(6 * page_bytes, revision=10)["effective_limit_bytes"] == 6 * page_bytes
    assert manager.set_memory_limit(1 << 40, revision=11)["effective_limit_bytes"] == 16 * page_bytes
    eventually(lambda: manager.available_size() == 2047)


def test_a_snapshot_of_a_manager_counts_blocks_pages_and_bytes(engine):
    manager = engine.manager
    blocks = manager.alloc(150)
    assert manager.try_to_reserve(5)
    (snapshot,) = engine.interfaces.kv_cache_pool_snapshot_dicts()
    block_bytes = 16 * 4 * 64 * 2 * 2 * engine.N_LAYERS
    assert (snapshot["integration"], snapshot["pool_name"], snapshot["group_id"]) == ("vllm", "full", 0)
    # With the block of unused values.
    assert (snapshot["allocated_blocks"], snapshot["reserved_blocks"]) == (156, 5)
    assert (snapshot["allocated_bytes"], snapshot["reserved_bytes"]) == (156 * block_bytes, 5 * block_bytes)
    assert (snapshot["total_pages"], snapshot["inuse_pages"], snapshot["free_pages"]) == (16, 2, 14)
    assert snapshot["mapped_bytes"] == 2 * engine.page_bytes
    assert snapshot["virtual_total_bytes"] == 16 * engine.page_bytes
    occupancy = manager.get_page_occupancy([0, 1, 2])
    assert (sum(occupancy.values()), occupancy[2]) == (155, 0)
    assert occupancy[manager.page_allocator.get_page_id(blocks[0], manager.block_mem_size)] > 0
    assert list(snapshot) == observability.get_capabilities()["pool_snapshot_fields"]
    json.dumps(snapshot)
    manager.free(blocks)
    manager.clear()
    assert manager._get_num_alloced_blocks() == 1


def test_a_snapshot_of_an_engine_says_how_it_was_set_up(engine):
    snapshot = engine.interfaces.observability_snapshot_dict()
    assert (snapshot["engine"], snapshot["initialized"], snapshot["device"]) == ("vllm", True, "cpu")
    assert list(snapshot) == observability.get_capabilities()["runtime_snapshot_fields"]
    engine.interfaces.shutdown_kvcached()
    assert not engine.interfaces.observability_snapshot().initialized
    assert engine.interfaces.kv_cache_pool_snapshots() == []


def test_with_deferred_release_freed_blocks_keep_their_memory_until_the_engine_is_done():
    engine = Engine(pytest.importorskip("torch"), async_sched=True)
    manager = engine.manager
    barriers = []
    manager.physical_release_barrier = lambda: barriers.append(manager.memory.n_used_blocks)
    first = manager.alloc(10)
    manager.free(first)
    marker = manager.capture_physical_release_marker()
    second = manager.alloc(10)
    # They are given again, and what was freed later is behind the mark.
    assert sorted(second) == sorted(first)
    manager.free(second)
    assert (manager.memory.n_used_blocks, manager._get_num_alloced_blocks()) == (11, 1)
    manager.release_retired_pages_through(marker)
    assert (manager.memory.n_used_blocks, barriers) == (11, [])
    manager.release_retired_pages_through(manager.capture_physical_release_marker())
    assert (manager.memory.n_used_blocks, barriers) == (1, [11])
    engine.interfaces.shutdown_kvcached()


def test_only_taken_blocks_are_freed_and_each_once(engine):
    manager = engine.manager
    blocks = manager.alloc(3)
    assert manager.try_to_reserve(1)
    for wrong in ([*blocks, blocks[0]], [blocks[0], 2000], manager.reserved_blocks):
        with pytest.raises(ValueError, match="allowed: blocks that are taken, once"):
            manager.free(wrong)
    manager.free(blocks)
