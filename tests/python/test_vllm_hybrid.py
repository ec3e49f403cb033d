"""kvik inside a real vLLM whose model has several groups of KV: windows beside full attention.

KVIK_ENGINES and KVIK_PACKAGE as in test_vllm_kvik.py. The model is made here, with random weights whose tokens change when any
token before them does, and with windows that are no multiple of blocks and chunks.
"""

import json
import pathlib
import select
import subprocess
from collections.abc import Iterator

import pytest
from engine_processes import DRIVERS, ENGINES, MODEL_FOLDER
from store_daemon import CHUNK_TOKENS, Daemon, spoil, whole_chunks
from vllm_process import Vllm, daemon, eventually_loaded, prompt, run_driver, started  # noqa: F401

pytestmark = pytest.mark.skipif(not ENGINES, reason="KVIK_ENGINES is not set")

# Longer than a chunk, so that a window is in several.
WINDOW = 100
# One token more than a block: behind a whole prompt vLLM frees the block that its last token reads.
NARROW_WINDOW = 33
# Prompts are computed in steps that end anywhere in chunks, and windows move with each.
SMALL_STEPS = ("--step-tokens", "100")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("models")


def model(folder: pathlib.Path, window: int, layers: str = "wwfwwf") -> pathlib.Path:
    """A model whose layers have windows (w) or full attention (f)."""
    made = folder / f"{layers}-{window}"
    if not made.exists():
        program = str(DRIVERS / "hybrid_model.py")
        command = [f"{ENGINES}/bin/python", "-W", "ignore", program, str(made), str(MODEL_FOLDER), str(window), layers]
        subprocess.run(command, check=True, capture_output=True)
    return made


@pytest.fixture(scope="module")
def wide(folder: pathlib.Path) -> pathlib.Path:
    return model(folder, WINDOW)


@pytest.fixture(scope="module")
def plain(wide: pathlib.Path) -> Iterator[Vllm]:
    """An engine without kvik: what it says is right."""
    with started(model=wide) as engine:
        yield engine


def test_groups_of_one_engine_are_loaded_by_another_with_the_same_tokens(
    plain: Vllm, wide: pathlib.Path, daemon: Daemon
) -> None:
    prompts = [prompt(seed, n_tokens) for seed, n_tokens in enumerate((900, 500, 192, 97, 40))]
    expected = [plain.generate(tokens, max_tokens=70)["tokens"] for tokens in prompts]
    # The answer, and what a next turn says.
    longer = prompts[0] + expected[0][0] + prompt(77, 20)
    longer_expected = plain.generate(longer)["tokens"]
    socket = ("--socket", str(daemon.socket))
    with started(*socket, *SMALL_STEPS, model=wide) as first:
        groups = first.ask("groups")
        assert sorted(groups["kinds"]) == ["FullAttentionSpec", "SlidingWindowSpec", "SlidingWindowSpec"]
        assert groups["n_different"] == 0
        for tokens, right in zip(prompts, expected, strict=True):
            answer = first.generate(tokens, max_tokens=70)
            assert (answer["tokens"], answer["cached"]) == (right, [0])
        first.ask("reset")
    with started(*socket, model=wide) as second:
        for tokens, right in zip(prompts, expected, strict=True):
            answer = second.generate(tokens, max_tokens=70)
            assert (answer["tokens"], answer["cached"]) == (right, [whole_chunks(len(tokens))])
        second.ask("reset")
        # Parts of the answer were saved while it was computed: their windows were gone at its end.
        eventually_loaded(second, longer, longer_expected, whole_chunks(969))
        # Every chunk is one behind which a sequence can go on, and local blocks are kept.
        second.ask("reset")
        for n_chunks in (3, 6, 7):
            tokens = prompts[1][: n_chunks * CHUNK_TOKENS] + prompt(88, 50)
            answer = second.generate(tokens)
            assert answer["tokens"] == plain.generate(tokens)["tokens"]
            assert answer["cached"] == [n_chunks * CHUNK_TOKENS]


def test_a_whole_prompt_is_loaded_but_for_the_chunk_whose_window_the_last_token_reads(
    folder: pathlib.Path, daemon: Daemon
) -> None:
    prompts = [prompt(seed, n_tokens) for seed, n_tokens in ((1, 192), (2, 193), (3, 600))]
    with started("--socket", str(daemon.socket), *SMALL_STEPS, model=model(folder, NARROW_WINDOW)) as engine:
        expected = [engine.generate(tokens)["tokens"] for tokens in prompts]
        for tokens, right, n_cached in zip(prompts, expected, (128, 192, 576), strict=True):
            engine.ask("reset")
            eventually_loaded(engine, tokens, right, n_cached)


