"""Compares the index with what a vLLM server finds in its cache, on the CPU with the bundled model."""

import time

import pytest
from engine_processes import ENGINES, MODEL, MODEL_FOLDER, Gateway, Load, Ports, eventually, free_ports, listening
from vllm_server import Server, serving

pytestmark = pytest.mark.skipif(not ENGINES, reason="KVIK_ENGINES is not set")


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


def test_a_vllm_server_finds_what_the_index_says_that_it_has() -> None:
    tokenizers = {"models": {MODEL: str(MODEL_FOLDER)}}
    ports = Ports()
    (http_port,) = free_ports(1)
    load = Load(seed=8)
    backends = [f"http://127.0.0.1:{http_port}"]
    with listening(ports.source(), backends=backends, tokenizers=tokenizers) as gateway:
        with serving(ports, http_port) as server:
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
        with serving(ports, http_port) as server:
            eventually(lambda: gateway.score("vllm-0", token_ids=tokens) == 0, lambda: gateway.sources("vllm-0"))
            assert predict(gateway, server, tokens) == 0
            assert predict(gateway, server, tokens) == 192
