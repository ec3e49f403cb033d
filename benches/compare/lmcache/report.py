"""The figures of both sides, as JSON for programs and as a table for people."""

import os
import pathlib
import statistics
import sys
from dataclasses import dataclass

BOLD, GREEN, RED, DIM, PLAIN = "\x1b[1m", "\x1b[32m", "\x1b[31m", "\x1b[2m", "\x1b[0m"

NOTES = [
    "store: from paged memory, blocks in random order, until the store says that it has the chunks",
    "store: kvik sums up and checks every chunk before it can be found; LMCache has no checksums, and where its server "
    "copies, it answers before the chunks can be found",
    "retrieve: without the lookup before it, into other blocks than were stored; what is read is compared afterwards",
    "copied: in kvik's place a plain copy of the same blocks by as many threads, which bounds what a store can do here",
    "lookup: from the tokens to the number of chunks, hashing included",
    "LMCache: its best of all ways that were measured stands in each row; malloc keeps freed memory, which helps it",
]


@dataclass(frozen=True)
class Figure:
    """A measurement of one side."""

    value: float
    lowest: float
    highest: float
    n_repeats: int

    @classmethod
    def of_samples(cls, samples: list[float]) -> "Figure":
        return cls(statistics.median(samples), min(samples), max(samples), len(samples))

    def to_json(self) -> dict:
        return {
            "value": round(self.value, 3),
            "lowest": round(self.lowest, 3),
            "highest": round(self.highest, 3),
            "repeats": self.n_repeats,
        }


@dataclass(frozen=True)
class Row:
    """One figure of both sides; LMCache's for each way that it was measured."""

    name: str
    unit: str
    is_more_better: bool
    kvik: Figure
    lmcache: dict[str, Figure]

    def baseline(self) -> tuple[str, Figure]:
        """The better of LMCache's figures."""
        choose = max if self.is_more_better else min
        return choose(self.lmcache.items(), key=lambda item: item[1].value)

    def ratio(self) -> float:
        """How many times better kvik is."""
        ours, theirs = self.kvik.value, self.baseline()[1].value
        return ours / theirs if self.is_more_better else theirs / ours

    def to_json(self) -> dict:
        name, figure = self.baseline()
        return {
            "name": self.name,
            "unit": self.unit,
            **self.kvik.to_json(),
            "baseline": {"name": f"lmcache {name}", **figure.to_json()},
            "ratio": round(self.ratio(), 3),
            "all_baselines": {name: figure.to_json() for name, figure in self.lmcache.items()},
        }


def load_average() -> float:
    return round(os.getloadavg()[0], 2)


def machine(load_average_begin: float) -> dict:
    text = pathlib.Path("/proc/cpuinfo").read_text()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0] if names else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "kernel": os.uname().release,
        "load_average_begin": load_average_begin,
        "load_average_end": load_average(),
    }


def to_json(rows: list[Row], machine: dict, settings: dict) -> dict:
    results = [row.to_json() for row in rows]
    return {"bench": "lmcache", "machine": machine, "settings": settings, "results": results, "notes": NOTES}


def print_table(rows: list[Row], machine: dict, settings: dict) -> None:
    is_colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    def colored(color: str, text: str) -> str:
        return f"{color}{text}{PLAIN}" if is_colored else text

    print(colored(BOLD, "kvik's store daemon beside LMCache's server"))
    load = f"load average {machine['load_average_begin']} at the begin, {machine['load_average_end']} at the end"
    print(colored(DIM, f"{machine['cpu']}, {machine['cores']} cores, {load}"))
    print(colored(DIM, ", ".join(f"{name} {value}" for name, value in settings.items())))
    print()
    heads = " ".join(f"{side:>10} {'spread':>17}" for side in ("kvik", "LMCache"))
    print(colored(BOLD, f"{'':<26} {'unit':<5} {heads} {'ratio':>7}  by"))
    for row in rows:
        name, theirs = row.baseline()
        ratio = colored(GREEN if row.ratio() >= 1 else RED, f"{row.ratio():>7.2f}")
        print(f"{row.name:<26} {row.unit:<5} {cells(row.kvik)} {cells(theirs)} {ratio}  {name}")
    print()
    for note in NOTES:
        print(colored(DIM, f"- {note}"))


def cells(figure: Figure) -> str:
    spread = f"{shown(figure.lowest)} - {shown(figure.highest)}"
    return f"{shown(figure.value):>10} {spread:>17}"


def shown(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
