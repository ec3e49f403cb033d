"""Elastic memory below a real vLLM: its tokens are those of a plain one, and memory goes where the load is.

KVIK_ENGINES and KVIK_PACKAGE as in test_vllm_kvik.py. With 32 tokens a block and 64 blocks on a page of one of eight layers, a
slab has 2048 tokens in 16 MiB.
"""

import json
import os
import pathlib
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_processes import DRIVERS, ENGINES, eventually
from ledger import Ledger
from store_daemon import Daemon, whole_chunks
from vllm_process import Vllm, prompt, started
from vllm_server import PACKAGE

pytestmark = pytest.mark.skipif(not ENGINES, reason="KVIK_ENGINES is not set")

SLAB = 16 << 20


class VllmLedger(Ledger):
    """A ledger, and the flags of engines in it."""

    def flags(self, group: str, blocks: int = 1024, **settings: object) -> tuple[str, ...]:
        extra = {"elastic": True, "elastic_group": group, "elastic_directory": str(self.folder), **settings}
        return "--blocks", str(blocks), "--extra", json.dumps(extra)


@pytest.fixture
def ledger(tmp_path: pathlib.Path) -> VllmLedger:
    folder = tmp_path / "ledger"
    folder.mkdir(mode=0o700)
    return VllmLedger(folder)


@pytest.fixture(scope="module")
def plain() -> Iterator[Vllm]:
    """An engine without kvik: what it says is right."""
    with started("--max-tokens", "4096", "--blocks", "1024") as engine:
        yield engine


def crowd(seed: int) -> list[list[int]]:
    """32 prompts, some of which begin alike."""
    return [
        prompt(seed + number % 7, 100 + 37 * (number % 7)) + prompt(seed + 99 + number, 30)
        for number in range(32)
    ]


