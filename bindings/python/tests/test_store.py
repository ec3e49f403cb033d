"""The native module against a store in this process: every byte that comes back is compared."""

import ctypes
import random
import subprocess
import sys
import time

import kvik
import pytest

BLOCK_TOKENS = 16
CHUNK_TOKENS = 64
CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
N_LAYERS = 3
PAGE_BYTES = BLOCK_TOKENS * 40
N_BLOCKS = 64

ENGINE = {
    "model": "model",
    "layout": "pages",
    "dtype": "bf16",
    "n_layers": N_LAYERS,
    "token_layer_bytes": PAGE_BYTES // BLOCK_TOKENS,
    "block_tokens": BLOCK_TOKENS,
}


class Engine:
    """KV memory with room between its blocks, so that what is written beside a block shows."""

    def __init__(self, seed: int) -> None:
        self.stride = PAGE_BYTES + 24
        n_bytes = N_LAYERS * N_BLOCKS * self.stride
        self.bytes = (ctypes.c_ubyte * n_bytes)()
        ctypes.memmove(self.bytes, random.Random(seed).randbytes(n_bytes), n_bytes)
        address = ctypes.addressof(self.bytes)
        layer_bytes = N_BLOCKS * self.stride
        pieces = [(address + layer * layer_bytes, PAGE_BYTES, self.stride) for layer in range(N_LAYERS)]
        self.memory = kvik.EngineMemory(pieces, n_blocks=N_BLOCKS, block_tokens=BLOCK_TOKENS, owner=self.bytes)

    def block(self, layer: int, block: int) -> bytes:
        start = (layer * N_BLOCKS + block) * self.stride
        return bytes(self.bytes[start : start + PAGE_BYTES])

    def blocks(self, blocks: list[int]) -> list[bytes]:
        return [self.block(layer, block) for layer in range(N_LAYERS) for block in blocks]


@pytest.fixture
def store():
    with kvik.Store.in_process(ram="16MiB", chunk_tokens=CHUNK_TOKENS, **ENGINE) as store:
        yield store


def saved(store: kvik.Store, chain: kvik.Chain, engine: Engine, blocks: list[int], first_block: int = 0) -> int:
    job = store.start_save(chain, first_block, engine.memory, blocks)
    assert job.wait(10)
    return job.result


def loaded(store: kvik.Store, chain: kvik.Chain, engine: Engine, blocks: list[int], first_block: int = 0) -> int:
    job = store.start_load(chain, first_block, engine.memory, blocks)
    assert job.wait(10)
    return job.result


def test_blocks_come_back_as_they_were_saved_and_nothing_beside_them_changes(store):
    source, target = Engine(1), Engine(2)
    chain = store.chain(range(5 * CHUNK_TOKENS))
    blocks = random.Random(3).sample(range(N_BLOCKS), 5 * CHUNK_BLOCKS)
    others = random.Random(4).sample(range(N_BLOCKS), 5 * CHUNK_BLOCKS)
    assert saved(store, chain, source, blocks) == len(blocks)
    before = bytes(target.bytes)
    assert loaded(store, chain, target, others) == len(others)
    assert target.blocks(others) == source.blocks(blocks)
    untouched = [block for block in range(N_BLOCKS) if block not in others]
    after, target.bytes[:] = bytes(target.bytes), before
    unchanged = target.blocks(untouched)
    target.bytes[:] = after
    assert target.blocks(untouched) == unchanged
    for layer in range(N_LAYERS):
        for block in range(N_BLOCKS):
            gap = (layer * N_BLOCKS + block) * target.stride + PAGE_BYTES
            assert after[gap : gap + 24] == before[gap : gap + 24]


def test_a_load_begins_in_the_middle_of_a_chunk_and_leaves_the_blocks_before_it_alone(store):
    source, target = Engine(1), Engine(2)
    chain = store.chain(range(3 * CHUNK_TOKENS))
    blocks = list(range(3 * CHUNK_BLOCKS))
    assert saved(store, chain, source, blocks) == len(blocks)
    for first_block in range(len(blocks)):
        target = Engine(2)
        before = target.blocks(blocks[:first_block])
        assert loaded(store, chain, target, blocks[first_block:], first_block) == len(blocks) - first_block
        assert target.blocks(blocks[first_block:]) == source.blocks(blocks[first_block:])
        assert target.blocks(blocks[:first_block]) == before


def test_a_save_goes_on_behind_what_is_stored_and_begins_anew_where_that_is_gone(store):
    engine = Engine(1)
    tokens = list(range(4 * CHUNK_TOKENS))
    blocks = list(range(4 * CHUNK_BLOCKS))
    chain = store.chain(tokens)
    assert saved(store, store.chain(tokens[: 2 * CHUNK_TOKENS]), engine, blocks[: 2 * CHUNK_BLOCKS]) == 2 * CHUNK_BLOCKS
    assert saved(store, chain, engine, blocks, 2 * CHUNK_BLOCKS) == len(blocks)
    other = store.chain(tokens, salt="other")
    assert saved(store, other, engine, blocks, 2 * CHUNK_BLOCKS) == len(blocks)
    assert store.lookup(other).n_tokens == len(tokens)


