"""`vllm serve` as a process."""

import contextlib
import http.client
import json
import os
import pathlib
import signal
import subprocess
from collections.abc import Iterator

from engine_processes import ENGINES, MODEL, MODEL_FOLDER, PATIENCE_S, START_S, Ports, eventually

# The folder of the package `kvik`.
PACKAGE = os.environ.get("KVIK_PACKAGE", "target/python-package")


class Server:
    """`vllm serve` with the bundled model, whose worker is called `name`; with a socket, KvikConnector keeps its KV in the
    store daemon that listens there; with the port of a side channel, NixlConnector moves its KV to and from other servers, and
    it computes on one core, so that two of them have a core each."""

    def __init__(
        self,
        ports: Ports,
        http_port: int,
        name: str = "vllm-0",
        socket: pathlib.Path | None = None,
        nixl_port: int | None = None,
        core: int = 0,
    ) -> None:
        self.url = f"http://127.0.0.1:{http_port}"
        self.port = http_port
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{ports.live}",
            "replay_endpoint": f"tcp://*:{ports.replay}",
            "topic": f"kv@{name}@{MODEL}",
        }
        flags = {
            "served-model-name": MODEL,
            "host": "127.0.0.1",
            "port": http_port,
            "max-model-len": 1024,
            "max-num-seqs": 4,
            # The smallest that vLLM has on a CPU.
            "block-size": 32,
            "num-gpu-blocks-override": 40,
            "dtype": "bfloat16",
            "kv-events-config": json.dumps(events),
        }
        if socket is not None:
            flags["kv-transfer-config"] = json.dumps(
                {
                    "kv_connector": "KvikConnector",
                    "kv_connector_module_path": "kvik.vllm",
                    "kv_role": "kv_both",
                    "kv_load_failure_policy": "recompute",
                    "kv_connector_extra_config": {"socket": str(socket)},
                }
            )
        if nixl_port is not None:
            flags["kv-transfer-config"] = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
        command = [f"{ENGINES}/bin/vllm", "serve", str(MODEL_FOLDER), "--enforce-eager", "--enable-prefix-caching"]
        command += ["--enable-prompt-tokens-details"]
        command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
        environment = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            # For the call that resets the cache.
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONPATH": os.path.abspath(PACKAGE),
        }
        if nixl_port is not None:
            environment |= {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(nixl_port),
                "VLLM_CPU_OMP_THREADS_BIND": str(core),
                "OMP_NUM_THREADS": "1",
                # No other transport is there on a machine without a fast network.
                "UCX_TLS": "tcp",
            }
        # A group of its own: the engine is several processes.
        self.process = subprocess.Popen(command, env={**os.environ, **environment}, start_new_session=True)
        eventually(self.is_ready, lambda: "vLLM did not start", START_S)

    def is_ready(self) -> bool:
        assert self.process.poll() is None, "vLLM ended"
        try:
            return self.call("GET", "/health")[0] == 200
        except OSError:
            return False

    def call(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.status, response.read()
        connection.close()
        return answer

    def complete(self, **body: object) -> dict:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        body = {"model": MODEL, "temperature": 0, "max_tokens": 1, **body}
        status, answer = self.call("POST", path, body)
        assert status == 200, answer
        answer = json.loads(answer)
        usage = answer["usage"]
        n_cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {"n_tokens": usage["prompt_tokens"], "n_cached": n_cached, "choices": answer["choices"]}

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def serving(ports: Ports, http_port: int, **options: object) -> Iterator[Server]:
    server = Server(ports, http_port, **options)
    try:
        yield server
    finally:
        server.kill()
