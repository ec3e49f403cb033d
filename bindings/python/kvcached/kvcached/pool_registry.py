"""The managers of this process, for tools that look at them or limit them."""

import threading
import weakref
from typing import Any

lock = threading.Lock()
# In the order in which they came. A manager is dropped with its last user, registered or not.
registered: list[tuple[weakref.ref[Any], str | None]] = []


def register_kv_cache_pool(manager: Any, *, integration: str | None = None) -> None:
    """Makes a manager known as one of `integration`, an engine; a manager that is known already gets the new one."""
    with lock:
        keep_live(lambda other, _: other is not manager)
        registered.append((weakref.ref(manager), integration))


def clear_registered_kv_cache_pools(*, integration: str | None = None) -> None:
    """Forgets the managers of an engine, or all of them."""
    with lock:
        keep_live(lambda _, other: integration is not None and other != integration)


def get_registered_kv_cache_pools(*, integration: str | None = None) -> list[tuple[Any, str | None]]:
    """The managers that are in use, each with its engine; only those of `integration` where it is given."""
    with lock:
        keep_live(lambda _manager, _integration: True)
        managers = [(reference(), other) for reference, other in registered]
    return [
        (manager, other) for manager, other in managers if manager is not None and integration in (None, other)
    ]


def keep_live(is_kept: Any) -> None:
    """Drops managers that nothing uses, and those that `is_kept` refuses; the caller holds the lock."""
    live = [(reference, reference(), other) for reference, other in registered]
    registered[:] = [
        (reference, other) for reference, manager, other in live if manager is not None and is_kept(manager, other)
    ]
