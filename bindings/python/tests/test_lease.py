"""The table of slabs that are offered: what is gone is gone for the scheduler, and what it took back is not."""

import os
import random
import subprocess
import sys
import threading

from kvik.elastic.lease import LeaseTable


def both(n_slabs: int) -> tuple[LeaseTable, LeaseTable]:
    mine = LeaseTable.create(n_slabs)
    return mine, LeaseTable.open(mine.path, n_slabs)


def test_slabs_go_in_the_order_in_which_they_are_offered():
    scheduler, worker = both(10)
    scheduler.offer(5, [7, 2, 4])
    assert worker.take(2, 5) == [7, 2]
    assert (worker.gone(5), worker.gone(4)) == ([2, 7], [])
    assert worker.take(9, 6) == [4]
    assert worker.take(9, 6) == []
    assert scheduler.close_offer() == [2, 4, 7]
    assert worker.gone(9) == []


def test_nothing_goes_before_the_orders_of_the_offer_were_obeyed_or_after_its_end():
    scheduler, worker = both(10)
    assert worker.take(9, 100) == []
    scheduler.offer(5, [1, 2])
    assert worker.take(9, 4) == []
    assert scheduler.close_offer() == []
    assert worker.take(9, 100) == []
    scheduler.offer(8, [3])
    assert worker.take(9, 8) == [3]


def test_a_table_that_cannot_be_seen_is_none():
    assert LeaseTable.open("/proc/0/fd/3", 10) is None
    assert LeaseTable.open(LeaseTable.create(10).path, 11) is None


def test_more_slabs_than_places_can_be_offered():
    scheduler, worker = both(70_000)
    scheduler.offer(1, range(70_000))
    assert worker.take(3, 1) == [0, 1, 2]
    assert len(worker.take(70_000, 1)) == 69_997


TAKER = """
import sys
from kvik.elastic.lease import LeaseTable
table = LeaseTable.open(sys.argv[1], 200)
print("ready", flush=True)
while True:
    taken = table.take(1, 1 << 40)
    if taken:
        print(taken[0], flush=True)
"""


def test_a_slab_has_one_owner_whenever_processes_look():
    table = LeaseTable.create(200)
    command = [sys.executable, "-c", TAKER, f"/proc/{os.getpid()}/fd/{table.descriptor}"]
    told: list[list[int]] = []
    takers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]

    def read(taker: subprocess.Popen, slabs: list[int]) -> None:
        slabs.extend(int(line) for line in taker.stdout)

    readers = []
    for taker in takers:
        assert taker.stdout.readline() == "ready\n"
        told.append([])
        readers.append(threading.Thread(target=read, args=(taker, told[-1])))
        readers[-1].start()
    chance = random.Random(7)
    gone = []
    for number in range(1, 200):
        table.offer(number, chance.sample(range(200), 50))
        for _ in range(chance.randrange(2000)):
            pass
        gone += table.close_offer()
    for taker in takers:
        taker.kill()
        taker.wait()
    for reader in readers:
        reader.join()
    # What was told is what is gone; a taker may have been killed before it told of its last one.
    n_told = sum(map(len, told))
    assert 0 < n_told <= len(gone) <= n_told + len(takers)
