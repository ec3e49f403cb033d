"""Arrays of other libraries, without copies; numpy and torch are tested where they are installed."""

import array
import ctypes
import random
import signal

import kvik
import pytest

from test_store import BLOCK_TOKENS, CHUNK_BLOCKS, CHUNK_TOKENS, ENGINE, N_LAYERS, PAGE_BYTES

N_CHUNKS = 3
N_TOKENS = N_CHUNKS * CHUNK_TOKENS
N_BLOCKS = N_CHUNKS * CHUNK_BLOCKS
TOKEN_BYTES = PAGE_BYTES // BLOCK_TOKENS
N_BYTES = N_LAYERS * N_TOKENS * TOKEN_BYTES


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_kind", ctypes.c_int32),
        ("device_ordinal", ctypes.c_int32),
        ("n_axes", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset_bytes", ctypes.c_uint64),
    ]


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


DESTRUCTOR = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Exporter:
    """An array that is exported by DLPack alone, and counts what was not given back."""

    def __init__(self, data, shape, strides=None, *, offset=0, item=1, version=None, flags=0, device=1):
        self.data, self.shape, self.strides, self.offset = data, shape, strides, offset
        self.item, self.version, self.flags, self.device = item, version, flags, device
        self.n_alive = 0
        self.keep = []

    def __dlpack_device__(self):
        return (self.device, 0)

    def tensor(self):
        axes = ctypes.c_int64 * len(self.shape)
        shape = axes(*self.shape)
        strides = None if self.strides is None else axes(*self.strides)
        self.keep += [shape, strides]
        pointer = ctypes.POINTER(ctypes.c_int64)
        return Tensor(
            ctypes.addressof(self.data),
            self.device,
            0,
            len(self.shape),
            1,
            8 * self.item,
            1,
            ctypes.cast(shape, pointer),
            ctypes.cast(strides, pointer),
            self.offset,
        )

    def capsule(self, managed, name):
        def destroy(_):
            self.n_alive -= 1

        destructor = DESTRUCTOR(destroy)
        self.keep += [managed, destructor, name]
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, DESTRUCTOR]
        self.n_alive += 1
        return new(ctypes.addressof(managed), name, destructor)

    def __dlpack__(self, *, max_version=None, stream=None):
        if self.version is None:
            return self.capsule(Managed(self.tensor(), None, None), b"dltensor")
        return self.capsule(Versioned(*self.version, None, None, self.flags, self.tensor()), b"dltensor_versioned")


class OldExporter(Exporter):
    def __dlpack__(self, stream=None):
        return super().__dlpack__()


@pytest.fixture
def store():
    with kvik.Store.in_process(ram="16MiB", chunk_tokens=CHUNK_TOKENS, **ENGINE) as store:
        yield store


def random_bytes(seed: int, n_bytes: int = N_BYTES) -> bytes:
    return random.Random(seed).randbytes(n_bytes)


def buffer_of(content: bytes):
    return (ctypes.c_ubyte * len(content)).from_buffer_copy(content)


def test_bytes_of_any_buffer_are_stored_and_come_back(store):
    content = random_bytes(1)
    for salt, source in enumerate([content, bytearray(content), array.array("H", content), memoryview(content)]):
        chain = store.chain(range(N_TOKENS), salt=f"{salt}")
        assert store.save(chain, source) == N_TOKENS
        for target in [bytearray(N_BYTES), array.array("d", bytes(N_BYTES)), buffer_of(bytes(N_BYTES))]:
            assert store.load(chain, target) == N_TOKENS
            assert bytes(target) == content


def test_a_prefix_is_loaded_layer_by_layer_into_an_array_of_its_own_length(store):
    content = random_bytes(1)
    assert store.save(store.chain(range(N_TOKENS)), content) == N_TOKENS
    n_tokens = 2 * CHUNK_TOKENS
    other = store.chain([*range(n_tokens), *range(9000, 9000 + CHUNK_TOKENS)])
    out = bytearray(N_BYTES)
    assert store.load(other, out) == n_tokens
    layer_bytes = N_TOKENS * TOKEN_BYTES
    for layer in range(N_LAYERS):
        start = layer * layer_bytes
        assert out[start : start + n_tokens * TOKEN_BYTES] == content[start : start + n_tokens * TOKEN_BYTES]
    short = memoryview(bytearray(N_LAYERS * n_tokens * TOKEN_BYTES)).cast("B", [N_LAYERS, n_tokens, TOKEN_BYTES])
    assert store.load(store.chain(range(N_TOKENS)), short) == n_tokens
    for layer in range(N_LAYERS):
        start = layer * layer_bytes
        layer_of_short = bytes(short)[layer * n_tokens * TOKEN_BYTES :][: n_tokens * TOKEN_BYTES]
        assert layer_of_short == content[start : start + n_tokens * TOKEN_BYTES]


