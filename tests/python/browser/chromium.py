"""A headless Chromium that is driven by its own DevTools protocol."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import websocket

# Far above what anything takes, so that only a real fault fails.
DEADLINE_S = 30.0

FLAGS = [
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-gpu",
    "--force-color-profile=srgb",
    "--font-render-hinting=none",
    "--hide-scrollbars",
    "--mute-audio",
]


class Chromium:
    """The browser's process; gone with the `with` block."""

    def __init__(self):
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if program is None:
            raise RuntimeError("no chromium on the path; on Debian: apt-get install chromium")
        self.folder = tempfile.TemporaryDirectory(prefix="kvik-browser-", ignore_cleanup_errors=True)
        flags = list(FLAGS)
        if os.geteuid() == 0:
            # Chromium's sandbox refuses to run for root.
            flags.append("--no-sandbox")
        self.process = subprocess.Popen(
            [program, *flags, f"--user-data-dir={self.folder.name}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        port_file = Path(self.folder.name) / "DevToolsActivePort"
        self.port = int(wait_for("the browser's port", lambda: read_port(port_file)))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.folder.cleanup()

    def open(self, url, *, width=1360, height=860, scheme="light", scale=1):
        """Opens a page in a tab of its own."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            tab = json.load(response)
        return Page(tab["webSocketDebuggerUrl"], url, width, height, scheme, scale)


class Page:
    """A tab."""

    def __init__(self, address, url, width, height, scheme, scale):
        self.socket = websocket.create_connection(address, timeout=DEADLINE_S, suppress_origin=True)
        self.numbers = itertools.count(1)
        # What the page complained about: errors of scripts, refused resources, broken rules of its policy.
        self.complaints = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height, scale)
        self.scheme(scheme)
        self.go(url)

    def call(self, method, **parameters):
        """Calls a method of the protocol and gives its result."""
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self._note(message)

    def _note(self, message):
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}".strip())

    def go(self, url):
        self.call("Page.navigate", url=url)
        self.until("the page is loaded", "document.readyState === 'complete'")

    def resize(self, width, height, scale=1):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False)

    def scheme(self, name):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def evaluate(self, script):
        """The value of an expression, which may be a promise."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def until(self, what, script, deadline_s=DEADLINE_S):
        """Waits until an expression holds, and gives its value and the seconds that it took."""
        began = time.monotonic()
        value = wait_for(what, lambda: self.evaluate(script), deadline_s)
        return value, time.monotonic() - began

    def click(self, selector):
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, selector, text):
        """Replaces the text of a field, as a user does."""
        self.evaluate(
            f"(() => {{ const field = document.querySelector({json.dumps(selector)}); field.focus();"
            f" field.value = {json.dumps(text)}; field.dispatchEvent(new Event('input', {{ bubbles: true }}));"
            " field.dispatchEvent(new Event('change', { bubbles: true })); })()"
        )

    def press(self, key):
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        # A button takes Enter as a character.
        down = {"type": "keyDown", "text": "\r"} if key == "Enter" else {"type": "rawKeyDown"}
        for kind in (down, {"type": "keyUp"}):
            self.call("Input.dispatchKeyEvent", key=key, code=key, windowsVirtualKeyCode=codes[key], **kind)

    def screenshot(self, path, *, full=False):
        """Writes the page as a PNG."""
        parameters = {"format": "png"}
        if full:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            parameters |= {"captureBeyondViewport": True, "clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **parameters)["data"]))


def read_port(path):
    """The port, once the browser has written it."""
    text = path.read_text() if path.exists() else ""
    return text.splitlines()[0] if "\n" in text else None


def wait_for(what, condition, deadline_s=DEADLINE_S):
    """Asks again and again until something is true."""
    deadline = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"it never came that {what}")
        time.sleep(0.02)
