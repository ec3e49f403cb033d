"""The table in which ranks note what memory has come: a slab has come when all ranks say so of the orders that asked for it."""

import os
import random
import subprocess
import sys

from kvik.elastic.arrivals import ArrivalTable


def test_a_slab_has_come_when_all_ranks_have_noted_the_orders_that_asked_for_it():
    scheduler = ArrivalTable.create(2, 10)
    ranks = [ArrivalTable.open(scheduler.path, 2, 10) for _ in range(2)]
    asked = {3: 7, 4: 7, 9: 8}
    assert scheduler.arrived(asked) == []
    ranks[0].note(0, {3: 7, 9: 8})
    assert scheduler.arrived(asked) == []
    ranks[1].note(1, {4: 7, 9: 8})
    assert scheduler.arrived(asked) == [9]
    ranks[1].note(1, {3: 7})
    assert scheduler.arrived(asked) == [3, 9]


def test_an_answer_to_other_orders_is_not_meant():
    table = ArrivalTable.create(1, 4)
    table.note(0, {2: 5})
    assert table.arrived({2: 4}) == table.arrived({2: 6}) == []
    table.note(0, {2: 6})
    assert table.arrived({2: 6}) == [2]


def test_a_table_that_cannot_be_seen_or_has_another_shape_is_none():
    assert ArrivalTable.open("/proc/0/fd/3", 1, 10) is None
    table = ArrivalTable.create(2, 10)
    assert ArrivalTable.open(table.path, 2, 11) is None


NOTER = """
import sys
from kvik.elastic.arrivals import ArrivalTable
table = ArrivalTable.open(sys.argv[1], 1, 4)
print("ready", flush=True)
for line in sys.stdin:
    number = int(line)
    table.note(0, {slab: number for slab in range(4)})
    print(number, flush=True)
"""


def test_numbers_of_any_size_are_never_seen_in_parts():
    table = ArrivalTable.create(1, 4)
    command = [sys.executable, "-c", NOTER, f"/proc/{os.getpid()}/fd/{table.descriptor}"]
    noter = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert noter.stdout.readline() == "ready\n"
    chance = random.Random(3)
    os.set_blocking(noter.stdout.fileno(), False)
    for _ in range(300):
        number = chance.choice([1, 255, 256, 65_535, 65_536, (1 << 40) - 1, 1 << 40])
        noter.stdin.write(f"{number}\n")
        noter.stdin.flush()
        while not noter.stdout.readline():
            # All slabs have one number at any time: the one before, or this one.
            counts = {len(table.arrived(dict.fromkeys(range(4), number)))}
            assert counts <= {0, 4}
        assert table.arrived(dict.fromkeys(range(4), number)) == [0, 1, 2, 3]
    noter.stdin.close()
    assert noter.wait() == 0
