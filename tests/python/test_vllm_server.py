"""Compares the index with what a vLLM server finds in its cache, on the CPU with the bundled model."""

import contextlib
import http.client
import json
import os
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from engine_processes import (
    ENGINES,
    MODEL,
    MODEL_FOLDER,
    PATIENCE_S,
    START_S,
    Gateway,
    Load,
    Ports,
    eventually,
    free_ports,
    listening,
)

pytestmark = pytest.mark.skipif(not ENGINES, reason="KVIK_ENGINES is not set")


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
