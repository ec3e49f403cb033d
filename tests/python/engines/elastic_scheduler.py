"""Plays the scheduler's half of the elastic memory on the blocks of a real vLLM; a failed check ends it with its reason."""

from types import SimpleNamespace

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.v1.core.block_pool import BlockPool

import kvik.vllm.elastic_scheduler as module
from kvik.elastic.balloon import State
from kvik.elastic.lease import LeaseTable
from kvik.elastic.slabs import Slabs
from kvik.vllm import KvikConnector
from kvik.vllm.elastic_plan import ElasticPlan
from kvik.vllm.elastic_scheduler import ElasticScheduler
from kvik.vllm.metadata import ElasticReport
from kvik.vllm.stats import KvikStats

BLOCK_TOKENS, SLAB_BLOCKS, N_SLABS = 16, 8, 10


class Played:
    """A scheduler's half, the blocks of vLLM, and workers that have as much memory as `n_slabs`."""

    def __init__(self, n_cache_slabs: int = 0, n_reserve_slabs: int = 0, max_step_tokens: int = 4096, n_ranks: int = 1) -> None:
        slabs = Slabs(SLAB_BLOCKS * N_SLABS, SLAB_BLOCKS)
        plan = ElasticPlan(
            slabs, 2 << 20, None, n_cache_slabs, n_reserve_slabs, None, "/dev/shm", BLOCK_TOKENS, 4, max_step_tokens, 40, 1, n_ranks
        )
        self.half = ElasticScheduler(plan, BLOCK_TOKENS)
        self.pool = BlockPool(SLAB_BLOCKS * N_SLABS, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self.half.bind(self.pool)
        self.taken, self.n_slabs, self.most = {0}, N_SLABS, None
        self.parked: list[int] = []

    def step(self, scheduled: dict[str, int] | None = None, preempted: set[str] = frozenset()) -> None:
        """One step; the requests in `scheduled` compute so many tokens."""
        scheduled = scheduled or {}
        output = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(req_ids=list(scheduled)),
            preempted_req_ids=preempted,
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
        )
        self.orders = orders = self.half.orders(output)
        self.parked = orders.park
        self.taken -= set(orders.park)
        report = ElasticReport(orders.number, most_slabs=self.most, can_lend=True)
        for slab in orders.take:
            if len(self.taken) < self.n_slabs:
                self.taken.add(slab)
            else:
                report.missing.add(slab)
                report.refused.add((slab, orders.number))
        self.report(report)

    def report(self, report: ElasticReport) -> None:
        self.half.reported(SimpleNamespace(finished_sending=None, kv_connector_worker_meta=report))
        for slab, state in enumerate(self.half.balloon.states):
            assert slab in self.taken or state not in (State.IN, State.LEAVING), "a block without memory can be used"

    def arrive(self, name: str, n_tokens: int, status: str = "WAITING", max_tokens: int = 1) -> SimpleNamespace:
        request = SimpleNamespace(
            request_id=name, num_tokens=n_tokens, num_prompt_tokens=n_tokens, max_tokens=max_tokens, num_computed_tokens=0,
            status=SimpleNamespace(name=status),
        )
        self.half.arrived(request)
        return request

    @property
    def n_in(self) -> int:
        return self.half.balloon.count(State.IN)


def memory_comes_for_a_request_and_goes_with_it() -> None:
    played = Played()
    assert played.half.wants_step(), "the first orders"
    played.step()
    assert (played.n_in, played.half.wants_step()) == (1, False)
    request = played.arrive("a", 40 * BLOCK_TOKENS)
    played.step()
    assert played.n_in == 6, "41 blocks beside the one of unused values"
    blocks = played.pool.get_new_blocks(40)
    request.num_computed_tokens = request.num_tokens
    played.step({"a": 1})
    assert played.n_in == 6
    counts = played.half.counts()
    assert (counts["elastic_mapped_blocks"], counts["elastic_used_blocks"]) == (48, 40)
    played.half.finished(request)
    played.step()
    assert not played.half.wants_step(), "its blocks are still held, by a save"
    played.pool.free_blocks(blocks)
    played.half.reported(SimpleNamespace(finished_sending={"a"}, kv_connector_worker_meta=None))
    assert played.half.wants_step()
    played.step()
    assert (played.n_in, played.taken) == (1, {0})


