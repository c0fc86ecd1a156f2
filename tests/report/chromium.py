"""Drives a headless Chromium through its DevTools pipe: JSON messages with a zero byte after each, no further package.

Descriptor 3 is what Chromium reads, 4 what it writes. Everything a page logs, throws or requests is kept.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    # Nothing can be reached by name, as on a machine without a network.
    "--host-resolver-rules=MAP * ~NOTFOUND",
)
_TIMEOUT_S = 30.0


def find_chromium() -> str | None:
    """The program, if one is installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Chromium:
    """One browser with one page."""

    def __init__(self, program: str) -> None:
        self.logged: list[str] = []
        """Errors and warnings: from scripts, from the console, from the browser about the page."""
        self.requested: list[str] = []
        """Addresses the page asked for beyond the file itself."""
        self._folder = tempfile.TemporaryDirectory(prefix="laconic-chromium-", ignore_cleanup_errors=True)
        its_in, self._to = os.pipe()
        self._from, its_out = os.pipe()
        # Above 4, so that giving one of the two its number cannot close the other.
        low = [its_in, its_out]
        its_in, its_out = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in low)
        words = [program, *_OPTIONS, f"--user-data-dir={self._folder.name}", "about:blank"]
        nowhere = os.open(os.devnull, os.O_RDWR)
        self._pid = os.posix_spawn(
            program,
            words,
            {**os.environ, "TMPDIR": self._folder.name},
            file_actions=[
                *((os.POSIX_SPAWN_DUP2, nowhere, fd) for fd in (0, 1, 2)),
                (os.POSIX_SPAWN_DUP2, its_in, 3),
                (os.POSIX_SPAWN_DUP2, its_out, 4),
            ],
            # A group of its own: closing ends the browser and all it started, and nothing else.
            setpgroup=0,
        )
        for fd in (*low, its_in, its_out, nowhere):
            os.close(fd)
        self._buffer = b""
        self._last_id = 0
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self._to)
        os.close(self._from)
        self._folder.cleanup()

    def look(self, *, width: int, height: int = 900, dark: bool = False, phone: bool = False) -> None:
        """How large the window is, and what the reader prefers."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, page: Path) -> None:
        """Load a file and wait until its scripts have run."""
        self.logged.clear()
        self.requested.clear()
        self._loaded = False
        self._call("Page.navigate", url=page.resolve().as_uri())
        self._until(lambda: self._loaded, "the page to load")

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives, as JSON; promises are awaited."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait for two frames: what was asked for has been drawn."""
        self.value("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done))).then(() => 0)")

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        picture = self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(picture))

    def print_pdf(self, path: Path) -> None:
        """The page as it would be printed."""
        path.write_bytes(base64.b64decode(self._call("Page.printToPDF", printBackground=True)["data"]))

    def _call(self, method: str, **parameters: object) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, object] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answers: list[dict[str, Any]] = []
        self._until(lambda: bool(answers), method, answers)
        assert "error" not in answers[0], f"{method}: {answers[0]['error']}"
        return answers[0]["result"]

    def _until(self, happened: Any, what: str, answers: list[dict[str, Any]] | None = None) -> None:
        end_s = time.monotonic() + _TIMEOUT_S
        while not happened():
            while b"\0" not in self._buffer:
                left_s = end_s - time.monotonic()
                ready, _, _ = select.select([self._from], [], [], max(0.0, left_s))
                chunk = os.read(self._from, 1 << 20) if ready else b""
                assert chunk, f"Chromium {'ended' if ready else 'took too long'} while waiting for {what}"
                self._buffer += chunk
            line, _, self._buffer = self._buffer.partition(b"\0")
            message = json.loads(line)
            if message.get("id") == self._last_id and answers is not None:
                answers.append(message)
            elif "method" in message:
                self._note(message["method"], message["params"])

    def _note(self, method: str, about: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.logged.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.logged.append(" ".join(str(part.get("value", part.get("description"))) for part in about["args"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.logged.append(about["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not about["request"]["url"].startswith(
            ("file:", "data:", "blob:")
        ):
            self.requested.append(about["request"]["url"])
