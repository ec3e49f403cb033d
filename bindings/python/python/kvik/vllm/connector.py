"""The connector that vLLM loads: `kv_connector_module_path` is `kvik.vllm`, `kv_connector` is `KvikConnector`."""

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger

import kvik
from kvik.planner import GroupsPlanner, Planner
from kvik.vllm.elastic_plan import ElasticPlan, n_spare_tokens
from kvik.vllm.elastic_scheduler import ElasticScheduler
from kvik.vllm.elastic_worker import ElasticWorker
from kvik.vllm.groups import KNOWS_FAILED_LOADS, Group, GroupStores, has_windows, read_groups, writes_before_orders
from kvik.vllm.groups_scheduler import GroupsScheduler
from kvik.vllm.groups_worker import GroupsWorker
from kvik.vllm.layers import StepLoads, obstacle
from kvik.vllm.metadata import KvikMetadata
from kvik.vllm.scheduler import SchedulerHalf
from kvik.vllm.self_test import run_group_tests, run_self_test
from kvik.vllm.settings import Geometry, Settings, attach
from kvik.vllm.stats import KvikPromMetrics, KvikStats
from kvik.vllm.worker import WorkerHalf

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")

BASES = (KVConnectorBase_V1, SupportsHMA) if KNOWS_FAILED_LOADS else (KVConnectorBase_V1,)


