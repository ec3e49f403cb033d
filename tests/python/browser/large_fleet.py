"""A stand-in for a gateway: the page's own files, and the answers of a fleet of 200 workers to a prompt of 10 000 blocks."""

import json
import math
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

N_WORKERS = 200
N_BLOCKS = 10_000
BLOCK_TOKENS = 16
FILES = Path(__file__).resolve().parents[3] / "crates" / "kvik-gateway" / "ui"
KINDS = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def counts(number, tick):
    """What a worker has done: something else each second."""
    tokens = 1000.0 * tick * (1 + number % 7)
    return {
        "prompt_tokens": tokens,
        "cached_tokens": {"engine": tokens * 0.5, "ram": tokens * 0.2, "nvme": tokens * 0.1},
        "computed_tokens": tokens * 0.2,
        "generated_tokens": tokens * 0.1,
        "ended_outputs": float(tick),
        "preemptions": 0.0,
        "read_bytes": {"nvme": 1e6 * tick},
        "written_bytes": {"ram": 2e6 * tick, "nvme": 1e6 * tick},
        "evicted_chunks": {"ram": 3.0 * tick},
        "evicted_blocks": 5.0 * tick,
        "moved_out": float(tick // 10),
        "moved_in": float(tick // 10),
    }


def worker(number, tick):
    usage = 0.5 + 0.5 * math.sin(number + tick / 5)
    totals = counts(number, tick)
    tier = {"is_up": True, "chunks": 900.0, "used_bytes": usage * 1e9, "capacity_bytes": 1e9}
    return {
        "id": f"worker-{number}",
        "kind": "worker",
        "address": f"http://10.0.{number // 250}.{number % 250}:8082",
        "models": ["large"],
        "role": ["both", "prefill", "decode"][number % 3],
        "state": "draining" if number % 37 == 36 else "ready",
        "weight": 1.0,
        "outstanding_tokens": 100 * number,
        "prefill_tokens_per_s": 5000.0,
        "index_blocks": 10_000,
        "is_unsure": False,
        "gauges": {"running": float(number % 9), "waiting": float(number % 3), "kv_usage": usage, "kv_blocks": 8192.0, "kv_blocks_limit": 8192.0, "kv_blocks_cached": usage * 8192.0, "tiers": {"ram": tier, "nvme": tier}},
        "rates": counts(number, 1),
        "totals": totals,
    }


def point(time_s):
    return {
        "time_s": time_s, "seconds": 10.0, "ok_requests": 4000.0, "failed_requests": 3.0, "first_tokens": 4000.0, "ttft_p50_s": 0.12,
        "ttft_p95_s": 0.4, "queue_length": 2.0, "running": 700.0, "waiting": 20.0, "workers": N_WORKERS, **counts(1, 1),
    }


def event(tick, points):
    gateway = {
        "requests_per_s": 400.0, "failed_per_s": 0.0, "outstanding_requests": 700.0, "queue_length": 2.0, "ttft_p50_s": 0.12, "ttft_p95_s": 0.4,
        "is_coordinator_connected": True, "has_index": True, "decisions": {"holder": 5.0},
    }
    workers = [worker(number, tick) for number in range(N_WORKERS)]
    fleet = {"time_ms": int(time.time() * 1000), "version": "0", "gateway": gateway, "workers": workers}
    return f"data: {json.dumps({'fleet': fleet, 'points': points})}\n\n".encode()


def holders():
    n_tokens = N_BLOCKS * BLOCK_TOKENS
    workers = {}
    for number in range(N_WORKERS):
        # Every worker has three runs, of another length each.
        end = (number + 1) * n_tokens // N_WORKERS // (3 * BLOCK_TOKENS) * BLOCK_TOKENS
        runs = [(0, end, "gpu"), (end, end, "cpu"), (2 * end, end, "disk")]
        workers[f"worker-{number}"] = [{"first_token": first, "tokens": tokens, "tier": tier} for first, tokens, tier in runs if tokens]
    return {"model": "large", "block_tokens": BLOCK_TOKENS, "is_complete": True, "token_ids": [7] * n_tokens, "workers": workers}


def candidates():
    return [
        {"worker": f"worker-{number}", "role": "both", "pd": None, "may_answer": True, "is_usable": True, "cached_tokens": 0, "outstanding_tokens": number, "weight": 1.0, "cost": float(number)}
        for number in range(N_WORKERS)
    ]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, kind, body):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        name = self.path.removeprefix("/ui/") or "index.html"
        if name == "events":
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            now = int(time.time())
            points = [point(now - 10 * ago) for ago in range(360, 0, -1)]
            try:
                for tick in range(1, 600):
                    self.wfile.write(event(tick, points))
                    self.wfile.flush()
                    points = []
                    if self.server.ended.wait(1.0):
                        return
            except OSError:
                return
        path = FILES / Path(name).name
        if path.is_file():
            self.answer(KINDS[path.suffix], path.read_bytes())
        else:
            self.send_error(404)

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        answers = {
            "/index/prompt": holders,
            "/route/explain": lambda: {"model": "large", "prompt_tokens": 1, "is_exact": True, "output_tokens": 1, "candidates": candidates(), "worker": "worker-199", "reason": "holder", "disaggregation": None},
            "/v1/score": lambda: {"model": "large", "scorer": "longest_prefix", "prompt_tokens": 1, "scores": {}, "matched_tokens": {}, "matched_by_tier": {}, "best": None},
            "/detokenize": lambda: {"prompt": "some text of a block"},
        }
        self.answer("application/json", json.dumps(answers[self.path]()).encode())


@contextmanager
def large_fleet():
    """Serves it and gives its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.ended = threading.Event()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.ended.set()
        server.shutdown()
        thread.join()
        server.server_close()
