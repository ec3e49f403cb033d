"""Says what network policies allow, as https://kubernetes.io/docs/concepts/services-networking/network-policies does."""

import ipaddress
from dataclasses import dataclass, field

from manifests import NAMESPACE, Manifest, of_kind


@dataclass(frozen=True)
class Endpoint:
    """A pod with its labels and those of its namespace, or an address outside of the cluster."""

    name: str
    labels: dict[str, str] = field(default_factory=dict, hash=False)
    namespace: str = NAMESPACE
    namespace_labels: dict[str, str] = field(default_factory=dict, hash=False)
    address: str | None = None

    @property
    def is_pod(self) -> bool:
        return self.address is None


def pod(role: str) -> Endpoint:
    """A pod of kvik."""
    return Endpoint(role, {"app.kubernetes.io/name": "kvik", "app.kubernetes.io/component": role})


def pod_elsewhere(name: str, labels: dict[str, str], namespace: str, **namespace_labels: str) -> Endpoint:
    namespace_labels = {key.replace("__", "-"): value for key, value in namespace_labels.items()}
    return Endpoint(name, labels, namespace, {"kubernetes.io/metadata.name": namespace, **namespace_labels})


def external(name: str, address: str) -> Endpoint:
    return Endpoint(name, address=address)


def allows(manifests: list[Manifest], source: Endpoint, target: Endpoint, port: int, protocol="TCP") -> bool:
    """Whether a connection gets through: out of its source and into its target."""
    policies = of_kind(manifests, "NetworkPolicy")
    return _passes(policies, "Egress", source, target, port, protocol) and _passes(
        policies, "Ingress", target, source, port, protocol
    )


def _passes(policies, direction: str, subject: Endpoint, other: Endpoint, port: int, protocol: str) -> bool:
    if not subject.is_pod:
        return True
    selecting = [
        policy["spec"]
        for policy in policies
        if subject.namespace == policy["metadata"]["namespace"]
        and direction in policy["spec"]["policyTypes"]
        and _selects(policy["spec"]["podSelector"], subject.labels)
    ]
    if not selecting:
        return True
    side, peers = ("from", "ingress") if direction == "Ingress" else ("to", "egress")
    return any(
        _matches_peer(rule.get(side), other, subject.namespace) and _matches_port(rule.get("ports"), port, protocol)
        for spec in selecting
        for rule in spec.get(peers, [])
    )


def _selects(selector: dict, labels: dict[str, str]) -> bool:
    assert set(selector) <= {"matchLabels"}, f"not evaluated here: {selector}"
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def _matches_peer(peers: list[dict] | None, other: Endpoint, namespace: str) -> bool:
    if not peers:
        return True
    return any(_is_peer(peer, other, namespace) for peer in peers)


def _is_peer(peer: dict, other: Endpoint, namespace: str) -> bool:
    if "ipBlock" in peer:
        assert set(peer["ipBlock"]) == {"cidr"}, f"not evaluated here: {peer}"
        network = ipaddress.ip_network(peer["ipBlock"]["cidr"])
        return other.address is not None and ipaddress.ip_address(other.address) in network
    if not other.is_pod:
        return False
    if "namespaceSelector" in peer:
        in_namespace = _selects(peer["namespaceSelector"], other.namespace_labels)
    else:
        in_namespace = other.namespace == namespace
    return in_namespace and _selects(peer.get("podSelector", {}), other.labels)


def _matches_port(ports: list[dict] | None, port: int, protocol: str) -> bool:
    if not ports:
        return True
    return any(entry["port"] == port and entry.get("protocol", "TCP") == protocol for entry in ports)
