"""A real headless Chromium, driven over its debugging pipe: pages, keys, messages.

with Browser(tmp_path) as browser:
    browser.open("file:///page.html", width=400, dark=True)
    browser.press("ArrowDown")
    assert browser.run("document.title") == "a run"
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --hide-scrollbars "
    "--remote-debugging-pipe"
)
TIMEOUT = 60.0
# Keys without a character of their own: name -> virtual key code.
CODES = {"Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """One page of a browser process. `console` and `requests` collect what the page did."""

    def __init__(self, directory: Path):
        assert BROWSER is not None
        commands, self._to = os.pipe()
        self._from, answers = os.pipe()
        flags = [*FLAGS.split(), f"--user-data-dir={directory / 'profile'}", "about:blank"]
        self._process = subprocess.Popen(
            # The browser reads commands from descriptor 3 and writes answers to descriptor 4.
            ["bash", "-c", f'exec "$0" "$@" 3<&{commands} 4>&{answers}', BROWSER, *flags],
            pass_fds=(commands, answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(answers)
        self._buffer = b""
        self._number = 0
        self.console: list[str] = []
        self.requests: list[str] = []
        page = next(
            t for t in self._send("Target.getTargets")["targetInfos"] if t["type"] == "page"
        )
        attach = {"targetId": page["targetId"], "flatten": True}
        self._session = self._send("Target.attachToTarget", **attach)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._to)
        os.close(self._from)

    def open(self, url: str, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Load a page and wait until its `load` event has passed."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **screen)
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[theme])
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, expression: str) -> Any:
        """The value of a script's expression in the page; promises are awaited."""
        result = self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str, seconds: float = TIMEOUT) -> None:
        """Until the expression is true."""
        end = time.monotonic() + seconds
        while not self.run(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)

    def press(self, key: str, times: int = 1) -> None:
        """Press a key by its DOM name, as a person would."""
        code = CODES.get(key, ord(key.upper()[0]))
        text = {"text": key} if key not in CODES else {}
        for _ in range(times):
            for kind in ("keyDown", "keyUp"):
                self.send(
                    "Input.dispatchKeyEvent",
                    type=kind,
                    key=key,
                    windowsVirtualKeyCode=code,
                    **(text if kind == "keyDown" else {}),
                )

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the debugging protocol to the page; its result."""
        return self._send(method, self._session, **parameters)

    def _send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], TIMEOUT)
            assert ready, "the browser does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        name, values = event.get("method"), event.get("params", {})
        if name == "Runtime.consoleAPICalled":
            self.console.append(str([a.get("value", a.get("description")) for a in values["args"]]))
        elif name == "Runtime.exceptionThrown":
            details = values["exceptionDetails"]
            self.console.append(details.get("exception", details).get("description", str(details)))
        elif name == "Log.entryAdded":
            self.console.append(values["entry"]["text"])
        elif name == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
