"""A limit that its owner changes by numbered revisions."""

from typing import TYPE_CHECKING, Any

from kvcached.control import REASONS, refuse_negative

if TYPE_CHECKING:
    import kvik


class MemoryLimit:
    """Bounds the memory of a manager beside the limit that tools set; the lower one holds.

    Blocks in use stay where the limit is below them. Then no other blocks are given, and the limit is reached as they are freed.
    """

    def __init__(self, memory: "kvik.Memory") -> None:
        self.memory = memory
        self.limit_bytes: int | None = None
        # In whole pages, and not more than there are addresses for.
        self.effective_bytes: int | None = None
        self.revision = -1

    def set(self, limit_bytes: int, revision: int) -> dict[str, Any]:
        """Sets the limit, unless a later revision was set before; returns the state."""
        refuse_negative("limit_bytes", limit_bytes)
        refuse_negative("revision", revision)
        if revision < self.revision:
            return self.state("stale")
        if revision == self.revision and limit_bytes != self.limit_bytes:
            return self.state("conflict")
        if revision > self.revision:
            self.bound(limit_bytes)
            self.limit_bytes, self.revision = limit_bytes, revision
        return self.state()

    def bound(self, limit_bytes: int) -> None:
        self.memory.resize(limit_bytes)
        page_bytes = self.memory.page_bytes
        self.effective_bytes = min(limit_bytes // page_bytes * page_bytes, self.memory.limit_bytes)
        if self.memory.held_bytes > self.effective_bytes:
            self.memory.trim()

    @property
    def is_exceeded(self) -> bool:
        """Whether pages with blocks in use are more than is allowed."""
        return self.memory.n_used_pages * self.memory.page_bytes > self.memory.limit_bytes

    def state(self, status: str | None = None) -> dict[str, Any]:
        mapped, effective = self.memory.held_bytes, self.effective_bytes
        status = status or ("deferred" if self.is_exceeded else "applied")
        return {
            "status": status,
            "reason": REASONS.get(status, ""),
            "limit_bytes": self.limit_bytes,
            "effective_limit_bytes": effective,
            "current_capacity_bytes": self.memory.limit_bytes,
            "revision": self.revision,
            "mapped_bytes": mapped,
            "remaining_bytes": None if effective is None else max(0, effective - mapped),
            "overage_bytes": 0 if effective is None else max(0, mapped - effective),
        }
