"""Roles of kvik as processes of a bench."""

import contextlib
import http.client
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import TypeVar

START_S = 120


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Program:
    """A role of kvik that runs until the end of the context."""

    # What answers with 200 when the role serves.
    path = "/health"

    def __init__(self, command: list[str], health_port: int) -> None:
        self.log = tempfile.NamedTemporaryFile("w+", suffix=".log")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", health_port, timeout=5)
                connection.request("GET", self.path)
                if connection.getresponse().status == 200:
                    return
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.log.seek(0)
                raise SystemExit(f"{command[1]} did not start:\n{self.log.read()[-4000:]}")
            time.sleep(0.1)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


Running = TypeVar("Running", bound=Program)


@contextlib.contextmanager
def running(program: Running) -> Iterator[Running]:
    try:
        yield program
    finally:
        program.stop()
