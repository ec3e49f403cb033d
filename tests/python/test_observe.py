"""The dashboards and alerts of deploy/observe: every expression parses, and asks for metrics and labels that kvik has."""

import importlib.util
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import promql_parser
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
OBSERVE = ROOT / "deploy" / "observe"
# What Prometheus adds, and the bounds of histograms.
LABELS_OF_PROMETHEUS = {"instance", "job", "le", "quantile"}
METRICS_OF_PROMETHEUS = {"up"}
NAME = re.compile(r'"((?:kvik|vllm)[a-z0-9_:]*)')
SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? \S+$")
LABEL = re.compile(r'([a-zA-Z_]+)="')


def rules():
    groups = yaml.safe_load((OBSERVE / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboards():
    return {path.stem: json.loads(path.read_text()) for path in sorted((OBSERVE / "grafana").glob("*.json"))}


def expressions():
    """All expressions, each with its place."""
    found = [(f"rules.yml: {rule['alert']}", rule["expr"]) for rule in rules()]
    for name, dashboard in dashboards().items():
        for panel in dashboard["panels"]:
            found += [(f"{name}: {panel['title']}", target["expr"]) for target in panel.get("targets", [])]
    return found


def selectors(expression):
    """The vector selectors in a parsed expression, and the labels that it groups by."""
    kind = type(expression).__name__
    if kind == "VectorSelector":
        yield expression, set()
    elif kind == "MatrixSelector":
        yield expression.vector_selector, set()
    elif kind == "AggregateExpr":
        labels = set(expression.modifier.labels) if expression.modifier is not None else set()
        for selector, inner in selectors(expression.expr):
            yield selector, inner | labels
    elif kind == "BinaryExpr":
        yield from selectors(expression.lhs)
        yield from selectors(expression.rhs)
    elif kind == "Call":
        for argument in expression.args:
            yield from selectors(argument)
    elif kind in ("ParenExpr", "UnaryExpr", "SubqueryExpr"):
        yield from selectors(expression.expr)
    else:
        assert kind in ("NumberLiteral", "StringLiteral"), kind


def base(name):
    """The name of a histogram without the ending of its parts."""
    return re.sub(r"_(bucket|sum|count)$", "", name)


def complete(gateway):
    """Completes a prompt, as soon as the gateway knows a worker: until then it answers 503."""
    body = json.dumps({"model": "kvik-tiny", "prompt": "Once", "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{gateway}/v1/completions", body, {"content-type": "application/json"})
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            if error.code != 503 or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@pytest.fixture(scope="module")
def live(gateway):
    """The metrics of a running service and the labels of each."""
    complete(gateway)
    with urllib.request.urlopen(f"{gateway}/ui/events", timeout=60) as response:
        fleet = json.loads(response.readline().removeprefix(b"data: "))
        while not fleet["fleet"]["workers"]:
            response.readline()
            fleet = json.loads(response.readline().removeprefix(b"data: "))
    found = {}
    for address in [gateway, *(worker["address"] for worker in fleet["fleet"]["workers"])]:
        with urllib.request.urlopen(f"{address}/metrics", timeout=60) as response:
            for line in response.read().decode().splitlines():
                if match := SAMPLE.match(line):
                    found.setdefault(base(match[1]), set()).update(LABEL.findall(match[2] or ""))
    return found


@pytest.fixture(scope="module")
def written():
    """The names of metrics in the sources."""
    return {name for path in (ROOT / "crates").glob("*/src/**/*.rs") for name in NAME.findall(path.read_text())}


def test_every_expression_asks_for_metrics_and_labels_that_there_are(live, written):
    assert len(expressions()) > 60
    for place, text in expressions():
        parsed = promql_parser.parse(text.replace("$__rate_interval", "5m"))
        found = list(selectors(parsed))
        assert found, place
        for selector, grouped in found:
            name = base(selector.name)
            if name in METRICS_OF_PROMETHEUS:
                continue
            assert name in live or name in written, f"{place}: there is no metric {name}"
            labels = {matcher.name for matcher in selector.matchers.matchers} | grouped
            # A counter whose first label value has not come yet shows no labels.
            if live.get(name):
                unknown = labels - live[name] - LABELS_OF_PROMETHEUS
                assert not unknown, f"{place}: {name} has no label {unknown}"


def test_every_alert_has_a_line_in_the_runbook():
    headings = {match.lower() for match in re.findall(r"^#### (\w+)$", (ROOT / "docs" / "operations.md").read_text(), re.M)}
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) and headings == {name.lower() for name in names}
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["runbook_url"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert rule["annotations"]["summary"]


def test_dashboards_are_those_that_their_script_writes():
    spec = importlib.util.spec_from_file_location("make_dashboards", OBSERVE / "make_dashboards.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert set(dashboards()) == set(script.DASHBOARDS) == {"service", "kv-cache", "memory", "index"}
    for name, dashboard in dashboards().items():
        assert dashboard == json.loads(script.text(name)), f"{name}.json: run deploy/observe/make_dashboards.py"
        numbers = [panel["id"] for panel in dashboard["panels"]]
        assert len(numbers) == len(set(numbers))


def test_the_files_of_the_example_name_each_other():
    compose = yaml.safe_load((OBSERVE / "compose.yaml").read_text())
    for service in compose["services"].values():
        for volume in service["volumes"]:
            assert (OBSERVE / volume.split(":")[0]).exists(), volume
    scraped = yaml.safe_load((OBSERVE / "prometheus.yml").read_text())
    assert scraped["rule_files"] == ["rules.yml"]
    # The alert of a store daemon that is gone goes by the name of its job.
    assert "kvik-store" in {job["job_name"] for job in scraped["scrape_configs"]}


def test_the_alerts_fire_as_their_tests_say():
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool on the path; on Debian it is in the package prometheus")
    for command in (["check", "rules", "rules.yml"], ["test", "rules", "rules_test.yml"], ["check", "config", "prometheus.yml"]):
        done = subprocess.run([promtool, *command], cwd=OBSERVE, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