def test_preempted_requests_give_the_same_tokens_as_without_kvik(
    plain: Vllm, wide: pathlib.Path, daemon: Daemon
) -> None:
    prompts = [prompt(30 + seed % 5, 150 + 67 * (seed % 5)) + prompt(99 + seed, 30) for seed in range(16)]
    right = [plain.generate(tokens, max_tokens=64)["tokens"][0] for tokens in prompts]
    with started("--socket", str(daemon.socket), "--blocks", "72", "--step-tokens", "256", model=wide) as engine:
        for _ in range(3):
            answer = engine.generate(*prompts, max_tokens=64)
            assert answer["tokens"] == right
            engine.ask("reset")
        assert answer["preemptions"] > 0
        assert sum(answer["cached"]) > 0


def test_blocks_that_leave_a_window_are_not_given_to_others_before_they_are_saved(
    plain: Vllm, wide: pathlib.Path, daemon: Daemon
) -> None:
    tokens = prompt(7, 900)
    starts = [tokens[:n_tokens] for n_tokens in range(CHUNK_TOKENS + 10, 900, CHUNK_TOKENS)]
    right = [plain.generate(start)["tokens"] for start in starts]
    whole = plain.generate(tokens)["tokens"]
    # A pool in which blocks that left the window are needed before the prompt is computed.
    flags = ("--socket", str(daemon.socket), "--extra", '{"timeout_s": 100}', "--blocks", "64", *SMALL_STEPS)
    with started(*flags, model=wide) as engine:
        engine.generate(prompt(8, 20))
        # Saves wait for the daemon, and have copied nothing.
        daemon.pause()
        engine.begin("generate", prompts=[tokens], max_tokens=8, salts=[None], transfer_params=None)
        # An engine that does not wait for them has computed the prompt by then.
        select.select([engine.process.stdout], [], [], 10)
        daemon.resume()
        assert engine.read()["tokens"] == whole
        for start, expected in zip(starts, right, strict=True):
            engine.ask("reset")
            eventually_loaded(engine, start, expected)


def test_a_load_that_fails_in_any_group_is_computed(plain: Vllm, wide: pathlib.Path, daemon: Daemon) -> None:
    tokens = prompt(21, 700)
    right = plain.generate(tokens)["tokens"]
    with started("--socket", str(daemon.socket), model=wide) as engine:
        assert engine.generate(tokens)["tokens"] == right
        engine.ask("reset")
        daemon.stop()
        daemon.start()
        eventually_loaded(engine, tokens, right)
        engine.ask("reset")
        daemon.stop()
        spoil(daemon.disk)
        daemon.start()
        for _ in range(2):
            engine.ask("reset")
            assert engine.generate(tokens)["tokens"] == right
        # What was computed anew is stored anew.
        eventually_loaded(engine, tokens, right)
        # A daemon that dies costs hits.
        engine.ask("reset")
        daemon.kill()
        answer = engine.generate(tokens)
        assert (answer["tokens"], answer["cached"]) == (right, [0])
        daemon.start()


def test_what_a_slow_disk_has_of_groups_is_computed_and_then_loaded_from_memory(
    plain: Vllm, wide: pathlib.Path, daemon: Daemon
) -> None:
    first, second = prompt(25, 700), prompt(26, 700)
    right = [plain.generate(tokens)["tokens"] for tokens in (first, second)]
    socket = ("--socket", str(daemon.socket))
    with started(*socket, model=wide) as engine:
        assert [engine.generate(tokens)["tokens"] for tokens in (first, second)] == right
        engine.ask("reset")
    daemon.stop()
    disk = {"name": "disk", "nvme": f"{daemon.disk}:256MiB", "bytes_per_s": "1MB", "waits": True}
    daemon.flags = ["--set", f"tiers.tiers={json.dumps([disk])}"]
    daemon.start()
    with started(*socket, model=wide) as engine:
        # It learns what computing takes, and with a part of what is there how slow the disk is.
        engine.generate(prompt(27, 700))
        answer = engine.generate(first)
        assert (answer["tokens"], answer["cached"]) == (right[0], [CHUNK_TOKENS])
        answer = engine.generate(second)
        assert (answer["tokens"], answer["cached"]) == (right[1], [0])
        assert engine.ask("counts")["computed_slow_tokens"] == 2 * whole_chunks(700) - CHUNK_TOKENS
        engine.ask("reset")
        eventually_loaded(engine, second, right[1])
    # With `load` all of it is loaded.
    daemon.stop()
    daemon.flags = ["--set", f"tiers.tiers={json.dumps([disk | {'bytes_per_s': '50MB'}])}"]
    daemon.start()
    with started(*socket, "--extra", '{"planner": "load"}', model=wide) as engine:
        answer = engine.generate(first)
        assert (answer["tokens"], answer["cached"]) == (right[0], [whole_chunks(700)])


