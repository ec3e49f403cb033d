"""How much of SGLang's KV pool has memory: grows with what is allocated, and shrinks when it is idle or when others need memory."""

import logging
import time
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import EvictParams

from kvik.elastic.balloon import State
from kvik.elastic.slab_memory import SlabMemory
from kvik.sglang.elastic_balloon import PageBalloon

logger = logging.getLogger(f"sglang.{__name__}")

# How long memory that no request needs is kept, and the prefix cache of an idle engine.
SURPLUS_S = 5.0

# Memory that was refused is asked for again after this; the ledger forgets a wait after a second.
ASK_AGAIN_S = 0.05

# How long less is used after others asked for memory; they ask again.
ASKED_S = 2.0

# How often free slabs are counted while requests run, which waits for the device.
COUNT_S = 1.0

# How often a refusal is logged.
LOG_S = 10.0


class ElasticPages:
    """The pages of tokens of one allocator, with memory behind those that SGLang may use.

    Everything is called by the thread of SGLang's scheduler, which also allocates: what was there at the admission of a request is
    there when it is allocated.
    """

    def __init__(self, allocator: Any, memory: SlabMemory, cache_bytes: int) -> None:
        self.allocator = allocator
        self.memory = memory
        self.balloon = PageBalloon(allocator, memory.pages.slabs)
        self.slab_tokens = memory.pages.slabs.slab_blocks * allocator.page_size
        self.cache_slabs = cache_bytes // memory.slab_bytes
        # The most slabs to use, and until when.
        self.bound: tuple[int, float] | None = None
        # The fewest slabs that were refused, and until when they are not asked for.
        self.refused: tuple[int, float] | None = None
        now = time.monotonic()
        self.needed_at = self.count_at = self.log_at = now
        self.idle_since: float | None = None
        # When a request that was not admitted may be looked at again.
        self.short_until: float | None = None
        # Whether the only running request waits for memory.
        self.is_stalled = False

    # === For the allocator ===

    @property
    def n_used_slabs(self) -> int:
        return sum(state is not State.OUT for state in self.balloon.states)

    @property
    def held_tokens(self) -> int:
        """Tokens that SGLang must not use."""
        return self.balloon.n_held_pages * self.allocator.page_size

    @property
    def claimable_tokens(self) -> int:
        """Tokens for which memory could be taken now."""
        n_bytes = self.memory.memory.claimable_bytes - self.memory.taken_bytes
        return min(max(0, n_bytes) // self.memory.slab_bytes, self.n_growable_slabs) * self.slab_tokens

    @property
    def most_tokens(self) -> int:
        """Tokens for which there would be memory if all others gave back what they can."""
        n_slabs = (self.memory.memory.limit_bytes - self.memory.spare_bytes) // self.memory.slab_bytes
        return min(n_slabs, len(self.memory.pages.slabs)) * self.slab_tokens - self.allocator.page_size

    @property
    def n_growable_slabs(self) -> int:
        n_absent = self.balloon.count(State.OUT)
        return n_absent if self.bound is None else max(0, min(n_absent, self.bound[0] - self.n_used_slabs))

    def grow(self, n_tokens: int) -> bool:
        """Takes memory for so many tokens more, or for as many as there is memory for; says whether it was all."""
        now = self.needed_at = time.monotonic()
        n_slabs = -(-n_tokens // self.slab_tokens)
        slabs = self.balloon.absent(min(n_slabs, self.n_growable_slabs))
        if self.refused is not None and now < self.refused[1] and len(slabs) >= self.refused[0]:
            return False
        self.refused = None
        if slabs and not self.memory.take(slabs):
            slabs = self.take_some(slabs, now)
        self.balloon.arrived(slabs)
        return len(slabs) == n_slabs

    def take_some(self, slabs: list[int], now: float) -> list[int]:
        """Takes memory for slabs one by one, until it is refused."""
        n_taken = next((number for number, slab in enumerate(slabs) if not self.memory.take([slab])), len(slabs))
        if n_taken < len(slabs):
            self.refused = (len(slabs) - n_taken, now + ASK_AGAIN_S)
            if now > self.log_at:
                self.log_at = now + LOG_S
                logger.info("kvik: there is no more memory for KV now: %d bytes are taken", self.memory.taken_bytes)
        return slabs[:n_taken]

    def note_short(self) -> None:
        """A request was not admitted for the lack of memory."""
        self.short_until = time.monotonic() + ASK_AGAIN_S

    # === For the scheduler ===

    def note_stalled(self) -> None:
        self.is_stalled = True

    def asks_again(self) -> bool:
        """Whether requests that were not admitted should be looked at again; says so once."""
        if self.short_until is None or time.monotonic() < self.short_until:
            return False
        self.short_until = None
        return True

    def step(self, tree_cache: Any, *, is_starved: bool = False) -> None:
        """Before a step: gives back what others need, and what no request needed for a while.

        `is_starved` tells that the engine can do nothing before it gets memory.
        """
        now = time.monotonic()
        self.idle_since = None
        self.obey(tree_cache, now)
        if (is_starved or self.is_stalled) and self.refused is not None:
            self.memory.memory.note_starved()
        self.is_stalled = False
        if now < self.count_at:
            return
        self.count_at = now + COUNT_S
        if self.allocator.available_size() < 2 * self.slab_tokens:
            self.needed_at = now
        elif now > self.needed_at + SURPLUS_S:
            n_free = len(self.balloon.free_slabs())
            self.give_back(self.balloon.shrink(n_free - 1 - self.cache_slabs))

    def idle(self, tree_cache: Any) -> None:
        """Without a request: gives back what is free, and after a while the prefix cache but for what is kept of it."""
        now = time.monotonic()
        self.obey(tree_cache, now)
        if self.idle_since is None:
            self.idle_since = now
            self.give_back(self.balloon.shrink(len(self.memory.taken)))
        elif now > self.idle_since + SURPLUS_S and self.n_used_slabs - 1 > self.cache_slabs:
            self.empty(tree_cache, self.n_used_slabs - 1 - self.cache_slabs)
            # What could not be evicted is not tried again at once.
            self.idle_since = now

    def obey(self, tree_cache: Any, now: float) -> None:
        """Uses less while others need memory or the limit is lower."""
        self.give_back(self.balloon.settle())
        paged = self.memory.memory
        excess_bytes = max(paged.wanted_bytes(timeout_s=0.0), self.memory.taken_bytes - paged.claimable_bytes)
        if excess_bytes > 0:
            n_excess = -(-excess_bytes // self.memory.slab_bytes)
            self.bound = (max(1, len(self.memory.taken) - n_excess), now + ASKED_S)
        if self.bound is None:
            return
        if now > self.bound[1]:
            self.bound = None
            self.balloon.stay_all()
            return
        n_missing = self.n_used_slabs - self.bound[0]
        if n_missing > 0:
            n_missing -= self.empty(tree_cache, n_missing)
            self.balloon.drain(n_missing - len(self.balloon.held))
            self.give_back(self.balloon.settle())

    def empty(self, tree_cache: Any, n_slabs: int) -> int:
        """Gives back so many slabs, and evicts of the prefix cache until they are free; returns how many it were.

        SGLang evicts what was used longest ago, wherever it lies: a slab may need more than its own tokens evicted.
        """
        out = self.balloon.shrink(n_slabs)
        while len(out) < n_slabs and tree_cache is not None and tree_cache.evictable_size() > 0:
            evicted = tree_cache.evict(EvictParams(num_tokens=self.slab_tokens))
            if evicted.num_tokens_evicted == 0:
                break
            out += self.balloon.shrink(n_slabs - len(out))
        self.give_back(out)
        return len(out)

    def give_back(self, slabs: list[int]) -> None:
        self.memory.give_back(slabs)
