"""kvik inside SGLang's HiCache: its real host pools, controller and threads, with every byte of a page compared.

KVIK_ENGINES names a virtual environment made by `engines/install`, KVIK_PACKAGE the folder of the package `kvik`. Two processes
share a daemon, so what one loads the other has stored. The last tests have SGLang's radix tree too. Only its copies between a GPU
and the host pool are replaced.
"""

import contextlib
import itertools
import os
import pathlib
import random
import subprocess
import time
from collections.abc import Iterator

import pytest
from engine_processes import ENGINES, Driver, eventually
from store_daemon import CHUNK_TOKENS, Daemon, spoil
from vllm_server import PACKAGE

pytestmark = pytest.mark.skipif(not ENGINES, reason="KVIK_ENGINES is not set")

PAGE_TOKENS = 16
NAMES = itertools.count()


class Process(Driver):
    """SGLang in a process of its own, with any number of engines."""

    def __init__(self, driver: str = "sglang_pages.py") -> None:
        super().__init__(driver, PYTHONPATH=os.path.abspath(PACKAGE))

    def engine(self, daemon: Daemon, **settings: object) -> "Engine":
        engine = Engine(self, f"engine-{next(NAMES)}")
        engine.answer = self.ask("open", name=engine.name, socket=str(daemon.socket), **settings)
        return engine


class Engine:
    def __init__(self, process: Process, name: str) -> None:
        self.process = process
        self.name = name
        self.answer: dict = {}

    def ask(self, what: str, **arguments: object) -> dict:
        assert "error" not in self.answer, self.answer
        return self.process.ask("ask", name=self.name, what=what, **arguments)

    def store(self, tokens: list[int], **arguments: object) -> int:
        return self.ask("store", tokens=tokens, **arguments)["n_tokens"]

    def fetch(self, tokens: list[int], is_steady: bool = True, **arguments: object) -> int:
        """Tokens that a request gets; every byte of them must be right. A steady daemon gives all that it has found."""
        answer = self.ask("fetch", tokens=tokens, **arguments)
        assert answer["is_right"], answer
        assert answer["n_loaded"] == answer["n_found"] or not is_steady, answer
        return answer["n_loaded"]

    def end(self) -> None:
        self.process.ask("end", name=self.name)


@pytest.fixture(scope="module")
def processes() -> Iterator[list[Process]]:
    with running("sglang_pages.py") as both:
        yield both


@pytest.fixture(scope="module")
def trees() -> Iterator[list[Process]]:
    with running("sglang_hicache.py") as both:
        yield both


@contextlib.contextmanager
def running(driver: str) -> Iterator[list[Process]]:
    both = [Process(driver), Process(driver)]
    try:
        for process in both:
            assert process.read() == {"is_ready": True}
        yield both
    finally:
        for process in both:
            process.process.kill()
            process.process.wait()


@pytest.fixture
def daemon(tmp_path: pathlib.Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path)
    yield daemon
    daemon.kill()


def prompt(seed: int, n_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(10, 4000), k=n_tokens)


POOLS = [
    {"layout": "layer_first"},
    {"layout": "page_first"},
    {"layout": "page_first_direct"},
    {"layout": "page_head"},
    {"layout": "layer_first", "page_tokens": 1},
    {"layout": "page_first", "page_tokens": 64, "dtype": "float32"},
    {"layout": "layer_first", "is_mla": True},
    {"layout": "page_first", "is_mla": True},
    {"layout": "page_first_direct", "is_mla": True},
]


