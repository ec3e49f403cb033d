"""The endpoint picker follows the pool of its manifests in a real API server: `./check --kubernetes` runs this."""

import json
import pathlib
from collections.abc import Iterator

import api_server
import pytest
from api_server import ApiServer, running_server
from fleet import Fleet, status_of, text_of
from manifests import NAMESPACE, kustomized, of_kind

ENGINES = {"vllm-0": "vllm-0:8000", "vllm-1": "vllm-1:8000"}
POD = "kvik-epp-a"

pytestmark = api_server.NEEDED


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ApiServer]:
    with running_server(tmp_path_factory.mktemp("api-server")) as server:
        yield server


def done(server: ApiServer, *arguments: str, given: str = "") -> str:
    """What kubectl prints in the namespace; it must succeed."""
    ran = server.kubectl(f"--namespace={NAMESPACE}", *arguments, given=given)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def engine_pod(name: str) -> dict:
    """A pod as Pod Security wants it; there is no kubelet, so it never runs, and `say` is what it says of itself."""
    container = {
        "name": "vllm",
        "image": "vllm",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"app": "vllm"}},
        "spec": {
            "serviceAccountName": "kvik-epp",
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
        },
    }


def say(server: ApiServer, name: str, address: str, ready: bool):
    """Writes the status of a pod, as its kubelet would."""
    condition = {"type": "Ready", "status": str(ready)}
    status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": [condition]}
    patch = json.dumps({"status": status})
    done(server, "patch", "pod", name, "--subresource=status", "--type=merge", f"--patch={patch}")


def known(metrics: str) -> int:
    """Endpoints that the picker knows."""
    (line,) = [line for line in text_of(metrics).splitlines() if line.startswith("kvik_epp_pool_endpoints ")]
    return int(float(line.split()[1]))


def test_a_picker_follows_the_pool_with_its_role_through_pods_that_come_and_go_and_a_server_that_dies(
    server: ApiServer, tmp_path: pathlib.Path
):
    with Fleet("examples/inference-pool", tmp_path) as fleet:
        for name, address in ENGINES.items():
            fleet.start_engine(name, address, model="llama")
        ports = [int(fleet.addresses[address].rpartition(":")[2]) for address in ENGINES.values()]
        objects = kustomized("examples/inference-pool")
        (pool,) = of_kind(objects, "InferencePool")
        pool["spec"]["targetPorts"] = [{"number": ports[0]}]
        server.apply(objects)
        server.apply([engine_pod(name) for name in ENGINES])
        (tmp_path / "token").write_text(done(server, "create", "token", "kvik-epp"))
        address = fleet.start(
            "epp",
            POD,
            KVIK_EPP_POOL_API=server.url,
            KVIK_EPP_POOL_TOKEN_FILE=str(tmp_path / "token"),
            KVIK_EPP_POOL_CA_FILE=str(server.authorities),
            KVIK_EPP_POOL_RETRY_MAX_MS="500",
        )
        metrics = address + "/metrics"
        fleet.until_probed("epp", POD, address)
        # Pods without an address, and one that is not ready, take no requests.
        assert known(metrics) == 0 and status_of(address + "/ready") == 503
        say(server, "vllm-0", "127.0.0.1", ready=False)
        say(server, "vllm-0", "127.0.0.1", ready=True)
        fleet.until(POD, "one engine is known", lambda: known(metrics) == 1)
        fleet.until_answers(POD, address + "/ready")
        # A second port of the pod, and then a second pod, which both ports are asked of.
        both = json.dumps({"spec": {"targetPorts": [{"number": port} for port in ports]}})
        done(server, "patch", "inferencepool", pool["metadata"]["name"], "--type=merge", f"--patch={both}")
        fleet.until(POD, "both ports are known", lambda: known(metrics) == 2)
        say(server, "vllm-1", "127.0.0.2", ready=True)
        fleet.until(POD, "both ports of both pods are known", lambda: known(metrics) == 4)

        # The server dies: what is known stays, and what happened meanwhile is known when it is back.
        server.kill()
        assert known(metrics) == 4 and status_of(address + "/ready") == 200
        server.start()
        server.wait_until_ready()
        done(server, "delete", "pod", "vllm-1", "--grace-period=0", "--force")
        fleet.until(POD, "the pod that was deleted is gone", lambda: known(metrics) == 2)
        say(server, "vllm-0", "127.0.0.1", ready=False)
        fleet.until(POD, "no engine is ready", lambda: known(metrics) == 0)
        say(server, "vllm-0", "127.0.0.1", ready=True)
        fleet.until(POD, "the engine is back", lambda: known(metrics) == 2)

        # A pool that is deleted has no engines, and one of its name that may be read again has them.
        done(server, "delete", "rolebinding", "kvik-epp")
        done(server, "delete", "inferencepool", pool["metadata"]["name"])
        fleet.until(POD, "no pool is known", lambda: known(metrics) == 0)
        server.apply(objects)
        fleet.until(POD, "the new pool is known", lambda: known(metrics) == 1)
        fleet.end()
