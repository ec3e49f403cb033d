#!/usr/bin/env python3
"""Makes an image of a folder without a container engine: `archive.py ROOT TAG FILE.tar`.

FILE.tar is an OCI archive, for `podman load --input FILE.tar`, `docker load` and `skopeo copy oci-archive:FILE.tar`. The
same folder gives the same bytes. Needs Python 3.9 or newer.
"""

import gzip
import hashlib
import io
import json
import pathlib
import platform
import sys
import tarfile

USER = "65532:65532"
ENTRYPOINT = ["/usr/bin/kvik"]
# As the OCI names processors.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def layer_of(root: pathlib.Path) -> bytes:
    """All of the folder as an uncompressed archive, sorted and without times, owned by root."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path in sorted(root.rglob("*")):
            member = archive.gettarinfo(path, arcname=str(path.relative_to(root)))
            member.uid = member.gid = member.mtime = 0
            member.uname = member.gname = ""
            if member.isreg():
                with path.open("rb") as file:
                    archive.addfile(member, file)
            else:
                archive.addfile(member)
    return output.getvalue()


def digest_of(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def files_of(root: pathlib.Path, tag: str) -> dict[str, bytes]:
    """The files of the OCI layout."""
    blobs: dict[str, bytes] = {}

    def add(media_type: str, content: bytes) -> dict:
        digest = digest_of(content)
        blobs["blobs/" + digest.replace(":", "/")] = content
        return {"mediaType": f"application/vnd.oci.image.{media_type}", "digest": digest, "size": len(content)}

    layer = layer_of(root)
    config = {
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": {"User": USER, "Entrypoint": ENTRYPOINT, "Env": ["PATH=/usr/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [digest_of(layer)]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": add("config.v1+json", json.dumps(config).encode()),
        "layers": [add("layer.v1.tar+gzip", gzip.compress(layer, 6, mtime=0))],
    }
    described = add("manifest.v1+json", json.dumps(manifest).encode())
    described["annotations"] = {"org.opencontainers.image.ref.name": tag}
    index = {"schemaVersion": 2, "manifests": [described]}
    return {
        "oci-layout": json.dumps({"imageLayoutVersion": "1.0.0"}).encode(),
        "index.json": json.dumps(index).encode(),
        **blobs,
    }


def main(root: pathlib.Path, tag: str, file: pathlib.Path):
    """Writes the archive, and says how large the image is."""
    with tarfile.open(file, "w") as archive:
        for name, content in sorted(files_of(root, tag).items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    n_bytes = sum(path.stat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    print(f"{file}: {n_bytes / 1e6:.1f} MB, compressed {file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__.strip())
    main(pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]))
