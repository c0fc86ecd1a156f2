"""elias: gamma codes against strings of bits written by hand, and the same values as the quantizer alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laconic.compression import Elias, Int4, Qsgd, TernGrad
from laconic.compression.families.quantizer import Levels
from laconic.compression.wire.elias import _num_low_bits, decode_numbers, encode_numbers
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from tests.compression.test_laws import bits, exchange, values

pytestmark = pytest.mark.timeout(60)


def by_hand(numbers: list[int]) -> str:
    """The bits as text."""
    places = [place for place, number in enumerate(numbers) if number]
    gaps = [place - before for before, place in zip([-1, *places], places, strict=False)]
    coded = gaps + [abs(numbers[place]) for place in places]
    prefixes = "".join("0" * (x.bit_length() - 1) + "1" for x in coded)
    remainders = "".join(f"{x:b}"[1:][::-1] for x in coded)
    return prefixes + remainders + "".join(str(int(numbers[place] < 0)) for place in places)


@given(
    st.one_of(
        st.lists(st.integers(-127, 127), max_size=60),
        # Long runs of zeros.
        st.lists(st.tuples(st.integers(0, 3000), st.integers(-7, 7)), max_size=8).map(
            lambda runs: [number for zeros, last in runs for number in [0] * zeros + [last]]
        ),
    )
)
def test_round_trip_and_format(numbers: list[int]) -> None:
    packed = encode_numbers(torch.tensor(numbers, dtype=torch.int64))
    text = "".join(f"{byte:08b}"[::-1] for byte in packed.tolist())
    expected = by_hand(numbers)
    assert len(text) == -(-len(expected) // 32) * 32
    assert text == expected.ljust(len(text), "0")
    assert decode_numbers(packed, sum(map(bool, numbers)), len(numbers)).tolist() == numbers


def test_lengths_of_numbers_that_float32_cannot_tell_from_the_next_power_of_two() -> None:
    numbers = [1, 2, 3, 4, 7, 8, 2**25 - 1, 2**31 - 1, 2**31]
    assert _num_low_bits(torch.tensor(numbers)).tolist() == [number.bit_length() - 1 for number in numbers]


BUCKET = Bucket((TensorSpec("weight", (200, 150)), TensorSpec("nothing", (0,)), TensorSpec("bias", (77,))))


@pytest.mark.parametrize(
    "quantizer",
    [
        Qsgd(route="gather"),
        Qsgd(levels=1, block=512, route="gather"),
        Qsgd(levels=127, block=32, route="gather"),
        TernGrad(route="gather"),
        Int4(route="gather"),
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_same_bits_as_the_quantizer_alone(quantizer: Levels, world_size: int) -> None:
    def rank(transport: InProcessTransport) -> tuple[list[bytes], list[int]]:
        found, sent = [], []
        for compressor in (quantizer, Elias(quantizer)):
            flat = values(transport.rank, 0, BUCKET.numel, BUCKET.dtype)
            before = transport.traffic.sent_bytes("payload")
            flat[50] = float("inf")
            exchange(compressor, flat, compressor.init(BUCKET), transport, step=3)
            found.append(bits(flat))
            sent.append(transport.traffic.sent_bytes("payload") - before)
        return found, sent

    for found, (alone, coded) in InProcessCluster(world_size).run(rank):
        assert found[0] == found[1]
        assert coded <= alone + 8 * (world_size - 1)


def test_few_levels_in_large_blocks_take_half_a_bit() -> None:
    """As its description says; predicted is a bound."""
    compressor, numel = Elias(Qsgd(levels=1, block=512)), 200_000
    bucket = Bucket((TensorSpec("weight", (numel,)),))

    def rank(transport: InProcessTransport) -> int:
        flat = torch.randn(numel, generator=torch.Generator().manual_seed(transport.rank))
        exchange(compressor, flat, compressor.init(bucket), transport)
        return transport.traffic.sent_bytes("payload")

    counted = InProcessCluster(2).run(rank)[0]
    assert 0.4 * numel < 8 * counted < 0.5 * numel
    assert counted < sum(size for round in compressor.rounds(bucket, Moment.steady(2)) for size in round.sizes) / 4
