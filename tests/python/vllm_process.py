"""A real vLLM that computes prompts, in processes of its own, and the daemon below it."""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from engine_processes import DRIVERS, ENGINES, MODEL_FOLDER, Driver
from store_daemon import Daemon, whole_chunks
from vllm_server import PACKAGE

# What vLLM prints of itself is a page.
QUIET = {"VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


class Vllm(Driver):
    """An engine in a process of its own."""

    def __init__(
        self, *flags: str, model: pathlib.Path = MODEL_FOLDER, driver: str = "vllm_engine.py"
    ) -> None:
        environment = {**QUIET, "PYTHONPATH": os.path.abspath(PACKAGE)}
        super().__init__(driver, "--model", str(model), *flags, **environment)
        assert self.read() == {"is_ready": True}

    def generate(
        self, *prompts: list[int], max_tokens: int = 8, salt: str | None = None, params: dict | None = None
    ) -> dict:
        salts = [salt] * len(prompts)
        return self.ask("generate", prompts=prompts, max_tokens=max_tokens, salts=salts, transfer_params=params)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def started(*flags: str, **options: pathlib.Path | str) -> Iterator[Vllm]:
    engine = Vllm(*flags, **options)
    try:
        yield engine
    finally:
        engine.kill()


def prompt(seed: int, n_tokens: int) -> list[int]:
    return [1, *random.Random(seed).choices(range(10, 400), k=n_tokens - 1)]


def eventually_loaded(
    engine: Vllm, tokens: list[int], right: list[list[int]], n_cached: int | None = None
) -> None:
    """The engine loads what another has computed; the other's saves may take a moment."""
    deadline = time.monotonic() + 120
    n_cached = whole_chunks(len(tokens)) if n_cached is None else n_cached
    while True:
        answer = engine.generate(tokens)
        assert answer["tokens"] == right
        if answer["cached"] == [n_cached]:
            return
        assert time.monotonic() < deadline, answer
        engine.ask("reset")


def run_driver(name: str, *arguments: str) -> dict:
    environment = {**os.environ, **QUIET, "PYTHONPATH": os.path.abspath(PACKAGE), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [f"{ENGINES}/bin/python", "-W", "ignore", str(DRIVERS / name), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def plain() -> Iterator[Vllm]:
    """An engine without kvik: what it says is right."""
    with started() as engine:
        yield engine


@pytest.fixture
def daemon(tmp_path: pathlib.Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path)
    yield daemon
    daemon.resume()
    daemon.kill()