def test_salts_adapters_and_images_keep_sequences_apart(store):
    engine = Engine(1)
    tokens = list(range(2 * CHUNK_TOKENS))
    blocks = list(range(2 * CHUNK_BLOCKS))
    assert saved(store, store.chain(tokens), engine, blocks) == len(blocks)
    assert store.lookup(store.chain(tokens)).n_tokens == len(tokens)
    assert store.lookup(store.chain(tokens, salt="a")).n_tokens == 0
    assert store.lookup(store.chain(tokens, extras=[(0, b"adapter")])).n_tokens == 0
    assert store.lookup(store.chain(tokens, extras=[(CHUNK_TOKENS, b"image")])).n_tokens == CHUNK_TOKENS


def test_a_packed_chain_is_the_same_in_another_session_and_none_of_another_store(store):
    engine = Engine(1)
    chain = store.chain(range(2 * CHUNK_TOKENS))
    saved(store, chain, engine, list(range(2 * CHUNK_BLOCKS)))
    packed = chain.pack(2)
    assert store.unpack(packed).names() == chain.names()
    assert store.lookup(store.unpack(packed)).n_tokens == 2 * CHUNK_TOKENS
    assert store.unpack(chain.pack(1)).n_tokens == CHUNK_TOKENS
    assert store.unpack(packed[:-1]) is None
    assert store.unpack(b"") is None
    with kvik.Store.in_process(ram="16MiB", chunk_tokens=CHUNK_TOKENS, **(ENGINE | {"model": "other"})) as other:
        assert other.unpack(packed) is None


def test_an_extended_chain_is_the_chain_of_the_longer_sequence(store):
    tokens = list(range(3 * CHUNK_TOKENS))
    short = store.chain(tokens[:CHUNK_TOKENS], salt="s", extras=[(3, b"image")])
    assert short.extended(tokens).names() == store.chain(tokens, salt="s", extras=[(3, b"image")]).names()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float7"}, "float7"),
        ({"rank": 1}, "`rank` is 1; allowed: less than n_ranks, 1"),
        ({"n_layers": 0}, "`n_layers` is 0; allowed: 1 or more"),
        ({"block_tokens": 48}, "block_tokens"),
        ({"ram": "much"}, "`store.ram` is much"),
        ({"chunk_tokens": 17}, "multiples of 16"),
    ],
)
def test_wrong_settings_are_refused_with_the_field(change, message):
    with pytest.raises(kvik.KvikError, match=message):
        store = kvik.Store.in_process(**({"ram": "16MiB", "chunk_tokens": CHUNK_TOKENS} | ENGINE | change))
        # A format that the store refuses shows when a session is attached.
        if not store.is_attached:
            raise kvik.RefusedError(store.last_error)


def test_blocks_that_the_engine_does_not_have_are_refused(store):
    engine = Engine(1)
    chain = store.chain(range(CHUNK_TOKENS))
    with pytest.raises(kvik.InvalidValueError, match=f"`block` is {N_BLOCKS}; allowed: less than {N_BLOCKS}"):
        store.start_save(chain, 0, engine.memory, [0, 1, 2, N_BLOCKS])
    with pytest.raises(kvik.InvalidValueError, match="each block once"):
        store.start_load(chain, 0, engine.memory, [0, 1, 2, 2])
    with pytest.raises(kvik.InvalidValueError, match="at least one"):
        kvik.EngineMemory([], n_blocks=1, block_tokens=16, owner=None)
    other = kvik.EngineMemory([(4096, 100, 100)], n_blocks=1, block_tokens=BLOCK_TOKENS, owner=None)
    with pytest.raises(kvik.InvalidValueError, match="`block of the memory` is 100 bytes"):
        store.start_save(chain, 0, other, [0])


def test_without_a_daemon_nothing_is_found_and_nothing_waits(tmp_path):
    with kvik.Store.attach(tmp_path / "none.sock", **ENGINE) as store:
        assert not store.is_attached
        assert "none.sock" in store.last_error
        assert store.chunk_tokens is None
        begin = time.monotonic()
        with pytest.raises(kvik.StoreGoneError):
            store.chain([1, 2, 3])
        assert store.unpack(b"x") is None
        assert time.monotonic() - begin < 1


def test_a_closed_store_takes_no_jobs(store):
    chain = store.chain(range(CHUNK_TOKENS))
    store.close()
    with pytest.raises(kvik.StoreGoneError, match="closed"):
        store.start_lookup(chain)


def test_the_import_takes_less_than_100_ms_and_brings_no_engine():
    program = (
        "import sys, time; begin = time.perf_counter(); import kvik; took = time.perf_counter() - begin; "
        "print(took, any(name in sys.modules for name in ('torch', 'vllm', 'numpy')))"
    )
    runs = [subprocess.check_output([sys.executable, "-c", program], text=True).split() for _ in range(3)]
    assert all(has_engine == "False" for _, has_engine in runs)
    assert min(float(took) for took, _ in runs) < 0.1


