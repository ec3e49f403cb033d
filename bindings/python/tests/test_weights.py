"""What tells the weights of two models apart."""

import random
from pathlib import Path

from kvik.weights import N_SAMPLES, SAMPLE_BYTES, weights_digest


def folder_with(path: Path, files: dict[str, bytes]) -> Path:
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def test_any_byte_of_a_small_model_counts_and_its_place_does_not(tmp_path: Path) -> None:
    first, second = random.Random(1).randbytes(300_000), random.Random(2).randbytes(5)
    files = {"a.safetensors": first, "b.bin": second, "config.json": b"{}"}
    expected = weights_digest(folder_with(tmp_path / "a", files))
    assert weights_digest(folder_with(tmp_path / "b", {**files, "config.json": b"[]"})) == expected
    for place in [0, 1, 16_383, 16_384, 150_000, 299_999]:
        changed = bytearray(first)
        changed[place] ^= 1
        other = folder_with(tmp_path / str(place), {**files, "a.safetensors": bytes(changed)})
        assert weights_digest(other) != expected, place
    assert weights_digest(folder_with(tmp_path / "c", {**files, "b.bin": second + b"x"})) != expected
    assert weights_digest(folder_with(tmp_path / "d", {"b.safetensors": first, "b.bin": second})) != expected


def test_a_large_model_is_sampled_from_its_first_to_its_last_byte(tmp_path: Path) -> None:
    n_bytes = 2 * N_SAMPLES * SAMPLE_BYTES
    path = folder_with(tmp_path / "model", {}) / "model.safetensors"
    digests = set()
    # All but a few bytes are holes of the file.
    for place in [None, 0, n_bytes // 2, n_bytes - 1]:
        with path.open("wb") as file:
            file.truncate(n_bytes)
            if place is not None:
                file.seek(place)
                file.write(b"x")
        digests.add(weights_digest(path.parent))
    assert len(digests) == 4
