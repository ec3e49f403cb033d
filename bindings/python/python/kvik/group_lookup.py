"""What a store has of a sequence whose layers have several groups of KV, and how much of it is in memory."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import kvik
from kvik.planner import MEMORY, slowest
from kvik.windows import PrefixSearch, Question, Window

if TYPE_CHECKING:
    from kvik import Chain, Job, Store


class Stores(Protocol):
    """The sessions of all groups."""

    stores: list["Store"]

    def part(self, group: int, keys: Sequence[bytes], chunk_tokens: int) -> "Chain":
        """The parts of one group of some chunks."""


@dataclass(frozen=True)
class GroupsFound:
    """As `kvik.Found`, for prefixes behind which all groups can go on."""

    n_chunks: int
    n_tokens: int
    # Of the longest such prefix that is in memory as a whole.
    n_memory_tokens: int
    slowest_tier: str


class GroupsLookup:
    """A lookup in all groups: it asks for shorter prefixes until every group can go on behind one.

    Where that one is not in memory, it goes on until it knows the longest that is, unless nothing depends on it
    (`asks_for_memory`).
    """

    def __init__(
        self,
        stores: Stores,
        keys: Sequence[bytes],
        windows: Sequence[Window],
        chunk_tokens: int,
        n_tokens: int,
        *,
        asks_for_memory: bool = False,
        part_of: GroupsFound | None = None,
        n_most_tokens: int | None = None,
    ) -> None:
        self.stores = stores
        self.keys = keys
        self.windows = windows
        self.chunk_tokens = chunk_tokens
        self.n_tokens = n_tokens
        self.asks_for_memory = asks_for_memory
        # What was found before, where this is about a part of it.
        self.part_of = part_of
        n_most_chunks = None if n_most_tokens is None else n_most_tokens // chunk_tokens
        self.search = PrefixSearch(windows, chunk_tokens, n_tokens, n_most_chunks)
        self.memory_search: PrefixSearch | None = None
        # The chunks of each group that are in memory, and the tiers of others that were found.
        self.in_memory: list[set[int]] = [set() for _ in windows]
        self.tiers: set[str] = set()
        self.asked: list[tuple[Question, Job]] = []
        self.ask()

    @property
    def result(self) -> int:
        return 0 if self.asked else self.search.n_chunks * self.chunk_tokens

    @property
    def found(self) -> GroupsFound | None:
        if self.asked or not self.asks_for_memory:
            return None
        n_chunks = self.search.n_chunks
        n_memory_chunks = n_chunks if self.memory_search is None else self.memory_search.n_chunks
        tier = MEMORY if n_memory_chunks == n_chunks else slowest(self.tiers)
        return GroupsFound(n_chunks, n_chunks * self.chunk_tokens, n_memory_chunks * self.chunk_tokens, tier)

    def wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.asked:
            for _, job in self.asked:
                if not job.wait(max(0.0, deadline - time.monotonic())):
                    return False
            for question, job in self.asked:
                self.answer(question, job)
            try:
                self.ask()
            except kvik.StoreGoneError:
                self.search.n_chunks = 0
                self.memory_search = None
                self.asked = []
        return True

    def ask(self) -> None:
        self.asked = []
        for question in self.questions():
            part = self.stores.part(question.group, self.keys[question.first : question.end], self.chunk_tokens)
            self.asked.append((question, self.stores.stores[question.group].start_lookup(part)))

    def questions(self) -> list[Question]:
        if self.memory_search is None:
            questions = self.search.questions()
            if questions or not self.asks_for_memory or self.is_in_memory():
                return questions
            self.memory_search = PrefixSearch(self.windows, self.chunk_tokens, self.n_tokens, self.search.n_chunks)
            self.memory_search.found = [set(chunks) for chunks in self.in_memory]
        return self.memory_search.questions()

    def answer(self, question: Question, job: "Job") -> None:
        n_found = job.result // self.chunk_tokens
        found = job.found
        n_in_memory = 0 if found is None else min(n_found, found.n_memory_tokens // self.chunk_tokens)
        end = min(question.first + n_in_memory, question.end)
        self.in_memory[question.group].update(range(question.first, end))
        if found is not None and n_in_memory < n_found:
            self.tiers.add(found.slowest_tier)
        if self.memory_search is None:
            self.search.answer(question, n_found)
        else:
            self.memory_search.answer(question, n_in_memory)

    def is_in_memory(self) -> bool:
        n_chunks = self.search.n_chunks
        return all(
            self.in_memory[group].issuperset(window.needed_chunks(n_chunks, self.chunk_tokens))
            for group, window in enumerate(self.windows)
        )
