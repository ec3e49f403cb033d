"""A gateway in front of two vLLM servers that share one store daemon.

KVIK_ENGINES names a virtual environment made by `engines/install`, KVIK_PACKAGE the folder of the package `kvik`.
"""

import pathlib
import random

import pytest
from engine_processes import ENGINES, MODEL, Ports, eventually, free_ports, listening
from store_daemon import Daemon, whole_chunks
from vllm_server import Server, serving

pytestmark = pytest.mark.skipif(not ENGINES, reason="KVIK_ENGINES is not set")

N_TOKENS = 600


def prompt(seed: int) -> list[int]:
    return [1, *random.Random(seed).choices(range(10, 400), k=N_TOKENS - 1)]


def text(answer: dict) -> str:
    return answer["choices"][0]["text"]


def test_a_prompt_that_one_server_computed_is_found_and_loaded_by_the_other(tmp_path: pathlib.Path) -> None:
    ports = [Ports(), Ports()]
    *http_ports, store_port = free_ports(3)
    names = [f"127.0.0.1:{port}" for port in http_ports]
    daemon = Daemon(tmp_path, "--metrics", f"127.0.0.1:{store_port}")
    stores = [{"url": f"http://127.0.0.1:{store_port}", "workers": names, "model": MODEL, "store_model": "kvik-tiny"}]
    backends = [f"http://{name}" for name in names]
    sources = [{**one.source(), "worker": name} for one, name in zip(ports, names, strict=True)]

    def start(which: int) -> Server:
        return serving(ports[which], http_ports[which], name=names[which], socket=daemon.socket)

    try:
        with listening(*sources, backends=backends, stores=stores) as gateway, start(0) as first:
            with start(1) as second:
                tokens = prompt(1)
                computed = first.complete(prompt=tokens, max_tokens=16)
                assert computed["n_cached"] == 0
                # The second has computed nothing; the index knows what it can load.
                found = whole_chunks(N_TOKENS)
                eventually(lambda: gateway.score(names[1], token_ids=tokens) == found, lambda: gateway.sources(names[1]))
                loaded = second.complete(prompt=tokens, max_tokens=16)
                assert (loaded["n_cached"], text(loaded)) == (found, text(computed))
                # And the first has it in its own memory, to the last block.
                eventually(
                    lambda: gateway.score(names[0], token_ids=tokens) == N_TOKENS // 32 * 32,
                    lambda: gateway.sources(names[0]),
                )
                # Another salt is another prompt.
                assert gateway.score(names[1], token_ids=tokens, cache_salt="tenant") == 0
                assert second.complete(prompt=tokens, cache_salt="tenant")["n_cached"] == 0
            # The second server is gone: requests through the gateway are served by the first, also those whose prompt only
            # the second computed.
            body = {"model": MODEL, "prompt": tokens, "max_tokens": 16, "temperature": 0}
            assert text(gateway.call("POST", "/v1/completions", body)) == text(computed)
    finally:
        daemon.kill()
