"""Processes that end with what started them."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from typing import IO

END_S = 20


@contextlib.contextmanager
def running(command: list[str], variables: dict[str, str], **streams: int | IO) -> Iterator[subprocess.Popen]:
    """Runs a command in a process group of its own, and ends all of the group with the block."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, text=True, env=variables, start_new_session=True, **streams
    )
    try:
        yield process
    finally:
        end(process)


def end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    # What the process started itself, or the process if it did not end.
    signal_group(process, signal.SIGKILL)
    process.wait()


def signal_group(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