def pages_store(**change: object) -> kvik.Store:
    """A store whose chunks are pages: one block each."""
    page_bytes = N_LAYERS * PAGE_BYTES
    engine = {"n_layers": 1, "token_layer_bytes": page_bytes // BLOCK_TOKENS, "block_tokens": BLOCK_TOKENS}
    return kvik.Store.in_process(**({"ram": "16MiB", "chunk_tokens": BLOCK_TOKENS} | ENGINE | engine | change))


def test_a_page_is_found_by_its_key_alone_with_the_bytes_that_were_saved_under_it():
    source, target = Engine(1), Engine(2)
    keys = [f"key-{page}".encode() for page in range(12)]
    with pages_store() as store:
        blocks = random.Random(3).sample(range(N_BLOCKS), 12)
        assert saved(store, store.chain_of_keys(keys[:5]), source, blocks[:5]) == 5
        assert saved(store, store.chain_of_keys(keys[5:12]), source, blocks[5:12]) == 7
        for first in range(12):
            chain = store.chain_of_keys([*keys[first:], b"other"])
            assert store.lookup(chain).n_chunks == 12 - first
            others = random.Random(first).sample(range(N_BLOCKS), 13 - first)
            before = target.blocks(others[-1:])
            assert loaded(store, chain, target, others) == 12 - first
            assert target.blocks(others[:-1]) == source.blocks(blocks[first:])
            assert target.blocks(others[-1:]) == before
        assert store.lookup(store.chain_of_keys([b"other", *keys])).n_chunks == 0
        assert store.lookup(store.chain(range(2 * BLOCK_TOKENS))).n_chunks == 0
        with pytest.raises(kvik.InvalidValueError, match="`keys` is some twice; allowed: each key once"):
            store.chain_of_keys([b"a", b"b", b"a"])


def test_what_is_cleared_is_not_found_and_can_be_saved_again():
    engine = Engine(1)
    with pages_store() as store, pages_store(layout="other") as other:
        for one in (store, other):
            assert saved(one, one.chain_of_keys([b"a", b"b"]), engine, [3, 4]) == 2
        assert store.clear() == {"ram": 2}
        assert store.lookup(store.chain_of_keys([b"a"])).n_chunks == 0
        assert other.lookup(other.chain_of_keys([b"a"])).n_chunks == 1
        assert saved(store, store.chain_of_keys([b"a", b"b"]), engine, [3, 4]) == 2


def test_pages_of_other_layouts_and_models_in_the_same_store_are_misses():
    engine = Engine(1)
    with pages_store() as store:
        assert saved(store, store.chain_of_keys([b"a"]), engine, [3]) == 1
        same = {
            **ENGINE,
            "n_layers": 1,
            "token_layer_bytes": N_LAYERS * PAGE_BYTES // BLOCK_TOKENS,
            "block_tokens": BLOCK_TOKENS,
        }
        for change in ({}, {"layout": "other"}, {"model": "other"}, {"dtype": "f16"}, {"n_ranks": 2}):
            with kvik.Store.attach(store.socket, **(same | change)) as other:
                assert other.wait_attached(10)
                assert other.lookup(other.chain_of_keys([b"a"])).n_chunks == (0 if change else 1)


def test_chunks_with_a_time_are_gone_after_it_and_a_later_save_keeps_them(store):
    engine = Engine(1)
    blocks = list(range(2 * CHUNK_BLOCKS))
    short, kept = (store.chain(range(start, start + 2 * CHUNK_TOKENS)) for start in (0, 1000))
    for chain in (short, kept):
        assert store.start_save(chain, 0, engine.memory, blocks, ttl_s=0.2).wait(10)
    assert saved(store, kept, engine, blocks) == len(blocks)
    deadline = time.monotonic() + 10
    while store.lookup(short).n_tokens:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert loaded(store, short, Engine(2), blocks) == 0
    target = Engine(3)
    assert loaded(store, kept, target, blocks) == len(blocks)
    assert target.blocks(blocks) == engine.blocks(blocks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ttl_s": 0}, "`ttl_s` is 0; allowed: more than 0 seconds"),
        ({"ttl_s": -1}, "`ttl_s` is -1; allowed: 0 or more seconds"),
        ({"priority": "high"}, "`priority` is high; allowed: normal, low"),
    ],
)
def test_a_wrong_retention_is_named_and_nothing_is_saved(store, arguments, message):
    chain = store.chain(range(CHUNK_TOKENS))
    with pytest.raises(kvik.InvalidValueError, match=message):
        store.start_save(chain, 0, Engine(1).memory, list(range(CHUNK_BLOCKS)), **arguments)
    assert store.lookup(chain).n_tokens == 0


def test_saves_at_idle_priority_store_the_same_bytes(store):
    with kvik.Store.attach(store.socket, idle_saves=True, **ENGINE) as idle:
        source, target = Engine(1), Engine(2)
        blocks = list(range(3 * CHUNK_BLOCKS))
        chain = idle.chain(range(3 * CHUNK_TOKENS))
        assert saved(idle, chain, source, blocks) == len(blocks)
        assert loaded(store, store.chain(range(3 * CHUNK_TOKENS)), target, blocks) == len(blocks)
        assert target.blocks(blocks) == source.blocks(blocks)
