"""Starts the service under test: the binary as a user runs it, on a free port."""

import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
GATEWAY_LINE = re.compile(r"^\s*gateway\s+(http://\S+)$")
END_TIMEOUT_S = 30

# Hypothesis would keep its data in the current folder.
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(ROOT / "target" / "hypothesis"))


def binary() -> str:
    """The binary: KVIK_BINARY, else the release build, else the debug build."""
    if path := os.environ.get("KVIK_BINARY"):
        return path
    for profile in ("release", "debug"):
        path = ROOT / "target" / profile / "kvik"
        if path.is_file():
            return str(path)
    pytest.exit("no binary: set KVIK_BINARY or run cargo build --release", returncode=1)


@contextmanager
def running(*flags: str) -> Iterator[str]:
    """Runs `kvik up` and gives the address of its gateway; it must end well."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVIK_")}
    command = [binary(), "up", "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            matches = (GATEWAY_LINE.match(line) for line in process.stdout)
            match = next((match for match in matches if match), None)
            assert match, "kvik up ended before it told its address"
            yield match[1]
            process.send_signal(signal.SIGINT)
            assert process.wait(END_TIMEOUT_S) == 0
        finally:
            process.kill()


@pytest.fixture(scope="session")
def gateway() -> Iterator[str]:
    """The address of a gateway that needs no key."""
    with running() as address:
        yield address
