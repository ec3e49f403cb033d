"""What is found of a sequence in several groups, and what of it is in memory, against trying every prefix."""

import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from kvik.group_lookup import GroupsFound, GroupsLookup
from kvik.planner import GroupsPlanner, slowest
from kvik.windows import Window
from test_windows import some_windows

N_CASES = 400


class PlayedStore:
    """The tier of each chunk of a group, by its number; one that is not there is in no tier."""

    def __init__(self, tiers: dict[int, str], chunk_tokens: int) -> None:
        self.tiers = tiers
        self.chunk_tokens = chunk_tokens

    def start_lookup(self, chunks: Sequence[int]) -> SimpleNamespace:
        n_found = next((place for place, chunk in enumerate(chunks) if chunk not in self.tiers), len(chunks))
        tiers = [self.tiers[chunk] for chunk in chunks[:n_found]]
        n_in_memory = next((place for place, tier in enumerate(tiers) if tier != "ram"), n_found)
        found = SimpleNamespace(
            n_chunks=n_found,
            n_tokens=n_found * self.chunk_tokens,
            n_memory_tokens=n_in_memory * self.chunk_tokens,
            slowest_tier=slowest(tiers),
        )
        return SimpleNamespace(result=found.n_tokens, found=found, wait=lambda timeout_s: True)


class PlayedStores:
    def __init__(self, stores: list[PlayedStore]) -> None:
        self.stores = stores

    def part(self, group: int, keys: Sequence[int], chunk_tokens: int) -> Sequence[int]:
        return keys


def longest(windows: list[Window], tables: list[dict[int, str]], chunk_tokens: int, n_tokens: int, n_most: int) -> int:
    """The longest prefix that all groups can go on behind, by trying all."""
    for n_chunks in range(n_most, 0, -1):
        is_whole = n_chunks * chunk_tokens == n_tokens
        if is_whole and any(window.first_block(n_tokens - 1) < window.first_block(n_tokens) for window in windows):
            continue
        needed = [window.needed_chunks(n_chunks, chunk_tokens) for window in windows]
        if all(chunk in table for table, chunks in zip(tables, needed, strict=True) for chunk in chunks):
            return n_chunks
    return 0


def test_what_is_found_and_what_of_it_is_in_memory_are_the_longest_prefixes_of_all():
    seen = {"memory": 0, "part": 0, "none": 0}
    for seed in range(N_CASES):
        rng = random.Random(seed)
        windows, chunk_tokens = some_windows(rng)
        n_chunks = rng.randrange(1, 12)
        n_tokens = n_chunks * chunk_tokens + rng.choice([0, 0, 1, chunk_tokens - 1])
        share, slow_share = rng.choice([0.5, 0.9, 1.0]), rng.choice([0.0, 0.1, 0.5])
        tables = [
            {
                chunk: "nvme" if rng.random() < slow_share else "ram"
                for chunk in range(n_chunks)
                if rng.random() < share
            }
            for _ in windows
        ]
        n_most_tokens = rng.choice([None, rng.randrange(n_tokens + 1)])
        n_most = n_chunks if n_most_tokens is None else min(n_chunks, n_most_tokens // chunk_tokens)
        stores = PlayedStores([PlayedStore(table, chunk_tokens) for table in tables])
        lookup = GroupsLookup(
            stores, range(n_chunks), windows, chunk_tokens, n_tokens, asks_for_memory=True, n_most_tokens=n_most_tokens
        )
        assert lookup.wait(1)
        found = lookup.found
        right = longest(windows, tables, chunk_tokens, n_tokens, n_most)
        assert (found.n_chunks, lookup.result) == (right, right * chunk_tokens)
        in_memory = [{chunk: tier for chunk, tier in table.items() if tier == "ram"} for table in tables]
        right_in_memory = longest(windows, in_memory, chunk_tokens, n_tokens, right)
        assert found.n_memory_tokens == right_in_memory * chunk_tokens
        assert found.slowest_tier == ("ram" if right_in_memory == right else "nvme")
        seen["none" if right == 0 else "memory" if right_in_memory == right else "part"] += 1
    assert min(seen.values()) > N_CASES // 20


def test_without_a_planner_it_does_not_ask_what_is_in_memory():
    stores = PlayedStores([PlayedStore(dict.fromkeys(range(4), "nvme"), 64)])
    lookup = GroupsLookup(stores, range(4), [Window(16)], 64, 300)
    assert lookup.wait(1)
    assert (lookup.result, lookup.found, lookup.memory_search) == (256, None, None)


def test_the_bytes_of_a_load_are_those_that_are_read_behind_it():
    groups = [(Window(16), 10), (Window(16, reach_tokens=100), 3), (Window(16, section_tokens=96), 1)]
    planner = GroupsPlanner(groups=groups, n_steps_ahead=1)
    # The last window begins in the block of token 924, and the last section at 960.
    assert planner.bytes_of(0, 1024) == 1024 * 10 + (1024 - 912) * 3 + (1024 - 960) * 1
    assert planner.bytes_of(960, 1024) == 64 * 14
    assert planner.bytes_of(1000, 1000) == 0


@pytest.mark.parametrize(("token_s", "n_loaded_tokens"), [(1e-2, 1024), (1e-9, 512)])
def test_a_slow_tier_is_loaded_where_that_is_faster_than_computing(token_s, n_loaded_tokens):
    planner = GroupsPlanner(groups=[(Window(16), 10), (Window(16, reach_tokens=100), 3)], n_steps_ahead=1)
    planner.measured.note_pass(1000, 0, 1000 * token_s)
    # A microsecond or more for two bytes.
    planner.measured.begin_load("nvme").end(2)
    found = GroupsFound(n_chunks=16, n_tokens=1024, n_memory_tokens=512, slowest_tier="nvme")
    assert planner.tokens_to_load(found, 0) == n_loaded_tokens


@pytest.mark.parametrize(
    ("tiers", "expected"), [(["ram", "nvme"], "nvme"), (["redis", "nvme"], "redis"), (["new", "plugin"], "new"), ([], "ram")]
)
def test_the_slowest_tier_is_the_last_in_the_daemons_order(tiers, expected):
    assert slowest(tiers) == expected
