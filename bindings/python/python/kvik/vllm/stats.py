"""Counts for vLLM's log and its metrics."""

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS = {
    "loaded_blocks": "Blocks that were loaded from the store of kvik.",
    "step_loaded_blocks": "Blocks of these that were loaded layer by layer, in the step that needed them.",
    "failed_blocks": "Blocks that could not be loaded and were computed.",
    "saved_blocks": "Blocks that were given to the store of kvik.",
    "computed_slow_tokens": "Tokens that were computed because a slow tier of kvik would have taken longer.",
}

# States of the elastic memory; the later one holds.
GAUGES = {
    "elastic_taken_bytes": "Memory behind the KV blocks that have some, of all ranks.",
    "elastic_mapped_blocks": "KV blocks with memory.",
    "elastic_used_blocks": "KV blocks of requests.",
    "elastic_unmapped_blocks": "KV blocks without memory; vLLM counts them as used.",
}


class KvikStats(KVConnectorStats):
    """Blocks that were loaded, could not be loaded, and were given to the store; and the state of the elastic memory."""

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> "KvikStats":
        names = self.data.keys() | other.data.keys()
        return KvikStats(data={name: self.both(name, other) for name in names})

    def both(self, name: str, other: KVConnectorStats) -> int:
        if name in GAUGES:
            return other.data.get(name, self.data.get(name, 0))
        return self.data.get(name, 0) + other.data.get(name, 0)

    def reduce(self) -> dict[str, Any]:
        return {f"kvik {name.replace('_', ' ')}": count for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class KvikPromMetrics(KVConnectorPromMetrics):
    """The same as metrics: `kvik_vllm_loaded_blocks_total`, `kvik_vllm_elastic_taken_bytes` and so on."""

    def __init__(
        self,
        vllm_config: "VllmConfig",
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counters = {
            name: self._counter_cls(name=f"kvik_vllm_{name}", documentation=text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        gauges = {
            name: self._gauge_cls(
                name=f"kvik_vllm_{name}", documentation=text, labelnames=labelnames, multiprocess_mode="mostrecent"
            )
            for name, text in GAUGES.items()
        }
        self.metrics = {
            (name, engine): metric.labels(*values)
            for name, metric in (counters | gauges).items()
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            metric = self.metrics.get((name, engine_idx))
            if metric is not None:
                metric.set(value) if name in GAUGES else metric.inc(value)
