"""Memory of slabs that is mapped beside an engine's steps: what is ordered last holds, and nothing that was begun loses its memory."""

import contextlib
import random
import threading
from types import SimpleNamespace

import kvik
import kvik.elastic.mapper as mapper_module
import pytest
from kvik.elastic.mapper import Mapper
from kvik.elastic.slabs import PageTable, Piece, Slabs

from polling import eventually

PAGE = 2 << 20
N_SLABS = 8


class Mark:
    """A point in a stream; what was begun before it has run when the test says so."""

    def __init__(self) -> None:
        self.has_run = False

    def query(self) -> bool:
        return self.has_run


class Played:
    """Memory for so many slabs as `n_free` says, which checks that it is used as it may be."""

    slab_bytes = PAGE

    def __init__(self, n_free: int = N_SLABS) -> None:
        self.n_free = n_free
        self.taken: set[int] = {0}
        self.marks: list[Mark] = []
        self.has_device = False
        self.calls: list[object] = []
        self.failure: Exception | None = None

    @property
    def taken_bytes(self) -> int:
        return len(self.taken) * PAGE

    def try_take(self, slabs, timeout_s: float = 0.0) -> bool:
        self.calls.append(("take", tuple(slabs), timeout_s > 0))
        if self.failure is not None:
            raise self.failure
        assert self.taken.isdisjoint(slabs), "taken twice"
        if len(slabs) > self.n_free:
            return False
        self.n_free -= len(slabs)
        self.taken.update(slabs)
        return True

    def release(self, slabs) -> None:
        assert self.taken.issuperset(slabs), "given back twice"
        self.calls.append(("release", tuple(slabs)))
        self.n_free += len(slabs)
        self.taken.difference_update(slabs)

    def n_claimable(self) -> int:
        return self.n_free

    def mark(self) -> Mark | None:
        if not self.has_device:
            return None
        self.marks.append(Mark())
        return self.marks[-1]

    def beside(self):
        return contextlib.nullcontext()

    def note_stream(self) -> None:
        pass

    def interrupt(self) -> None:
        pass

    def note_starved(self) -> None:
        self.calls.append("starved")

    def stop_waiting(self) -> None:
        self.calls.append("stop")

    def note_failure(self, error: Exception) -> None:
        self.calls.append(error)


def worked(mapper: Mapper) -> None:
    """Does what the thread would do until there is nothing left."""
    while mapper.is_due():
        mapper.work()


def test_what_is_needed_is_taken_at_once_and_the_rest_a_few_slabs_at_a_time():
    memory = Played()
    mapper = Mapper(memory, ahead_slabs=2)
    mapper.obey(1, [], [5, 2, 3, 4, 6], needed=[5, 2])
    mapper.work()
    assert (memory.calls, mapper.present) == ([("take", (5, 2), False)], {0, 5, 2})
    mapper.work()
    assert memory.calls[1:] == [("take", (3, 4), False)]
    assert set(mapper.wanted) == {6}
    worked(mapper)
    assert (mapper.present, mapper.taken_bytes) == ({0, 2, 3, 4, 5, 6}, 6 * PAGE)


def test_what_is_needed_goes_before_what_was_asked_for_earlier():
    memory = Played()
    mapper = Mapper(memory, ahead_slabs=1)
    mapper.obey(1, [], [1, 2, 3])
    mapper.work()
    mapper.obey(2, [], [4], needed=[3, 4])
    mapper.work()
    assert mapper.present == {0, 1, 3, 4}


def test_the_thread_is_woken_by_orders_that_change_something_and_by_no_others(monkeypatch):
    mapper = Mapper(Played())
    woken = []
    monkeypatch.setattr(mapper.changed, "notify_all", lambda: woken.append(number))
    orders = [
        {},
        {"take": [1, 2], "needed": [2]},
        {"needed": [2]},
        {"needed": [1]},
        *2 * ({"needed": [1], "is_starved": True},),
        {"park": {1}},
        {},
    ]
    for number, order in enumerate(orders):
        mapper.obey(number, **{"park": (), "take": (), **order})
    assert woken == [1, 3, 4, 6]


