"""The balloon over blocks of an engine that is played: what it holds is used by nothing, and nothing is lost."""

import random
from dataclasses import dataclass

import pytest
from kvik.elastic.balloon import Balloon, State
from kvik.elastic.slabs import PageTable, Piece, Slabs
from kvik.elastic.sizes import size_of

import kvik


@dataclass(eq=False)
class Block:
    number: int
    ref_cnt: int = 0
    block_hash: object | None = None


class Pool:
    """Blocks as vLLM has them: a queue of free ones, some of them in the prefix cache."""

    def __init__(self, n_blocks: int) -> None:
        self.blocks = [Block(number) for number in range(n_blocks)]
        self.free = self.blocks[1:]
        self.blocks[0].ref_cnt = 1

    def get_num_free_blocks(self) -> int:
        return len(self.free)

    def take(self, n_blocks: int, name: object | None = None) -> list[Block]:
        taken, self.free = self.free[:n_blocks], self.free[n_blocks:]
        for block in taken:
            assert block.ref_cnt == 0
            block.ref_cnt, block.block_hash = 1, name
        return taken

    def touch(self, blocks) -> None:
        for block in blocks:
            if block.ref_cnt == 0:
                self.free.remove(block)
            block.ref_cnt += 1

    def evict_blocks(self, block_ids: set[int]) -> None:
        for number in block_ids:
            self.blocks[number].block_hash = None

    def free_blocks(self, ordered_blocks) -> None:
        for block in ordered_blocks:
            assert block.ref_cnt > 0
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self.free.append(block)


def made(n_blocks: int = 40, slab_blocks: int = 8) -> tuple[Balloon, Pool]:
    pool = Pool(n_blocks)
    return Balloon(pool, Slabs(n_blocks, slab_blocks)), pool


def grown(balloon: Balloon, n_slabs: int) -> list[int]:
    coming = balloon.grow(n_slabs)
    balloon.arrived(coming)
    return coming


def test_at_the_start_only_blocks_of_the_first_slab_can_be_used_and_never_block_0():
    balloon, pool = made()
    assert [block.number for block in pool.free] == list(range(1, 8))
    assert (balloon.n_held_blocks, balloon.count(State.OUT)) == (32, 4)


def test_blocks_are_usable_when_memory_has_arrived_and_not_before():
    balloon, pool = made()
    coming = balloon.grow(2)
    assert (coming, pool.get_num_free_blocks()) == ([1, 2], 7)
    balloon.refused([2])
    balloon.arrived([1])
    assert pool.get_num_free_blocks() == 15
    assert [balloon.states[slab] for slab in (1, 2)] == [State.IN, State.OUT]
    assert balloon.grow(9) == [2, 3, 4]


def test_the_last_slab_may_be_shorter():
    balloon, pool = made(n_blocks=37)
    assert len(balloon.slabs) == 5
    grown(balloon, 4)
    assert (pool.get_num_free_blocks(), balloon.n_held_blocks) == (36, 0)
    assert sorted(balloon.shrink(9)) == [1, 2, 3, 4]


def test_slabs_without_cached_blocks_go_first_and_a_used_one_not_at_all():
    balloon, pool = made()
    grown(balloon, 4)
    taken = pool.take(39, "cached")
    used = next(block for block in taken if block.number == 20)
    pool.free_blocks(block for block in taken if block is not used)
    for block in (*pool.blocks[32:40], *pool.blocks[9:16]):
        block.block_hash = None
    assert balloon.shrink(1) == [4]
    assert balloon.shrink(1) == [1]
    assert balloon.shrink(9) == [3]
    assert balloon.states[2] is State.IN
    assert all(pool.blocks[number].block_hash is None for number in range(24, 40)), "not in the cache any more"


def test_a_slab_in_use_leaves_as_its_blocks_become_free():
    balloon, pool = made()
    grown(balloon, 1)
    taken = pool.take(15)
    pool.free_blocks(taken[:9])
    assert balloon.shrink(1, drains=True) == []
    assert balloon.settle() == []
    assert balloon.states[1] is State.LEAVING
    # Its free blocks are held: only blocks of the first slab are left.
    assert all(block.number < 8 for block in pool.free)
    pool.free_blocks(block for block in taken[9:] if block.number != 15)
    assert balloon.settle() == []
    pool.free_blocks([pool.blocks[15]])
    assert balloon.settle() == [1]
    assert balloon.states[1] is State.OUT


