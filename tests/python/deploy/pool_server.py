"""An API server of Kubernetes that has one InferencePool and its pods, and notes what it is asked for."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from manifests import NAMESPACE

VERSION = "10"


class PoolServer:
    """Lists what it has; a watch of it never says anything, and ends with the server."""

    def __init__(self, pool: dict, pods: list[dict]):
        api, _, _ = pool["apiVersion"].partition("/")
        # By path: group, resource and objects.
        self.collections = {
            f"/apis/{pool['apiVersion']}/namespaces/{NAMESPACE}/inferencepools": (api, "inferencepools", [pool]),
            f"/api/v1/namespaces/{NAMESPACE}/pods": ("", "pods", pods),
        }
        # Group, resource and verb, as the rules of a Role have them.
        self.asked: set[tuple[str, str, str]] = set()
        self.unknown: list[str] = []
        self.ending = threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever)

    def handler(self) -> type[BaseHTTPRequestHandler]:
        pools = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                url = urlsplit(self.path)
                query = parse_qs(url.query)
                if url.path not in pools.collections:
                    pools.unknown.append(self.path)
                    self.send_error(404)
                    return
                group, resource, items = pools.collections[url.path]
                is_watch = "watch" in query
                pools.asked.add((group, resource, "watch" if is_watch else "list"))
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.end_headers()
                if is_watch:
                    pools.ending.wait()
                    return
                chosen = [item for item in items if pools.is_selected(item, query)]
                self.wfile.write(json.dumps({"metadata": {"resourceVersion": VERSION}, "items": chosen}).encode())

            def log_message(self, *_):
                pass

        return Handler

    @staticmethod
    def is_selected(item: dict, query: dict[str, list[str]]) -> bool:
        metadata = item["metadata"]
        names = [f"metadata.name={metadata['name']}"]
        labels = {f"{name}={value}" for name, value in metadata.get("labels", {}).items()}
        return query.get("fieldSelector", names) == names and all(
            set(selector.split(",")) <= labels for selector in query.get("labelSelector", [])
        )

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ending.set()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def ready_pod(name: str, labels: dict[str, str], address: str) -> dict:
    """A pod that takes requests."""
    return {
        "metadata": {"name": name, "resourceVersion": "5", "labels": labels},
        "status": {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": "True"}]},
    }
