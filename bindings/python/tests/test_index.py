"""The index, with messages as vLLM and SGLang publish them."""

import struct
import threading

import kvik
import pytest

BLOCK_TOKENS = 4


def packed(value) -> bytes:
    """The part of msgpack that engines send."""
    match value:
        case None:
            return b"\xc0"
        case bool():
            return b"\xc3" if value else b"\xc2"
        case int():
            return b"\xcf" + struct.pack(">Q", value) if value >= 0 else b"\xd3" + struct.pack(">q", value)
        case float():
            return b"\xcb" + struct.pack(">d", value)
        case str():
            return b"\xda" + struct.pack(">H", len(value.encode())) + value.encode()
        case bytes():
            return b"\xc5" + struct.pack(">H", len(value)) + value
        case list():
            return b"\xdd" + struct.pack(">I", len(value)) + b"".join(map(packed, value))
        case dict():
            pairs = b"".join(packed(key) + packed(item) for key, item in value.items())
            return b"\xdf" + struct.pack(">I", len(value)) + pairs
    raise TypeError(value)


def message(*events, rank=None) -> bytes:
    return packed([1.0, list(events), rank])


def stored(hashes, tokens, parent=None, block_tokens=BLOCK_TOKENS, **more) -> dict:
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": block_tokens,
        **more,
    }


def removed(hashes, **more) -> dict:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), **more}


CLEARED = {"type": "AllBlocksCleared"}


@pytest.fixture
def index():
    return kvik.Index(block_tokens=BLOCK_TOKENS)


def found(index: kvik.Index, tokens) -> dict[str, int]:
    return {match.worker: match.n_tokens for match in index.find(list(tokens))}


def test_the_longest_prefix_of_each_worker_is_found_whatever_its_hashes_are(index):
    assert index.apply("a", message(stored([b"x" * 32, b"y" * 32], range(8)))) == "applied"
    assert index.apply("b", message(["BlockStored", [-7], None, [0, 1, 2, 3], 4, None])) == "applied"
    assert found(index, range(12)) == {"a": 8, "b": 4}
    assert [match.worker for match in index.find(list(range(12)))] == ["a", "b"]
    assert found(index, [9, *range(12)]) == {}
    assert found(index, range(3)) == {}
    assert index.n_blocks == 2


def test_blocks_of_another_size_are_counted_as_blocks_of_the_index():
    index = kvik.Index(block_tokens=16)
    index.apply("small", message(stored(range(100, 110), range(40), block_tokens=4)))
    index.apply("large", message(stored([1], range(64), block_tokens=64)))
    assert found(index, range(64)) == {"small": 32, "large": 64}


def test_removed_and_cleared_blocks_are_gone(index):
    index.apply("a", message(stored([1, 2, 3], range(12))))
    index.apply("a", message(removed([2])))
    assert found(index, range(12)) == {"a": 4}
    index.apply("a", message(stored([2], range(4, 8), parent=1)))
    assert found(index, range(12)) == {"a": 12}
    index.apply("a", message(CLEARED))
    assert found(index, range(12)) == {}


def test_a_block_on_two_tiers_counts_once_and_stays_with_the_slower(index):
    index.apply("a", message(stored([1, 2], range(8)), stored([1], [], medium="CPU")))
    match = index.find(list(range(8)))[0]
    assert (match.n_tokens, match.n_device_tokens) == (8, 8)
    index.apply("a", message(removed([1], medium="GPU")))
    match = index.find(list(range(8)))[0]
    assert (match.n_tokens, match.n_device_tokens) == (8, 4)


def test_what_is_more_than_tokens_is_never_found_by_tokens(index):
    index.apply("adapter", message(stored([1], range(4), lora_name="l"), stored([2], range(4, 8), parent=1)))
    index.apply("salted", message(stored([1, 2], range(8), extra_keys=[["salt"], None])))
    index.apply("salted", message(stored([3], range(8, 12), parent=2)))
    assert found(index, range(12)) == {}
    assert found(index, range(4, 8)) == {}


def test_ranks_and_workers_are_apart_and_a_removed_one_is_gone(index):
    index.apply("a", message(stored([1], range(4)), rank=1))
    index.apply("a", message(stored([1, 2], range(8))), rank=0)
    assert [(match.worker, match.rank, match.n_tokens) for match in index.find(list(range(8)))] == [
        ("a", 0, 8),
        ("a", 1, 4),
    ]
    assert index.remove("a") is True
    assert index.remove("a") is False
    assert [match.rank for match in index.find(list(range(8)))] == [1]