def test_without_the_hybrid_manager_all_layers_are_stored_as_one_group(
    plain: Vllm, wide: pathlib.Path, daemon: Daemon
) -> None:
    tokens = prompt(31, 500)
    right = plain.generate(tokens)["tokens"]
    with started("--socket", str(daemon.socket), "--one-group", *SMALL_STEPS, model=wide) as engine:
        assert engine.ask("groups")["kinds"] == ["FullAttentionSpec"]
        assert engine.generate(tokens)["tokens"] == right
        engine.ask("reset")
        eventually_loaded(engine, tokens, right)


def test_a_model_of_windows_alone_is_stored_and_loaded(folder: pathlib.Path, daemon: Daemon) -> None:
    prompts = [prompt(seed, n_tokens) for seed, n_tokens in ((41, 700), (42, 256))]
    with started("--socket", str(daemon.socket), *SMALL_STEPS, model=model(folder, WINDOW, "wwww")) as engine:
        assert engine.ask("groups")["kinds"] == ["SlidingWindowSpec"]
        expected = [engine.generate(tokens, max_tokens=70)["tokens"] for tokens in prompts]
        for tokens, right in zip(prompts, expected, strict=True):
            engine.ask("reset")
            answer = engine.generate(tokens, max_tokens=70)
            assert (answer["tokens"], answer["cached"]) == (right, [whole_chunks(len(tokens))])
        engine.ask("reset")
        longer = prompts[0] + expected[0][0]
        # The last token of the answer was never computed, and 768 tokens of it were.
        assert engine.generate(longer)["cached"] == [768]


def test_ranks_store_and_load_their_parts_of_all_groups(wide: pathlib.Path, daemon: Daemon) -> None:
    tokens = prompt(51, 600)
    with started("--processes", "--ranks", "2", "--socket", str(daemon.socket), *SMALL_STEPS, model=wide) as engine:
        first = engine.generate(tokens)
        assert first["cached"] == [0]
        engine.ask("reset")
        eventually_loaded(engine, tokens, first["tokens"])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_number_that_layers_read_is_that_of_their_sequence(seed: int, tmp_path: pathlib.Path) -> None:
    # Too little memory for all sequences, so that parts of groups leave it one by one.
    daemon = Daemon(tmp_path, ram="3MiB", has_disk=False)
    try:
        counts = run_driver("hybrid_groups.py", str(daemon.socket), str(MODEL_FOLDER), str(seed))
    finally:
        daemon.kill()
    assert min(counts[name] for name in ("loaded", "failed", "aborted", "overtaken", "saved_blocks")) > 0
    # One group of windows never fills the pool.
    assert counts["preempted"] > 0 or seed == 0


def test_groups_that_cannot_be_stored_are_refused_by_name() -> None:
    answers = run_driver("hybrid_refusals.py")
    assert answers["window"].startswith("2 groups of 1 shapes: groups=2:")
    assert answers["window"] != answers["wider"]
    assert answers["alone"].startswith("1 groups of 1 shapes")
    assert "a group of KV is of MambaSpec; allowed: FullAttentionSpec, SlidingWindowSpec" in answers["mamba"]
    assert "a group of KV is of SinkFullAttentionSpec" in answers["sink"]
    assert "`elastic` is true and the model has windows or several groups of KV" in answers["elastic"]
    assert "`pipeline_parallel_size` is 2" in answers["stages"]
    assert "`decode_context_parallel_size` is 2" in answers["context"]
    refused = ("mamba", "sink", "elastic", "stages", "context")
    assert all("--disable-hybrid-kv-cache-manager" in answers[name] for name in refused)
    # One group of which requests keep all blocks is stored as ever, and without a store any group is as another.
    assert (answers["has_windows"], answers["memory_alone"]) == ([False, True, True], False)
    *others, alone = answers["older"]
    assert others == ["False", "False"] and "the KV is of SlidingWindowSpec" in alone
