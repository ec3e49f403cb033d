"""Maps and unmaps the memory of slabs on a thread of its own, beside the steps of an engine.

The engine's thread says which slabs are to have memory; the thread brings that about. What is said last holds: a slab whose memory
was to go and is wanted again before it went keeps it.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import kvik

# How often it is looked whether the steps that may use a slab have run; these take milliseconds at least.
POLL_S = 0.001

# How long others are waited for before what is there is taken: for all slabs at once the ledger asks others once.
SLICE_S = 0.02

# How long memory is waited for that others have. What they have mapped and do not use comes in less, at 2 to 25 ms a GiB; what
# they use does not, and a running request that is short of blocks must not wait long before another one gives way.
WAIT_S = 0.05

# How many slabs that are needed later are taken at a time. A call of the driver may last until the device has done what it was given,
# whatever is asked of it; a few slabs are a step's worth, and take some 10 ms otherwise.
AHEAD_SLABS = 4


class Mark(Protocol):
    """A point in the engine's stream of a device."""

    def query(self) -> bool:
        """Whether all work before it has run."""


class Memory(Protocol):
    """The memory behind slabs: `SlabMemory`. Only the thread of the mapper calls what is not said to be the engine's."""

    taken: set[int]

    @property
    def slab_bytes(self) -> int: ...
    @property
    def taken_bytes(self) -> int: ...
    def try_take(self, slabs: Sequence[int], timeout_s: float = 0.0) -> bool: ...
    def release(self, slabs: Sequence[int]) -> None: ...
    def n_claimable(self) -> int: ...
    def note_starved(self) -> None: ...
    def stop_waiting(self) -> None: ...
    def note_failure(self, error: Exception) -> None: ...
    def beside(self) -> AbstractContextManager[object]: ...

    def note_stream(self) -> None:
        """The engine begins its work where the calling thread does; the engine's."""

    def interrupt(self) -> None:
        """Ends a `try_take` that waits; of any thread."""

    def mark(self) -> Mark | None:
        """A point behind all work that the engine has begun, where that runs later; of any thread."""


