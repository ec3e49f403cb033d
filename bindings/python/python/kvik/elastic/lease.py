"""Memory that is lent while the scheduler sleeps: workers may give it back without asking it.

A scheduler without requests waits for the next one and runs nothing. Blocks that it keeps only for its prefix cache are offered
in a table that its process shares with those of the workers. A worker whose memory others want marks slabs as gone and gives
their memory back. The scheduler closes the offer before it looks at a block again, and learns which slabs are gone.

Both sides hold a lock of the table's file while they look and change. The kernel releases it when a process dies.
"""

import contextlib
import fcntl
import mmap
import os
import struct
from collections.abc import Iterator, Sequence

# The number of the orders with which the offer was made; 0 where there is none.
NUMBER = struct.Struct("<Q")
# For each slab: 0 where it is not offered, GONE, or its place in the order in which slabs go, from 1 on.
PLACE = struct.Struct("<H")
GONE = 0xFFFF
LAST_PLACE = GONE - 1


class LeaseTable:
    """The table, mapped from a file that both sides have open."""

    def __init__(self, descriptor: int, n_slabs: int) -> None:
        self.descriptor = descriptor
        self.n_slabs = n_slabs
        self.memory = mmap.mmap(descriptor, NUMBER.size + n_slabs * PLACE.size)

    @classmethod
    def create(cls, n_slabs: int) -> "LeaseTable":
        """A table in a file of memory without a name, which goes with its processes."""
        descriptor = os.memfd_create("kvik-lease")
        os.ftruncate(descriptor, NUMBER.size + n_slabs * PLACE.size)
        return cls(descriptor, n_slabs)

    @property
    def path(self) -> str:
        """Where other processes of this user find the file while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @classmethod
    def open(cls, path: str, n_slabs: int) -> "LeaseTable | None":
        """The table of another process; `None` where it cannot be seen from here, or has another size."""
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        if os.fstat(descriptor).st_size != NUMBER.size + n_slabs * PLACE.size:
            os.close(descriptor)
            return None
        return cls(descriptor, n_slabs)

    def offer(self, number: int, slabs: Sequence[int]) -> None:
        """Offers slabs without a block in use, in the order in which they go, with the orders of this number."""
        with self.locked():
            for place, slab in enumerate(slabs, start=1):
                PLACE.pack_into(self.memory, NUMBER.size + slab * PLACE.size, min(place, LAST_PLACE))
            NUMBER.pack_into(self.memory, 0, number)

    def close_offer(self) -> list[int]:
        """Ends the offer; returns the slabs that are gone."""
        with self.locked():
            gone = [slab for slab, place in enumerate(self.places()) if place == GONE]
            self.memory[:] = bytes(len(self.memory))
        return gone

    def take(self, n_slabs: int, number: int) -> list[int]:
        """Takes up to `n_slabs` slabs for good, for a worker that has obeyed the orders up to this number.

        Steps that were scheduled before the offer may still use the slabs where the worker has not come so far.
        """
        with self.locked():
            (offered,) = NUMBER.unpack_from(self.memory)
            if not 0 < offered <= number:
                return []
            places = sorted((place, slab) for slab, place in enumerate(self.places()) if 0 < place < GONE)
            taken = [slab for _, slab in places[:n_slabs]]
            for slab in taken:
                PLACE.pack_into(self.memory, NUMBER.size + slab * PLACE.size, GONE)
        return taken

    def gone(self, number: int) -> list[int]:
        """Slabs that workers took of the offer, for a worker that has obeyed the orders up to this number."""
        with self.locked():
            (offered,) = NUMBER.unpack_from(self.memory)
            is_seen = 0 < offered <= number
            return [slab for slab, place in enumerate(self.places()) if is_seen and place == GONE]

    def places(self) -> list[int]:
        return [place for (place,) in PLACE.iter_unpack(self.memory[NUMBER.size :])]

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)
