"""A gateway in front of two vLLM servers, one for prompts and one for answers, whose KV moves over NIXL.

KVIK_ENGINES names a virtual environment made by `engines/install`.
"""

import random

import pytest
from engine_processes import ENGINES, MODEL, Gateway, Ports, eventually, free_ports, listening
from vllm_server import Server, serving

pytestmark = pytest.mark.skipif(not ENGINES, reason="KVIK_ENGINES is not set")

N_TOKENS = 600
PROTOCOL = "nixl_pull"


def prompt(seed: int) -> list[int]:
    return [1, *random.Random(seed).choices(range(10, 400), k=N_TOKENS - 1)]


def text(answer: dict) -> str:
    return answer["choices"][0]["text"]


def n_parted(gateway: Gateway) -> float:
    """Requests whose prompt was computed by one server and whose answer by the other."""
    return gateway.metric("kvik_gateway_disaggregation_total", f'protocol="{PROTOCOL}",outcome="disaggregated"')


def loaded_tokens(server: Server) -> float:
    """Tokens whose KV a server has taken over."""
    lines = server.call("GET", "/metrics")[1].decode().splitlines()
    values = [line.split()[-1] for line in lines if line.startswith("vllm:external_prefix_cache_hits_total")]
    return sum(map(float, values))


def complete(gateway: Gateway, seed: int) -> str:
    body = {"model": MODEL, "prompt": prompt(seed), "max_tokens": 16, "temperature": 0}
    return text(gateway.call("POST", "/v1/completions", body))


def alone(server: Server, seed: int) -> str:
    """What a server generates that has nothing of the prompt."""
    assert server.call("POST", "/reset_prefix_cache")[0] == 200
    return text(server.complete(prompt=prompt(seed), max_tokens=16))


def test_prompts_and_answers_on_different_servers_give_the_tokens_of_one() -> None:
    prefill_port, decode_port, *side_ports = free_ports(4)
    backends = [
        {"url": f"http://127.0.0.1:{prefill_port}", "role": "prefill", "pd": PROTOCOL},
        {"url": f"http://127.0.0.1:{decode_port}", "role": "decode", "pd": PROTOCOL},
    ]
    # A transfer is measured by nothing else than this machine's load here.
    parts = {"min_uncached_tokens": 64, "transfer_tokens_per_s": 1e9, "overhead_ms": 0, "prefill_timeout_ms": 60_000}
    settings = {"backends": backends, "disaggregation": parts}
    with (
        serving(Ports(), prefill_port, nixl_port=side_ports[0], core=0) as prefill,
        serving(Ports(), decode_port, nixl_port=side_ports[1], core=1) as decode,
    ):
        with listening(settings=settings) as gateway:
            eventually(lambda: gateway.call("GET", "/ready")["usable_backends"] == 2, lambda: "two servers")
            for seed in (1, 2, 3):
                answer = complete(gateway, seed)
                assert n_parted(gateway) == seed
                # All but the last token, whose logits are needed.
                assert loaded_tokens(decode) == seed * (N_TOKENS - 1)
                assert answer == alone(prefill, seed)
            # A prompt that is too short to be parted.
            body = {"model": MODEL, "prompt": prompt(4)[:32], "max_tokens": 16, "temperature": 0}
            gateway.call("POST", "/v1/completions", body)
            assert n_parted(gateway) == 3
            expected = alone(decode, 5)
            assert decode.call("POST", "/reset_prefix_cache")[0] == 200
            # Without the server for prompts the other one does it all.
            prefill.kill()
            assert complete(gateway, 5) == expected
            assert n_parted(gateway) == 3


def test_the_server_for_prompts_answers_while_the_other_one_is_gone() -> None:
    prefill_port, decode_port, *side_ports = free_ports(4)
    backends = [
        {"url": f"http://127.0.0.1:{prefill_port}", "model": MODEL, "role": "prefill", "pd": PROTOCOL},
        {"url": f"http://127.0.0.1:{decode_port}", "model": MODEL, "role": "decode", "pd": PROTOCOL},
    ]
    settings = {"backends": backends, "disaggregation": {"min_uncached_tokens": 64}}
    with (
        serving(Ports(), prefill_port, nixl_port=side_ports[0], core=0) as prefill,
        serving(Ports(), decode_port, nixl_port=side_ports[1], core=1) as decode,
        listening(settings=settings) as gateway,
    ):
        expected = complete(gateway, 1)
        assert n_parted(gateway) == 1
        decode.kill()
        # Each request is tried on the server for answers first, until its breaker opens.
        for _ in range(5):
            assert complete(gateway, 1) == expected
        assert alone(prefill, 1) == expected
