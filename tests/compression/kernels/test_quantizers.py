"""Fused kernels give what the plain torch reference gives: bit for bit, but for the last bit of a sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from laconic.compression.kernels import quantizers
from laconic.compression.kernels.reference import quantizers as reference
from laconic.compression.wire.chunks import Chunks
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from tests.compression.test_laws import bits, values

pytestmark = pytest.mark.timeout(120)

SEED = 0xDEADBEEF
SMALL = (0, 1, 31, 32, 33, 127, 256, 257, 1031, 5003)

# encoder, its settings, decoder, its settings, bits, scales, whether a scale is a sum
CASES = [
    *[
        ("integer", {"largest": largest, "stochastic": stochastic}, "levels", {"largest": largest}, width, 1, False)
        for largest, width in ((127, 8), (7, 4))
        for stochastic in (False, True)
    ],
    *[("fp8", {"stochastic": stochastic}, "fp8", {}, 8, 1, False) for stochastic in (False, True)],
    *[
        ("qsgd", {"levels": levels}, "levels", {"largest": levels}, (2 * levels).bit_length(), 1, True)
        for levels in (1, 3, 7, 8, 31, 50, 127)
    ],
    *[
        ("nuqsgd", {"levels": levels}, "nuqsgd", {"largest": levels}, (2 * levels).bit_length(), 1, True)
        for levels in (1, 7, 20)
    ],
    ("terngrad", {"clip": 2.5}, "levels", {"largest": 1}, 2, 1, True),
    ("natural", {}, "natural", {}, 8, 1, False),
    ("sign", {}, "sign", {}, 1, 1, False),
    ("scaled_sign", {}, "sign", {}, 1, 1, True),
    ("onebit", {}, "onebit", {}, 1, 2, True),
    ("bf16", {}, "", {}, 16, 0, False),
    ("fp16", {}, "", {}, 16, 0, False),
]
Case = tuple[str, dict[str, float], str, dict[str, float], int, int, bool]
every_case = pytest.mark.parametrize(
    "case", CASES, ids=[" ".join([case[0], *(f"{key}={value}" for key, value in case[1].items())]) for case in CASES]
)
one_of_each = pytest.mark.parametrize("case", {case[0]: case for case in CASES}.values(), ids=lambda case: case[0])


def bucket_of(sizes: tuple[int, ...], dtype: torch.dtype, device: str) -> Bucket:
    return Bucket(tuple(TensorSpec(f"p{i}", (size,), dtype, torch.device(device)) for i, size in enumerate(sizes)))


def assert_agreement(case: Case, flat: torch.Tensor, bucket: Bucket, block: int) -> None:
    encoder, encoder_settings, decoder, decoder_settings, width, num_scales, sums = case
    chunks = Chunks(bucket, block, width, num_scales)
    fused = quantizers.encode(encoder, flat, chunks, SEED, **encoder_settings)
    plain = quantizers.encode(encoder, flat, chunks, SEED, reference=True, **encoder_settings)
    if sums:
        assert_same_but_for_the_last_bit_of_scales(fused, plain, chunks)
    else:
        assert bits(fused.cpu()) == bits(plain.cpu())
    assert_encoded_rows_agree(encoder, encoder_settings, flat, chunks)
    if decoder == "levels":
        assert_residuals_agree(encoder, encoder_settings, decoder_settings, flat, chunks)
    if decoder:
        outs = [torch.full_like(flat, 7.0), torch.full_like(flat, 8.0)]
        for out, plainly in zip(outs, (False, True), strict=True):
            quantizers.decode(decoder, plain, chunks, out, reference=plainly, **decoder_settings)
        assert bits(outs[0].cpu().nan_to_num(nan=1e4)) == bits(outs[1].cpu().nan_to_num(nan=1e4))
        begun = torch.linspace(-3.0, 5.0, flat.numel(), device=flat.device).to(flat.dtype)
        for plainly in (False, True):
            total = begun.clone()
            quantizers.decode(decoder, plain, chunks, total, add=True, reference=plainly, **decoder_settings)
            assert bits(total.cpu().nan_to_num(nan=1e4)) == bits((begun + outs[1]).cpu().nan_to_num(nan=1e4))
        assert_rows_agree(plain, outs[1], decoder, decoder_settings, chunks)


def assert_encoded_rows_agree(encoder: str, settings: dict[str, float], flat: torch.Tensor, chunks: Chunks) -> None:
    """Two rows with other random numbers, with other values between them, are encoded at once."""
    renamed = tuple(replace(tensor, name=f"q {tensor.name}") for tensor in chunks.bucket.tensors)
    both = [chunks, replace(chunks, bucket=Bucket(renamed))]
    wide = torch.full((2, flat.numel() + 3), 7.0, dtype=flat.dtype, device=flat.device)
    rows = wide[:, 1:-2]
    rows[0], rows[1] = flat, flat.flip(0)
    packed = quantizers.encode_rows(encoder, rows, both, SEED, **settings)
    for row, of_row, found in zip(rows, both, packed, strict=True):
        assert bits(found.cpu()) == bits(quantizers.encode(encoder, row, of_row, SEED, **settings).cpu())


def assert_residuals_agree(
    encoder: str, settings: dict[str, float], decoder_settings: dict[str, float], flat: torch.Tensor, chunks: Chunks
) -> None:
    """What is encoded and what is kept of two rows, where a kernel does both at once."""
    rows = torch.stack([flat, flat.flip(0)])
    for dtype in (torch.float32, flat.dtype):
        begun = torch.linspace(-0.5, 0.25, flat.numel(), device=flat.device).to(dtype)
        residuals = [begun.clone(), -begun]
        dues = [residual + row for row, residual in zip(rows, residuals, strict=True)]
        packed = quantizers.encode_keeping(encoder, rows, residuals, [chunks, chunks], SEED, **settings)
        if packed is None:
            continue
        for found, residual, due in zip(packed, residuals, dues, strict=True):
            plainly = quantizers.encode(encoder, due.to(flat.dtype), chunks, SEED, **settings)
            assert bits(found.cpu()) == bits(plainly.cpu())
            sent = torch.empty_like(flat)
            quantizers.decode("levels", found, chunks, sent, **decoder_settings)
            lost = (due - sent).to(dtype).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            assert bits(residual.cpu()) == bits(lost.cpu())


def assert_rows_agree(
    packed: torch.Tensor, decoded: torch.Tensor, decoder: str, settings: dict[str, float], chunks: Chunks
) -> None:
    """Two payloads, with other bytes between them, are decoded at once."""
    wide = torch.zeros((2, len(packed) + 8), dtype=torch.uint8, device=packed.device)
    rows = wide[:, 4:-4]
    rows[:] = packed
    outs = torch.full((2, decoded.numel() + 3), 7.0, dtype=decoded.dtype, device=decoded.device)
    quantizers.decode_rows(decoder, rows, chunks, outs[:, 1:-2], **settings)
    for out in outs:
        assert bits(out[1:-2].cpu().nan_to_num(nan=1e4)) == bits(decoded.cpu().nan_to_num(nan=1e4))
    assert torch.equal(outs[:, [0, -2, -1]], torch.full_like(outs[:, :3], 7.0))
    total = torch.full_like(decoded, 7.0)
    quantizers.sum_rows(decoder, rows, chunks, total, **settings)
    assert bits(total.cpu().nan_to_num(nan=1e4)) == bits((decoded + decoded).cpu().nan_to_num(nan=1e4))


def assert_same_but_for_the_last_bit_of_scales(fused: torch.Tensor, plain: torch.Tensor, chunks: Chunks) -> None:
    fused, plain = fused.cpu(), plain.cpu()
    scales = [packed[: chunks.scale_bytes].view(torch.float32) for packed in (fused, plain)]
    apart = (scales[0].view(torch.int32) - scales[1].view(torch.int32)).abs()
    apart[scales[0].isnan() & scales[1].isnan()] = 0
    assert apart.max() <= 1
    for chunk in range(chunks.num_chunks):
        if not apart[chunk * chunks.num_scales : (chunk + 1) * chunks.num_scales].any():
            codes = slice(*(chunks.scale_bytes + chunks.code_starts[chunk : chunk + 2]))
            assert torch.equal(fused[codes], plain[codes]), f"chunk {chunk}"


def small_and_odd_sizes_in_one_bucket(case: Case, device: str) -> None:
    bucket = bucket_of(SMALL, torch.float32, device)
    for block in (64, 256, 1000):
        assert_agreement(case, values(0, 0, bucket.numel, torch.float32).to(device), bucket, block)


def a_million(case: Case, device: str) -> None:
    bucket = bucket_of((999_983,), torch.float32, device)
    generator = torch.Generator().manual_seed(3)
    flat = torch.randn(bucket.numel, generator=generator) * torch.rand(bucket.numel, generator=generator) ** 4
    assert_agreement(case, flat.to(device), bucket, 512)


def other_types(case: Case, device: str) -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        bucket = bucket_of((300, 1, 700), dtype, device)
        assert_agreement(case, values(0, 0, bucket.numel, dtype).to(device), bucket, 128)


def more_than_is_widened_at_a_time(case: Case, device: str) -> None:
    bucket = bucket_of((270_001, 5), torch.bfloat16, device)
    assert_agreement(case, values(0, 0, bucket.numel, torch.bfloat16).to(device), bucket, 1000)


def awkward_values(case: Case, device: str) -> None:
    """Zeros of both signs, subnormals, the largest numbers, one large among small, and what is not finite."""
    block = 64
    generator = torch.Generator().manual_seed(1)
    normal = torch.randn(block, generator=generator)
    rows = [
        torch.zeros(block),
        -torch.zeros(block),
        normal * 1e-44,
        normal * 1e-38,
        normal * 2.0**-117,
        normal * 1e37,
        torch.full((block,), 3.4028234663852886e38),
        10.0 ** torch.linspace(-45, 38, block) * normal.sign(),
        torch.where(torch.arange(block) == 5, 1e30, normal * 1e-9),
        torch.where(torch.arange(block) == 7, torch.nan, normal),
        torch.where(torch.arange(block) == 7, torch.inf, normal),
        torch.where(torch.arange(block) == 7, -torch.inf, normal * 0),
        torch.full((block,), 0.1),
        torch.arange(block) - 31.5,  # ties
        torch.arange(block) / 16.0,
        2.0 ** -torch.arange(block).float(),
    ]
    flat = torch.cat(rows).to(device)
    assert_agreement(case, flat, bucket_of((len(flat),), torch.float32, device), block)


QUICK = [small_and_odd_sizes_in_one_bucket, other_types, awkward_values]
LARGE = [a_million, more_than_is_widened_at_a_time]


@every_case
@pytest.mark.parametrize("agree", QUICK)
def test_on_a_cpu(agree: Callable[[Case, str], None], case: Case) -> None:
    agree(case, "cpu")


@one_of_each
@pytest.mark.parametrize("agree", LARGE)
def test_on_a_cpu_in_large(agree: Callable[[Case, str], None], case: Case) -> None:
    agree(case, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_case
def test_on_a_gpu(case: Case) -> None:
    for agree in (*QUICK, *LARGE):
        agree(case, "cuda")


def test_every_kernel_is_here() -> None:
    assert {case[0] for case in CASES} == set(reference.ENCODERS)
    assert {case[2] for case in CASES} - {""} == set(reference.DECODERS)


@pytest.mark.parametrize("package", ["numba_cpu", "triton_gpu"])
def test_a_faster_backend_has_every_kernel(package: str) -> None:
    fused = pytest.importorskip(f"laconic.compression.kernels.{package}.quantizers", exc_type=ImportError)
    assert fused.ENCODERS.keys() == reference.ENCODERS.keys()
    assert fused.DECODERS.keys() == reference.DECODERS.keys()


@pytest.mark.parametrize("sizes", [(0,), (1,), (31, 32, 33), (64, 0, 7), (1000, 1)])
@pytest.mark.parametrize(("bits", "num_scales"), [(1, 2), (3, 1), (8, 0)])
def test_bytes_are_counted_without_laying_out_chunks(sizes: tuple[int, ...], bits: int, num_scales: int) -> None:
    bucket = Bucket(tuple(TensorSpec(f"p{number}", (size,)) for number, size in enumerate(sizes)))
    chunks = Chunks(bucket, 32, bits, num_scales)
    assert chunks.num_chunks == len(chunks.starts) - 1
    assert chunks.code_bytes == chunks.code_starts[-1]