@pytest.mark.parametrize("version", [None, (1, 0), (1, 7)])
@pytest.mark.parametrize("kind", [Exporter, OldExporter])
def test_arrays_by_dlpack_are_used_where_they_lie_and_given_back(store, version, kind):
    content = random_bytes(1)
    # Twice as many tokens as are used, and room before the first: the layers are apart.
    big = buffer_of(bytes(2 * N_BYTES + 64))
    stride = 2 * N_TOKENS * TOKEN_BYTES // 2
    shape, strides = (N_LAYERS, N_TOKENS, TOKEN_BYTES // 2), (stride, TOKEN_BYTES // 2, 1)
    out = kind(big, shape, strides, offset=64, item=2, version=version)
    chain = store.chain(range(N_TOKENS))
    assert store.save(chain, content) == N_TOKENS
    assert store.load(chain, out) == N_TOKENS
    layer_bytes = N_TOKENS * TOKEN_BYTES
    for layer in range(N_LAYERS):
        start = 64 + layer * 2 * layer_bytes
        assert bytes(big[start : start + layer_bytes]) == content[layer * layer_bytes :][:layer_bytes]
        assert bytes(big[start + layer_bytes : start + 2 * layer_bytes]) == bytes(layer_bytes)
    again = store.chain(range(N_TOKENS), salt="again")
    assert store.save(again, out) == N_TOKENS
    target = bytearray(N_BYTES)
    assert store.load(again, target) == N_TOKENS
    assert bytes(target) == content
    # References that threads drop are given back with the next call into the module.
    store.lookup(chain)
    assert out.n_alive == 0


def test_an_array_of_bytes_cannot_be_resized_while_it_is_engine_memory():
    layers = [bytearray(N_BLOCKS * PAGE_BYTES) for _ in range(N_LAYERS)]
    views = [memoryview(layer).cast("B", [N_BLOCKS, PAGE_BYTES]) for layer in layers]
    memory = kvik.EngineMemory.from_tensors(views, block_tokens=BLOCK_TOKENS)
    del views
    with pytest.raises(BufferError):
        layers[0].append(0)
    del memory
    layers[0].append(0)


@pytest.mark.parametrize("n_parts", [1, 2])
def test_engine_memory_of_arrays_has_the_same_bytes_as_that_of_addresses(store, n_parts):
    # One array a layer, with the blocks behind an axis of parts, as keys and values.
    part_bytes = PAGE_BYTES // n_parts
    layer_bytes = N_BLOCKS * PAGE_BYTES
    content = [buffer_of(random_bytes(layer, layer_bytes)) for layer in range(N_LAYERS)]
    shape = (n_parts, N_BLOCKS, part_bytes)
    memory = kvik.EngineMemory.from_tensors(
        [Exporter(layer, shape) for layer in content], block_tokens=BLOCK_TOKENS, block_axis=1
    )
    pieces = [
        (ctypes.addressof(layer) + part * N_BLOCKS * part_bytes, part_bytes, part_bytes)
        for layer in content
        for part in range(n_parts)
    ]
    by_address = kvik.EngineMemory(pieces, n_blocks=N_BLOCKS, block_tokens=BLOCK_TOKENS, owner=content)
    assert (memory.n_blocks, memory.block_bytes) == (by_address.n_blocks, by_address.block_bytes)
    chain = store.chain(range(N_TOKENS))
    blocks = random.Random(1).sample(range(N_BLOCKS), N_BLOCKS)
    job = store.start_save(chain, 0, memory, blocks)
    assert job.wait(10) and job.result == N_BLOCKS
    before = [bytes(layer) for layer in content]
    for layer in content:
        ctypes.memset(layer, 0, layer_bytes)
    job = store.start_load(chain, 0, by_address, blocks)
    assert job.wait(10) and job.result == N_BLOCKS
    assert [bytes(layer) for layer in content] == before


def test_blocks_with_all_layers_in_one_array_are_given_as_slices_of_it(store):
    content = random_bytes(1, N_BLOCKS * N_LAYERS * PAGE_BYTES)
    both = buffer_of(content)
    strides = (N_LAYERS * PAGE_BYTES, 1)
    layers = [Exporter(both, (N_BLOCKS, PAGE_BYTES), strides, offset=layer * PAGE_BYTES) for layer in range(N_LAYERS)]
    memory = kvik.EngineMemory.from_tensors(layers, block_tokens=BLOCK_TOKENS)
    chain, blocks = store.chain(range(N_TOKENS)), list(range(N_BLOCKS))
    job = store.start_save(chain, 0, memory, blocks)
    assert job.wait(10) and job.result == N_BLOCKS
    out = bytearray(N_BYTES)
    assert store.load(chain, out) == N_TOKENS
    for block in blocks:
        for layer in range(N_LAYERS):
            start = (block * N_LAYERS + layer) * PAGE_BYTES
            at = (layer * N_BLOCKS + block) * PAGE_BYTES
            assert out[at : at + PAGE_BYTES] == content[start : start + PAGE_BYTES]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda data: [1, 2], "`array` is .*list.*; allowed: an object with `__dlpack__` or with the buffer protocol"),
        (lambda data: bytes(data), "`array` is read-only; allowed: one that can be written"),
        (lambda data: bytearray(N_BYTES - 1), "`bytes of the array` is .*; allowed: a multiple of 120"),
        (lambda data: Exporter(data, (2, N_TOKENS, TOKEN_BYTES)), r"`shape of the array` is \[2, .*3 layers"),
        (lambda data: Exporter(data, (N_LAYERS, N_TOKENS, 8)), "`token of the array` is 8 bytes.*40 bytes"),
        (lambda data: Exporter(data, (N_LAYERS, N_TOKENS, 40), (0, 40, 1)), "blocks that share no bytes"),
        (lambda data: Exporter(data, (N_LAYERS, N_TOKENS, 40), (N_TOKENS * 40, -40, 1)), "share no bytes"),
        (lambda data: Exporter(data, (N_LAYERS, N_TOKENS, 40), (1, 3, N_LAYERS * N_TOKENS)), "in C's order"),
        (lambda data: Exporter(data, (N_LAYERS, N_TOKENS, 20), (N_TOKENS * 40, 40, 2)), "without gaps"),
        (lambda data: Exporter(data, (N_LAYERS, N_TOKENS, 40), device=10), "kind 10; allowed: the CPU or a CUDA"),
        (lambda data: Exporter(data, (N_LAYERS, N_TOKENS, 40), version=(2, 0)), "version` is 2.0"),
        (lambda data: Exporter(data, (N_LAYERS, N_TOKENS, 40), version=(1, 0), flags=1), "read-only"),
        (lambda data: Exporter(data, (N_LAYERS, N_TOKENS, 40), version=(1, 0), flags=2), "as a copy"),
        (lambda data: Exporter(data, (N_LAYERS, 1 << 62, 1 << 62)), "longer than memory"),
        (lambda data: Exporter(data, (-1,)), "longer than memory"),
    ],
)
def test_arrays_that_cannot_be_used_are_refused_with_what_is_allowed(store, make, message):
    data = buffer_of(bytes(N_BYTES))
    chain = store.chain(range(N_TOKENS))
    with pytest.raises(kvik.InvalidValueError, match=message):
        store.load(chain, make(data))


