"""The firewall of the deployment: who reaches whom, evaluated from the policies as they are rendered."""

import itertools

import pytest
from manifests import RENDERINGS, kustomized
from network_policies import Endpoint, allows, external, pod, pod_elsewhere

PORTS = {"gateway": 8080, "coordinator": 8081, "worker": 8082, "store": 9400}
PEER_PORT = 9401
EPP_PORT = 9002
INTERNET = external("internet", "203.0.113.7")
LOAD_BALANCERS = [external("google proxy", "130.211.3.4"), external("google health check", "35.191.200.1")]
CLIENT = pod_elsewhere("ingress controller", {"app": "nginx"}, "ingress", kvik__client="true")
DATA_PLANE = pod_elsewhere("envoy", {"app": "envoy"}, "gateways", kvik__data__plane="true")
STRANGER = pod_elsewhere("other pod", {"app": "web"}, "shop")
NEIGHBOR = Endpoint("pod of the same namespace", {"app": "web"})
PROMETHEUS = pod_elsewhere("prometheus", {"app.kubernetes.io/name": "prometheus"}, "monitoring")
DNS = pod_elsewhere("dns", {"k8s-app": "kube-dns"}, "kube-system")
ETCD = Endpoint("etcd", {"app.kubernetes.io/name": "etcd"})
VLLM = Endpoint("vllm", {"app": "vllm"})
ROLES = [pod(role) for role in ("gateway", "coordinator", "worker")]
ALL_PORTS = [22, 53, 80, 443, 2379, 5557, 5558, 6443, 8000, *PORTS.values(), PEER_PORT, EPP_PORT]

# Between roles. The first two are the firewall of the design; the others are what workers and coordinators need to find
# each other and to move running answers.
BETWEEN_ROLES = {
    ("gateway", "coordinator", 8081),
    ("gateway", "worker", 8082),
    ("worker", "coordinator", 8081),
    ("worker", "worker", 8082),
    ("coordinator", "coordinator", 8081),
    ("coordinator", "worker", 8082),
}


def allowed(overlay: str, sources: list[Endpoint], targets: list[Endpoint]) -> set[tuple[str, str, int]]:
    """All connections that get through, of every source, target and port."""
    manifests = kustomized(overlay)
    return {
        (source.name, target.name, port)
        for source, target, port in itertools.product(sources, targets, ALL_PORTS)
        if allows(manifests, source, target, port)
    }


@pytest.mark.parametrize("overlay", ["base", "examples/all", "examples/etcd", "gke"])
def test_roles_reach_each_other_as_the_firewall_table_says_and_in_no_other_way(overlay: str):
    assert allowed(overlay, ROLES, ROLES) == BETWEEN_ROLES


def test_only_clients_that_are_named_and_prometheus_come_in_from_elsewhere():
    sources = [CLIENT, STRANGER, NEIGHBOR, PROMETHEUS, INTERNET, *LOAD_BALANCERS]
    assert allowed("base", sources, ROLES) == {
        (CLIENT.name, "gateway", 8080),
        (PROMETHEUS.name, "gateway", 8080),
        (PROMETHEUS.name, "coordinator", 8081),
        (PROMETHEUS.name, "worker", 8082),
    }


def test_on_gke_clients_come_through_the_load_balancer_alone():
    sources = [CLIENT, STRANGER, NEIGHBOR, INTERNET, *LOAD_BALANCERS]
    assert allowed("gke", sources, ROLES) == {(balancer.name, "gateway", 8080) for balancer in LOAD_BALANCERS}


@pytest.mark.parametrize("overlay", RENDERINGS)
def test_nothing_goes_out_but_to_dns_and_what_an_example_needs(overlay: str):
    manifests = kustomized(overlay)
    roles = [*ROLES, pod("store"), pod("epp")]
    targets = [CLIENT, STRANGER, NEIGHBOR, PROMETHEUS, DNS, INTERNET, ETCD, VLLM]
    wanted = {(role.name, DNS.name, 53) for role in roles}
    if overlay == "examples/etcd":
        wanted |= {("coordinator", ETCD.name, 2379)}
    if overlay in ("examples/all", "gke"):
        # The API server, which no selector can name.
        wanted |= {("coordinator", INTERNET.name, port) for port in (443, 6443)}
    finder = {"examples/vllm-gateway": "gateway"}.get(overlay, "epp" if "inference-pool" in overlay else None)
    if finder:
        wanted |= {(finder, VLLM.name, port) for port in (8000, 5557, 5558)}
        wanted |= {(finder, INTERNET.name, port) for port in (443, 6443)}
    assert allowed(overlay, roles, targets) == wanted
    assert all(allows(manifests, role, DNS, 53, "UDP") for role in roles)


def test_stores_of_nodes_reach_each_other_and_are_read_by_gateways_and_prometheus():
    sources = [*ROLES, pod("store"), CLIENT, STRANGER, NEIGHBOR, PROMETHEUS, INTERNET]
    assert allowed("examples/node-store", sources, [pod("store")]) == {
        ("store", "store", PEER_PORT),
        ("gateway", "store", 9400),
        (PROMETHEUS.name, "store", 9400),
    }


@pytest.mark.parametrize("overlay", ["examples/inference-pool", "examples/inference-pool-tls"])
def test_a_picker_is_asked_by_data_planes_that_are_named_and_read_by_prometheus(overlay: str):
    sources = [DATA_PLANE, CLIENT, STRANGER, NEIGHBOR, VLLM, PROMETHEUS, INTERNET, *ROLES]
    assert allowed(overlay, sources, [pod("epp")]) == {
        (DATA_PLANE.name, "epp", EPP_PORT),
        (PROMETHEUS.name, "epp", 8080),
    }