class Mapper:
    """The memory of slabs as the orders want it.

    A slab is `wanted`, `present`, `leaving` or has no memory here. Invariants: a slab is `present` only while its pages are taken, and
    they are zeroed before all work that the engine begins meanwhile; pages of a slab that is `leaving` are given back only after the
    work that was begun before the order has run; of two orders for one slab the later one holds.
    """

    def __init__(self, memory: Memory, wait_s: float = WAIT_S, ahead_slabs: int = AHEAD_SLABS) -> None:
        self.memory = memory
        self.wait_s = wait_s
        self.ahead_slabs = ahead_slabs
        # Held while anything below is read or written, and not while memory is taken or given back.
        self.changed = threading.Condition()
        # Slabs that are to get memory, the first one first, each with the number of the orders that asked for it.
        self.wanted: dict[int, int] = {}
        # Those of them without which the next step cannot begin what it could.
        self.needed: frozenset[int] = frozenset()
        # Slabs that got none, with the number of the orders; until the scheduler parks them or asks again.
        self.refused: dict[int, int] = {}
        self.present = set(memory.taken)
        # Slabs whose memory goes, each with what is to run before.
        self.leaving: dict[int, Mark | None] = {}
        # How many were leaving and are being given back just now.
        self.n_releasing = 0
        self.taken_bytes = memory.taken_bytes
        # Is told of slabs that have memory, each with the number of the orders that asked for it; the caller holds `changed`.
        self.note_arrived: Callable[[dict[int, int]], None] = lambda numbers: None
        # Whether the engine can do nothing without the slabs that are needed, and whether others are waited for.
        self.is_starved = False
        self.is_patient = True
        # Since when memory is refused that is needed as now; None where it was not the last time.
        self.denied_at: float | None = None
        # Since when it is refused at all.
        self.denied_first_at = 0.0
        # Whether the thread may wait in the memory, so that it must be interrupted to see orders.
        self.is_waiting = False
        self.is_ready = self.is_closed = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run, name="kvik-mapper", daemon=True)

    def start(self) -> None:
        """Starts the thread; it has set up what it needs of the device when this returns."""
        self.memory.note_stream()
        self.thread.start()
        with self.changed:
            self.changed.wait_for(lambda: self.is_ready or self.error is not None)
            self.check()

    def close(self) -> None:
        """Ends the thread; what is wanted is not taken any more."""
        with self.changed:
            self.is_closed = True
            self.changed.notify_all()
        self.memory.interrupt()
        if self.thread.ident is not None:
            self.thread.join()

    # === For the engine's threads ===

    def obey(
        self,
        number: int,
        park: Collection[int],
        take: Sequence[int],
        needed: Iterable[int] = (),
        *,
        is_starved: bool = False,
        is_patient: bool = True,
    ) -> None:
        """Lets slabs go, and then wants others. The caller has begun no work that uses a slab of `park` after this call."""
        needed = frozenset(needed)
        with self.changed:
            self.check()
            if not park and not take and (self.needed, self.is_starved, self.is_patient) == (needed, is_starved, is_patient):
                # The thread is not woken in every step: it would take its time from the engine's.
                return
        with self.changed_by_engine():
            self.park(park)
            arrived: dict[int, int] = {}
            for slab in take:
                self.refused.pop(slab, None)
                if slab in self.leaving:
                    # Whatever was begun before uses it before anything that is begun later.
                    del self.leaving[slab]
                    self.present.add(slab)
                if slab in self.present:
                    arrived[slab] = number
                else:
                    self.wanted[slab] = number
            if arrived:
                self.note_arrived(arrived)
            before, self.needed = self.needed, needed
            if self.denied_at is not None and not self.needed <= before:
                # What is needed from now on is waited for as long as anything else; what is needed by turns is not waited for for ever.
                self.denied_at = min(time.monotonic(), self.denied_first_at + self.wait_s)
            self.is_starved, self.is_patient = is_starved, is_patient

    def let_go(self, slabs: Iterable[int]) -> None:
        """Lets slabs go that no work uses which is begun from now on."""
        with self.changed_by_engine():
            self.park(slabs)

    def park(self, slabs: Iterable[int]) -> None:
        mark: Mark | None = None
        is_marked = False
        for slab in slabs:
            self.refused.pop(slab, None)
            # If it is being taken just now, it goes again when it is.
            self.wanted.pop(slab, None)
            if slab in self.present:
                if not is_marked:
                    mark, is_marked = self.memory.mark(), True
                self.present.remove(slab)
                self.leaving[slab] = mark

    @contextmanager
    def changed_by_engine(self) -> Iterator[None]:
        with self.changed:
            self.check()
            yield
            self.changed.notify_all()
            is_waiting = self.is_waiting
        if is_waiting:
            self.memory.interrupt()

    def wait_for_needed(self, timeout_s: float, *, is_idle: bool) -> None:
        """Waits until memory is there for what the next step needs, or was refused.

        While others are waited for, it returns at once unless the engine is idle.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: self.is_closed
                or self.error is not None
                or self.needed.isdisjoint(self.wanted)
                or (self.denied_at is not None and not is_idle),
                timeout_s,
            )

    def counts(self) -> tuple[set[int], int]:
        """The slabs that have memory for good, and how many are leaving."""
        with self.changed:
            return set(self.present), self.n_leaving

    def missing(self) -> tuple[dict[int, int], dict[int, int]]:
        """Slabs that are wanted and have no memory, and slabs that were refused, each with the number of the orders."""
        with self.changed:
            self.check()
            return dict(self.wanted), dict(self.refused)

    @property
    def n_leaving(self) -> int:
        """Slabs whose memory goes and is counted in `taken_bytes` still; the caller holds `changed`."""
        return len(self.leaving) + self.n_releasing

    def check(self) -> None:
        """Raises where the thread has ended with an error."""
        if self.error is not None:
            raise kvik.KvikError(f"the thread that maps memory for KV has ended: {self.error}") from self.error

    # === The thread ===

    def run(self) -> None:
        try:
            with self.memory.beside():
                with self.changed:
                    self.is_ready = True
                    self.changed.notify_all()
                while self.wait_for_work():
                    self.work()
        except BaseException as error:
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def wait_for_work(self) -> bool:
        """Waits until something is to be done; returns whether the thread goes on."""
        with self.changed:
            while not self.is_closed and not self.is_due():
                if self.denied_at is not None:
                    # What was refused last is not wanted any more.
                    self.denied_at = None
                    self.memory.stop_waiting()
                self.changed.wait(POLL_S if self.leaving else None)
            return not self.is_closed

    def is_due(self) -> bool:
        """Whether there is something to do now; the caller holds `changed`."""
        return bool(self.wanted) or any(is_reached(mark) for mark in self.leaving.values())

    def work(self) -> None:
        """Gives back what may go, and takes or waits a while for what is wanted."""
        with self.changed:
            gone = [slab for slab, mark in self.leaving.items() if is_reached(mark)]
            for slab in gone:
                del self.leaving[slab]
            self.n_releasing = len(gone)
            wanted = dict(self.wanted)
            needed = [slab for slab in wanted if slab in self.needed]
            # Before the lock goes: orders that come now end the wait that follows.
            self.is_waiting = bool(wanted) and self.denied_at is not None
            slice_s = POLL_S if self.leaving else SLICE_S
        if gone:
            self.memory.release(gone)
            with self.changed:
                self.taken_bytes = self.memory.taken_bytes
                self.n_releasing = 0
        if wanted:
            self.take(wanted, needed, slice_s)

    def take(self, wanted: dict[int, int], needed: list[int], slice_s: float) -> None:
        """Takes what is needed, all of it if that is possible; or else the next slab of what is needed later."""
        now = time.monotonic()
        try:
            taken = self.take_some(needed or list(wanted), bool(needed), slice_s)
        except kvik.InvalidValueError:
            # The books of pages are wrong: nothing can be trusted.
            raise
        except kvik.KvikError as error:
            # The device could not do it; it may the next time.
            self.memory.note_failure(error)
            self.refuse(wanted)
            return
        if not taken:
            with self.changed:
                if self.denied_at is None:
                    self.denied_at = self.denied_first_at = now
                    self.changed.notify_all()
                is_over = not self.is_patient or time.monotonic() >= self.denied_at + self.wait_s
            if is_over:
                self.refuse(wanted)
                if not needed:
                    # It is not asked for again soon: nothing is to be kept for it.
                    self.memory.stop_waiting()
            return
        with self.changed:
            self.is_waiting = False
            self.denied_at = None
            self.taken_bytes = self.memory.taken_bytes
            arrived: dict[int, int] = {}
            for slab in taken:
                number = self.wanted.pop(slab, None)
                if number is None:
                    # It was parked meanwhile, and nothing has used it; but it may not be zeroed yet.
                    self.leaving[slab] = self.memory.mark()
                else:
                    self.present.add(slab)
                    arrived[slab] = number
            if arrived:
                self.note_arrived(arrived)
            self.changed.notify_all()

    def take_some(self, group: list[int], is_needed: bool, slice_s: float) -> list[int]:
        """Takes slabs of the group; none where there is memory for none now.

        What is needed later is taken a few slabs at a time, so that orders do not wait long. All of the group are asked for once one was
        refused: the ledger then asks others for as much.
        """
        is_denied = self.denied_at is not None
        first = group if is_needed or is_denied else group[: self.ahead_slabs]
        if self.memory.try_take(first, slice_s if is_denied else 0.0):
            return first
        if is_needed and self.is_starved:
            # A part of it would not help, and another engine that waits may need no more than that.
            self.memory.note_starved()
            return []
        part = group[: self.memory.n_claimable()]
        if part and len(part) < len(first) and self.memory.try_take(part):
            return part
        return []

    def refuse(self, slabs: dict[int, int]) -> None:
        """Notes that there is no memory for slabs, unless the orders have changed."""
        with self.changed:
            for slab, number in slabs.items():
                if self.wanted.get(slab) == number:
                    del self.wanted[slab]
                    self.refused[slab] = number
            # What is needed is asked for again soon, and keeps its ticket in the ledger.
            self.is_waiting = False
            self.denied_at = None
            self.changed.notify_all()


def is_reached(mark: Mark | None) -> bool:
    return mark is None or mark.query()
