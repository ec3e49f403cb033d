"""Counts for SGLang's metrics."""

import threading
from typing import Any


class TransferStats:
    """Pages and bandwidths of loads and saves since SGLang last asked for them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.loads: list[tuple[int, float]] = []
        self.saves: list[tuple[int, float]] = []

    def note(self, is_load: bool, n_pages: int, n_bytes: int, seconds: float) -> None:
        """Takes note of a transfer; SGLang wants gigabytes in a second."""
        with self.lock:
            (self.loads if is_load else self.saves).append((n_pages, n_bytes / max(seconds, 1e-9) / 1e9))
            # SGLang may never ask.
            del self.loads[:-1000], self.saves[:-1000]

    def take(self) -> Any:
        try:
            from sglang.srt.observability.metrics_collector import StorageMetrics
        except ImportError:
            return None
        with self.lock:
            loads, self.loads = self.loads, []
            saves, self.saves = self.saves, []
        metrics = StorageMetrics()
        metrics.prefetch_pgs.extend(n_pages for n_pages, _ in loads)
        metrics.prefetch_bandwidth.extend(bandwidth for _, bandwidth in loads)
        metrics.backup_pgs.extend(n_pages for n_pages, _ in saves)
        metrics.backup_bandwidth.extend(bandwidth for _, bandwidth in saves)
        return metrics
