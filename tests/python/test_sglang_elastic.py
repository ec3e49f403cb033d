"""Elastic memory below SGLang's own KV pool, allocator and radix tree, through its plugins and hooks.

KVIK_ENGINES and KVIK_PACKAGE as in test_sglang_kvik.py. With 4 KiB of keys a token, a slab has 512 tokens, and 8 MiB in two layers
(MLA: 4 MiB). Two processes share a group of the ledger. Every byte of KV is compared, and SGLang's search for leaks runs in each step.
"""

import itertools
import json
import os
import pathlib
import random
from collections.abc import Iterator

import pytest
from conftest import ROOT
from engine_processes import ENGINES, Driver, eventually
from ledger import Ledger
from vllm_server import PACKAGE

pytestmark = pytest.mark.skipif(not ENGINES, reason="KVIK_ENGINES is not set")

MIB = 1 << 20
SLAB_TOKENS = 512
SLAB = 8 * MIB
GROUP = "shared"


class Engine(Driver):
    """SGLang in a process of its own."""

    def __init__(self, ledger: Ledger, folder: pathlib.Path) -> None:
        settings = json.dumps({"group": GROUP, "directory": str(ledger.folder)})
        path = os.pathsep.join([os.path.abspath(PACKAGE), str(folder)])
        super().__init__("sglang_elastic.py", PYTHONPATH=path, KVIK_SGLANG_ELASTIC=settings)

    def counts(self, op: str = "counts") -> dict:
        """Counts after a step, or as they are; SGLang finds no leak."""
        counts = self.ask(op)
        assert counts["leak"] is None, counts
        return counts


@pytest.fixture(scope="module")
def ledger(tmp_path_factory: pytest.TempPathFactory) -> Ledger:
    folder = tmp_path_factory.mktemp("ledger")
    folder.chmod(0o700)
    return Ledger(folder)


@pytest.fixture(scope="module")
def engines(ledger: Ledger, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Engine]]:
    folder = plugin_folder(tmp_path_factory.mktemp("installed"))
    both = [Engine(ledger, folder), Engine(ledger, folder)]
    try:
        for engine in both:
            assert engine.read() == {"is_ready": True}
        yield both
    finally:
        for engine in both:
            engine.process.kill()
            engine.process.wait()


def plugin_folder(folder: pathlib.Path) -> pathlib.Path:
    """What an installer writes of the package's entry points, by which SGLang finds the plugin."""
    lines = (ROOT / "bindings/python/pyproject.toml").read_text().splitlines()
    plugins = itertools.takewhile(bool, lines[lines.index('[project.entry-points."sglang.srt.plugins"]') + 1 :])
    information = folder / "kvik-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: kvik\nVersion: 0.1.0\n")
    (information / "entry_points.txt").write_text("\n".join(["[sglang.srt.plugins]", *plugins]).replace('"', ""))
    return folder


@pytest.fixture
def first(engines: list[Engine], ledger: Ledger) -> Iterator[Engine]:
    yield engines[0]
    limit(ledger, "none")


def limit(ledger: Ledger, size: int | str) -> None:
    ledger.kvctl("limit", GROUP, str(size))


def prompt(seed: int, n_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(1, 500), k=n_tokens)


def test_sglang_finds_the_plugin_and_applies_its_hooks(first: Engine) -> None:
    assert first.ask("open")["allocator"] == "ElasticTokenAllocator"
    assert first.ask("open", page_tokens=16)["allocator"] == "ElasticPagedAllocator"
    assert first.ask("hooks")["hooked"] == ["__init__", "get_next_batch_to_run", "update_running_batch", "on_idle"]
    assert first.ask("start_scheduler") == {}


