"""The scheduler's half of the elastic memory: how much of it the requests need, and which blocks go when others need it.

A slab is used only after every rank has noted or reported that it has memory for it, and memory is given back only for slabs without a
block in use, by orders that a worker obeys behind all steps that were scheduled before. Workers map beside the steps, so memory is asked
for steps before it is needed.
"""

import time
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvik.elastic.arrivals import ArrivalTable
from kvik.elastic.balloon import Balloon, State
from kvik.elastic.lease import LeaseTable
from kvik.vllm.elastic_plan import ElasticPlan
from kvik.vllm.metadata import ElasticOrders, ElasticReport

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")

# How long memory that no request needs is kept while others are computed.
SURPLUS_S = 5.0

# For how many steps memory is asked ahead. What is asked with the orders of a step is mapped while it runs, in about the time of a
# step at most. vLLM schedules the next one before that, so that two steps later the memory may be there, and three steps later it is.
LOOK_AHEAD_STEPS = 3

# A pass over so many tokens lasts longer than to map memory beside it. Passes that only decode do not: the driver keeps them waiting
# while it maps. So memory for answers is asked for with such a pass.
LONG_STEP_TOKENS = 1024

# It is asked for an answer of a part in so many of its prompt: an answer may end long before `max_tokens`, and what it does not need
# others may.
ANSWER_PART = 4

# Memory that was refused is asked for again after this; the ledger forgets a wait after a second. A step without tokens asks at once:
# its worker waits.
ASK_AGAIN_S = 0.05

# Memory for later steps that was refused is asked for again after this, unless it is needed before: others use it.
LOOK_AGAIN_S = 0.5

# How long a refusal counts: vLLM preempts requests meanwhile instead of waiting.
REFUSED_S = 1.0

# How long less is used after others asked for memory; they ask again.
ASKED_S = 2.0

# Steps without a token, while requests wait, after which one slab more is asked for: vLLM keeps some blocks free for reasons of
# its own.
STALLED_STEPS = 20

# How often it is looked what requests need while they only decode and there are blocks for them.
LOOK_OVER_S = 0.25

# How often a request that waits for memory is logged.
LOG_S = 10.0


