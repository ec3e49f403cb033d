"""Renders the manifests of deploy/ with the real tools, and answers questions about them."""

import functools
import os
import pathlib
import shutil
import subprocess
import tomllib

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
CHART = ROOT / "deploy" / "helm" / "kvik"
NAMESPACE = "kvik"
# Each overlay of kustomize, and the values with which the chart gives the same objects.
RENDERINGS = {
    "base": None,
    "examples/all": CHART / "examples" / "all.yaml",
    "examples/etcd": CHART / "examples" / "etcd.yaml",
    "examples/vllm-gateway": CHART / "examples" / "vllm-gateway.yaml",
    "examples/node-store": CHART / "examples" / "node-store.yaml",
    "examples/inference-pool": CHART / "examples" / "inference-pool.yaml",
    "examples/inference-pool-tls": CHART / "examples" / "inference-pool-tls.yaml",
    "gke": CHART / "examples" / "gke.yaml",
}
# The sections of kvik.yaml that a role reads, where they are not just the one of its name.
SECTIONS = {"epp": ["epp", "gateway"]}
WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet")

Manifest = dict


def tool(name: str) -> str:
    """A tool of Kubernetes: from the folder KVIK_KUBE_TOOLS, else from the path; the test is skipped without one."""
    folder = os.environ.get("KVIK_KUBE_TOOLS")
    path = shutil.which(name, path=folder) if folder else shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is neither in KVIK_KUBE_TOOLS ({folder or 'not set'}) nor on the path")
    return path


def output_of(*command: str) -> str:
    """What a command that must succeed prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stderr}"
    return done.stdout


@functools.cache
def _kustomized(overlay: str) -> str:
    return output_of(tool("kubectl"), "kustomize", str(KUBERNETES / overlay))


def kustomized(overlay: str) -> list[Manifest]:
    """The objects of an overlay."""
    return list(yaml.safe_load_all(_kustomized(overlay)))


def charted(values: pathlib.Path | None, *settings: str) -> list[Manifest]:
    """The objects of the chart."""
    files = [f"--values={values}"] if values else []
    text = output_of(tool("helm"), "template", "kvik", str(CHART), f"--namespace={NAMESPACE}", *files, *settings)
    return [manifest for manifest in yaml.safe_load_all(text) if manifest]


def key_of(manifest: Manifest) -> tuple[str, str]:
    """Names an object within its namespace."""
    return manifest["kind"], manifest["metadata"]["name"]


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def find(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    found = [manifest for manifest in manifests if key_of(manifest) == (kind, name)]
    assert len(found) == 1, f"{kind} {name}: {len(found)} of them"
    return found[0]


def pod_of(workload: Manifest) -> Manifest:
    return workload["spec"]["template"]["spec"]


def container_of(workload: Manifest) -> Manifest:
    (container,) = pod_of(workload)["containers"]
    return container


def pod_labels_of(workload: Manifest) -> dict[str, str]:
    return workload["spec"]["template"]["metadata"]["labels"]


def role_of(workload: Manifest) -> str:
    return pod_labels_of(workload)["app.kubernetes.io/component"]


def sections_of(manifests: list[Manifest], role: str) -> dict[str, dict]:
    """The sections of the role's kvik.yaml, by name."""
    text = find(manifests, "ConfigMap", f"kvik-{role}")["data"]["kvik.yaml"]
    sections = yaml.safe_load(text)
    assert list(sections) == SECTIONS.get(role, [role]), f"kvik-{role} has the sections {list(sections)}"
    return sections


def config_of(manifests: list[Manifest], role: str) -> dict:
    """The section of the role's name in its kvik.yaml."""
    return sections_of(manifests, role)[role]


def workspace_version() -> str:
    return tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
