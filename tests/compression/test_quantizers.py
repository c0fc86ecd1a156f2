"""Quantizers against numpy, value by value, with random numbers made anew from their definition."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from laconic.architecture.all_reduce import Everyone
from laconic.compression import (
    COMPRESSORS,
    EfSignSgd,
    ErrorFeedback,
    Fp8,
    Int4,
    Int8,
    Natural,
    NuqSgd,
    OneBit,
    Qsgd,
    SignSgd,
    TernGrad,
)
from laconic.compression.families.quantizer import Quantizer
from laconic.core.in_process import InProcessCluster, InProcessTransport
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import IllegalCombination, InvalidSetting
from laconic.strategy import Strategy
from tests.compression.test_laws import bits, exchange, one_bucket, values

pytestmark = pytest.mark.timeout(60)

f32 = np.float32
SIZES = {"a": 1, "b": 31, "c": 257, "d": 700}
BUCKET = Bucket(tuple(TensorSpec(name, (size,)) for name, size in SIZES.items()))
MOMENT = Moment(5, 2, 4)

Block = Callable[[np.ndarray, np.ndarray], np.ndarray]


def mix(x: np.ndarray | int) -> np.ndarray:
    x = np.asarray(x, np.uint64) & 0xFFFFFFFF
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor) & np.uint64(0xFFFFFFFF)
    return x


def uniforms(name: str, position: int, length: int, moment: Moment) -> np.ndarray:
    """The numbers in [0, 1) of a block that begins at `position` of a parameter."""
    base = mix(zlib.crc32(name.encode()) + int(mix(position)))
    when = mix(int(mix(moment.step + 1)) ^ int(mix((moment.rank + 1) * 0x9E3779B1)))
    seed = mix(int(base) ^ int(when))
    return (mix(np.arange(length, dtype=np.uint64) + seed) >> np.uint64(8)).astype(f32) * f32(2**-24)


def up_or_down(magnitudes: np.ndarray, u: np.ndarray) -> np.ndarray:
    return np.floor(magnitudes) + (u < magnitudes - np.floor(magnitudes))


def integer(largest: int, stochastic: bool) -> Block:
    def decoded(g: np.ndarray, u: np.ndarray) -> np.ndarray:
        s = np.abs(g).max()
        scaled = g * (f32(largest) / s)
        levels = np.sign(scaled) * up_or_down(np.abs(scaled), u) if stochastic else np.rint(scaled)
        return levels.astype(f32) * (s / f32(largest))

    return decoded


def qsgd(levels: int) -> Block:
    def decoded(g: np.ndarray, u: np.ndarray) -> np.ndarray:
        norm = f32(np.linalg.norm(g.astype(np.float64)))
        return np.sign(g) * up_or_down(np.abs(g) * (f32(levels) / norm), u).astype(f32) * (norm / f32(levels))

    return decoded


def nuqsgd(levels: int) -> Block:
    grid = np.array([0.0, *(2.0 ** np.arange(1 - levels, 1))], f32)

    def decoded(g: np.ndarray, u: np.ndarray) -> np.ndarray:
        norm = f32(np.linalg.norm(g.astype(np.float64)))
        a = np.abs(g) * (f32(1) / norm)
        below = np.minimum(np.searchsorted(grid, a, side="right") - 1, levels - 1)
        up = u < (a - grid[below]) / (grid[below + 1] - grid[below])
        return np.sign(g) * grid[below + up] * norm

    return decoded


def terngrad(clip: float) -> Block:
    def decoded(g: np.ndarray, u: np.ndarray) -> np.ndarray:
        bound = f32(clip * np.sqrt(np.mean(g.astype(np.float64) ** 2)))
        clipped = np.clip(g, -bound, bound)
        s = np.abs(clipped).max()
        return s * np.sign(g) * (u < np.abs(clipped) * (f32(1) / s))

    return decoded


def fp8(stochastic: bool) -> Block:
    table = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()

    def decoded(g: np.ndarray, u: np.ndarray) -> np.ndarray:
        unit, magnitude = np.abs(g).max() / f32(448), np.abs(g * (f32(448) / np.abs(g).max()))
        above = np.minimum(np.searchsorted(table, magnitude), 126)
        below = np.maximum(above - 1, 0)
        part = (magnitude - table[below]) / np.maximum(table[above] - table[below], f32(1e-30))
        tie_up = above % 2 == 0
        up = u < part if stochastic else (part > 0.5) | ((part == 0.5) & tie_up)
        return np.sign(g) * np.where(up | (part >= 1), table[above], table[below]) * unit

    return decoded


def natural(g: np.ndarray, u: np.ndarray) -> np.ndarray:
    below = f32(2) ** np.floor(np.log2(np.abs(g)))
    return np.sign(g) * np.where(u < np.abs(g) / below - 1, 2 * below, below)


def scaled_sign(g: np.ndarray, u: np.ndarray) -> np.ndarray:
    return np.where(g >= 0, 1, -1) * f32(np.abs(g).mean(dtype=np.float64))


def onebit(g: np.ndarray, u: np.ndarray) -> np.ndarray:
    wide = g.astype(np.float64)
    means = [part.mean() if len(part) else 0.0 for part in (wide[g < 0], wide[g >= 0])]
    return np.where(g >= 0, means[1], means[0]).astype(f32)


def sign(g: np.ndarray, u: np.ndarray) -> np.ndarray:
    return np.where(g >= 0, 1, -1).astype(f32)


FORMULAS: list[tuple[Quantizer, Block]] = [
    (Int8(), integer(127, False)),
    (Int8(rounding="stochastic", block=100), integer(127, True)),
    (Int4(block=64), integer(7, False)),
    (Int4(rounding="stochastic"), integer(7, True)),
    (Fp8(block=128), fp8(False)),
    (Fp8(rounding="stochastic"), fp8(True)),
    (Qsgd(), qsgd(7)),
    (Qsgd(levels=1, block=64), qsgd(1)),
    (Qsgd(levels=20), qsgd(20)),
    (Qsgd(levels=127), qsgd(127)),
    (NuqSgd(block=128), nuqsgd(7)),
    (NuqSgd(levels=1, block=64), nuqsgd(1)),
    (NuqSgd(levels=20), nuqsgd(20)),
    (TernGrad(block=128), terngrad(2.5)),
    (TernGrad(clip=1.5), terngrad(1.5)),
    (Natural(block=64), natural),
    (EfSignSgd(block=64), scaled_sign),
    (OneBit(block=64), onebit),
    (SignSgd(block=64), sign),
]
METHODS = [method for method, _ in FORMULAS]
every_quantizer = pytest.mark.parametrize("method", METHODS, ids=str)


def decoded(method: Quantizer, flat: torch.Tensor, bucket: Bucket, moment: Moment = MOMENT) -> torch.Tensor:
    """What a receiver gets."""
    state = method.init(bucket)
    state.moment = moment
    out = torch.full_like(flat, 7.0)
    method.unpack(method.pack(flat, state), out, state)
    return out


def test_every_quantizer_is_here() -> None:
    registered = {kind for kind in COMPRESSORS if issubclass(kind, Quantizer)}
    assert {type(method) for method in METHODS} == registered


@pytest.mark.parametrize(("method", "formula"), FORMULAS, ids=[str(method) for method in METHODS])
def test_formula(method: Quantizer, formula: Block) -> None:
    flat = values(0, 0, BUCKET.numel, torch.float32)
    found = decoded(method, flat, BUCKET).numpy()
    for tensor, place in BUCKET.segments():
        for position in range(0, tensor.numel, method.block):
            block = slice(place.start + position, min(place.start + position + method.block, place.stop))
            g = flat[block].numpy()
            expected = formula(g, uniforms(tensor.name, position, len(g), MOMENT))
            # A norm may differ in its last bit, and then a value next to a step; the seed has none of those.
            np.testing.assert_allclose(found[block], expected, rtol=1e-6, err_msg=f"{tensor.name} from {position}")


SIZES_AND_BYTES = [
    # bits per value, values in blocks, scales: e.g. 33 values of 4 bits are 17 bytes
    (Int8(), [(1, 4 + 1), (31, 4 + 31), (256, 4 + 256), (257, 4 + 256 + 4 + 1)]),
    (Int4(), [(1, 4 + 1), (33, 4 + 17), (256, 4 + 128), (257, 4 + 128 + 4 + 1)]),
    (Int4(block=33), [(33, 4 + 17), (66, 2 * (4 + 17))]),
    (Fp8(), [(1, 4 + 1), (300, 4 + 256 + 4 + 44)]),
    (Qsgd(levels=1, block=512), [(5, 4 + 2), (513, 4 + 128 + 4 + 1)]),
    (Qsgd(levels=3, block=512), [(5, 4 + 2), (512, 4 + 192)]),
    (Qsgd(), [(7, 4 + 4)]),
    (Qsgd(levels=8), [(8, 4 + 5), (9, 4 + 6)]),
    (Qsgd(levels=31), [(8, 4 + 6)]),
    (Qsgd(levels=32), [(8, 4 + 7)]),
    (Qsgd(levels=127), [(8, 4 + 8)]),
    (TernGrad(), [(5, 4 + 2), (1024, 4 + 256)]),
    (Natural(), [(5, 4 + 5)]),
    (SignSgd(), [(1, 4 + 1), (65536, 4 + 8192)]),
    (EfSignSgd(), [(9, 4 + 2), (1024, 4 + 128), (1025, 4 + 128 + 4 + 1)]),
    (OneBit(), [(9, 8 + 2), (1025, 8 + 128 + 8 + 1)]),
]


@pytest.mark.parametrize(("method", "cases"), SIZES_AND_BYTES, ids=[str(method) for method, _ in SIZES_AND_BYTES])
def test_bytes(method: Quantizer, cases: list[tuple[int, int]]) -> None:
    for numel, expected in [(0, 0), *cases]:
        bucket = one_bucket(numel, torch.float32)
        assert method.packed_bytes(bucket) == -(-expected // 4) * 4, f"{numel} values"
        assert len(method.pack(values(0, 0, numel, torch.float32), method.init(bucket))) == method.packed_bytes(bucket)


def test_bytes_of_several_parameters() -> None:
    """Each begins a block and a byte of its own; only the whole is padded."""
    assert Int4().packed_bytes(BUCKET) == -(-(4 * 7 + 1 + 16 + (128 + 1) + (128 + 128 + 94)) // 4) * 4


def _standard_errors_off(method: Quantizer, steps: int) -> float:
    """How far the mean over many steps is from the value itself, in units of what chance explains."""
    flat = values(0, 1, 96, torch.float32).sign() * torch.linspace(0.3, 1, 96)
    flat[::12] *= 6  # beyond 2.5 sigma
    bucket = one_bucket(96, torch.float32)
    found = np.stack([decoded(method, flat, bucket, Moment(step)).double().numpy() for step in range(steps)])
    true = flat.double().numpy()
    # What happens less than once in so many steps shows no spread.
    chance = found.std(0) / np.sqrt(steps) + np.abs(true) / steps
    return float((np.abs(found.mean(0) - true) / chance).max())


@every_quantizer
def test_unbiased_says_the_truth(method: Quantizer) -> None:
    """The mean over many steps is the value itself, within what chance allows, exactly where the method says so."""
    off = _standard_errors_off(method, 500 if method.traits.unbiased else 100)
    assert (off < 4.5) == method.traits.unbiased, f"off by {off:.1f} standard errors"


def test_terngrad_is_biased_by_nothing_but_clipping() -> None:
    assert _standard_errors_off(TernGrad(clip=100), 500) < 4.5


@pytest.mark.parametrize("method", [Int4(rounding="stochastic", route="scatter"), Qsgd(route="scatter")], ids=str)
def test_sums_are_unbiased(method: Quantizer) -> None:
    """Also where they are rounded twice: with numbers that have nothing to do with each other."""
    bucket, steps = one_bucket(64, torch.float32), 300

    def gradient(rank: int) -> torch.Tensor:
        return values(rank, 1, 64, torch.float32).sign() * torch.linspace(0.3, 1, 64)

    def rank(transport: InProcessTransport) -> np.ndarray:
        state, found = method.init(bucket), np.empty((steps, 64))
        for step in range(steps):
            flat = gradient(transport.rank)
            exchange(method, flat, state, transport, step=step)
            found[step] = flat.numpy()
        return found

    found = InProcessCluster(2).run(rank)[0]
    off = (found.mean(0) - (gradient(0) + gradient(1)).numpy()) / (found.std(0) / np.sqrt(steps) + 1e-9)
    assert np.abs(off).max() < 4.5
    assert 0.5 < (off**2).mean() < 2


@every_quantizer
def test_random_numbers_belong_to_step_parameter_and_rank(method: Quantizer) -> None:
    flat = values(0, 0, BUCKET.numel, torch.float32)
    together = decoded(method, flat, BUCKET)
    assert bits(decoded(method, flat, BUCKET)) == bits(together)
    for tensor, place in BUCKET.segments():
        alone = decoded(method, flat[place].clone(), Bucket((tensor,)))
        assert bits(alone) == bits(together[place]), "the same in any bucket"
    stochastic = bool(method.traits.unbiased) or isinstance(method, TernGrad)
    last = Bucket((TensorSpec("d", (700,)),))
    other_name = decoded(method, flat[-700:].clone(), Bucket((TensorSpec("e", (700,)),)))
    assert (bits(other_name) != bits(decoded(method, flat[-700:].clone(), last))) == stochastic
    for moment in (Moment(6, 2, 4), Moment(5, 1, 4)):
        assert (bits(decoded(method, flat, BUCKET, moment)) != bits(together)) == stochastic


@every_quantizer
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spoils_its_block_and_nothing_else(method: Quantizer, bad: float) -> None:
    flat = values(0, 0, BUCKET.numel, torch.float32)
    clean = decoded(method, flat, BUCKET)
    place = SIZES["a"] + SIZES["b"] + 3  # in the first block of c
    flat[place] = bad
    found = decoded(method, flat, BUCKET)
    first = slice(place - 3, place - 3 + min(method.block, SIZES["c"]))
    assert found[first].isnan().all()
    found[first] = clean[first]
    assert bits(found) == bits(clean)


@pytest.mark.parametrize("route", ["gather", "scatter"])
@pytest.mark.parametrize("kind", [Int8, Qsgd, SignSgd, OneBit], ids=lambda kind: kind.name)
def test_what_is_not_finite_reaches_every_rank(kind: type[Quantizer], route: str) -> None:
    method, bucket = kind(route=route, block=64), one_bucket(1000, torch.float32)

    def rank(transport: InProcessTransport) -> torch.Tensor:
        flat = values(transport.rank, 0, bucket.numel, bucket.dtype)
        if transport.rank == 1:
            flat[700] = np.inf
        exchange(method, flat, method.init(bucket), transport)
        return flat

    for found in InProcessCluster(3).run(rank):
        assert found[64 * (700 // 64) :][:64].isnan().all()
        assert found.isnan().sum() == 64


def test_what_float32_cannot_hold_is_not_finite() -> None:
    flat = values(0, 0, 300, torch.float64)
    flat[10] = 1e300
    for method in METHODS:
        found = decoded(method, flat, one_bucket(300, torch.float64))
        assert found[: method.block].isnan().all()
    norm_too_large = torch.full((64,), 3e38)
    assert decoded(Qsgd(), norm_too_large, one_bucket(64, torch.float32)).isnan().all()


@every_quantizer
def test_zeros_and_tiny_blocks(method: Quantizer) -> None:
    zeros = decoded(method, torch.zeros(300), one_bucket(300, torch.float32))
    assert torch.equal(zeros, torch.ones(300) if isinstance(method, SignSgd) else torch.zeros(300))
    for tiny in (1e-45, 1e-39, 1e-37):
        found = decoded(method, torch.full((300,), tiny), one_bucket(300, torch.float32))
        assert found.isfinite().all()
        if not isinstance(method, SignSgd):
            # natural rounds to normal powers of two, the lowest being 2^-126
            assert found.abs().max() <= max(2 * tiny, 2.0**-126)


@every_quantizer
def test_other_dtypes_are_carried_as_float32(method: Quantizer) -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        flat = values(0, 0, BUCKET.numel, dtype)
        bucket = Bucket(tuple(TensorSpec(name, (size,), dtype) for name, size in SIZES.items()))
        expected = decoded(method, flat.float(), BUCKET).to(dtype)
        assert bits(decoded(method, flat, bucket)) == bits(expected)


def test_natural_below_its_range() -> None:
    """Down to 2^-126 of the largest power each value is kept; what is smaller arrives on average."""
    flat = torch.full((64,), 1e-8)
    flat[0] = 2.0**100
    lowest = 2.0 ** (101 - 126)
    steps = np.stack([decoded(Natural(), flat, one_bucket(64, torch.float32), Moment(s)).numpy() for s in range(400)])
    assert set(np.unique(steps[:, 1:])) == {0.0, f32(lowest)}
    share = 1e-8 / lowest
    assert abs((steps[:, 1:] > 0).mean() - share) < 5 * np.sqrt(share * (1 - share) / steps[:, 1:].size)
    assert (steps[:, 0] == 2.0**100).all()


def test_natural_above_its_range() -> None:
    huge = torch.full((64,), 3e38)
    assert (decoded(Natural(), huge, one_bucket(64, torch.float32)) == 2.0**127).all()


def test_signs_of_zeros() -> None:
    flat = torch.tensor([0.0, -0.0, 1.0, -1.0])
    assert decoded(SignSgd(), flat, one_bucket(4, torch.float32)).tolist() == [1.0, 1.0, 1.0, -1.0]
    assert decoded(EfSignSgd(), flat, one_bucket(4, torch.float32)).tolist() == [0.5, 0.5, 0.5, -0.5]
    assert decoded(OneBit(), -torch.ones(4), one_bucket(4, torch.float32)).tolist() == [-1.0] * 4


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("route", ["gather", "scatter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_signsgd_votes(world_size: int, route: str, dtype: torch.dtype) -> None:
    """sign(sum of signs), zero and tie as +1, by both routes, and one bit each way."""
    method, bucket = SignSgd(route=route), one_bucket(5000, dtype)

    def gradient(rank: int) -> torch.Tensor:
        flat = values(rank, 0, bucket.numel, dtype)
        flat[::7] = 0
        return flat

    def rank(transport: InProcessTransport) -> tuple[torch.Tensor, torch.Tensor]:
        flat, state = gradient(transport.rank), method.init(bucket)
        own = torch.empty_like(flat)
        for work in method.exchange(flat, state, Everyone(transport, "w"), own):
            work.wait()
        return flat, own

    signs = np.stack([np.where(gradient(r).float().numpy() >= 0, 1, -1) for r in range(world_size)])
    vote = np.where(signs.sum(0) >= 0, 1, -1)
    for number, (flat, own) in enumerate(InProcessCluster(world_size).run(rank)):
        np.testing.assert_array_equal(flat.float().numpy(), vote)
        np.testing.assert_array_equal(own.float().numpy(), signs[number])
    sent = [size for round in method.rounds(bucket, Moment(0, 0, world_size)) for size in round.sizes]
    if route == "gather":
        assert sent == [4 + 625 + 3], "one number, 5000 bits, padding"
    else:
        shard = min(-(-5000 // (256 * world_size)) * 256, 5000)
        assert sent[0] == world_size * sent[1] == world_size * -(-(4 + shard // 8) // 4) * 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Qsgd(levels=128),
            "compression.qsgd.levels must be a whole number >= 1 and <= 127, got 128. 2 * levels",
        ),
        (lambda: Qsgd(levels=0), "compression.qsgd.levels must be"),
        (lambda: Int8(block=8), "compression.int8.block must be a whole number >= 32 and <= 65536, got 8."),
        (lambda: Int4(rounding="up"), 'compression.int4.rounding must be one of the known choices, got "up".'),
        (lambda: Fp8(rounding="stochastik"), 'Did you mean "stochastic"?'),
        (lambda: TernGrad(clip=0.5), "compression.terngrad.clip must be a number >= 1, got 0.5."),
        (lambda: Strategy.parse("bsp / all_reduce / qsgd(levels=1000)"), "compression.qsgd.levels must be"),
    ],
)
def test_settings_are_refused_clearly(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        make()
    assert message in str(caught.value)


def test_who_wants_error_feedback() -> None:
    assert {method.name for method in METHODS if method.traits.wants_error_feedback} == {"ef_signsgd", "onebit"}
    assert not any(method.traits.lossless for method in METHODS)


@pytest.mark.parametrize("block", [64, 512])
def test_where_a_residual_of_qsgd_grows(block: int) -> None:
    """Noise of up to sqrt(block) / (2 levels) times the signal: below 1 a residual stays, well above it explodes."""
    bucket, half = one_bucket(2048, torch.float32), int(block**0.5 / 2)

    def residual(method: Qsgd) -> float:
        state, left = method.init(bucket), torch.zeros(2048)
        for step in range(150):
            state.moment = Moment(step)
            left += values(0, step, 2048, torch.float32)
            sent = torch.empty(2048)
            method.unpack(method.pack(left, state), sent, state)
            left -= sent
        return float(left.norm() / values(0, 0, 2048, torch.float32).norm())

    stays, grows = Qsgd(levels=half + 1, block=block), Qsgd(levels=half // 2, block=block)
    assert residual(stays) < 10
    assert residual(grows) > 1000
    assert not stays.traits.amplifies
    assert grows.traits.amplifies
    with pytest.raises(IllegalCombination, match="would grow without bound"):
        Strategy(compression=ErrorFeedback(grows))