class ElasticScheduler:
    """Grows and shrinks the part of vLLM's blocks that has memory."""

    def __init__(self, plan: ElasticPlan, n_spare_tokens: int) -> None:
        self.plan = plan
        # Tokens for which a running request has blocks ahead.
        self.n_spare_tokens = n_spare_tokens
        # The most blocks that a request which decodes needs for the next steps.
        self.n_decode_blocks = 2 + n_spare_tokens // plan.block_tokens
        self.balloon: Balloon | None = None
        # Requests that are not finished, in the order of their arrival.
        self.requests: dict[str, "Request"] = {}
        # Blocks of each with as much of its answer as memory is asked for while its prompt is computed.
        self.answered_blocks: dict[str, int] = {}
        self.running: set[str] = set()
        self.n_orders = 0
        # Slabs that are COMING, the first one first, each with the number of the orders that asked for it: an answer to earlier ones
        # is not meant.
        self.asked: dict[int, int] = {}
        # Those of them that the next step needs.
        self.needed: list[int] = []
        # Slabs of which some ranks have memory and others do not.
        self.half_taken: list[int] = []
        # Whether vLLM found too few blocks for a running request in this step.
        self.is_short = False
        # Whether there may be something to give back when the last request ends.
        self.is_dirty = False
        self.n_stalled_steps = 0
        self.needed_at = self.ask_at = self.look_at = self.look_over_at = self.refused_until = self.log_at = 0.0
        # The most slabs to use, and until when.
        self.bound: tuple[int, float] | None = None
        self.taken_bytes = 0
        # Where slabs that are kept are offered while no request is there, and whether they are.
        self.lease = LeaseTable.create(len(plan.slabs)) if plan.kept_slabs > 0 else None
        self.can_lend = self.is_lent = False
        # Where workers note what has come, before their reports say so.
        self.arrivals = ArrivalTable.create(plan.n_ranks, len(plan.slabs))
        # Free blocks after the last orders without a request.
        self.n_free_asleep = 0

    def bind(self, pool: "BlockPool") -> None:
        """Takes all blocks out of the pool but those of the first slab."""
        self.balloon = Balloon(pool, self.plan.slabs)

    # === Requests ===

    def arrived(self, request: "Request") -> None:
        self.wake()
        self.requests[request.request_id] = request
        n_prompt = request.num_prompt_tokens
        n_tokens = n_prompt + min(request.max_tokens, n_prompt // ANSWER_PART)
        n_blocks = min(-(-n_tokens // self.plan.block_tokens), self.plan.n_request_blocks)
        self.answered_blocks[request.request_id] = n_blocks

    def finished(self, request: "Request") -> None:
        self.requests.pop(request.request_id, None)
        self.answered_blocks.pop(request.request_id, None)
        self.running.discard(request.request_id)

    def note_scheduled(self, output: "SchedulerOutput") -> None:
        self.running.update(new.req_id for new in output.scheduled_new_reqs)
        self.running.update(output.scheduled_cached_reqs.req_ids)
        self.running.difference_update(output.preempted_req_ids or ())
        self.running.intersection_update(self.requests)
        is_stalled = output.total_num_scheduled_tokens == 0 and any(
            request.status.name in ("WAITING", "PREEMPTED") for request in self.requests.values()
        )
        self.n_stalled_steps = self.n_stalled_steps + 1 if is_stalled else 0

    def needed_blocks(self, output: "SchedulerOutput") -> tuple[int, int, int]:
        """Blocks that the next step takes, beside those that requests have, blocks that the steps of the look-ahead take, and blocks
        that answers of running requests may take beyond these.

        Running requests count with the tokens they have ahead of them in the first two: a block of each lasts for more steps than those.
        """
        block_tokens = self.plan.block_tokens
        n_next = n_ahead = n_answers = 0
        n_free_places = self.plan.max_requests - len(self.running)
        # Waiting requests count as far as a step could begin them, and the first one in any case. What the prefix cache has of them is
        # not subtracted: such blocks are among the free ones, unless other requests use them.
        n_tokens_before = 0
        running, scheduled = self.running, output.num_scheduled_tokens
        for request_id, request in self.requests.items():
            n_blocks = -(-(request.num_tokens + self.n_spare_tokens) // block_tokens)
            if request_id in running:
                n_computed = request.num_computed_tokens + scheduled.get(request_id, 0)
                n_missing = n_blocks - -(-n_computed // block_tokens)
                if n_missing > 0:
                    n_next += n_missing
                    n_ahead += n_missing
                if (n_answered := self.answered_blocks[request_id]) > n_blocks:
                    n_answers += n_answered - n_blocks
            elif (
                n_free_places > 0
                and n_tokens_before < LOOK_AHEAD_STEPS * self.plan.max_step_tokens
                and request.status.name != "WAITING_FOR_REMOTE_KVS"
            ):
                # What was loaded for it is in blocks that it has.
                n_blocks -= request.num_computed_tokens // block_tokens
                n_next += n_blocks if n_tokens_before < self.plan.max_step_tokens else 0
                n_ahead += n_blocks
                n_free_places -= 1
                n_tokens_before += request.num_tokens
        return n_next, n_ahead, n_answers

    # === Steps ===

    def orders(self, output: "SchedulerOutput") -> ElasticOrders:
        """What the workers do beside the forward pass of this step."""
        now = time.monotonic()
        self.wake()
        self.look_for_arrivals()
        self.note_scheduled(output)
        self.n_orders += 1
        is_idle = output.total_num_scheduled_tokens == 0
        parks: list[int] = []
        takes: list[int] = []
        self.needed = []
        if not self.is_steady(output, now):
            parks, takes = self.changes(output, now)
        was_refused = now < self.refused_until
        return ElasticOrders(
            self.n_orders,
            parks,
            takes,
            None if self.lease is None else self.lease.path,
            self.arrivals.path,
            self.needed,
            is_idle,
            is_patient=is_idle or not was_refused,
            is_starved=is_idle and was_refused,
        )

    def is_steady(self, output: "SchedulerOutput", now: float) -> bool:
        """Whether this step only decodes, with blocks for what it and the next ones need at most, and nothing is on its way.

        It is looked over now and then all the same, for memory that is not needed any more.
        """
        n_requests = len(self.requests)
        if not 0 < n_requests == output.total_num_scheduled_tokens == len(output.num_scheduled_tokens):
            return False
        if self.asked or self.half_taken or self.balloon.held or self.is_short or self.bound is not None:
            return False
        is_enough = self.balloon.pool.get_num_free_blocks() >= n_requests * self.n_decode_blocks
        return is_enough and now < self.look_over_at

    def changes(self, output: "SchedulerOutput", now: float) -> tuple[list[int], list[int]]:
        """Slabs that go, and slabs to take."""
        self.look_over_at = now + LOOK_OVER_S
        parks, self.half_taken = self.half_taken, []
        parks += self.balloon.settle()
        parks += self.obey_bound(now)
        takes: list[int] = []
        if not self.requests:
            parks += self.sleep()
        else:
            self.is_dirty = True
            takes, surplus = self.follow_need(output, now)
            parks += surplus
        self.is_short = False
        return parks, takes

    def sleep(self) -> list[int]:
        """No request is left: all slabs go but those that are kept for the prefix cache and for the next requests, which are offered
        to others.

        What is offered is not looked at again before `wake`.
        """
        self.is_dirty = False
        out = self.cancel(len(self.asked))
        unused = sorted(self.balloon.unused_slabs())
        n_cached = sum(cost[0] > 0 for cost, _ in unused)
        n_kept = max(min(n_cached, self.plan.cache_slabs), min(len(unused), self.plan.reserve_slabs)) if self.can_lend else 0
        out += self.balloon.shrink(len(unused) - n_kept)
        if n_kept > 0:
            self.lease.offer(self.n_orders, [slab for _, slab in unused[len(unused) - n_kept :]])
            self.is_lent = True
        self.n_free_asleep = self.balloon.pool.get_num_free_blocks()
        return out

    def cancel(self, n_slabs: int) -> list[int]:
        """Takes back what was asked for, the last one first: up to `n_slabs` slabs that were COMING are OUT."""
        slabs = [slab for slab, _ in zip(reversed(self.asked), range(n_slabs), strict=False)]
        for slab in slabs:
            del self.asked[slab]
        self.balloon.refused(slabs)
        return slabs

    def wake(self) -> None:
        """Ends the offer; slabs that others took are OUT, on the other ranks too with the next orders."""
        if self.is_lent:
            self.is_lent = False
            for slab in self.lease.close_offer():
                self.balloon.take_out(slab)
                self.half_taken.append(slab)

    def obey_bound(self, now: float) -> list[int]:
        """Uses less while others need memory or the limit is lower."""
        if self.bound is None or now > self.bound[1]:
            self.bound = None
            self.balloon.stay_all()
            return []
        n_excess = self.balloon.n_used_slabs - self.bound[0]
        if n_excess <= 0:
            return []
        # What has not come is given up before what is used.
        out = self.cancel(n_excess)
        return out + self.balloon.shrink(n_excess - len(out), drains=True)

    def follow_need(self, output: "SchedulerOutput", now: float) -> tuple[list[int], list[int]]:
        """Slabs to take for what requests need, or slabs to give back that they have not needed for a while."""
        slabs = self.plan.slabs
        n_free = self.balloon.pool.get_num_free_blocks()
        n_next, n_ahead, n_answers = self.needed_blocks(output)
        n_next, n_ahead = n_next - n_free, n_ahead - n_free
        if self.is_short or self.n_stalled_steps > STALLED_STEPS:
            n_next = max(n_next, 1)
        n_ahead = max(n_ahead, n_next)
        n_kept = n_ahead + n_answers
        if output.total_num_scheduled_tokens >= LONG_STEP_TOKENS:
            n_ahead = n_kept
        if n_kept > -2 * slabs.slab_blocks:
            self.needed_at = now
        if n_ahead <= 0:
            if now > self.needed_at + SURPLUS_S:
                return [], self.balloon.shrink(-n_kept // slabs.slab_blocks - 1 - self.plan.kept_slabs)
            return [], []
        n_needed = slabs.holding(max(0, n_next))
        n_slabs = (slabs.holding(n_ahead) if self.looks_ahead(now) else n_needed) - len(self.asked)
        if self.bound is not None:
            n_slabs = min(n_slabs, self.bound[0] - self.balloon.n_used_slabs)
        takes: list[int] = []
        if n_slabs > 0 and (now >= self.ask_at or output.total_num_scheduled_tokens == 0):
            takes = self.balloon.grow(n_slabs)
            self.asked.update(dict.fromkeys(takes, self.n_orders))
        self.needed = list(self.asked)[:n_needed]
        return takes, []

    def looks_ahead(self, now: float) -> bool:
        """Whether memory is asked for later steps: not while others want it, nor where what is needed was refused."""
        return self.bound is None and now >= max(self.look_at, self.refused_until)

    def reported(self, output: "KVConnectorOutput") -> None:
        """How far the workers have obeyed, and what others want of them."""
        if output.finished_sending:
            self.is_dirty = True
        report = output.kv_connector_worker_meta
        if not isinstance(report, ElasticReport):
            return
        now = time.monotonic()
        self.taken_bytes = report.taken_bytes
        self.can_lend = self.lease is not None and report.can_lend
        if report.most_slabs is not None:
            self.bound = (report.most_slabs, now + ASKED_S)
        if not self.asked:
            return
        refused = sorted(slab for slab, number in report.refused if self.asked.get(slab) == number)
        # Of a rank that did not report it is not known what it misses.
        is_whole = report.n_ranks >= self.plan.n_ranks
        arrived = [
            slab
            for slab, number in self.asked.items()
            if is_whole and number <= report.number and slab not in report.missing
        ]
        if refused:
            self.look_at = now + LOOK_AGAIN_S
            if not set(self.needed).isdisjoint(refused):
                self.ask_at = now + ASK_AGAIN_S
                self.refused_until = now + REFUSED_S
                self.log_refusal(now)
        elif arrived:
            self.refused_until = 0.0
        self.use(arrived)
        for slab in refused:
            del self.asked[slab]
        self.balloon.refused(refused)
        # The ranks that have memory for them give it back, and the others forget that they were asked.
        self.half_taken += refused

    def look_for_arrivals(self) -> bool:
        """Uses memory that has come since the last report; says whether there is any."""
        arrived = self.arrivals.arrived(self.asked) if self.asked else []
        if arrived:
            self.refused_until = 0.0
            self.use(arrived)
        return bool(arrived)

    def use(self, arrived: list[int]) -> None:
        """Every rank has memory behind slabs that were asked for."""
        for slab in arrived:
            del self.asked[slab]
        self.balloon.arrived(arrived)

    def log_refusal(self, now: float) -> None:
        if now > self.log_at:
            self.log_at = now + LOG_S
            logger.info(
                "kvik: there is no more memory for KV now: %d bytes are taken, %d requests run and %d wait",
                self.taken_bytes,
                len(self.running),
                len(self.requests) - len(self.running),
            )

    # === Questions of vLLM ===

    def waits_for_memory(self) -> bool:
        """Whether a running request that finds no block should wait for memory, instead of another one being preempted.

        Memory that was refused is not waited for, unless the request is the only one: to preempt it frees nothing that it could
        use.
        """
        self.is_short = True
        if self.look_for_arrivals() or self.balloon.count(State.COMING) > 0:
            return True
        if self.balloon.held or self.balloon.count(State.OUT) == 0:
            return False
        if self.bound is not None and self.balloon.n_used_slabs >= self.bound[0]:
            return False
        return time.monotonic() > self.refused_until or len(self.running) <= 1

    def wants_step(self) -> bool:
        """Whether vLLM should run a step without requests: for the first orders, and to give back what was freed last.

        vLLM frees blocks behind the last orders too: where it schedules ahead, when the steps that may write them have ended, and
        where a request was aborted, when its loads and saves have.
        """
        if self.n_orders == 0:
            return True
        if self.requests:
            return False
        if self.balloon.pool.get_num_free_blocks() > self.n_free_asleep:
            return True
        return self.is_dirty and (self.balloon.n_used_slabs > 1 or bool(self.half_taken))

    def forget_prefixes(self) -> None:
        """Empties the prefix cache: vLLM itself does so only where no block is in use, and what the balloon holds counts."""
        self.wake()
        # What was offered is offered again.
        self.is_dirty = True
        pool = self.balloon.pool
        pool.evict_blocks({number for number, block in enumerate(pool.blocks) if block.block_hash is not None})

    def counts(self) -> dict[str, Any]:
        """Real numbers: vLLM counts blocks that the balloon holds as used."""
        n_held_blocks = self.balloon.n_held_blocks
        n_blocks = self.plan.slabs.n_blocks
        return {
            "elastic_taken_bytes": self.taken_bytes,
            "elastic_mapped_blocks": n_blocks - n_held_blocks,
            "elastic_used_blocks": n_blocks - n_held_blocks - self.balloon.pool.get_num_free_blocks() - 1,
            "elastic_unmapped_blocks": n_held_blocks,
        }
