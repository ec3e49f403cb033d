"""Models whose layers have several groups of KV, such as full attention beside windows, or windows alone: what each group
keeps of a sequence.

Groups take blocks from one pool, and each has a table of its own. In the store a chunk of a sequence has a part for each group,
and the group's number is in the part's key. Groups with windows keep the parts behind which a sequence could go on, so a
sequence is found where the full groups have all of it and the others their window.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.outputs import KVConnectorOutput

import kvik
from kvik.vllm.settings import Geometry, Settings, attach, older_layout
from kvik.windows import Window

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

# The bytes of a chunk in `Chain.pack`: its name and its digest.
PACKED_CHUNK_BYTES = 48

ALLOWED_KINDS = "FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec"

ONE_GROUP = ", or one group of full attention (--disable-hybrid-kv-cache-manager)"

# Since 0.30, vLLM can be told that the load of a request with several groups of KV failed. Before, a connector must not say that it
# supports them, and vLLM gives all layers the blocks of full attention.
KNOWS_FAILED_LOADS = "failed_recving" in KVConnectorOutput.__dataclass_fields__


@dataclass(frozen=True)
class Group:
    """Layers that share a table of blocks."""

    number: int
    window: Window
    geometry: Geometry

    @property
    def shape(self) -> tuple[object, ...]:
        """Groups of one shape share a session with the store."""
        geometry = self.geometry
        return len(geometry.layer_names), geometry.block_tokens, geometry.page_bytes, geometry.dtype


def has_windows(settings: Settings, cache: "KVCacheConfig") -> bool:
    """Whether there are several groups, or one of which vLLM frees blocks while a request runs. Without a store one such
    group is as any other."""
    if len(cache.kv_cache_groups) != 1:
        return KNOWS_FAILED_LOADS
    kinds = {base.__name__ for base in type(cache.kv_cache_groups[0].kv_cache_spec).__mro__}
    frees_blocks = bool(kinds & {"SlidingWindowSpec", "ChunkedLocalAttentionSpec", "RSWASpec"}) and settings.store
    if frees_blocks and not KNOWS_FAILED_LOADS:
        raise kvik.InvalidValueError(
            f"the KV is of {type(cache.kv_cache_groups[0].kv_cache_spec).__name__}; allowed: full attention, or vLLM 0.30"
        )
    return frees_blocks


def read_groups(config: "VllmConfig", settings: Settings, cache: "KVCacheConfig") -> tuple[Group, ...]:
    """The groups of a model that has several, or windows alone; raises `InvalidValueError` for what cannot be stored."""
    n_groups = len(cache.kv_cache_groups)
    if settings.elastic:
        raise kvik.InvalidValueError(
            f"`elastic` is true and the model has windows or several groups of KV; allowed: `elastic`: false{ONE_GROUP}"
        )
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size != 1:
            raise kvik.InvalidValueError(
                f"`{name}` is {size} and the model has windows or several groups of KV; allowed: 1{ONE_GROUP}"
            )
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    windows = [window_of(spec) for spec in specs]
    for spec in specs:
        if page_bytes_of(spec) % spec.block_size != 0:
            raise kvik.InvalidValueError(
                f"a block of {spec.block_size} tokens has {page_bytes_of(spec)} bytes in one layer; allowed: whole bytes a token"
            )
    layout = getattr(cache, "kv_cache_layout", None) or older_layout(config)
    # Which layers are in which group, and what is kept of each, is part of the namespace.
    digest = hashlib.sha256()
    for group, window in zip(cache.kv_cache_groups, windows, strict=True):
        digest.update(f"{window}{page_bytes_of(group.kv_cache_spec)}{list(group.layer_names)}\0".encode())
    name = f"groups={n_groups}:{digest.hexdigest()[:32]}/{layout}"
    return tuple(
        Group(
            number,
            window,
            Geometry(
                layer_names=tuple(group.layer_names),
                block_tokens=window.block_tokens,
                n_blocks=cache.num_blocks,
                page_bytes=page_bytes_of(group.kv_cache_spec),
                dtype=group.kv_cache_spec.dtype,
                layout=name,
            ),
        )
        for number, (group, window) in enumerate(zip(cache.kv_cache_groups, windows, strict=True))
    )


def window_of(spec: "KVCacheSpec") -> Window:
    """What layers of this kind read of a sequence."""
    # By the name of the class: what derives from it may keep other blocks.
    kind = type(spec).__name__
    if kind == "FullAttentionSpec":
        return Window(spec.block_size)
    if kind == "SlidingWindowSpec":
        # The next token is one of the window.
        reach_tokens = spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0)
        return Window(spec.block_size, reach_tokens=reach_tokens)
    if kind == "ChunkedLocalAttentionSpec":
        return Window(spec.block_size, section_tokens=spec.attention_chunk_size)
    raise kvik.InvalidValueError(f"a group of KV is of {kind}; allowed: {ALLOWED_KINDS}{ONE_GROUP}")


def page_bytes_of(spec: "KVCacheSpec") -> int:
    """Bytes of a block in one layer, without what pads it to the size of others."""
    return getattr(spec, "unpadded_page_size_bytes", None) or spec.page_size_bytes


def writes_before_orders(config: "VllmConfig", cache: "KVCacheConfig") -> bool:
    """Whether vLLM may write blocks of a step before it gives a worker the orders of the step.

    Its newer model runner does, where it fills blocks with zeros, and where it copies a block because a prefix ends in the middle
    of it. That happens where groups have blocks of several lengths, or vLLM compares parts of blocks.
    """
    lengths = {group.kv_cache_spec.block_size for group in cache.kv_cache_groups}
    has_parts = getattr(config.cache_config, "prefix_match_unit", None) is not None
    return len(lengths) > 1 or has_parts or getattr(cache, "needs_kv_cache_zeroing", True)


class GroupStores:
    """The sessions of one rank with the store: one for each shape of blocks, because a session has chunks of one size."""

    def __init__(self, config: "VllmConfig", settings: Settings, groups: Sequence[Group], rank: int) -> None:
        self.groups = groups
        self.by_shape: dict[tuple[object, ...], kvik.Store] = {}
        for group in groups:
            if group.shape not in self.by_shape:
                self.by_shape[group.shape] = attach(config, settings, group.geometry, rank)
        self.stores = [self.by_shape[group.shape] for group in groups]

    @property
    def first(self) -> kvik.Store:
        """The session that names the chunks of a sequence."""
        return self.stores[0]

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens of a chunk; `None` while a session has no daemon, or one whose chunks are not whole blocks of every group."""
        sizes = {store.chunk_tokens for store in self.by_shape.values()}
        if len(sizes) != 1:
            return None
        (chunk_tokens,) = sizes
        if chunk_tokens is None or any(chunk_tokens % group.window.block_tokens for group in self.groups):
            return None
        return chunk_tokens

    def part(self, group: int, keys: Sequence[bytes], chunk_tokens: int) -> kvik.Chain:
        """The parts of one group of some chunks."""
        number = group.to_bytes(2, "little")
        chain = self.stores[group].chain_of_keys([key + number for key in keys])
        if chain.n_tokens != len(keys) * chunk_tokens:
            raise kvik.StoreGoneError("the daemon came back with chunks of another length")
        return chain

    def close(self) -> None:
        for store in self.by_shape.values():
            store.close()


def keys_of(chain: kvik.Chain, chunk_tokens: int) -> list[bytes]:
    """What names the chunks of a sequence, with the digest of all their tokens; none where its chunks have another length."""
    if chain.n_tokens != len(chain) * chunk_tokens:
        return []
    packed = chain.pack(len(chain))
    head = len(packed) - len(chain) * PACKED_CHUNK_BYTES
    return [packed[start : start + PACKED_CHUNK_BYTES] for start in range(head, len(packed), PACKED_CHUNK_BYTES)]


def by_blocks(kv_caches: dict, n_blocks: int) -> dict:
    """The tensors of layers with one row for each of vLLM's blocks, where its kernels have smaller ones."""
    return {
        name: tensor if tensor.shape[0] == n_blocks else tensor.unflatten(0, (n_blocks, -1))
        for name, tensor in kv_caches.items()
    }
