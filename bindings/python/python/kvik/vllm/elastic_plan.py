"""What both halves of the elastic memory know before they meet: they compute the same from the same settings."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import kvik
from kvik.elastic.sizes import size_of
from kvik.elastic.slabs import Slabs
from kvik.vllm.allocation import is_one_buffer
from kvik.vllm.settings import UNIT_BYTES, Geometry, Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

# Blocks that vLLM gives each request of its warm-up on a GPU, at most.
WARM_UP_BLOCKS = 4

# The largest unit that is chosen: a call of the driver costs the same for 2 and for 16 MiB.
MOST_UNIT_BYTES = 16 << 20

# An idle engine keeps a step's worth of memory, and at most a part in so many of what it may hold.
MOST_RESERVE_PART = 8

# The least number of units in all layers that an engine can hold, so that small requests leave memory to others.
LEAST_SLABS = 32


@dataclass(frozen=True)
class ElasticPlan:
    """The shape of the memory."""

    slabs: Slabs
    page_bytes: int
    limit_bytes: int | None
    # Slabs that are kept for the prefix cache.
    cache_slabs: int
    # Slabs that an idle engine keeps for its next requests.
    reserve_slabs: int
    group: str | None
    directory: str
    block_tokens: int
    max_requests: int
    # The most tokens that are computed in a step.
    max_step_tokens: int
    # Blocks of a request of the greatest length.
    n_request_blocks: int
    # Blocks that are used before the first step, block 0 among them.
    n_warm_up_blocks: int
    # Workers of this engine, each of which reports.
    n_ranks: int

    @property
    def kept_slabs(self) -> int:
        """The most slabs that are kept where no request needs them."""
        return max(self.cache_slabs, self.reserve_slabs)

    @classmethod
    def read(
        cls, config: "VllmConfig", settings: Settings, geometry: Geometry, cache: "KVCacheConfig"
    ) -> "ElasticPlan":
        parallel = config.parallel_config
        if parallel.world_size > 1 and parallel.distributed_executor_backend == "external_launcher":
            # Its workers are engines of their own, which do not see the reports of the others.
            raise kvik.InvalidValueError("`elastic` is true; allowed with the executor `external_launcher`: one rank")
        limit_bytes = None if settings.elastic_limit is None else size_of("elastic_limit", settings.elastic_limit)
        is_gpu = config.device_config.device_type != "cpu"
        if settings.elastic_page is not None:
            page_bytes = size_of("elastic_page", settings.elastic_page)
        elif is_gpu:
            page_bytes = gpu_page_bytes(geometry, limit_bytes, is_one_buffer(cache))
        else:
            page_bytes = UNIT_BYTES
        if page_bytes == 0 or page_bytes % UNIT_BYTES != 0:
            raise kvik.InvalidValueError(f"`elastic_page` is {settings.elastic_page}; allowed: multiples of 2MiB")
        slabs = Slabs.of_pages(geometry.n_blocks, geometry.page_bytes, page_bytes)
        slab_bytes = slabs.slab_blocks * geometry.page_bytes * len(geometry.layer_names)
        max_requests = config.scheduler_config.max_num_seqs
        max_step_tokens = config.scheduler_config.max_num_batched_tokens
        if settings.elastic_reserve is not None:
            reserve_slabs = size_of("elastic_reserve", settings.elastic_reserve) // slab_bytes
        elif is_gpu:
            most_slabs = len(slabs) if limit_bytes is None else min(len(slabs), limit_bytes // slab_bytes)
            step_slabs = slabs.holding(-(-max_step_tokens // geometry.block_tokens))
            reserve_slabs = min(step_slabs, most_slabs // MOST_RESERVE_PART)
        else:
            reserve_slabs = 0
        return cls(
            slabs=slabs,
            page_bytes=page_bytes,
            limit_bytes=limit_bytes,
            cache_slabs=size_of("elastic_cache", settings.elastic_cache) // slab_bytes,
            reserve_slabs=reserve_slabs,
            group=settings.elastic_group,
            directory=settings.elastic_directory,
            block_tokens=geometry.block_tokens,
            max_requests=max_requests,
            max_step_tokens=max_step_tokens,
            n_request_blocks=-(-config.model_config.max_model_len // geometry.block_tokens),
            n_warm_up_blocks=1 + (WARM_UP_BLOCKS * max_requests if is_gpu else 0),
            n_ranks=parallel.world_size,
        )


def gpu_page_bytes(geometry: Geometry, limit_bytes: int | None, is_one_buffer: bool) -> int:
    """The largest page of which an engine can hold enough in every layer.

    Where layers lie in one buffer, pages larger than the least one are not shared by two of them.
    """
    n_layers = len(geometry.layer_names)
    layer_bytes = geometry.n_blocks * geometry.page_bytes
    most_bytes = n_layers * layer_bytes
    if limit_bytes is not None:
        most_bytes = min(most_bytes, limit_bytes)
    page_bytes = MOST_UNIT_BYTES
    while page_bytes > UNIT_BYTES and (
        page_bytes * n_layers * LEAST_SLABS > most_bytes or (is_one_buffer and layer_bytes % page_bytes != 0)
    ):
        page_bytes //= 2
    return page_bytes


def n_spare_tokens(config: "VllmConfig", geometry: Geometry) -> int:
    """Tokens for which a running request has blocks ahead: a block, and what is computed in advance."""
    speculative = config.speculative_config
    n_speculative = 0 if speculative is None else speculative.num_speculative_tokens or 0
    return geometry.block_tokens + n_speculative
