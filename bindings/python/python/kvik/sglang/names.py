"""What keeps the pages of different engines apart."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

import kvik
from kvik.sglang.settings import Settings
from kvik.weights import weights_digest

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

# The element types that the store knows by name; any other is bytes, and its name is part of the layout.
DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}

# The store finds a page if all ranks have theirs, and counts so many.
MAX_RANKS = 64

# Arguments of the server that change the KV of a token.
MODEL_ARGUMENTS = (
    "revision",
    "quantization",
    "quantization_param_path",
    "modelopt_quant",
    "rl_quant_profile",
    "dtype",
    "load_format",
    "model_impl",
    "model_checksum",
    "context_length",
    "json_model_override_args",
    # The host pool may have layers of the draft model too.
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_model_quantization",
    "speculative_draft_load_format",
)
LAYOUT_ARGUMENTS = ("kv_cache_dtype", "speculative_draft_kv_cache_dtype", "attention_backend")

# Attributes of a host pool that say how its pages are put together.
POOL_ATTRIBUTES = (
    "layout",
    "dtype",
    "page_size",
    "layer_num",
    "target_layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_cache_dim",
    "head_group_num",
    "storage_format_tag",
)

# Pools that every rank of a model with replicated KV has a part of its own of, unless they are replicated themselves.
RANKED_POOLS = frozenset({PoolName.MAMBA, PoolName.DRAFT, PoolName.DRAFT_SWA})


@dataclass(frozen=True)
class PageNames:
    """The namespace of a pool's pages, and the part that this rank has of each."""

    model: str
    layout: str
    dtype: str
    rank: int = 0
    n_ranks: int = 1

    def for_self_test(self) -> "PageNames":
        return PageNames(self.model, f"{self.layout}/self-test/rank={self.rank}", self.dtype)

    def for_flat_pages(self) -> "PageNames":
        """For pages whose bytes are in the order of SGLang's flat tensors."""
        return PageNames(self.model, f"{self.layout}/flat", self.dtype, self.rank, self.n_ranks)


def page_names(config: "HiCacheStorageConfig", settings: Settings, pool: Any, pool_name: str) -> PageNames:
    """Names under which only pages with the same meaning of every byte are found."""
    arguments = server_arguments()
    is_replicated = is_replicated_pool(config, pool, pool_name)
    version = ".".join(sglang.__version__.split("+")[0].split(".")[:3])
    parts = [f"sglang={version}", f"pool={pool_name}", f"class={type(pool).__name__}"]
    parts += [f"{name}={getattr(pool, name)}" for name in POOL_ATTRIBUTES if hasattr(pool, name)]
    parts += [f"device={layout}" for layout in device_layouts(pool)]
    parts += [f"{name}={getattr(arguments, name, None)}" for name in LAYOUT_ARGUMENTS]
    parts.append(f"tp={'replicated' if is_replicated else config.tp_size}")
    parts.append(f"pp={config.pp_rank}of{config.pp_size}")
    parts.append(f"cp={config.attn_cp_size}/lcm={config.tp_lcm_size}/split={config.should_split_heads}")
    # A page is found if all ranks of this node have their parts. Pipeline stages have other layers, so each has a namespace;
    # SGLang takes what all of them have.
    rank, n_ranks = (0, 1) if is_replicated else (config.tp_rank, config.tp_size)
    rank, n_ranks = rank * config.attn_cp_size + config.attn_cp_rank, n_ranks * config.attn_cp_size
    if getattr(arguments, "nnodes", 1) > 1 or n_ranks > MAX_RANKS:
        # The store of a node has only the parts of its own ranks: each is found alone.
        parts.append(f"rank={rank}of{n_ranks}")
        rank, n_ranks = 0, 1
    return PageNames(
        model=model_name(config, settings, arguments),
        layout="/".join(parts),
        dtype=DTYPES.get(getattr(pool, "dtype", None), "u8"),
        rank=rank,
        n_ranks=n_ranks,
    )


def device_layouts(pool: Any) -> list[str]:
    """The orders of axes in the device's memory, from which a page is copied as it is."""
    return sorted({str(info.buffers.layout) for info in getattr(pool, "_buffer_infos", ())})


def is_replicated_pool(config: "HiCacheStorageConfig", pool: Any, pool_name: str) -> bool:
    """Whether all tensor-parallel ranks have the same bytes in a pool, so that one of them writes for all."""
    if not config.is_mla_model:
        return False
    return pool_name not in RANKED_POOLS or isinstance(pool, MLATokenToKVPoolHost)


def server_arguments() -> Any:
    """The arguments of SGLang's server, as it has resolved them; `None` outside of one."""
    try:
        from sglang.srt.runtime_context import get_context

        return SimpleNamespace(**get_context().resolved_server_args_dict())
    except (ImportError, RuntimeError, ValueError, AttributeError, LookupError):
        return None


def weight_version() -> str:
    """The name of the weights that SGLang has loaded last; they may be changed while it runs."""
    try:
        from sglang.srt.runtime_context import get_serving

        return str(get_serving().weight_version)
    except (ImportError, RuntimeError, ValueError, AttributeError, LookupError):
        return ""


def model_name(config: "HiCacheStorageConfig", settings: Settings, arguments: Any) -> str:
    """The model with what distinguishes its weights: arguments of the server, and its files where they are on this node."""
    model = getattr(arguments, "model_path", None) or config.model_name
    if not model:
        raise kvik.InvalidValueError("the model has no name; allowed: --model-path or --served-model-name")
    folder = model_folder(model, getattr(arguments, "revision", None))
    parts = [folder.resolve().name if folder == Path(model) else model, str(config.model_name), str(settings.model)]
    parts += [str(getattr(arguments, name, None)) for name in MODEL_ARGUMENTS]
    parts.append(digest_of_files(folder))
    # SGLang's keys name an adapter by its path, whatever is there.
    parts += [digest_of_files(model_folder(path, None)) for path in adapter_paths(arguments)]
    return "|".join(parts)


def adapter_paths(arguments: Any) -> list[str]:
    """Where the adapters lie that the server is started with."""
    adapters = getattr(arguments, "lora_paths", None) or []
    if isinstance(adapters, dict):
        adapters = adapters.values()
    paths = [adapter.get("lora_path") if isinstance(adapter, dict) else adapter for adapter in adapters]
    return sorted(str(getattr(path, "lora_path", path)).rpartition("=")[2] for path in paths)


def model_folder(model: str, revision: str | None) -> Path | None:
    """Where the files of a model are on this node."""
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import try_to_load_from_cache

        file = try_to_load_from_cache(model, "config.json", revision=revision)
    except (ImportError, ValueError):
        return None
    return Path(file).parent if isinstance(file, str) else None


def digest_of_files(folder: Path | None) -> str:
    """A digest of the configuration, and of lengths and samples of weight files, of a model or an adapter."""
    if folder is None:
        return "not-here"
    digest = hashlib.sha256()
    for config in (folder / "config.json", folder / "adapter_config.json"):
        if not config.is_file():
            continue
        entries = json.loads(config.read_text())
        # Where it was loaded from, and with which version, does not change the KV.
        for name in ("_name_or_path", "transformers_version"):
            entries.pop(name, None)
        digest.update(json.dumps(entries, sort_keys=True).encode())
    digest.update(weights_digest(folder))
    return digest.hexdigest()[:32]
