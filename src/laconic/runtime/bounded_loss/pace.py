"""How fast a rank sends, so that the network drops little of it.

    after 2000 frames or more   rate <- rate x (1 + growth - excess)   if excess <= 2%
                                rate <- rate x (1 - excess)            else
                                excess = share of these frames that was lost - share lost at random
                                growth = 2%, 4%, 8%, 10%, 10%, ...

A rank sends as fast as its own link takes frames until more than 2% are lost, and then begins with the rate at which
frames left it. If it has slowed down by 30% and still loses about as much, slowing down does not help: that share is
taken to be lost at random, until less is lost. Of few frames, chance decides how many are lost.
"""

from __future__ import annotations

_FIRST_GROWTH, _GROWTH = 0.02, 0.1
_FREE = 4.0
"""A rate so many times the one at which frames leave limits nothing."""
_ENOUGH = 2000
"""Frames whose losses are judged together."""
_HARMLESS = 0.02
"""A share of lost frames that slows nobody down."""
_SLOWED, _AS_MUCH = 0.7, 0.7
"""What is left of the rate when the loss is looked at again, and of the loss if slowing down has not helped."""
_LEAST_BYTES_PER_S = 250_000.0
_BURST_S = 0.002
"""Frames sent in one burst at a limited rate, as a time at that rate: a short queue still takes these."""
_TURN_S = 0.01
"""Frames sent in one burst otherwise, as a time at the rate at which they leave, so that every peer's turn comes
soon."""
_CREDIT_S = 0.01
"""The longest delay that a thread that wakes up late may make up for."""


class Pace:
    """The rate of one rank. Times are given, in seconds of any clock."""

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        """None: as fast as it goes."""
        self._left: float | None = None
        """Bytes per second at which the frames of the last exchange left."""
        self._busy_bytes, self._busy_s = 0, 0.0
        self._sent_s: float | None = None
        self._free_s = 0.0
        self._num_lost = self._num_sent = 0
        self._growth = _FIRST_GROWTH
        self._random = 0.0
        """The share of frames that is lost whatever the rate."""
        self._slowing: tuple[float, float] | None = None
        """The rate and the loss at which this rank began to slow down."""

    def due_s(self) -> float:
        """When the next frames may leave."""
        return self._free_s

    def num_frames(self, frame_bytes: int, most: int) -> int:
        """Frames that may leave at once."""
        if self.bytes_per_s is not None:
            burst_bytes = self.bytes_per_s * _BURST_S
        elif self._left is not None:
            burst_bytes = self._left * _TURN_S
        else:
            return most
        return max(1, min(most, int(burst_bytes / frame_bytes)))

    def sent(self, nbytes: int, now_s: float) -> None:
        """Record that the network has accepted this many bytes by now."""
        if self._sent_s is not None:
            self._busy_bytes += nbytes
            self._busy_s += now_s - self._sent_s
        self._sent_s = now_s
        if self.bytes_per_s is not None:
            self._free_s = max(self._free_s, now_s - _CREDIT_S) + nbytes / self.bytes_per_s

    def rest(self) -> None:
        """There is nothing to send: the idle time until the next frame says nothing about the network."""
        self._sent_s = None

    def update(self, lost: int, sent: int) -> None:
        """An exchange is over, in which this rank has sent so many frames; so many of them were lost."""
        self._num_lost += lost
        self._num_sent += sent
        if self._num_sent < _ENOUGH:
            return
        lost_ratio = self._num_lost / self._num_sent
        if self._busy_bytes and self._busy_s > 0:
            self._left = self._busy_bytes / self._busy_s
        self._num_lost = self._num_sent = self._busy_bytes = 0
        self._busy_s = 0.0
        # Chance alone makes the share a little smaller now and then.
        self._random = min(self._random, lost_ratio + _HARMLESS / 2)
        rate = self.bytes_per_s or self._left
        excess = lost_ratio - self._random
        if excess > _HARMLESS and rate is not None:
            self._slow_down(rate, lost_ratio, excess)
        elif self.bytes_per_s is not None:
            self._speed_up(self.bytes_per_s, max(0.0, excess))

    def _speed_up(self, rate: float, excess: float) -> None:
        free = self._left is not None and rate > _FREE * self._left
        self.bytes_per_s = None if free else rate * (1 + self._growth - excess)
        self._growth, self._slowing = min(_GROWTH, 2 * self._growth), None

    def _slow_down(self, rate: float, lost_ratio: float, excess: float) -> None:
        began_rate, began_lost = self._slowing = self._slowing or (rate, lost_ratio)
        if rate < _SLOWED * began_rate or rate <= _LEAST_BYTES_PER_S:
            self._slowing = None
            if lost_ratio > _AS_MUCH * began_lost:
                self._random = lost_ratio
                return
        slower = max(_LEAST_BYTES_PER_S, rate * (1 - excess))
        self.bytes_per_s, self._growth = min(rate, slower), _FIRST_GROWTH
