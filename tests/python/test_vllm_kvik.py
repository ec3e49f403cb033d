"""kvik inside a real vLLM: what it loads are the tokens that it would have computed.

KVIK_ENGINES names a virtual environment made by `engines/install`, KVIK_PACKAGE the folder of the package `kvik`. Engines
run in processes of their own, so what one loads another has computed.
"""

import json
import pathlib
import shutil
import time

import pytest
from engine_processes import ENGINES, MODEL_FOLDER
from store_daemon import CHUNK_TOKENS, Daemon, spoil, whole_chunks
from vllm_process import Vllm, daemon, eventually_loaded, plain, prompt, started  # noqa: F401

pytestmark = pytest.mark.skipif(not ENGINES, reason="KVIK_ENGINES is not set")

def test_what_one_engine_computed_another_loads_with_the_same_tokens(plain: Vllm, daemon: Daemon) -> None:
    prompts = [prompt(seed, n_tokens) for seed, n_tokens in enumerate((900, 500, 70, 64, 40))]
    expected = [plain.generate(tokens)["tokens"] for tokens in prompts]
    with started("--socket", str(daemon.socket)) as first:
        for tokens, right in zip(prompts, expected, strict=True):
            answer = first.generate(tokens)
            assert (answer["tokens"], answer["cached"]) == (right, [0])
        with started("--socket", str(daemon.socket)) as second:
            for tokens, right in zip(prompts, expected, strict=True):
                eventually_loaded(second, tokens, right)
            # Other salts share nothing, and a salt shares with itself.
            salted = second.generate(prompts[0], salt="tenant")
            assert (salted["tokens"], salted["cached"]) == (expected[0], [0])
            second.ask("reset")
            again = second.generate(prompts[0], salt="tenant")
            assert (again["tokens"], again["cached"]) == (expected[0], [whole_chunks(900)])


def test_a_daemon_that_dies_costs_hits_and_is_used_again_when_it_is_back(plain: Vllm, daemon: Daemon) -> None:
    first, second = prompt(11, 600), prompt(12, 600)
    right = [plain.generate(tokens)["tokens"] for tokens in (first, second)]
    with started("--socket", str(daemon.socket)) as engine:
        assert engine.generate(first)["tokens"] == right[0]
        engine.ask("reset")
        daemon.kill()
        answer = engine.generate(first)
        assert (answer["tokens"], answer["cached"]) == (right[0], [0])
        daemon.start()
        engine.ask("reset")
        deadline = time.monotonic() + 30
        while engine.generate(second)["cached"] != [whole_chunks(600)]:
            assert time.monotonic() < deadline, "the daemon is not used again"
            engine.ask("reset")
        engine.ask("reset")
        assert engine.generate(second)["tokens"] == right[1]


def test_a_restart_keeps_the_disk_warm_and_a_spoiled_disk_is_never_served(plain: Vllm, daemon: Daemon) -> None:
    tokens = prompt(21, 700)
    right = plain.generate(tokens)["tokens"]
    with started("--socket", str(daemon.socket)) as engine:
        assert engine.generate(tokens)["tokens"] == right
        engine.ask("reset")
        daemon.stop()
        daemon.start()
        eventually_loaded(engine, tokens, right)
        engine.ask("reset")
        daemon.stop()
        spoil(daemon.disk)
        daemon.start()
        engine.ask("reset")
        answer = engine.generate(tokens)
        assert answer["tokens"] == right
        assert answer["cached"][0] < whole_chunks(700)


# A chunk comes in half a second, or later than the daemon waits for it.
@pytest.mark.parametrize(("bytes_per_s", "n_measured"), [("1MB", CHUNK_TOKENS), ("100kB", 0)])
def test_what_a_slow_disk_has_is_computed_and_then_loaded_from_memory(
    plain: Vllm, daemon: Daemon, bytes_per_s: str, n_measured: int
) -> None:
    first, second = prompt(31, 700), prompt(32, 700)
    right = [plain.generate(tokens)["tokens"] for tokens in (first, second)]
    socket = ("--socket", str(daemon.socket))
    with started(*socket) as engine:
        assert [engine.generate(tokens)["tokens"] for tokens in (first, second)] == right
        engine.ask("reset")
    daemon.stop()
    disk = {"name": "disk", "nvme": f"{daemon.disk}:256MiB", "bytes_per_s": bytes_per_s, "waits": True}
    daemon.flags = ["--set", f"tiers.tiers={json.dumps([disk])}"]
    daemon.start()
    with started(*socket) as engine:
        # It learns what computing takes, and with a part of what is there how slow the disk is.
        engine.generate(prompt(33, 700))
        answer = engine.generate(first)
        assert (answer["tokens"], answer["cached"]) == (right[0], [n_measured])
        answer = engine.generate(second)
        assert (answer["tokens"], answer["cached"]) == (right[1], [0])
        engine.ask("reset")
        eventually_loaded(engine, second, right[1])


