"""The endpoint picker as its manifests run it: what it chooses, what it asks for, and when it is ready."""

import json
import ssl
import subprocess
import urllib.request

import pytest
from fleet import PATIENCE_S, TOKENS, Fleet, status_of, text_of
from grpc_health import NOT_SERVING, SERVING, health_of
from manifests import find, of_kind
from pool_server import PoolServer, ready_pod

ENGINE = "vllm-0:8000"
POD = "kvik-epp-a"
GRPC = f"{POD}.kvik-epp:9002"


@pytest.fixture
def fleet(request, tmp_path):
    with Fleet(request.param, tmp_path) as fleet:
        yield fleet


def pool_of(fleet: Fleet, port: int) -> dict:
    """The pool of the manifests, with its engines on a port of this machine."""
    (pool,) = of_kind(fleet.manifests, "InferencePool")
    metadata = {**pool["metadata"], "resourceVersion": "5"}
    return {**pool, "metadata": metadata, "spec": {**pool["spec"], "targetPorts": [{"number": port}]}}


def server_of(fleet: Fleet) -> PoolServer:
    """An API server with a pool of one engine, which runs."""
    fleet.start_engine("vllm-0", ENGINE, model="llama")
    pool = pool_of(fleet, int(fleet.addresses[ENGINE].rpartition(":")[2]))
    return PoolServer(pool, [ready_pod("vllm-0", pool["spec"]["selector"]["matchLabels"], "127.0.0.1")])


def explained(address: str) -> dict:
    """What the picker would choose for a prompt."""
    body = json.dumps({"model": "llama", "prompt": "Once upon a time"}).encode()
    headers = {"content-type": "application/json", "x-kvik-cluster-token": TOKENS["admin"]}
    request = urllib.request.Request(address + "/route/explain", body, headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return json.load(answer)


@pytest.mark.parametrize("fleet", ["examples/inference-pool"], indirect=True)
def test_a_picker_chooses_from_the_pool_with_no_more_rights_than_its_role_has_and_drains(fleet: Fleet):
    with server_of(fleet) as server:
        address = fleet.start("epp", POD, KVIK_EPP_POOL_API=server.address)
        fleet.until_probed("epp", POD, address)
        fleet.until_answers(POD, address + "/ready")
        assert fleet.addresses[ENGINE] in json.dumps(explained(address))
        assert "kvik_epp_pool_endpoints 1" in text_of(address + "/metrics")
        # What is not for everyone is refused without a token.
        assert status_of(address + "/index/stats") == 401
        rules = find(fleet.manifests, "Role", "kvik-epp")["rules"]
        allowed = {
            (group, resource, verb)
            for rule in rules
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        assert server.asked == allowed
        assert not server.unknown
        fleet.end()


@pytest.mark.parametrize("fleet", ["examples/inference-pool"], indirect=True)
def test_a_picker_is_ready_when_it_knows_the_pool_and_not_before(fleet: Fleet):
    pool = pool_of(fleet, 1)
    with PoolServer(pool, []) as server:
        # A server that is not there yet.
        collections, server.collections = server.collections, {}
        address = fleet.start("epp", POD, KVIK_EPP_POOL_API=server.address, KVIK_EPP_POOL_RETRY_MAX_MS="500")
        fleet.until_serving(POD, GRPC, "liveness")
        fleet.until(POD, "it has asked", lambda: bool(server.unknown))
        assert health_of(fleet.addresses[GRPC], "readiness") == NOT_SERVING
        server.collections = collections
        # A pool without engines is known too: data planes are told so.
        fleet.until_probed("epp", POD, address)
        assert status_of(address + "/ready") == 503
        fleet.end()


@pytest.mark.parametrize("fleet", ["examples/inference-pool-tls"], indirect=True)
def test_with_tls_data_planes_are_shown_the_certificate_of_the_secret(fleet: Fleet):
    folder = fleet.folder / "secrets-tls"
    folder.mkdir()
    certificate, key = folder / "tls.crt", folder / "tls.key"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=kvik-epp"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*request, *names, *files], check=True, capture_output=True)
    with server_of(fleet) as server:
        address = fleet.start("epp", POD, KVIK_EPP_POOL_API=server.address)
        fleet.until_probed("epp", POD, address)
        trusted = ssl.create_default_context(cafile=str(certificate))
        trusted.set_alpn_protocols(["h2"])
        assert health_of(fleet.addresses[GRPC], "readiness", trusted) == SERVING
        assert health_of(fleet.addresses[GRPC], "readiness") is None
        fleet.end()
