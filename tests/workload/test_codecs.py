"""What compressors cost: the line through what was measured, and what is measured, against a clock that is set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laconic.compression import Compressor
from laconic.compression.contract import Uncompressed
from laconic.compression.traits import Traits
from laconic.core.clock import VirtualClock
from laconic.core.exchange import Exchange, Group
from laconic.core.payload import Payload
from laconic.core.stateful import BucketState
from laconic.errors import UsageError
from laconic.experiments.codec_costs import SIZES_BYTES, line, measured_codec
from laconic.strategy import Strategy

CLOCK = VirtualClock()
SMALL = (1 << 12, 1 << 14, 1 << 16)


def take(seconds: float) -> None:
    CLOCK.advance_to(CLOCK.now() + seconds)


@dataclass(frozen=True, kw_only=True)
class Pretended(Uncompressed):
    """Takes exactly so long, on a virtual clock."""

    name: ClassVar[str] = "pretended"

    def encode(self, flat: torch.Tensor, state: BucketState) -> Payload:
        take(2.0 + 1e-5 * flat.nbytes)
        return super().encode(flat, state)

    def decode(self, payload: Payload, out: torch.Tensor, state: BucketState) -> None:
        take(3.0 + 2e-5 * out.nbytes)


@dataclass(frozen=True, kw_only=True)
class InRounds(Pretended):
    """Two rounds; what lies before the second is encoding."""

    name: ClassVar[str] = "in_rounds"

    @property
    def traits(self) -> Traits:
        return Traits(decodes_alone=False)

    def exchange(
        self, flat: torch.Tensor, state: BucketState, group: Group, own: torch.Tensor | None = None
    ) -> Exchange:
        assert (group.size, group.rank) == (2, 0)
        take(1.0)
        work, rows = group.gather(flat)
        yield work
        assert torch.equal(rows[0], flat)
        assert torch.equal(rows[1], flat)
        take(1.0 + 1e-5 * flat.nbytes)
        received = torch.empty_like(flat)
        yield group.swap(flat, received, 1)
        assert torch.equal(received, flat)
        take(3.0 + 2e-5 * flat.nbytes)
        flat.zero_()


@pytest.mark.parametrize("compressor", [Pretended(), InRounds()])
def test_what_is_measured(compressor: Compressor) -> None:
    cost = measured_codec(compressor, device="cpu", sizes_bytes=SMALL, clock=CLOCK)
    assert cost.compressor == compressor.name
    assert (cost.encode_startup_s, cost.decode_startup_s) == pytest.approx((2.0, 3.0))
    assert (cost.encode_byte_s, cost.decode_byte_s) == pytest.approx((1e-5, 2e-5))
    assert "CPU" in cost.source
    assert "4.0 KiB to 64.0 KiB in float32; the line is within 0% of the measured encoding" in cost.source


@pytest.mark.parametrize(
    "text",
    [
        "none",
        "int8",
        "topk(density=0.05) + error_feedback",
        "powersgd(rank=2) + error_feedback",
        "gtopk",
        "oktopk",
        "threshold",
        "qsgd + elias",
    ],
)
def test_every_kind_of_compressor_can_be_measured(text: str) -> None:
    compressor = Strategy.from_table({"compression": text}).compression
    cost = measured_codec(compressor, device="cpu", sizes_bytes=SMALL)
    assert cost.compressor == str(compressor)
    assert cost.encode_s(1 << 20) > 0


def test_a_dtype_it_cannot_carry() -> None:
    with pytest.raises(UsageError, match="int8 cannot carry gradients of complex64"):
        measured_codec(Strategy.from_table({"compression": "int8"}).compression, device="cpu", dtype=torch.complex64)


def test_sizes_reach_from_64_kb_to_16_mb() -> None:
    assert (SIZES_BYTES[0], SIZES_BYTES[-1]) == (65536, 16777216)


positive = st.floats(1e-6, 1.0)


@given(positive, st.floats(1e-12, 1e-6))
def test_a_line_is_found_again(a: float, b: float) -> None:
    (startup, per_byte), error = line([(x, a + b * x) for x in SIZES_BYTES])
    assert startup + per_byte * SIZES_BYTES[0] == pytest.approx(a + b * SIZES_BYTES[0], rel=1e-6)
    assert startup + per_byte * SIZES_BYTES[-1] == pytest.approx(a + b * SIZES_BYTES[-1], rel=1e-6)
    assert error < 1e-6


@given(st.lists(positive, min_size=len(SIZES_BYTES), max_size=len(SIZES_BYTES)))
def test_no_other_line_is_nearer(times: list[float]) -> None:
    points = list(zip(map(float, SIZES_BYTES), times, strict=True))
    (a, b), error = line(points)
    assert a >= 0
    assert b >= 0
    xs, ts = np.array(points).T
    assert error == pytest.approx(np.max(np.abs(a + b * xs - ts) / ts))

    def squares(a: float, b: float) -> float:
        return float(np.sum(((a + b * xs - ts) / ts) ** 2))

    best = squares(a, b)
    moves: list[Callable[[float, float], tuple[float, float]]] = [
        lambda a, b: (a * 1.01, b),
        lambda a, b: (a * 0.99, b),
        lambda a, b: (a, b * 1.01),
        lambda a, b: (a, b * 0.99),
        lambda a, b: (a + 1e-3, b),
        lambda a, b: (a, b + 1e-10),
        lambda a, b: (max(0.0, a - 1e-3), b + 1e-10),
        lambda a, b: (a + 1e-3, max(0.0, b - 1e-10)),
    ]
    assert all(squares(*move(a, b)) >= best * (1 - 1e-9) for move in moves)
