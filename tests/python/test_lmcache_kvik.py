"""LMCache's own connector on `kvik store serve --lm-listen`: its chunks in kvik's store, with every byte compared.

KVIK_LMCACHE names a virtual environment that has LMCache; the tests are skipped without it, since it needs gigabytes.
"""

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest
from engine_processes import Driver, eventually, free_ports
from store_daemon import Daemon

LMCACHE = os.environ.get("KVIK_LMCACHE") and os.path.abspath(os.environ["KVIK_LMCACHE"])

pytestmark = pytest.mark.skipif(not LMCACHE, reason="KVIK_LMCACHE is not set")

# What the driver stores: two, four layers, 64 tokens, 1024 numbers of two bytes.
CHUNK_BYTES = 2 * 4 * 64 * 1024 * 2


class Connector(Driver):
    """LMCache's connector in a process of its own."""

    def __init__(self, port: int) -> None:
        environment = {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false"}
        super().__init__("lmcache_connector.py", str(port), engines=LMCACHE, **environment)
        assert self.read() == {"is_ready": True}

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def connected(port: int) -> Iterator[Connector]:
    connector = Connector(port)
    try:
        yield connector
    finally:
        connector.end()


@contextlib.contextmanager
def serving(folder: pathlib.Path) -> Iterator[tuple[Daemon, int]]:
    port = free_ports(1)[0]
    daemon = Daemon(folder, "--lm-listen", f"127.0.0.1:{port}")
    try:
        yield daemon, port
    finally:
        daemon.process.kill()
        daemon.process.wait()


def resident_bytes(process: subprocess.Popen) -> int:
    for line in pathlib.Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def test_chunks_of_lmcache_come_back_and_outlive_the_daemon(tmp_path: pathlib.Path) -> None:
    with serving(tmp_path) as (daemon, port):
        with connected(port) as connector:
            assert connector.ask("exists", numbers=[0, 1])["there"] == []
            assert connector.ask("get", numbers=[0, 1])["found"] == []
            assert connector.ask("put", numbers=list(range(20)))["is_there"]
            # A chunk that is not full, as LMCache stores at the end of a prompt.
            assert connector.ask("put", numbers=[100], n_tokens=17)["is_there"]
            assert connector.ask("get", numbers=list(range(25)))["found"] == list(range(20))
            assert connector.ask("get", numbers=[100], n_tokens=17)["found"] == [100]
        with connected(port) as another:
            assert another.ask("exists", numbers=[3, 19, 20])["there"] == [3, 19]
            assert another.ask("get", numbers=[3, 19, 20])["found"] == [3, 19]
        daemon.stop()
        daemon.start()
        with connected(port) as connector:
            assert connector.ask("get", numbers=list(range(25)))["found"] == list(range(20))
            assert connector.ask("get", numbers=[100], n_tokens=17)["found"] == [100]


def test_more_than_there_is_room_for_evicts_and_the_daemon_goes_on(tmp_path: pathlib.Path) -> None:
    with serving(tmp_path) as (daemon, port), connected(port) as connector:
        # 128 MiB of memory and 256 MiB of disk.
        n_chunks = 700 * (1 << 20) // CHUNK_BYTES
        for first in range(0, n_chunks, 50):
            assert connector.ask("put", numbers=list(range(first, first + 50)))["is_there"]
        last = list(range(n_chunks - 10, n_chunks))
        assert connector.ask("get", numbers=last)["found"] == last
        found = connector.ask("get", numbers=list(range(0, n_chunks, 7)))["found"]
        assert len(found) < n_chunks // 7
        assert daemon.process.poll() is None
        eventually(lambda: resident_bytes(daemon.process) < 400 << 20, lambda: "the daemon grows with what is stored")
