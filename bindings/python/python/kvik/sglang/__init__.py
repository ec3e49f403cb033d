"""kvik inside SGLang: the pages of an unmodified SGLang's HiCache are kept in the store of the node.

    kvik store serve --socket /run/kvik/store.sock --ram 20GiB --nvme /var/cache/kvik:200GiB
    python -m sglang.launch_server --model-path MODEL --page-size 64 --enable-hierarchical-cache
        --hicache-storage-backend dynamic --hicache-storage-backend-extra-config
        '{"backend_name": "kvik", "module_path": "kvik.sglang", "class_name": "KvikStorage"}'
"""

from kvik.sglang.storage import KvikStorage

__all__ = ["KvikStorage"]
