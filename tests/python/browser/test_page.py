"""The web page in a real browser, against the service as a user runs it.

`./check --browser` runs this; it needs Chromium.
"""

import json
import signal
import threading
from pathlib import Path

import axe_core_python
import pytest
from chromium import Chromium, wait_for
from conftest import binary
from large_fleet import N_BLOCKS, N_WORKERS, large_fleet
from service import ask, metrics, up, worker

VIEWS = ["fleet", "prompt", "playground", "series", "memory"]
AXE = (Path(axe_core_python.__file__).parent / "axe.min.js").read_text()
LIVE = "document.querySelector('#live').dataset.state === 'live'"
# A second of the page, a heartbeat that is missed three times, and a busy machine.
SEEN_WITHIN_S = 2.0
MEASURED_S = 5
# The token blocks of a prompt that workers hold: numbers, about two tokens each.
PROMPT = " ".join(str(number) for number in range(1, 401))


@pytest.fixture(scope="session")
def browser():
    with Chromium() as chromium:
        yield chromium


@pytest.fixture(scope="session")
def service(tmp_path_factory):
    """Three workers that share memory."""
    config = tmp_path_factory.mktemp("page") / "kvik.yaml"
    ledger = tmp_path_factory.mktemp("ledger")
    config.write_text(
        f"worker:\n  memory:\n    enabled: true\n    ipc_name: page-test\n    device_bytes: 1073741824\n    dir: {ledger}\n"
    )
    with up(binary(), "--workers", "3", "--config", str(config)) as addresses:
        yield addresses


@pytest.fixture
def page(browser, service):
    opened = browser.open(f"{service[0]}/ui/#fleet")
    opened.until("the stream lives", LIVE)
    yield opened
    assert opened.complaints == []
    opened.call("Page.close")


def show(page, view):
    page.evaluate(f"location.hash = '#{view}'")
    page.until(f"{view} is shown", f"document.querySelector('.tabs a[aria-current]')?.hash === '#{view}'")


def text(page, selector):
    return page.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''").replace("\u202f", "")


def press_button(page, name, within="document"):
    """Clicks the button with this text."""
    script = f"[...{within}.querySelectorAll('button')].find((button) => button.textContent === {json.dumps(name)} && !button.hidden && !button.disabled)"
    page.until(f"there is a button {name}", f"!!{script}")
    page.evaluate(f"{script}.click()")


def durations(page):
    """Seconds that the page's own work has taken: scripts, styles and layout."""
    found = {metric["name"]: metric["value"] for metric in page.call("Performance.getMetrics")["metrics"]}
    return found["ScriptDuration"] + found["RecalcStyleDuration"] + found["LayoutDuration"]


def complete(gateway, prompt, **fields):
    """Has a prompt completed, and gives its usage and its worker."""
    answer, headers = ask(gateway, "/v1/completions", {"model": "kvik-tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0, **fields})
    return answer, headers["x-kvik-worker"]


def inspect(page, prompt):
    show(page, "prompt")
    page.until("the model is known", "document.querySelector('.inspector select').options.length > 0")
    page.type(".inspector textarea", "")
    page.type(".inspector textarea", prompt)
    page.until("the prompt is looked up", "!!document.querySelector('.inspector .verdict').textContent")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1360, 390])
def test_every_view_fits_its_window_and_breaks_no_rule_of_accessibility(browser, service, scheme, width):
    page = browser.open(f"{service[0]}/ui/#fleet", width=width, height=900, scheme=scheme)
    page.until("the stream lives", LIVE)
    complete(service[0], PROMPT)
    # Its policy lets the page run no script but its own; the debugger is not the page.
    page.evaluate(AXE)
    for view in VIEWS:
        show(page, view)
        if view == "fleet":
            page.until("the workers are shown", "document.querySelectorAll('.card').length === 3")
        elif view == "prompt":
            inspect(page, PROMPT)
        elif view == "memory":
            page.until("the group is shown", "!!document.querySelector('.memory .card')")
        elif view == "series":
            page.until("the charts are drawn", "document.querySelectorAll('.plot line').length > 0")
        overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, f"{view} is {overflow} pixels too wide"
        found = page.evaluate("axe.run(document).then((result) => result.violations.map((each) => `${each.id}: ${each.nodes.map((node) => node.target).join(' | ')}`))")
        assert found == [], view
    assert page.complaints == []
    page.call("Page.close")


def test_the_keyboard_reaches_the_views_and_what_they_offer(page):
    seen = []
    for _ in range(14):
        page.press("Tab")
        seen.append(page.evaluate("document.activeElement.textContent"))
    assert [name for name in seen if name in ("Fleet", "Prompt", "Playground", "Last hour", "Memory")] == ["Fleet", "Prompt", "Playground", "Last hour", "Memory"]
    assert "worker-1" in seen
    page.evaluate("document.querySelector('.card .name').focus()")
    page.press("Enter")
    page.until("the panel is open", "!!document.querySelector('dialog.panel[open]')")
    page.press("Escape")
    page.until("the panel is closed", "!document.querySelector('dialog')")


