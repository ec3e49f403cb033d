"""The Python that has LMCache: a virtual environment, created if it is missing, or a folder of packages."""

import os
import pathlib
import subprocess
import sys
import tarfile
from dataclasses import dataclass

from problem import Problem, last_lines

REQUIREMENTS = pathlib.Path(__file__).parent / "requirements.txt"
PYTHON_VERSIONS = [(3, 10), (3, 11), (3, 12), (3, 13)]
PROBE = "import importlib.metadata as it; print(it.version('lmcache'), it.version('torch'))"

# Freed memory stays with the process. LMCache takes 32 MiB anew for each chunk that it copies, and the kernel would
# clear that memory every time: with this its stores are up to twice as fast.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Environment:
    """An interpreter that can import LMCache."""

    python: pathlib.Path
    packages: pathlib.Path | None
    n_threads: int
    keeps_memory: bool

    def variables(self) -> dict[str, str]:
        """The environment of LMCache's processes."""
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": str(self.n_threads),
            "LMCACHE_DISABLE_BANNER": "1",
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_LOG_LEVEL": "WARNING",
            # With a GPU it would copy by the GPU's rules also what is in the CPU's memory.
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        if self.packages is not None:
            paths = [str(self.packages), variables.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return variables | (KEEP_MEMORY if self.keeps_memory else {})

    def versions(self) -> dict[str, str] | None:
        """The versions of LMCache and torch; none if one of them is missing."""
        command = [str(self.python), "-c", PROBE]
        try:
            probe = subprocess.run(command, env=self.variables(), capture_output=True, text=True, check=False)
        except OSError as error:
            raise Problem(f"{self.python} cannot be run: {error.strerror}") from error
        if probe.returncode != 0:
            return None
        return dict(zip(["lmcache", "torch"], probe.stdout.split(), strict=True))


def in_venv(folder: pathlib.Path, n_threads: int, keeps_memory: bool) -> Environment:
    """The environment of a folder; what is missing is installed."""
    environment = Environment(folder.absolute() / "bin" / "python", None, n_threads, keeps_memory)
    if environment.python.exists() and environment.versions():
        return environment
    if sys.version_info[:2] not in PYTHON_VERSIONS:
        wanted = ", ".join(".".join(map(str, version)) for version in PYTHON_VERSIONS)
        raise Problem(f"LMCache needs Python {wanted}; this is {sys.version.split()[0]}")
    print(f"installing LMCache into {folder}: 5 GB, some minutes", file=sys.stderr)
    run([sys.executable, "-m", "venv", str(folder)], "cannot make a virtual environment (Debian: install python3-venv)")
    pip = [str(environment.python), "-m", "pip", "install", "--disable-pip-version-check", "-r", str(REQUIREMENTS)]
    run(pip, "cannot install LMCache: pip needs the network, or name an environment that has it with --venv")
    if not environment.versions():
        raise Problem(f"LMCache was installed into {folder} and cannot be found there")
    return environment


def unpack(file: pathlib.Path, folder: pathlib.Path) -> None:
    """Unpacks what `pack` has packed."""
    try:
        with tarfile.open(file, "r:xz") as archive:
            archive.extractall(folder, filter="data")
    except (OSError, tarfile.TarError) as error:
        raise Problem(f"{file} cannot be unpacked: {error}") from error


def in_packages(folder: pathlib.Path, python: pathlib.Path, n_threads: int, keeps_memory: bool) -> Environment:
    """An interpreter that has torch, with packages of a folder before its own; nothing is installed."""
    environment = Environment(python, folder.absolute(), n_threads, keeps_memory)
    if not environment.versions():
        raise Problem(f"{python} has not both lmcache and torch: they need a Python with torch, named by --python")
    return environment


def run(command: list[str], message: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise Problem(f"{message}\n{last_lines(done.stdout)}")
