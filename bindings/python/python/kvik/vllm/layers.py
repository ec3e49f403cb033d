"""Loads inside of a step, layer by layer: a layer is copied when its attention is about to read it.

vLLM takes such a load as done when it schedules the request, and puts its blocks into its prefix cache at once. So there is
one in a step at most, no other request begins in that step, and where the load fails, its blocks leave the prefix cache before
vLLM schedules again. What the step computed of the request is thrown away by vLLM, and is stored by nothing.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger

import kvik
from kvik.planner import Found
from kvik.vllm.metadata import LoadOrder
from kvik.vllm.settings import Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool

logger = init_logger(f"vllm.{__name__}")


def obstacle(config: "VllmConfig", settings: Settings, has_groups: bool) -> str | None:
    """Why this engine does not load inside of steps; `None` where it does. Raises `InvalidValueError` where it always should."""
    reason = reason_against(config, settings, has_groups)
    if reason is not None and settings.layerwise == "always":
        raise kvik.InvalidValueError(f"`layerwise` is always; allowed: auto, never ({reason})")
    return reason


def reason_against(config: "VllmConfig", settings: Settings, has_groups: bool) -> str | None:
    if settings.layerwise == "never":
        return "`layerwise` is never"
    if config.device_config.device_type != "cpu":
        return "the engine computes on a device: steps that run as one graph do not wait for layers"
    if config.parallel_config.pipeline_parallel_size != 1:
        return "steps of pipeline stages overlap"
    if config.scheduler_config.async_scheduling or getattr(config, "max_concurrent_batches", 1) > 1:
        return "vLLM schedules a step before it knows whether loads of the one before failed"
    if config.speculative_config is not None:
        return "layers of a draft model are computed after the step's loads are reported"
    if has_groups:
        return "a load of several groups of KV fails as a whole"
    if settings.elastic:
        return "memory is elastic"
    return None


@dataclass
class StepLoad:
    """A load inside of the step that computes its request."""

    request_id: str
    # The request's blocks, from the first one that is loaded on.
    block_ids: list[int]


class StepLoads:
    """The scheduler's view of loads inside of steps."""

    def __init__(self, settings: Settings) -> None:
        self.is_always = settings.layerwise == "always"
        self.block_pool: BlockPool | None = None
        # Of the step that is being scheduled.
        self.order: LoadOrder | None = None
        self.next: StepLoad | None = None
        # Of the step that was scheduled last.
        self.running: StepLoad | None = None

    @property
    def holds_others(self) -> bool:
        """Whether no other request may begin in the step that is being scheduled: it might take blocks that are not there yet."""
        return self.order is not None

    def takes(self, found: Found | None, n_found: int, n_tokens: int, n_requests: int) -> bool:
        """Whether `n_found` of the `n_tokens` of a request are to be loaded inside of its step."""
        if self.block_pool is None or found is None:
            return False
        # The step computes the last token, and would write into a block that is loaded.
        is_memory = n_found <= found.n_memory_tokens and n_found < n_tokens
        return is_memory and (self.is_always or n_requests == 1)

    def give(self, order: LoadOrder, block_ids: list[int]) -> None:
        """Takes the order of a request that is scheduled, with all its blocks."""
        self.order = order
        self.next = StepLoad(order.request_id, block_ids[order.first_block :])

    def scheduled(self) -> list[LoadOrder]:
        """The orders of the step that was scheduled."""
        orders = [] if self.order is None else [self.order]
        self.running, self.next, self.order = self.next, None, None
        return orders

    def is_of(self, request_id: str) -> bool:
        """Whether the step that was scheduled last loads for this request: it may fail still."""
        return self.running is not None and self.running.request_id == request_id

    def reported(self, invalid_block_ids: set[int]) -> str | None:
        """Takes what the workers made of the step; the request whose load failed. Nothing may take its blocks for computed."""
        load, self.running = self.running, None
        if load is None or not invalid_block_ids.intersection(load.block_ids):
            return None
        # With `recompute`, vLLM leaves them there until they are computed, which may take several steps or never happen.
        self.block_pool.evict_blocks(set(load.block_ids))
        return load.request_id


@dataclass
class RunningLayers:
    """A load that runs beside its step."""

    order: LoadOrder
    job: kvik.Job | None
    # When the step goes on without it.
    deadline: float
    # Whether a layer was not there when it was needed.
    is_lost: bool = False

    def rest_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def wait_for(self, n_layers: int) -> None:
        if not self.is_lost:
            self.is_lost = self.job is None or not self.job.wait_layers(n_layers, self.rest_s())

    def end(self) -> int:
        """Waits until nothing writes the blocks; how many of them can be used, from the first on."""
        if self.job is None:
            return 0
        if not self.job.wait(self.rest_s()):
            self.job.abandon()
            return 0
        n_loaded = self.job.result
        # Blocks that came later than their layers were read are right, and what was computed behind them is not.
        return 0 if self.is_lost and n_loaded == len(self.order.block_ids) else n_loaded


class LayerLoads:
    """A worker's loads inside of steps."""

    def __init__(self, store: kvik.Store, settings: Settings, layer_names: Sequence[str]) -> None:
        self.store = store
        self.settings = settings
        self.numbers = {name: number for number, name in enumerate(layer_names)}
        self.running: list[RunningLayers] = []
        # Layers that the engine has waited for in this step.
        self.waited: set[int] = set()
        # Whether all layers lie in memory in the same way; else nothing is loaded inside of steps.
        self.knows_layers = False
        # Whether the engine computes layers without waiting for them.
        self.skips_layers = False

    def begin(self, orders: Sequence[LoadOrder], memory: kvik.EngineMemory | None) -> None:
        deadline = time.monotonic() + self.settings.timeout_s
        for order in orders:
            chain = self.store.unpack(order.chain)
            job = None
            if chain is not None and memory is not None and self.knows_layers:
                # The engine's other threads stand still while this one waits: one that copies beside them would only delay them.
                job = self.store.start_load(
                    chain, order.first_block, memory, order.block_ids, by_layers=True, waiters_copy=True
                )
            load = RunningLayers(order, job, deadline)
            self.running.append(load)
            if self.skips_layers:
                load.wait_for(len(self.numbers))

    def wait_for_layer(self, layer_name: str) -> None:
        # Without a number it shares the KV of a layer before it.
        if not self.running or (number := self.numbers.get(layer_name)) is None:
            return
        self.waited.add(number)
        for load in self.running:
            load.wait_for(number + 1)

    def end_step(self) -> Iterator[tuple[LoadOrder, int]]:
        """Waits for what is left of the loads; how many blocks of each can be used, from the first on."""
        running, self.running = self.running, []
        has_waited, self.waited = len(self.waited) == len(self.numbers), set()
        for load in running:
            n_loaded = load.end()
            if not has_waited and not self.skips_layers:
                # It was computed with whatever was in the blocks.
                logger.warning("kvik: vLLM did not wait for all layers; whole loads are waited for from now on")
                self.skips_layers = True
                n_loaded = 0
            yield load.order, n_loaded