def tokens_of(engine: Vllm, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    return engine.generate(*prompts, max_tokens=max_tokens)["tokens"]


def test_a_small_limit_costs_preemptions_and_no_token(plain: Vllm, ledger: VllmLedger) -> None:
    prompts = crowd(30)
    right = tokens_of(plain, prompts, 64)
    # Room for ten of the 32 requests.
    limit = 2 * SLAB
    flags = ledger.flags("small", store=False, elastic_limit=limit)
    with started(*flags) as engine, ledger.watched("small") as held:
        for _ in range(2):
            answer = engine.generate(*prompts, max_tokens=64)
            assert answer["tokens"] == right
    assert answer["preemptions"] > 0
    assert limit - SLAB < max(held) <= limit


def test_memory_follows_the_load_and_a_lowered_limit(plain: Vllm, ledger: VllmLedger) -> None:
    prompts = [prompt(300 + number, 700) for number in range(16)]
    right = tokens_of(plain, prompts, 16)
    with started(*ledger.flags("load", store=False), "--processes", "--max-tokens", "4096") as engine:
        # Before the first request there is memory for the first slab alone.
        assert ledger.held("load") == SLAB
        with ledger.watched("load") as held:
            assert engine.generate(*prompts, max_tokens=16)["tokens"] == right
        assert max(held) >= 6 * SLAB
        eventually(lambda: ledger.held("load") == SLAB, lambda: ledger.held("load"))
        # One request that is larger than what is mapped.
        long = prompt(500, 3000)
        assert engine.generate(long)["tokens"] == plain.generate(long)["tokens"]
        ledger.kvctl("limit", "load", str(3 * SLAB))
        with ledger.watched("load") as held:
            assert engine.generate(*prompts, max_tokens=16)["tokens"] == right
        assert SLAB < max(held) <= 3 * SLAB
        # While requests run: what they use stays until it is free, and then it goes.
        ledger.kvctl("limit", "load", "none")
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(engine.generate, *prompts, max_tokens=200)
            eventually(lambda: ledger.held("load") >= 6 * SLAB, lambda: ledger.held("load"))
            ledger.kvctl("limit", "load", str(3 * SLAB))
            eventually(lambda: ledger.held("load") <= 3 * SLAB, lambda: ledger.held("load"))
            is_running = not answer.done()
            assert [tokens[:16] for tokens in answer.result()["tokens"]] == right
        assert is_running, "the limit was reached because the requests had ended"


def test_memory_goes_to_the_engine_with_the_load_and_back(plain: Vllm, ledger: VllmLedger) -> None:
    prompts = [prompt(700 + number, 700) for number in range(16)]
    right = tokens_of(plain, prompts, 16)
    flags = (*ledger.flags("shared", store=False), "--processes")
    with started(*flags) as first, started(*flags) as second:
        assert ledger.held("shared") == 2 * SLAB
        # All of one's load fits beside an idle engine, and not beside a loaded one.
        ledger.kvctl("limit", "shared", str(8 * SLAB))
        for engine in (first, second):
            with ledger.watched("shared") as held:
                answer = engine.generate(*prompts, max_tokens=16)
            assert (answer["tokens"], answer["preemptions"]) == (right, 0)
            assert 7 * SLAB <= max(held) <= 8 * SLAB
            eventually(lambda: ledger.held("shared") == 2 * SLAB, lambda: ledger.held("shared"))
        with ThreadPoolExecutor(2) as pool, ledger.watched("shared") as held:
            answers = [pool.submit(engine.generate, *prompts, max_tokens=16) for engine in (first, second)]
            assert [answer.result()["tokens"] for answer in answers] == [right, right]
        assert max(held) <= 8 * SLAB
        # A killed engine's memory is there at once.
        with ThreadPoolExecutor(1) as pool:
            killed = pool.submit(first.generate, *prompts, max_tokens=300)
            eventually(lambda: ledger.held("shared") >= 5 * SLAB, lambda: ledger.held("shared"))
            first.kill()
            assert killed.exception() is not None
        assert second.generate(*prompts, max_tokens=16)["tokens"] == right


def test_two_requests_that_need_more_than_half_of_the_memory_are_both_answered(plain: Vllm, ledger: VllmLedger) -> None:
    # Of four slabs each takes two, and then needs a third.
    prompts = [prompt(900, 3900), prompt(901, 3900)]
    right = [tokens_of(plain, [one], 190) for one in prompts]
    flags = (*ledger.flags("pair", store=False, elastic_limit=4 * SLAB), "--processes", "--max-tokens", "4096")
    with started(*flags) as first, started(*flags) as second:
        ledger.kvctl("limit", "pair", str(4 * SLAB))
        with ThreadPoolExecutor() as pool, ledger.watched("pair") as held:
            answers = list(pool.map(lambda pair: tokens_of(pair[0], [pair[1]], 190), zip((first, second), prompts, strict=True)))
    assert answers == right
    assert max(held) <= 4 * SLAB


def test_an_idle_engine_keeps_its_prefix_cache_until_others_need_the_memory(plain: Vllm, ledger: VllmLedger) -> None:
    prompts = [prompt(1100 + number, 900) for number in range(8)]
    right = tokens_of(plain, prompts, 8)
    with started(*ledger.flags("cache", store=False, elastic_cache="1GiB"), "--processes") as engine:
        assert engine.generate(*prompts)["tokens"] == right
        assert ledger.held("cache") >= 3 * SLAB
        again = engine.generate(*prompts)
        assert again["tokens"] == right
        assert all(n_cached >= 896 - 32 for n_cached in again["cached"])
        # It sleeps, and gives back what others want all the same.
        ledger.kvctl("limit", "cache", str(2 * SLAB))
        eventually(lambda: ledger.held("cache") <= 2 * SLAB, lambda: ledger.held("cache"))
        again = engine.generate(*prompts)
        assert again["tokens"] == right
        assert sum(again["cached"]) < 8 * 864


def test_the_store_and_elastic_memory_work_together(
    plain: Vllm, ledger: VllmLedger, tmp_path: pathlib.Path
) -> None:
    prompts = crowd(60)
    right = tokens_of(plain, prompts, 64)
    long = prompt(900, 900)
    folder = tmp_path / "daemon"
    folder.mkdir()
    daemon = Daemon(folder)
    try:
        flags = ledger.flags("store", elastic_limit=2 * SLAB)
        with started(*flags, "--socket", str(daemon.socket), "--processes") as engine:
            for _ in range(2):
                answer = engine.generate(*prompts, max_tokens=64)
                assert answer["tokens"] == right
            assert answer["preemptions"] > 0
            eventually(lambda: ledger.held("store") == SLAB, lambda: ledger.held("store"))
            expected = plain.generate(long)["tokens"]
            assert engine.generate(long)["tokens"] == expected
            # What was given back is loaded from the store.
            eventually(lambda: ledger.held("store") == SLAB, lambda: ledger.held("store"))
            engine.generate(*prompts[:16], max_tokens=8)
            assert engine.generate(long)["tokens"] == expected
        with started(*flags, "--socket", str(daemon.socket)) as other:
            answer = other.generate(long)
            assert (answer["tokens"], answer["cached"]) == (expected, [whole_chunks(900)])
    finally:
        daemon.kill()


def test_every_rank_has_memory_before_a_block_is_used(plain: Vllm, ledger: VllmLedger) -> None:
    prompts = [prompt(800 + number, 700) for number in range(8)]
    with started(*ledger.flags("ranks", store=False), "--processes", "--ranks", "2") as engine:
        answer = engine.generate(*prompts, max_tokens=8)["tokens"]
        # A rank has half of the heads, and so twice as many tokens on a page.
        eventually(lambda: ledger.held("ranks") == 2 * SLAB, lambda: ledger.held("ranks"))
        assert engine.generate(*prompts, max_tokens=8)["tokens"] == answer


SETTINGS = """
import json, sys, types
import torch
import kvik
from kvik.elastic.allocation import Allocation
from kvik.elastic.slab_memory import pieces_of_layer
from kvik.vllm.allocation import ROUNDING_BYTES
from kvik.vllm.elastic_plan import ElasticPlan, gpu_page_bytes
from kvik.vllm.metadata import ElasticReport
from kvik.vllm.settings import Settings

geometry = types.SimpleNamespace(n_blocks=100, page_bytes=1 << 20, block_tokens=16, layer_names=list(range(3)))
config = types.SimpleNamespace(
    scheduler_config=types.SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
    device_config=types.SimpleNamespace(device_type="cpu"),
    model_config=types.SimpleNamespace(max_model_len=100),
    parallel_config=types.SimpleNamespace(world_size=3, distributed_executor_backend="mp"),
)
cache = types.SimpleNamespace(kv_cache_tensors=[])
for extra in json.loads(sys.argv[1]):
    try:
        plan = ElasticPlan.read(config, Settings.read(extra), geometry, cache)
        print(json.dumps([plan.page_bytes, plan.limit_bytes, plan.slabs.slab_blocks, plan.n_request_blocks, plan.cache_slabs]))
    except kvik.InvalidValueError as error:
        print(json.dumps(str(error)))
# Pages of a GPU: as large as an engine can hold 32 of in every layer, and none of two layers.
sizes = []
for n_blocks, limit, is_one in [
    (10_000, None, False), (300, None, False), (10_000, 3 << 28, False), (20, None, False), (10_001, None, True), (10_004, None, True)
]:
    geometry.n_blocks = n_blocks
    sizes.append(gpu_page_bytes(geometry, limit, is_one) >> 20)
print(json.dumps(sizes))
# What an idle engine of a GPU keeps: a step's worth, up to an eighth of what it may hold.
geometry.n_blocks = 10_000
config.device_config.device_type = "cuda"
reserves = []
for n_tokens, extra in [
    (4096, {}), (200_000, {}), (4096, {"elastic_limit": "400MiB"}), (4096, {"elastic_reserve": 0}), (4096, {"elastic_reserve": "1GiB"})
]:
    config.scheduler_config.max_num_batched_tokens = n_tokens
    reserves.append(ElasticPlan.read(config, Settings.read({"elastic": True, **extra}), geometry, cache).reserve_slabs)
print(json.dumps(reserves))
# A slab has memory where no rank misses it.
ranks = [ElasticReport(4, {3}, {(3, 2)}, None, 10), ElasticReport(5, {2}, set(), 7, 20), ElasticReport(6, set(), set(), 5, 30)]
whole = ranks[0].aggregate(ranks[1]).aggregate(ranks[2])
print(json.dumps([whole.number, sorted(whole.missing), sorted(whole.refused), whole.most_slabs, whole.taken_bytes, whole.n_ranks]))
print(json.dumps([plan.n_ranks]))
config.parallel_config.distributed_executor_backend = "external_launcher"
try:
    ElasticPlan.read(config, Settings.read({"elastic": True}), geometry, cache)
except kvik.InvalidValueError as error:
    print(json.dumps(str(error)))
def allocating(*sizes):
    return Allocation("vLLM", sizes, torch.int8, 2 << 20, ROUNDING_BYTES)

# Only the allocation of the KV is answered.
with allocating(4 << 20) as allocation:
    others = [torch.zeros(8), torch.zeros(4 << 20, dtype=torch.uint8), torch.zeros(2 << 20, dtype=torch.int8)]
    kv = torch.zeros(4 << 20, dtype=torch.int8, device=torch.device("cpu"))
    try:
        torch.zeros(4 << 20, dtype=torch.int8)
    except kvik.InvalidValueError as error:
        print(json.dumps(str(error)))
inside = range(allocation.memory.address, allocation.memory.address + (4 << 20))
print(json.dumps([kv.data_ptr() in inside, any(other.data_ptr() in inside for other in others), int(kv.sum())]))
try:
    with allocating(4 << 20):
        pass
except kvik.InvalidValueError as error:
    print(json.dumps(str(error)))
# Buffers of layers begin with a page each.
with allocating(3 << 20, 3 << 20, 3 << 20) as allocation:
    layers = [torch.zeros(3 << 20, dtype=torch.int8) for _ in range(3)]
print(json.dumps([layer.data_ptr() - allocation.memory.address for layer in layers]))
# Where the 10 blocks of a layer lie, of 64 bytes: blocks first, with parts of a kernel, behind keys and values, with other layers
# between them, and in another order.
begin = allocation.memory.address
first = allocation.buffer[: 10 * 64].view(torch.bfloat16)
wide = allocation.buffer[: 10 * 640].view(torch.bfloat16)
for tensor in [
    first.view(10, 2, 4, 4),
    first.view(20, 4, 4),
    first.view(2, 10, 4, 4),
    wide.view(10, 10, 32)[:, 3],
    first.view(10, 2, 4, 4).permute(0, 3, 1, 2),
    first.view(4, 10, 8),
    first.view(32, 10).transpose(0, 1),
]:
    try:
        print(json.dumps([[piece.offset, piece.n_bytes, piece.stride] for piece in pieces_of_layer("0", tensor, 10, begin)]))
    except kvik.InvalidValueError as error:
        print(json.dumps(str(error)))
"""


def test_settings_are_checked_ranks_are_added_and_one_allocation_is_answered() -> None:
    elastic = {"elastic": True, "store": False}
    cases = {
        json.dumps(elastic): [2 << 20, None, 2, 7, 0],
        json.dumps({**elastic, "elastic_limit": "1 GiB", "elastic_page": "8MiB"}): [8 << 20, 1 << 30, 8, 7, 0],
        json.dumps({**elastic, "elastic_cache": "20MiB"}): [2 << 20, None, 2, 7, 3],
        json.dumps({**elastic, "elastic_cache": "-1"}): "`elastic_cache` is '-1'",
        json.dumps({**elastic, "elastic_limit": "much"}): "`elastic_limit` is 'much'",
        json.dumps({**elastic, "elastic_page": "3MiB"}): "`elastic_page` is 3MiB; allowed: multiples of 2MiB",
        json.dumps({**elastic, "elastic_group": 7}): "`elastic_group` is 7",
        json.dumps({"elastic": "yes"}): "`elastic` is 'yes'; allowed: true, false",
        json.dumps({"elastic_limit": 1}): "`elastic_limit` is 1; allowed: only with `elastic`",
        json.dumps({"store": False}): "`store` is false; allowed: only with `elastic`",
        json.dumps({"elastik": True}): "has elastik; allowed: socket",
    }
    environment = {**os.environ, "PYTHONPATH": os.path.abspath(PACKAGE), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [f"{ENGINES}/bin/python", "-W", "ignore", "-c", SETTINGS, f"[{','.join(cases)}]"]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    answers = [json.loads(line) for line in output.splitlines() if line[:1] in '["']
    assert len(answers) == len(cases) + 16
    for answer, expected in zip(answers, cases.values(), strict=False):
        assert expected in answer if isinstance(expected, str) else expected == answer
    sizes, reserves, ranks, n_ranks, external, several, is_inside, none, layers, *pieces = answers[len(cases) :]
    assert sizes == [16, 8, 8, 2, 2, 4]
    assert reserves == [16, 78, 4, 0, 21]
    assert ranks == [4, [2, 3], [[3, 2]], 5, 60, 3]
    assert n_ranks == [3]
    assert external == "`elastic` is true; allowed with the executor `external_launcher`: one rank"
    assert "more buffers of KV than it told; allowed with `elastic`: 1" in several
    assert is_inside == [True, False, 0]
    assert "0 of 1 buffers" in none
    assert layers == [0, 4 << 20, 8 << 20]
    in_halves = [[0, 32, 32], [320, 32, 32]]
    assert pieces[:5] == [[[0, 64, 64]], [[0, 64, 64]], in_halves, [[192, 64, 640]], [[0, 64, 64]]]
    assert "the shape (4, 10, 8)" in pieces[5]
    assert "the strides (1, 10)" in pieces[6]


def played(driver: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.path.abspath(PACKAGE), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [f"{ENGINES}/bin/python", "-W", "ignore", str(DRIVERS / driver)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_scheduler_follows_need_limits_and_refusals_on_the_blocks_of_vllm() -> None:
    ended = played("elastic_scheduler.py")
    assert ended.returncode == 0, ended.stderr


def test_no_step_uses_memory_that_a_rank_has_not_mapped_whatever_order_threads_run_in() -> None:
    ended = played("elastic_ranks.py")
    assert ended.returncode == 0, ended.stderr


def test_a_limit_below_the_longest_request_ends_the_start(ledger: VllmLedger) -> None:
    # A slab has room for one of 1024 tokens and not for one of 4096.
    flags = ledger.flags("little", store=False, elastic_limit=SLAB)
    with pytest.raises(AssertionError, match="the program ended"), started(*flags, "--max-tokens", "4096"):
        pass