def requests_that_the_next_step_cannot_begin_get_nothing_yet() -> None:
    played = Played()
    for number in range(9):
        played.arrive(str(number), 16 * BLOCK_TOKENS)
    played.step()
    assert played.n_in == 9, "68 blocks of four requests, of which 7 were there"
    other = Played()
    for number in range(3):
        other.arrive(str(number), 300 * BLOCK_TOKENS)
    other.step()
    assert other.n_in == N_SLABS, "the first in any case, though a step has fewer tokens"


def memory_is_asked_for_steps_before_it_is_needed() -> None:
    played = Played(max_step_tokens=16 * BLOCK_TOKENS)
    played.n_slabs = 1
    for number in range(4):
        played.arrive(str(number), 16 * BLOCK_TOKENS)
    played.step()
    # Of 17 blocks for each of three requests and the seven that are there.
    assert (len(played.orders.take), played.orders.needed) == (6, played.orders.take[:2])
    assert (played.orders.is_idle, played.orders.is_patient, played.orders.is_starved) == (True, True, False)
    assert not played.half.asked, "all was refused"
    played.step()
    assert (len(played.orders.take), played.orders.is_starved) == (2, True), "nothing for later steps while others use it"
    assert set(played.orders.park) == set(range(1, 7)), "ranks that have memory for them give it back"
    played.n_slabs = N_SLABS
    played.step()
    assert played.n_in == 3
    played.half.look_at = 0.0
    played.step()
    assert played.n_in == 7


def memory_for_an_answer_is_asked_for_while_its_prompt_is_computed() -> None:
    # Two prompts of 32 blocks and what goes with them take nine slabs of the ten; a quarter more takes the last one too.
    for n_step_tokens, max_tokens, n_slabs in [(1024, 500, 10), (1024, 8, 9), (1023, 500, 9)]:
        played = Played()
        requests = [played.arrive(str(number), 32 * BLOCK_TOKENS, max_tokens=max_tokens) for number in range(2)]
        played.step()
        assert played.n_in == 9
        played.pool.get_new_blocks(64)
        played.step({"0": 512, "1": n_step_tokens - 512})
        for request in requests:
            request.num_computed_tokens = request.num_tokens
        played.step({"0": 1, "1": 1})
        assert played.n_in == n_slabs, f"{n_step_tokens} tokens of a step, {max_tokens} of an answer"


def memory_for_answers_is_no_surplus_while_they_may_need_it() -> None:
    for has_answer, n_slabs in [(True, 10), (False, 9)]:
        played = Played()
        requests = [played.arrive(str(number), 30 * BLOCK_TOKENS, max_tokens=500) for number in range(2)]
        played.step()
        played.pool.get_new_blocks(60)
        played.step({"0": 512, "1": 512})
        assert played.n_in == 10
        for request in requests:
            request.num_computed_tokens = request.num_tokens
            if not has_answer:
                played.half.answered_blocks[request.request_id] = 0
        played.half.needed_at = played.half.look_over_at = 0.0
        played.step({"0": 1, "1": 1})
        assert played.n_in == n_slabs


def a_step_that_only_decodes_is_not_looked_into_while_there_are_blocks_for_it() -> None:
    played = Played()
    requests = [played.arrive(str(number), 5 * BLOCK_TOKENS) for number in range(2)]
    played.step()
    assert played.n_in == 2, "12 blocks beside the one of unused values"
    played.pool.get_new_blocks(9)
    for request in requests:
        request.num_computed_tokens = request.num_tokens
    looked: list[int] = []
    look = played.half.needed_blocks
    played.half.needed_blocks = lambda output: looked.append(played.pool.get_num_free_blocks()) or look(output)
    for n_taken in (0, 0, 1, 1, 1):
        played.pool.get_new_blocks(n_taken)
        played.half.look_over_at = float("inf")
        played.step({"0": 1, "1": 1})
    assert looked == [5, 4, 3], "two requests may need six blocks"
    played.half.look_over_at = float("inf")
    played.step({"0": 1, "1": 2})
    assert len(looked) == 4, "one computes more than a token"
    played.half.look_over_at = 0.0
    played.step({"0": 1, "1": 1})
    assert len(looked) == 5, "it is looked over now and then"


def memory_for_later_steps_that_is_refused_preempts_nothing() -> None:
    played = Played(max_step_tokens=16 * BLOCK_TOKENS)
    played.n_slabs = 3
    for number in range(4):
        played.arrive(str(number), 16 * BLOCK_TOKENS)
    played.step()
    assert played.n_in == 3
    assert played.half.refused_until == 0.0
    assert played.half.look_at > 0.0


