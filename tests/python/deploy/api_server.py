"""kube-apiserver and etcd as processes of a test."""

import contextlib
import json
import os
import pathlib
import secrets
import subprocess
import time
from collections.abc import Iterator

import pytest
import yaml
from fleet import free_port
from manifests import NAMESPACE, tool

START_S = 120
# Kinds that operators bring, by group: the server takes any content for them.
CUSTOM_KINDS = {
    "monitoring.coreos.com/v1": ["ServiceMonitor", "PrometheusRule"],
    "networking.gke.io/v1": ["ManagedCertificate"],
    "cloud.google.com/v1": ["BackendConfig"],
    "inference.networking.k8s.io/v1": ["InferencePool"],
    "gateway.networking.k8s.io/v1": ["HTTPRoute"],
}

NEEDED = pytest.mark.skipif(
    "KVIK_API_SERVER" not in os.environ, reason="KVIK_API_SERVER is not set: ./check --kubernetes sets it"
)


class ApiServer:
    """kube-apiserver on an etcd of its own."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        etcd, peer, self.port = (free_port() for _ in range(3))
        token = secrets.token_hex(16)
        (folder / "tokens.csv").write_text(f"{token},administrator,1,system:masters\n")
        key = ["openssl", "genrsa", "-out", str(folder / "accounts.key"), "2048"]
        subprocess.run(key, check=True, capture_output=True)
        cluster = {"server": self.url, "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        }
        (folder / "kubeconfig").write_text(json.dumps(config))
        self.etcd_url, peer_url = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"
        self.etcd = self.spawn(
            "etcd",
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={self.etcd_url}",
            f"--advertise-client-urls={self.etcd_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=default={peer_url}",
        )
        self.start()

    def start(self):
        """Starts the API server, also again after it was killed."""
        folder = self.folder
        self.process = self.spawn(
            os.environ["KVIK_API_SERVER"],
            f"--etcd-servers={self.etcd_url}",
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
        )

    def spawn(self, *command: str) -> subprocess.Popen:
        with (self.folder / f"{pathlib.Path(command[0]).name}.log").open("w") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def authorities(self) -> pathlib.Path:
        """The file by which clients know the server's certificate."""
        return self.folder / "certificates/apiserver.crt"

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
            assert self.process.poll() is None, log
            assert time.monotonic() < deadline, log
            time.sleep(0.2)

    def kill(self):
        """Ends the API server without a word to its clients; what it knows stays in etcd."""
        self.process.kill()
        self.process.wait()

    def end(self):
        self.kill()
        self.etcd.kill()
        self.etcd.wait()


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


@contextlib.contextmanager
def running_server(folder: pathlib.Path) -> Iterator[ApiServer]:
    """A server with the namespace of the manifests and the kinds that operators bring."""
    server = ApiServer(folder)
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
