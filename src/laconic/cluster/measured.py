"""The measurements of `laconic probe` on a cluster: times of operations by size.

[measured]
transport = "torch.distributed, cpu:gloo, 4 ranks"

[[measured.curve]]
kind = "all_reduce"              # or all_reduce(ring) and the like, all_gather, all_to_all, send
world_size = 4
sizes = [1024, 1048576, 67108864]
seconds = [0.0003, 0.021, 1.3]
further = [3.5e-05, 0.0201]      # time that one more adds while others are in flight; larger sizes hide as much
"""

from __future__ import annotations

import re
import statistics
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from laconic.cluster.values import Number, Several, Text, Whole, check_keys, read_tables
from laconic.core.sent_bytes import all_gather_sent, all_reduce_sent, as_it_is_sent, shard_exchange_sent
from laconic.errors import UsageError, did_you_mean, one_line

KINDS = {
    "all_reduce": all_reduce_sent,
    "all_gather": all_gather_sent,
    "all_to_all": shard_exchange_sent,
    "send": as_it_is_sent,
}
"""The operations that can be measured, and the bytes one rank sends for each, from (bytes, world size)."""
_NAMED_SUM = re.compile(r"all_reduce\(\w{1,100}\)", re.ASCII)
_LONGEST_S = 86_400.0
_STARTUP_BYTES = 4096
"""Smaller messages take as long as empty ones, so a curve that begins here or below covers them."""
_SIZES = Several(Whole(least=1, most=2**50), most=1024)
_SECONDS = Several(Number(least=0, most=_LONGEST_S), most=1024)
_PAIRS = Several(Several(Number(least=0, most=1e13), most=4096), most=4096)


