"""Processes in the place of pods: the real binary with flags, variables and configuration of manifests."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable

import yaml
from conftest import binary
from grpc_health import SERVING, health_of
from manifests import container_of, find, kustomized, sections_of

PATIENCE_S = 60
TOKENS = {"cluster": "c" * 32, "admin": "a" * 32, "peer": "p" * 32}
KINDS = {
    "gateway": "Deployment",
    "coordinator": "StatefulSet",
    "worker": "StatefulSet",
    "store": "DaemonSet",
    "epp": "Deployment",
}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Fleet:
    """A fleet of one overlay: the addresses of a cluster become ports of this machine, and nothing else changes."""

    def __init__(self, overlay: str, folder: pathlib.Path):
        self.manifests = kustomized(overlay)
        self.folder = folder
        self.addresses: dict[str, str] = {}
        self.processes: dict[str, subprocess.Popen] = {}
        (folder / "secrets").mkdir()
        for name, token in TOKENS.items():
            (folder / "secrets" / name).write_text(token + "\n")

    def start(self, role: str, pod: str, **variables: str) -> str:
        """Starts a pod of a role, with further variables; gives the address of its port `http`."""
        container = container_of(find(self.manifests, KINDS[role], f"kvik-{role}"))
        ports = {port["containerPort"]: free_port() for port in container["ports"]}
        home = self.folder / pod
        home.mkdir()
        for number, port in ports.items():
            self.addresses[f"{pod}.kvik-{role}:{number}"] = f"127.0.0.1:{port}"
            self.addresses.setdefault(f"kvik-{role}:{number}", f"127.0.0.1:{port}")
        sections = sections_of(self.manifests, role)
        config = yaml.safe_dump({name: small(name, section) for name, section in sections.items()})
        for number, port in ports.items():
            config = config.replace(f"0.0.0.0:{number}", f"127.0.0.1:{port}")
        (home / "kvik.yaml").write_text(self.local(config, home))
        environment = {"PATH": os.environ["PATH"], **variables}
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
        for probe in (container["livenessProbe"], container["readinessProbe"]):
            if "grpc" in probe:
                self.until_serving(pod, f"{pod}.kvik-{role}:{probe['grpc']['port']}", probe["grpc"]["service"])
            else:
                self.until_answers(pod, address + probe["httpGet"]["path"])

    def until_answers(self, name: str, url: str):
        """Waits until a process answers 200."""
        self.until(name, f"{url} answers 200", lambda: status_of(url) == 200)

    def until_serving(self, name: str, address: str, service: str):
        """Waits until a process says over gRPC, at what the manifests call `address`, that a service of it serves."""
        local = self.addresses[address]
        self.until(name, f"{service} of {local} serves", lambda: health_of(local, service) == SERVING)

    def until(self, name: str, what: str, is_so: Callable[[], bool]):
        """Waits until something is so of a process that must not end."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            log = (self.folder / name / "log").read_text()
            assert self.processes[name].poll() is None, f"{name} has ended: {log}"
            assert time.monotonic() < deadline, f"{name}: not so after {PATIENCE_S} s: {what}: {log}"
            time.sleep(0.05)

    def end(self):
        """Ends all as the kubelet does; each must drain and end well within the time it has."""
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for pod, process in self.processes.items():
            assert process.wait(30) == 0, f"{pod}: {(self.folder / pod / 'log').read_text()}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Kills what still runs."""
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


def text_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.read().decode()
