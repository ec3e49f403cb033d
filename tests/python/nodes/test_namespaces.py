"""Three nodes on one machine, each in a network namespace, with a store daemon and a worker each.

Run by `./check --slow`. It needs root, for the namespaces; nothing outside of them is touched.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import binary

HUB = f"kvik-hub-{os.getpid()}"
PEER_PORT = 9106
PROXY_PORT = 9107
WORKER_PORT = 8082
CHUNK_TOKENS = 256
# Two chunks and some.
PROMPT_TOKENS = 600
START_TIMEOUT_S = 60
REQUEST_TIMEOUT_S = 60

POST = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.stdin.buffer.read(), {"content-type": "application/json"})
print(urllib.request.urlopen(request, timeout=float(sys.argv[2])).read().decode())
"""

GET = """
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1], timeout=float(sys.argv[2])).read().decode())
"""

# Passes bytes between its callers and the daemon; from the daemon's, it flips one bit in each 100 kB.
CORRUPTING_PROXY = """
import socket, sys, threading
def pump(source, target, is_spoiled):
    n_passed = 0
    try:
        while data := bytearray(source.recv(65536)):
            if is_spoiled and (n_passed + len(data)) // 100_000 > n_passed // 100_000:
                data[-1] ^= 1
            n_passed += len(data)
            target.sendall(data)
    except OSError:
        pass
    for end in (source, target):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
host, port, behind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
listener = socket.create_server((host, port))
print("listening", flush=True)
while True:
    caller, _ = listener.accept()
    daemon = socket.create_connection((host, behind))
    threading.Thread(target=pump, args=(caller, daemon, False), daemon=True).start()
    threading.Thread(target=pump, args=(daemon, caller, True), daemon=True).start()
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Node:
    """A namespace with a daemon and a worker."""

    def __init__(self, number: int, folder: Path) -> None:
        self.name = f"kvik-node-{os.getpid()}-{number}"
        self.address = f"10.77.0.{number}"
        self.folder = folder / str(number)
        self.folder.mkdir()
        self.processes: list[subprocess.Popen] = []
        self.number = number
        link = f"kv{number}"
        ip("netns", "add", self.name)
        ip("-n", self.name, "link", "set", "lo", "up")
        ip("-n", self.name, "link", "add", "eth0", "type", "veth", "peer", "name", link, "netns", HUB)
        ip("-n", HUB, "link", "set", link, "master", "hub", "up")
        ip("-n", self.name, "address", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", self.name, "link", "set", "eth0", "up")

    def run(self, *command: str, **options: object) -> subprocess.CompletedProcess:
        return subprocess.run(["ip", "netns", "exec", self.name, *command], text=True, **options)

    def spawn(self, log: str, *command: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVIK_")}
        with (self.folder / log).open("w") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command], stdout=output, stderr=output, env=environment
            )
        self.processes.append(process)

    def wait_for(self, log: str, text: str) -> None:
        wait_until(f"{text!r} in {log} of node {self.number}", lambda: text in (self.folder / log).read_text())

    def start(self, peers: list[str], token: Path) -> None:
        socket = self.folder / "run" / "store.sock"
        named = [flag for peer in peers for flag in ("--peer", peer)]
        self.spawn(
            "daemon.log", binary(), "store", "serve", "--socket", str(socket), "--ram", "64MiB",
            "--metrics", "127.0.0.1:9105", "--listen", f"{self.address}:{PEER_PORT}", *named,
            "--set", f"peer.token_file={token}", "--set", "peer.lookup_timeout_ms=1000",
        )  # fmt: skip
        self.wait_for("daemon.log", "store daemon is ready")
        self.spawn(
            "worker.log", binary(), "worker", "--listen", f"127.0.0.1:{WORKER_PORT}", "--threads", "1",
            "--set", f"store.daemon={socket}",
        )  # fmt: skip
        self.wait_for("worker.log", "worker is ready")

    def complete(self, prompt: list[int]) -> tuple[list, dict]:
        """The likeliest tokens after a prompt, and where its KV came from."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 3}
        url = f"http://127.0.0.1:{WORKER_PORT}/v1/completions"
        timeout = str(REQUEST_TIMEOUT_S)
        answer = self.run(
            sys.executable, "-c", POST, url, timeout, input=json.dumps(body), capture_output=True, check=False
        )
        assert answer.returncode == 0, f"node {self.number} failed a request: {answer.stderr}"
        answer = json.loads(answer.stdout)
        details = answer["usage"].get("prompt_tokens_details") or {}
        return answer["choices"], details.get("cached_tokens_by_tier") or {}

    def metric(self, name: str) -> float:
        url = "http://127.0.0.1:9105/metrics"
        text = self.run(sys.executable, "-c", GET, url, "10", capture_output=True, check=True).stdout
        values = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(map(float, values))

    def store(self, prompt: list[int]) -> list:
        """Computes a prompt and waits until its chunks are in the daemon; the likeliest tokens after it."""
        before = self.metric("kvik_store_stored_chunks_total")
        tokens, tiers = self.complete(prompt)
        assert tiers == {}, "it was computed before"
        n_chunks = PROMPT_TOKENS // CHUNK_TOKENS
        wait_until(
            "the chunks are in the daemon",
            lambda: self.metric("kvik_store_stored_chunks_total") >= before + n_chunks,
        )
        return tokens

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(30)
        ip("netns", "delete", self.name)