@pytest.mark.parametrize("kind", ["mha", "mla", "uneven"])
@pytest.mark.parametrize("page_tokens", [1, 16])
def test_bytes_stay_right_under_a_small_limit(first: Engine, ledger: Ledger, kind: str, page_tokens: int) -> None:
    opened = first.ask("open", kind=kind, page_tokens=page_tokens)
    # Half of all slabs, and pages that the first one shares with others.
    most = 4 * opened["slab_bytes"] + opened["taken_bytes"]
    limit(ledger, most)
    load = first.ask("load", seed=page_tokens, n_steps=60, n_tokens=500)
    assert load["n_started"] > 0 and load["n_refused"] > 0 and load["n_hits"] > 0 and load["n_decoded"] > 0, load
    assert opened["taken_bytes"] < max(load["taken"]) <= most


def test_memory_comes_with_requests_and_goes_when_they_have_ended(first: Engine, ledger: Ledger) -> None:
    begin = first.ask("open", page_tokens=16)
    assert begin["n_available"] == SLAB_TOKENS - 16
    assert first.ask("start", name="a", tokens=prompt(1, 2000), max_new=100) == {"is_admitted": True, "n_cached": 0}
    counts = first.counts()
    # The memory of the prompt, and none yet for an answer.
    assert (counts["taken_bytes"] - begin["taken_bytes"], counts["n_used"]) == (3 * SLAB, 2000)
    assert first.ask("decode", name="a", tokens=prompt(2, 90))["n_decoded"] == 90
    assert first.counts()["taken_bytes"] - begin["taken_bytes"] == 4 * SLAB
    assert first.ask("finish", name="a")["is_right"]
    # What the prefix cache has stays for a while.
    assert first.counts("idle")["n_evictable"] == 2080
    assert first.ask("start", name="b", tokens=[*prompt(1, 2000), 7])["n_cached"] == 2000
    first.ask("finish", name="b")
    eventually(lambda: first.counts("idle")["taken_bytes"] == begin["taken_bytes"], first.counts)
    eventually(lambda: ledger.held(GROUP) == begin["taken_bytes"], lambda: ledger.held(GROUP))
    # And it comes again.
    assert first.ask("start", name="c", tokens=prompt(3, 3000))["is_admitted"]
    assert first.ask("finish", name="c")["is_right"]


def test_an_idle_engine_gives_its_prefix_cache_to_one_that_needs_memory(
    engines: list[Engine], first: Engine, ledger: Ledger
) -> None:
    second = engines[1]
    begin = first.ask("open", page_tokens=16)["taken_bytes"]
    second.ask("open", page_tokens=16)
    limit(ledger, 2 * begin + 6 * SLAB)
    assert first.ask("start", name="a", tokens=prompt(1, 2900))["is_admitted"]
    first.ask("finish", name="a")
    assert first.counts("idle")["taken_bytes"] == begin + 5 * SLAB
    assert not second.ask("start", name="b", tokens=prompt(2, 2500))["is_admitted"]

    def starts() -> bool:
        second.ask("step", n_waiting=1)
        first.counts("idle")
        return second.ask("start", name="b", tokens=prompt(2, 2500))["is_admitted"]

    eventually(starts, lambda: (first.counts(), second.counts()))
    assert first.counts()["taken_bytes"] + second.counts()["taken_bytes"] <= 2 * begin + 6 * SLAB
    # What is left of the cache is right.
    assert first.ask("start", name="c", tokens=prompt(1, 1000))["is_admitted"]
    assert first.ask("finish", name="c")["is_right"]
    assert second.ask("finish", name="b")["is_right"]
    second.ask("open")


