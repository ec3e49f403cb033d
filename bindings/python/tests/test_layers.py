"""Loads that bring one layer of all blocks after the other: every byte is compared, and a load that is given up writes nothing."""

import json
import pathlib
import random
import signal
import subprocess
import sys
import threading

import kvik
import pytest
from test_store import CHUNK_BLOCKS, CHUNK_TOKENS, ENGINE, N_BLOCKS, N_LAYERS, Engine, saved

# A store in a process of its own, which can be stopped.
DAEMON = """
import json, sys, kvik
settings = json.loads(sys.argv[1])
store = kvik.Store.in_process(ram="16MiB", **settings)
print(store.socket, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def store():
    with kvik.Store.in_process(ram="16MiB", chunk_tokens=CHUNK_TOKENS, **ENGINE) as store:
        yield store


class Daemon:
    def __init__(self) -> None:
        command = [sys.executable, "-c", DAEMON, json.dumps(ENGINE | {"chunk_tokens": CHUNK_TOKENS})]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.socket = pathlib.Path(self.process.stdout.readline().strip())


@pytest.fixture
def daemon():
    daemon = Daemon()
    yield daemon
    daemon.process.kill()
    daemon.process.wait()


def layers_of(engine: Engine, blocks: list[int], n_layers: int) -> list[bytes]:
    return [engine.block(layer, block) for layer in range(n_layers) for block in blocks]


@pytest.mark.parametrize("waiters_copy", [False, True])
@pytest.mark.parametrize("n_copy_threads", [1, 3])
def test_a_layer_that_has_come_is_there_in_all_blocks_and_the_end_has_all_layers(store, n_copy_threads, waiters_copy):
    source = Engine(1)
    blocks = random.Random(3).sample(range(N_BLOCKS), 5 * CHUNK_BLOCKS)
    others = random.Random(4).sample(range(N_BLOCKS), 5 * CHUNK_BLOCKS)
    chain = store.chain(range(5 * CHUNK_TOKENS))
    assert saved(store, chain, source, blocks) == len(blocks)
    with kvik.Store.attach(store.socket, n_copy_threads=n_copy_threads, **ENGINE) as session:
        assert session.wait_attached(10)
        for first_block in (0, 1, CHUNK_BLOCKS, len(blocks) - 1):
            target = Engine(2)
            before = layers_of(target, others[:first_block], N_LAYERS)
            job = session.start_load(
                chain, first_block, target.memory, others[first_block:], by_layers=True, waiters_copy=waiters_copy
            )
            for n_layers in range(1, N_LAYERS + 1):
                assert job.wait_layers(n_layers, 10)
                there = layers_of(target, others[first_block:], n_layers)
                assert there == layers_of(source, blocks[first_block:], n_layers)
            assert job.wait(10)
            assert job.result == len(blocks) - first_block
            assert layers_of(target, others[:first_block], N_LAYERS) == before


@pytest.mark.parametrize("waiters_copy", [False, True])
def test_chunks_that_are_not_there_are_known_at_once_and_those_before_them_come(store, waiters_copy):
    source, target = Engine(1), Engine(2)
    tokens = list(range(3 * CHUNK_TOKENS))
    blocks = list(range(3 * CHUNK_BLOCKS))
    assert saved(store, store.chain(tokens[:CHUNK_TOKENS]), source, blocks[:CHUNK_BLOCKS]) == CHUNK_BLOCKS
    before = target.blocks(blocks[CHUNK_BLOCKS:])
    job = store.start_load(store.chain(tokens), 0, target.memory, blocks, by_layers=True, waiters_copy=waiters_copy)
    assert not job.wait_layers(1)
    assert job.wait(10)
    assert job.result == CHUNK_BLOCKS
    assert target.blocks(blocks[:CHUNK_BLOCKS]) == source.blocks(blocks[:CHUNK_BLOCKS])
    assert target.blocks(blocks[CHUNK_BLOCKS:]) == before
    none = store.start_load(store.chain(tokens, salt="other"), 0, target.memory, blocks, by_layers=True)
    assert not none.wait_layers(1)
    assert none.wait(10)
    assert none.result == 0


@pytest.mark.parametrize("waiters_copy", [False, True])
def test_a_load_that_is_given_up_writes_nothing_when_the_daemon_goes_on(daemon, waiters_copy):
    source, target = Engine(1), Engine(2)
    blocks = list(range(3 * CHUNK_BLOCKS))
    with kvik.Store.attach(daemon.socket, timeout_s=60, **ENGINE) as store:
        assert store.wait_attached(10)
        chain = store.chain(range(3 * CHUNK_TOKENS))
        assert saved(store, chain, source, blocks) == len(blocks)
        before = bytes(target.bytes)
        daemon.process.send_signal(signal.SIGSTOP)
        job = store.start_load(chain, 0, target.memory, blocks, by_layers=True, waiters_copy=waiters_copy)
        assert not job.wait_layers(1, 0.05)
        job.abandon()
        # Known at once from now on.
        assert not job.wait_layers(1)
        daemon.process.send_signal(signal.SIGCONT)
        assert job.wait(60)
        assert job.result == 0
        assert bytes(target.bytes) == before
        again = store.start_load(chain, 0, target.memory, blocks, by_layers=True)
        assert again.wait_layers(N_LAYERS, 60)
        assert target.blocks(blocks) == source.blocks(blocks)


@pytest.mark.parametrize("waiters_copy", [False, True])
def test_a_load_whose_daemon_dies_ends_without_its_layers(daemon, waiters_copy):
    source, target = Engine(1), Engine(2)
    blocks = list(range(CHUNK_BLOCKS))
    with kvik.Store.attach(daemon.socket, timeout_s=60, **ENGINE) as store:
        assert store.wait_attached(10)
        chain = store.chain(range(CHUNK_TOKENS))
        assert saved(store, chain, source, blocks) == len(blocks)
        daemon.process.send_signal(signal.SIGSTOP)
        job = store.start_load(chain, 0, target.memory, blocks, by_layers=True, waiters_copy=waiters_copy)
        waiting = []
        thread = threading.Thread(target=lambda: waiting.append(job.wait_layers(1)))
        thread.start()
        daemon.process.kill()
        thread.join(60)
        assert waiting == [False]
        assert job.wait(60)
        assert job.result == 0


def test_what_waiters_copy_comes_also_where_nothing_waits(store):
    source, target = Engine(1), Engine(2)
    blocks = list(range(3 * CHUNK_BLOCKS))
    chain = store.chain(range(3 * CHUNK_TOKENS))
    assert saved(store, chain, source, blocks) == len(blocks)
    job = store.start_load(chain, 0, target.memory, blocks, by_layers=True, waiters_copy=True)
    assert job.wait_layers(1, 10)
    assert job.wait(10)
    assert (job.result, target.blocks(blocks)) == (len(blocks), source.blocks(blocks))


def test_what_waiters_copy_is_not_written_when_it_was_given_up(store):
    source, target = Engine(1), Engine(2)
    blocks = list(range(3 * CHUNK_BLOCKS))
    chain = store.chain(range(3 * CHUNK_TOKENS))
    assert saved(store, chain, source, blocks) == len(blocks)
    job = store.start_load(chain, 0, target.memory, blocks, by_layers=True, waiters_copy=True)
    assert job.wait_layers(1, 10)
    job.abandon()
    loaded = bytes(target.bytes)
    assert not job.wait_layers(N_LAYERS, 10)
    assert job.wait(10)
    assert (job.result, bytes(target.bytes)) == (0, loaded)


def test_several_threads_that_wait_copy_each_piece_once(store):
    source = Engine(1)
    blocks = list(range(5 * CHUNK_BLOCKS))
    chain = store.chain(range(5 * CHUNK_TOKENS))
    assert saved(store, chain, source, blocks) == len(blocks)
    for _ in range(50):
        target = Engine(2)
        job = store.start_load(chain, 0, target.memory, blocks, by_layers=True, waiters_copy=True)
        came = []
        waiting = [threading.Thread(target=lambda: came.append(job.wait_layers(N_LAYERS, 10))) for _ in range(3)]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join()
        assert came == [True] * 3
        assert target.blocks(blocks) == source.blocks(blocks)
        assert job.wait(10)
        assert job.result == len(blocks)


def test_other_jobs_have_no_layers_and_memory_with_other_pieces_is_refused(store):
    engine = Engine(1)
    blocks = list(range(CHUNK_BLOCKS))
    chain = store.chain(range(CHUNK_TOKENS))
    job = store.start_load(chain, 0, engine.memory, blocks)
    for call in (lambda: job.wait_layers(1), job.abandon):
        with pytest.raises(kvik.InvalidValueError, match="`job` is without layers; allowed: a load that was started with `by_layers`"):
            call()
    with pytest.raises(kvik.InvalidValueError, match="`waiters_copy` is true; allowed: false without `by_layers`"):
        store.start_load(chain, 0, engine.memory, blocks, waiters_copy=True)
    address = id(engine)
    pieces = [(address, 100, 100)] * (N_LAYERS + 1)
    other = kvik.EngineMemory(pieces, n_blocks=N_BLOCKS, block_tokens=16, owner=None)
    with pytest.raises(kvik.InvalidValueError, match=f"`pieces` is {N_LAYERS + 1}; allowed: as many for each of {N_LAYERS} layers"):
        store.start_load(chain, 0, other, blocks, by_layers=True)
