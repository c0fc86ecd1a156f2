"""What the base classes do for methods: states are made once, and a method that breaks its contract is named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from laconic.compression import Chain, Compressor, Fp16, Int8, Packed, RandomK, TopK
from laconic.compression.families.sparsifier import Sparsifier
from laconic.compression.wire import draw
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.plan import Bucket
from laconic.core.stateful import BucketState
from laconic.core.tensor import TensorSpec
from laconic.errors import IllegalCombination, MethodError
from tests.compression.test_laws import exchange, values

BUCKET = Bucket((TensorSpec("weight", (40, 50)),))


def test_states_of_shards_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Bucket] = []

    def init(self: Int8, bucket: Bucket) -> BucketState:
        made.append(bucket)
        return BucketState(bucket)

    monkeypatch.setattr(Int8, "init", init)
    compressor = Int8(route="scatter")

    def one_rank(transport: InProcessTransport) -> None:
        state = BucketState(BUCKET)
        for step in range(3):
            exchange(compressor, values(transport.rank, step, BUCKET.numel, BUCKET.dtype), state, transport, step=step)

    InProcessCluster(2).run(one_rank)
    assert len(made) == 2 * 2, "one for each shard, on each of two ranks"


def test_what_randomk_draws_from_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[float] = []
    drawn = draw.Draw

    def counted(bucket: Bucket, density: float) -> object:
        made.append(density)
        return drawn(bucket, density)

    monkeypatch.setattr(draw, "Draw", counted)
    compressor, state = RandomK(), BucketState(BUCKET)
    for step in range(3):
        compressor.decode(
            compressor.encode(values(0, step, BUCKET.numel, BUCKET.dtype), state), torch.empty(2000), state
        )
    assert made == [0.01]


@dataclass(frozen=True, kw_only=True)
class Longer(Packed):
    """Says less than it sends."""

    name: ClassVar[str] = "longer"

    def pack(self, flat: torch.Tensor, state: BucketState) -> torch.Tensor:
        return flat.view(torch.uint8)

    def packed_bytes(self, bucket: Bucket) -> int:
        return bucket.numel


@dataclass(frozen=True, kw_only=True)
class Unordered(Sparsifier):
    """Gives places from the last to the first, or too few."""

    name: ClassVar[str] = "unordered"
    missing: ClassVar[int] = 0

    def select(self, flat: torch.Tensor, state: BucketState) -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.arange(self.num_entries(flat.numel()) - self.missing).flip(0)
        return places, flat[places]


class TooFew(Unordered):
    missing: ClassVar[int] = 1


@pytest.mark.parametrize(
    ("compressor", "reason"),
    [
        (Longer(route="gather"), "longer: pack must return 2000 bytes"),
        (Longer(route="scatter"), "longer: pack must return 1024 bytes"),
        (Unordered(density=0.1), "ascending, distinct and below 2000"),
        (TooFew(density=0.1), "select must return 200 entries of 2000, .* returned 199 positions"),
        (Chain(TooFew(density=0.1)), "select must return 200 entries of 2000"),
    ],
    ids=str,
)
def test_a_method_that_breaks_its_contract_is_named(compressor: Compressor, reason: str) -> None:
    def one_rank(transport: InProcessTransport) -> None:
        with pytest.raises(MethodError, match=reason):
            exchange(compressor, values(0, 0, BUCKET.numel, BUCKET.dtype), compressor.init(BUCKET), transport)

    InProcessCluster(2).run(one_rank)


def test_a_chain_of_what_does_not_fit_is_an_error_and_not_an_assertion() -> None:
    with pytest.raises(IllegalCombination, match='such as topk, got "fp16"'):
        Chain(Fp16()).init(BUCKET)
    with pytest.raises(IllegalCombination, match='"fp16" does not'):
        Chain(TopK(), second=Fp16()).init(BUCKET)
