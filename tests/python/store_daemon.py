"""`kvik store serve` as a process."""

import pathlib
import signal
import subprocess

from conftest import binary
from engine_processes import eventually

CHUNK_TOKENS = 64


def whole_chunks(n_tokens: int) -> int:
    """Tokens of a prompt that can be loaded."""
    return n_tokens // CHUNK_TOKENS * CHUNK_TOKENS


class Daemon:
    """A store daemon, which can be killed and started again with the same disk."""

    def __init__(self, folder: pathlib.Path, *flags: str, ram: str = "128MiB", has_disk: bool = True) -> None:
        folder.chmod(0o700)
        self.socket = folder / "store.sock"
        self.disk = folder / "disk"
        disk = ["--nvme", f"{self.disk}:256MiB"] if has_disk else []
        self.flags = ["--ram", ram, *disk, *flags]
        self.process: subprocess.Popen | None = None
        self.start()

    def start(self) -> None:
        settings = ["--set", f"tiers.chunk_tokens={CHUNK_TOKENS}", "--log", "warn"]
        self.process = subprocess.Popen([binary(), "store", "serve", "--socket", str(self.socket), *settings, *self.flags])
        eventually(self.socket.exists, lambda: "no socket")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.socket.unlink(missing_ok=True)

    def pause(self) -> None:
        """It answers nothing until it is resumed."""
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Ends it well: what waits for the disk is written."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0


def spoil(disk: pathlib.Path) -> None:
    """Changes one byte in every 64 KiB of the disk tier's data."""
    data = [path for path in disk.rglob("*") if path.is_file() and path.stat().st_size > 1 << 20]
    assert data
    for path in data:
        with path.open("r+b") as file:
            for place in range(1 << 16, path.stat().st_size, 1 << 16):
                file.seek(place)
                byte = file.read(1)
                if byte != b"\0":
                    file.seek(place)
                    file.write(bytes([byte[0] ^ 1]))
