"""The ledger of a folder, as `kvctl` tells it."""

import contextlib
import json
import pathlib
import subprocess
import threading
from collections.abc import Iterator

from conftest import binary


class Ledger:
    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder

    def kvctl(self, *arguments: str) -> str:
        command = [str(pathlib.Path(binary()).with_name("kvctl")), *arguments, "--dir", str(self.folder)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def held(self, group: str) -> int:
        """Bytes that all engines of a name hold."""
        devices = json.loads(self.kvctl("list", "--json"))["devices"]
        groups = [one for device in devices for one in device["groups"] if one["ipc"] == group]
        return sum(one["held_bytes"] for one in groups)

    @contextlib.contextmanager
    def watched(self, group: str) -> Iterator[list[int]]:
        """Samples what is held."""
        samples: list[int] = []
        is_done = threading.Event()

        def watch() -> None:
            while not is_done.wait(0.05):
                samples.append(self.held(group))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield samples
        finally:
            is_done.set()
            watcher.join()
