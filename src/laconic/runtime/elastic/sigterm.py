"""SIGTERM asks a worker to leave: it finishes its unit first, so the signal only sets a flag."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Sigterm:
    """Whether this process has got SIGTERM since it began to listen."""

    def __init__(self) -> None:
        self._got = threading.Event()
        self._handler_before: Any = None

    def __bool__(self) -> bool:
        return self._got.is_set()

    def listen(self) -> None:
        """Set the flag instead of ending; without effect outside the main thread, which alone can handle signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._handler_before = signal.getsignal(signal.SIGTERM)

        def note(number: int, frame: FrameType | None) -> None:
            self._got.set()

        signal.signal(signal.SIGTERM, note)

    def stop_listening(self) -> None:
        """Install the handler that was there before."""
        before, self._handler_before = self._handler_before, None
        if before is not None:
            signal.signal(signal.SIGTERM, before)