def test_arrays_that_share_bytes_are_no_engine_memory():
    data = buffer_of(bytes(4 * N_BLOCKS * PAGE_BYTES))
    layer = Exporter(data, (N_BLOCKS, PAGE_BYTES))

    def made(*arrays):
        return kvik.EngineMemory.from_tensors(arrays, block_tokens=BLOCK_TOKENS)

    with pytest.raises(kvik.InvalidValueError, match="share no bytes"):
        made(layer, layer)
    wide = (2 * PAGE_BYTES, 1)
    even = Exporter(data, (N_BLOCKS, PAGE_BYTES), wide)
    odd = Exporter(data, (N_BLOCKS, PAGE_BYTES), wide, offset=PAGE_BYTES)
    made(even, odd)
    for offset in [1, PAGE_BYTES - 1, PAGE_BYTES + 1, 2 * PAGE_BYTES]:
        with pytest.raises(kvik.InvalidValueError, match="share no bytes"):
            made(even, Exporter(data, (N_BLOCKS, PAGE_BYTES), wide, offset=offset))
    behind = 2 * PAGE_BYTES * (N_BLOCKS - 1) + PAGE_BYTES
    made(even, Exporter(data, (N_BLOCKS, PAGE_BYTES), offset=behind))
    with pytest.raises(kvik.InvalidValueError, match="as many blocks in each"):
        made(even, Exporter(data, (N_BLOCKS - 1, PAGE_BYTES), offset=behind))
    with pytest.raises(kvik.InvalidValueError, match="at least one"):
        made()
    with pytest.raises(kvik.InvalidValueError, match="`axis of the blocks` is 2; allowed: less than the axes"):
        kvik.EngineMemory.from_tensors([layer], block_tokens=BLOCK_TOKENS, block_axis=2)


