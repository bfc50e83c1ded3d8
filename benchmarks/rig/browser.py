"""Chromium for tests and measurements, driven by its DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PATIENCE = 240.0
"""Seconds that an answer may take: a busy machine may stand still."""

HERE_ALONE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
"""No other address, not even a literal one: Chromium asks its maker for updates and accounts."""


class Browser:
    """One page in a browser of its own; what it logs as an error is kept in `errors`."""

    def __init__(self, folder: Path) -> None:
        command_in, self._to = os.pipe()
        self._from, answer_out = os.pipe()
        script = f'exec chromium "$@" 3<&{command_in} 4>&{answer_out}'
        self._process = subprocess.Popen(
            [
                *("bash", "-c", script, "chromium"),
                *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"),
                *("--no-first-run", "--disable-dev-shm-usage", "--disable-background-networking"),
                *("--force-color-profile=srgb", "--hide-scrollbars", f"--user-data-dir={folder}"),
                *(HERE_ALONE, "about:blank"),
            ],
            pass_fds=(command_in, answer_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(command_in)
        os.close(answer_out)
        self._numbers = itertools.count(1)
        self._buffer = b""
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def run(self, script: str) -> Any:
        """Return the value of a script, which may be a promise."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, condition: str) -> Any:
        """Wait until a script gives something true, and return it."""
        deadline = time.monotonic() + PATIENCE
        while not (value := self.run(condition)):
            assert time.monotonic() < deadline, (
                f"{condition}: {self.run('document.body.innerText')}"
            )
            self.run("new Promise((done) => setTimeout(done, 50))")
        return value

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)

    def looks(self, width: int, *, dark: bool, height: int = 900) -> None:
        """Choose the screen's width and the colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def picture(self, path: Path, height: int | None = None, part: str = "") -> None:
        """Write the page as PNG, from its top, or the element that a selector finds."""
        size: Mapping[str, float] = self.call("Page.getLayoutMetrics")["cssContentSize"]
        shown = min(size["height"], height or size["height"])
        clip = {"x": 0, "y": 0, "width": size["width"], "height": shown}
        if part:
            place = "({x, y, width, height}) => ({x, y: y + scrollY, width, height})"
            clip = self.run(f"({place})(document.querySelector({part!r}).getBoundingClientRect())")
        shot = self.call(
            "Page.captureScreenshot", captureBeyondViewport=True, clip={**clip, "scale": 1}
        )
        path.write_bytes(base64.b64decode(shot["data"]))

    @contextmanager
    def asleep(self) -> Iterator[None]:
        """Stop all of the browser, as on a laptop that sleeps."""
        os.killpg(self._process.pid, signal.SIGSTOP)
        yield
        os.killpg(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(PATIENCE)
        os.close(self._to)
        os.close(self._from)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], PATIENCE)
            assert ready, "chromium does not answer"
            data = os.read(self._from, 1 << 20)
            assert data, "chromium has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        found = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(found["exceptionDetails"]))
            case "Log.entryAdded" if found["entry"]["level"] == "error":
                self.errors.append(str(found["entry"]))
            case "Runtime.consoleAPICalled" if found["type"] in ("error", "assert"):
                self.errors.append(str(found["args"]))
            case _:
                pass