def test_memory_goes_when_the_work_before_the_order_has_run_and_not_before():
    memory = Played()
    memory.has_device = True
    mapper = Mapper(memory)
    mapper.obey(1, [], [1, 2, 3])
    worked(mapper)
    mapper.obey(2, [1, 2], [])
    mapper.obey(3, [3], [])
    assert not mapper.is_due()
    assert (mapper.counts(), memory.taken) == (({0}, 3), {0, 1, 2, 3})
    memory.marks[0].has_run = True
    worked(mapper)
    assert (mapper.counts(), memory.taken) == (({0}, 1), {0, 3})
    memory.marks[1].has_run = True
    worked(mapper)
    assert (memory.taken, mapper.taken_bytes) == ({0}, PAGE)


def test_a_slab_that_is_wanted_again_before_it_went_keeps_its_memory():
    memory = Played()
    memory.has_device = True
    mapper = Mapper(memory)
    mapper.obey(1, [], [1])
    worked(mapper)
    mapper.obey(2, [1], [])
    mapper.obey(3, [], [1])
    memory.marks[0].has_run = True
    worked(mapper)
    assert (mapper.present, memory.calls) == ({0, 1}, [("take", (1,), False)])
    mapper.obey(4, [1], [1])
    assert mapper.present == {0, 1}


def test_a_slab_that_is_parked_while_it_is_taken_goes_again():
    memory = Played()
    mapper = Mapper(memory)
    mapper.obey(1, [], [1, 2], needed=[1, 2])
    taking = memory.try_take

    def parked_meanwhile(slabs, timeout_s=0.0):
        memory.try_take = taking
        mapper.obey(2, [1, 2], [2])
        return taking(slabs, timeout_s)

    memory.try_take = parked_meanwhile
    worked(mapper)
    assert (mapper.present, memory.taken) == ({0, 2}, {0, 2})


def test_a_slab_that_is_parked_while_it_is_taken_keeps_its_memory_until_its_zeros_are_written():
    memory = Played()
    memory.has_device = True
    mapper = Mapper(memory)
    mapper.obey(1, [], [1], needed=[1])
    taking = memory.try_take

    def parked_meanwhile(slabs, timeout_s=0.0):
        mapper.obey(2, [1], [])
        return taking(slabs, timeout_s)

    memory.try_take = parked_meanwhile
    worked(mapper)
    assert (mapper.counts(), memory.taken) == (({0}, 1), {0, 1})
    [zeros] = memory.marks
    zeros.has_run = True
    worked(mapper)
    assert (mapper.counts(), memory.taken) == (({0}, 0), {0})


def test_memory_is_waited_for_a_while_and_refused_then():
    memory = Played(n_free=1)
    mapper = Mapper(memory, wait_s=3600)
    mapper.obey(1, [], [1, 2, 3], needed=[1, 2, 3])
    mapper.work()
    assert mapper.present == {0, 1}, "what is there"
    mapper.work()
    mapper.work()
    assert memory.calls[-1] == ("take", (2, 3), True), "all of the rest, so that others are asked for it"
    assert not mapper.refused
    mapper.wait_s = 0
    mapper.work()
    assert (mapper.refused, mapper.wanted) == ({2: 1, 3: 1}, {})
    mapper.obey(2, [2, 3], [2])
    assert (mapper.refused, mapper.wanted) == ({}, {2: 2})
    memory.n_free = 1
    worked(mapper)
    assert mapper.present == {0, 1, 2}


def test_memory_that_others_give_back_in_time_is_taken():
    memory = Played(n_free=0)
    mapper = Mapper(memory, wait_s=3600, ahead_slabs=1)
    mapper.obey(1, [], [1, 2])
    mapper.work()
    mapper.work()
    assert memory.calls == [("take", (1,), False), ("take", (1, 2), True)]
    memory.n_free = 2
    mapper.work()
    assert mapper.present == {0, 1, 2}


