"""A segment that a program keeps itself."""

import os

from kvcached.cli.utils import MemInfoStruct, RwLockedShm, get_ipc_path, init_kv_cache_limit
from kvcached.utils import DEFAULT_IPC_NAME


class MemInfoTracker:
    """Publishes use under a name, and learns of a changed limit."""

    def __init__(self, total_mem_size: int, group_id: int = 0, ipc_name: str | None = None) -> None:
        name = ipc_name or DEFAULT_IPC_NAME
        self.ipc_name = name if group_id == 0 else f"{name}_g{group_id}"
        self.total_mem_size = total_mem_size
        init_kv_cache_limit(self.ipc_name, total_mem_size)

    def check_and_get_resize_target(
        self, current_mem_size: int, num_layers: int, num_kv_buffers: int = 2
    ) -> int | None:
        """Bytes of one buffer of one layer by the limit of now; `None` where they are the current ones."""
        with RwLockedShm(self.ipc_name, MemInfoStruct.SHM_SIZE, RwLockedShm.RLOCK) as memory:
            target = MemInfoStruct.from_buffer(memory).total_size // num_layers // num_kv_buffers
        return None if target == current_mem_size else target

    def update_memory_usage(self, used_size: int, prealloc_size: int) -> None:
        with RwLockedShm(self.ipc_name, MemInfoStruct.SHM_SIZE, RwLockedShm.WLOCK) as memory:
            info = MemInfoStruct.from_buffer(memory)
            MemInfoStruct(info.total_size, used_size, prealloc_size).write_to_buffer(memory)

    def cleanup(self) -> None:
        if os.path.exists(path := get_ipc_path(self.ipc_name)):
            os.unlink(path)