def test_an_error_of_the_exporter_is_raised_as_it_is(store):
    class Broken:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_):
            raise BufferError("requires grad")

    with pytest.raises(BufferError, match="requires grad"):
        store.save(store.chain(range(N_TOKENS)), Broken())


def test_an_interrupted_save_raises_when_nothing_reads_the_array_any_more(store):
    content = bytearray(random_bytes(1))
    busy = [store.chain(range(N_TOKENS), salt=f"{number}") for number in range(20)]
    layers = [memoryview(bytearray(N_BLOCKS * PAGE_BYTES)).cast("B", [N_BLOCKS, PAGE_BYTES]) for _ in range(N_LAYERS)]
    memory = kvik.EngineMemory.from_tensors(layers, block_tokens=BLOCK_TOKENS)
    chain = store.chain(range(N_TOKENS))

    def interrupt(*_):
        raise TimeoutError("interrupted")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        jobs = [store.start_save(other, 0, memory, range(N_BLOCKS)) for other in busy * 200]
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        with pytest.raises(TimeoutError, match="interrupted"):
            store.save(chain, content)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    # It waited behind others, so it was cancelled. Its place in the queue goes with theirs, and then the array is free.
    assert not jobs[-1].is_done
    for job in jobs:
        job.cancel()
    assert store.start_save(busy[0], 0, memory, range(N_BLOCKS)).wait(10)
    assert store.lookup(chain).n_tokens == 0
    content.append(0)


def test_numpy_arrays_are_stored_and_come_back(store):
    numpy = pytest.importorskip("numpy")
    source = numpy.frombuffer(random_bytes(1), numpy.uint16).reshape(N_LAYERS, N_TOKENS, -1)
    assert not source.flags.writeable
    chain = store.chain(range(N_TOKENS))
    assert store.save(chain, source) == N_TOKENS
    big = numpy.zeros((N_LAYERS, 2 * N_TOKENS, source.shape[2]), numpy.uint16)
    assert store.load(chain, big[:, N_TOKENS:]) == N_TOKENS
    assert (big[:, N_TOKENS:] == source).all()
    assert not big[:, :N_TOKENS].any()
    with pytest.raises(kvik.InvalidValueError, match="read-only"):
        store.load(chain, source)


def test_torch_tensors_are_stored_and_come_back(store):
    torch = pytest.importorskip("torch")
    source = torch.randn(N_LAYERS, N_TOKENS, 2, TOKEN_BYTES // 4).to(torch.bfloat16)
    chain = store.chain(range(N_TOKENS))
    assert store.save(chain, source) == N_TOKENS
    out = torch.zeros_like(source)
    assert store.load(chain, out) == N_TOKENS
    assert torch.equal(out, source)
    with pytest.raises(kvik.InvalidValueError, match="in C's order"):
        store.save(chain, source.transpose(2, 3).contiguous().transpose(2, 3))
    layers = [torch.zeros(N_BLOCKS, PAGE_BYTES // 2, dtype=torch.bfloat16) for _ in range(N_LAYERS)]
    memory = kvik.EngineMemory.from_tensors(layers, block_tokens=BLOCK_TOKENS)
    job = store.start_load(chain, 0, memory, range(N_BLOCKS))
    assert job.wait(10) and job.result == N_BLOCKS
    for layer, tensor in enumerate(layers):
        assert torch.equal(tensor.flatten(), source[layer].flatten())
    with pytest.raises(BufferError, match="grad"):
        store.save(chain, torch.zeros(N_LAYERS, N_TOKENS, TOKEN_BYTES // 4, requires_grad=True))
