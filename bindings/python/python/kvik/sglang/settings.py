"""Settings of the storage backend."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvik

DEFAULT_SOCKET = "/run/kvik/store.sock"

# What SGLang itself reads in the same object.
SGLANG_ENTRIES = frozenset(
    {
        "backend_name",
        "module_path",
        "class_name",
        "interface_v1",
        "prefetch_threshold",
        "prefetch_timeout_base",
        "prefetch_timeout_per_ki_token",
        "hicache_storage_pass_prefix_keys",
        "tp_lcm_size",
        "file_storage_path",
    }
)


@dataclass(frozen=True)
class Settings:
    """The entries of `--hicache-storage-backend-extra-config` that are kvik's, with their defaults."""

    # Socket of the store daemon.
    socket: str = DEFAULT_SOCKET
    # File with the token that the daemon wants.
    token_file: str | None = None
    # What else the weights are known by, such as the step of a training.
    model: str | None = None
    # Threads that copy; default: half of the processors, at most 8.
    copy_threads: int | None = None
    # Time in seconds for the daemon to answer.
    timeout_s: float = 10.0
    # Whether a page is written, read back and compared at the start.
    self_test: bool = True

    @classmethod
    def read(cls, extra_config: dict[str, Any]) -> "Settings":
        own = {name: value for name, value in extra_config.items() if name not in SGLANG_ENTRIES}
        unknown = sorted(own.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            allowed = ", ".join(cls.__dataclass_fields__)
            raise kvik.InvalidValueError(
                f"`--hicache-storage-backend-extra-config` has {', '.join(unknown)}; allowed for kvik: {allowed}"
            )
        return cls(**own)

    def token(self) -> str | None:
        return None if self.token_file is None else Path(self.token_file).read_text().rstrip()
