"""The scheduler's half: what is in the store, what is loaded, and what is saved."""

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

import kvik
from kvik.controls import Controls, refused
from kvik.planner import Found, Planner
from kvik.vllm.layers import StepLoads
from kvik.vllm.metadata import KvikMetadata, LoadOrder, SaveOrder
from kvik.vllm.settings import Geometry, Settings

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")

# How old a lookup may be that was begun when its request arrived, when the scheduler asks for it.
FRESH_S = 0.1


class Lookup(Protocol):
    """What is asked of the store for a request."""

    @property
    def result(self) -> int:
        """Tokens that the store has."""

    @property
    def found(self) -> Found | None:
        """What the store has, and where; `None` where that is not known."""

    def wait(self, timeout_s: float) -> bool:
        """Waits for the answer; says whether it came in time."""


@dataclass
class Tracked:
    """A request that the scheduler has."""

    request: "Request"
    controls: Controls
    # None where its KV is not shared.
    chain: kvik.Chain | None = None
    lookup: Lookup | None = None
    # When its lookup was begun.
    lookup_begin: float = 0.0
    # Whether that was before the scheduler asked.
    is_ahead: bool = False
    # What the last lookup found; None without a planner.
    found: Found | None = None
    block_ids: list[int] = field(default_factory=list)
    # Whether what was found last is to be loaded inside of the step that computes the rest.
    is_step_load: bool = False
    # Whether a load was ordered since it began, or was preempted last.
    was_loaded: bool = False
    # Tokens that the engine itself has; what is loaded comes behind them.
    n_local_tokens: int = 0
    # Tokens that the store has, or gets by an order that was given.
    n_stored_tokens: int = 0
    # Whether blocks of it were or are read by a save.
    has_saves: bool = False


