"""The managing connection, against the daemon of a store in this process."""

import threading

import kvik
import pytest

from polling import eventually
from test_store import CHUNK_BLOCKS, CHUNK_TOKENS, ENGINE, Engine

N_CHUNKS = 4
N_TOKENS = N_CHUNKS * CHUNK_TOKENS


@pytest.fixture
def store(tmp_path):
    nvme = f"{tmp_path / 'disk'}:64MiB"
    with kvik.Store.in_process(ram="16MiB", nvme=nvme, chunk_tokens=CHUNK_TOKENS, **ENGINE) as store:
        yield store


@pytest.fixture
def client(store):
    with kvik.Client.attach(store.socket, **ENGINE) as client:
        yield client


def save(store: kvik.Store, chain: kvik.Chain) -> None:
    job = store.start_save(chain, 0, Engine(1).memory, list(range(N_CHUNKS * CHUNK_BLOCKS)))
    assert job.wait(10)
    assert job.result == N_CHUNKS * CHUNK_BLOCKS


def test_a_chain_of_a_client_is_that_of_the_store_and_is_found_in_its_tier(store, client):
    chain = client.chain(range(N_TOKENS), salt="s")
    assert chain.names() == store.chain(range(N_TOKENS), salt="s").names()
    assert client.lookup(chain) == {}
    save(store, chain)
    assert client.lookup(chain) == {"ram": N_TOKENS}
    assert client.lookup(chain, is_local=True) == {"ram": N_TOKENS}


def test_statistics_have_counts_and_tiers(store, client):
    save(store, client.chain(range(N_TOKENS)))
    stats = client.stats()
    assert stats["chunk_tokens"] == CHUNK_TOKENS
    assert {tier["tier"] for tier in stats["tiers"]} == {"ram", "nvme"}
    assert all(isinstance(count, int) for count in stats["counts"].values())


def test_what_is_moved_to_the_disk_is_prefetched_into_memory(store, client):
    chain = client.chain(range(N_TOKENS))
    save(store, chain)
    assert client.relocate(chain, "ram", "nvme", keeps_source=True) == N_CHUNKS
    assert client.clear(chain, tiers=["ram"]) == {"ram": N_CHUNKS}
    assert client.lookup(chain) == {"nvme": N_TOKENS}
    prefetch = client.prefetch(chain)
    eventually(lambda: not prefetch.is_loading())
    assert client.lookup(chain) == {"ram": N_TOKENS}
    assert prefetch.cancel() is False
    target = Engine(2)
    job = store.start_load(chain, 0, target.memory, list(range(N_CHUNKS * CHUNK_BLOCKS)))
    assert job.wait(10)
    assert target.blocks(list(range(N_CHUNKS * CHUNK_BLOCKS))) == Engine(1).blocks(list(range(N_CHUNKS * CHUNK_BLOCKS)))


def test_pins_are_counted_and_outlive_the_client(store, client):
    chain = client.chain(range(N_TOKENS))
    save(store, chain)
    assert client.pin(chain) == N_TOKENS
    client.close()
    with kvik.Client.attach(store.socket, **ENGINE) as other:
        assert other.pin(chain) == N_TOKENS
        assert [other.unpin(chain) for _ in range(3)] == [True, True, False]


def test_a_pin_with_an_end_keeps_a_chain_until_then():
    with kvik.Store.in_process(ram="1MiB", chunk_tokens=CHUNK_TOKENS, **ENGINE) as store, store.client() as client:
        chains = [client.chain(range(10000 * number, 10000 * number + N_TOKENS)) for number in range(100)]
        kept, over, forever = chains[:3]
        for chain in chains[:3]:
            save(store, chain)
        assert client.pin(kept, ttl_s=3600) == client.pin(over, ttl_s=0) == client.pin(forever) == N_TOKENS
        # Three times as much as there is room for, all of it used twice.
        for chain in chains[3:]:
            store.start_save(chain, 0, Engine(1).memory, list(range(N_CHUNKS * CHUNK_BLOCKS))).wait(10)
            for _ in range(2):
                store.note_request(chain).wait(10)
        assert client.lookup(kept) == client.lookup(forever) == {"ram": N_TOKENS}
        assert client.lookup(over) == {}
        assert [client.unpin(chain) for chain in (kept, over, forever)] == [True, False, True]
        with pytest.raises(kvik.InvalidValueError, match="`ttl_s` is -1"):
            client.pin(kept, ttl_s=-1)


def test_what_is_saved_with_a_pin_is_pinned_when_the_save_is_done(store, client):
    chains = [client.chain(range(N_TOKENS), salt=f"{number}") for number in range(3)]
    content = bytes(N_TOKENS * ENGINE["token_layer_bytes"] * ENGINE["n_layers"])
    assert store.save(chains[0], content, pin_s=3600) == N_TOKENS
    assert store.save(chains[1], content, pin_s=0) == N_TOKENS
    assert store.save(chains[2], content) == N_TOKENS
    assert [client.unpin(chain) for chain in chains] == [True, False, False]
    job = store.start_save(chains[1], 0, Engine(1).memory, list(range(N_CHUNKS * CHUNK_BLOCKS)), pin_s=3600)
    assert job.wait(10)
    assert client.unpin(chains[1]), "chunks that were there are pinned too"
    with pytest.raises(kvik.InvalidValueError, match="`pin_s` is NaN"):
        store.save(chains[0], content, pin_s=float("nan"))


def test_a_clear_without_a_chain_takes_all_chunks_of_these_engines_and_none_of_others(store, client):
    other = ENGINE | {"model": "other"}
    chain = client.chain(range(N_TOKENS))
    save(store, chain)
    with kvik.Client.attach(store.socket, **other) as stranger:
        assert sum(stranger.clear().values()) == 0
        with pytest.raises(kvik.InvalidValueError, match="of another space"):
            stranger.lookup(chain)
    assert client.clear()["ram"] == N_CHUNKS
    assert client.lookup(chain) == {}


def test_errors_say_what_the_caller_can_do(store, client, tmp_path):
    chain = client.chain(range(N_TOKENS))
    with pytest.raises(kvik.InvalidValueError, match="`tier` is A B; allowed"):
        client.prefetch(chain, tier="A B")
    with pytest.raises(kvik.RefusedError, match="no tier of that name"):
        client.prefetch(chain, tier="redis")
    with pytest.raises(kvik.InvalidValueError, match="less than n_ranks"):
        kvik.Client.attach(store.socket, **(ENGINE | {"rank": 3}))
    client.close()
    with pytest.raises(kvik.StoreGoneError):
        client.stats()
    with kvik.Client.attach(tmp_path / "none.sock", **ENGINE) as none, pytest.raises(kvik.KvikError, match="none.sock"):
        none.stats()


def test_other_threads_of_python_run_while_a_call_waits(store, client):
    chain = client.chain(range(N_TOKENS))
    save(store, chain)
    is_done = threading.Event()
    n_calls = [0]

    def call() -> None:
        while not is_done.is_set():
            client.lookup(chain)
            n_calls[0] += 1

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    eventually(lambda: n_calls[0] > 50)
    is_done.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
