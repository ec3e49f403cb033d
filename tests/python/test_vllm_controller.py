"""A controller whose file is one of kvcached's, with a vLLM server that is started, put to sleep, woken and adopted.

KVIK_ENGINES names a virtual environment made by `engines/install`.
"""

import contextlib
import http.client
import json
import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Iterator

import pytest
from conftest import binary
from engine_processes import ENGINES, MODEL_FOLDER, PATIENCE_S, START_S, eventually, free_ports

pytestmark = pytest.mark.skipif(not ENGINES, reason="KVIK_ENGINES is not set")

ADDRESS = re.compile(r"controller is ready address=(\S+):(\d+)")
MODEL = "tiny-vllm"


def configuration(vllm_port: int, kvik_port: int) -> dict:
    """A file in the form of kvcached's controller: an engine of vLLM in its virtual environment, and a worker of kvik."""
    vllm_args = [
        f"--served-model-name={MODEL}",
        "--host=localhost",
        f"--port={vllm_port}",
        "--enforce-eager",
        "--max-model-len 1024 --max-num-seqs 4 --block-size 32 --num-gpu-blocks-override 40 --dtype bfloat16",
    ]
    vllm_env = [
        "HF_HUB_OFFLINE=1",
        "VLLM_CPU_KVCACHE_SPACE=1",
        "VLLM_NO_USAGE_STATS=1",
        "VLLM_LOGGING_LEVEL=WARNING",
    ]
    vllm = {"name": "vllm", "model": str(MODEL_FOLDER), "engine": "vllm", "using_venv": True, "venv_path": ENGINES}
    return {
        "router": {"enable_router": True, "router_port": 0, "router_host": "localhost"},
        "instances": [
            {**vllm, "engine_env": vllm_env, "engine_args": vllm_args},
            {"name": "kvik", "model": "tiny-kvik", "engine": "kvik", "engine_args": f"--port={kvik_port} --threads 1"},
        ],
    }


class Controller:
    """`kvik engines up` with a file and a state folder."""

    def __init__(self, folder: pathlib.Path, name: str) -> None:
        self.state = folder / "state"
        self.log = folder / f"{name}.log"
        command = [binary(), "engines", "up", "--config", str(folder / "engines.yaml"), "--state", str(self.state)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log)
        eventually(self.find_address, self.log.read_text)

    def find_address(self) -> bool:
        found = ADDRESS.search(self.log.read_text())
        if found:
            self.address = found.group(1), int(found.group(2))
        return found is not None

    def ask(self, *arguments: str) -> str:
        command = [binary(), "engines", *arguments, "--state", str(self.state)]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=START_S).stdout

    def engine(self, name: str) -> dict:
        engines = json.loads(self.ask("status", "--json"))["engines"]
        return next(engine for engine in engines if engine["name"] == name)

    def complete(self, model: str) -> str:
        connection = http.client.HTTPConnection(*self.address, timeout=START_S)
        body = {"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        assert response.status == 200, answer
        return json.loads(answer)["choices"][0]["text"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 0, self.log.read_text()


@contextlib.contextmanager
def cleaned_up(state: pathlib.Path) -> Iterator[None]:
    """Ends what a test that fails has left."""
    try:
        yield
    finally:
        for pid in marked(state):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def marked(state: pathlib.Path) -> list[int]:
    """The processes that a controller with this state folder has started, and theirs."""
    mark = f"KVIK_ENGINE_OF={state.resolve()} ".encode()
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(entry.startswith(mark) for entry in (process / "environ").read_bytes().split(b"\0")):
                found.append(int(process.name))
    return found


def test_a_vllm_server_sleeps_wakes_and_outlives_its_controller(tmp_path: pathlib.Path) -> None:
    (tmp_path / "engines.yaml").write_text(json.dumps(configuration(*free_ports(2))))
    with cleaned_up(tmp_path / "state"):
        controller = Controller(tmp_path, "first")
        expected = controller.complete(MODEL)
        assert controller.complete("tiny-kvik")
        pid = controller.engine("vllm")["pid"]
        controller.kill()

        controller = Controller(tmp_path, "second")
        assert controller.complete(MODEL) == expected
        assert controller.engine("vllm")["pid"] == pid

        controller.ask("sleep", MODEL)
        assert controller.engine("vllm")["state"] == "asleep"
        # The engine is several processes: none of them is left.
        eventually(lambda: len(marked(controller.state)) == 1, lambda: marked(controller.state))
        assert controller.complete(MODEL) == expected
        engine = controller.engine("vllm")
        assert (engine["state"], engine["failed_requests"]) == ("ready", 0)

        controller.stop()
        eventually(lambda: not marked(controller.state), lambda: marked(controller.state))
