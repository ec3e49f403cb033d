"""What the manifests say is run: the real binary with their flags, variables and configuration, on this machine."""

import json
import re
import urllib.request

import pytest
import yaml
from fleet import PATIENCE_S, Fleet, status_of, text_of
from manifests import KUBERNETES, of_kind, role_of


def complete(gateway: str, model: str) -> str:
    """Has a prompt continued; gives the name of the worker that did it."""
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 4}).encode()
    request = urllib.request.Request(gateway + "/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 4
        return answer.headers["x-kvik-worker"]


@pytest.fixture
def fleet(request, tmp_path):
    with Fleet(request.param, tmp_path) as fleet:
        yield fleet


@pytest.mark.parametrize("fleet", ["base"], indirect=True)
def test_the_base_serves_a_request_has_every_metric_it_is_scaled_by_and_drains(fleet: Fleet):
    pods = [
        ("coordinator", "kvik-coordinator-0"),
        ("worker", "kvik-worker-0"),
        ("worker", "kvik-worker-1"),
        ("gateway", "kvik-gateway"),
    ]
    addresses = {}
    for role, pod in pods:
        addresses[pod] = fleet.start(role, pod)
        fleet.until_probed(role, pod, addresses[pod])
    # The name of the pod is the name of the worker.
    assert re.fullmatch(r"kvik-worker-[01]", complete(addresses["kvik-gateway"], "kvik-tiny"))
    # Roles have the token of the cluster: what is not for everyone is refused without it.
    assert status_of(addresses["kvik-worker-0"] + "/v1/models") == 401
    assert status_of(addresses["kvik-coordinator-0"] + "/workers") == 401
    metrics = text_of(addresses["kvik-worker-0"] + "/metrics")
    adapter = yaml.safe_load((KUBERNETES / "components/worker-autoscaling/prometheus-adapter.yaml").read_text())
    for rule in adapter["rules"]["custom"]:
        (series,) = re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])
        assert re.search(rf"^{re.escape(series)}\b", metrics, re.MULTILINE), f"a worker has no metric {series}"
    for address in addresses.values():
        assert status_of(address + "/metrics") == 200
    fleet.end()


@pytest.mark.parametrize("fleet", ["examples/node-store"], indirect=True)
def test_the_store_of_a_node_serves_in_a_folder_of_its_user_and_drains(fleet: Fleet):
    (workload,) = of_kind(fleet.manifests, "DaemonSet")
    assert role_of(workload) == "store"
    address = fleet.start("store", "kvik-store-a")
    fleet.until_probed("store", "kvik-store-a", address)
    folder = fleet.folder / "kvik-store-a" / "socket"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "store.sock").is_socket()
    assert "kvik_node_sessions" in text_of(address + "/metrics")
    fleet.end()


@pytest.mark.parametrize("fleet", ["examples/vllm-gateway"], indirect=True)
def test_a_gateway_in_front_of_engines_serves_their_model(fleet: Fleet):
    for engine in ("vllm-0", "vllm-1"):
        fleet.start_engine(engine, f"{engine}.vllm:8000", model="llama")
    address = fleet.start("gateway", "kvik-gateway")
    fleet.until_probed("gateway", "kvik-gateway", address)
    engines = [f"http://{fleet.addresses[name]}" for name in ("vllm-0.vllm:8000", "vllm-1.vllm:8000")]
    assert complete(address, "llama") in engines
    fleet.end()
