"""Compares the index with what real engines hold, step by step, while they run.

KVIK_ENGINES names a virtual environment made by `engines/install`; without it all of this is skipped, since what it
needs is several gigabytes. The engines are vLLM's server with a small model on the CPU, and the caches and publishers
of vLLM and SGLang alone (`engines/*.py`), which can be brought into any state and asked what they hold.
"""

import contextlib
import http.client
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

import pytest

from conftest import ROOT, binary

ENGINES = os.environ.get("KVIK_ENGINES")
pytestmark = pytest.mark.skipif(not ENGINES, reason="KVIK_ENGINES is not set")

DRIVERS = pathlib.Path(__file__).parent / "engines"
MODEL_FOLDER = ROOT / "models/kvik-tiny"
MODEL = "tiny"
ADDRESS = re.compile(r"gateway is ready address=(\S+):(\d+)")
# Engines take a minute to import what they need on a busy machine.
START_S = 600
PATIENCE_S = 60
VOCABULARY = 4096


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def eventually(condition: Callable[[], object], what: Callable[[], object], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, what()
        time.sleep(0.01)


class Ports:
    """Where an engine publishes, the same for each of its lives."""

    def __init__(self, has_replay: bool = True) -> None:
        self.live, self.replay = free_ports(2)
        self.has_replay = has_replay

    def engine_flags(self) -> list[str]:
        flags = ["--endpoint", f"tcp://*:{self.live}"]
        return [*flags, "--replay-endpoint", f"tcp://*:{self.replay}"] if self.has_replay else flags

    def source(self) -> dict:
        """The entry of `index.engines`, with pauses for a test's patience."""
        limits = {"replay_cooldown_ms": 0, "reconnect_max_ms": 200}
        source: dict = {"endpoint": f"tcp://127.0.0.1:{self.live}", "limits": limits}
        if self.has_replay:
            source["replay_endpoint"] = f"tcp://127.0.0.1:{self.replay}"
        return source


class Engine:
    """A driver: an engine's cache and publisher in a process of their own."""

    def __init__(self, driver: str, ports: Ports, *flags: str, **environment: str) -> None:
        command = [f"{ENGINES}/bin/python", "-W", "ignore", str(DRIVERS / driver), *ports.engine_flags(), *flags]
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        # SGLang compiles with what is installed there.
        inherited["PATH"] = f"{ENGINES}/bin{os.pathsep}{inherited['PATH']}"
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**inherited, "VLLM_LOGGING_LEVEL": "ERROR", **environment},
        )
        self.worker = driver.split("_")[0] + "-0"
        self.n_batches = 0
        self.names = itertools.count()
        assert self.read() == {"is_ready": True}

    def read(self) -> dict:
        # Something that a library prints may come before.
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError("the engine ended")

    def ask(self, op: str, **arguments: object) -> dict:
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()
        answer = self.read()
        self.n_batches = answer.pop("n_batches")
        return answer

    def start(self, tokens: list[int], output: list[int] = [], chunk: int = 1 << 20, salt: str | None = None) -> str | None:
        """The name of the request; `None` if there is no room for it."""
        name = str(next(self.names))
        arguments = {"name": name, "tokens": tokens, "output": output, "chunk": chunk, "salt": salt}
        return name if self.ask("start", **arguments)["is_taken"] else None

    def serve(self, tokens: list[int], output: list[int] = [], **arguments: object) -> None:
        name = self.start(tokens, output, **arguments)
        assert name is not None
        self.ask("finish", name=name)

    def held(self, prompts: list[list[int]]) -> list[int]:
        return self.ask("held", prompts=prompts)["n_tokens"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running(driver: str, ports: Ports, *flags: str, **environment: str) -> Iterator[Engine]:
    engine = Engine(driver, ports, *flags, **environment)
    try:
        yield engine
    finally:
        engine.kill()


class Gateway:
    """A running gateway."""

    def __init__(self, host: str, port: int) -> None:
        self.connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)

    def call(self, method: str, path: str, body: object = None) -> dict:
        text = None if body is None else json.dumps(body)
        try:
            response = self.send(method, path, text)
        except ConnectionError:
            # Closed while nobody asked, such as while an engine starts.
            self.connection.close()
            response = self.send(method, path, text)
        answer = response.read()
        assert response.status == 200, answer
        return json.loads(answer)

    def send(self, method: str, path: str, text: str | None) -> http.client.HTTPResponse:
        self.connection.request(method, path, text, {"content-type": "application/json"})
        return self.connection.getresponse()

    def score(self, worker: str, **prompt: object) -> int:
        """Tokens that the index says that the worker has."""
        return self.call("POST", "/v1/score", {"model": MODEL, **prompt})["matched_tokens"].get(worker, 0)

    def sources(self, worker: str) -> list[dict]:
        """What it says of the worker, once for each book."""
        models = self.call("GET", "/index/stats")["models"]
        books = [book for model in models if model["model"] == MODEL for book in model["books"]]
        return [{**source, "keys": book["keys"]} for book in books for source in book["sources"] if source["worker"] == worker]

    def keys(self, worker: str) -> list[str]:
        return [source["keys"] for source in self.sources(worker)]

    def wait_for(self, engine: Engine, is_unsure: bool | None = False) -> None:
        """Waits until all that the engine has published so far is in the index, whether or not it is sure of it."""

        def is_heard() -> bool:
            # Nothing is known of an engine that has not said anything.
            return engine.n_batches == 0 or any(
                source["due_sequence"] == engine.n_batches and is_unsure in (None, source["is_unsure"])
                for source in self.sources(engine.worker)
            )

        eventually(is_heard, lambda: (engine.n_batches, self.sources(engine.worker)))

    def compare(self, engine: Engine, prompts: list[list[int]], **arguments: bool | None) -> list[int]:
        """The index and the engine must say the same of every prompt; returns what they say."""
        self.wait_for(engine, **arguments)
        held = engine.held(prompts)
        told = [self.score(engine.worker, token_ids=tokens) for tokens in prompts]
        assert told == held
        return held