@pytest.mark.parametrize("pool", POOLS, ids=lambda pool: "-".join(map(str, pool.values())))
def test_pages_that_one_process_stores_another_loads_byte_by_byte(processes, daemon, pool) -> None:
    page_tokens = pool.get("page_tokens", PAGE_TOKENS)
    first, second = (process.engine(daemon, **pool) for process in processes)
    assert first.answer["is_v1"], first.answer
    prompts = [prompt(seed, n_pages * page_tokens + 3) for seed, n_pages in enumerate((9, 1, 20))]
    for tokens in prompts:
        assert second.fetch(tokens) == 0
        whole = len(tokens) // page_tokens * page_tokens
        assert first.store(tokens) == whole
        assert second.fetch(tokens) == whole
        # A prompt that goes on otherwise shares the pages before.
        assert second.fetch([*tokens[: whole // 2], *prompt(99, whole)]) == whole // 2 // page_tokens * page_tokens
        # Other salts share nothing.
        assert second.fetch(tokens, salt="tenant") == 0
    n_pages = sum(len(tokens) // page_tokens for tokens in prompts)
    assert first.ask("stats") == {"loaded": 0, "saved": n_pages}
    first.end()
    second.end()


def test_the_start_is_logged_with_what_is_cached_where_and_a_page_is_tested(processes, daemon) -> None:
    lines = processes[0].engine(daemon, layout="page_first", model="org/name").answer["lines"]
    assert lines[0] == "kvik: a page was written, read back and is the same"
    assert f"pages of org/name are kept in the store at {daemon.socket} (attached)" in lines[1]
    assert "16 tokens and 6144 bytes a page, page_first, torch.bfloat16, rank 0 of 1, copied once" in lines[1]
    lines = processes[0].engine(daemon, extra={"self_test": False}).answer["lines"]
    assert len(lines) == 1


def test_pages_of_engines_that_differ_in_anything_are_never_shared(processes, daemon) -> None:
    tokens = prompt(1, 8 * PAGE_TOKENS)
    same = {"layout": "page_first", "tp_size": 1}
    assert processes[0].engine(daemon, **same).store(tokens) == len(tokens)
    changes = [
        {"layout": "page_first_direct"},
        {"layout": "layer_first"},
        {"dtype": "float16"},
        {"model": "other"},
        {"is_mla": True},
        {"tp_size": 2},
        {"page_tokens": 32},
        {"extra": {"model": "step-100"}},
        {"extra": {"interface_v1": 0}},
    ]
    for change in changes:
        # Of another seed: what is found by mistake has other bytes.
        engine = processes[1].engine(daemon, **(same | change | {"seed": 7}))
        assert engine.fetch(tokens) == 0, change
        engine.end()
    assert processes[1].engine(daemon, **same).fetch(tokens) == len(tokens)


SERVERS = [
    {"revision": "1234"},
    {"quantization": "fp8"},
    {"kv_cache_dtype": "fp8_e5m2"},
    {"json_model_override_args": '{"rope_theta": 2}'},
    {"speculative_algorithm": "NGRAM"},
]


def test_pages_of_servers_with_other_arguments_weights_or_adapters_are_never_shared(
    processes, daemon, tmp_path: pathlib.Path
) -> None:
    tokens = prompt(20, 4 * PAGE_TOKENS)
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    for folder in (model, adapter):
        folder.mkdir()
        (folder / "weights.safetensors").write_bytes(bytes(5000))
    (model / "config.json").write_text('{"layers": 3, "_name_or_path": "there"}')
    same = {"model_path": str(model), "lora_paths": [f"name={adapter}"]}

    def found(**arguments: object) -> int:
        processes[0].ask("serve", **(same | arguments))
        engine = processes[0].engine(daemon)
        n_found = engine.fetch(tokens)
        engine.end()
        return n_found

    def change(path: pathlib.Path, content: bytes) -> None:
        before = path.read_bytes()
        path.write_bytes(content)
        assert found() == 0, path
        path.write_bytes(before)

    try:
        processes[0].ask("serve", **same)
        first = processes[0].engine(daemon)
        assert first.store(tokens) == len(tokens)
        for arguments in SERVERS:
            assert found(**arguments) == 0, arguments
        change(model / "weights.safetensors", bytes(4999) + b"1")
        change(adapter / "weights.safetensors", b"1" + bytes(4999))
        change(model / "config.json", b'{"layers": 4}')
        (model / "config.json").write_text('{"layers": 3, "_name_or_path": "here"}')
        assert found() == len(tokens)
        # Weights that are loaded while the engine runs have a name too.
        processes[0].ask("load_weights", version="step-2")
        assert first.fetch(tokens) == 0
        assert first.store(tokens) == len(tokens)
        processes[0].ask("load_weights", version="step-3")
        assert first.fetch(tokens) == 0
        processes[0].ask("load_weights", version="step-2")
        assert first.fetch(tokens) == len(tokens)
    finally:
        processes[0].ask("serve")


def test_processes_that_store_and_load_the_same_pages_at_once_get_the_right_ones(processes, daemon) -> None:
    engines = [process.engine(daemon, page_tokens=64, dtype="float32") for process in processes]
    n_loaded = 0
    for round_idx in range(30):
        tokens = prompt(30 + round_idx // 3, 8 * 64)
        for engine, what in zip(engines, random.Random(round_idx).choices(["store", "fetch"], k=2), strict=True):
            engine.process.begin("ask", name=engine.name, what=what, tokens=tokens)
        for engine in engines:
            answer = engine.process.read()
            assert answer.get("is_right", True), answer
            n_loaded += answer.get("n_loaded", 0)
    assert n_loaded > 8 * 64


def test_ranks_have_pages_of_their_own_which_are_found_together(processes, daemon) -> None:
    tokens = prompt(2, 6 * PAGE_TOKENS)
    ranks = [process.engine(daemon, tp_rank=rank, tp_size=2) for rank, process in enumerate(processes)]
    assert ranks[0].store(tokens) == len(tokens)
    assert [engine.fetch(tokens) for engine in ranks] == [0, 0]
    assert ranks[1].store(tokens) == len(tokens)
    assert [engine.fetch(tokens) for engine in ranks] == [len(tokens)] * 2


def test_replicated_pages_are_written_by_one_rank_and_read_by_all(processes, daemon) -> None:
    tokens = prompt(3, 6 * PAGE_TOKENS)
    ranks = [process.engine(daemon, tp_rank=rank, tp_size=2, is_mla=True) for rank, process in enumerate(processes)]
    ranks[1].store(tokens)
    assert [engine.fetch(tokens) for engine in ranks] == [0, 0]
    assert ranks[0].store(tokens) == len(tokens)
    assert [engine.fetch(tokens) for engine in ranks] == [len(tokens)] * 2


def test_a_batch_says_which_pages_came_and_leaves_the_others_alone(processes, daemon) -> None:
    first, second = (process.engine(daemon) for process in processes)
    tokens = prompt(4, 8 * PAGE_TOKENS)
    assert first.store(tokens[: 5 * PAGE_TOKENS]) == 5 * PAGE_TOKENS
    answer = second.ask("load_all", tokens=tokens)
    assert answer["came"] == [True] * 5 + [False] * 3
    assert answer["are_right"] == answer["came"]
    assert answer["are_untouched"] == [False] * 5 + [True] * 3
    assert second.fetch(tokens) == 5 * PAGE_TOKENS
    assert second.ask("wrong_places", tokens=tokens) == {"came": [False, False, False]}


def test_the_interface_with_flat_tensors_moves_the_same_bytes(processes, daemon) -> None:
    pools = [{"layout": "layer_first"}, {"layout": "page_first_direct"}, {"layout": "page_first", "is_mla": True}]
    for pool in pools:
        first, second = (process.engine(daemon, extra={"interface_v1": 0}, **pool) for process in processes)
        assert not first.answer["is_v1"]
        tokens = prompt(5, 7 * PAGE_TOKENS)
        assert second.fetch(tokens) == 0
        assert first.store(tokens) == len(tokens)
        assert second.fetch(tokens) == len(tokens)
        answer = second.ask("plain", tokens=prompt(6, PAGE_TOKENS))
        assert answer == {"before": [False, True], "is_set": True, "is_right": True, "exists": True}


def test_a_second_pool_needs_its_last_pages_where_a_sequence_goes_on(processes, daemon) -> None:
    first, second = (process.engine(daemon, has_side_pool=True) for process in processes)
    tokens = prompt(7, 8 * PAGE_TOKENS)
    # The second pool has the pages 1, 2 and 5.
    assert first.store(tokens, side_pages=[1, 2, 5]) == len(tokens)
    assert second.fetch(tokens) == len(tokens)
    for n_trailing, n_pages in ((1, 6), (2, 3), (3, 0)):
        answer = second.ask("fetch", tokens=tokens, n_trailing=n_trailing)
        assert answer["is_right"]
        assert (answer["n_loaded"], answer["n_side"]) == (n_pages * PAGE_TOKENS, n_trailing if n_pages else 0)


def test_a_daemon_that_dies_costs_hits_and_is_used_again_when_it_is_back(processes, daemon) -> None:
    first, second = (process.engine(daemon) for process in processes)
    tokens = prompt(8, 6 * PAGE_TOKENS)
    assert first.store(tokens) == len(tokens)
    daemon.kill()
    begin_s = time.monotonic()
    assert second.fetch(tokens) == 0
    assert second.ask("load_all", tokens=tokens)["came"] == [False] * 6
    assert first.store(tokens) == 0
    assert time.monotonic() - begin_s < 10
    late = processes[0].engine(daemon)
    assert "not attached, SGLang goes on without it" in late.answer["lines"][-1]
    daemon.start()
    for engine in (first, late):
        eventually(lambda engine=engine: engine.store(prompt(9, 64)) == 64, lambda: "the daemon is not used again")
    eventually(lambda: second.fetch(prompt(9, 64), is_steady=False) == 64, lambda: "the daemon is not used again")


def test_a_restart_keeps_the_disk_warm_and_a_spoiled_disk_is_never_served(processes, daemon) -> None:
    first, second = (process.engine(daemon, page_tokens=64, dtype="float32") for process in processes)
    tokens = prompt(10, 20 * 64)
    assert first.store(tokens) == len(tokens)
    daemon.stop()
    daemon.start()
    eventually(lambda: second.fetch(tokens, is_steady=False) == len(tokens), lambda: "the disk is not warm")
    daemon.stop()
    spoil(daemon.disk)
    daemon.start()
    # The daemon is used again when a new page is stored and loaded.
    eventually(lambda: first.store(prompt(13, 64)) == 64, lambda: "the daemon is not used again")
    eventually(lambda: second.fetch(prompt(13, 64), is_steady=False) == 64, lambda: "the daemon is not used again")
    for _ in range(3):
        assert second.fetch(tokens, is_steady=False) < len(tokens)


def test_a_daemon_that_counts_tokens_otherwise_is_used_if_pages_can_be_its_chunks(processes, daemon) -> None:
    engine = processes[0].engine(daemon)
    tokens = prompt(11, 4 * PAGE_TOKENS)
    assert engine.store(tokens) == len(tokens)
    daemon.kill()
    restart(daemon, 256)
    # 6 144 bytes are a chunk of 256 tokens, and the 384 bytes of a page of one token are none.
    eventually(lambda: engine.store(tokens) == len(tokens), lambda: "the daemon is not used again")
    assert engine.fetch(tokens) == len(tokens)
    error = processes[0].engine(daemon, page_tokens=1).answer["error"]
    assert "a page of 384 bytes is no chunk of 256 tokens" in error


def restart(daemon: Daemon, chunk_tokens: int) -> None:
    """Starts it with other chunks, and without a disk that has the old ones."""
    from conftest import binary

    settings = ["--set", f"tiers.chunk_tokens={chunk_tokens}", "--ram", "128MiB", "--log", "warn"]
    daemon.process = subprocess.Popen([binary(), "store", "serve", "--socket", str(daemon.socket), *settings])
    eventually(daemon.socket.exists, lambda: "no socket")


def test_wrong_settings_end_the_start_with_the_field(processes, daemon) -> None:
    error = processes[0].engine(daemon, extra={"sokcet": "x"}).answer["error"]
    assert "has sokcet; allowed for kvik: socket, token_file" in error
    assert CHUNK_TOKENS == 64


def test_what_is_cleared_is_gone_for_all_and_can_be_stored_again(processes, daemon) -> None:
    first, second = (process.engine(daemon) for process in processes)
    other = processes[1].engine(daemon, model="other")
    tokens = prompt(12, 5 * PAGE_TOKENS)
    for engine in (first, other):
        assert engine.store(tokens) == len(tokens)
    assert first.ask("clear") == {"is_cleared": True}
    assert (second.fetch(tokens), other.fetch(tokens)) == (0, len(tokens))
    assert first.store(tokens) == len(tokens)
    assert second.fetch(tokens) == len(tokens)


def test_two_radix_trees_load_what_the_other_has_computed_through_a_daemon_that_dies(trees, daemon) -> None:
    for process in trees:
        assert process.ask("open", socket=str(daemon.socket)) == {"is_v1": True}
    first, second = prompt(40, 20 * PAGE_TOKENS), prompt(41, 30 * PAGE_TOKENS)
    assert served(trees[0], first) == (0, 0)
    assert served(trees[0], first) == (len(first), 0)
    assert served(trees[1], first) == (0, len(first))
    # Salts and adapters have KV of their own, also where they have the same tokens.
    for names in ({"salt": "a"}, {"adapter": "a"}, {"salt": "a", "adapter": "b"}, {"adapter": "ab"}):
        assert served(trees[0], first, **names) == (0, 0)
        assert served(trees[1], first, **names) == (0, len(first))
    # What a prompt shares is local, and what goes on behind it is loaded.
    longer = first[: 10 * PAGE_TOKENS] + second
    assert served(trees[0], longer) == (10 * PAGE_TOKENS, 0)
    assert served(trees[1], longer) == (10 * PAGE_TOKENS, len(second))
    daemon.kill()
    for process in trees:
        process.ask("forget")
        assert served(process, first) == (0, 0)
    daemon.start()

    def is_used_again() -> bool:
        for process in trees:
            process.ask("forget")
        served(trees[0], longer)
        return served(trees[1], longer)[1] == len(longer)

    eventually(is_used_again, lambda: "the daemon is not used again")


def test_random_requests_in_two_radix_trees_get_only_right_kv(trees, daemon) -> None:
    """The trees have room for a few of the prompts: most leave their memory, and come back from the store."""
    draw = random.Random(42)
    documents = [prompt(50 + seed, 12 * PAGE_TOKENS) for seed in range(8)]
    n_loaded = 0
    for process in trees:
        process.ask("open", socket=str(daemon.socket))
    for _ in range(120):
        parts = draw.choices(documents, k=draw.randint(1, 4))
        tokens = [token for part in parts for token in part[: draw.choice((5, 12)) * PAGE_TOKENS]]
        process = draw.choice(trees)
        names = {"salt": draw.choice((None, None, "a")), "adapter": draw.choice((None, "b"))}
        n_loaded += served(process, tokens, **names)[1]
        if draw.random() < 0.1:
            process.ask("forget")
    assert n_loaded > 100 * PAGE_TOKENS


def served(process: Process, tokens: list[int], **names: object) -> tuple[int, int]:
    """Tokens of a request that the engine had, and that it has loaded; all of them must be right."""
    answer = process.ask("serve", tokens=tokens, **names)
    assert answer["is_right"], answer
    return answer["n_local"], answer["n_loaded"]
