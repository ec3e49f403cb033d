"""Engines and gateways as processes and prompts for them, for the tests that compare what they hold.

KVIK_ENGINES names a virtual environment made by `engines/install`; the tests are skipped without it, since what it needs
is several gigabytes.
"""

import contextlib
import http.client
import itertools
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

from conftest import ROOT, binary

# Absolute: what an engine compiles is compiled in other folders, with the programs of this one.
ENGINES = os.environ.get("KVIK_ENGINES") and os.path.abspath(os.environ["KVIK_ENGINES"])
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


class Driver:
    """A program of `engines/` in an environment of engines: a request is a line of JSON, and so is its answer."""

    def __init__(self, name: str, *flags: str, engines: str = ENGINES, **environment: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        # SGLang compiles with what is installed there.
        inherited["PATH"] = f"{engines}/bin{os.pathsep}{inherited['PATH']}"
        self.process = subprocess.Popen(
            [f"{engines}/bin/python", "-W", "ignore", str(DRIVERS / name), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**inherited, **environment},
            # An engine may be several processes.
            start_new_session=True,
        )

    def read(self) -> dict:
        # Something that a library prints may come before.
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError("the program ended")

    def begin(self, op: str, **arguments: object) -> None:
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()

    def ask(self, op: str, **arguments: object) -> dict:
        self.begin(op, **arguments)
        return self.read()


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


class Engine(Driver):
    """An engine's cache and publisher in a process of their own."""

    def __init__(self, driver: str, ports: Ports, *flags: str, **environment: str) -> None:
        super().__init__(driver, *ports.engine_flags(), *flags, **{"VLLM_LOGGING_LEVEL": "ERROR", **environment})
        self.worker = driver.split("_")[0] + "-0"
        self.n_batches = 0
        self.names = itertools.count()
        assert self.read() == {"is_ready": True}

    def ask(self, op: str, **arguments: object) -> dict:
        answer = super().ask(op, **arguments)
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
            # Closed while idle, such as while an engine starts.
            self.connection.close()
            response = self.send(method, path, text)
        answer = response.read()
        assert response.status == 200, answer
        return json.loads(answer)

    def send(self, method: str, path: str, text: str | None) -> http.client.HTTPResponse:
        self.connection.request(method, path, text, {"content-type": "application/json"})
        return self.connection.getresponse()

    def metric(self, name: str, labels: str) -> float:
        """The value of a counter; 0 before the first count."""
        response = self.send("GET", "/metrics", None)
        lines = response.read().decode().splitlines()
        start = f"{name}{{{labels}}} "
        return sum(float(line.removeprefix(start)) for line in lines if line.startswith(start))

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
def listening(
    *sources: dict, backends: list[str] = [], settings: dict = {}, **index: object
) -> Iterator[Gateway]:
    """Runs `kvik gateway`, with more settings if there are any; it must end well."""
    index = {"engines": sources, "tokenizers": {"models": {MODEL: str(MODEL_FOLDER)}}, **index}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVIK_")}
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "kvik.yaml"
        config.write_text(json.dumps({"gateway": {"listen": "127.0.0.1:0", "index": index, **settings}}))
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
