"""Memory by pages: what is taken can be written, what is not reads as zeros, and others get what is given back."""

import ctypes
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import kvik
import pytest

from polling import eventually

PAGE = 2 << 20


def opened(**options) -> kvik.PagedMemory:
    return kvik.PagedMemory(n_bytes=64 * PAGE - 5, **options)


def bytes_of(memory: kvik.PagedMemory, page: int):
    return (ctypes.c_ubyte * PAGE).from_address(memory.address + page * PAGE)


def test_memory_is_held_for_the_pages_that_are_taken():
    memory = opened()
    assert (memory.n_pages, memory.page_bytes, memory.held_bytes) == (64, PAGE, 0)
    assert memory.take([3, 60, 7])
    assert memory.held_bytes == 3 * PAGE
    bytes_of(memory, 60)[PAGE - 1] = 9
    assert (bytes_of(memory, 60)[PAGE - 1], bytes_of(memory, 61)[0]) == (9, 0)
    memory.give_back([60])
    memory.trim()
    assert (memory.held_bytes, bytes_of(memory, 60)[PAGE - 1]) == (2 * PAGE, 0)


def test_pages_that_are_given_back_go_by_themselves():
    memory = opened()
    assert memory.take(list(range(64)))
    memory.give_back(list(range(1, 64)))
    eventually(lambda: memory.held_bytes == PAGE)


def test_all_pages_are_taken_or_none():
    memory = opened(max_bytes=4 * PAGE)
    assert memory.limit_bytes == 4 * PAGE
    assert memory.take([0, 1, 2])
    assert not memory.take([3, 4])
    assert memory.held_bytes == 3 * PAGE
    assert memory.take([4])


@pytest.mark.parametrize("pages", [[0], [5, 5], [64], [1 << 31]])
def test_a_page_that_is_taken_listed_twice_or_not_there_is_refused(pages):
    memory = opened()
    assert memory.take([0])
    with pytest.raises(kvik.InvalidValueError, match=str(pages[0])):
        memory.take(pages)
    assert memory.held_bytes == PAGE


def test_pages_that_are_not_taken_are_not_given_back():
    memory = opened()
    assert memory.take([1, 2])
    with pytest.raises(kvik.InvalidValueError):
        memory.give_back([1, 3])
    memory.give_back([1, 2])


def test_a_bad_shape_is_refused():
    with pytest.raises(kvik.InvalidValueError, match="page_bytes"):
        kvik.PagedMemory(n_bytes=PAGE, page_bytes=1000)
    with pytest.raises(kvik.InvalidValueError, match="no/name"):
        kvik.PagedMemory(n_bytes=PAGE, group="no/name")


TAKER = """
import sys, time, kvik
memory = kvik.PagedMemory(n_bytes=64 << 21, group="mine", directory=sys.argv[1])
deadline = time.monotonic() + 20
while not memory.take(list(range(int(sys.argv[2])))):
    assert time.monotonic() < deadline
    time.sleep(0.02)
print(memory.held_bytes, flush=True)
sys.stdin.read()
"""


def lower_limit(directory, n_bytes: int) -> None:
    """As old tools set a limit: the first number of the group's file."""
    with (directory / "mine").open("r+b") as file:
        file.write(n_bytes.to_bytes(8, "little"))


def test_engines_of_a_name_share_its_limit_and_a_killed_one_leaves_its_part(tmp_path):
    memory = opened(group="mine", directory=tmp_path)
    assert memory.take(list(range(8)))
    lower_limit(tmp_path, 20 * PAGE)
    eventually(lambda: memory.limit_bytes == 20 * PAGE)
    command = [sys.executable, "-c", TAKER, str(tmp_path), "12"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert int(other.stdout.readline()) == 12 * PAGE
        assert memory.claimable_bytes == 8 * PAGE
        assert not memory.take([8])
        other.kill()
    eventually(lambda: memory.take([8]))


def test_a_lowered_limit_is_told_with_what_is_to_be_given_back_until_it_is(tmp_path):
    memory = opened(group="mine", directory=tmp_path)
    assert memory.take(list(range(8)))
    assert memory.wanted_bytes() == 0
    lower_limit(tmp_path, 3 * PAGE)
    assert memory.wanted_bytes(timeout_s=20) == 5 * PAGE
    memory.give_back(list(range(3, 8)))
    eventually(lambda: memory.held_bytes == 3 * PAGE)
    # It may have been told again before that.
    eventually(lambda: memory.wanted_bytes() == 0)
    assert not memory.take([9])
    assert memory.limit_bytes == 3 * PAGE


def test_pages_that_are_refused_can_be_waited_for(tmp_path):
    one, other = opened(group="mine", directory=tmp_path), opened(group="mine", directory=tmp_path)
    assert one.take(list(range(8)))
    lower_limit(tmp_path, 8 * PAGE)
    eventually(lambda: other.limit_bytes == 8 * PAGE)
    assert not other.take([0, 1], timeout_s=0.01)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.take, [0, 1], timeout_s=20)
        assert one.wanted_bytes(timeout_s=20) > 0
        # Another thread takes and gives back meanwhile.
        assert not other.take([2])
        one.give_back([6, 7])
        assert waiting.result()
    assert other.held_bytes == 2 * PAGE


def test_a_wait_for_pages_can_be_ended(tmp_path):
    memory = opened(max_bytes=PAGE)
    assert memory.take([0])
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(20):
            waiting = pool.submit(memory.take, [1], timeout_s=3600)
            # Long enough that it waits, mostly.
            time.sleep(0.005)
            memory.interrupt()
            assert not waiting.result()
    # Waits look again by themselves, too, but so seldom that all of them would take longer.
    assert time.monotonic() < begun + 1
    memory.stop_waiting()
    memory.give_back([0])
    # An interruption that came too early ends the next wait, and no `take` that finds memory.
    memory.interrupt()
    assert memory.take([1], timeout_s=3600)
    assert not memory.take([2], timeout_s=3600)


def test_a_wait_for_pages_ends_with_an_interrupt_by_the_user(tmp_path):
    program = f"""
import kvik, os, signal, threading
# A shell that starts the tests in the background has interrupts ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
memory = kvik.PagedMemory(n_bytes={2 * PAGE}, max_bytes={PAGE})
memory.take([0])
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    memory.take([1], timeout_s=3600)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "interrupted\n"


def test_torch_sees_the_same_bytes_and_keeps_the_memory_alive():
    torch = pytest.importorskip("torch")
    memory = opened()
    assert memory.take([2])
    flat = torch.from_dlpack(memory).view(-1)
    assert flat.shape == (64 * PAGE,)
    flat[2 * PAGE] = 7
    assert bytes_of(memory, 2)[0] == 7
    del memory
    assert flat[2 * PAGE] == 7
