"""One page that is written, read back and compared before the engine serves."""

import ctypes
import logging
import os
from typing import Any

import kvik
from kvik.sglang.memory import PageMemory
from kvik.sglang.names import PageNames
from kvik.sglang.pages import Pages
from kvik.sglang.settings import Settings

logger = logging.getLogger(f"sglang.{__name__}")


def run_self_test(settings: Settings, names: PageNames, memory: PageMemory, pool: Any) -> None:
    """Moves a free page of a pool to the store and back; it is zero afterwards.

    A store that is not there, or has no room, is not tested, nor is a pool that has no free page. A store that gives
    other bytes back ends the start: it would give wrong KV to requests.
    """
    indices = pool.alloc(memory.page_tokens)
    if indices is None:
        logger.info("kvik: no page is free for the self test")
        return
    try:
        numbers = memory.page_numbers(indices, 1)
        if numbers is None:
            raise kvik.InvalidValueError("the host pool gives places that are no page; allowed: whole pages")
        compare(settings, names, memory, numbers[0])
        write_page(memory, numbers[0], bytes(memory.page_bytes))
    finally:
        pool.free(indices)


def compare(settings: Settings, names: PageNames, memory: PageMemory, page: int) -> None:
    pages = Pages(settings, names.for_self_test(), memory.page_bytes, memory)
    # A key of this process alone: an older page must not be found.
    key, expected = os.urandom(16).hex(), os.urandom(memory.page_bytes)
    try:
        write_page(memory, page, expected)
        if pages.save([key], [page]) == 0:
            return
        write_page(memory, page, bytes(memory.page_bytes))
        if pages.load([key], [page]) == 0:
            return
        if read_page(memory, page) != expected:
            raise kvik.KvikError("the store gave other bytes back than were written")
        pages.clear()
        logger.info("kvik: a page was written, read back and is the same")
    finally:
        pages.close()


def write_page(memory: PageMemory, page: int, content: bytes) -> None:
    start = 0
    for address, n_bytes, stride in memory.pieces:
        ctypes.memmove(address + page * stride, content[start : start + n_bytes], n_bytes)
        start += n_bytes


def read_page(memory: PageMemory, page: int) -> bytes:
    return b"".join(ctypes.string_at(address + page * stride, n_bytes) for address, n_bytes, stride in memory.pieces)
