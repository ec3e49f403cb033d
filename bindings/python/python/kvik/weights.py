"""What tells the weights of two models apart that have the same name and shape."""

import hashlib
from pathlib import Path

# Of weights, as many samples are read as take a second or two from a slow disk: 64 MiB, and all of a model up to that.
SAMPLE_BYTES = 16 << 10
N_SAMPLES = 4096

SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth")


def weights_digest(folder: Path) -> bytes:
    """A digest of the names and lengths of a folder's weight files, and of samples of their bytes."""
    weights = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    digest = hashlib.sha256()
    for path in weights:
        digest.update(f"{path.name}:{path.stat().st_size}:".encode())
        digest.update(samples_digest(path, N_SAMPLES // len(weights)))
    return digest.digest()


def samples_digest(path: Path, n_samples: int) -> bytes:
    """A digest of a file's first and last bytes and of samples between them.

    Models of one shape have files of one length and one header, and training may leave embeddings, which often come first
    and last, as they were. Whole files are read only if they are small: weights take minutes to read.
    """
    n_bytes = path.stat().st_size
    step = max(SAMPLE_BYTES, n_bytes // max(n_samples, 16))
    places = [*range(0, n_bytes, step), max(0, n_bytes - SAMPLE_BYTES)]
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for place in places:
            file.seek(place)
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()
