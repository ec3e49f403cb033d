"""Loads inside of a step of a real vLLM, layer by layer: the tokens are those of a vLLM that computes, whatever goes wrong.

KVIK_ENGINES and KVIK_PACKAGE as in test_vllm_kvik.py.
"""

import pathlib
import signal

import pytest
from engine_processes import ENGINES, MODEL_FOLDER
from store_daemon import CHUNK_TOKENS, Daemon, whole_chunks
from vllm_process import Vllm, daemon, eventually_loaded, plain, prompt, run_driver, started  # noqa: F401

pytestmark = pytest.mark.skipif(not ENGINES, reason="KVIK_ENGINES is not set")

BLOCK_TOKENS = 32


def n_blocks(n_tokens: int) -> int:
    return whole_chunks(n_tokens) // BLOCK_TOKENS


def test_a_request_alone_is_loaded_in_its_step_and_others_beside_it_before_theirs(plain: Vllm, daemon: Daemon) -> None:
    prompts = [prompt(seed, n_tokens) for seed, n_tokens in enumerate((900, 500, 70, 65, 640))]
    expected = [plain.generate(tokens)["tokens"] for tokens in prompts]
    socket = ("--socket", str(daemon.socket))
    with started(*socket) as first:
        for tokens, right in zip(prompts, expected, strict=True):
            answer = first.generate(tokens)
            assert (answer["tokens"], answer["cached"]) == (right, [0])
        first.ask("reset")
    with started(*socket) as second:
        for tokens, right in zip(prompts, expected, strict=True):
            answer = second.generate(tokens)
            assert (answer["tokens"], answer["cached"]) == (right, [whole_chunks(len(tokens))])
        counts = second.ask("counts")
        in_steps = sum(n_blocks(len(tokens)) for tokens in prompts[:4])
        assert counts["step_loaded_blocks"] == in_steps
        # The last one is stored to its last token, which would be computed into a block that is loaded.
        assert counts["loaded_blocks"] == in_steps + n_blocks(640)
        # Behind blocks of the engine's own cache, from the middle of a chunk on.
        for n_local in (BLOCK_TOKENS, 3 * BLOCK_TOKENS, 5 * CHUNK_TOKENS):
            second.ask("reset")
            second.generate(prompts[0][:n_local] + [7], params={"kvik": {"skip_load": True, "skip_save": True}})
            answer = second.generate(prompts[0])
            assert (answer["tokens"], answer["cached"]) == (expected[0], [whole_chunks(900)])
        more = second.ask("counts")["step_loaded_blocks"] - in_steps
        assert more == 3 * n_blocks(900) - 1 - 3 - 10
        second.ask("reset")
        together = second.generate(*prompts[:3])
        assert together["tokens"] == [right[0] for right in expected[:3]]
        assert together["cached"] == [whole_chunks(len(tokens)) for tokens in prompts[:3]]
        after = second.ask("counts")
        assert after["step_loaded_blocks"] == in_steps + more
        assert after["loaded_blocks"] > counts["loaded_blocks"] + more
        assert after.get("failed_blocks", 0) == 0


def test_with_always_requests_beside_each_other_are_loaded_in_steps_also_when_preempted(plain: Vllm, daemon: Daemon) -> None:
    prompts = [prompt(30 + seed % 7, 100 + 37 * (seed % 7)) + prompt(99 + seed, 30) for seed in range(32)]
    right = [plain.generate(tokens, max_tokens=64)["tokens"][0] for tokens in prompts]
    flags = ("--socket", str(daemon.socket), "--extra", '{"layerwise": "always"}', "--blocks", "72", "--step-tokens", "256")
    with started(*flags) as engine:
        for _ in range(3):
            answer = engine.generate(*prompts, max_tokens=64)
            assert answer["tokens"] == right
            engine.ask("reset")
        counts = engine.ask("counts")
        assert answer["preemptions"] > 0
        assert counts["step_loaded_blocks"] > 0
        assert counts.get("failed_blocks", 0) == 0


def test_with_never_all_loads_end_before_their_step(plain: Vllm, daemon: Daemon) -> None:
    tokens = prompt(3, 500)
    right = plain.generate(tokens)["tokens"]
    with started("--socket", str(daemon.socket), "--extra", '{"layerwise": "never"}') as engine:
        engine.generate(tokens)
        engine.ask("reset")
        eventually_loaded(engine, tokens, right)
        counts = engine.ask("counts")
        assert (counts["step_loaded_blocks"], counts["loaded_blocks"] > 0) == (0, True)


def test_ranks_load_in_their_step(daemon: Daemon) -> None:
    tokens = prompt(51, 900)
    ranks = ("--processes", "--ranks", "2", "--socket", str(daemon.socket))
    with started(*ranks) as engine:
        right = engine.generate(tokens)["tokens"]
        engine.ask("reset")
        eventually_loaded(engine, tokens, right)
        assert engine.ask("counts")["step_loaded_blocks"] == 2 * n_blocks(900)


