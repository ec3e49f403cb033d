"""The services that the page is tested against, as processes."""

import json
import os
import re
import signal
import subprocess
import urllib.request
from contextlib import contextmanager

END_TIMEOUT_S = 30
LINE = re.compile(r"^\s*(gateway|coordinator)\s+(http://\S+)$")


def environment():
    return {name: value for name, value in os.environ.items() if not name.startswith("KVIK_")}


@contextmanager
def up(binary, *flags):
    """Runs `kvik up` and gives the addresses of gateway and coordinator; it must end well."""
    command = [binary, "up", "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        try:
            addresses = {}
            for line in process.stdout:
                if match := LINE.match(line):
                    addresses[match[1]] = match[2]
                if len(addresses) == 2:
                    break
            assert len(addresses) == 2, "kvik up ended before it told its addresses"
            yield addresses["gateway"], addresses["coordinator"]
            process.send_signal(signal.SIGINT)
            assert process.wait(END_TIMEOUT_S) == 0
        finally:
            process.kill()


@contextmanager
def worker(binary, coordinator, name, *flags):
    """Runs one worker more, which a test may end."""
    command = [binary, "worker", "--listen", "127.0.0.1:0", "--id", name, "--threads", "1", "--coordinator", coordinator, "--log", "error", *flags]
    with subprocess.Popen(command, env=environment()) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(gateway, path, body=None, headers=None):
    """The answer of a call and its headers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(gateway + path, data, {"content-type": "application/json", **(headers or {})})
    with urllib.request.urlopen(request, timeout=120) as response:
        text = response.read()
        return (json.loads(text) if response.headers["content-type"].startswith("application/json") else text.decode()), response.headers


def metrics(text, name, **labels):
    """The sum of a metric's samples that have these labels."""
    total = 0.0
    for line in text.splitlines():
        if re.match(rf"{re.escape(name)}[{{ ]", line) and all(f'{key}="{value}"' in line for key, value in labels.items()):
            total += float(line.rsplit(" ", 1)[1])
    return total
