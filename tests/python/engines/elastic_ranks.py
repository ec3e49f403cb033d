"""Plays a vLLM of two ranks on elastic memory, in any order that its threads and processes may have; ends with what went wrong.

The scheduler's half, the workers' halves, their mappers and the blocks of vLLM are real. Requests, steps and memory are played: two
steps are under way at a time, ranks begin them and their devices run them when chance says so, and mappers work between any two of
these. Others take memory and give it back.

    elastic_ranks.py [SEED ...]
"""

import random
import sys
import threading
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

from vllm.v1.core.block_pool import BlockPool

import kvik.elastic.mapper as mapper_module
import kvik.vllm.elastic_scheduler as scheduler_module
import kvik.vllm.elastic_worker as worker_module
from kvik.elastic.balloon import State
from kvik.elastic.mapper import Mapper
from kvik.elastic.slabs import Slabs
from kvik.vllm.elastic_plan import ElasticPlan
from kvik.vllm.elastic_scheduler import ElasticScheduler
from kvik.vllm.elastic_worker import ElasticWorker

BLOCK_TOKENS, SLAB_BLOCKS, N_SLABS, N_RANKS, MAX_REQUESTS, STEP_TOKENS = 4, 4, 12, 2, 4, 32
SLAB_BYTES = 1000


@dataclass(eq=False)
class Request:
    request_id: str
    num_tokens: int
    # What it has when it ends.
    n_all_tokens: int
    num_computed_tokens: int = 0
    # Tokens that steps under way sample: vLLM schedules what follows them before it knows them.
    n_placeholders: int = 0
    status: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(name="WAITING"))
    blocks: list = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_prompt_tokens, self.max_tokens = self.num_tokens, self.n_all_tokens - self.num_tokens


@dataclass(eq=False)
class Step:
    output: SimpleNamespace
    orders: object
    # Slabs that it writes or reads.
    slabs: set[int]
    # Requests of which it samples a token.
    samples: set[str] = field(default_factory=set)
    reports: list = field(default_factory=lambda: [None] * N_RANKS)


class Memory:
    """What a rank has and could have: less than it has where the limit fell."""

    slab_bytes = SLAB_BYTES

    def __init__(self, rank: "Rank", n_most: int) -> None:
        self.rank = rank
        self.n_most = n_most
        self.taken = {0}

    @property
    def taken_bytes(self) -> int:
        return len(self.taken) * SLAB_BYTES

    @property
    def claimable_bytes(self) -> int:
        return self.n_most * SLAB_BYTES

    def try_take(self, slabs, timeout_s: float = 0.0) -> bool:
        assert self.taken.isdisjoint(slabs), f"{slabs} are taken twice"
        if len(slabs) > self.n_claimable():
            return False
        self.taken.update(slabs)
        return True

    def release(self, slabs) -> None:
        assert self.taken.issuperset(slabs), f"{slabs} are given back twice"
        assert 0 not in slabs
        self.taken.difference_update(slabs)
        self.rank.check()

    def n_claimable(self) -> int:
        return max(0, self.n_most - len(self.taken))

    def mark(self) -> SimpleNamespace:
        n_begun = self.rank.n_begun
        return SimpleNamespace(query=lambda: self.rank.n_run >= n_begun)

    def note_stream(self) -> None:
        pass

    interrupt = note_starved = stop_waiting = note_stream


class Rank(ElasticWorker):
    """A worker whose mapper works when it is told, and whose device runs steps when it is told."""

    def __init__(self, plan: ElasticPlan, rank: int, n_most: int) -> None:
        self.plan = plan
        self.rank = rank
        self.slabs = Memory(self, n_most)
        self.mapper = Mapper(self.slabs)
        self.lock = threading.Lock()
        self.lease = self.arrivals = None
        self.n_obeyed = self.wanted_bytes = 0
        self.is_idle = False
        # Whether it sees the scheduler's tables.
        self.is_near = True
        self.steps: list[Step] = []
        self.n_begun = self.n_run = 0

    @property
    def memory(self) -> Memory:
        return self.slabs

    def begin(self, step: Step) -> None:
        self.obey(step.orders if self.is_near else replace(step.orders, arrivals=None))
        self.steps.append(step)
        self.n_begun += 1
        self.check()

    def check(self) -> None:
        """Every step that was begun and has not run finds memory."""
        for step in self.steps[self.n_run :]:
            assert step.slabs <= self.slabs.taken, f"slabs {step.slabs - self.slabs.taken} are used without memory"