def test_a_slab_that_leaves_stays_if_it_is_needed_again():
    balloon, pool = made()
    grown(balloon, 2)
    taken = pool.take(23)
    pool.free_blocks(block for block in taken if block.number % 8)
    balloon.shrink(2, drains=True)
    balloon.settle()
    assert pool.get_num_free_blocks() == 7
    assert balloon.grow(1) == []
    assert pool.get_num_free_blocks() == 14
    balloon.stay_all()
    assert (pool.get_num_free_blocks(), balloon.n_held_blocks) == (21, 16)


def test_slabs_that_went_last_come_first():
    balloon, _ = made()
    grown(balloon, 4)
    assert balloon.shrink(2) == [4, 3]
    assert balloon.grow(1) == [3]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_no_block_is_lost_or_used_twice(seed):
    chance = random.Random(seed)
    balloon, pool = made(n_blocks=chance.randint(9, 60), slab_blocks=chance.randint(1, 9))
    requests: list[list[Block]] = []
    coming: set[int] = set()
    for _ in range(400):
        match chance.randrange(7):
            case 0:
                coming.update(balloon.grow(chance.randint(1, 3)))
            case 1 if coming:
                some = set(chance.sample(sorted(coming), chance.randint(1, len(coming))))
                (balloon.arrived if chance.random() < 0.7 else balloon.refused)(sorted(some))
                coming -= some
            case 2:
                balloon.shrink(chance.randint(1, 4), drains=chance.random() < 0.5)
            case 3:
                balloon.settle()
            case 4 if chance.random() < 0.2:
                balloon.stay_all()
            case 5 if pool.free:
                requests.append(pool.take(chance.randint(1, len(pool.free)), chance.choice([None, "cached"])))
            case 6 if requests:
                pool.free_blocks(requests.pop(chance.randrange(len(requests))))
        n_used = sum(map(len, requests))
        assert pool.get_num_free_blocks() + n_used + balloon.n_held_blocks == len(pool.blocks) - 1
        for slab, state in enumerate(balloon.states):
            blocks = [pool.blocks[number] for number in balloon.slabs.blocks(slab)]
            if state in (State.OUT, State.COMING):
                assert all(block.ref_cnt == 1 and block.block_hash is None for block in blocks)
                assert not any(block in request for request in requests for block in blocks)


def test_a_slab_lies_on_a_page_of_every_layer():
    # Four blocks a page, three layers that begin with a page.
    slabs = Slabs.of_pages(n_blocks=16, block_bytes=25, page_bytes=100)
    table = PageTable(slabs, [Piece(layer * 400, 25, 25) for layer in range(3)], 100)
    assert [table.pages_of(slab) for slab in range(4)] == [(0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11)]
    assert table.missing([0, 2]) == [0, 2, 4, 6, 8, 10]
    table.add([0, 2])
    assert (table.missing([0]), table.remove([2])) == ([], [2, 6, 10])
    assert table.slab_bytes() == 300


def test_a_page_stays_while_one_of_its_slabs_does():
    # Blocks of 30 bytes on pages of 100, in layers of 300: slabs of three blocks share pages.
    slabs = Slabs.of_pages(n_blocks=10, block_bytes=30, page_bytes=100)
    table = PageTable(slabs, [Piece(layer * 300, 30, 30) for layer in range(2)], 100)
    assert [table.pages_of(slab) for slab in range(4)] == [(0, 3), (0, 1, 3, 4), (1, 2, 4, 5), (2, 5)]
    table.add([0, 1, 2])
    assert table.remove([1]) == []
    assert table.remove([0]) == [0, 3]
    assert table.remove([2]) == [1, 2, 4, 5]


def test_blocks_may_lie_block_by_block_and_be_larger_than_a_page():
    # All layers of a block side by side: 8 layers of 20 bytes.
    slabs = Slabs.of_pages(n_blocks=8, block_bytes=20, page_bytes=40)
    table = PageTable(slabs, [Piece(layer * 20, 20, 160) for layer in range(8)], 40)
    assert [table.pages_of(slab) for slab in range(2)] == [tuple(range(8)), tuple(range(8, 16))]
    large = Slabs.of_pages(n_blocks=3, block_bytes=250, page_bytes=100)
    table = PageTable(large, [Piece(0, 250, 250)], 100)
    assert [table.pages_of(slab) for slab in range(3)] == [(0, 1, 2), (2, 3, 4), (5, 6, 7)]


def test_sizes_are_read_as_people_write_them():
    assert [size_of("x", value) for value in (7, "7", "2MiB", "3 gb", "1K", "5b")] == [7, 7, 2 << 20, 3 << 30, 1 << 10, 5]
    for wrong in (-1, True, 1.5, "", "GiB", "1.5G", "-2M", None, "2PiB"):
        with pytest.raises(kvik.InvalidValueError, match="`x` is .*20GiB"):
            size_of("x", wrong)
