"""Whether KV of slow tiers is loaded or computed, decided by measured times."""

import time
from types import SimpleNamespace

import kvik
import pytest
from kvik.planner import Planner, attended_tokens

TOKEN_BYTES = 1000
CHUNK_TOKENS = 256


def found(n_tokens: int, n_memory_tokens: int = 0, tier: str = "nvme") -> SimpleNamespace:
    return SimpleNamespace(
        n_chunks=n_tokens // CHUNK_TOKENS, n_tokens=n_tokens, n_memory_tokens=n_memory_tokens, slowest_tier=tier
    )


def planner_with(token_s: float, load_bytes: int, load_s: float) -> Planner:
    """One whose engine takes `token_s` a token, and that saw one load from a disk."""
    planner = Planner(token_bytes=TOKEN_BYTES, n_steps_ahead=2)
    planner.measured.note_pass(1000, 0, 1000 * token_s)
    load = planner.measured.begin_load("nvme")
    time.sleep(load_s)
    load.end(load_bytes)
    return planner


def step(n_scheduled: dict[str, int], n_computed: dict[str, int], new: tuple[str, ...] = ()) -> SimpleNamespace:
    cached = [name for name in n_scheduled if name not in new]
    return SimpleNamespace(
        num_scheduled_tokens=n_scheduled,
        total_num_scheduled_tokens=sum(n_scheduled.values()),
        scheduled_new_reqs=[SimpleNamespace(req_id=name, num_computed_tokens=n_computed[name]) for name in new],
        scheduled_cached_reqs=SimpleNamespace(req_ids=cached, num_computed_tokens=[n_computed[name] for name in cached]),
    )


def test_what_is_in_memory_is_loaded_however_fast_the_engine_is() -> None:
    planner = planner_with(1e-9, 1_000, 0.02)
    assert planner.tokens_to_load(found(2048, 2048, "ram"), 0) == 2048
    assert planner.tokens_to_load(found(2048, 1024), 0) == 1024
    # The engine has more than memory, and all that there is.
    assert planner.tokens_to_load(found(2048, 1024), 1536) == 1536
    assert planner.tokens_to_load(found(2048, 1024), 2048) == 2048


def test_slow_chunks_are_loaded_where_that_is_faster_than_computing_them() -> None:
    # A megabyte took 20 ms or a little more, so 2 048 tokens take more than 40 ms.
    slow_engine, fast_engine = planner_with(1e-3, 1_000_000, 0.02), planner_with(1e-5, 1_000_000, 0.02)
    assert slow_engine.tokens_to_load(found(2048), 0) == 2048
    assert fast_engine.tokens_to_load(found(2048), 0) == 0


def test_the_first_load_of_a_tier_is_a_part_that_measures_it() -> None:
    planner = Planner(token_bytes=TOKEN_BYTES, n_steps_ahead=1)
    planner.measured.note_pass(1000, 0, 0.01)
    # An eighth of the chunks that are not in memory.
    assert planner.tokens_to_load(found(8192, 4096), 0) == 4096 + 2 * CHUNK_TOKENS
    # One that comes before that has ended is loaded as found.
    assert planner.tokens_to_load(found(8192, 4096), 0) == 8192
    planner.planned("r", found(8192, 4096), 0, 4096 + 2 * CHUNK_TOKENS)
    planner.loads_ended(["r"], is_whole=True)
    assert planner.measured.is_load_faster("nvme", 1, 0, 1000) is not None
    assert planner.take_counts() == {"computed_slow_tokens": 4096 - 2 * CHUNK_TOKENS}
    assert planner.take_counts() == {"computed_slow_tokens": 0}


def test_a_load_that_failed_makes_its_tier_slow_and_one_that_was_given_up_says_nothing() -> None:
    planner = Planner(token_bytes=TOKEN_BYTES, n_steps_ahead=1)
    planner.measured.note_pass(1000, 0, 0.01)
    planner.planned("r", found(2048), 0, 2048)
    planner.forget("r")
    planner.loads_ended(["r", "never began"], is_whole=True)
    assert planner.measured.is_load_faster("nvme", 1, 0, 1000) is None
    planner.planned("r", found(2048), 0, 2048)
    time.sleep(0.01)
    planner.loads_ended(["r"], is_whole=False)
    # 2 048 tokens are computed in 20 ms; a tenth of their bytes came in 10.
    assert planner.measured.is_load_faster("nvme", 2048 * TOKEN_BYTES, 0, 2048) is False
    # Memory is not measured.
    planner.planned("s", found(2048, 2048, "ram"), 0, 2048)
    assert planner.loads == {}


def test_steps_that_were_begun_ahead_are_counted_from_the_end_of_the_one_before() -> None:
    planner = Planner(token_bytes=TOKEN_BYTES, n_steps_ahead=2)
    passes: list[tuple[int, float]] = []
    planner.measured = SimpleNamespace(note_pass=lambda n_tokens, _, seconds: passes.append((n_tokens, seconds)))
    planner.step_began(step({"a": 512}, {"a": 0}, new=("a",)))
    planner.step_began(step({"a": 300}, {"a": 512}))
    time.sleep(0.02)
    planner.step_ended()
    planner.step_ended()
    assert [n_tokens for n_tokens, _ in passes] == [512, 300]
    assert passes[0][1] >= 0.02 > passes[1][1]


def test_steps_that_only_decode_or_whose_end_was_not_told_are_not_counted() -> None:
    planner = Planner(token_bytes=TOKEN_BYTES, n_steps_ahead=1)
    passes: list[int] = []
    planner.measured = SimpleNamespace(note_pass=lambda n_tokens, *_: passes.append(n_tokens))
    planner.step_began(step({"a": 1, "b": 1}, {"a": 9, "b": 9}))
    planner.step_ended()
    planner.step_began(step({"a": 64}, {"a": 0}))
    planner.step_began(step({"a": 128}, {"a": 64}))
    planner.step_ended()
    planner.step_ended()
    assert passes == [128]


def test_tokens_look_at_themselves_and_at_all_before_them() -> None:
    assert attended_tokens(step({"a": 3, "b": 2}, {"a": 0, "b": 10}, new=("a",))) == 1 + 2 + 3 + 11 + 12


def test_times_that_are_none_are_refused() -> None:
    with pytest.raises(kvik.InvalidValueError, match="max_age_s"):
        kvik.LoadPlanner().claim_measurement("nvme", -1)