def a_slab_is_used_when_no_rank_misses_it_and_answers_to_earlier_orders_do_not_count() -> None:
    played = Played(n_ranks=2)
    played.report = lambda report: None
    played.arrive("a", 10 * BLOCK_TOKENS)
    played.step()
    first = played.orders.take[0]
    del played.report

    def answers(number: int, *missing: int, refused: dict[int, int] | None = None, n_ranks: int = 1) -> ElasticReport:
        return ElasticReport(number, set(missing), set((refused or {}).items()), n_ranks=n_ranks)

    played.report(answers(1))
    assert played.n_in == 1, "one rank did not report"
    played.report(answers(1).aggregate(answers(1, first)))
    assert played.n_in == 1, "one rank misses it"
    played.report(answers(0).aggregate(answers(1)))
    assert played.n_in == 1, "one rank has not seen the orders"
    played.report(answers(1).aggregate(answers(1, first, refused={first: 1})))
    assert (played.half.asked, played.half.half_taken) == ({}, [first])
    played.report = lambda report: None
    played.step()
    assert (played.orders.park, played.orders.take) == ([first], [first])
    del played.report
    # Reports of the orders before, which were under way.
    played.report(answers(1, first, refused={first: 1}).aggregate(answers(1)))
    played.report(answers(1).aggregate(answers(1)))
    assert (played.half.asked, played.n_in) == ({first: 2}, 1)
    played.taken.add(first)
    played.report(answers(2).aggregate(answers(3)))
    assert (played.half.asked, played.n_in) == ({}, 2)


def what_was_asked_for_is_taken_back_before_used_slabs_leave() -> None:
    played = Played()
    request = played.arrive("a", 30 * BLOCK_TOKENS)
    played.step()
    assert played.n_in == 4
    played.pool.get_new_blocks(31)
    request.num_computed_tokens = request.num_tokens
    request.num_tokens = 60 * BLOCK_TOKENS
    played.report = lambda report: None
    played.step({"a": 1})
    coming = played.orders.take
    assert len(coming) == 4
    del played.report
    played.report(ElasticReport(played.orders.number - 1, set(coming), most_slabs=4))
    played.step({"a": 1})
    assert sorted(played.orders.park) == sorted(coming)
    assert (played.n_in, played.half.balloon.count(State.LEAVING)) == (4, 0)


def memory_that_comes_when_its_request_is_gone_is_given_back() -> None:
    played = Played()
    played.report = lambda report: None
    request = played.arrive("a", 20 * BLOCK_TOKENS)
    played.step()
    coming = played.orders.take
    assert len(coming) == 2
    played.half.finished(request)
    assert played.half.wants_step(), "no step would tell of it"
    played.step()
    assert (sorted(played.orders.park), played.orders.needed) == (sorted(coming), [])
    assert not played.half.wants_step()
    del played.report
    played.report(ElasticReport(1))
    assert played.n_in == 1


def refused_memory_is_not_waited_for_but_by_a_lone_request() -> None:
    module.ASK_AGAIN_S = 0.0
    played = Played()
    played.n_slabs = 2
    first = played.arrive("a", 10 * BLOCK_TOKENS)
    played.step()
    played.pool.get_new_blocks(15)
    first.num_computed_tokens = first.num_tokens = 15 * BLOCK_TOKENS
    assert played.half.waits_for_memory(), "there may be some"
    played.step({"a": 1})
    assert played.half.balloon.count(State.OUT) == 8
    assert played.half.waits_for_memory(), "to preempt the only one frees nothing for it"
    second = played.arrive("b", BLOCK_TOKENS, "RUNNING")
    played.step({"a": 1, "b": 1})
    assert not played.half.waits_for_memory(), "it was refused a moment ago"
    played.n_slabs = 4
    played.half.waits_for_memory()
    played.step({"a": 1, "b": 1})
    assert played.n_in == 3
    assert second.request_id in played.half.running


def less_is_used_when_others_need_memory() -> None:
    played = Played()
    request = played.arrive("a", 60 * BLOCK_TOKENS)
    played.step()
    assert played.n_in == 8
    blocks = played.pool.get_new_blocks(30)
    request.num_computed_tokens = request.num_tokens
    played.most = 3
    played.step({"a": 1})
    played.step({"a": 1})
    balloon = played.half.balloon
    assert balloon.count(State.IN) + balloon.count(State.LEAVING) <= 5, "slabs without a block in use went"
    assert balloon.count(State.IN) <= 3
    assert not played.half.waits_for_memory(), "a request must give way"
    played.pool.free_blocks(blocks)
    played.step({}, {"a"})
    assert (balloon.count(State.LEAVING), played.n_in) == (0, 3)
    played.step()
    assert played.n_in == 3, "nothing grows while others need memory"