def test_figures_are_those_of_the_metrics(page, service):
    complete(service[0], PROMPT + " figures")
    _, name = complete(service[0], PROMPT + " figures")
    # The page's own state, as it was sent.
    script = f"import('./live.js').then(({{ state }}) => state.fleet.workers.find((worker) => worker.id === {json.dumps(name)}))"
    # Nothing runs any more: figures that were once the same stay so.
    told = lambda name_of: metrics(ask(service[0], "/metrics")[0], name_of, engine=name)
    wait_for("the page has the last prompt", lambda: page.evaluate(script)["totals"]["prompt_tokens"] == told("vllm:prompt_tokens_total"))
    wait_for("the page has the last token", lambda: page.evaluate(script)["totals"]["generated_tokens"] == told("vllm:generation_tokens_total"))
    totals = page.evaluate(script)["totals"]
    assert totals["computed_tokens"] == told("kvik_worker_computed_tokens_total")
    assert sum(totals["cached_tokens"].values()) == told("kvik_worker_cached_tokens_total")
    assert totals["cached_tokens"]["engine"] > 0


def test_a_killed_worker_is_seen_within_two_seconds(page, service):
    with worker(binary(), service[1], "mortal") as process:
        state = "document.querySelector('.card[data-worker=mortal]')?.dataset.state"
        page.until("the worker is shown", f"{state} === 'ready'")
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen, seconds = page.until("its death is shown", f"{state} !== 'ready' && {state}")
        assert seen in ("silent", "down", "gone")
        assert seconds < SEEN_WITHIN_S, f"{seconds:.2f} s"
        page.until("it is told", "[...document.querySelectorAll('.feed li')].some((line) => line.textContent.includes('mortal'))")


def test_the_inspector_says_where_a_prompt_is_and_where_it_would_go(page, service):
    prompt = PROMPT + " inspected"
    complete(service[0], prompt)
    answer, holder = complete(service[0], prompt)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    inspect(page, prompt)
    page.until("the holder is chosen", f"document.querySelector('.inspector .verdict').textContent.startsWith('{holder} would answer')")
    row = text(page, f".inspector tr[data-worker={holder}]")
    assert "chosen" in row and f"engine {cached}" in row, row
    # Blocks are whole; an engine computes the last token of a prompt in any case.
    assert f"It has {cached} of {answer['usage']['prompt_tokens']} tokens" in text(page, ".inspector .verdict")
    page.evaluate("document.querySelector('canvas.map').focus()")
    page.press("ArrowRight")
    page.until("the block's text is shown", "document.querySelector('.detail').textContent.includes('\\u201c')")
    detail = text(page, ".detail")
    assert detail.startswith("Block 0, tokens 0 to 15") and f"{holder} (engine)" in detail


def test_prefixes_are_pinned_and_cleared_after_a_question(page, service):
    # Nothing else begins like this: chunks that others hang on are not cleared.
    prompt = " ".join(str(number) for number in range(7001, 7301))
    _, holder = complete(service[0], prompt)
    wait_for("it is stored", lambda: ask(service[0], f"/ui/workers/{holder}/cache/lookup", {"prompt": prompt})[0]["cached_tokens"] > 0)
    inspect(page, prompt)
    page.until("the holder is chosen", f"document.querySelector('.inspector .verdict').textContent.startsWith('{holder} would')")
    press_button(page, "Pin it")
    page.until("it asks", "!!document.querySelector('dialog[open]')")
    press_button(page, "Cancel", "document.querySelector('dialog')")
    page.until("it is closed", "!document.querySelector('dialog')")
    assert "pinned" not in text(page, "#toasts")
    press_button(page, "Pin it")
    press_button(page, "Pin", "document.querySelector('dialog')")
    page.until("it is pinned", "document.querySelector('#toasts').textContent.includes('tokens pinned')")
    press_button(page, "Unpin it")
    press_button(page, "Unpin", "document.querySelector('dialog')")
    page.until("it is unpinned", "document.querySelector('#toasts').textContent.includes('tokens unpinned')")
    press_button(page, "Clear it")
    press_button(page, "Clear", "document.querySelector('dialog')")
    page.until("it is cleared", "document.querySelector('#toasts').textContent.includes('forgotten')")
    assert ask(service[0], f"/ui/workers/{holder}/cache/lookup", {"prompt": prompt})[0]["cached_tokens"] == 0


def test_the_playground_compares_with_a_cold_run(page):
    show(page, "playground")
    page.until("the model is known", "document.querySelector('.playground select').options.length > 0")
    press_button(page, "A long sample")
    for _ in range(2):
        page.evaluate("document.querySelector('.playground form').requestSubmit()")
        page.until("both runs ended", "!document.querySelector('.playground button[type=submit]').disabled", 120)
    panes = page.evaluate("[...document.querySelectorAll('.pane')].map((pane) => ({ words: pane.querySelector('.legend').textContent, text: pane.querySelector('.turn.reply').textContent }))")
    warm, cold = panes
    assert "from engine" in warm["words"] and "from" not in cold["words"], panes
    assert "100" in cold["words"].replace("\u202f", "")
    # The same tokens, from the cache and without it.
    assert warm["text"] == cold["text"] and warm["text"]
    assert "with the cache" in text(page, ".playground .verdict")


