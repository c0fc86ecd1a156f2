"""The nine cells of synchronization x architecture that the field distinguishes, each with four compressors."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.architecture import AllReduce, Architecture, Gossip, ParameterServer
from laconic.compression import Compressor, ErrorFeedback, Int8, NoCompression, PowerSgd, TopK
from laconic.scheduling import Fusion
from laconic.strategy import Strategy
from laconic.strategy.legality import Parts, nearest_legal
from laconic.synchronization import Asp, Bsp, LocalSgd, Ssp, Synchronization

_LOCAL = LocalSgd(period=4)
_CELLS: tuple[tuple[Architecture, Synchronization], ...] = (
    *((ParameterServer(), rule) for rule in (Bsp(), Ssp(), Asp(), _LOCAL)),
    *((AllReduce(), rule) for rule in (Bsp(), _LOCAL)),
    *((Gossip(), rule) for rule in (Bsp(), Asp(), _LOCAL)),
)
_COMPRESSORS: tuple[Compressor, ...] = (
    NoCompression(),
    Int8(),
    ErrorFeedback(TopK(density=0.1)),
    ErrorFeedback(PowerSgd()),
)


@dataclass(frozen=True)
class Cell:
    """One entry of the matrix."""

    asked: str
    """As it stands in the matrix."""
    strategy: Strategy | None
    """What is verified: that, or the nearest strategy that does the same; None if there is none."""
    reason: str | None
    """Why it is not what was asked for."""


def cells() -> list[Cell]:
    """All entries, architecture by architecture."""
    return [_cell(Parts(rule, whom, what, Fusion())) for whom, rule in _CELLS for what in _COMPRESSORS]


def _cell(parts: Parts) -> Cell:
    asked = parts.text().removesuffix(f" / {parts.scheduling}")
    reasons, near = nearest_legal(parts)
    if not reasons:
        return Cell(asked, Strategy(parts.synchronization, parts.architecture, parts.compression), None)
    kind = type(list(parts.compression.layers())[-1])
    # Another compressor would not be the same entry any more; a wrapper that is not needed may be missing.
    if near.synchronization != parts.synchronization or not isinstance(list(near.compression.layers())[-1], kind):
        return Cell(asked, None, reasons[-1])
    return Cell(asked, Strategy(near.synchronization, near.architecture, near.compression), "; ".join(reasons))
