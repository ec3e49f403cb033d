"""Settings of the connector, and what keeps the KV of different engines apart."""

import hashlib
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm

import kvik
from kvik.weights import weights_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

DEFAULT_SOCKET = "/run/kvik/store.sock"

# Pages of memory are whole numbers of these.
UNIT_BYTES = 2 << 20

# The element types that the store knows by name; any other is bytes, and its name is part of the layout.
DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Settings:
    """The entries of `kv_connector_extra_config`, with their defaults."""

    # Socket of the store daemon.
    socket: str = DEFAULT_SOCKET
    # File with the token that the daemon wants.
    token_file: str | None = None
    # What is stored: `prompts`, `all` (answers too, for the next turn) or `nothing`.
    save: str = "all"
    # Whether KV of slow tiers is computed where that is faster (`auto`), or all that is found is loaded (`load`).
    planner: str = "auto"
    # Whether KV in the store's memory is loaded inside of the step that needs it, layer by layer: where nothing else would wait for
    # it (`auto`), `always`, or `never`.
    layerwise: str = "auto"
    # Longest time in milliseconds that one call of the scheduler waits for a lookup; it asks again in the next step.
    lookup_wait_ms: float = 2.0
    # Longest time in seconds after which a request computes what it still waits for.
    lookup_timeout_s: float = 2.0
    # Threads that copy; default: half of the processors, at most 8.
    copy_threads: int | None = None
    # Time in seconds for the daemon to answer.
    timeout_s: float = 10.0
    # Longest time in seconds for which a request may pin its chunks in memory; 0: not at all. Clients share that memory.
    max_pin_s: float = 0.0
    # Whether a block is written, read back and compared at the start.
    self_test: bool = True
    # Whether KV is kept in a store; without it there is only the elastic memory.
    store: bool = True
    # Whether memory is behind the blocks that are needed only.
    elastic: bool = False
    # The name under which engines share the memory of a device (`kvctl`); without it the engine has a budget of its own.
    elastic_group: str | None = None
    # The most memory that a rank holds, in bytes or such as `20GiB`; default: all of vLLM's KV memory.
    elastic_limit: int | str | None = None
    # Memory that is kept for the prefix cache when no request needs it, in bytes or such as `4GiB`; others take it when they
    # need it.
    elastic_cache: int | str = 0
    # Memory that an idle engine keeps for its next requests, as above. Default: none on a CPU; on a GPU what a step of vLLM
    # computes at most, up to an eighth of what the engine may hold.
    elastic_reserve: int | str | None = None
    # The unit of memory in one layer, a multiple of 2 MiB. Default: 2 MiB on a CPU; on a GPU up to 16 MiB, as long as a unit in all
    # layers is at most a part in 32 of what the engine may hold.
    elastic_page: int | str | None = None
    # Where the ledger of the devices is.
    elastic_directory: str = "/dev/shm"

    @classmethod
    def read(cls, extra_config: dict[str, Any]) -> "Settings":
        unknown = sorted(extra_config.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            allowed = ", ".join(cls.__dataclass_fields__)
            raise kvik.InvalidValueError(f"`kv_connector_extra_config` has {', '.join(unknown)}; allowed: {allowed}")
        settings = cls(**extra_config)
        if settings.save not in ("prompts", "all", "nothing"):
            raise kvik.InvalidValueError(f"`save` is {settings.save}; allowed: prompts, all, nothing")
        if settings.planner not in ("auto", "load"):
            raise kvik.InvalidValueError(f"`planner` is {settings.planner}; allowed: auto, load")
        if settings.layerwise not in ("auto", "always", "never"):
            raise kvik.InvalidValueError(f"`layerwise` is {settings.layerwise}; allowed: auto, always, never")
        settings.check_elastic()
        return settings

    def check_elastic(self) -> None:
        for name in ("store", "elastic"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise kvik.InvalidValueError(f"`{name}` is {value!r}; allowed: true, false")
        if not self.elastic:
            fields = ("elastic_group", "elastic_limit", "elastic_cache", "elastic_reserve", "elastic_page", "elastic_directory")
            given = [name for name in fields if getattr(self, name) != getattr(Settings, name)]
            if given:
                raise kvik.InvalidValueError(f"`{given[0]}` is {getattr(self, given[0])}; allowed: only with `elastic`: true")
            if not self.store:
                raise kvik.InvalidValueError("`store` is false; allowed: only with `elastic`: true")
        elif self.elastic_group is not None and not isinstance(self.elastic_group, str):
            raise kvik.InvalidValueError(f"`elastic_group` is {self.elastic_group!r}; allowed: a name")

    def token(self) -> str | None:
        return None if self.token_file is None else Path(self.token_file).read_text().rstrip()


@dataclass(frozen=True)
class Geometry:
    """How the KV of a model lies in this engine's memory."""

    layer_names: tuple[str, ...]
    block_tokens: int
    n_blocks: int
    # Bytes of a block in one layer.
    page_bytes: int
    dtype: torch.dtype
    layout: str

    @classmethod
    def read(cls, config: "VllmConfig", cache: "KVCacheConfig") -> "Geometry":
        if len(cache.kv_cache_groups) != 1:
            n_groups = len(cache.kv_cache_groups)
            raise kvik.InvalidValueError(
                f"the model has {n_groups} groups of KV; allowed: 1 (--disable-hybrid-kv-cache-manager)"
            )
        group = cache.kv_cache_groups[0]
        spec = group.kv_cache_spec
        if not hasattr(spec, "dtype"):
            raise kvik.InvalidValueError(f"the KV is of {type(spec).__name__}; allowed: layers of one kind")
        layout = getattr(cache, "kv_cache_layout", None) or older_layout(config)
        return cls(
            layer_names=tuple(group.layer_names),
            block_tokens=spec.block_size,
            n_blocks=cache.num_blocks,
            page_bytes=spec.page_size_bytes,
            dtype=spec.dtype,
            layout=f"{type(spec).__name__}/{layout}",
        )

    @property
    def token_layer_bytes(self) -> int:
        return self.page_bytes // self.block_tokens

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all layers."""
        return self.token_layer_bytes * len(self.layer_names)


def older_layout(config: "VllmConfig") -> str:
    """The order of axes in versions of vLLM that do not say it with the KV's configuration."""
    try:
        from vllm.config import set_current_vllm_config
        from vllm.v1.attention.backends.utils import get_kv_cache_layout
    except ImportError:
        return "unknown"
    # A scheduler in a process of its own has no current configuration.
    with set_current_vllm_config(config):
        return get_kv_cache_layout()


def attach(config: "VllmConfig", settings: Settings, geometry: Geometry, rank: int, **other: Any) -> kvik.Store:
    """The session of one rank with the store; `other` changes what is said of the engine."""
    options = {
        "model": model_name(config),
        "layout": layout_name(config, geometry),
        "dtype": DTYPES.get(geometry.dtype, "u8"),
        "n_layers": len(geometry.layer_names),
        "token_layer_bytes": geometry.token_layer_bytes,
        "block_tokens": geometry.block_tokens,
        "rank": rank,
        "n_ranks": config.parallel_config.world_size,
        "token": settings.token(),
        "timeout_s": settings.timeout_s,
        "n_copy_threads": settings.copy_threads,
        # Where the engine computes on the processors that copy, it goes first.
        "idle_saves": config.device_config.device_type == "cpu",
    }
    return kvik.Store.attach(settings.socket, **(options | other))


def model_name(config: "VllmConfig") -> str:
    """The model with what distinguishes its weights: revision, configuration, and for a folder its files."""
    model = config.model_config
    digest = hashlib.sha256()
    hf_config = model.hf_config.to_dict()
    # Where it was loaded from, and with which version, does not change the KV.
    for name in ("_name_or_path", "transformers_version"):
        hf_config.pop(name, None)
    digest.update(json.dumps(hf_config, sort_keys=True, default=str).encode())
    folder = Path(model.model)
    name = model.model
    # The commit that a name of a hub stood for when it was loaded.
    revision = getattr(model.hf_config, "_commit_hash", None) or model.revision
    if folder.is_dir():
        name = folder.resolve().name
        digest.update(weights_digest(folder))
    parts = [name, str(revision), str(model.quantization), str(model.dtype), digest.hexdigest()[:32]]
    return "|".join(parts)


def layout_name(config: "VllmConfig", geometry: Geometry) -> str:
    """Everything that changes the bytes of a block beside the model."""
    parallel = config.parallel_config
    version = ".".join(vllm.__version__.split("+")[0].split(".")[:2])
    parts = [
        f"vllm={version}",
        f"kv={geometry.layout}",
        f"dtype={geometry.dtype}",
        f"cache_dtype={config.cache_config.cache_dtype}",
        f"tp={parallel.tensor_parallel_size}",
        f"pp={parallel.pipeline_parallel_size}",
    ]
    device = str(config.device_config.device_type)
    parts.append(f"device={device}")
    if device == "cpu":
        # The order inside of a block follows the processor's instructions.
        parts.append(f"isa={platform.machine()}/{torch.backends.cpu.get_cpu_capability()}")
    return "/".join(parts)
