"""Counts for vLLM's log."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


class KvikStats(KVConnectorStats):
    """Blocks that were loaded, could not be loaded, and were given to the store; and the state of the elastic memory."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KvikStats":
        names = self.data.keys() | other.data.keys()
        return KvikStats(data={name: self.both(name, other) for name in names})

    def both(self, name: str, other: KVConnectorStats) -> int:
        if name.startswith("elastic_"):
            # A state and no count: the later one holds.
            return other.data.get(name, self.data.get(name, 0))
        return self.data.get(name, 0) + other.data.get(name, 0)

    def reduce(self) -> dict[str, Any]:
        return {f"kvik {name.replace('_', ' ')}": count for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not any(self.data.values())
