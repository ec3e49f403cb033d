"""What a request says of the store: its own names under `kvik`, and those that LMCache has."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import kvik

# More would be a label of something else, and each is part of every key.
MAX_TAGS = 16
MAX_TAG_BYTES = 256

LMCACHE_TAG = "lmcache.tag."
# LMCache's names in `kv_transfer_params`, by the field of `Controls` that they set.
LMCACHE_NAMES = {"lmcache.skip_save": "skip_save", "lmcache.ttl": "ttl_s"}


@dataclass(frozen=True)
class Controls:
    """The controls of one request."""

    # Load nothing from the store.
    skip_load: bool = False
    # Save nothing to the store.
    skip_save: bool = False
    # Seconds for which what is saved is not evicted from memory.
    pin_s: float | None = None
    # Seconds after which what is saved is not served any more.
    ttl_s: float | None = None
    # `low`: what is saved leaves before others.
    priority: str = "normal"
    # Requests share KV with requests of the same tags only.
    tags: tuple[tuple[str, str], ...] = ()

    @classmethod
    def read(cls, transfer_params: dict[str, Any] | None) -> "Controls":
        """The controls in the `kv_transfer_params` of a request.

        Raises `InvalidValueError` where one of them is wrong. Names of other connectors are left alone.
        """
        if not transfer_params:
            return NO_CONTROLS
        transfer_params = object_of("kv_transfer_params", transfer_params)
        given = object_of("kvik", transfer_params.get("kvik"))
        tags = object_of("tags", given.pop("tags", None))
        for name, value in transfer_params.items():
            if name.startswith(LMCACHE_TAG):
                tags.setdefault(name.removeprefix(LMCACHE_TAG), value)
            elif (field := LMCACHE_NAMES.get(name)) is not None:
                given.setdefault(field, value)
        unknown = sorted(given.keys() - READERS.keys())
        if unknown:
            raise kvik.InvalidValueError(f"unknown: {', '.join(unknown)}; allowed: {', '.join(READERS)}, tags")
        if not given and not tags:
            return NO_CONTROLS
        read = {name: READERS[name](name, value) for name, value in given.items() if value is not None}
        return replace(NO_CONTROLS, **read, tags=tags_of(tags))

    def extra_keys(self) -> list[tuple[int, bytes]]:
        """What the tags add to the keys of all chunks."""
        return [(0, f"tag\0{len(name.encode())}\0{name}{value}".encode()) for name, value in self.tags]


NO_CONTROLS = Controls()


def object_of(name: str, value: Any) -> dict[str, Any]:
    """A copy of an object; an empty one where nothing is given."""
    if not value:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise refused(name, value, "an object of names and values")
    return dict(value)


def flag_of(name: str, value: Any) -> bool:
    """LMCache's clients send words too."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise refused(name, value, "true, false")


def seconds_of(name: str, value: Any) -> float:
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise refused(name, value, "more than 0 seconds")
    return seconds


def priority_of(name: str, value: Any) -> str:
    if value not in ("normal", "low"):
        raise refused(name, value, "normal, low")
    return value


READERS: dict[str, Callable[[str, Any], Any]] = {
    "skip_load": flag_of,
    "skip_save": flag_of,
    "pin_s": seconds_of,
    "ttl_s": seconds_of,
    "priority": priority_of,
}


def tags_of(tags: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    if len(tags) > MAX_TAGS:
        raise refused("tags", f"{len(tags)} of them", f"at most {MAX_TAGS}")
    for name, value in tags.items():
        if not isinstance(value, str) or not name or n_bytes(name) + n_bytes(value) > MAX_TAG_BYTES:
            raise refused(f"tag {name}", value, f"a name and a text, together at most {MAX_TAG_BYTES} bytes")
    return tuple(sorted(tags.items()))


def n_bytes(text: str) -> float:
    """The length of a text in UTF-8; endless where it has none, as half of a pair of surrogates."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return math.inf


def refused(name: str, value: Any, allowed: str) -> kvik.InvalidValueError:
    return kvik.InvalidValueError(f"`{name}` is {value!r}; allowed: {allowed}")
