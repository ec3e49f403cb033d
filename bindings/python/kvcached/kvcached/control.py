"""Limits for all managers of this process together."""

from typing import Any

from kvcached.pool_registry import get_registered_kv_cache_pools

# Of the states of several managers the first of these is that of all.
STATUSES = ("conflict", "stale", "rejected", "deferred", "applied")

REASONS = {
    "conflict": "revision_reused_with_different_limit",
    "rejected": "quarantined_pages_prevent_resize",
    "deferred": "inuse_capacity_above_limit",
    "unavailable": "no_registered_kv_cache_pool",
}


def set_instance_memory_limit(limit_bytes: int, *, revision: int) -> dict[str, Any]:
    """Bounds the memory of all managers, each by its part of their capacity; says what came of it.

    A later revision replaces an earlier one. The status is `applied`, `deferred` while blocks in use need more, `stale` for an
    earlier revision, `conflict` for the same revision with another limit, or `unavailable` where there is no manager.
    """
    refuse_negative("limit_bytes", limit_bytes)
    refuse_negative("revision", revision)
    managers = [manager for manager, _ in get_registered_kv_cache_pools()]
    # An order that does not depend on when managers were made: what is left by rounding goes to the last one.
    managers.sort(key=lambda manager: (manager.pool_name or "", manager.group_id))
    capacities = [manager.mem_size * manager.num_layers * manager.num_kv_buffers for manager in managers]
    capacity = sum(capacities)
    if managers and capacity == 0:
        raise ValueError("the managers have a capacity of 0 bytes; allowed: more")
    bound = min(limit_bytes, capacity)
    shares = [bound * part // capacity for part in capacities]
    if shares:
        shares[-1] = bound - sum(shares[:-1])
    states = [
        manager.set_memory_limit(share, revision=revision)
        for manager, share in zip(managers, shares, strict=True)
    ]
    found = {state["status"] for state in states}
    status = next((status for status in STATUSES if status in found), "unavailable")
    mapped = sum(state["mapped_bytes"] for state in states)
    effective = sum(state["effective_limit_bytes"] or 0 for state in states)
    return {
        "status": status,
        "reason": REASONS.get(status, ""),
        "limit_bytes": limit_bytes,
        "effective_limit_bytes": effective,
        "revision": revision,
        "mapped_bytes": mapped,
        "remaining_bytes": max(0, effective - mapped),
        "overage_bytes": max(0, mapped - effective),
        "pools": states,
    }


def refuse_negative(name: str, value: int) -> None:
    if value < 0:
        raise ValueError(f"`{name}` is {value}; allowed: 0 or more")