class Estimate(NamedTuple):
    """An estimated time, and whether it is within the measured range."""

    seconds: float
    inside: bool
    """Whether the size lies within the measured ones; if not, the estimate is extrapolated from the last two."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The times of one kind of operation among this many ranks, by size."""

    kind: str
    """all_reduce (the backend's own), all_reduce(ring) and the like, all_gather, all_to_all, or send: every rank to the
    next. send(inside) goes round within each host, send(between) from host to host."""
    world_size: int
    sizes: tuple[int, ...]
    """Bytes, ascending: of the tensor for all_reduce and all_to_all, of one rank's part for all_gather and send."""
    seconds: tuple[float, ...]
    """For each size, the time of the slowest rank."""
    further: tuple[float, ...] = ()
    """For the first sizes, the time that one more adds with others in flight; none given: all of start-up is hidden."""

    def __post_init__(self) -> None:
        where = f"measured curve {one_line(self.kind, 40)}"
        _check_kind(self.kind)
        read = {
            "world_size": Whole(least=2, most=2**20).read(self.world_size, f"{where}: world_size"),
            "sizes": _SIZES.read(self.sizes, f"{where}: sizes"),
            "seconds": _SECONDS.read(self.seconds, f"{where}: seconds"),
            "further": _SECONDS.read(self.further, f"{where}: further") if self.further else (),
        }
        for name, value in read.items():
            object.__setattr__(self, name, value)
        if len(self.sizes) != len(self.seconds):
            raise UsageError(f"{where}: {len(self.sizes)} sizes but {len(self.seconds)} seconds. Give one per size.")
        if len(self.further) > len(self.sizes):
            raise UsageError(
                f"{where}: {len(self.further)} entries of further for {len(self.sizes)} sizes. Give at most one each."
            )
        if any(low >= high for low, high in zip(self.sizes, self.sizes[1:], strict=False)):
            raise UsageError(f"{where}: sizes must ascend, got {one_line(list(self.sizes), 80)}.")
        if min(self.seconds) <= 0:
            raise UsageError(f"{where}: seconds must be > 0, got {min(self.seconds)}.")

    @property
    def startup_s(self) -> float:
        """The time of an operation on zero bytes, extrapolated from the first two sizes."""
        if len(self.sizes) == 1:
            return self.seconds[0]
        (low, high), (low_s, high_s) = self.sizes[:2], self.seconds[:2]
        per_byte_s = max(0.0, (high_s - low_s) / (high - low))
        return max(0.0, low_s - low * per_byte_s)

    @property
    def plateau_bytes_per_s(self) -> float:
        """Bytes per second of large sizes: between the last two."""
        return 1 / self._last_byte_s

    @property
    def _last_byte_s(self) -> float:
        if len(self.sizes) > 1 and self.seconds[-1] > self.seconds[-2]:
            return (self.seconds[-1] - self.seconds[-2]) / (self.sizes[-1] - self.sizes[-2])
        # Times that do not grow are noise; the whole time of the largest size gives an upper bound.
        return self.seconds[-1] / self.sizes[-1]

    def estimate(self, nbytes: float) -> Estimate:
        """The time of `nbytes`, interpolated between the nearest sizes, or extrapolated from the last two.

        Below the first size, where only start-up counts, the time of the first.
        """
        if nbytes <= self.sizes[0]:
            return Estimate(self.seconds[0], nbytes == self.sizes[0] or self.sizes[0] <= _STARTUP_BYTES)
        if nbytes > self.sizes[-1]:
            return Estimate(self.seconds[-1] + (nbytes - self.sizes[-1]) * self._last_byte_s, False)
        right = bisect_left(self.sizes, nbytes)
        low, high = self.sizes[right - 1], self.sizes[right]
        share = (nbytes - low) / (high - low)
        return Estimate(self.seconds[right - 1] * (1 - share) + self.seconds[right] * share, True)

    def moving_s(self, nbytes: float) -> float:
        """The time in which `nbytes` move: at the rate of large sizes, or the time beyond start-up, if longer."""
        return max(nbytes * self._last_byte_s, self.estimate(nbytes).seconds - self.startup_s)

    @property
    def issue_s(self) -> float:
        """The part of start-up that cannot overlap with that of other operations, however many are in flight."""
        beside, behind = self._issues()
        return beside if self.overlaps else behind

    @property
    def overlaps(self) -> bool:
        """Whether `issue_s` overlaps with the bytes of other operations: one more then takes the longer of both."""
        beside, behind = self._issues()
        longer = sum(abs(more - max(beside, moving_s)) for moving_s, more in self._moving_and_further())
        return longer < sum(abs(more - behind - moving_s) for moving_s, more in self._moving_and_further())

    def _issues(self) -> tuple[float, float]:
        """The start-up time of each operation if it overlaps with the bytes of others, and if it does not."""
        found = self._moving_and_further()
        if not found:
            return 0.0, 0.0
        # Where bytes take long, they are all that one more adds.
        small = [more for moving_s, more in found if moving_s <= more / 2] or [found[0][1]]
        return statistics.median(small), statistics.median(max(0.0, more - moving_s) for moving_s, more in found)

    def _moving_and_further(self) -> list[tuple[float, float]]:
        return [(self.moving_s(size), more) for size, more in zip(self.sizes, self.further, strict=False)]

    def sent_bytes(self, nbytes: int) -> int:
        """Bytes one rank sends for an operation on `nbytes`."""
        return KINDS[self.kind.partition("(")[0]](nbytes, self.world_size)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All measurements of a probe."""

    curves: tuple[Curve, ...]
    transport: str = ""
    """The transport, in words."""
    pairs_bps: tuple[tuple[float, ...], ...] = ()
    """Bits per second between rank (row) and rank (column) while all others exchange too; empty: not measured."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "transport", Text().read(self.transport, "measured: transport"))
        keys = [(curve.kind, curve.world_size) for curve in self.curves]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise UsageError(f"measured: there are two curves for {twice[0]} among {twice[1]} ranks. Remove one.")
        if self.pairs_bps:
            pairs = _PAIRS.read(self.pairs_bps, "measured: pairs_bps")
            if any(len(row) != len(pairs) for row in pairs):
                raise UsageError("measured: pairs_bps must have as many columns as rows, one for each rank.")
            object.__setattr__(self, "pairs_bps", pairs)

    def curve(self, kind: str, world_size: int | None = None) -> Curve | None:
        """The curve of a kind; without a world size, that of the most ranks. None if it was not measured."""
        _check_kind(kind)
        found = [curve for curve in self.curves if curve.kind == kind and world_size in (None, curve.world_size)]
        return max(found, key=lambda curve: curve.world_size, default=None)

    def seconds(self, kind: str, nbytes: float, world_size: int | None = None) -> Estimate:
        """How long an operation takes; raises UsageError if that kind was not measured."""
        curve = self.curve(kind, world_size)
        if curve is None:
            among = f" among {world_size} ranks" if world_size is not None else ""
            known = ", ".join(f"{curve.kind} among {curve.world_size}" for curve in self.curves)
            raise UsageError(
                f"{kind}{among} was not measured. Measured: {known or 'nothing'}. See laconic probe --help."
            )
        return curve.estimate(nbytes)

    @classmethod
    def from_table(cls, table: Mapping[str, object]) -> Measured:
        """Read the table [measured] of a cluster file."""
        where = "cluster TOML, measured"
        check_keys(table, ("transport", "pairs_bps", "curve"), where)
        curves: list[Curve] = []
        for number, entry in enumerate(read_tables(table, "curve", where)):
            there = f"{where}.curve {number}"
            check_keys(entry, ("kind", "world_size", "sizes", "seconds", "further"), there)
            for key in ("kind", "world_size", "sizes", "seconds"):
                if key not in entry:
                    raise UsageError(f"{there}: {key} is missing. Needed: kind, world_size, sizes, seconds.")
            curves.append(
                Curve(
                    kind=Text().read(entry["kind"], f"{there}.kind"),
                    world_size=Whole(least=2, most=2**20).read(entry["world_size"], f"{there}.world_size"),
                    sizes=_SIZES.read(entry["sizes"], f"{there}.sizes"),
                    seconds=_SECONDS.read(entry["seconds"], f"{there}.seconds"),
                    further=_SECONDS.read(entry["further"], f"{there}.further") if "further" in entry else (),
                )
            )
        return cls(
            curves=tuple(curves),
            transport=Text().read(table.get("transport", ""), f"{where}.transport"),
            pairs_bps=_PAIRS.read(table["pairs_bps"], f"{where}.pairs_bps") if "pairs_bps" in table else (),
        )

    def to_lines(self, table: str) -> list[str]:
        """The inverse of from_table, as the table of that name."""
        lines = [f"[{table}]", f"transport = {Text().write(self.transport)}"]
        if self.pairs_bps:
            lines += ["pairs_bps = [", *(f"  {_PAIRS.of.write(row)}," for row in self.pairs_bps), "]"]
        for curve in self.curves:
            lines += [
                f"[[{table}.curve]]",
                f"kind = {Text().write(curve.kind)}",
                f"world_size = {curve.world_size}",
                f"sizes = {_SIZES.write(curve.sizes)}",
                f"seconds = {_SECONDS.write(curve.seconds)}",
                *([f"further = {_SECONDS.write(curve.further)}"] if curve.further else []),
            ]
        return lines


def _check_kind(kind: str) -> None:
    known = (*KINDS, "all_reduce(ring)", "send(inside)", "send(between)")
    if kind not in known and not (isinstance(kind, str) and _NAMED_SUM.fullmatch(kind)):
        raise UsageError(f'measured: there is no kind "{one_line(kind, 40)}". {did_you_mean(str(kind), known)}')
