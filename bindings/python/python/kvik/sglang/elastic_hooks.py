"""Registers the elastic memory with SGLang's hooks."""

import dataclasses
import functools
import logging
import pkgutil
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

import kvik
from kvik.sglang.elastic_allocator import ElasticAllocator, ElasticPagedAllocator, ElasticTokenAllocator
from kvik.sglang.elastic_pages import ElasticPages
from kvik.sglang.elastic_pool import create_buffers
from kvik.sglang.elastic_settings import ElasticSettings

logger = logging.getLogger(f"sglang.{__name__}")

POOLS = "sglang.srt.mem_cache.memory_pool"
ALLOCATORS = "sglang.srt.mem_cache.allocator"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
POOL_STATS = "sglang.srt.managers.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver.get_pool_stats"

# Without one of these hooks pages would be used that have no memory.
HOOKED = (
    f"{ALLOCATORS}.token.TokenToKVPoolAllocator",
    f"{ALLOCATORS}.paged.PagedTokenToKVPoolAllocator",
    f"{SCHEDULER}.__init__",
    f"{SCHEDULER}.get_next_batch_to_run",
)


def register(settings: ElasticSettings) -> None:
    """Registers all hooks; SGLang applies them before it makes a pool."""
    ElasticAllocator.cache_bytes = settings.cache_bytes
    create = functools.partial(around_create_buffers, settings)
    HookRegistry.register(f"{POOLS}.MHATokenToKVPool._create_buffers", create, HookType.AROUND)
    HookRegistry.register(f"{POOLS}.MLATokenToKVPool._create_buffers", create, HookType.AROUND)
    HookRegistry.register(HOOKED[0], ElasticTokenAllocator, HookType.REPLACE)
    HookRegistry.register(HOOKED[1], ElasticPagedAllocator, HookType.REPLACE)
    HookRegistry.register(f"{SCHEDULER}.__init__", after_start, HookType.AFTER)
    HookRegistry.register(f"{SCHEDULER}.get_next_batch_to_run", before_step, HookType.BEFORE)
    HookRegistry.register(f"{SCHEDULER}.update_running_batch", around_decode, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.on_idle", before_idle, HookType.BEFORE)
    HookRegistry.register(POOL_STATS, after_pool_stats, HookType.AFTER)


def around_create_buffers(settings: ElasticSettings, create: Callable[[Any], None], pool: Any) -> None:
    refuse_missing_hooks()
    create_buffers(settings, create, pool)


def refuse_missing_hooks() -> None:
    """SGLang goes on without a hook that it cannot apply; a pool without the others would have no memory behind its pages."""
    missing = []
    for target in HOOKED:
        hooked = pkgutil.resolve_name(target)
        is_class = isinstance(hooked, type)
        if not (issubclass(hooked, ElasticAllocator) if is_class else hasattr(hooked, "__wrapped__")):
            missing.append(target)
    if missing:
        raise kvik.InvalidValueError(f"SGLang has no hook on {', '.join(missing)}; allowed with elastic memory: versions from 0.5.23 on")


def pages_of(owner: Any) -> ElasticPages | None:
    """The pages of the allocator of a scheduler, or of a part of it."""
    return getattr(owner.token_to_kv_pool_allocator, "pages", None)


def after_start(_: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Ends the start where the memory would not be under the allocator, or ranks would have to agree on it."""
    del args, kwargs
    allocator = scheduler.token_to_kv_pool_allocator
    n_ranks = get_parallel().tp_size * get_parallel().pp_size
    reasons = {
        f"the allocator is {type(allocator).__name__} of {type(allocator.get_kvcache()).__name__}": pages_of(scheduler) is None,
        f"there are {n_ranks} ranks": n_ranks > 1,
        "prompts and answers are on different engines": scheduler.disaggregation_mode.name != "NULL",
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise kvik.InvalidValueError(
                f"{reason}; allowed with elastic memory: one rank, no disaggregation, one pool of MHATokenToKVPool or MLATokenToKVPool"
            )
    pages = pages_of(scheduler)
    logger.info(
        "kvik: memory is behind the KV that is needed: %d of %d bytes are taken, in steps of %d bytes and %d tokens",
        pages.memory.taken_bytes,
        len(pages.memory.pages.slabs) * pages.memory.slab_bytes,
        pages.memory.slab_bytes,
        pages.slab_tokens,
    )


def before_step(scheduler: Any, *args: Any, **kwargs: Any) -> None:
    del args, kwargs
    pages = pages_of(scheduler)
    if pages is None:
        return
    is_waiting = len(scheduler.waiting_queue) > 0 or scheduler.chunked_req is not None
    is_running = not scheduler.running_batch.is_empty()
    if not is_waiting and not is_running:
        # SGLang's loop comes here without requests too, and then to `before_idle`.
        return
    pages.step(scheduler.tree_cache, is_starved=not is_running)
    if pages.asks_again():
        # SGLang looks at waiting requests again when a running one ends; memory also comes from other engines.
        scheduler.running_batch.batch_is_full = False


def around_decode(update: Callable[[Any, Any], Any], scheduler: Any, batch: Any) -> Any:
    """Skips the step of a request that is alone and finds no memory: SGLang would abort it."""
    pages = pages_of(scheduler)
    if pages is not None and batch.batch_size() == 1 and not batch.check_decode_mem():
        pages.note_stalled()
        return None
    return update(scheduler, batch)


def before_idle(scheduler: Any) -> None:
    pages = pages_of(scheduler)
    if pages is not None and scheduler.is_fully_idle():
        pages.idle(scheduler.tree_cache)


def after_pool_stats(stats: Any, observer: Any) -> Any:
    """Counts what the balloon holds as available, as SGLang's search for leaks and its metrics expect it."""
    pages = pages_of(observer)
    if pages is None:
        return None
    n_available = stats.full_available_size + pages.held_tokens
    n_used = stats.full_num_used - pages.held_tokens
    return dataclasses.replace(
        stats,
        full_available_size=n_available,
        full_num_used=n_used,
        full_token_usage=n_used / stats.full_capacity,
    )
