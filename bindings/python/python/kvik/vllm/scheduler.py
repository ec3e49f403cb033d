"""The scheduler's half: what is in the store, what is loaded, and what is saved."""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

import kvik
from kvik.vllm.metadata import KvikMetadata, LoadOrder, SaveOrder
from kvik.vllm.settings import Geometry, Settings

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger(f"vllm.{__name__}")


@dataclass
class Tracked:
    """A request that the scheduler has."""

    request: "Request"
    # None where its KV is not shared.
    chain: kvik.Chain | None = None
    lookup: kvik.Job | None = None
    # When its lookup is given up.
    lookup_deadline: float = 0.0
    block_ids: list[int] = field(default_factory=list)
    # Tokens that the engine itself has; what is loaded comes behind them.
    n_local_tokens: int = 0
    # Tokens that the store has, or gets by an order that was given.
    n_stored_tokens: int = 0
    # Whether blocks of it were or are read by a save.
    has_saves: bool = False


class SchedulerHalf:
    """Answers the scheduler from what the store's session knows; nothing here waits longer than `lookup_wait_ms`."""

    def __init__(self, store: kvik.Store, settings: Settings, geometry: Geometry) -> None:
        self.store = store
        self.settings = settings
        self.block_tokens = geometry.block_tokens
        self.tracked: dict[str, Tracked] = {}
        self.loads: list[LoadOrder] = []
        self.saves: list[SaveOrder] = []

    def matched_tokens(self, request: "Request", n_computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens behind the computed ones the store has; None while that is not known."""
        tracked = self.track(request)
        tracked.n_local_tokens = n_computed_tokens
        if params(request).get("skip_load"):
            return 0, False
        if tracked.lookup is None:
            # At least one token is computed, so that the next one can be sampled.
            tracked.chain = self.chain(request, request.num_tokens - 1)
            if tracked.chain is None or tracked.chain.n_tokens <= n_computed_tokens:
                return 0, False
            try:
                tracked.lookup = self.store.start_lookup(tracked.chain)
            except kvik.StoreGoneError:
                return 0, False
            tracked.lookup_deadline = time.monotonic() + self.settings.lookup_timeout_s
        if not tracked.lookup.wait(self.settings.lookup_wait_ms / 1000):
            if time.monotonic() < tracked.lookup_deadline:
                return None, False
            tracked.lookup = None
            return 0, False
        n_found = tracked.lookup.result
        # Asked again if the request is preempted: what the store has may be another then.
        tracked.lookup = None
        tracked.n_stored_tokens = n_found
        n_new = n_found - n_computed_tokens
        return (n_new, True) if n_new > 0 else (0, False)

    def after_alloc(self, request: "Request", blocks: "KVCacheBlocks", n_external_tokens: int) -> None:
        """Notes the blocks that are to be loaded."""
        tracked = self.track(request)
        tracked.block_ids = list(blocks.get_block_ids()[0])
        if n_external_tokens == 0 or tracked.chain is None:
            return
        end_token = tracked.n_local_tokens + n_external_tokens
        first, end = tracked.n_local_tokens // self.block_tokens, end_token // self.block_tokens
        chunk_tokens = self.store.chunk_tokens
        # Without a daemon the order is given all the same: the worker reports that nothing came.
        n_chunks = 0 if chunk_tokens is None else -(-end_token // chunk_tokens)
        packed = tracked.chain.pack(n_chunks)
        self.loads.append(LoadOrder(request.request_id, packed, first, tracked.block_ids[first:end]))

    def metadata(self, output: "SchedulerOutput") -> KvikMetadata:
        """The orders of this step."""
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
        orders = KvikMetadata(self.loads, self.saves, set(output.preempted_req_ids or ()))
        self.loads, self.saves = [], []
        return orders

    def finished(self, request: "Request", block_ids: list[int]) -> bool:
        """Saves what is left of a request that ended; says whether its blocks are still read."""
        tracked = self.tracked.pop(request.request_id, None)
        if tracked is None:
            return False
        # The last token was sampled and never computed.
        n_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        chain = None
        if self.settings.save == "all" and n_tokens > tracked.n_stored_tokens:
            chain = self.chain(request, n_tokens, after=tracked.chain)
            tracked.block_ids = list(block_ids)
            self.save(tracked, chain, n_tokens)
        chain = chain or tracked.chain
        if chain is not None and len(chain) > 0:
            try:
                self.store.note_request(chain, request.num_output_tokens)
            except kvik.StoreGoneError:
                logger.debug("the store is closed")
        return tracked.has_saves

    def track(self, request: "Request") -> Tracked:
        return self.tracked.setdefault(request.request_id, Tracked(request))

    def chain(
        self, request: "Request", n_tokens: int, after: kvik.Chain | None = None
    ) -> kvik.Chain | None:
        """The chain of the first tokens of a request; None where its KV is not to be shared, or there is no store."""
        if getattr(request, "prompt_embeds", None) is not None:
            return None
        tokens = list(request.all_token_ids[:n_tokens])
        try:
            if after is not None:
                return after.extended(tokens)
            return self.store.chain(tokens, salt=request.cache_salt or None, extras=extra_keys(request))
        except (kvik.StoreGoneError, kvik.InvalidValueError, OverflowError) as error:
            logger.debug("no chain for request %s: %s", request.request_id, error)
            return None

    def save_prompt(self, tracked: Tracked, n_computed_tokens: int) -> None:
        """Saves the chunks of the prompt that are computed after this step."""
        request = tracked.request
        n_tokens = min(n_computed_tokens, request.num_prompt_tokens)
        chunk_tokens = self.store.chunk_tokens
        if self.settings.save == "nothing" or chunk_tokens is None:
            return
        if n_tokens // chunk_tokens * chunk_tokens <= tracked.n_stored_tokens:
            return
        if tracked.chain is None or tracked.chain.n_tokens < n_tokens // chunk_tokens * chunk_tokens:
            tracked.chain = self.chain(request, request.num_prompt_tokens)
        self.save(tracked, tracked.chain, n_tokens)

    def save(self, tracked: Tracked, chain: kvik.Chain | None, n_tokens: int) -> None:
        chunk_tokens = self.store.chunk_tokens
        if chain is None or chunk_tokens is None or params(tracked.request).get("skip_save"):
            return
        n_chunks = min(n_tokens, chain.n_tokens) // chunk_tokens
        end = n_chunks * chunk_tokens
        if end <= tracked.n_stored_tokens or end > len(tracked.block_ids) * self.block_tokens:
            return
        first = tracked.n_stored_tokens // chunk_tokens * chunk_tokens // self.block_tokens
        block_ids = tracked.block_ids[: end // self.block_tokens]
        request_id, pin_s = tracked.request.request_id, self.pin_seconds(tracked.request)
        self.saves.append(SaveOrder(request_id, chain.pack(n_chunks), first, block_ids, pin_s))
        tracked.n_stored_tokens = end
        tracked.has_saves = True

    def pin_seconds(self, request: "Request") -> float | None:
        """For how long the chunks of a request stay in memory, if it asks for that and may."""
        pin_s, longest_s = params(request).get("pin_s"), self.settings.max_pin_s
        if pin_s is None:
            return None
        if isinstance(pin_s, bool) or not isinstance(pin_s, int | float) or not 0 < pin_s <= longest_s:
            logger.warning(
                "kvik: `pin_s` of request %s is %r; allowed: above 0, at most `max_pin_s` (%s)",
                request.request_id,
                pin_s,
                longest_s,
            )
            return None
        return float(pin_s)


def params(request: "Request") -> dict[str, Any]:
    """What a request says of the store, under `kvik` of its `kv_transfer_params`."""
    transfer_params = request.kv_transfer_params or {}
    return transfer_params.get("kvik") or {}


def extra_keys(request: "Request") -> list[tuple[int, bytes]]:
    """What the KV of a request depends on beside tokens: its adapter, and its images and other inputs."""
    extras = []
    if (lora := request.lora_request) is not None:
        path = getattr(lora, "lora_path", "")
        extras.append((0, f"lora\0{lora.lora_name}\0{path}".encode()))
    for feature in request.mm_features or ():
        extras.append((feature.mm_position.offset, f"mm\0{feature.identifier}".encode()))
    return extras