def test_a_gap_is_told_and_closed_by_a_replay(index):
    messages = [
        message(stored([number + 1], range(4 * number, 4 * number + 4), parent=number or None)) for number in range(4)
    ]
    assert index.apply("a", messages[0], sequence=0) == "applied"
    assert index.apply("a", messages[3], sequence=3) == "gap"
    assert index.due("a") == 1
    assert index.find(list(range(16)))[0].is_unsure
    for number in range(4):
        verdict = index.apply("a", messages[number], sequence=number, is_replay=True)
        assert verdict == ("duplicate" if number == 0 else "applied")
    assert found(index, range(16)) == {"a": 16}
    assert not index.find(list(range(16)))[0].is_unsure
    index.apply("a", message(removed([2])), sequence=4)
    assert found(index, range(16)) == {"a": 4}


def test_a_gap_that_is_skipped_leaves_the_worker_unsure(index):
    assert index.apply("a", message(stored([1], range(4))), sequence=5) == "gap"
    assert index.skip_gap("a", 5)
    assert index.apply("a", message(stored([1], range(4))), sequence=5) == "applied"
    match = index.find(list(range(4)))[0]
    assert (match.n_tokens, match.is_unsure) == (4, True)


def test_numbers_that_fall_back_are_a_restart_with_nothing_of_before(index):
    index.apply("a", message(stored([1, 2], range(8))), sequence=0)
    index.apply("a", message(stored([3], range(8, 12), parent=2)), sequence=1)
    assert index.apply("a", message(stored([9], range(4))), sequence=0) == "restarted"
    assert found(index, range(12)) == {"a": 4}
    # What hangs on a block of before the restart has no tokens before it.
    index.apply("a", message(stored([5], range(4, 8), parent=2)), sequence=1)
    assert found(index, range(12)) == {"a": 4}
    # A restart whose first messages are lost: nothing is known of it.
    assert index.apply("b", message(stored([1], range(4))), sequence=0) == "applied"
    for number in range(1, 4):
        index.apply("b", message(), sequence=number)
    assert index.apply("b", message(stored([2], range(4, 8), parent=1)), sequence=2) == "gap"
    assert "b" not in found(index, range(8))


def test_of_several_cache_groups_only_the_first_is_counted(index):
    full, window = {"group_idx": 1}, {"group_idx": 0, "kv_cache_spec_kind": "sliding_window"}
    index.apply("a", message(stored([11, 12], range(8), **window), stored([1], range(4), **full)))
    assert found(index, range(8)) == {"a": 4}
    index.apply("a", message(removed([11], group_idx=0)))
    assert found(index, range(8)) == {"a": 4}
    index.apply("a", message(removed([1], group_idx=1)))
    assert found(index, range(8)) == {}


@pytest.mark.parametrize("payload", [b"", b"\xc0", message(stored([1], range(4)))[:-1], packed([1.0, [{"a": 1}]])])
def test_a_message_that_cannot_be_read_changes_nothing(index, payload):
    with pytest.raises(kvik.InvalidValueError, match="KV event message, byte"):
        index.apply("a", payload)
    assert index.due("a") == 0
    assert index.find(list(range(4))) == []


def test_wrong_settings_are_refused_with_the_field():
    with pytest.raises(kvik.InvalidValueError, match="`max_bytes` is 1"):
        kvik.Index(max_bytes=1)
    with pytest.raises(kvik.InvalidValueError):
        kvik.Index(block_tokens=0)
    with pytest.raises(kvik.InvalidValueError, match="name of 0 bytes"):
        kvik.Index().apply("", message())


def test_lookups_go_on_while_messages_come(index):
    is_done = threading.Event()
    seen = []

    def look() -> None:
        while not is_done.is_set():
            seen.append(found(index, range(400)).get("a", 0))

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(100):
        index.apply("a", message(stored([number + 1], range(4 * number, 4 * number + 4), parent=number or None)))
    is_done.set()
    thread.join(10)
    assert seen == sorted(seen)
    assert found(index, range(400)) == {"a": 400}