def wait_until(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.05)


def prompt(number: int) -> list[int]:
    return [100 + (position * 7 + number * 131) % 3000 for position in range(PROMPT_TOKENS)]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    if os.geteuid() != 0:
        pytest.fail("network namespaces need root")
    token = tmp_path / "token"
    token.write_text("the token of three nodes")
    token.chmod(0o600)
    ip("netns", "add", HUB)
    nodes = []
    try:
        ip("-n", HUB, "link", "add", "hub", "type", "bridge")
        ip("-n", HUB, "link", "set", "hub", "up")
        nodes.extend(Node(number, tmp_path) for number in (1, 2, 3))
        for node in nodes:
            others = [f"{other.address}:{PEER_PORT}" for other in nodes if other is not node]
            node.start(others, token)
        yield nodes
    finally:
        for node in nodes:
            node.end()
        ip("netns", "delete", HUB)


def test_a_prefix_that_one_node_computed_is_served_by_the_others_from_it(nodes: list[Node]) -> None:
    expected = nodes[0].store(prompt(1))
    for node in nodes[1:]:
        assert node.complete(prompt(1)) == (expected, {"peer": 512})
    # A second request finds it in the node's own memory or in the engine.
    assert "peer" not in nodes[1].complete(prompt(1))[1]


def test_a_link_that_is_cut_costs_a_computation_and_comes_back(nodes: list[Node]) -> None:
    first, second, _ = nodes
    expected = first.store(prompt(2))
    later = first.store(prompt(3))
    ip("-n", first.name, "link", "set", "eth0", "down")
    assert second.complete(prompt(2)) == (expected, {})
    ip("-n", first.name, "link", "set", "eth0", "up")
    # The node is left alone for a while after failures. Prompts that were computed meanwhile are the node's own.
    wait_until("the node is asked again", lambda: asked_again(first, second))
    assert second.complete(prompt(3)) == (later, {"peer": 512})


def asked_again(holder: Node, reader: Node) -> bool:
    asked_again.number += 1
    holder.store(prompt(asked_again.number))
    return "peer" in reader.complete(prompt(asked_again.number))[1]


asked_again.number = 100


def test_a_slow_link_costs_a_bounded_time(nodes: list[Node]) -> None:
    first, second, _ = nodes
    expected = first.store(prompt(4))
    subprocess.run(
        ["ip", "netns", "exec", first.name, "tc", "qdisc", "add", "dev", "eth0", "root", "tbf",
         "rate", "64kbit", "burst", "4kb", "latency", "1s"],
        check=True,
    )  # fmt: skip
    begin = time.monotonic()
    tokens, _ = second.complete(prompt(4))
    assert tokens == expected
    assert time.monotonic() - begin < 30


def test_spoiled_bytes_are_never_used(nodes: list[Node], tmp_path: Path) -> None:
    first, second, third = nodes
    expected = first.store(prompt(5))
    first.spawn(
        "proxy.log", sys.executable, "-c", CORRUPTING_PROXY, first.address, str(PROXY_PORT), str(PEER_PORT)
    )
    first.wait_for("proxy.log", "listening")
    # The third node now reaches the first one through the proxy alone.
    for process in third.processes:
        process.terminate()
        process.wait(30)
    third.processes.clear()
    third.start([f"{first.address}:{PROXY_PORT}"], tmp_path / "token")
    assert third.complete(prompt(5)) == (expected, {})
    spoiled = third.metric('kvik_store_tier_operations_total{tenant="",tier="peer",operation="get",outcome="corrupt"}')
    failed = third.metric("kvik_store_failed_loads_peer_total")
    assert spoiled + failed >= 1, "nothing was read through the proxy"
    assert second.complete(prompt(5)) == (expected, {"peer": 512})
