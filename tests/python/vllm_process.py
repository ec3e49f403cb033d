"""A real vLLM that computes prompts, in processes of its own."""

import contextlib
import os
import pathlib
import random
import signal
from collections.abc import Iterator

from engine_processes import MODEL_FOLDER, Driver
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
