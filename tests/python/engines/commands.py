"""How a test speaks with an engine that it runs: one JSON object a line, each answered with one."""

import argparse
import json
import sys


def new_parser(topic: str) -> argparse.ArgumentParser:
    """The flags that all engines have."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--replay-endpoint")
    parser.add_argument("--topic", default=topic)
    parser.add_argument("--buffer-steps", type=int, default=10_000)
    return parser


def obey(engine) -> None:
    """Does what the lines say until there are no more; `op` is the name of a method of the engine."""
    print(json.dumps({"is_ready": True}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(engine, command.pop("op"))(**command)
        print(json.dumps({**answer, "n_batches": engine.n_batches}), flush=True)