class KvikConnector(*BASES):
    """Keeps the KV of ended and running requests in the store of the node, and loads it for later ones. With `elastic`, there
    is memory behind the blocks that are needed only, and other engines of the device use the rest.

    Loads run in the background while other requests are computed, or beside the layers of their own. A load that fails is
    reported block by block, and vLLM computes those blocks if `kv_load_failure_policy` is `recompute`. Where layers have several
    groups of KV, such as windows beside full attention, a load that fails is computed whole. Without a daemon, vLLM goes on as
    without a connector, and the store is used as soon as the daemon is there.
    """

    def __init__(
        self, vllm_config: "VllmConfig", role: KVConnectorRole, kv_cache_config: "KVCacheConfig"
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.config = vllm_config
        self.settings = Settings.read(dict(vllm_config.kv_transfer_config.kv_connector_extra_config))
        # Empty where the model has one group, of which requests keep all blocks.
        self.groups: tuple[Group, ...] = ()
        if has_windows(self.settings, kv_cache_config):
            self.groups = read_groups(vllm_config, self.settings, kv_cache_config)
        self.geometry = self.groups[0].geometry if self.groups else Geometry.read(vllm_config, kv_cache_config)
        self.store: kvik.Store | None = None
        # All sessions, where there are several groups.
        self.stores: GroupStores | None = None
        self.scheduler: SchedulerHalf | None = None
        self.worker: WorkerHalf | None = None
        self.groups_worker: GroupsWorker | None = None
        self.elastic_scheduler: ElasticScheduler | None = None
        self.elastic_worker: ElasticWorker | None = None
        self.step_loads: StepLoads | None = None
        # Why no load happens inside of a step.
        self.obstacle = obstacle(vllm_config, self.settings, bool(self.groups))
        is_scheduler = role == KVConnectorRole.SCHEDULER
        if self.settings.elastic:
            plan = ElasticPlan.read(vllm_config, self.settings, self.geometry, kv_cache_config)
            if is_scheduler:
                self.elastic_scheduler = ElasticScheduler(plan, n_spare_tokens(vllm_config, self.geometry))
            else:
                self.elastic_worker = ElasticWorker(plan, kv_cache_config, vllm_config.parallel_config.rank)
        if self.settings.store:
            self.open_store(0 if is_scheduler else vllm_config.parallel_config.rank)

    def open_store(self, rank: int) -> None:
        is_scheduler = self.role == KVConnectorRole.SCHEDULER
        if self.groups:
            self.stores = GroupStores(self.config, self.settings, self.groups, rank)
            self.store = self.stores.first
            if is_scheduler:
                self.scheduler = GroupsScheduler(self.stores, self.settings, self.groups, self.planner())
            else:
                waits_for_saves = writes_before_orders(self.config, self._kv_cache_config)
                self.groups_worker = GroupsWorker(self.stores, self.groups, waits_for_saves)
        else:
            self.store = attach(self.config, self.settings, self.geometry, rank)
            if is_scheduler:
                self.step_loads = None if self.obstacle else StepLoads(self.settings)
                self.scheduler = SchedulerHalf(
                    self.store, self.settings, self.geometry, self.planner(), self.step_loads
                )
            else:
                self.worker = WorkerHalf(self.store, self.settings, self.geometry)
        if is_scheduler:
            self.log_start()

    def planner(self) -> Planner | None:
        if self.settings.planner == "load":
            return None
        n_ranks, n_steps_ahead = self.config.parallel_config.world_size, getattr(self.config, "max_concurrent_batches", 2)
        if self.groups:
            groups = [(group.window, group.geometry.token_bytes * n_ranks) for group in self.groups]
            return GroupsPlanner(groups=groups, n_steps_ahead=n_steps_ahead)
        return Planner(token_bytes=self.geometry.token_bytes * n_ranks, n_steps_ahead=n_steps_ahead)

    def log_start(self) -> None:
        state = "attached"
        stores = [self.store] if self.stores is None else self.stores.by_shape.values()
        if (lost := next((store for store in stores if not store.is_attached), None)) is not None:
            state = f"not attached, vLLM goes on without it until it is: {lost.last_error}"
        geometries = [group.geometry for group in self.groups] or [self.geometry]
        logger.info(
            "kvik: KV is kept in the store at %s (%s): %d groups, chunks of %s tokens, %d bytes a token, saved: %s, loaded "
            "inside of steps: %s",
            self.settings.socket,
            state,
            len(geometries),
            self.store.chunk_tokens,
            sum(geometry.token_bytes for geometry in geometries),
            self.settings.save,
            self.settings.layerwise if self.obstacle is None else f"never, {self.obstacle}",
        )

    # === Worker ===

    def get_mem_pool_context(self) -> "AbstractContextManager | None":
        return None if self.elastic_worker is None else self.elastic_worker.allocation

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if self.groups_worker is not None:
            self.groups_worker.register(kv_caches)
            if self.settings.self_test:
                run_group_tests(self.config, self.settings, self.groups, kv_caches)
            return
        is_tested = self.worker is not None and self.settings.self_test
        if self.elastic_worker is not None:
            n_test_blocks = (self.store.chunk_tokens or 0) // self.geometry.block_tokens if is_tested else 0
            n_first_blocks = max(self.elastic_worker.plan.n_warm_up_blocks, 1 + n_test_blocks)
            # Another connector may write KV whenever it likes: nothing orders that against zeros in the engine's stream.
            is_alone = not has_kv_transfer_group() or get_kv_transfer_group() is self
            self.elastic_worker.register(kv_caches, n_first_blocks, is_settled=not is_alone)
        if self.worker is not None:
            self.worker.register(kv_caches)
        if is_tested:
            run_self_test(self.config, self.settings, self.geometry, kv_caches)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if not isinstance(kv_connector_metadata, KvikMetadata):
            return
        if self.groups_worker is not None:
            self.groups_worker.wait_for_saves_of(kv_connector_metadata.preempted)
            self.groups_worker.wait_for_saves(kv_connector_metadata.overtaken)
        if self.worker is not None:
            self.worker.wait_for_saves_of(kv_connector_metadata.preempted)
        if self.elastic_worker is not None and kv_connector_metadata.elastic is not None:
            # Behind the saves: blocks of requests that were preempted may be among those that go.
            self.elastic_worker.obey(kv_connector_metadata.elastic)

    def start_load_kv(self, forward_context: "ForwardContext", **kwargs: Any) -> None:
        if self.worker is not None:
            # These are needed first.
            self.worker.begin_step_loads(self.orders().step_loads)
            self.worker.begin_loads(self.orders().loads)
        if self.groups_worker is not None:
            self.groups_worker.begin_loads(self.orders().group_loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Waits for a layer of what this step loads. All other loads end before their request is scheduled."""
        if self.worker is not None:
            self.worker.layers.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: "AttentionMetadata", **kwargs: Any
    ) -> None:
        """Whole chunks are saved after the forward pass."""

    def wait_for_save(self) -> None:
        if self.worker is not None:
            self.worker.begin_saves(self.orders().saves)
        if self.groups_worker is not None:
            self.groups_worker.begin_saves(self.orders().group_saves)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        half = self.worker or self.groups_worker
        if half is None:
            return None, None
        saved, loaded = half.finished(finished_req_ids)
        return saved or None, loaded or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> "KVConnectorTransferResults":
        results = super().get_transfer_results(finished_req_ids)
        if self.groups_worker is not None:
            results.failed_recving = self.groups_worker.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self.worker is None else self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> "KVConnectorWorkerMetadata | None":
        return None if self.elastic_worker is None else self.elastic_worker.take_report()

    def orders(self) -> KvikMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvikMetadata)
        return metadata

    # === Scheduler ===

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        if self.elastic_scheduler is not None:
            self.elastic_scheduler.bind(gpu_block_pool)
        if self.step_loads is not None:
            self.step_loads.block_pool = gpu_block_pool

    def on_new_request(self, request: "Request") -> None:
        if self.elastic_scheduler is not None:
            self.elastic_scheduler.arrived(request)
        if self.scheduler is not None:
            self.scheduler.arrived(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self.elastic_scheduler is not None:
            # Before vLLM looks for blocks for it.
            self.elastic_scheduler.look_for_arrivals()
        if self.scheduler is None:
            return 0, False
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        if self.scheduler is not None:
            self.scheduler.after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        metadata = KvikMetadata() if self.scheduler is None else self.scheduler.metadata(scheduler_output)
        if self.elastic_scheduler is not None:
            metadata.elastic = self.elastic_scheduler.orders(scheduler_output)
        return metadata

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        if self.scheduler is not None:
            self.scheduler.reported(connector_output)
        if self.elastic_scheduler is not None:
            self.elastic_scheduler.reported(connector_output)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self.elastic_scheduler is not None:
            self.elastic_scheduler.finished(request)
        return self.scheduler is not None and self.scheduler.finished(request, block_ids), None

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if isinstance(self.scheduler, GroupsScheduler):
            return self.scheduler.finished_groups(request, block_ids), None
        return self.request_finished(request, block_ids[0])

    def has_pending_block_frees(self) -> bool:
        return self.elastic_scheduler is not None and self.elastic_scheduler.waits_for_memory()

    def has_pending_push_work(self) -> bool:
        return self.elastic_scheduler is not None and self.elastic_scheduler.wants_step()

    def reset_cache(self) -> bool | None:
        if self.elastic_scheduler is not None:
            self.elastic_scheduler.forget_prefixes()
        return None

    # === Both ===

    def get_kv_connector_stats(self) -> "KVConnectorStats | None":
        counts: dict[str, Any] = {}
        if (half := self.worker or self.groups_worker) is not None:
            counts = half.take_counts()
        if self.scheduler is not None and self.scheduler.planner is not None:
            counts |= self.scheduler.planner.take_counts()
        if self.elastic_scheduler is not None:
            counts |= self.elastic_scheduler.counts()
        stats = KvikStats(data=counts)
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        if self.elastic_worker is not None:
            self.elastic_worker.close()
        if self.stores is not None:
            self.stores.close()
        elif self.store is not None:
            self.store.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> "KVConnectorStats | None":
        return KvikStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvikPromMetrics:
        return KvikPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
