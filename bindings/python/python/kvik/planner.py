"""Whether what slow tiers have of a prompt is loaded or computed."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import kvik
from kvik.windows import Window

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

MEMORY = "ram"

# The kinds of tiers, as the daemon orders them.
TIERS = ("ram", "nvme", "peer", "redis", "object", "lm", "plugin")

# Age of a measurement of a tier that is not repeated, in seconds. It costs a request a part of its chunks.
MAX_AGE_S = 60.0

# The part of a prompt's slow chunks that is loaded to measure a tier.
MEASURED_SHARE = 8

# The part of its bytes that a load counts as having brought when it failed, so that its tier is known to be slow.
FAILED_SHARE = 10


class Found(Protocol):
    """How much of a sequence the store has, as `kvik.Found`."""

    @property
    def n_chunks(self) -> int: ...
    @property
    def n_tokens(self) -> int: ...
    @property
    def n_memory_tokens(self) -> int: ...
    @property
    def slowest_tier(self) -> str: ...


@dataclass
class Step:
    """A step of the engine that computes prompts."""

    begin: float
    # 0 where it computes none.
    n_tokens: int
    n_attended: int


class Planner:
    """Decides by what loads and steps took before. What is in memory is always loaded.

    A prompt whose slow chunks are loaded waits for them; of those that would come later than the engine has computed
    them, none is loaded. The first load from a tier, and later one in a while, is a part of what was found, to learn how fast it is.
    """

    def __init__(self, *, token_bytes: int, n_steps_ahead: int) -> None:
        self.token_bytes = token_bytes
        self.measured = kvik.LoadPlanner()
        # Steps that were begun, at most so many at a time.
        self.steps: deque[Step] = deque(maxlen=n_steps_ahead)
        self.last_end = 0.0
        self.loads: dict[str, tuple[kvik.MeasuredLoad, int]] = {}
        # Tokens that a slow tier had and that were computed.
        self.n_computed_tokens = 0

    def tokens_to_load(self, found: Found, n_computed_tokens: int) -> int:
        """How many of the found tokens the engine should have before it computes, those included that it has."""
        n_found = found.n_tokens
        # Where what the engine has or memory gives ends.
        n_fast = max(n_computed_tokens, found.n_memory_tokens)
        if found.slowest_tier == MEMORY or n_found <= n_fast:
            return n_found
        n_bytes = self.bytes_of(n_fast, n_found)
        is_faster = self.measured.is_load_faster(found.slowest_tier, n_bytes, n_fast, n_found)
        if is_faster:
            return n_found
        n_load = n_fast
        if self.measured.claim_measurement(found.slowest_tier, MAX_AGE_S):
            chunk_tokens = n_found // found.n_chunks
            first = n_fast // chunk_tokens
            n_chunks = max(1, (found.n_chunks - first) // MEASURED_SHARE)
            n_load = min(n_found, (first + n_chunks) * chunk_tokens)
        elif is_faster is None:
            # Another request measures, or the engine has computed nothing yet.
            return n_found
        return n_load

    def bytes_of(self, first_token: int, end_token: int) -> int:
        """Bytes that bring a sequence from `first_token` to `end_token`."""
        return (end_token - first_token) * self.token_bytes

    # === Loads ===

    def planned(self, request_id: str, found: Found, first_token: int, end_token: int) -> None:
        """Begins to measure the load of a request from `first_token` to `end_token`, and counts what is computed instead."""
        self.n_computed_tokens += max(0, found.n_tokens - end_token)
        first_slow_token = max(first_token, found.n_memory_tokens)
        if found.slowest_tier != MEMORY and first_slow_token < end_token:
            load = self.measured.begin_load(found.slowest_tier)
            self.loads[request_id] = (load, self.bytes_of(first_slow_token, end_token))

    def loads_ended(self, request_ids: Iterable[str], *, is_whole: bool) -> None:
        """Loads whose requests go on; where blocks could not be loaded, mostly because they did not come in time."""
        for request_id in request_ids:
            load, n_bytes = self.loads.pop(request_id, (None, 0))
            if load is not None:
                load.end(n_bytes if is_whole else n_bytes // FAILED_SHARE)

    def forget(self, request_id: str) -> None:
        """A request that ended before its load did."""
        self.loads.pop(request_id, None)

    def take_counts(self) -> dict[str, int]:
        counts = {"computed_slow_tokens": self.n_computed_tokens}
        self.n_computed_tokens = 0
        return counts

    # === Steps ===

    def step_began(self, output: "SchedulerOutput", *, is_measured: bool = True) -> None:
        n_tokens = output.total_num_scheduled_tokens
        n_attended = 0
        if n_tokens > len(output.num_scheduled_tokens) and is_measured:
            n_attended = attended_tokens(output)
        else:
            # It decodes, which says nothing of prompts, or does more than to compute.
            n_tokens = 0
        self.steps.append(Step(time.monotonic(), n_tokens, n_attended))

    def step_ended(self) -> None:
        now = time.monotonic()
        if self.steps:
            step = self.steps.popleft()
            # A step that was begun ahead ran when the one before it had ended.
            seconds = now - max(step.begin, self.last_end)
            if step.n_tokens > 0:
                self.measured.note_pass(step.n_tokens, step.n_attended, seconds)
        self.last_end = now


class GroupsPlanner(Planner):
    """For groups of layers of which some read a window only: a load brings what is read behind it."""

    def __init__(self, *, groups: Sequence[tuple[Window, int]], n_steps_ahead: int) -> None:
        """`groups` has the window of each, and the bytes of its tokens."""
        super().__init__(token_bytes=sum(token_bytes for _, token_bytes in groups), n_steps_ahead=n_steps_ahead)
        self.groups = groups

    def bytes_of(self, first_token: int, end_token: int) -> int:
        starts = [max(first_token, window.first_block(end_token) * window.block_tokens) for window, _ in self.groups]
        tokens = [max(0, end_token - start) for start in starts]
        return sum(n_tokens * token_bytes for n_tokens, (_, token_bytes) in zip(tokens, self.groups, strict=True))


def slowest(tiers: Iterable[str]) -> str:
    """The slowest of some tiers; one that is not known is slower than all others."""
    return max(tiers, key=lambda tier: TIERS.index(tier) if tier in TIERS else len(TIERS), default=MEMORY)


def attended_tokens(output: "SchedulerOutput") -> int:
    """What the tokens of a step look at together: each at itself and all before it."""
    cached = output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    return sum(
        n_tokens * computed.get(request_id, 0) + n_tokens * (n_tokens + 1) // 2
        for request_id, n_tokens in output.num_scheduled_tokens.items()
    )
