"""What the manifests say is run: the real binary with their flags, variables and configuration, on this machine."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request

import pytest
import yaml
from conftest import binary
from manifests import (
    KUBERNETES,
    config_of,
    container_of,
    find,
    kustomized,
    of_kind,
    role_of,
)

PATIENCE_S = 60
TOKENS = {"cluster": "c" * 32, "admin": "a" * 32, "peer": "p" * 32}
KINDS = {"gateway": "Deployment", "coordinator": "StatefulSet", "worker": "StatefulSet", "store": "DaemonSet"}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Fleet:
    """Processes in the place of pods: the addresses of a cluster become ports of this machine, and nothing else changes."""

    def __init__(self, overlay: str, folder: pathlib.Path):
        self.manifests = kustomized(overlay)
        self.folder = folder
        self.addresses: dict[str, str] = {}
        self.processes: dict[str, subprocess.Popen] = {}
        (folder / "secrets").mkdir()
        for name, token in TOKENS.items():
            (folder / "secrets" / name).write_text(token + "\n")

    def start(self, role: str, pod: str) -> str:
        """Starts a pod of a role; gives the address of its port `http`."""
        container = container_of(find(self.manifests, KINDS[role], f"kvik-{role}"))
        ports = {port["containerPort"]: free_port() for port in container["ports"]}
        home = self.folder / pod
        home.mkdir()
        for number, port in ports.items():
            self.addresses[f"{pod}.kvik-{role}:{number}"] = f"127.0.0.1:{port}"
            self.addresses.setdefault(f"kvik-{role}:{number}", f"127.0.0.1:{port}")
        config = yaml.safe_dump({role: small(role, config_of(self.manifests, role))})
        for number, port in ports.items():
            config = config.replace(f"0.0.0.0:{number}", f"127.0.0.1:{port}")
        (home / "kvik.yaml").write_text(self.local(config, home))
        environment = {"PATH": os.environ["PATH"]}
        for variable in container["env"]:
            value = variable.get("value", pod)
            environment[variable["name"]] = self.local(value, home)
        args = [self.local(arg.replace("$(POD_NAME)", pod), home) for arg in container["args"]]
        with (home / "log").open("w") as log:
            self.processes[pod] = subprocess.Popen([binary(), *args], env=environment, stdout=log, stderr=log)
        http = next(port["containerPort"] for port in container["ports"] if port["name"] == "http")
        return f"http://127.0.0.1:{ports[http]}"

    def start_engine(self, name: str, address: str, model: str):
        """Starts a server of the OpenAI API that has no tokens, at what the manifests call `address`."""
        (self.folder / name).mkdir()
        self.addresses[address] = f"127.0.0.1:{free_port()}"
        command = [binary(), "worker", "--listen", self.addresses[address], "--set", f"served_model_name={model}"]
        with (self.folder / name / "log").open("w") as log:
            self.processes[name] = subprocess.Popen(command, env={"PATH": os.environ["PATH"]}, stdout=log, stderr=log)
        self.until_answers(name, f"http://{self.addresses[address]}/ready")

    def local(self, text: str, home: pathlib.Path) -> str:
        """The text with what a pod sees replaced by what this machine has."""
        for address in sorted(self.addresses, key=len, reverse=True):
            text = text.replace(address, self.addresses[address])
        return (
            text.replace("/etc/kvik", str(home))
            .replace("/run/secrets/kvik", str(self.folder / "secrets"))
            .replace("/run/kvik", str(home / "socket"))
        )

    def until_probed(self, role: str, pod: str, address: str):
        """Waits until the probes of the pod succeed."""
        container = container_of(find(self.manifests, KINDS[role], f"kvik-{role}"))
        for probe in ("livenessProbe", "readinessProbe"):
            self.until_answers(pod, address + container[probe]["httpGet"]["path"])

    def until_answers(self, name: str, url: str):
        """Waits until a process answers 200."""
        deadline = time.monotonic() + PATIENCE_S
        while status_of(url) != 200:
            log = (self.folder / name / "log").read_text()
            assert self.processes[name].poll() is None, f"{name} has ended: {log}"
            assert time.monotonic() < deadline, f"{name} {url} does not answer 200: {log}"
            time.sleep(0.05)

    def end(self):
        """Ends all as the kubelet does; each must drain and end well within the time it has."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for pod, process in self.processes.items():
            assert process.wait(30) == 0, f"{pod}: {(self.folder / pod / 'log').read_text()}"

    def kill(self):
        for process in self.processes.values():
            process.kill()
            process.wait()


def small(role: str, config: dict) -> dict:
    """The same settings with less memory."""
    if role == "worker":
        return {**config, "store": {**config["store"], "ram": "64MiB"}}
    if role == "store":
        return {**config, "tiers": {**config["tiers"], "ram": "64MiB"}}
    return config


def status_of(url: str) -> int | None:
    with contextlib.suppress(OSError):
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
    return None


def complete(gateway: str, model: str) -> str:
    """Has a prompt continued; gives the name of the worker that did it."""
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 4}).encode()
    request = urllib.request.Request(gateway + "/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 4
        return answer.headers["x-kvik-worker"]


def text_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()


@pytest.fixture
def fleet(request, tmp_path):
    fleet = Fleet(request.param, tmp_path)
    try:
        yield fleet
    finally:
        fleet.kill()


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
