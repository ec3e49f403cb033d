"""kvcached's interface over kvik: names, segments, shapes, and blocks with memory of this machine."""

import os
import subprocess
import sys
import uuid

import pytest

from kvcached_engine import FOLDER, Engine
from polling import eventually

from kvcached import kv_geometry
from kvcached.cli import utils as segments
from kvcached.mem_info_tracker import MemInfoTracker

MIB = kv_geometry.MIB


@pytest.fixture
def name():
    name = f"kvcached_test_{uuid.uuid4().hex}"
    yield name
    segments.delete_kv_cache_segment(name)


def test_a_segment_has_24_bytes_and_a_limit_that_can_be_moved(name):
    assert segments.get_kv_cache_limit(name) is None
    assert segments.update_kv_cache_limit(name, 5) is None
    MemInfoTracker(100, ipc_name=name).update_memory_usage(40, 2)
    assert os.stat(segments.get_ipc_path(name)).st_size == segments.MemInfoStruct.SHM_SIZE == 24
    segments.update_kv_cache_limit(name, 70)
    assert segments.get_kv_cache_limit(name) == segments.MemInfoStruct(70, 40, 2)
    assert segments.delete_kv_cache_segment(name)
    assert not segments.delete_kv_cache_segment(name)


def test_a_page_without_a_whole_block_is_found_and_a_better_one_named():
    for page in range(1, 40):
        for block in range(1, 40):
            ranges = [(-(-number * page // block), (number + 1) * page // block) for number in range(block + 1)]
            assert kv_geometry.has_zero_capacity_pages(block, page) == any(end <= begin for begin, end in ranges)
    assert kv_geometry.check_page_geometry(32768, 2 * MIB, 16) is None
    assert "--block-size 1024" in kv_geometry.check_page_geometry(784 * 4096, 4 * MIB, 784)
    assert "KVCACHED_PAGE_SIZE_MB=4 with --block-size 1024" in kv_geometry.check_page_geometry(784 * 4096, 2 * MIB, 784)


@pytest.mark.parametrize("value", ["3", "0", "-2", "two", "1.5"])
def test_a_bad_page_size_is_named(value):
    environment = {**os.environ, "KVCACHED_PAGE_SIZE_MB": value, "PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-c", "import kvcached.utils"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert f"`KVCACHED_PAGE_SIZE_MB` is {value}; allowed: multiples of 2" in ended.stderr


def test_the_real_kvcached_beside_it_is_refused(tmp_path):
    other = tmp_path / "kvcached-0.1.6.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcached\nVersion: 0.1.6\n")
    environment = {**os.environ, "PYTHONPATH": f"{FOLDER}{os.pathsep}{tmp_path}"}
    ended = subprocess.run([sys.executable, "-c", "import kvcached"], env=environment, capture_output=True, text=True)
    assert "kvcached 0.1.6 and kvik-kvcached are both installed" in ended.stderr


@pytest.fixture
def engine():
    torch = pytest.importorskip("torch")
    engine = Engine(torch)
    yield engine
    engine.interfaces.shutdown_kvcached()


def test_blocks_have_memory_and_keep_what_is_written(engine):
    manager, layers = engine.manager, engine.layers
    assert [tuple(layer.shape) for layer in layers] == [engine.SHAPE] * 4
    # All blocks but the one of unused values.
    eventually(lambda: manager.available_size() == 2047)
    before = 2047
    blocks = manager.alloc(300)
    assert (0 in blocks, len(set(blocks))) == (False, 300)
    # Pages that are being mapped are not counted for a moment.
    eventually(lambda: manager.available_size() == before - 300)
    for number, layer in enumerate(layers):
        layer[:, blocks] = number + 1
    assert all((layer[:, blocks] == number + 1).all() for number, layer in enumerate(layers))
    held = manager.get_mapped_memory_size()
    manager.free(blocks)
    manager.trim()
    eventually(lambda: manager.get_mapped_memory_size() < held)
    eventually(lambda: manager.available_size() == before)


def test_too_many_blocks_are_none_and_reserved_ones_come_first(engine):
    manager = engine.manager
    assert manager.alloc(manager.available_size() + 1) is None
    before = manager._get_num_alloced_blocks()
    assert manager.try_to_reserve(64)
    reserved = list(manager.reserved_blocks)
    assert manager.alloc(10) == reserved[:10]
    manager.free_reserved()
    manager.free(reserved[:10])
    assert (manager.reserved_blocks, manager._get_num_alloced_blocks()) == ([], before)
    with pytest.raises(ValueError, match="block 0"):
        manager.free([0])


def test_a_limit_of_tools_is_obeyed(engine):
    from kvcached.vmm_ops import groups

    ipc_name = groups[0].ipc_name
    assert segments.get_kv_cache_limit(ipc_name).total_size > 0
    # Two pages in each of four layers.
    segments.update_kv_cache_limit(ipc_name, 16 * MIB)
    n_page_blocks = 2 * MIB // (2 * 16 * 4 * 64 * 2)
    eventually(lambda: engine.manager.available_size() < 2 * n_page_blocks)
    assert engine.manager.alloc(2 * n_page_blocks) is None


def test_wrong_shapes_are_named(engine):
    from kvcached.utils import KVCachedConfigError

    with pytest.raises(KVCachedConfigError, match="`group_id` is 7"):
        engine.interfaces.get_kv_cache_manager(10, 16, 512, 4, group_id=7)
    with pytest.raises(KVCachedConfigError, match="as the tensors have it"):
        engine.interfaces.get_kv_cache_manager(10, 16, 256, 4)
    with pytest.raises(KVCachedConfigError, match="`group_id` is 0; allowed: one without tensors"):
        engine.interfaces.alloc_kv_cache(engine.SHAPE, 16, engine.layers[0].dtype, "cpu", 4)
    with pytest.raises(KVCachedConfigError, match="`tp_size` is 2"):
        engine.interfaces.init_kvcached(world_size=1, tp_size=2)
