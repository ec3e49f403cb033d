"""What both halves of the elastic memory know before they meet: they compute the same from the same settings."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import kvik
from kvik.elastic.sizes import size_of
from kvik.elastic.slabs import Slabs
from kvik.vllm.settings import UNIT_BYTES, Geometry, Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# Blocks that vLLM gives each request of its warm-up on a GPU, at most.
WARM_UP_BLOCKS = 4


@dataclass(frozen=True)
class ElasticPlan:
    """The shape of the memory."""

    slabs: Slabs
    page_bytes: int
    limit_bytes: int | None
    # Slabs that are kept for the prefix cache.
    cache_slabs: int
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

    @classmethod
    def read(cls, config: "VllmConfig", settings: Settings, geometry: Geometry) -> "ElasticPlan":
        page_bytes = size_of("elastic_page", settings.elastic_page)
        if page_bytes == 0 or page_bytes % UNIT_BYTES != 0:
            raise kvik.InvalidValueError(f"`elastic_page` is {settings.elastic_page}; allowed: multiples of 2MiB")
        limit = settings.elastic_limit
        slabs = Slabs.of_pages(geometry.n_blocks, geometry.page_bytes, page_bytes)
        slab_bytes = slabs.slab_blocks * geometry.page_bytes * len(geometry.layer_names)
        max_requests = config.scheduler_config.max_num_seqs
        is_gpu = config.device_config.device_type != "cpu"
        return cls(
            slabs=slabs,
            page_bytes=page_bytes,
            limit_bytes=None if limit is None else size_of("elastic_limit", limit),
            cache_slabs=size_of("elastic_cache", settings.elastic_cache) // slab_bytes,
            group=settings.elastic_group,
            directory=settings.elastic_directory,
            block_tokens=geometry.block_tokens,
            max_requests=max_requests,
            max_step_tokens=config.scheduler_config.max_num_batched_tokens,
            n_request_blocks=-(-config.model_config.max_model_len // geometry.block_tokens),
            n_warm_up_blocks=1 + (WARM_UP_BLOCKS * max_requests if is_gpu else 0),
        )
