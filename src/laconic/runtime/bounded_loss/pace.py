"""How fast a rank sends, so that the network drops little of it.

    after every exchange   rate <- rate x (1.02 - share of its frames that was lost)

A rank sends as fast as its own link takes frames until the first loss, which sets the rate to what got through. Loss up
to 2% does not slow it down: a queue that overflows settles there, and a link that drops 1% at random is used in full.
"""

from __future__ import annotations

_GROWTH = 0.02
_LEAST_BYTES_PER_S = 250_000.0
_BURST_S = 0.002
"""Frames sent in one burst once some were lost, as a time at the present rate: a short queue still takes these."""
_TURN_S = 0.01
"""Frames sent in one burst as long as none was lost, as a time, so that every peer's turn comes soon."""
_CREDIT_S = 0.01
"""The longest delay that a thread that wakes up late may make up for."""
_WEIGHT = 0.05


class Pace:
    """The rate of one rank. Times are given, in seconds of any clock."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        """None: as fast as it goes."""
        self._measured: float | None = None
        self._sent_s: float | None = None
        self._free_s = 0.0

    def due_s(self) -> float:
        """When the next frames may leave."""
        return self._free_s

    def num_frames(self, frame_bytes: int, most: int) -> int:
        """Frames that may leave at once."""
        if self.bytes_per_s is not None:
            burst_bytes = self.bytes_per_s * _BURST_S
        elif self._measured is not None:
            burst_bytes = self._measured * _TURN_S
        else:
            return most
        return max(1, min(most, int(burst_bytes / frame_bytes)))

    def sent(self, nbytes: int, now_s: float) -> None:
        """Record that the network has accepted this many bytes by now."""
        if self._sent_s is not None and now_s > self._sent_s:
            rate = nbytes / (now_s - self._sent_s)
            # A mean of times per byte, not of rates, in which a few quick calls would count most.
            self._measured = rate if self._measured is None else 1 / ((1 - _WEIGHT) / self._measured + _WEIGHT / rate)
        self._sent_s = now_s
        if self.bytes_per_s is not None:
            self._free_s = max(self._free_s, now_s - _CREDIT_S) + nbytes / self.bytes_per_s

    def rest(self) -> None:
        """There is nothing to send: the idle time until the next frame says nothing about the network."""
        self._sent_s = None

    def update(self, lost_ratio: float) -> None:
        """An exchange is over, and this share of its frames was lost."""
        rate = self.bytes_per_s if self.bytes_per_s is not None else self._measured if lost_ratio > 0 else None
        if rate is not None:
            self.bytes_per_s = max(_LEAST_BYTES_PER_S, rate * (1 + _GROWTH - lost_ratio))
