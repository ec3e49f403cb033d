"""The balloon over free pages in a tensor, against a model of sets."""

import random

import pytest
from kvik.elastic.balloon import State
from kvik.elastic.slabs import Slabs

torch = pytest.importorskip("torch")

from kvik.sglang.elastic_balloon import PageBalloon  # noqa: E402


class Allocator:
    """Free pages as SGLang has them, some of which wait to be sorted."""

    def __init__(self, n_pages: int) -> None:
        self.n_pages = n_pages
        self.clear()

    def clear(self) -> None:
        self.free_pages = torch.arange(1, self.n_pages)
        self.staged: list[int] = []

    def merge_and_sort_free(self) -> None:
        self.free_pages = torch.sort(torch.cat((self.free_pages, torch.tensor(self.staged, dtype=torch.int64))))[0]
        self.staged = []

    def alloc(self, n_pages: int) -> list[int]:
        taken, self.free_pages = self.free_pages[:n_pages].tolist(), self.free_pages[n_pages:]
        return taken

    def all_free(self) -> set[int]:
        free = [*self.free_pages.tolist(), *self.staged]
        assert len(set(free)) == len(free), "a page is free twice"
        return set(free)


@pytest.mark.parametrize("seed", range(20))
def test_every_page_is_free_in_use_or_held_and_only_slabs_with_memory_are_used(seed):
    chance = random.Random(seed)
    slabs = Slabs(chance.randrange(20, 60), chance.randrange(1, 9))
    allocator = Allocator(slabs.n_blocks)
    balloon = PageBalloon(allocator, slabs)
    memory, used = {0}, set()
    for _ in range(200):
        match chance.randrange(7):
            case 0:
                absent = balloon.absent(chance.randrange(4))
                assert memory.isdisjoint(absent)
                memory.update(absent)
                balloon.arrived(absent)
            case 1:
                used.update(allocator.alloc(chance.randrange(6)))
            case 2:
                freed = chance.sample(sorted(used), min(len(used), chance.randrange(8)))
                used.difference_update(freed)
                allocator.staged += freed
            case 3:
                out = balloon.shrink(chance.randrange(4))
                memory.difference_update(out)
            case 4:
                balloon.drain(chance.randrange(3))
                memory.difference_update(balloon.settle())
            case 5:
                memory.difference_update(balloon.settle())
            case 6:
                if chance.random() < 0.2:
                    balloon.stay_all()
        free = allocator.all_free()
        assert free.isdisjoint(used)
        assert {page // slabs.slab_blocks for page in free | used} <= memory, "a page without memory can be used"
        assert len(free) + len(used) + balloon.n_held_pages == slabs.n_blocks - 1
        assert {slab for slab, state in enumerate(balloon.states) if state is not State.OUT} == memory


def test_a_flushed_cache_leaves_pages_without_memory_held():
    allocator = Allocator(40)
    balloon = PageBalloon(allocator, Slabs(40, 8))
    balloon.arrived(balloon.absent(2))
    allocator.alloc(20)
    balloon.drain(1)
    allocator.clear()
    balloon.hide()
    assert allocator.all_free() == set(range(1, 24))


def test_slabs_that_went_last_come_back_first():
    balloon = PageBalloon(Allocator(40), Slabs(40, 8))
    balloon.arrived(balloon.absent(4))
    assert balloon.shrink(2) == [4, 3]
    assert balloon.absent(1) == [3]
    assert balloon.absent(5) == [3, 4]