def test_nothing_is_kept_for_what_is_needed_later_and_was_refused():
    for needed in ([], [1]):
        memory = Played(n_free=0)
        mapper = Mapper(memory, wait_s=0)
        mapper.obey(1, [], [1, 2], needed)
        mapper.work()
        assert mapper.refused == {1: 1, 2: 1}
        assert (memory.calls[-1] == "stop") == (not needed)


def test_an_impatient_order_is_refused_at_once():
    memory = Played(n_free=0)
    mapper = Mapper(memory, wait_s=3600)
    mapper.obey(1, [], [1], needed=[1], is_patient=False)
    mapper.work()
    assert mapper.refused == {1: 1}


def test_a_starved_engine_takes_all_or_nothing_and_says_so():
    memory = Played(n_free=1)
    mapper = Mapper(memory, wait_s=3600)
    mapper.obey(1, [], [1, 2], needed=[1, 2], is_starved=True)
    mapper.work()
    mapper.work()
    assert memory.calls == [("take", (1, 2), False), "starved", ("take", (1, 2), True), "starved"]
    assert mapper.present == {0}


def test_memory_that_is_not_wanted_any_more_is_not_waited_for():
    memory = Played(n_free=0)
    mapper = Mapper(memory, wait_s=3600)
    mapper.obey(1, [], [1])
    mapper.work()
    mapper.obey(2, [1], [])
    mapper.is_closed = True
    assert not mapper.wait_for_work()
    mapper.is_closed = False
    mapper.changed.wait = lambda timeout: setattr(mapper, "is_closed", True)
    assert not mapper.wait_for_work()
    assert (memory.calls[-1], mapper.missing()) == ("stop", ({}, {}))


def test_what_a_device_could_not_do_is_refused_and_tried_again_when_it_is_ordered():
    memory = Played()
    memory.failure = kvik.KvikError("the driver")
    mapper = Mapper(memory, wait_s=3600)
    mapper.obey(1, [], [1])
    mapper.work()
    assert (mapper.refused, memory.calls[-1]) == ({1: 1}, memory.failure)
    memory.failure = None
    mapper.obey(2, [1], [1])
    worked(mapper)
    assert mapper.present == {0, 1}


def test_an_error_of_the_thread_is_raised_where_orders_are_given():
    memory = Played()
    memory.failure = kvik.InvalidValueError("page 7 is taken")
    mapper = Mapper(memory)
    mapper.start()
    mapper.obey(1, [], [1], needed=[1])
    mapper.wait_for_needed(20, is_idle=True)
    with pytest.raises(kvik.KvikError, match="page 7 is taken"):
        mapper.obey(2, [], [])
    with pytest.raises(kvik.KvikError, match="page 7 is taken"):
        mapper.check()
    mapper.close()


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_ordered_the_last_order_holds(seed):
    chance = random.Random(seed)
    memory = Played(n_free=chance.randint(2, N_SLABS))
    memory.has_device = True
    mapper = Mapper(memory, wait_s=3600)
    # What the scheduler uses and has asked for.
    used: set[int] = {0}
    asked: dict[int, int] = {}
    was_refused: set[int] = set()
    used_until: dict[int, Mark] = {}
    for number in range(1, 300):
        park = {slab for slab in {*used, *asked} - {0} if chance.random() < 0.2} | was_refused
        was_refused = set()
        before = len(memory.marks)
        used -= park
        for slab in park:
            asked.pop(slab, None)
        take = [slab for slab in range(1, N_SLABS) if slab not in used and slab not in asked and chance.random() < 0.2]
        asked.update(dict.fromkeys(take, number))
        mapper.obey(number, park, take, chance.sample(sorted(asked), min(len(asked), 2)), is_patient=chance.random() < 0.8)
        if len(memory.marks) > before:
            used_until.update(dict.fromkeys(park, memory.marks[-1]))
        for _ in range(chance.randrange(4)):
            unfinished = {slab for slab, mark in used_until.items() if not mark.has_run}
            had = memory.taken & unfinished
            if mapper.is_due():
                mapper.work()
            assert memory.taken >= used | had, "in use"
            if memory.marks and chance.random() < 0.5:
                first = next((mark for mark in memory.marks if not mark.has_run), None)
                if first is not None:
                    first.has_run = True
        wanted, refused = mapper.missing()
        for slab, asked_with in list(asked.items()):
            if refused.get(slab) == asked_with:
                del asked[slab]
                was_refused.add(slab)
            elif slab not in wanted and slab not in refused:
                used.add(slab)
                del asked[slab]
        assert memory.taken >= used
    mapper.obey(1000, {*used, *asked, *was_refused} - {0}, [])
    for mark in memory.marks:
        mark.has_run = True
    worked(mapper)
    assert (memory.taken, mapper.counts(), mapper.missing()) == ({0}, ({0}, 0), ({}, {}))


