"""Waits for what happens on another thread."""

import time
from collections.abc import Callable

PATIENCE_S = 20


def eventually(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds; fails if it does not in time."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