class SchedulerHalf:
    """Answers the scheduler from what the store's session knows; nothing here waits longer than `lookup_wait_ms`."""

    tracked_type: type[Tracked] = Tracked

    def __init__(
        self,
        store: kvik.Store,
        settings: Settings,
        geometry: Geometry,
        planner: Planner | None = None,
        step_loads: StepLoads | None = None,
    ) -> None:
        self.store = store
        self.settings = settings
        # Without one, all that is found is loaded.
        self.planner = planner
        # Without them, all loads end before their requests are scheduled.
        self.step_loads = step_loads
        self.block_tokens = geometry.block_tokens
        self.tracked: dict[str, Tracked] = {}
        self.loads: list[LoadOrder] = []
        self.saves: list[SaveOrder] = []

    def arrived(self, request: "Request") -> None:
        """Begins the lookup of a request, so that it is answered when the request is scheduled."""
        tracked = self.track(request)
        if not tracked.controls.skip_load:
            tracked.is_ahead = self.begin_lookup(tracked, 0)

    def begin_lookup(self, tracked: Tracked, n_computed_tokens: int) -> bool:
        """Says whether there is anything to find behind the computed tokens."""
        # The engine computes the last token of a prompt that is loaded whole, so that the next one can be sampled.
        tracked.chain = self.chain(tracked, tracked.request.num_tokens)
        if tracked.chain is None or tracked.chain.n_tokens <= n_computed_tokens:
            return False
        try:
            tracked.lookup = self.start_lookup(tracked)
        except kvik.StoreGoneError:
            return False
        tracked.lookup_begin = time.monotonic()
        return True

    def start_lookup(self, tracked: Tracked) -> Lookup:
        return self.store.start_lookup(tracked.chain)

    def matched_tokens(self, request: "Request", n_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind the computed ones the store has; None while that is not known."""
        tracked = self.track(request)
        if self.step_loads is not None and self.step_loads.holds_others:
            return None, False
        tracked.n_local_tokens = n_computed_tokens
        if tracked.was_loaded:
            # Asked again though it was loaded: the load failed, and would again. What is computed is saved.
            tracked.n_stored_tokens = 0
            return 0, False
        if tracked.controls.skip_load:
            return 0, False
        if tracked.is_ahead and time.monotonic() > tracked.lookup_begin + FRESH_S:
            # It has waited for its turn: others may have stored what it needs, or displaced it.
            tracked.lookup = None
        tracked.is_ahead = False
        if tracked.lookup is None and not self.begin_lookup(tracked, n_computed_tokens):
            return 0, False
        if not tracked.lookup.wait(self.settings.lookup_wait_ms / 1000):
            if time.monotonic() < tracked.lookup_begin + self.settings.lookup_timeout_s:
                return None, False
            tracked.lookup = None
            return 0, False
        n_found = tracked.lookup.result
        found = tracked.lookup.found
        if self.planner is not None and found is not None:
            tracked.found = found
            # What is computed instead is saved again, so that memory has it.
            n_planned = self.tokens_to_load(tracked, n_computed_tokens)
            if n_planned is None:
                return None, False
            n_found = n_planned
        # Asked again if the request is preempted: what the store has may be another then.
        tracked.lookup = None
        tracked.n_stored_tokens = n_found
        n_new = n_found - n_computed_tokens
        if n_found == request.num_tokens and n_new < (self.store.chunk_tokens or 0):
            # The engine has nearly all of it: computing the rest costs less than a chunk that is loaded.
            return 0, False
        if n_new <= 0:
            return 0, False
        tracked.is_step_load = self.step_loads is not None and self.step_loads.takes(
            found, n_found, request.num_tokens, len(self.tracked)
        )
        return n_new, not tracked.is_step_load

    def tokens_to_load(self, tracked: Tracked, n_computed_tokens: int) -> int | None:
        """How many of the found tokens the engine should have before it computes; `None` where it must be asked again."""
        return self.planner.tokens_to_load(tracked.found, n_computed_tokens)

    def after_alloc(self, request: "Request", blocks: "KVCacheBlocks", n_external_tokens: int) -> None:
        """Notes the blocks that are to be loaded."""
        tracked = self.track(request)
        tracked.block_ids = list(blocks.get_block_ids()[0])
        end_token = tracked.n_local_tokens + n_external_tokens
        self.begin_measured_load(tracked, end_token)
        if n_external_tokens == 0 or tracked.chain is None:
            return
        first, end = tracked.n_local_tokens // self.block_tokens, end_token // self.block_tokens
        chunk_tokens = self.store.chunk_tokens
        # Without a daemon the order is given all the same: the worker reports that nothing came.
        n_chunks = 0 if chunk_tokens is None else -(-end_token // chunk_tokens)
        packed = tracked.chain.pack(n_chunks)
        tracked.was_loaded = True
        order = LoadOrder(request.request_id, packed, first, tracked.block_ids[first:end])
        if tracked.is_step_load and self.step_loads is not None:
            self.step_loads.give(order, tracked.block_ids)
        else:
            self.loads.append(order)

    def begin_measured_load(self, tracked: Tracked, end_token: int) -> None:
        """Notes that a load up to `end_token` begins, and what is computed instead."""
        if self.planner is not None and tracked.found is not None:
            self.planner.planned(tracked.request.request_id, tracked.found, tracked.n_local_tokens, end_token)
            tracked.found = None

    def metadata(self, output: "SchedulerOutput") -> KvikMetadata:
        """The orders of this step."""
        step_orders = [] if self.step_loads is None else self.step_loads.scheduled()
        for new in output.scheduled_new_reqs:
            if (tracked := self.tracked.get(new.req_id)) is not None:
                tracked.block_ids = list(new.block_ids[0])
                self.save_prompt(tracked, new.num_computed_tokens + output.num_scheduled_tokens[new.req_id])
        cached = output.scheduled_cached_reqs
        rows = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, new_block_ids, n_computed_tokens in rows:
            if (tracked := self.tracked.get(request_id)) is None:
                continue
            if new_block_ids is not None:
                if request_id in cached.resumed_req_ids:
                    tracked.block_ids = list(new_block_ids[0])
                else:
                    tracked.block_ids.extend(new_block_ids[0])
            self.save_prompt(tracked, n_computed_tokens + output.num_scheduled_tokens[request_id])
        if self.planner is not None:
            # A step that loads says nothing of computing.
            self.planner.step_began(output, is_measured=not step_orders)
        preempted = set(output.preempted_req_ids or ())
        for request_id in preempted & self.tracked.keys():
            self.tracked[request_id].was_loaded = False
        orders = KvikMetadata(self.loads, step_orders, self.saves, preempted)
        self.loads, self.saves = [], []
        return orders

    def reported(self, output: "KVConnectorOutput") -> None:
        """Takes what the workers made of a step."""
        if self.planner is not None:
            self.planner.step_ended()
            self.planner.loads_ended(output.finished_recving or (), is_whole=not output.invalid_block_ids)
        failed = None if self.step_loads is None else self.step_loads.reported(output.invalid_block_ids)
        if failed is not None and (tracked := self.tracked.get(failed)) is not None:
            # It is computed, and not loaded again. What is computed is saved.
            tracked.n_stored_tokens = 0

    def finished(self, request: "Request", block_ids: list[int]) -> bool:
        """Saves what is left of a request that ended; says whether its blocks are still read."""
        tracked = self.tracked.pop(request.request_id, None)
        if tracked is None:
            return False
        if self.planner is not None:
            self.planner.forget(request.request_id)
        # The last token was sampled and never computed.
        n_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        if self.settings.save == "prompts":
            n_tokens = min(n_tokens, request.num_prompt_tokens)
        chain = None
        # The answer's tokens are copied and hashed only where they end a chunk.
        if self.adds_chunk(tracked, n_tokens) and self.saves_at_end(tracked):
            chain = self.chain(tracked, n_tokens, after=tracked.chain)
            tracked.block_ids = list(block_ids)
            self.save(tracked, chain, n_tokens)
        self.note(request, chain or tracked.chain)
        return tracked.has_saves

    def saves_at_end(self, tracked: Tracked) -> bool:
        """Whether something may be saved when a request ends."""
        request = tracked.request
        if self.step_loads is None or not self.step_loads.is_of(request.request_id):
            return self.settings.save == "all"
        # The chunks of its prompt were not saved yet. One that is aborted may have a load that failed; one that ends by itself
        # has none, since vLLM takes no tokens of it then.
        ended_by_itself = request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
        return self.settings.save != "nothing" and ended_by_itself

    def note(self, request: "Request", chain: kvik.Chain | None) -> None:
        """Tells the eviction policies of a request that has ended."""
        if chain is None or len(chain) == 0:
            return
        try:
            self.store.note_request(chain, request.num_output_tokens)
        except kvik.StoreGoneError:
            logger.debug("the store is closed")

    def track(self, request: "Request") -> Tracked:
        tracked = self.tracked.get(request.request_id)
        if tracked is None:
            tracked = self.tracked[request.request_id] = self.tracked_type(request, self.controls(request))
        return tracked

    def controls(self, request: "Request") -> Controls:
        """The controls of a request. With one that is wrong it neither loads nor saves: what was meant is not known."""
        try:
            controls = Controls.read(request.kv_transfer_params)
        except kvik.InvalidValueError as error:
            logger.warning("kvik: request %s does without the store: %s", request.request_id, error)
            return Controls(skip_load=True, skip_save=True)
        if controls.pin_s is not None and controls.pin_s > self.settings.max_pin_s:
            error = refused("pin_s", controls.pin_s, f"at most `max_pin_s` ({self.settings.max_pin_s})")
            logger.warning("kvik: request %s is not pinned: %s", request.request_id, error)
            return replace(controls, pin_s=None)
        return controls

    def chain(
        self, tracked: Tracked, n_tokens: int, after: kvik.Chain | None = None
    ) -> kvik.Chain | None:
        """The chain of the first tokens of a request; None where its KV is not to be shared, or there is no store."""
        request = tracked.request
        if getattr(request, "prompt_embeds", None) is not None:
            return None
        tokens = list(request.all_token_ids[:n_tokens])
        try:
            if after is not None:
                return after.extended(tokens)
            extras = extra_keys(request) + tracked.controls.extra_keys()
            return self.store.chain(tokens, salt=request.cache_salt or None, extras=extras)
        except (kvik.StoreGoneError, kvik.InvalidValueError, OverflowError, UnicodeError) as error:
            logger.debug("no chain for request %s: %s", request.request_id, error)
            return None

    def save_prompt(self, tracked: Tracked, n_computed_tokens: int) -> None:
        """Saves the chunks of the prompt that are computed after this step."""
        request = tracked.request
        n_tokens = min(n_computed_tokens, request.num_prompt_tokens)
        if self.settings.save == "nothing" or tracked.controls.skip_save or not self.adds_chunk(tracked, n_tokens):
            return
        if self.step_loads is not None and self.step_loads.is_of(request.request_id):
            # What is computed in this step is right if its load does not fail; a later order is of these chunks too.
            return
        if tracked.chain is None or tracked.chain.n_tokens < self.whole_chunks(n_tokens):
            tracked.chain = self.chain(tracked, request.num_prompt_tokens)
        self.save(tracked, tracked.chain, n_tokens)

    def whole_chunks(self, n_tokens: int) -> int:
        """The tokens of the whole chunks among the first `n_tokens`; 0 without a daemon."""
        chunk_tokens = self.store.chunk_tokens
        return 0 if chunk_tokens is None else n_tokens // chunk_tokens * chunk_tokens

    def adds_chunk(self, tracked: Tracked, n_tokens: int) -> bool:
        """Whether a whole chunk among the first `n_tokens` is not stored yet."""
        return self.whole_chunks(n_tokens) > tracked.n_stored_tokens

    def save(self, tracked: Tracked, chain: kvik.Chain | None, n_tokens: int) -> None:
        chunk_tokens = self.store.chunk_tokens
        controls = tracked.controls
        if chain is None or chunk_tokens is None or controls.skip_save:
            return
        n_chunks = min(n_tokens, chain.n_tokens) // chunk_tokens
        end = n_chunks * chunk_tokens
        if end <= tracked.n_stored_tokens or end > len(tracked.block_ids) * self.block_tokens:
            return
        first = tracked.n_stored_tokens // chunk_tokens * chunk_tokens // self.block_tokens
        block_ids = tracked.block_ids[: end // self.block_tokens]
        order = SaveOrder(tracked.request.request_id, chain.pack(n_chunks), first, block_ids)
        order.pin_s, order.ttl_s, order.priority = controls.pin_s, controls.ttl_s, controls.priority
        self.saves.append(order)
        tracked.n_stored_tokens = end
        tracked.has_saves = True


def extra_keys(request: "Request") -> list[tuple[int, bytes]]:
    """What the KV of a request depends on beside tokens: its adapter, and its images and other inputs."""
    extras = []
    if (lora := request.lora_request) is not None:
        path = getattr(lora, "lora_path", "")
        extras.append((0, f"lora\0{lora.lora_name}\0{path}".encode()))
    for feature in request.mm_features or ():
        extras.append((feature.mm_position.offset, f"mm\0{feature.identifier}".encode()))
    return extras