def test_engines_whose_kv_differs_share_nothing(daemon: Daemon, tmp_path: pathlib.Path) -> None:
    tokens = prompt(41, 300)
    socket = ("--socket", str(daemon.socket))
    with started(*socket) as engine:
        assert engine.generate(tokens)["cached"] == [0]
        engine.ask("reset")
        answer = engine.generate(tokens)
        assert answer["cached"] == [whole_chunks(300)]
    with started(*socket, "--dtype", "bfloat16") as narrow:
        assert narrow.generate(tokens)["cached"] == [0]
    # A model of the same name, shape and lengths of files, with one other number in the middle of its weights.
    other = tmp_path / "other" / MODEL_FOLDER.name
    shutil.copytree(MODEL_FOLDER, other)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    with started(*socket, model=other) as second:
        assert second.generate(tokens)["cached"] == [0]
        second.ask("reset")
        assert second.generate(tokens)["cached"] == [whole_chunks(300)]


def test_ranks_load_what_ranks_of_another_engine_have_computed_and_no_part_of_it_is_served_to_others(
    daemon: Daemon,
) -> None:
    prompts = [prompt(seed, n_tokens) for seed, n_tokens in ((51, 900), (52, 300), (53, 40))]
    ranks, socket = ("--processes", "--ranks", "2"), ("--socket", str(daemon.socket))
    with started(*ranks) as engine:
        expected = [engine.generate(tokens)["tokens"] for tokens in prompts]
    with started(*ranks, *socket) as first:
        for tokens, right in zip(prompts, expected, strict=True):
            answer = first.generate(tokens)
            assert (answer["tokens"], answer["cached"]) == (right, [0])
        first.ask("reset")
    with started(*ranks, *socket) as second:
        for tokens, right in zip(prompts, expected, strict=True):
            eventually_loaded(second, tokens, right)
    # One rank has all heads, so its KV is of another shape.
    with started(*socket) as whole:
        assert whole.generate(prompts[0])["cached"] == [0]


def test_a_request_says_what_is_loaded_saved_shared_and_forgotten(plain: Vllm, daemon: Daemon) -> None:
    tokens, timed = prompt(61, 300), prompt(62, 300)
    right = {id(tokens): plain.generate(tokens)["tokens"], id(timed): plain.generate(timed)["tokens"]}
    whole = [whole_chunks(300)]
    with started("--socket", str(daemon.socket)) as engine:

        def cached(prompt: list[int], params: dict | None = None) -> list[int]:
            answer = engine.generate(prompt, params=params)
            assert answer["tokens"] == right[id(prompt)]
            # Blocks that saves hold are given back before it is done: what was to be saved is saved.
            engine.ask("reset")
            return answer["cached"]

        assert cached(tokens, {"kvik": {"skip_save": True}}) == [0]
        # A control that is wrong is no reason to guess: the request does without the store.
        assert cached(tokens, {"kvik": {"ttl_s": "soon"}}) == [0]
        assert cached(tokens, {"lmcache.skip_save": "true"}) == [0]
        assert cached(tokens) == [0]
        assert cached(tokens) == whole
        assert cached(tokens, {"kvik": {"skip_load": True}}) == [0]
        # Tags share with themselves alone.
        anna = {"lmcache.tag.user": "anna"}
        assert cached(tokens, anna) == [0]
        assert cached(tokens, {"kvik": {"tags": {"user": "anna"}}}) == whole
        assert cached(tokens, {"lmcache.tag.user": "bert"}) == [0]
        # Its time begins with the save, which is between these two.
        begin = time.monotonic()
        assert cached(timed, {"kvik": {"ttl_s": 8}}) == [0]
        saved = time.monotonic()
        skip_save = {"kvik": {"skip_save": True}}
        assert cached(timed, skip_save) == whole or time.monotonic() > begin + 8
        time.sleep(max(0.0, saved + 8 - time.monotonic()))
        assert cached(timed, skip_save) == [0]


def test_preempted_requests_give_the_same_tokens_as_without_kvik(plain: Vllm, daemon: Daemon) -> None:
    prompts = [prompt(30 + seed % 7, 100 + 37 * (seed % 7)) + prompt(99 + seed, 30) for seed in range(32)]
    right = [plain.generate(tokens, max_tokens=64)["tokens"][0] for tokens in prompts]
    # Room for about five of the 32 requests.
    with started("--socket", str(daemon.socket), "--blocks", "72") as engine:
        for _ in range(2):
            answer = engine.generate(*prompts, max_tokens=64)
            assert answer["tokens"] == right
            engine.ask("reset")
        assert answer["preemptions"] > 0
