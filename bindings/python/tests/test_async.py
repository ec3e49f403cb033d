"""Jobs awaited in asyncio: no thread and no polling for each."""

import asyncio
import gc
import os
import subprocess
import sys
import threading

import kvik
import pytest

from test_store import BLOCK_TOKENS, CHUNK_BLOCKS, CHUNK_TOKENS, ENGINE, Engine

N_CHUNKS = 4


@pytest.fixture
def store():
    with kvik.Store.in_process(ram="16MiB", chunk_tokens=CHUNK_TOKENS, **ENGINE) as store:
        yield store


def n_bells() -> int:
    """Descriptors that jobs ring: stores have none of this kind."""

    def is_bell(name: str) -> bool:
        try:
            return "eventfd" in os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            return False

    return sum(map(is_bell, os.listdir("/proc/self/fd")))


def test_awaited_jobs_give_their_results_and_the_bytes_that_were_saved(store):
    source, target = Engine(1), Engine(2)
    chain = store.chain(range(N_CHUNKS * CHUNK_TOKENS))
    blocks = list(range(N_CHUNKS * CHUNK_BLOCKS))

    async def run() -> tuple[int, int, int]:
        n_saved = await store.start_save(chain, 0, source.memory, blocks)
        n_found = await store.start_lookup(chain)
        n_loaded = await store.start_load(chain, 0, target.memory, blocks)
        return n_saved, n_found, n_loaded

    assert asyncio.run(run()) == (len(blocks), N_CHUNKS * CHUNK_TOKENS, len(blocks))
    assert target.blocks(blocks) == source.blocks(blocks)


def test_many_jobs_are_awaited_at_a_time_with_one_descriptor_and_without_threads(store):
    source = Engine(1)
    chain = store.chain(range(N_CHUNKS * CHUNK_TOKENS))
    assert store.start_save(chain, 0, source.memory, list(range(N_CHUNKS * CHUNK_BLOCKS))).wait(10)
    n_threads = threading.active_count()

    async def run() -> None:
        gc.collect()
        before = n_bells()
        jobs = [store.start_lookup(chain) for _ in range(200)]
        tasks = [asyncio.ensure_future(awaited(job)) for job in jobs]
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, n_bells())
            await asyncio.sleep(0)
        assert {task.result() for task in tasks} == {N_CHUNKS * CHUNK_TOKENS}
        assert most <= before + 1
        assert n_bells() == before

    asyncio.run(run())
    assert threading.active_count() == n_threads


async def awaited(job: kvik.Job) -> int:
    return await job


def test_one_job_is_awaited_by_several_tasks_and_after_its_end(store):
    chain = store.chain(range(CHUNK_TOKENS))

    async def run() -> None:
        job = store.start_save(chain, 0, Engine(1).memory, list(range(CHUNK_BLOCKS)))
        assert await asyncio.gather(*(awaited(job) for _ in range(5))) == [CHUNK_BLOCKS] * 5
        assert job.is_done
        assert await job == CHUNK_BLOCKS

    asyncio.run(run())


def test_a_cancelled_task_leaves_the_job_and_its_memory_alone(store):
    busy, blocks = Engine(1), list(range(N_CHUNKS * CHUNK_BLOCKS))
    tokens = list(range(N_CHUNKS * CHUNK_TOKENS))
    others = [store.chain(tokens, salt=f"{number}") for number in range(20)]
    chain = store.chain(tokens)
    source = Engine(2)
    expected = source.blocks(blocks)

    async def run() -> kvik.Job:
        nonlocal source
        # Saves that come before it, so that it still waits when its task is cancelled.
        before = [store.start_save(other, 0, busy.memory, blocks) for other in others * 20]
        job = store.start_save(chain, 0, source.memory, blocks)
        # Nothing but the job has the memory.
        source = None
        task = asyncio.ensure_future(awaited(job))
        await asyncio.sleep(0)
        assert not job.is_done
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gc.collect()
        # The loop goes on with other jobs, and hears of the end of this one.
        assert await before[-1] == len(blocks)
        assert await store.start_lookup(others[0]) == len(tokens)
        return job

    job = asyncio.run(run())
    assert job.wait(10)
    assert job.result == len(blocks)
    target = Engine(3)
    assert store.start_load(chain, 0, target.memory, blocks).wait(10)
    assert target.blocks(blocks) == expected


def test_a_loop_that_ends_before_its_jobs_leaves_the_next_loop_alone(store):
    chain = store.chain(range(CHUNK_TOKENS))

    async def abandon() -> None:
        for _ in range(20):
            asyncio.ensure_future(awaited(store.start_lookup(chain)))
        await asyncio.sleep(0)

    async def use() -> int:
        return await store.start_lookup(chain)

    for _ in range(5):
        asyncio.run(abandon())
        assert asyncio.run(use()) == 0


def test_a_job_that_is_cancelled_or_whose_store_is_closed_gives_0_and_does_not_hang():
    store = kvik.Store.in_process(ram="16MiB", chunk_tokens=CHUNK_TOKENS, **ENGINE)
    chain = store.chain(range(CHUNK_TOKENS))

    async def run() -> list[int]:
        jobs = [store.start_lookup(chain) for _ in range(100)]
        for job in jobs[50:]:
            job.cancel()
        tasks = [asyncio.ensure_future(awaited(job)) for job in jobs]
        await asyncio.sleep(0)
        await asyncio.to_thread(store.close)
        return await asyncio.wait_for(asyncio.gather(*tasks), 10)

    assert asyncio.run(run()) == [0] * 100


def test_without_a_running_loop_there_is_nothing_to_await_in(store):
    job = store.start_lookup(store.chain(range(BLOCK_TOKENS)))
    with pytest.raises(RuntimeError, match="no running event loop"):
        job.__await__()


def test_a_process_that_ends_while_jobs_are_under_way_ends_without_a_crash():
    program = """
import asyncio, sys, kvik
sys.path.insert(0, sys.argv[1])
from test_store import *
store = kvik.Store.in_process(ram="16MiB", chunk_tokens=CHUNK_TOKENS, **ENGINE)
chains = [store.chain(range(CHUNK_TOKENS), salt=str(number)) for number in range(50)]
engine = Engine(1)

async def awaited(job):
    return await job

async def run():
    for chain in chains * 20:
        asyncio.ensure_future(awaited(store.start_save(chain, 0, engine.memory, list(range(CHUNK_BLOCKS)))))
    await asyncio.sleep(0)

asyncio.run(run())
print("end")
"""
    folder = os.path.dirname(__file__)
    for _ in range(3):
        command = [sys.executable, "-c", program, folder]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "end\n", "")
