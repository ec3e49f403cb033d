"""Compares the index with the caches of vLLM and SGLang, step by step, while they run.

The caches and their publishers run without a model (`engines/*.py`), so they can be brought into any state and asked
what they hold.
"""

import itertools

import pytest

from engine_processes import ENGINES, VOCABULARY, Engine, Gateway, Load, Ports, eventually, listening, running

pytestmark = pytest.mark.skipif(not ENGINES, reason="KVIK_ENGINES is not set")


def follow(gateway: Gateway, engine: Engine, seed: int, n_prompts: int = 250) -> None:
    """Serves prompts, several at a time, from a cache that is far too small for them, and compares after each."""
    load = Load(seed)
    started: list[str] = []
    counts = {"whole": 0, "part": 0, "none": 0, "refused": 0}
    for place in range(n_prompts):
        tokens = load.prompt()
        output = load.tokens(0, 40)
        chunk = load.random.choice([32, 50, 1 << 20])
        name = engine.start(tokens, output, chunk)
        if name is None:
            counts["refused"] += 1
            while started:
                engine.ask("finish", name=started.pop())
        else:
            load.prompts.append(tokens + output)
            started.append(name)
        if len(started) > load.random.randint(0, 2):
            engine.ask("finish", name=started.pop(load.random.randrange(len(started))))
        if place % 100 == 99:
            while started:
                engine.ask("finish", name=started.pop())
            assert engine.ask("reset")["is_done"]
        prompts = [tokens, tokens + output, *load.sample(8)]
        for prompt, n_held in zip(prompts, gateway.compare(engine, prompts), strict=True):
            counts["none" if n_held == 0 else "whole" if n_held + 16 > len(prompt) else "part"] += 1
    gateway.compare(engine, load.prompts)
    # Otherwise nothing much was compared.
    assert min(counts["whole"], counts["part"], counts["none"]) > n_prompts // 4, counts


def test_vllm_blocks_under_pressure_are_known_at_every_step() -> None:
    ports = Ports()
    with running("vllm_blocks.py", ports) as engine, listening(ports.source()) as gateway:
        follow(gateway, engine, seed=1)
        assert gateway.keys(engine.worker) == ["vllm:sha256:16"]


@pytest.mark.parametrize(
    ("flags", "environment", "keys"),
    [
        pytest.param(["--hash", "sha256_cbor"], {}, "vllm:sha256_cbor:16", id="sha256_cbor"),
        pytest.param(["--hash", "sha256"], {"PYTHONHASHSEED": "7"}, "vllm:sha256:16:7", id="seed"),
        pytest.param(["--hash", "xxhash"], {"PYTHONHASHSEED": "7"}, "vllm:xxhash:16:7", id="xxhash"),
        pytest.param(["--hash", "xxhash_cbor"], {"PYTHONHASHSEED": "7"}, "vllm:xxhash_cbor:16:7", id="xxhash_cbor"),
        pytest.param([], {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}, "vllm:sha256:16", id="digests"),
        # A seed that is not known: the index has keys of its own.
        pytest.param(["--hash", "xxhash"], {}, "own:16", id="random"),
        pytest.param(
            ["--hash", "xxhash", "--block-tokens", "32", "--n-blocks", "32"], {}, "own:32", id="random-32"
        ),
    ],
)
def test_every_way_in_which_vllm_names_blocks_is_understood(flags: list[str], environment: dict, keys: str) -> None:
    ports = Ports()
    # Keys of the index's own are exact for blocks of their length.
    index = {"hash_seeds": ["7"], "bridge_block_tokens": 32 if keys == "own:32" else 16}
    with (
        running("vllm_blocks.py", ports, *flags, **environment) as engine,
        listening(ports.source(), **index) as gateway,
    ):
        follow(gateway, engine, seed=2, n_prompts=60)
        assert gateway.keys(engine.worker) == [keys]


@pytest.mark.parametrize(
    ("window_group", "seed"), [pytest.param(0, 3, id="window-first"), pytest.param(1, 4, id="window-last")]
)
def test_a_hybrid_model_of_vllm_is_known_by_its_blocks_with_full_attention(window_group: int, seed: int) -> None:
    """Of the sliding groups an engine needs only the last blocks before the hit: the index may say more than there is if
    those have left, and never less."""
    ports = Ports()
    flags = ["--window", "32", "--window-group", str(window_group), "--n-blocks", "128"]
    with running("vllm_blocks.py", ports, *flags) as engine, listening(ports.source()) as gateway:
        load = Load(seed)
        n_exact, n_all = 0, 0
        for _ in range(120):
            tokens = load.prompt()
            engine.serve(tokens)
            gateway.wait_for(engine)
            prompts = [tokens, *load.sample(4)]
            for prompt, n_held in zip(prompts, engine.held(prompts), strict=True):
                n_told = gateway.score(engine.worker, token_ids=prompt)
                assert n_told >= n_held
                n_exact += n_told == n_held
                n_all += 1
        assert n_exact > n_all * 0.8, (n_exact, n_all)


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        pytest.param([], "sglang:16", id="pages-of-16"),
        pytest.param(["--page-tokens", "1"], "sglang:1", id="pages-of-1"),
        pytest.param(["--page-tokens", "64", "--n-tokens", "2048"], "sglang:64", id="pages-of-64"),
        pytest.param(["--eagle"], "sglang_pairs:16", id="draft-model"),
    ],
)
def test_sglang_pages_under_pressure_are_known_at_every_step(flags: list[str], keys: str) -> None:
    ports = Ports()
    with running("sglang_tree.py", ports, *flags) as engine, listening(ports.source()) as gateway:
        follow(gateway, engine, seed=5, n_prompts=150)
        assert gateway.keys(engine.worker) == [keys]


