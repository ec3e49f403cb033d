"""kvik inside vLLM: an unmodified `vllm serve` keeps its KV in the store of the node.

    kvik store serve --socket /run/kvik/store.sock --ram 20GiB --nvme /var/cache/kvik:200GiB
    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvikConnector", "kv_connector_module_path": "kvik.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

With `"kv_connector_extra_config": {"elastic": true, "elastic_group": NAME}` it also shares the memory of its device with other
engines.
"""

from kvik.vllm.connector import KvikConnector

__all__ = ["KvikConnector"]
