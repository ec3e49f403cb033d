"""Crates as `cargo package` makes them: complete by themselves, without the tree around them."""

import pathlib
import re
import shutil
import subprocess
import tomllib

import pytest
from manifests import ROOT, output_of, workspace_version

# Read by the program or its build, at a path that is written in the source.
EMBEDDED = re.compile(
    r'include(?:_str|_bytes)?!\(\s*"([^"]+)"|^const [A-Z_]+: &str = "([^"\s]*/[^"\s]+\.(?:safetensors|json))";',
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def crates(tmp_path_factory) -> dict[str, pathlib.Path]:
    """The folders of all packaged crates that `kvik` is made of, by name."""
    cargo = shutil.which("cargo")
    if cargo is None:
        pytest.skip("cargo is not on the path")
    target = tmp_path_factory.mktemp("package")
    # Without the lock file: crates that are in no registry cannot be looked up there. That they compile is what the tests of
    # the tree show; that nothing is missing is looked at here.
    command = [cargo, "package", "--workspace", "--no-verify", "--offline", "--allow-dirty", "--exclude-lockfile"]
    done = subprocess.run([*command, f"--target-dir={target}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folder = target / "crates"
    folder.mkdir()
    for file in (target / "package").glob("*.crate"):
        output_of("tar", "--extract", f"--file={file}", f"--directory={folder}")
    suffix = f"-{workspace_version()}"
    return {crate.name.removesuffix(suffix): crate for crate in folder.iterdir()}


def manifest_of(folder: pathlib.Path) -> dict:
    return tomllib.loads((folder / "Cargo.toml").read_text())


def shipped(crates: dict[str, pathlib.Path]) -> list[str]:
    """`kvik`, and all crates of this repository that it depends on."""
    found, waiting = [], ["kvik"]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.append(name)
            waiting += [other for other in manifest_of(crates[name]).get("dependencies", {}) if other in crates]
    return found


def test_crates_depend_on_each_other_by_version(crates):
    assert len(shipped(crates)) > 10
    for name in shipped(crates):
        manifest = manifest_of(crates[name])
        assert manifest["package"]["version"] == workspace_version()
        assert manifest["package"]["license"] == "Apache-2.0"
        assert manifest["package"]["description"]
        for kind in ("dependencies", "dev-dependencies", "build-dependencies"):
            for dependency, entry in manifest.get(kind, {}).items():
                assert "path" not in entry, f"{name}: {dependency}"
                if dependency in crates and kind != "dev-dependencies":
                    assert entry["version"] == workspace_version(), f"{name}: {dependency}"


def test_what_a_crate_embeds_is_in_it(crates):
    n_embedded = 0
    for name in shipped(crates):
        folder = crates[name]
        sources = [*(folder / "src").rglob("*.rs"), *folder.glob("build.rs")]
        for source in sources:
            for pair in EMBEDDED.findall(source.read_text()):
                path = next(filter(None, pair))
                embedded = (source.parent / path).resolve()
                assert embedded.is_relative_to(folder.resolve()), f"{source}: {path} is outside of the crate"
                assert embedded.is_file(), f"{source}: {path}"
                n_embedded += 1
    assert n_embedded >= 5


def test_the_bundled_model_is_packaged_as_it_is(crates):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        packaged = crates["kvik-model"] / "bundled" / name
        assert packaged.read_bytes() == (ROOT / "models/kvik-tiny" / name).read_bytes(), name


def test_every_source_file_of_the_tree_is_in_its_crate(crates):
    listed = output_of("git", "-C", str(ROOT), "ls-files", "crates/*/src", "crates/*/build.rs").splitlines()
    for path in map(pathlib.PurePosixPath, listed):
        folder = crates[path.parts[1]]
        assert (folder / pathlib.PurePosixPath(*path.parts[2:])).is_file(), path