def the_prefix_cache_is_kept_and_others_take_it_while_nothing_runs() -> None:
    played = Played(n_cache_slabs=3)
    played.step()
    request = played.arrive("a", 50 * BLOCK_TOKENS)
    played.step()
    blocks = played.pool.get_new_blocks(48)
    for block in blocks:
        played.pool._insert_block_hash(b"%08d" % block.block_id, block, num_tokens=None)
    played.half.finished(request)
    played.pool.free_blocks(blocks)
    played.step()
    kept = [slab for slab, state in enumerate(played.half.balloon.states) if state is State.IN]
    assert len(kept) == 4, "three and the first"
    table = LeaseTable.open(played.half.lease.path, N_SLABS)
    assert table.take(2, played.half.n_orders - 1) == [], "steps before the offer may still use them"
    gone = table.take(2, played.half.n_orders)
    assert len(gone) == 2 and set(gone) < set(kept)
    played.arrive("b", BLOCK_TOKENS)
    assert table.take(9, played.half.n_orders) == [], "the offer is closed"
    states = played.half.balloon.states
    assert [states[slab] for slab in kept] == [State.OUT if slab in gone else State.IN for slab in kept]
    assert all(played.pool.blocks[block].block_hash is None for slab in gone for block in played.half.plan.slabs.blocks(slab))
    played.taken -= set(gone)
    played.step()
    assert set(gone) <= set(played.parked), "the other ranks give them back too"


def an_idle_engine_keeps_a_reserve_that_others_take() -> None:
    played = Played(n_reserve_slabs=2)
    played.step()
    request = played.arrive("a", 50 * BLOCK_TOKENS)
    played.step()
    blocks = played.pool.get_new_blocks(48)
    played.half.finished(request)
    played.pool.free_blocks(blocks)
    played.step()
    assert played.n_in == 3, "two and the first, though nothing is in the prefix cache"
    played.arrive("b", 20 * BLOCK_TOKENS)
    played.step()
    assert played.orders.take == [], "the next request waits for nothing"
    played.half.finished(SimpleNamespace(request_id="b"))
    played.step()
    table = LeaseTable.open(played.half.lease.path, N_SLABS)
    gone = table.take(9, played.half.n_orders)
    assert len(gone) == 2, "others take all of it while nothing runs"
    played.arrive("c", BLOCK_TOKENS)
    assert played.n_in == 1
    played.taken -= set(gone)
    played.step()


def metrics_are_named() -> None:
    registry = CollectorRegistry()
    types = {
        kind: (lambda kind=kind: lambda **options: kind(registry=registry, **options))()
        for kind in (Gauge, Counter, Histogram)
    }
    metrics = KvikConnector.build_prom_metrics(SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"]})
    stats = KvikStats(data={"loaded_blocks": 2, "elastic_taken_bytes": 7})
    for _ in range(2):
        metrics.observe(stats.data)
    text = generate_latest(registry).decode()
    assert 'kvik_vllm_loaded_blocks_total{engine="0"} 4.0' in text
    assert 'kvik_vllm_elastic_taken_bytes{engine="0"} 7.0' in text
    both = stats.aggregate(KvikStats(data={"loaded_blocks": 3, "elastic_taken_bytes": 5}))
    assert both.data == {"loaded_blocks": 5, "elastic_taken_bytes": 5}


for check in (
    memory_comes_for_a_request_and_goes_with_it,
    requests_that_the_next_step_cannot_begin_get_nothing_yet,
    memory_is_asked_for_steps_before_it_is_needed,
    memory_for_an_answer_is_asked_for_while_its_prompt_is_computed,
    memory_for_answers_is_no_surplus_while_they_may_need_it,
    a_step_that_only_decodes_is_not_looked_into_while_there_are_blocks_for_it,
    memory_for_later_steps_that_is_refused_preempts_nothing,
    a_slab_is_used_when_no_rank_misses_it_and_answers_to_earlier_orders_do_not_count,
    what_was_asked_for_is_taken_back_before_used_slabs_leave,
    memory_that_comes_when_its_request_is_gone_is_given_back,
    refused_memory_is_not_waited_for_but_by_a_lone_request,
    less_is_used_when_others_need_memory,
    the_prefix_cache_is_kept_and_others_take_it_while_nothing_runs,
    an_idle_engine_keeps_a_reserve_that_others_take,
    metrics_are_named,
):
    check()
