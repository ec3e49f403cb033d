"""A table of fixed size that processes of one machine share.

Who reads or changes it holds a lock of its file. The kernel releases it when a process dies.
"""

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator


class SharedTable:
    """The table, mapped from a file that all sides have open."""

    def __init__(self, descriptor: int, n_bytes: int) -> None:
        self.descriptor = descriptor
        self.memory = mmap.mmap(descriptor, n_bytes)

    @property
    def path(self) -> str:
        """Where other processes of this user find the file while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        fcntl.flock(self.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)


def new_file(name: str, n_bytes: int) -> int:
    """A file of zeros in memory, without a place in any folder, which goes with its processes."""
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, n_bytes)
    return descriptor


def open_file(path: str, n_bytes: int) -> int | None:
    """The file of another process; `None` where it cannot be seen from here, or has another size."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(descriptor).st_size != n_bytes:
        os.close(descriptor)
        return None
    return descriptor
