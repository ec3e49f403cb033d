"""kvik inside SGLang: the pages of an unmodified SGLang's HiCache are kept in the store of the node.

    kvik store serve --socket /run/kvik/store.sock --ram 20GiB --nvme /var/cache/kvik:200GiB
    python -m sglang.launch_server --model-path MODEL --page-size 64 --enable-hierarchical-cache
        --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
        '{"backend_name": "kvik", "module_path": "kvik.sglang", "class_name": "KvikStorage"}'

Or, and besides, its KV pool has memory behind the pages that are needed only (`elastic_hooks.py`):

    KVIK_SGLANG_ELASTIC='{"group": "gpu0"}' python -m sglang.launch_server --model-path MODEL
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvik.sglang.storage import KvikStorage

__all__ = ["KvikStorage"]


def __getattr__(name: str) -> Any:
    """Imports SGLang with the storage backend, and not with anything else of this package."""
    if name == "KvikStorage":
        from kvik.sglang.storage import KvikStorage

        return KvikStorage
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
