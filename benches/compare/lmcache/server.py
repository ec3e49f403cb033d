"""LMCache's server on loopback, ended with the block that uses it."""

import contextlib
import http.client
import os
import pathlib
import socket
import subprocess
import time
from collections.abc import Iterator

import process
from environment import Environment
from problem import Problem, last_lines

HOST = "127.0.0.1"
# It imports for ten seconds on a quiet machine, and for minutes on one that also compiles.
START_S = 300
POLL_S = 0.1
SHARED_MEMORY = pathlib.Path("/dev/shm")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def require_port(port: int) -> None:
    with socket.socket() as probe:
        # The server sets it too: a connection that ended a moment ago does not take the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise Problem(f"port {port} cannot be used: {error.strerror}; name another one with --port") from error


@contextlib.contextmanager
def running(environment: Environment, mode: str, port: int, memory_gib: int, log: pathlib.Path) -> Iterator[str]:
    """Runs the server and gives its address once it answers; no process and no shared memory is left."""
    require_port(port)
    http_port = free_port()
    name = f"kvik_compare_{os.getpid()}"
    flags = {
        "host": HOST,
        "port": port,
        "http-host": HOST,
        "http-port": http_port,
        "l1-size-gb": memory_gib,
        "l1-init-size-gb": memory_gib,
        "eviction-policy": "LRU",
        "supported-transfer-mode": mode,
        "shm-name": name,
    }
    arguments = [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
    command = [str(environment.python), "-m", "lmcache.cli.main", "server", *arguments]
    command += ["--no-l1-use-lazy", "--disable-observability"]
    variables = environment.variables()
    try:
        with log.open("w") as output, process.running(command, variables, stdout=output, stderr=output) as server:
            wait_until_ready(server, http_port, log)
            yield f"tcp://{HOST}:{port}"
    finally:
        remove_shared_memory(f"*{name}*")


def wait_until_ready(server: subprocess.Popen, http_port: int, log: pathlib.Path) -> None:
    deadline = time.monotonic() + START_S
    while not is_healthy(http_port):
        if server.poll() is not None:
            raise Problem(f"LMCache's server ended with {server.returncode}; its log ends:\n{log_end(log)}")
        if deadline < time.monotonic():
            raise Problem(f"LMCache's server does not answer after {START_S} s; its log ends:\n{log_end(log)}")
        time.sleep(POLL_S)


def is_healthy(http_port: int) -> bool:
    connection = http.client.HTTPConnection(HOST, http_port, timeout=5)
    try:
        connection.request("GET", "/healthcheck")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def log_end(log: pathlib.Path) -> str:
    return last_lines(log.read_text(errors="replace"))


def remove_shared_memory(pattern: str) -> None:
    """Removes what a process that was killed has left; one that ends has removed it itself."""
    for left in SHARED_MEMORY.glob(pattern):
        left.unlink(missing_ok=True)
