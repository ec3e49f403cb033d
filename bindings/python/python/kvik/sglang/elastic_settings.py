"""Settings of the elastic memory below SGLang."""

import json
from dataclasses import dataclass

import kvik
from kvik.elastic.sizes import size_of

VARIABLE = "KVIK_SGLANG_ELASTIC"

# Pages of memory are whole numbers of these.
UNIT_BYTES = 2 << 20


@dataclass(frozen=True)
class ElasticSettings:
    """The entries of the object in `KVIK_SGLANG_ELASTIC`, with their defaults; `{}` has all of them."""

    # The name under which engines share the memory of a device (`kvctl`); without it the engine has a budget of its own.
    group: str | None = None
    # The most memory that is held, in bytes or such as `20GiB`; default: all of SGLang's KV memory.
    limit: int | str | None = None
    # Memory that is kept for the prefix cache when no request needs it, in bytes or such as `4GiB`.
    cache: int | str = 0
    # The unit of memory in one layer, a multiple of 2 MiB.
    page: int | str = UNIT_BYTES
    # Where the ledger of the devices is.
    directory: str = "/dev/shm"

    @classmethod
    def read(cls, text: str) -> "ElasticSettings":
        try:
            given = json.loads(text)
        except ValueError:
            given = None
        if not isinstance(given, dict):
            raise kvik.InvalidValueError(f"`{VARIABLE}` is {text}; allowed: an object in JSON")
        unknown = sorted(given.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            allowed = ", ".join(cls.__dataclass_fields__)
            raise kvik.InvalidValueError(f"`{VARIABLE}` has {', '.join(unknown)}; allowed: {allowed}")
        settings = cls(**given)
        if settings.group is not None and not isinstance(settings.group, str):
            raise kvik.InvalidValueError(f"`group` is {settings.group!r}; allowed: a name")
        if settings.page_bytes == 0 or settings.page_bytes % UNIT_BYTES != 0:
            raise kvik.InvalidValueError(f"`page` is {settings.page}; allowed: multiples of 2MiB")
        # Sizes that are no sizes are named here.
        _ = settings.limit_bytes, settings.cache_bytes
        return settings

    @property
    def page_bytes(self) -> int:
        return size_of("page", self.page)

    @property
    def limit_bytes(self) -> int | None:
        return None if self.limit is None else size_of("limit", self.limit)

    @property
    def cache_bytes(self) -> int:
        return size_of("cache", self.cache)
