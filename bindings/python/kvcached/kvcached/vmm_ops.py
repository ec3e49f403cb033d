"""The memory of this process, one for each group of KV tensors."""

import threading
from dataclasses import dataclass

import torch

import kvik
from kvcached.utils import DEFAULT_IPC_NAME, PAGE_SIZE, SHM_DIR, KVCachedConfigError


@dataclass
class Group:
    """The memory behind the tensors of a group."""

    memory: kvik.Memory
    # Bytes of a block in one layer, of keys and values together where it has both.
    block_bytes: int
    n_layers: int
    n_kv_buffers: int
    ipc_name: str


lock = threading.Lock()
groups: dict[int, Group] = {}
device: torch.device | None = None


def init_kvcached(dev_str: str, page_size: int = 0, contiguous_layout: bool = True) -> None:
    """Chooses the device: `cpu`, `cuda` or `cuda:N`."""
    global device
    if page_size not in (0, PAGE_SIZE):
        raise KVCachedConfigError(f"`page_size` is {page_size}; allowed: {PAGE_SIZE}, of KVCACHED_PAGE_SIZE_MB")
    chosen = torch.device(dev_str)
    if chosen.type not in ("cpu", "cuda"):
        raise KVCachedConfigError(f"`device` is {dev_str}; allowed: cpu, cuda, cuda:N")
    with lock:
        if device is not None and device != chosen and groups:
            raise KVCachedConfigError(f"`device` is {dev_str}; allowed: {device}, on which there are tensors")
        device = chosen


def shutdown_kvcached() -> bool:
    """Gives all memory back that no tensor keeps alive."""
    global device
    with lock:
        groups.clear()
        device = None
    return True


def kv_tensors_created(group_id: int = 0) -> bool:
    return group_id in groups


def group_of(group_id: int) -> Group:
    group = groups.get(group_id)
    if group is None:
        raise KVCachedConfigError(
            f"`group_id` is {group_id}; allowed: one for which this process has called alloc_kv_cache"
        )
    return group


def create_kv_buffers(
    n_blocks: int, block_bytes: int, n_layers: int, n_kv_buffers: int, group_id: int
) -> list[torch.Tensor]:
    """Addresses for `n_blocks` blocks in every layer: bytes, with axes of blocks and bytes."""
    if device is None:
        raise KVCachedConfigError("init_kvcached was not called")
    ipc_name = DEFAULT_IPC_NAME if group_id == 0 else f"{DEFAULT_IPC_NAME}_g{group_id}"
    ordinal = None
    if device.type == "cuda":
        ordinal = torch.cuda.current_device() if device.index is None else device.index
    with lock:
        if group_id in groups:
            raise KVCachedConfigError(f"`group_id` is {group_id}; allowed: one without tensors")
        memory = kvik.Memory(
            n_buffers=n_layers,
            block_bytes=block_bytes,
            n_blocks=n_blocks,
            page_bytes=PAGE_SIZE,
            cuda_device=ordinal,
            group=ipc_name,
            directory=SHM_DIR,
            # Engines write unused values to block 0; a manager that does not ask for it has one block less.
            has_null_block=True,
        )
        groups[group_id] = Group(memory, block_bytes, n_layers, n_kv_buffers, ipc_name)
    return [torch.from_dlpack(tensor)[:n_blocks] for tensor in memory.tensors()]
