"""Elastic memory of this machine: what is read through another library's eyes is what was written."""

import ctypes
import gc
import subprocess
import sys

import kvik
import pytest

from polling import eventually
from test_arrays import Managed, Versioned
from test_store import BLOCK_TOKENS, CHUNK_BLOCKS, CHUNK_TOKENS, ENGINE, N_LAYERS, PAGE_BYTES

UNIT = 2 << 20
BLOCK_BYTES = 64 << 10


@pytest.fixture
def memory():
    return kvik.Memory(n_buffers=2, block_bytes=BLOCK_BYTES, n_blocks=1024, max_bytes=16 * UNIT)


def block_of(tensor: kvik.MemoryTensor, block: int):
    return (ctypes.c_ubyte * BLOCK_BYTES).from_address(tensor.address + block * BLOCK_BYTES)


def test_memory_is_held_for_blocks_in_use_and_not_for_all(memory):
    assert memory.n_blocks == 1024
    reserved = memory.n_blocks * BLOCK_BYTES * 2
    blocks = memory.alloc(40)
    assert len(set(blocks)) == 40
    assert memory.n_used_blocks == 40
    assert 40 * 2 * BLOCK_BYTES <= memory.held_bytes <= 16 * UNIT < reserved
    assert (memory.page_bytes, memory.limit_bytes) == (2 * UNIT, 16 * UNIT)
    # A page that is being mapped ahead is held, and neither used nor parked yet.
    eventually(lambda: memory.held_bytes == (memory.n_used_pages + memory.n_parked_pages) * memory.page_bytes)
    memory.free(blocks)
    memory.trim()
    assert memory.n_used_blocks == 0


def test_block_0_is_never_given_where_it_is_kept():
    memory = kvik.Memory(n_buffers=1, block_bytes=BLOCK_BYTES, n_blocks=64, has_null_block=True)
    assert sorted(memory.alloc(63)) == list(range(1, 64))
    with pytest.raises(kvik.InvalidValueError, match="null block"):
        memory.free([0])


def test_too_little_memory_is_none_and_no_block_is_lost(memory):
    n_most = memory.n_available_blocks
    assert 0 < n_most < memory.n_blocks
    assert memory.alloc(memory.n_blocks) is None
    assert memory.alloc(memory.n_blocks, timeout_s=0.05) is None
    assert len(memory.alloc(n_most)) == n_most
    assert memory.alloc(1) is None


def test_a_smaller_bound_gives_less_and_keeps_what_is_in_use(memory):
    blocks = memory.alloc(8)
    memory.resize(2 * UNIT)
    assert memory.alloc(64) is None
    assert memory.n_used_blocks == 8
    memory.resize(16 * UNIT)
    assert len(memory.alloc(64)) == 64
    memory.free(blocks)


def test_blocks_that_are_not_allocated_are_not_freed(memory):
    blocks = memory.alloc(4)
    memory.free(blocks[:1])
    with pytest.raises(kvik.InvalidValueError, match="free block"):
        memory.free(blocks)
    assert memory.n_used_blocks == 3


def test_blocks_keep_their_bytes_and_unmapped_ones_read_as_zeros(memory):
    first, second = memory.tensors()
    blocks = memory.alloc(64)
    for block in blocks:
        for tensor in (first, second):
            ctypes.memset(block_of(tensor, block), block % 251 + (tensor is second), BLOCK_BYTES)
    for block in blocks:
        assert bytes(block_of(first, block)) == bytes([block % 251]) * BLOCK_BYTES
        assert bytes(block_of(second, block)) == bytes([block % 251 + 1]) * BLOCK_BYTES
    assert bytes(block_of(first, memory.n_blocks - 1)) == bytes(BLOCK_BYTES)


@pytest.mark.parametrize(
    ("max_version", "name", "structure"),
    [(None, b"dltensor", Managed), ((0, 8), b"dltensor", Managed), ((1, 1), b"dltensor_versioned", Versioned)],
)
def test_a_tensor_is_exported_with_its_shape_and_keeps_the_memory(memory, max_version, name, structure):
    tensor = memory.tensors()[1]
    assert tensor.__dlpack_device__() == (1, 0)
    capsule = tensor.__dlpack__(max_version=max_version)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    managed = structure.from_address(pointer(capsule, name))
    exported = managed.tensor
    assert (exported.data, exported.n_axes, exported.bits, exported.lanes) == (tensor.address, 2, 8, 1)
    assert exported.shape[:2] == list(tensor.shape) == [memory.n_blocks, BLOCK_BYTES]
    assert exported.strides[:2] == [BLOCK_BYTES, 1]
    n_references = sys.getrefcount(memory)
    if structure is Managed:
        # As a library does that takes it over.
        rename = ctypes.pythonapi.PyCapsule_SetName
        rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
        used = b"used_dltensor"
        rename(capsule, used)
        del capsule
        assert sys.getrefcount(memory) == n_references
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(ctypes.addressof(managed))
    else:
        del capsule
    gc.collect()
    # A reference that is dropped without Python's lock is given back with the next call into the module.
    assert memory.n_used_blocks == 0
    assert sys.getrefcount(memory) == n_references - 1
    with pytest.raises(BufferError, match="without a copy"):
        tensor.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="without a copy"):
        tensor.__dlpack__(dl_device=(2, 0))