# === With a thread, on memory of this machine ===


class Paged:
    """Slabs of a page each, on a real memory."""

    def __init__(self, **options) -> None:
        self.memory = kvik.PagedMemory(n_bytes=16 * PAGE, **options)
        self.pages = PageTable(Slabs(16, 1), [Piece(0, PAGE, PAGE)], PAGE)
        self.taken: set[int] = set()

    slab_bytes = PAGE
    mark = Played.mark
    has_device = False

    @property
    def taken_bytes(self) -> int:
        return len(self.taken) * PAGE

    def try_take(self, slabs, timeout_s: float = 0.0) -> bool:
        if not self.memory.take(list(slabs), timeout_s=timeout_s):
            return False
        self.taken.update(slabs)
        return True

    def release(self, slabs) -> None:
        self.taken.difference_update(slabs)
        self.memory.give_back(list(slabs))

    def n_claimable(self) -> int:
        return max(0, self.memory.claimable_bytes - self.taken_bytes) // PAGE

    def beside(self):
        return contextlib.nullcontext()

    def note_stream(self) -> None:
        pass

    def note_failure(self, error) -> None:
        raise error

    def interrupt(self) -> None:
        self.memory.interrupt()

    def note_starved(self) -> None:
        self.memory.note_starved()

    def stop_waiting(self) -> None:
        self.memory.stop_waiting()


def test_two_engines_get_what_the_other_gives_back_without_asking_twice(tmp_path):
    options = {"group": "mine", "directory": tmp_path}
    one, other = Paged(**options), Paged(**options)
    with (tmp_path / "mine").open("r+b") as file:
        file.write((12 * PAGE).to_bytes(8, "little"))
    eventually(lambda: one.memory.limit_bytes == 12 * PAGE and other.memory.limit_bytes == 12 * PAGE)
    mappers = [Mapper(memory, wait_s=3600) for memory in (one, other)]
    for mapper in mappers:
        mapper.start()
    mappers[0].obey(1, [], range(10), range(10))
    mappers[0].wait_for_needed(20, is_idle=True)
    assert len(one.taken) == 10
    mappers[1].obey(1, [], range(6), range(6))
    eventually(lambda: mappers[1].denied_at is not None)
    # It waits, and obeys meanwhile.
    mappers[1].obey(2, [1], [9], range(6))
    mappers[0].obey(2, range(6), [])
    mappers[1].wait_for_needed(20, is_idle=True)
    assert mappers[1].counts()[0] >= {0, 2, 3, 4, 5}
    eventually(lambda: mappers[1].counts()[0] == {0, 2, 3, 4, 5, 9})
    assert not mappers[1].missing()[1]
    for mapper in mappers:
        mapper.close()
    assert not any(mapper.thread.is_alive() for mapper in mappers)