@contextlib.contextmanager
def listening(*sources: dict, backends: list[str] = [], **index: object) -> Iterator[Gateway]:
    """Runs `kvik gateway`; it must end well."""
    index = {"engines": sources, "tokenizers": {"models": {MODEL: str(MODEL_FOLDER)}}, **index}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVIK_")}
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "kvik.yaml"
        config.write_text(json.dumps({"gateway": {"listen": "127.0.0.1:0", "index": index}}))
        flags = [flag for backend in backends for flag in ("--backend", backend)]
        process = subprocess.Popen(
            [binary(), "gateway", "--config", str(config), *flags], stderr=subprocess.PIPE, text=True, env=environment
        )
        try:
            match = next(filter(None, map(ADDRESS.search, process.stderr)), None)
            assert match, "the gateway ended before it told its address"
            yield Gateway(match[1], int(match[2]))
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0
        finally:
            process.kill()
            process.wait()


class Load:
    """Prompts that share prefixes, as conversations do."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.prompts = [self.tokens(4, 100) for _ in range(4)]

    def tokens(self, shortest: int, longest: int) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(self.random.randint(shortest, longest))]

    def prompt(self) -> list[int]:
        """One that was there before, a part of one, or one that goes on; some end with a block."""
        base = self.random.choice(self.prompts[-24:])
        kept = self.random.choice([len(base), self.random.randint(1, len(base)), max(len(base) // 16 * 16, 1)])
        prompt = (base[:kept] + self.random.choice([[], self.tokens(1, 90)]))[:400]
        self.prompts.append(prompt)
        return prompt

    def sample(self, count: int) -> list[list[int]]:
        """Some that may be held and one that is not."""
        return [*self.random.sample(self.prompts, min(count, len(self.prompts))), self.tokens(64, 64)]


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
        # A seed that nobody knows: the index has keys of its own.
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
def test_blocks_under_a_salt_are_nobody_elses(driver: str, has_replay: bool) -> None:
    ports = Ports(has_replay)
    with listening(ports.source()) as gateway, running(driver, ports) as engine:
        if not has_replay:
            # Whoever publishes before the gateway is there has published in vain.
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
        # As many batches and more than the life before had, all of them before anybody listens again.
        with listening(ports.source()) as gateway, running(driver, ports, *room) as engine:
            for tokens in first[:4]:
                engine.serve(tokens)
            gateway.compare(engine, first)
            early.compare(engine, [*first, *second])


def test_what_vllm_published_while_nobody_listened_and_no_longer_has_is_not_made_up() -> None:
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


def model_for_transformers(folder: pathlib.Path) -> pathlib.Path:
    """A copy of the bundled model for engines, whose tokenizer takes no token that begins a text from `add_bos_token`, but
    only from `tokenizer.json`."""
    shutil.copytree(MODEL_FOLDER, folder, dirs_exist_ok=True)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    text, bos = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, text],
        "pair": [bos, text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [1], "tokens": ["<|bos|>"]}},
    }
    path.write_text(json.dumps(tokenizer))
    return folder


class Server:
    """`vllm serve` with the bundled model."""

    def __init__(self, model: pathlib.Path, ports: Ports, http_port: int) -> None:
        self.url = f"http://127.0.0.1:{http_port}"
        self.port = http_port
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{ports.live}",
            "replay_endpoint": f"tcp://*:{ports.replay}",
            "topic": f"kv@vllm-0@{MODEL}",
        }
        flags = {
            "served-model-name": MODEL,
            "host": "127.0.0.1",
            "port": http_port,
            "max-model-len": 1024,
            "max-num-seqs": 4,
            # The smallest that vLLM has on a CPU.
            "block-size": 32,
            "num-gpu-blocks-override": 40,
            "dtype": "bfloat16",
            "kv-events-config": json.dumps(events),
        }
        command = [f"{ENGINES}/bin/vllm", "serve", str(model), "--enforce-eager", "--enable-prefix-caching"]
        command += ["--enable-prompt-tokens-details"]
        command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            # For the call that resets the cache.
            "VLLM_SERVER_DEV_MODE": "1",
        }
        # A group of its own: the engine is several processes.
        self.process = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
        eventually(self.is_ready, lambda: "vLLM did not start", START_S)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, "vLLM ended"
        try:
            return self.call("GET", "/health")[0] == 200
        except OSError:
            return False

    def call(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.status, response.read()
        connection.close()
        return answer

    def complete(self, **body: object) -> dict:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        body = {"model": MODEL, "temperature": 0, "max_tokens": 1, **body}
        status, answer = self.call("POST", path, body)
        assert status == 200, answer
        usage = json.loads(answer)["usage"]
        return {"n_tokens": usage["prompt_tokens"], "n_cached": usage["prompt_tokens_details"]["cached_tokens"]}

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def serving(model: pathlib.Path, ports: Ports, http_port: int) -> Iterator[Server]:
    server = Server(model, ports, http_port)
    try:
        yield server
    finally:
        server.kill()


def settle(gateway: Gateway) -> None:
    """Waits until nothing more comes: a server does not say how much it has published."""
    last = None
    while last != (last := gateway.sources("vllm-0")):
        time.sleep(0.3)


def predict(gateway: Gateway, server: Server, prompt: object, **body: object) -> int:
    """What the index says of a prompt must be what the server then says that it had; returns that."""
    field = {"messages": "messages", "prompt": "token_ids" if isinstance(prompt, list) else "prompt"}
    kind = "messages" if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict) else "prompt"
    answer = gateway.call("POST", "/v1/score", {"model": MODEL, field[kind]: prompt})
    n_told = answer["matched_tokens"].get("vllm-0", 0)
    usage = server.complete(**{kind: prompt}, **body)
    assert answer["prompt_tokens"] == usage["n_tokens"]
    # At least one token is computed, and whole blocks only are found.
    assert usage["n_cached"] == min(n_told, (usage["n_tokens"] - 1) // 32 * 32)
    settle(gateway)
    return usage["n_cached"]


def test_a_vllm_server_finds_what_the_index_says_that_it_has(tmp_path: pathlib.Path) -> None:
    model = model_for_transformers(tmp_path)
    tokenizers = {"models": {MODEL: str(model)}}
    ports = Ports()
    (http_port,) = free_ports(1)
    load = Load(seed=8)
    backends = [f"http://127.0.0.1:{http_port}"]
    with listening(ports.source(), backends=backends, tokenizers=tokenizers) as gateway:
        with serving(model, ports, http_port) as server:
            # The cache has 39 blocks; prompts and answers push each other out.
            hits = [predict(gateway, server, load.prompt(), max_tokens=load.random.choice([1, 40])) for _ in range(60)]
            assert sum(map(bool, hits)) > 15
            assert gateway.keys("vllm-0") == ["vllm:sha256:32"]

            text = "Once upon a time there was a little girl who loved to play outside. " * 8
            assert predict(gateway, server, text) == 0
            assert predict(gateway, server, text + "One day") > 64
            conversation = [{"role": "system", "content": text}, {"role": "user", "content": "Who was there?"}]
            assert predict(gateway, server, conversation) == 0
            assert predict(gateway, server, conversation) > 64
            parts = [{"type": "text", "text": text[:200]}, {"type": "text", "text": text[200:]}]
            conversation = [{"role": "user", "content": parts}]
            assert predict(gateway, server, conversation) == 0
            assert predict(gateway, server, conversation) > 64

            # The engine tells of a reset with its next step, so the next prompt is one that it never had.
            assert server.call("POST", "/reset_prefix_cache")[0] == 200
            assert predict(gateway, server, load.tokens(70, 70)) == 0
            assert predict(gateway, server, text) == 0
            tokens = load.tokens(200, 200)
            assert predict(gateway, server, tokens) == 0

            # A gateway that starts only now learns all of it from the replay.
            with listening(ports.source()) as late:
                eventually(
                    lambda: late.score("vllm-0", token_ids=tokens) == 192, lambda: late.sources("vllm-0")
                )
        # Killed, and started again.
        with serving(model, ports, http_port) as server:
            eventually(lambda: gateway.score("vllm-0", token_ids=tokens) == 0, lambda: gateway.sources("vllm-0"))
            assert predict(gateway, server, tokens) == 0
            assert predict(gateway, server, tokens) == 192
