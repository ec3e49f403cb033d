"""Memory that has come, told to the scheduler at once.

A worker's report reaches the scheduler with the output of its step: a pass after the memory came. In this table each rank notes behind
which slabs there is memory, as soon as there is. A rank that does not see the table notes nothing, and its reports say the same later.
"""

import struct
from collections.abc import Mapping

from kvik.elastic.shared_table import SharedTable, new_file, open_file

# For each slab of each rank, the number of the last orders that asked for the slab and have been obeyed; 0 where there were none.
NUMBER = struct.Struct("<Q")


class ArrivalTable(SharedTable):
    """The last orders for each slab that each rank has obeyed.

    The scheduler gives orders rising numbers, and asks for a slab again only by orders that follow those by which it let the slab go. So a
    rank has memory behind a slab that was asked for and not let go since if it has noted the number of these orders.
    """

    def __init__(self, descriptor: int, n_ranks: int, n_slabs: int) -> None:
        super().__init__(descriptor, table_bytes(n_ranks, n_slabs))
        self.n_ranks, self.n_slabs = n_ranks, n_slabs

    @classmethod
    def create(cls, n_ranks: int, n_slabs: int) -> "ArrivalTable":
        return cls(new_file("kvik-arrivals", table_bytes(n_ranks, n_slabs)), n_ranks, n_slabs)

    @classmethod
    def open(cls, path: str, n_ranks: int, n_slabs: int) -> "ArrivalTable | None":
        """The table of another process; `None` where it cannot be seen from here, or has another size."""
        descriptor = open_file(path, table_bytes(n_ranks, n_slabs))
        return None if descriptor is None else cls(descriptor, n_ranks, n_slabs)

    def note(self, rank: int, numbers: Mapping[int, int]) -> None:
        """There is memory behind slabs, each with the number of the orders that asked for it."""
        with self.locked():
            for slab, number in numbers.items():
                NUMBER.pack_into(self.memory, self.place(rank, slab), number)

    def arrived(self, asked: Mapping[int, int]) -> list[int]:
        """Those of the slabs, each with the number of the orders that asked for it, behind which all ranks have memory."""
        with self.locked():
            return [
                slab
                for slab, number in asked.items()
                if all(
                    NUMBER.unpack_from(self.memory, self.place(rank, slab)) == (number,) for rank in range(self.n_ranks)
                )
            ]

    def place(self, rank: int, slab: int) -> int:
        return (rank * self.n_slabs + slab) * NUMBER.size


def table_bytes(n_ranks: int, n_slabs: int) -> int:
    return n_ranks * n_slabs * NUMBER.size
