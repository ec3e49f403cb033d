"""What groups of layers need of a sequence to go on behind it: all of it, or a window before the next token.

Tokens are counted in blocks, which an engine allocates and frees, and in chunks, which a store has or has not. A chunk is a
whole number of blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Window:
    """The tokens that layers of a group read: all, the last `reach_tokens`, or those of the last section."""

    block_tokens: int
    # Tokens before the next one.
    reach_tokens: int | None = None
    # Sections begin at multiples of this, and layers read nothing before the next token's.
    section_tokens: int | None = None

    @property
    def is_full(self) -> bool:
        return self.reach_tokens is None and self.section_tokens is None

    def first_block(self, n_tokens: int) -> int:
        """The first block that is read behind `n_tokens`: the engine frees those before."""
        first_token = 0
        if self.reach_tokens is not None:
            first_token = max(0, n_tokens - self.reach_tokens)
        elif self.section_tokens is not None:
            first_token = n_tokens // self.section_tokens * self.section_tokens
        return first_token // self.block_tokens

    def needed_chunks(self, n_chunks: int, chunk_tokens: int) -> range:
        """The chunks that are read behind the first `n_chunks`."""
        first_token = self.first_block(n_chunks * chunk_tokens) * self.block_tokens
        return range(first_token // chunk_tokens, n_chunks)

    def needed_blocks(self, chunk: int, chunk_tokens: int) -> range:
        """The blocks of a chunk that are read behind it. Behind later chunks no others of it are."""
        chunk_blocks = chunk_tokens // self.block_tokens
        end = (chunk + 1) * chunk_blocks
        return range(min(end, max(chunk * chunk_blocks, self.first_block((chunk + 1) * chunk_tokens))), end)

    def blocks_to_save(
        self, table: Sequence[int], chunk: int, chunk_tokens: int, n_computed_tokens: int
    ) -> list[int] | None:
        """The engine's blocks of a chunk; `None` where there is nothing to save, or one that is needed is gone.

        `table` has a request's blocks from its start on, with 0 for those that it never had. When `n_computed_tokens` of it had
        been computed, the engine freed what is not read behind them. In the place of a block that is never read there may be
        another one.
        """
        needed = self.needed_blocks(chunk, chunk_tokens)
        if not needed or needed.start < self.first_block(n_computed_tokens) or needed.stop > len(table):
            return None
        blocks = [table[block] for block in needed]
        if 0 in blocks:
            return None
        # One that is needed stays as it is while it is read; those before may be written by others.
        return blocks[:1] * (chunk_tokens // self.block_tokens - len(needed)) + blocks


@dataclass(frozen=True)
class Question:
    """Asks how many chunks the store has of a group, from `first` on and before `end`."""

    group: int
    first: int
    end: int


class PrefixSearch:
    """Finds the longest prefix of a sequence, in chunks, behind which every group can go on.

    Ask the store each of `questions`, give `answer` for all of them, and repeat until there are none; then `n_chunks` is the
    result. Each answer but a full one makes the prefix shorter: a chunk that is missing is needed behind every prefix between
    it and the one that was asked for, because windows only move forward.
    """

    def __init__(
        self, windows: Sequence[Window], chunk_tokens: int, n_tokens: int, n_most_chunks: int | None = None
    ) -> None:
        self.windows = windows
        self.chunk_tokens = chunk_tokens
        self.n_tokens = n_tokens
        self.n_chunks = n_tokens // chunk_tokens
        if n_most_chunks is not None:
            self.n_chunks = min(self.n_chunks, n_most_chunks)
        # The chunks of each group that the store has.
        self.found: list[set[int]] = [set() for _ in windows]
        self.leave_last_token()

    def questions(self) -> list[Question]:
        questions = []
        for group, window in enumerate(self.windows):
            needed = window.needed_chunks(self.n_chunks, self.chunk_tokens)
            unknown = [chunk for chunk in needed if chunk not in self.found[group]]
            if unknown:
                questions.append(Question(group, unknown[0], unknown[-1] + 1))
        return questions

    def answer(self, question: Question, n_found: int) -> None:
        """Takes how many chunks the store has, from the question's first on."""
        end = min(question.first + n_found, question.end)
        self.found[question.group].update(range(question.first, end))
        if end < question.end:
            self.n_chunks = min(self.n_chunks, end)
            self.leave_last_token()

    def leave_last_token(self) -> None:
        """Of a whole sequence an engine computes the last token again, and may have freed what that one reads."""
        if self.n_chunks * self.chunk_tokens != self.n_tokens or self.n_chunks == 0:
            return
        if any(window.first_block(self.n_tokens - 1) < window.first_block(self.n_tokens) for window in self.windows):
            self.n_chunks -= 1


class BlockReaders:
    """Which saves read a block that its request may lose before they end.

    A block outside of its window goes to other requests while the save of it may still run. The scheduler notes what each
    save reads; where a block is written anew, the save is waited for. Those that have ended long ago are named too.
    """

    def __init__(self) -> None:
        # The last save of each block.
        self.saves: dict[int, int] = {}

    def note(self, save: int, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.saves[block] = save

    def take(self, blocks: Sequence[int]) -> set[int]:
        """The saves that must have ended before these blocks are written."""
        return {self.saves.pop(block) for block in blocks if block in self.saves}