class Engine:
    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        mapper_module.time = scheduler_module.time = worker_module.time = clock
        # Half a step is a long one.
        scheduler_module.LONG_STEP_TOKENS = STEP_TOKENS // 2
        slabs = Slabs(SLAB_BLOCKS * N_SLABS, SLAB_BLOCKS)
        n_cache_slabs = self.chance.choice([0, 0, 3])
        n_reserve_slabs = self.chance.choice([0, 0, 2, 4])
        plan = ElasticPlan(
            slabs, 2 << 20, None, n_cache_slabs, n_reserve_slabs, None, "/dev/shm", BLOCK_TOKENS, MAX_REQUESTS, STEP_TOKENS, 30, 1, N_RANKS
        )
        self.half = ElasticScheduler(plan, BLOCK_TOKENS)
        self.pool = BlockPool(SLAB_BLOCKS * N_SLABS, enable_caching=True, hash_block_size=BLOCK_TOKENS)
        self.half.bind(self.pool)
        self.ranks = [Rank(plan, number, N_SLABS) for number in range(N_RANKS)]
        self.ranks[-1].is_near = self.chance.random() < 0.75
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        # Steps that were scheduled and whose output is not known.
        self.steps: list[Step] = []
        # Blocks of requests that have ended, each with the last step that may write them: vLLM frees them with its output.
        self.deferred: list[tuple[Step, list]] = []
        self.n_arrived = self.n_ended = self.n_hashes = self.n_preempted = self.n_early = 0

    # === vLLM's scheduler ===

    def arrive(self) -> None:
        self.n_arrived += 1
        n_prompt = self.chance.randint(1, 80)
        request = Request(str(self.n_arrived), n_prompt, n_prompt + self.chance.randint(1, 30))
        self.waiting.append(request)
        self.half.arrived(request)

    def free(self, request: Request) -> None:
        self.pool.free_blocks(reversed(request.blocks))
        request.blocks = []

    def free_later(self, request: Request) -> None:
        writers = [step for step in self.steps if request.request_id in step.output.num_scheduled_tokens]
        if writers:
            self.deferred.append((writers[-1], request.blocks))
            request.blocks = []
        else:
            self.free(request)

    def grows(self, request: Request, n_tokens: int) -> bool:
        n_blocks = -(-(request.num_computed_tokens + n_tokens) // BLOCK_TOKENS) - len(request.blocks)
        if n_blocks > self.pool.get_num_free_blocks():
            return False
        if n_blocks > 0:
            request.blocks += self.pool.get_new_blocks(n_blocks)
        return True

    def schedule(self) -> None:
        n_scheduled: dict[str, int] = {}
        begun: list[Request] = []
        preempted: set[str] = set()
        n_left = STEP_TOKENS
        for request in list(self.running):
            n_tokens = min(n_left, request.num_tokens + request.n_placeholders - request.num_computed_tokens)
            if n_tokens == 0 or request not in self.running:
                continue
            while not (fits := self.grows(request, n_tokens)):
                if self.half.waits_for_memory():
                    break
                victim = self.running.pop()
                n_left += n_scheduled.pop(victim.request_id, 0)
                self.free(victim)
                victim.num_computed_tokens, victim.n_placeholders, victim.status.name = 0, 0, "PREEMPTED"
                preempted.add(victim.request_id)
                self.waiting.insert(0, victim)
                self.n_preempted += 1
                if victim is request:
                    break
            if fits:
                n_scheduled[request.request_id] = n_tokens
                n_left -= n_tokens
        while self.waiting and not preempted and n_left > 0 and len(self.running) < MAX_REQUESTS:
            request = self.waiting[0]
            self.n_early += self.half.look_for_arrivals()
            self.find_prefix(request)
            n_tokens = min(n_left, request.num_tokens - request.num_computed_tokens)
            if not self.grows(request, n_tokens):
                self.free(request)
                request.num_computed_tokens = 0
                break
            self.waiting.pop(0)
            self.running.append(request)
            request.status.name = "RUNNING"
            begun.append(request)
            n_scheduled[request.request_id] = n_tokens
            n_left -= n_tokens
        output = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=request.request_id) for request in begun],
            scheduled_cached_reqs=SimpleNamespace(req_ids=list(n_scheduled)),
            preempted_req_ids=preempted,
            num_scheduled_tokens=n_scheduled,
            total_num_scheduled_tokens=sum(n_scheduled.values()),
        )
        orders = self.half.orders(output)
        used = {
            block.block_id // SLAB_BLOCKS
            for request in self.running
            if request.request_id in n_scheduled
            for block in request.blocks
        }
        step = Step(output, orders, used | {0})
        self.steps.append(step)
        for request in self.running:
            if (n_tokens := n_scheduled.get(request.request_id, 0)) > 0:
                request.num_computed_tokens += n_tokens
                if request.num_computed_tokens >= request.num_tokens + request.n_placeholders:
                    request.n_placeholders += 1
                    step.samples.add(request.request_id)

    def find_prefix(self, request: Request) -> None:
        """Some block of the prefix cache, in any order: only where they lie matters."""
        assert not request.blocks
        n_blocks = self.chance.randint(0, (request.num_tokens - 1) // BLOCK_TOKENS)
        cached = [block for block in self.pool.blocks if block.block_hash is not None][:n_blocks]
        self.pool.touch(cached)
        request.blocks = cached
        request.num_computed_tokens = len(cached) * BLOCK_TOKENS

    def update(self) -> None:
        """Takes the output of the oldest step."""
        step = self.steps.pop(0)
        report = step.reports[0].aggregate(step.reports[1])
        for request in list(self.running):
            if request.request_id not in step.output.num_scheduled_tokens:
                continue
            if request.request_id in step.samples and request.n_placeholders > 0:
                for block in request.blocks:
                    if block.block_hash is None and self.chance.random() < 0.3:
                        self.n_hashes += 1
                        self.pool._insert_block_hash(b"%08d" % self.n_hashes, block, num_tokens=None)
                request.num_tokens += 1
                request.n_placeholders -= 1
            if request.num_tokens > request.n_all_tokens or self.chance.random() < 0.01:
                self.running.remove(request)
                self.half.finished(request)
                self.free_later(request)
                self.n_ended += 1
        for last, blocks in [deferred for deferred in self.deferred if deferred[0] is step]:
            self.deferred.remove((last, blocks))
            self.pool.free_blocks(reversed(blocks))
        self.half.reported(SimpleNamespace(finished_sending=None, kv_connector_worker_meta=report))

    # === Chance ===

    def play(self, *, is_calm: bool) -> None:
        """One thing that may happen now."""
        self.now += self.chance.choice([0.0, 0.001, 0.02])
        place = self.chance.randrange(N_RANKS)
        rank = self.ranks[place]
        match self.chance.randrange(9):
            case 0 if not is_calm and len(self.waiting) < 8 and self.chance.random() < 0.4:
                self.arrive()
            case 1 | 2 if len(self.steps) < 2 and (self.waiting or self.running or self.half.wants_step()):
                self.schedule()
            case 3 | 4:
                # A rank may begin the next step before it reports of this one.
                unreported = [step for step in self.steps if step.reports[place] is None]
                unbegun = [step for step in unreported if step not in rank.steps]
                if unbegun and (len(unbegun) == len(unreported) or self.chance.random() < 0.3):
                    rank.begin(unbegun[0])
                elif unreported:
                    unreported[0].reports[place] = rank.take_report()
            case 5 if rank.n_run < rank.n_begun:
                rank.n_run += 1
            case 6 if rank.mapper.is_due():
                rank.mapper.work()
            case 7 if self.steps and all(self.steps[0].reports):
                if all(self.steps[0] in rank.steps[: rank.n_run] for rank in self.ranks):
                    self.update()
            case 8:
                if is_calm:
                    rank.memory.n_most = N_SLABS
                elif self.chance.random() < 0.1:
                    rank.memory.n_most = self.chance.randint(1, N_SLABS)
                elif self.chance.random() < 0.1:
                    rank.lend(self.chance.randint(1, 3) * SLAB_BYTES)
                elif self.chance.random() < 0.1:
                    self.half.forget_prefixes()
        self.check()

    def rest(self) -> None:
        """Goes on until nothing is left to do."""
        for _ in range(100_000):
            if self.is_done():
                return
            self.play(is_calm=True)
        raise AssertionError("requests wait for ever")

    def check(self) -> None:
        for rank in self.ranks:
            rank.check()
            if not self.half.is_lent:
                # What others take of an offer is the scheduler's again when it wakes.
                used = {slab for slab, state in enumerate(self.half.balloon.states) if state in (State.IN, State.LEAVING)}
                missing = used - rank.slabs.taken
                assert not missing, f"slabs {missing} may be used and have no memory"

    def is_done(self) -> bool:
        is_idle = not (self.waiting or self.running or self.steps or self.half.wants_step())
        return is_idle and not any(rank.mapper.is_due() or rank.mapper.leaving for rank in self.ranks)


def play(seed: int) -> Engine:
    engine = Engine(seed)
    for _ in range(4000):
        engine.play(is_calm=False)
    engine.rest()
    if seed % 2 == 0:
        engine.half.forget_prefixes()
        engine.rest()
    assert engine.n_ended == engine.n_arrived
    assert engine.half.is_lent or engine.half.balloon.count(State.IN) == 1, "memory is kept and not offered"
    engine.half.wake()
    kept = {slab for slab, state in enumerate(engine.half.balloon.states) if state is State.IN}
    assert len(kept) - 1 <= engine.half.plan.kept_slabs
    for rank in engine.ranks:
        # What one rank lent goes on the others with the next orders.
        assert kept <= rank.slabs.taken <= kept | set(engine.half.half_taken), "memory is held that nothing uses"
        assert not rank.mapper.wanted
    return engine


def main() -> None:
    worker_module.REPORT_WAIT_S = worker_module.IDLE_WAIT_S = 0.0
    seeds = [int(seed) for seed in sys.argv[1:]] or list(range(40))
    n_ended = n_preempted = n_early = 0
    for seed in seeds:
        try:
            engine = play(seed)
        except BaseException:
            print(f"seed {seed}", file=sys.stderr)
            raise
        n_ended += engine.n_ended
        n_preempted += engine.n_preempted
        n_early += engine.n_early
    assert len(seeds) < 40 or (n_ended > 300 and min(n_preempted, n_early) > 30), (n_ended, n_preempted, n_early)


main()