def test_a_running_sequence_is_moved_and_its_client_notices_nothing(page, service):
    body = {"model": "kvik-tiny", "prompt": "Once upon a time", "max_tokens": 900, "temperature": 0, "ignore_eos": True}
    expected = ask(service[0], "/v1/completions", {**body, "max_tokens": 900})[0]["choices"][0]["text"]
    found = {}

    def run():
        found["answer"] = ask(service[0], "/v1/completions", body)[0]

    thread = threading.Thread(target=run)
    thread.start()
    running = lambda: next(
        (name for name in ("worker-1", "worker-2", "worker-3") if ask(service[0], f"/ui/workers/{name}/sequences")[0]["sequences"]), None
    )
    name = wait_for("it runs", running)
    page.evaluate(f"document.querySelector('.card[data-worker={name}] .name').click()")
    press_button(page, "Move")
    page.until("it asks", "!!document.querySelector('dialog select')")
    press_button(page, "Move", "document.querySelector('dialog:not(.panel)')")
    page.until("it has moved", "document.querySelector('#toasts').textContent.includes('moved to')")
    thread.join(120)
    assert found["answer"]["choices"][0]["text"] == expected


def test_a_worker_drains_after_a_question(page, service):
    with worker(binary(), service[1], "leaver") as process:
        page.until("the worker is shown", "document.querySelector('.card[data-worker=leaver]')?.dataset.state === 'ready'")
        page.evaluate("document.querySelector('.card[data-worker=leaver] .name').click()")
        press_button(page, "Drain")
        assert process.poll() is None
        press_button(page, "Drain", "document.querySelector('dialog:not(.panel)')")
        assert process.wait(60) == 0
        page.until("it is gone", "document.querySelector('.card[data-worker=leaver]').dataset.state === 'gone'")


def test_the_limit_of_a_group_is_changed_after_a_question(page, service):
    show(page, "memory")
    page.until("the group is shown", "!!document.querySelector('.memory .card')")
    press_button(page, "Change")
    page.type("dialog input", "512")
    press_button(page, "Change", "document.querySelector('dialog')")
    page.until("it is changed", "document.querySelector('#toasts').textContent.includes('changed')")
    devices = ask(service[0], "/ui/workers/worker-1/memory")[0]["devices"]
    assert devices[0]["groups"][0]["policy"]["max_bytes"] == 512 << 20
    page.until("it is shown", "document.querySelector('.memory .amount').textContent.includes('512')")


def test_keys_are_asked_for_and_sent_in_headers_only(browser):
    token = "a-token-for-the-page-test"
    with up(binary(), "--workers", "1", "--set", f"cluster_token={token}", "--set", "insecure=false") as (gateway, _):
        page = browser.open(f"{gateway}/ui/")
        page.until("keys are asked for", "!document.querySelector('#banner').hidden")
        press_button(page, "Enter keys")
        page.type("dialog label:nth-of-type(2) input", token)
        press_button(page, "Use them", "document.querySelector('dialog')")
        page.until("the stream lives", LIVE)
        kept = page.evaluate("JSON.stringify([location.href, Object.entries(localStorage), document.cookie, performance.getEntries().map((entry) => entry.name)])")
        assert token not in kept
        page.call("Page.close")


def test_a_large_fleet_and_a_long_prompt_are_drawn_without_stutter(browser):
    with large_fleet() as address:
        page = browser.open(f"{address}/ui/#fleet")
        page.until("all workers are shown", f"document.querySelectorAll('.card').length === {N_WORKERS}")
        page.call("Performance.enable")
        began = durations(page)
        page.evaluate(f"new Promise((resolve) => setTimeout(resolve, {1000 * MEASURED_S}))")
        busy = durations(page) - began
        # A second has sixty frames; an update that takes as long as six is seen, and each comes once a second.
        assert busy / MEASURED_S < 0.1, f"{1000 * busy / MEASURED_S:.0f} ms of each second"
        page.evaluate("globalThis.tasks = []; new PerformanceObserver((list) => tasks.push(...list.getEntries().map((entry) => entry.duration))).observe({ type: 'longtask' })")
        inspect(page, "a long prompt")
        page.until("all rows are shown", f"document.querySelectorAll('.inspector tbody tr').length === {N_WORKERS}")
        assert f"{N_BLOCKS} blocks" in text(page, ".inspector h2")
        page.evaluate("tasks.splice(0)")
        page.evaluate("document.querySelector('canvas.map').focus()")
        for _ in range(20):
            page.press("ArrowDown")
        page.evaluate("new Promise((resolve) => setTimeout(resolve, 500))")
        tasks = page.evaluate("tasks.splice(0)")
        assert max(tasks, default=0) < 250, tasks
        assert page.complaints == []
        page.call("Page.close")
