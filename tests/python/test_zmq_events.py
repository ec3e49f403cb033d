"""Listens with libzmq as the other side, which is what vLLM and SGLang publish with.

The listener is the example `listen` of kvik-indexer: KVIK_LISTEN, else the one of the debug build.
"""

import contextlib
import json
import os
import pathlib
import queue
import subprocess
import threading
from collections.abc import Iterator

import pytest
import zmq

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "crates/kvik-proto/tests/fixtures/vllm-events"
TOPIC = b"kv@pod1@tiny"
END = b"\xff" * 8
PATIENCE_S = 30


def payload(place: int) -> bytes:
    """A payload of the capture, or one without events for what lies behind it."""
    if place < 6:
        return (FIXTURES / f"b32_sha256_{place:03}_frame2.bin").read_bytes()
    return b"\x92\xcb" + b"\0" * 8 + b"\x90"


class Engine:
    """Publishes and replays as vLLM does: a PUB and a ROUTER, one buffer, one thread for replays."""

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:*",
        replay: str = "tcp://127.0.0.1:*",
        buffer: list[tuple[int, bytes]] | None = None,
    ) -> None:
        # Complete before there is an address: a listener asks once for what it has missed.
        self.buffer = list(buffer or [])
        self.context = zmq.Context()
        # An XPUB is a PUB that tells of its subscribers.
        self.live = self.context.socket(zmq.XPUB)
        self.live.setsockopt(zmq.LINGER, 0)
        # As many unsent messages as vLLM has.
        self.live.setsockopt(zmq.SNDHWM, 100_000)
        self.live.bind(endpoint)
        self.endpoint = self.live.getsockopt_string(zmq.LAST_ENDPOINT)
        router = self.context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.bind(replay)
        self.replay_endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.starts: list[int] = []
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self.serve_replays, args=(router,))
        self.thread.start()

    def serve_replays(self, router: zmq.Socket) -> None:
        while not self.ending.is_set():
            if not router.poll(20):
                continue
            client, empty, start = router.recv_multipart()
            assert empty == b""
            self.starts.append(int.from_bytes(start, "big"))
            for sequence, batch in list(self.buffer):
                if sequence >= self.starts[-1]:
                    router.send_multipart((client, b"", TOPIC, sequence.to_bytes(8, "big"), batch))
            router.send_multipart((client, b"", b"", END, b""))
        router.close()

    def wait_for_subscriber(self) -> None:
        assert self.live.poll(PATIENCE_S * 1000), "there was no subscriber"
        assert self.live.recv() == b"\x01kv@"

    def keep(self, sequence: int, batch: bytes | None = None) -> bytes:
        """Puts a batch into the buffer only, as if the live message were lost."""
        batch = payload(sequence) if batch is None else batch
        self.buffer.append((sequence, batch))
        return batch

    def publish(self, sequence: int, batch: bytes | None = None, topic: bytes = TOPIC) -> None:
        batch = self.keep(sequence, batch)
        self.live.send_multipart((topic, sequence.to_bytes(8, "big"), batch))

    def close(self) -> None:
        if self.ending.is_set():
            return
        self.ending.set()
        self.thread.join()
        self.live.close()
        self.context.term()


