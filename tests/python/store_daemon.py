"""`kvik store serve` as a process."""

import pathlib
import signal
import subprocess

from conftest import binary
from engine_processes import eventually

CHUNK_TOKENS = 64


def whole_chunks(n_tokens: int) -> int:
    """Tokens of a prompt that can be loaded: whole chunks, and at least one token is computed."""
    return (n_tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS


class Daemon:
    """A store daemon, which can be killed and started again with the same disk."""

    def __init__(self, folder: pathlib.Path, *flags: str) -> None:
        folder.chmod(0o700)
        self.socket = folder / "store.sock"
        self.disk = folder / "disk"
        self.flags = ["--nvme", f"{self.disk}:256MiB", *flags]
        self.process: subprocess.Popen | None = None
        self.start()

    def start(self) -> None:
        settings = ["--set", f"tiers.chunk_tokens={CHUNK_TOKENS}", "--ram", "128MiB", "--log", "warn"]
        self.process = subprocess.Popen([binary(), "store", "serve", "--socket", str(self.socket), *settings, *self.flags])
        eventually(self.socket.exists, lambda: "no socket")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.unlink(missing_ok=True)

    def stop(self) -> None:
        """Ends it well: what waits for the disk is written."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0
