"""Makes the pictures of the page in docs/: `python tests/python/browser/screenshots.py`.

Runs `kvik up` with some load. Needs Chromium, the packages of requirements.txt beside this file, and for smaller files pngquant.
"""

import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from chromium import Chromium
from conftest import binary
from service import ask, up
from test_page import LIVE, inspect, press_button, show

STORY = "Day {day}. The sun came up over the hills, and the fox went down to the river. A bird sang in the old tree, and the wind took the song over the fields. "


def load(gateway, ended):
    """Conversations that grow: each request goes on from the one before."""
    def converse(number):
        turn = 0
        while not ended.is_set():
            turn = turn % 8 + 1
            prompt = f"Story {number}. " + "".join(STORY.format(day=day) for day in range(1, 3 * turn))
            body = {"model": "kvik-tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": True}
            ask(gateway, "/v1/completions", body)
            ended.wait(1.2)

    threads = [threading.Thread(target=converse, args=(number,)) for number in range(9)]
    for thread in threads:
        thread.start()
    return threads


def save(page, name):
    path = ROOT / "docs" / f"ui-{name}.png"
    page.screenshot(path)
    if shutil.which("pngquant"):
        subprocess.run(["pngquant", "--force", "--output", path, "--quality", "70-95", path], check=False)
    print(path.relative_to(ROOT), path.stat().st_size // 1024, "KiB")


def main():
    seconds = int(sys.argv[1]) if len(sys.argv) > 1 else 120
    folder = tempfile.TemporaryDirectory(prefix="kvik-screenshots-")
    config = Path(folder.name) / "kvik.yaml"
    # Little memory, so that every tier has something to do.
    config.write_text("worker:\n  kv_blocks: 144\n")
    tiers = ("--config", str(config), "--ram", "96MiB", "--nvme", f"{folder.name}/nvme:600MiB")
    with folder, Chromium() as browser, up(binary(), "--workers", "3", *tiers) as (gateway, _):
        page = browser.open(f"{gateway}/ui/#fleet", width=1400, height=800)
        page.until("the stream lives", LIVE)
        page.until("all workers are ready", "document.querySelectorAll('.card[data-state=ready]').length === 3")
        ended = threading.Event()
        threads = load(gateway, ended)
        try:
            time.sleep(seconds)
            save(page, "fleet")
            show(page, "series")
            time.sleep(1)
            save(page, "series")
            prompt = "Story 1. " + "".join(STORY.format(day=day) for day in range(1, 26)) + "And then everything was new and different. " * 20
            inspect(page, prompt)
            time.sleep(1)
            save(page, "prompt")
        finally:
            ended.set()
            for thread in threads:
                thread.join()
        dark = browser.open(f"{gateway}/ui/#playground", width=1400, height=800, scheme="dark")
        dark.until("the model is known", "document.querySelector('.playground select')?.options.length > 0")
        press_button(dark, "A long sample")
        for _ in range(2):
            dark.evaluate("document.querySelector('.playground form').requestSubmit()")
            dark.until("both runs ended", "!document.querySelector('.playground button[type=submit]').disabled", 120)
        time.sleep(0.5)
        save(dark, "playground")


if __name__ == "__main__":
    main()
