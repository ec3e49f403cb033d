"""A gateway in front of two vLLM servers, one for prompts and one for answers, whose KV moves over NIXL.

KVIK_ENGINES names a virtual environment made by `engines/install`.
"""

import contextlib
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_processes import ENGINES, MODEL, Gateway, Ports, eventually, free_ports, listening
from vllm_server import Server, serving

pytestmark = pytest.mark.skipif(not ENGINES, reason="KVIK_ENGINES is not set")

N_TOKENS = 600
PROTOCOL = "nixl_pull"


def text(answer: dict) -> str:
    return answer["choices"][0]["text"]


def body(seed: int) -> dict:
    prompt = [1, *random.Random(seed).choices(range(10, 400), k=N_TOKENS - 1)]
    return {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0}


def complete(gateway: Gateway, seed: int) -> str:
    return text(gateway.call("POST", "/v1/completions", body(seed)))


def alone(server: Server, seed: int) -> str:
    """What a server generates that has nothing of the prompt; it has nothing of it afterwards."""
    assert server.call("POST", "/reset_prefix_cache")[0] == 200
    answer = text(server.complete(**body(seed)))
    assert server.call("POST", "/reset_prefix_cache")[0] == 200
    return answer


def n_parted(gateway: Gateway) -> float:
    """Requests whose prompt was computed by one server and whose answer by the other."""
    return gateway.metric("kvik_gateway_disaggregation_total", f'protocol="{PROTOCOL}",outcome="disaggregated"')


def n_loaded(server: Server) -> float:
    """Tokens whose KV a server has taken over."""
    lines = server.call("GET", "/metrics")[1].decode().splitlines()
    values = [line.split()[-1] for line in lines if line.startswith("vllm:external_prefix_cache_hits_total")]
    return sum(map(float, values))


def test_prompts_and_answers_on_different_servers_give_the_tokens_of_one() -> None:
    http_ports, nixl_ports = free_ports(2), free_ports(2)
    roles = ["prefill", "decode"]
    backends = [
        {"url": f"http://127.0.0.1:{port}", "model": MODEL, "role": role, "pd": PROTOCOL}
        for port, role in zip(http_ports, roles, strict=True)
    ]
    # What this machine measures depends on what else it does, and is not what is tested.
    parts = {"min_uncached_tokens": 64, "overhead_ms": 0, "transfer_tokens_per_s": 1e9}
    settings = {"backends": backends, "disaggregation": parts}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as threads:

        def start(which: int) -> Server:
            server = serving(Ports(), http_ports[which], nixl_port=nixl_ports[which], core=which)
            return stack.enter_context(server)

        prefill, decode = threads.map(start, range(2))
        gateway = stack.enter_context(listening(settings=settings))
        eventually(lambda: gateway.call("GET", "/ready")["usable_backends"] == 2, lambda: "two servers are usable")
        texts = {seed: alone(prefill, seed) for seed in range(3)}
        for seed in range(2):
            assert complete(gateway, seed) == texts[seed]
            assert (n_parted(gateway), n_loaded(decode)) == (seed + 1, (seed + 1) * N_TOKENS)
        # Too short to be parted.
        gateway.call("POST", "/v1/completions", {**body(3), "prompt": body(3)["prompt"][:32]})
        assert (n_parted(gateway), n_loaded(decode)) == (2, 2 * N_TOKENS)

        # Without the server for answers the other one does it all, also while its breaker has not opened yet.
        decode.kill()
        for _ in range(4):
            assert complete(gateway, 0) == texts[0]
        assert n_parted(gateway) == 2

        # It comes back with another memory, and is given what was computed for it.
        decode = start(1)
        eventually(lambda: gateway.call("GET", "/ready")["usable_backends"] == 2, lambda: "two servers are usable")
        assert complete(gateway, 2) == texts[2]
        assert (n_parted(gateway), n_loaded(decode)) == (3, N_TOKENS)

        # Without the server for prompts it does it all.
        prefill.kill()
        assert complete(gateway, 1) == texts[1]
        assert (n_parted(gateway), n_loaded(decode)) == (3, N_TOKENS)
