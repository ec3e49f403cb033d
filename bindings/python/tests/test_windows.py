"""What groups of layers with windows need of a sequence, against counting, and against an engine that takes blocks from windows."""

import random

from kvik.windows import BlockReaders, PrefixSearch, Window

N_CASES = 300


def some_window(rng: random.Random, block_tokens: int) -> Window:
    kind = rng.choice(["full", "reach", "section"])
    if kind == "full":
        return Window(block_tokens)
    if kind == "reach":
        return Window(block_tokens, reach_tokens=rng.choice([0, 1, block_tokens - 1, rng.randrange(1, 40)]))
    return Window(block_tokens, section_tokens=block_tokens * rng.randrange(1, 9))


def some_windows(rng: random.Random) -> tuple[list[Window], int]:
    """Groups, and a chunk that is a whole number of blocks of each."""
    windows = [some_window(rng, rng.choice([2, 4])) for _ in range(rng.randrange(1, 4))]
    return windows, 4 * rng.randrange(1, 5)


def read_blocks(window: Window, n_tokens: int) -> set[int]:
    """The whole blocks with a token that the next token reads."""

    def is_read(token: int) -> bool:
        if window.reach_tokens is not None:
            return token >= n_tokens - window.reach_tokens
        if window.section_tokens is not None:
            return token // window.section_tokens == n_tokens // window.section_tokens
        return True

    return {token // window.block_tokens for token in range(n_tokens) if is_read(token)}


def chunks_of(blocks: set[int], window: Window, chunk_tokens: int) -> set[int]:
    return {block * window.block_tokens // chunk_tokens for block in blocks}


def test_the_needed_blocks_are_those_that_the_next_token_reads():
    for seed in range(N_CASES):
        check_needed_blocks(random.Random(seed))


def check_needed_blocks(rng: random.Random) -> None:
    (window, *_), chunk_tokens = some_windows(rng)
    chunk_blocks = chunk_tokens // window.block_tokens
    for n_chunks in range(1, 12):
        n_tokens = n_chunks * chunk_tokens
        read = read_blocks(window, n_tokens)
        assert set(range(window.first_block(n_tokens), n_tokens // window.block_tokens)) == read
        assert set(window.needed_chunks(n_chunks, chunk_tokens)) == chunks_of(read, window, chunk_tokens)
        last = set(range((n_chunks - 1) * chunk_blocks, n_chunks * chunk_blocks))
        needed = set(window.needed_blocks(n_chunks - 1, chunk_tokens))
        assert needed == read & last
        # What was saved of a chunk is enough behind every longer prefix.
        for longer in range(n_chunks, 14):
            assert read_blocks(window, longer * chunk_tokens) & last <= needed


def test_the_search_finds_the_longest_prefix_that_every_group_can_serve():
    for seed in range(N_CASES):
        check_search(random.Random(seed))


def check_search(rng: random.Random) -> None:
    windows, chunk_tokens = some_windows(rng)
    n_tokens = rng.randrange(0, 20 * chunk_tokens)
    if rng.random() < 0.5:
        n_tokens -= n_tokens % chunk_tokens
    share = rng.choice([0.3, 0.8, 0.95, 1.0])
    has = [{chunk for chunk in range(20) if rng.random() < share} for _ in windows]

    def serves(n_chunks: int) -> bool:
        end = n_chunks * chunk_tokens
        if end == n_tokens and n_chunks > 0:
            # The last token is computed again, in the blocks that were taken for the next one.
            held = [read_blocks(window, end) for window in windows]
            read = [read_blocks(window, end - 1) | {(end - 1) // window.block_tokens} for window in windows]
            if any(not needed <= blocks for needed, blocks in zip(read, held, strict=True)):
                return False
        needed = [chunks_of(read_blocks(window, end), window, chunk_tokens) for window in windows]
        return all(chunks <= found for chunks, found in zip(needed, has, strict=True))

    search = PrefixSearch(windows, chunk_tokens, n_tokens)
    n_rounds = 0
    while questions := search.questions():
        for question in questions:
            n_found = 0
            while question.first + n_found in has[question.group] and question.first + n_found < question.end:
                n_found += 1
            search.answer(question, n_found)
        n_rounds += 1
        assert n_rounds < 50
    assert search.n_chunks == max(n for n in range(n_tokens // chunk_tokens + 1) if serves(n))


def test_where_all_is_there_one_round_of_questions_is_enough():
    search = PrefixSearch([Window(16), Window(16, reach_tokens=127)], 64, 1000)
    for question in search.questions():
        search.answer(question, question.end - question.first)
    assert search.questions() == [] and search.n_chunks == 15


class Pool:
    """Blocks of an engine by what was written last; the one that was freed first is given first."""

    def __init__(self, n_blocks: int) -> None:
        self.written: list[object] = [None] * n_blocks
        self.free = list(range(1, n_blocks))


class Sequence:
    """A request in an engine that keeps windows: it frees what is not read, then takes blocks, then computes."""

    def __init__(self, name: int, windows: list[Window], pool: Pool) -> None:
        self.name, self.windows, self.pool = name, windows, pool
        self.held: list[list[int]] = [[] for _ in windows]
        # As a connector sees them: blocks that left are still there.
        self.tables: list[list[int]] = [[] for _ in windows]
        self.n_computed = 0

    def step(self, n_tokens: int) -> list[int]:
        """Computes tokens; the blocks that are written."""
        given: list[int] = []
        end = self.n_computed + n_tokens
        for window, held, table in zip(self.windows, self.held, self.tables, strict=True):
            for block in range(min(window.first_block(self.n_computed), len(held))):
                self.pool.free += [held[block]] if held[block] else []
                held[block] = 0
            while len(held) * window.block_tokens < end:
                block = self.pool.free.pop(0)
                held.append(block)
                table.append(block)
                given.append(block)
        return given

    def write(self, n_tokens: int) -> None:
        end = self.n_computed + n_tokens
        for group, (window, held) in enumerate(zip(self.windows, self.held, strict=True)):
            for block in range(self.n_computed // window.block_tokens, -(-end // window.block_tokens)):
                # What a block has when it was written up to a token.
                self.pool.written[held[block]] = (self.name, group, block, min(end, (block + 1) * window.block_tokens))
        self.n_computed = end


def run(seed: int, waits: bool) -> tuple[int, int]:
    """Several requests in a small pool, with saves that run late: how many parts were stored, and how many of them wrong."""
    rng = random.Random(seed)
    windows, chunk_tokens = [Window(4), Window(4, reach_tokens=rng.randrange(4, 20)), Window(2, section_tokens=8)], 8
    pool, readers = Pool(220), BlockReaders()
    sequences = [Sequence(name, windows, pool) for name in range(4)]
    saves: dict[int, list[tuple[tuple[int, int, int], list[int]]]] = {}
    stored: dict[tuple[int, int, int], list[object]] = {}
    n_orders = 0

    def run_save(number: int) -> None:
        for key, blocks in saves.pop(number, ()):
            stored[key] = [pool.written[block] for block in blocks]

    for _ in range(60):
        sequence = rng.choice(sequences)
        n_tokens = rng.choice([1, 1, 2, 5, 11])
        if sequence.n_computed + n_tokens > 160:
            continue
        overtaken = readers.take(sequence.step(n_tokens))
        if waits:
            for number in overtaken:
                run_save(number)
        before = sequence.n_computed
        sequence.write(n_tokens)
        n_orders += 1
        order = []
        for chunk in range(before // chunk_tokens, sequence.n_computed // chunk_tokens):
            for group, window in enumerate(windows):
                blocks = window.blocks_to_save(sequence.tables[group], chunk, chunk_tokens, before)
                if blocks is not None:
                    order.append(((sequence.name, group, chunk), blocks))
                    readers.note(n_orders, blocks)
                # A window never lacks what it needs when the last token of a chunk is computed.
                assert (blocks is not None) == bool(window.needed_blocks(chunk, chunk_tokens))
        saves[n_orders] = order
        if rng.random() < 0.1:
            run_save(min(saves))
    for number in list(saves):
        run_save(number)
    n_wrong = 0
    for (name, group, chunk), contents in stored.items():
        window = windows[group]
        needed = window.needed_blocks(chunk, chunk_tokens)
        right = [(name, group, block, (block + 1) * window.block_tokens) for block in needed]
        n_wrong += contents[len(contents) - len(needed) :] != right
    return len(stored), n_wrong


def test_a_block_that_leaves_its_window_is_not_written_before_its_save_has_ended():
    results = [run(seed, waits=True) for seed in range(40)]
    assert sum(n_stored for n_stored, _ in results) > 1000
    assert all(n_wrong == 0 for _, n_wrong in results)


def test_without_waiting_such_saves_would_store_what_others_wrote():
    assert sum(n_wrong for _, n_wrong in (run(seed, waits=False) for seed in range(40))) > 0


def test_blocks_that_are_gone_or_never_were_are_not_saved():
    window = Window(4, reach_tokens=6)
    table = [5, 6, 7, 8]
    # Behind eight tokens blocks 0 and 1 are read, of which the window's first token is in block 0.
    assert window.blocks_to_save(table, 0, 8, 7) == [5, 6]
    assert window.blocks_to_save(table, 0, 8, 10) is None
    assert window.blocks_to_save([0, 6, 7, 8], 0, 8, 7) is None
    assert window.blocks_to_save([5], 0, 8, 7) is None
    # A window that is shorter than the chunk: what is never read of it is not taken from a block that may be anywhere.
    assert Window(4, reach_tokens=3).blocks_to_save(table, 0, 16, 15) == [8, 8, 8, 8]


def test_a_block_is_named_once_with_its_last_save():
    readers = BlockReaders()
    readers.note(1, [3, 4])
    readers.note(2, [4, 5])
    assert readers.take([4, 9]) == {2}
    assert readers.take([4]) == set()
    assert readers.take([3, 5]) == {1, 2}
