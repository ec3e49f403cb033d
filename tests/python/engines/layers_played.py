"""The scheduler of vLLM and the connector with the played model of `hybrid_groups.py`, and loads inside of steps: of every layer that
is read, every number is compared behind the wait for that layer. One that is wrong without being reported ends the program.

    layers_played.py SOCKET MODEL_FOLDER SEED
"""

import json
import sys
from collections.abc import Callable

from hybrid_groups import Played, spec

import kvik
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

BLOCK_TOKENS = 16


class LateJob:
    """A load by layers that comes whole, and after its step has read all layers."""

    def __init__(self, begin: Callable[[], kvik.Job]) -> None:
        self.begin = begin
        self.job: kvik.Job | None = None

    def wait_layers(self, n_layers: int, timeout_s: float | None = None) -> bool:
        return False

    def wait(self, timeout_s: float | None = None) -> bool:
        self.job = self.begin()
        return self.job.wait(timeout_s)

    @property
    def result(self) -> int:
        return self.job.result


class LateStore:
    """The store, some of whose loads by layers are late."""

    def __init__(self, played: "LayersPlayed", store: kvik.Store) -> None:
        self.played = played
        self.store = store

    def __getattr__(self, name: str) -> object:
        return getattr(self.store, name)

    def start_load(self, *arguments: object, **options: object) -> kvik.Job | LateJob:
        def begin() -> kvik.Job:
            return self.store.start_load(*arguments, **options)

        if self.played.rng.random() < 0.7:
            return begin()
        self.played.counts["late"] += 1
        return LateJob(begin)


class LayersPlayed(Played):
    # A request that is computed again leaves room in the step for others with the same prefix.
    arguments = {"long_prefill_token_threshold": 60}
    reset_share = 0.2

    def disturb(self, output: SchedulerOutput) -> None:
        """Lets some loads bring nothing, or less than was found."""
        orders = output.kv_connector_metadata
        for order in [*orders.step_loads, *orders.loads]:
            kind = self.rng.random()
            if kind < 0.2:
                order.chain = b""
            elif kind < 0.4 and (chain := self.worker.store.unpack(order.chain)) is not None:
                order.chain = chain.pack(self.rng.randrange(chain.n_chunks))
        self.counts["step_loads"] += len(orders.step_loads)
        self.counts["loads"] += len(orders.loads)

    def rows(self, output: SchedulerOutput) -> list[tuple[str, int]]:
        """The requests of a step with their computed tokens; notes their blocks."""
        cached = output.scheduled_cached_reqs
        rows = [(new.req_id, True, new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        for name, ids, n_computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            rows.append((name, name in cached.resumed_req_ids, ids, n_computed))
        for name, is_new, ids, _ in rows:
            if is_new:
                self.tables[name] = [[]]
            if ids is not None:
                self.tables[name][0].extend(ids[0])
        return [(name, n_computed) for name, _, _, n_computed in rows]

    def wrong_rows(self, rows: list[tuple[str, int]], output: SchedulerOutput, layer: int) -> set[str]:
        """Requests of which a layer reads something that it did not write."""
        wrong = set()
        for name, n_computed in rows:
            end = n_computed + output.num_scheduled_tokens[name]
            memory, places = self.slots(name, 0, 0, end)[layer]
            if not (memory[places] == (self.numbers_of(name, end) + layer)[:, None]).all():
                wrong.add(name)
        return wrong

    def step(self) -> None:
        output = self.scheduler.schedule()
        self.disturb(output)
        self.worker.handle_preemptions(output.kv_connector_metadata)
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        rows = self.rows(output)
        if output.has_sync_kv_loads:
            self.worker.start_load_kv(None)
        wrong: set[str] = set()
        for name, n_computed in rows:
            self.write(name, n_computed, output.num_scheduled_tokens[name])
        for layer in range(len(self.layers) if rows else 0):
            self.worker.wait_for_layer_load(f"layer-0-{layer}")
            wrong |= self.wrong_rows(rows, output, layer)
        if not output.has_sync_kv_loads:
            self.worker.start_load_kv(None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(output.finished_req_ids)
        invalid = self.worker.get_block_ids_with_load_errors()
        for name in wrong:
            assert invalid & set(self.tables[name][0]), f"{name} is wrong, and nothing was reported"
            self.counts["thrown_away"] += 1
        transfer = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=invalid,
        )
        self.worker.clear_connector_metadata()
        names = [name for name, _ in rows]
        sampled = []
        for name, n_computed in rows:
            end = n_computed + output.num_scheduled_tokens[name]
            is_last = end == self.scheduler.requests[name].num_tokens
            sampled.append([10 + int(self.numbers_of(name, end)[-1]) % 300] if is_last else [])
        loading = [order.request_id for order in output.kv_connector_metadata.step_loads]
        if loading and self.rng.random() < 0.3:
            # A server takes what its clients no longer want out between a pass and its results.
            self.scheduler.finish_requests(loading[0], RequestStatus.FINISHED_ABORTED)
            self.counts["aborted_in_step"] += 1
        places = {name: place for place, name in enumerate(names)}
        made = ModelRunnerOutput(names, places, sampled, kv_connector_output=transfer)
        self.scheduler.update_from_output(output, made)


def main() -> None:
    seed = int(sys.argv[3])
    specs = [spec(FullAttentionSpec, BLOCK_TOKENS)]
    layerwise = "always" if seed % 3 else "auto"
    played = LayersPlayed(sys.argv[1], sys.argv[2], seed, specs, layerwise=layerwise)
    layers = played.worker.worker.layers
    layers.store = LateStore(played, layers.store)
    try:
        played.run()
    finally:
        played.worker.shutdown()
        played.scheduler.shutdown()
    print(json.dumps(dict(played.counts, **played.worker.worker.counts)), flush=True)


if __name__ == "__main__":
    main()
