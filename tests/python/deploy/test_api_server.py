"""A real API server takes every object: `./check --kubernetes` runs this, with kube-apiserver and etcd on the path."""

import json
import os
import pathlib
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest
import yaml
from manifests import NAMESPACE, RENDERINGS, charted, key_of, kustomized, tool

START_S = 120
# Kinds that operators bring, by group: the server takes any content for them.
CUSTOM_KINDS = {
    "monitoring.coreos.com/v1": ["ServiceMonitor", "PrometheusRule"],
    "networking.gke.io/v1": ["ManagedCertificate"],
    "cloud.google.com/v1": ["BackendConfig"],
    "inference.networking.k8s.io/v1": ["InferencePool"],
    "gateway.networking.k8s.io/v1": ["HTTPRoute"],
}

pytestmark = pytest.mark.skipif(
    "KVIK_API_SERVER" not in os.environ, reason="KVIK_API_SERVER is not set: ./check --kubernetes sets it"
)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class ApiServer:
    """kube-apiserver on an etcd of its own."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        etcd, peer, self.port = (free_port() for _ in range(3))
        token = secrets.token_hex(16)
        (folder / "tokens.csv").write_text(f"{token},administrator,1,system:masters\n")
        key = ["openssl", "genrsa", "-out", str(folder / "accounts.key"), "2048"]
        subprocess.run(key, check=True, capture_output=True)
        cluster = {"server": f"https://127.0.0.1:{self.port}", "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        (folder / "kubeconfig").write_text(json.dumps(config))
        urls = [f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"]
        self.processes = [
            self.spawn(
                "etcd",
                f"--data-dir={folder / 'etcd'}",
                f"--listen-client-urls={urls[0]}",
                f"--advertise-client-urls={urls[0]}",
                f"--listen-peer-urls={urls[1]}",
                f"--initial-advertise-peer-urls={urls[1]}",
                f"--initial-cluster=default={urls[1]}",
            ),
            self.spawn(
                os.environ["KVIK_API_SERVER"],
                f"--etcd-servers={urls[0]}",
                "--bind-address=127.0.0.1",
                f"--secure-port={self.port}",
                f"--cert-dir={folder / 'certificates'}",
                "--endpoint-reconciler-type=none",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={folder / 'accounts.key'}",
                f"--service-account-signing-key-file={folder / 'accounts.key'}",
                f"--token-auth-file={folder / 'tokens.csv'}",
                "--authorization-mode=RBAC",
                "--service-cluster-ip-range=10.0.0.0/24",
            ),
        ]

    def spawn(self, *command: str) -> subprocess.Popen:
        with (self.folder / f"{pathlib.Path(command[0]).name}.log").open("w") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def kubectl(self, *arguments: str, given: str = "") -> subprocess.CompletedProcess:
        command = [tool("kubectl"), f"--kubeconfig={self.folder / 'kubeconfig'}", *arguments]
        return subprocess.run(command, input=given, capture_output=True, text=True, check=False)

    def apply(self, manifests: list[dict], *flags: str) -> subprocess.CompletedProcess:
        done = self.kubectl("apply", "--server-side", *flags, "--filename=-", given=yaml.safe_dump_all(manifests))
        assert done.returncode == 0, done.stderr
        return done

    def wait_until_ready(self):
        deadline = time.monotonic() + START_S
        while self.kubectl("get", "--raw=/readyz").returncode != 0:
            log = (self.folder / f"{pathlib.Path(os.environ['KVIK_API_SERVER']).name}.log").read_text()[-2000:]
            assert self.processes[1].poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.2)

    def end(self):
        for process in reversed(self.processes):
            process.kill()
            process.wait()


def custom_resources() -> list[dict]:
    open_schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    return [
        {
            "apiVersion": "apiextensions.k8s.io/v1",
            "kind": "CustomResourceDefinition",
            "metadata": {
                "name": f"{kind.lower()}s.{group.partition('/')[0]}",
                # Groups of Kubernetes itself are refused without it.
                "annotations": {"api-approved.kubernetes.io": "unapproved, the kind of a test"},
            },
            "spec": {
                "group": group.partition("/")[0],
                "scope": "Namespaced",
                "names": {"kind": kind, "plural": f"{kind.lower()}s", "singular": kind.lower()},
                "versions": [
                    {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": open_schema}}
                ],
            },
        }
        for group, kinds in CUSTOM_KINDS.items()
        for kind in kinds
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ApiServer]:
    server = ApiServer(tmp_path_factory.mktemp("api-server"))
    try:
        server.wait_until_ready()
        labels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
        server.apply([namespace, *custom_resources()])
        done = server.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
        assert done.returncode == 0, done.stderr
        yield server
    finally:
        server.end()


@pytest.mark.parametrize("overlay", RENDERINGS)
def test_the_server_takes_every_object_of(overlay: str, server: ApiServer):
    manifests = kustomized(overlay)
    done = server.apply(manifests, "--dry-run=server")
    assert len(done.stdout.splitlines()) == len(manifests), done.stdout
    # The server warns of pods that the strictest level of Pod Security would refuse.
    warnings = [line for line in done.stderr.splitlines() if "would violate PodSecurity" in line]
    if overlay == "examples/node-store":
        # Its socket is in a folder of the node, and a root container makes that its own.
        assert len(warnings) == 1
    else:
        assert not warnings, done.stderr


def test_what_kustomize_applied_is_what_the_chart_would_apply(server: ApiServer):
    server.apply(kustomized("base"))
    done = server.kubectl("diff", "--server-side", "--filename=-", given=yaml.safe_dump_all(charted(None)))
    different = [line for line in done.stdout.splitlines() if line.startswith("diff ")]
    # The spelling of the configuration inside of the ConfigMaps is the tool's own.
    maps = {f"v1.ConfigMap.{NAMESPACE}.{name}" for kind, name in map(key_of, kustomized("base")) if kind == "ConfigMap"}
    assert {pathlib.Path(line.split()[-1]).name for line in different} <= maps, done.stdout
    assert done.returncode in (0, 1), done.stderr