@pytest.mark.parametrize("driver", ["vllm_blocks.py", "sglang_tree.py"])
@pytest.mark.parametrize("has_replay", [True, False], ids=["replay", "live-only"])
def test_blocks_under_a_salt_match_no_plain_prompt(driver: str, has_replay: bool) -> None:
    ports = Ports(has_replay)
    with listening(ports.source()) as gateway, running(driver, ports) as engine:
        if not has_replay:
            # What is published before the gateway is there is lost.
            eventually(lambda: is_heard(gateway, engine), lambda: "not heard")
        shared, other = list(range(100, 164)), list(range(200, 264))
        engine.serve(shared, salt="tenant")
        is_unsure = False if has_replay else None
        assert gateway.compare(engine, [shared, other], is_unsure=is_unsure) == [0, 0]
        engine.serve(other)
        assert gateway.compare(engine, [shared, other], is_unsure=is_unsure) == [0, 64]
        engine.serve(shared)
        assert gateway.compare(engine, [shared, other], is_unsure=is_unsure) == [64, 64]


def is_heard(gateway: Gateway, engine: Engine) -> bool:
    engine.serve([next(FRESH) % VOCABULARY for _ in range(16)])
    return bool(gateway.sources(engine.worker))


FRESH = itertools.count()


@pytest.mark.parametrize(
    ("driver", "room"), [("vllm_blocks.py", ["--n-blocks", "256"]), ("sglang_tree.py", ["--n-tokens", "4096"])]
)
def test_a_late_gateway_a_restart_and_a_killed_engine(driver: str, room: list[str]) -> None:
    ports = Ports()
    load = Load(seed=6)
    first, second = [load.tokens(100, 200) for _ in range(6)], [load.tokens(100, 200) for _ in range(2)]
    with listening(ports.source()) as early:
        with running(driver, ports, *room) as engine:
            for tokens in first:
                engine.serve(tokens)
            assert all(early.compare(engine, first))
            # One that starts only now has the same from the replay.
            with listening(ports.source()) as late:
                assert all(late.compare(engine, first))
                engine.serve(second[0])
                for gateway in (early, late):
                    assert all(gateway.compare(engine, [*first, second[0]]))
        # The engine was killed. The next one has nothing, and says nothing until it has something.
        with running(driver, ports, *room) as engine:
            eventually(
                lambda: not any(early.score(engine.worker, token_ids=tokens) for tokens in first),
                lambda: early.sources(engine.worker),
            )
            assert not any(early.compare(engine, first))
            engine.serve(second[1])
            held = early.compare(engine, [*first, *second])
            assert [n_held > 0 for n_held in held] == [False] * 7 + [True]
        # As many batches and more than the life before had, all of them before the gateway listens again.
        with listening(ports.source()) as gateway, running(driver, ports, *room) as engine:
            for tokens in first[:4]:
                engine.serve(tokens)
            gateway.compare(engine, first)
            early.compare(engine, [*first, *second])


def test_what_vllm_published_before_the_gateway_and_no_longer_has_is_not_made_up() -> None:
    ports = Ports()
    load = Load(seed=7)
    prompts = [load.tokens(40, 60) for _ in range(20)]
    with running("vllm_blocks.py", ports, "--buffer-steps", "4") as engine:
        for tokens in prompts:
            engine.serve(tokens)
        with listening(ports.source()) as gateway:
            gateway.wait_for(engine, is_unsure=True)
            told = [gateway.score(engine.worker, token_ids=tokens) for tokens in prompts]
            for n_told, n_held in zip(told, engine.held(prompts), strict=True):
                assert n_told in (0, n_held)
            assert sum(map(bool, told)) == 4
            # What is stored from now on is known, and a cleared cache is known to be empty.
            fresh = load.tokens(64, 64)
            engine.serve(fresh)
            assert gateway.compare(engine, [fresh], is_unsure=True) == [64]
            assert engine.ask("reset")["is_done"]
            assert not any(gateway.compare(engine, [fresh, *prompts], is_unsure=True))
