"""A headless Chromium, asked over its DevTools protocol: what a page loads, says and shows."""

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page:
    """One tab; what it said and asked for since it was opened."""

    def __init__(self, port: int, target: str) -> None:
        self.socket = websocket.create_connection(f"ws://127.0.0.1:{port}{target}", timeout=60, suppress_origin=True)
        self.numbers = itertools.count(1)
        self.events: list[dict[str, Any]] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask, and wait for the answer."""
        number = next(self.numbers)
        self.socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            self.events.append(message)

    def open(self, address: Path | str, width: int = 1280, height: int = 900) -> None:
        """Load a file or URL at a size of the window, and wait until it is there."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=address if isinstance(address, str) else address.resolve().as_uri())
        self.wait("document.readyState === 'complete'")

    def wait(self, condition: str, seconds: float = 30) -> None:
        """Until a JavaScript expression is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(condition):
            assert time.monotonic() < deadline, f"not so after {seconds:.0f} s: {condition}"
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, or what it promises."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """A key, on what has the focus."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def screenshot(self, path: Path) -> None:
        """The whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def of(self, method: str) -> list[dict[str, Any]]:
        """Events of a kind."""
        return [event["params"] for event in self.events if event["method"] == method]


@contextmanager
def chromium() -> Iterator[Page]:
    """A browser with one empty tab; ended afterwards."""
    assert CHROMIUM
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--disable-dev-shm-usage")
        command = [CHROMIUM, *flags, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = _port(Path(profile) / "DevToolsActivePort")
            yield Page(port, _tab(port))
        finally:
            process.terminate()
            process.wait()


def _port(path: Path) -> int:
    deadline = time.monotonic() + 60
    while not path.exists() or not path.read_text().strip():
        assert time.monotonic() < deadline, "chromium does not start"
        time.sleep(0.05)
    return int(path.read_text().splitlines()[0])


def _tab(port: int) -> str:
    from urllib.request import urlopen

    with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=30) as answer:
        tabs = json.load(answer)
    return str(next(tab for tab in tabs if tab["type"] == "page")["webSocketDebuggerUrl"]).split(str(port), 1)[1]