class Listener:
    """What the example prints."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process
        self.lines: queue.Queue = queue.Queue()
        self.thread = threading.Thread(target=self.read)
        self.thread.start()

    def read(self) -> None:
        for line in self.process.stdout:
            self.lines.put(json.loads(line))

    def next(self) -> dict:
        return self.lines.get(timeout=PATIENCE_S)

    def until_applied(self, sequences: list[int]) -> list[dict]:
        """Waits until these numbers were applied; other lines are left out."""
        applied = []
        while len(applied) < len(sequences):
            line = self.next()
            if line.get("verdict") in ("Applied", "Restarted"):
                applied.append(line)
        assert [line["sequence"] for line in applied] == sequences
        return applied


@contextlib.contextmanager
def engine(**arguments: object) -> Iterator[Engine]:
    running = Engine(**arguments)
    try:
        yield running
    finally:
        running.close()


@contextlib.contextmanager
def listening(**config: object) -> Iterator[Listener]:
    """Runs the listener; it must end well."""
    command = os.environ.get("KVIK_LISTEN", str(ROOT / "target/debug/examples/listen"))
    limits = {"replay_cooldown_ms": 0, "reconnect_max_ms": 200, "replay_idle_ms": 500}
    process = subprocess.Popen(
        [command, json.dumps({"limits": limits, **config})], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    listener = Listener(process)
    try:
        yield listener
        process.stdin.close()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
        listener.thread.join()


def test_live_messages_are_heard_as_they_were_captured() -> None:
    with engine() as publisher, listening(endpoint=publisher.endpoint) as listener:
        publisher.wait_for_subscriber()
        for place in range(6):
            publisher.publish(place)
        heard = listener.until_applied(list(range(6)))
        assert all((line["worker"], line["model"], line["rank"]) == ("pod1", "tiny", 0) for line in heard)
        assert all(not line["replayed"] for line in heard)
        assert heard[0]["events"][0].startswith("Stored(")


def test_other_topics_are_not_even_sent() -> None:
    with engine() as publisher, listening(endpoint=publisher.endpoint) as listener:
        publisher.wait_for_subscriber()
        publisher.publish(0, topic=b"metrics@pod1")
        publisher.publish(0)
        listener.until_applied([0])
        listener.process.stdin.close()
        assert "messages: 1," in listener.next()["counters"]


def test_a_late_listener_and_a_gap_are_served_by_replay() -> None:
    with engine() as publisher:
        # Before the listener is there: it asks once for what it has missed.
        for place in range(3):
            publisher.keep(place)
        with listening(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint) as listener:
            publisher.wait_for_subscriber()
            listener.until_applied([0, 1, 2])
            publisher.publish(3)
            publisher.keep(4)
            publisher.keep(5)
            publisher.publish(6)
            publisher.publish(7)
            listener.until_applied([3, 4, 5, 6, 7])
        assert publisher.starts == [0, 4]


def test_a_replay_beyond_what_the_router_keeps_unsent_is_complete() -> None:
    # Batches of 16 KiB: far more than the sockets' buffers, so the router drops some and is asked again.
    batch = b"\x92\xcb" + b"\0" * 8 + b"\x91\x92\xa7Unknown\xc5\x40\x00" + b"\0" * (16 << 10)
    with engine() as publisher:
        for place in range(10_000):
            publisher.keep(place, batch)
        with listening(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint) as listener:
            listener.until_applied(list(range(10_000)))
        assert len(publisher.starts) > 1, "the router dropped nothing"


def test_an_idle_engine_answers_pings_and_is_kept() -> None:
    limits = {"heartbeat_ms": 50}
    with engine() as publisher, listening(endpoint=publisher.endpoint, limits=limits) as listener:
        publisher.wait_for_subscriber()
        # A listener that comes back subscribes again.
        assert not publisher.live.poll(1500)
        publisher.publish(0)
        listener.until_applied([0])


@pytest.mark.parametrize("is_new_life", [False, True])
def test_an_engine_that_comes_back_is_found_and_told_from_a_new_one(is_new_life: bool) -> None:
    with engine() as first:
        endpoints = {"endpoint": first.endpoint, "replay_endpoint": first.replay_endpoint}
        with listening(**endpoints) as listener:
            first.wait_for_subscriber()
            for place in range(3):
                first.publish(place)
            listener.until_applied([0, 1, 2])
            first.close()
            buffer = [*first.buffer, (3, payload(3))]
            if is_new_life:
                buffer = [(place, b"\x92\xcb\x41" + bytes([place] * 7) + b"\x90") for place in range(5)]
            with engine(endpoint=first.endpoint, replay=first.replay_endpoint, buffer=buffer) as second:
                second.wait_for_subscriber()
                listener.until_applied(list(range(5)) if is_new_life else [3])
                assert second.starts == ([2, 0] if is_new_life else [2])


def test_a_large_batch_and_a_unix_socket(tmp_path: pathlib.Path) -> None:
    with engine(endpoint=f"ipc://{tmp_path}/live", replay=f"ipc://{tmp_path}/replay") as publisher:
        with listening(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint) as listener:
            publisher.wait_for_subscriber()
            large = b"\x92\xcb" + b"\0" * 8 + b"\x91\x92\xa7Unknown\xc6\x00\x80\x00\x00" + b"\0" * (8 << 20)
            publisher.publish(0, large)
            publisher.publish(1)
            listener.until_applied([0, 1])
