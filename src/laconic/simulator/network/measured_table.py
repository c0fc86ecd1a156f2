"""The measurements of a probe as costs of moves: start-up, ramp, plateau."""

from __future__ import annotations

from laconic.cluster import Curve, Measured
from laconic.collectives.choice import NATIVE
from laconic.core.exchange import Move
from laconic.simulator.network.contract import LINK, Passage
from laconic.units import human_bytes

_KINDS = {
    "sum": "all_reduce",
    "scatter_sum": "all_to_all",  # implemented as an all-to-all and a local sum
    "gather": "all_gather",
    "scatter": "all_to_all",
    "send": "send",
    "mix": "send",
}


class MeasuredTable:
    """Looks up the costs of moves, and records requests beyond the measured range."""

    def __init__(self, measured: Measured | None) -> None:
        self._measured = measured
        self._warnings: dict[str, None] = {}

    def warnings(self) -> list[str]:
        """Requests beyond the measured range."""
        return list(self._warnings)

    def passage(self, move: Move, world_size: int) -> Passage | None:
        """The cost of this move among this many ranks; None if it was not measured."""
        measured = self._measured
        if measured is None:
            return None
        kind = _KINDS[move.kind]
        if move.algorithm != NATIVE:
            if move.kind != "sum":
                return None  # half of a sum with an algorithm of laconic's own
            kind = f"all_reduce({move.algorithm})"
        if kind == "send":
            curve = measured.curve(kind)  # between two ranks, however many there are
            return None if curve is None else self._on_curve(curve, move)
        curve = measured.curve(kind, world_size)
        if curve is None and (other := measured.curve(kind)) is not None:
            self._warn(
                f"{kind} was measured among {other.world_size} ranks, not among {world_size}: formulas are used."
            )
        return None if curve is None else self._on_curve(curve, move)

    def sent_byte_s(self, *, meeting: bool) -> float | None:
        """Seconds per byte that a rank sends in large messages; None if that was not measured.

        meeting: messages of several ranks share one link, which lowers their total rate; the all-to-all shows by how
        much. Otherwise the slower of sends and all-reduces counts, whose messages do not share a link.
        """
        if self._measured is None:
            return None
        kinds = ("send", "all_reduce", "all_to_all") if meeting else ("send", "all_reduce")
        curves = [curve for kind in kinds if (curve := self._measured.curve(kind)) is not None]
        last = [(curve.sizes[-1], 1 / curve.plateau_bytes_per_s, curve) for curve in curves]
        return max((byte_s * size / curve.sent_bytes(size) for size, byte_s, curve in last), default=None)

    def _on_curve(self, curve: Curve, move: Move) -> Passage:
        times = max(1, move.peers) if move.kind == "mix" else 1
        found = curve.estimate(times * move.nbytes)
        if not found.inside:
            self._warn(
                f"{curve.kind} was measured for {human_bytes(curve.sizes[0])} to {human_bytes(curve.sizes[-1])}; "
                "other sizes are extrapolated."
            )
        busy_s = curve.moving_s(times * move.nbytes)
        starting_s = times * len(move.sizes) * curve.issue_s
        latency_s = max(0.0, found.seconds - busy_s - curve.issue_s)
        if curve.overlaps:
            return Passage(LINK, busy_s, latency_s, issue_s=starting_s)
        return Passage(LINK, busy_s, latency_s, startup_s=starting_s)

    def _warn(self, text: str) -> None:
        self._warnings[text] = None
