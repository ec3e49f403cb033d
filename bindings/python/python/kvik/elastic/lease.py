"""Memory that is lent while the scheduler sleeps: workers may give it back without asking it.

A scheduler without requests waits for the next one and runs nothing. Blocks that it keeps only for its prefix cache are offered
in a table that its process shares with those of the workers. A worker whose memory others want marks slabs as gone and gives
their memory back. The scheduler closes the offer before it looks at a block again, and learns which slabs are gone.

Both sides hold the table's lock while they look and change.
"""

import struct
from collections.abc import Sequence

from kvik.elastic.shared_table import SharedTable, new_file, open_file

# The number of the orders with which the offer was made; 0 where there is none.
NUMBER = struct.Struct("<Q")
# For each slab: 0 where it is not offered, GONE, or its place in the order in which slabs go, from 1 on.
PLACE = struct.Struct("<H")
GONE = 0xFFFF
LAST_PLACE = GONE - 1


class LeaseTable(SharedTable):
    """The table of what is offered."""

    def __init__(self, descriptor: int, n_slabs: int) -> None:
        super().__init__(descriptor, table_bytes(n_slabs))

    @classmethod
    def create(cls, n_slabs: int) -> "LeaseTable":
        return cls(new_file("kvik-lease", table_bytes(n_slabs)), n_slabs)

    @classmethod
    def open(cls, path: str, n_slabs: int) -> "LeaseTable | None":
        """The table of another process; `None` where it cannot be seen from here, or has another size."""
        descriptor = open_file(path, table_bytes(n_slabs))
        return None if descriptor is None else cls(descriptor, n_slabs)

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


def table_bytes(n_slabs: int) -> int:
    return NUMBER.size + n_slabs * PLACE.size