def test_a_lowered_limit_takes_free_pages_first_and_the_rest_as_requests_end(first: Engine, ledger: Ledger) -> None:
    begin = first.ask("open", page_tokens=16)["taken_bytes"]
    for number in range(4):
        assert first.ask("start", name=str(number), tokens=prompt(number, 700))["is_admitted"]
    assert first.counts()["taken_bytes"] == begin + 5 * SLAB
    limit(ledger, begin + 2 * SLAB)
    eventually(lambda: first.counts("step")["n_available"] < SLAB_TOKENS, first.counts)
    # All is in use: it stays, and pages that become free are not used again.
    assert first.counts()["taken_bytes"] > begin + 2 * SLAB
    assert not first.ask("start", name="more", tokens=prompt(9, 600))["is_admitted"]
    for number in range(3):
        assert first.ask("finish", name=str(number))["is_right"]
        first.counts("step")
    # Slabs that are not neighbors share no pages with each other.
    eventually(lambda: first.counts("step")["taken_bytes"] < begin + 3 * SLAB, first.counts)
    assert first.ask("finish", name="3")["is_right"]
    eventually(lambda: first.counts("idle")["taken_bytes"] <= begin + 2 * SLAB, first.counts)
    limit(ledger, "none")
    eventually(lambda: first.counts("idle") and first.ask("start", name="x", tokens=prompt(8, 3000))["is_admitted"], first.counts)
    assert first.ask("finish", name="x")["is_right"]


def test_what_may_never_be_held_is_refused_and_a_request_alone_waits(first: Engine, ledger: Ledger) -> None:
    first.ask("open", page_tokens=16)
    whole = first.ask("most_new_tokens", n_input=1000, n_new=10_000)["n_tokens"]
    assert 1000 + whole <= 4096
    limit(ledger, 6 * SLAB)
    eventually(lambda: first.ask("most_new_tokens", n_input=1000, n_new=10_000)["n_tokens"] < 1600, first.counts)
    assert first.ask("most_new_tokens", n_input=3000, n_new=1)["n_tokens"] is None
    assert first.ask("decode_alone", is_there=True) == {"updated": True}
    assert first.ask("decode_alone", is_there=False) == {"updated": None}


def test_a_long_prompt_goes_on_as_far_as_there_is_memory(first: Engine, ledger: Ledger) -> None:
    begin = first.ask("open", page_tokens=16)["taken_bytes"]
    limit(ledger, begin)
    eventually(lambda: first.ask("start", name="a", tokens=prompt(1, 300))["is_admitted"], first.counts)
    # 12 pages of the first slab are left, and one of them is kept for the request itself.
    assert first.ask("next_chunk", n_tokens=1024) == {"n_tokens": 176, "fits": False, "has_capacity": True}
    assert first.ask("decode", name="a", tokens=prompt(2, 196))["n_decoded"] == 196
    assert first.ask("next_chunk", n_tokens=1024) == {"n_tokens": None, "fits": False, "has_capacity": False}
    eventually(lambda: first.ask("looks_again")["is_so"], first.counts)
    limit(ledger, "none")
    eventually(lambda: first.counts("step") and first.ask("next_chunk", n_tokens=1024)["n_tokens"] == 1024, first.counts)
    assert first.ask("next_chunk", n_tokens=1024) == {"n_tokens": 1024, "fits": True, "has_capacity": True}
    assert first.ask("finish", name="a")["is_right"]


def test_a_flushed_cache_uses_no_page_without_memory(first: Engine) -> None:
    begin = first.ask("open", page_tokens=16)
    first.ask("start", name="a", tokens=prompt(1, 1500))
    first.ask("finish", name="a")
    flushed = first.ask("flush")
    assert (flushed["leak"], flushed["n_available"]) == (None, 3 * SLAB_TOKENS - 16)
    assert flushed["taken_bytes"] == begin["taken_bytes"] + 2 * SLAB
    assert first.ask("start", name="b", tokens=prompt(2, 3500))["is_admitted"]
    assert first.ask("finish", name="b")["is_right"]


def test_pools_that_cannot_be_elastic_end_the_start(first: Engine) -> None:
    first.ask("open")
    assert "is the second one; allowed with elastic memory" in first.ask("second_pool")["error"]
    assert "has tokens that are no whole pages" in first.ask("open", page_tokens=16, n_tokens=4099)["error"]
    first.ask("open", kind="unknown")
    assert "the allocator is ElasticTokenAllocator of NoOpMHATokenToKVPool" in first.ask("start_scheduler")["error"]
    first.ask("open")