def test_of_two_engines_that_wait_for_each_other_one_gets_what_the_other_gives_back(tmp_path):
    options = {"group": "mine", "directory": tmp_path}
    memories = [Paged(**options), Paged(**options)]
    with (tmp_path / "mine").open("r+b") as file:
        file.write((4 * PAGE).to_bytes(8, "little"))
    eventually(lambda: all(memory.memory.limit_bytes == 4 * PAGE for memory in memories))
    mappers = [Mapper(memory, wait_s=0.02) for memory in memories]
    for mapper in mappers:
        mapper.start()
        mapper.obey(1, [], [0, 1], [0, 1])
        mapper.wait_for_needed(20, is_idle=True)
    numbers = [1, 1]

    def steps_until_served() -> int:
        """Both are starved, and give back what they have when they are asked; returns which one got the third slab."""
        for place, (mapper, memory) in enumerate(zip(mappers, memories, strict=True)):
            present = mapper.counts()[0]
            if {0, 1, 2} <= present:
                return place
            numbers[place] += 1
            given = present if memory.memory.wanted_bytes() > 0 else set()
            wanted, refused = mapper.missing()
            asked = [slab for slab in range(3) if slab not in present - given and slab not in wanted]
            needed = {*asked, *wanted}
            mapper.obey(numbers[place], [*given, *refused], [] if given else asked, needed, is_starved=True)
        return -1

    served = []
    eventually(lambda: served.append(steps_until_served()) or served[-1] >= 0)
    one, other = served[-1], 1 - served[-1]
    # It ends, and the other one is served.
    mappers[one].obey(9999, [0, 1, 2], [])
    lacking = [slab for slab in range(3) if slab not in mappers[other].counts()[0]]
    mappers[other].obey(9999, mappers[other].missing()[1], lacking, range(3))
    mappers[other].wait_s = 3600
    eventually(lambda: {0, 1, 2} <= mappers[other].counts()[0])
    for mapper in mappers:
        mapper.close()


def test_memory_that_is_needed_by_turns_is_refused_in_time(monkeypatch):
    now = 100.0
    monkeypatch.setattr(mapper_module, "time", SimpleNamespace(monotonic=lambda: now))
    mapper = Mapper(Played(n_free=0), wait_s=0.05)
    mapper.obey(1, [], [1, 2], [1])
    mapper.work()
    for number in range(2, 8):
        now += 0.02
        mapper.obey(number, [], [], [1, 2] if number % 2 == 0 else [1])
        mapper.work()
    assert mapper.missing() == ({}, {1: 1, 2: 1})


def test_memory_that_is_needed_from_now_on_is_waited_for_as_long_as_any_other(monkeypatch):
    now = 100.0
    monkeypatch.setattr(mapper_module, "time", SimpleNamespace(monotonic=lambda: now))
    mapper = Mapper(Played(n_free=0), wait_s=0.05)
    mapper.obey(1, [], [1], [1])
    mapper.work()
    now += 0.04
    mapper.obey(2, [], [2], [1, 2])
    now += 0.04
    mapper.work()
    assert mapper.missing() == ({1: 1, 2: 2}, {})
    now += 0.02
    mapper.work()
    assert mapper.missing() == ({}, {1: 1, 2: 2})


class Patient(Paged):
    """Memory that is waited for until it is interrupted, however long that takes."""

    def try_take(self, slabs, timeout_s: float = 0.0) -> bool:
        return super().try_take(slabs, 3600 if timeout_s > 0 else 0.0)


def test_a_mapper_that_waits_for_memory_ends_at_once(tmp_path):
    memory = Patient(max_bytes=2 * PAGE)
    mapper = Mapper(memory, wait_s=3600)
    mapper.start()
    mapper.obey(1, [], range(4), range(4))
    eventually(lambda: mapper.denied_at is not None and mapper.is_waiting)
    closing = threading.Thread(target=mapper.close, daemon=True)
    closing.start()
    closing.join(timeout=20)
    assert not mapper.thread.is_alive()