def test_blocks_go_to_the_store_and_come_back_into_others():
    memory = kvik.Memory(n_buffers=N_LAYERS, block_bytes=PAGE_BYTES, n_blocks=4096)
    tensors = memory.tensors()
    engine = kvik.EngineMemory.from_tensors(tensors, block_tokens=BLOCK_TOKENS)
    blocks, others = memory.alloc(2 * CHUNK_BLOCKS), memory.alloc(2 * CHUNK_BLOCKS)

    def page(tensor, block):
        return (ctypes.c_ubyte * PAGE_BYTES).from_address(tensor.address + block * PAGE_BYTES)

    for layer, tensor in enumerate(tensors):
        for place, block in enumerate(blocks):
            ctypes.memset(page(tensor, block), 16 * layer + place + 1, PAGE_BYTES)
    del memory, tensors
    with kvik.Store.in_process(ram="16MiB", chunk_tokens=CHUNK_TOKENS, **ENGINE) as store:
        chain = store.chain(range(2 * CHUNK_TOKENS))
        save = store.start_save(chain, 0, engine, blocks)
        assert save.wait(10) and save.result == len(blocks)
        load = store.start_load(chain, 0, engine, others)
        assert load.wait(10) and load.result == len(others)
        out = bytearray(N_LAYERS * 2 * CHUNK_TOKENS * (PAGE_BYTES // BLOCK_TOKENS))
        assert store.load(chain, out) == 2 * CHUNK_TOKENS
    pages = [bytes([16 * layer + place + 1]) * PAGE_BYTES for layer in range(N_LAYERS) for place in range(len(blocks))]
    assert bytes(out) == b"".join(pages)


def test_engines_of_a_group_share_the_ledger_of_the_device(tmp_path):
    shared = {"n_buffers": 1, "block_bytes": BLOCK_BYTES, "n_blocks": 256, "directory": tmp_path}
    one = kvik.Memory(group="one", **shared)
    two = kvik.Memory(group="two", max_bytes=4 * UNIT, **shared)
    assert len(one.alloc(100)) == len(two.alloc(100)) == 100
    assert two.alloc(100) is None
    assert any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_buffers": 0}, "`n_buffers` is 0; allowed: 1 or more"),
        ({"page_bytes": 4096}, "`page_bytes` is 4096; allowed: a multiple of 2 MiB"),
        ({"block_bytes": 3 << 20}, "`page_bytes` is 2097152"),
        ({"n_blocks": 0}, "`capacity_pages` is 0"),
        ({"group": ""}, "ipc_name|group"),
    ],
)
def test_wrong_settings_are_refused_with_the_field(change, message, tmp_path):
    settings = {"n_buffers": 1, "block_bytes": BLOCK_BYTES, "n_blocks": 64, "directory": tmp_path}
    with pytest.raises(kvik.KvikError, match=message):
        kvik.Memory(**(settings | change))


def test_a_write_to_a_block_that_is_not_allocated_ends_the_process():
    program = (
        "import ctypes, kvik; memory = kvik.Memory(n_buffers=1, block_bytes=65536, n_blocks=1024);"
        "ctypes.memset(memory.tensors()[0].address + 1023 * 65536, 1, 1)"
    )
    assert subprocess.run([sys.executable, "-c", program], stderr=subprocess.DEVNULL).returncode == -11


def test_torch_uses_the_memory_where_it_is(memory):
    torch = pytest.importorskip("torch")
    tensor = torch.from_dlpack(memory.tensors()[0])
    assert tensor.shape == (memory.n_blocks, BLOCK_BYTES)
    (block,) = memory.alloc(1)
    tensor[block] = 7
    assert bytes(block_of(memory.tensors()[0], block)) == bytes([7]) * BLOCK_BYTES
    del memory
    gc.collect()
    assert int(tensor[block].sum()) == 7 * BLOCK_BYTES


def test_numpy_uses_the_memory_where_it_is(memory):
    numpy = pytest.importorskip("numpy")
    array = numpy.from_dlpack(memory.tensors()[0])
    (block,) = memory.alloc(1)
    array[block] = 9
    assert bytes(block_of(memory.tensors()[0], block)) == bytes([9]) * BLOCK_BYTES