# Before the load, before the first layer, and in the middle; killed, or silent for longer than it may take.
FAULTS = [
    {"at": -1, "signal": signal.SIGKILL},
    {"at": -1, "signal": signal.SIGSTOP},
    {"at": 0, "signal": signal.SIGKILL},
    {"at": 2, "signal": signal.SIGKILL},
    {"n_stored": 0},
    {"n_stored": 5 * CHUNK_TOKENS},
    {"skips": 1},
]


def test_a_load_that_fails_in_its_step_is_computed_and_served_to_no_other_request(plain: Vllm, daemon: Daemon) -> None:
    tokens = prompt(61, 900)
    longer = tokens[:800] + prompt(62, 60)
    right, right_longer = plain.generate(tokens)["tokens"][0], plain.generate(longer)["tokens"][0]
    # What is computed again takes several steps, and another request with the same prefix begins in the first of them.
    flags = ("--socket", str(daemon.socket), "--extra", '{"timeout_s": 2}', "--step-tokens", "256")
    with started(*flags, driver="vllm_faults.py") as engine:
        for fault in FAULTS:
            engine.ask("reset")
            eventually_loaded(engine, tokens, [right])
            engine.ask("reset")
            fault = {**fault, "pid": daemon.process.pid}
            answer = engine.ask("step_load", prompts=[tokens, longer, tokens], max_tokens=8, fault=fault)
            assert answer["has_begun"], fault
            assert answer["tokens"] == [right, right_longer, right], fault
            failed = answer["counts"].get("failed_blocks", 0)
            # A daemon that dies behind the lease does not take the bytes with it.
            assert failed > 0 or fault.get("at", -1) >= 0, fault
            if "n_stored" in fault:
                assert failed == n_blocks(900) - n_blocks(fault["n_stored"])
            if fault.get("signal") == signal.SIGKILL:
                daemon.kill()
                daemon.start()
            daemon.resume()
        # Nothing wrong was stored: another engine loads it all.
        engine.ask("reset")
        eventually_loaded(engine, tokens, [right])
    with started("--socket", str(daemon.socket)) as other:
        eventually_loaded(other, tokens, [right])
        other.ask("reset")
        eventually_loaded(other, longer, [right_longer])


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_request_that_ends_behind_a_load_that_failed_leaves_nothing_wrong(
    plain: Vllm, daemon: Daemon, policy: str
) -> None:
    tokens = prompt(71, 900)
    right = plain.generate(tokens)["tokens"][0]
    flags = ("--socket", str(daemon.socket), "--policy", policy)
    with started(*flags, driver="vllm_faults.py") as engine:
        eventually_loaded(engine, tokens, [right])
        for is_aborted in (True, False):
            engine.ask("reset")
            fault = {"at": 1, "is_aborted": is_aborted, "n_stored": 4 * CHUNK_TOKENS}
            answer = engine.ask("step_load", prompts=[tokens, tokens], max_tokens=8, fault=fault)
            assert answer["has_begun"]
            first, second = answer["tokens"]
            if is_aborted:
                assert not first or answer["reasons"][0] == "abort"
            elif policy == "fail":
                assert (first, answer["reasons"][0]) == ([], "error")
            else:
                assert first == right
            assert second == right, answer
        # Nothing wrong was stored.
        engine.ask("reset")
        eventually_loaded(engine, tokens, [right])
    with started("--socket", str(daemon.socket)) as other:
        eventually_loaded(other, tokens, [right])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_every_number_that_a_layer_reads_is_right_or_reported(seed: int, tmp_path: pathlib.Path) -> None:
    daemon = Daemon(tmp_path, ram="64MiB", has_disk=False)
    try:
        counts = run_driver("layers_played.py", str(daemon.socket), str(MODEL_FOLDER), str(seed))
    finally:
        daemon.kill()
    # With `auto`, a request is seldom alone.
    names = ("preempted", "aborted", "loads") + (("step_loads", "late", "thrown_away", "aborted_in_step") if seed % 3 else ())
    assert min(counts.get(name, 0) for name in names) > 0, counts


def test_engines_that_would_trust_a_load_too_early_are_known_and_settings_are_checked() -> None:
    answers = run_driver("layers_refusals.py")
    assert answers.pop("plain") is None
    assert answers.pop("wrong") == "`layerwise` is sometimes; allowed: auto, always, never"
    assert answers.pop("right") == ["taken"] * 3
    assert answers.pop("always") == f"`layerwise` is always; allowed: auto, never ({answers['ahead']})"
    assert all(isinstance(reason, str) for reason in answers.values()), answers
    assert len(set(answers.values())) == len(answers)
