"""The controller of engines, run by the packaged file, with the commands of its unit and of an upgrade."""

import json
import os
import pathlib
import re
import signal
import subprocess

import pytest
from conftest import binary
from fleet import PATIENCE_S, free_port
from manifests import ROOT, output_of

UNIT = (ROOT / "deploy/systemd/kvik-engines.service").read_text()


class Machine:
    """A folder in the place of the root of a machine; ports are free ones of this machine."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.state = folder / "run/kvik/engines"
        self.controllers: list[subprocess.Popen] = []
        # Systemd makes them with these rights.
        for path in (self.state, folder / "var/log/kvik/engines"):
            path.mkdir(parents=True, mode=0o700)
        text = (ROOT / "deploy/systemd/engines.yaml").read_text().replace("/var/log", f"{folder}/var/log")
        for port in ("8090", "8101"):
            assert port in text
            text = text.replace(port, str(free_port()))
        (folder / "etc/kvik").mkdir(parents=True)
        (folder / "etc/kvik/engines.yaml").write_text(text)

    def command(self, setting: str) -> list[str]:
        """The command line of a setting of the unit, with the folders of this machine."""
        (line,) = re.findall(rf"^{setting}=/usr/bin/kvik (.*)$", UNIT, re.MULTILINE)
        words = [f"{self.folder}{word}" if word.startswith("/") else word for word in line.split()]
        return [binary(), *words]

    def start(self) -> subprocess.Popen:
        """Starts the controller, and waits until its gateway is known."""
        environment = {"PATH": os.environ["PATH"]}
        controller = subprocess.Popen(self.command("ExecStart"), stdout=subprocess.PIPE, text=True, env=environment)
        self.controllers.append(controller)
        lines = iter(controller.stdout.readline, "")
        assert any("kvik engines status" in line for line in lines), "the controller has ended"
        return controller

    def kvik(self, *words: str) -> str:
        return output_of(binary(), "engines", *words, "--state", str(self.state))

    def pid(self) -> int:
        """The process of the only engine, once it is ready."""
        self.kvik("wake", "kvik-tiny")
        (engine,) = json.loads(self.kvik("status", "--json"))["engines"]
        assert engine["state"] == "ready", engine
        return engine["pid"]


@pytest.fixture
def machine(tmp_path):
    machine = Machine(tmp_path)
    try:
        yield machine
    finally:
        if any(controller.poll() is None for controller in machine.controllers):
            subprocess.run([binary(), "engines", "stop", "--state", str(machine.state)], check=False)
        for controller in machine.controllers:
            controller.kill()
            controller.wait()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended stays in the table until its parent reads its status."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def test_engines_outlive_a_killed_controller_and_an_upgrade_and_end_with_the_service(machine: Machine):
    controller = machine.start()
    engine = machine.pid()
    # As `Restart=on-failure` does after a crash.
    controller.kill()
    controller.wait()
    assert is_alive(engine)
    controller = machine.start()
    assert machine.pid() == engine
    # As the package does at an upgrade.
    machine.kvik("stop", "--leave-running")
    assert controller.wait(PATIENCE_S) == 0
    controller = machine.start()
    assert machine.pid() == engine
    assert "nothing has changed" in output_of(*machine.command("ExecReload"))
    # As `KillMode=process` does: the controller alone gets the signal.
    controller.send_signal(signal.SIGTERM)
    assert controller.wait(PATIENCE_S) == 0
    assert not is_alive(engine)
    assert list((machine.folder / "var/log/kvik/engines").iterdir())


def test_a_file_that_cannot_be_used_fails_the_reload_and_a_start_is_not_repeated(machine: Machine):
    machine.start()
    engine = machine.pid()
    config = machine.folder / "etc/kvik/engines.yaml"
    config.write_text(config.read_text().replace("kind: kvik,", "kind: unknown,"))
    done = subprocess.run(machine.command("ExecReload"), capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "kind" in done.stderr
    assert is_alive(engine)
    machine.kvik("stop")
    again = subprocess.run(machine.command("ExecStart"), capture_output=True, text=True, check=False)
    (statuses,) = re.findall(r"^RestartPreventExitStatus=(.*)$", UNIT, re.MULTILINE)
    assert str(again.returncode) in statuses.split()
