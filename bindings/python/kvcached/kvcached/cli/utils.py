"""The 24 bytes in shared memory by which tools see and limit an engine: limit, use and what is kept ready."""

import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar

from kvcached.utils import SHM_DIR


def get_ipc_path(ipc_name: str) -> str:
    return os.path.join(SHM_DIR, ipc_name.lstrip("/"))


def get_ipc_name(ipc_path: str) -> str:
    return os.path.basename(ipc_path)


@dataclass
class MemInfoStruct:
    """Bytes that may be held, are used, and are kept ready."""

    total_size: int
    used_size: int
    prealloc_size: int

    LAYOUT: ClassVar[struct.Struct] = struct.Struct("<qqq")
    SHM_SIZE: ClassVar[int] = LAYOUT.size

    @classmethod
    def from_buffer(cls, buffer: mmap.mmap) -> "MemInfoStruct":
        return cls(*cls.LAYOUT.unpack_from(buffer))

    def write_to_buffer(self, buffer: mmap.mmap) -> None:
        self.LAYOUT.pack_into(buffer, 0, self.total_size, self.used_size, self.prealloc_size)


class RwLockedShm:
    """The memory of a name, mapped while it is entered, under a lock of its file: `RLOCK` to read, `WLOCK` to write.

    To write makes the file where there is none, and as long as is asked for; a file of kvik's ledger is longer.
    """

    RLOCK = fcntl.LOCK_SH
    WLOCK = fcntl.LOCK_EX

    def __init__(self, file_path: str, size: int, lock_type: int) -> None:
        self.path = file_path if os.path.isabs(file_path) else get_ipc_path(file_path)
        self.size = size
        self.lock_type = lock_type

    def __enter__(self) -> mmap.mmap:
        is_write = self.lock_type == self.WLOCK
        flags = os.O_RDWR | (os.O_CREAT if is_write else 0) | os.O_CLOEXEC
        self.descriptor = os.open(self.path, flags, 0o600)
        try:
            fcntl.flock(self.descriptor, self.lock_type)
            if is_write and os.fstat(self.descriptor).st_size < self.size:
                os.ftruncate(self.descriptor, self.size)
            self.memory = mmap.mmap(self.descriptor, self.size)
        except BaseException:
            os.close(self.descriptor)
            raise
        return self.memory

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.memory.close()
        # The lock goes with the descriptor.
        os.close(self.descriptor)


def init_kv_cache_limit(ipc_name: str, kv_cache_limit: int) -> MemInfoStruct:
    """Makes a segment, or sets the limit of one and its counts to zero."""
    info = MemInfoStruct(kv_cache_limit, 0, 0)
    with RwLockedShm(ipc_name, MemInfoStruct.SHM_SIZE, RwLockedShm.WLOCK) as memory:
        info.write_to_buffer(memory)
    return info


def get_kv_cache_limit(ipc_name: str) -> MemInfoStruct | None:
    """What a segment says; `None` where there is none."""
    try:
        with RwLockedShm(ipc_name, MemInfoStruct.SHM_SIZE, RwLockedShm.RLOCK) as memory:
            return MemInfoStruct.from_buffer(memory)
    except (FileNotFoundError, ValueError):
        return None


def update_kv_cache_limit(ipc_name: str, kv_cache_limit: int) -> MemInfoStruct | None:
    """Sets the limit of a segment; the engine takes it over within 100 ms. `None` where there is no such segment."""
    if not os.path.exists(get_ipc_path(ipc_name)):
        return None
    with RwLockedShm(ipc_name, MemInfoStruct.SHM_SIZE, RwLockedShm.WLOCK) as memory:
        info = MemInfoStruct.from_buffer(memory)
        info.total_size = kv_cache_limit
        # Only the limit: the counts are the engine's.
        memory[:8] = kv_cache_limit.to_bytes(8, "little", signed=True)
    return info


def delete_kv_cache_segment(ipc_name: str) -> bool:
    """Removes the file of a name; says whether there was one. Engines that live are not asked: prefer `kvctl delete` of kvik."""
    try:
        os.unlink(get_ipc_path(ipc_name))
    except FileNotFoundError:
        return False
    return True
