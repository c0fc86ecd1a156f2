"""Which kernels run where: faster ones where they can be used, the reference everywhere else."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from laconic.compression.kernels import loader, quantizers, topk
from laconic.compression.kernels.loader import has_faster, load_kernels
from laconic.compression.wire.chunks import Chunks
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec

ROOM = Path(loader.__file__).parent
FAMILIES = sorted(path.stem for path in (ROOM / "reference").glob("[a-z]*.py"))
BY_TORCH = ("lowrank", "row_sums")
COMBINED = ("rotated_grid",)
"""Two families one after the other; some devices have one kernel for both."""


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Whether something is installed is found out anew, before and after."""
    for remembered in (loader.load_kernels, loader.load_faster, loader._warn):
        remembered.cache_clear()
    yield
    for remembered in (loader.load_kernels, loader.load_faster, loader._warn):
        remembered.cache_clear()


def test_every_family_is_what_compressors_call() -> None:
    assert {*FAMILIES, *COMBINED} == {path.stem for path in ROOM.glob("[a-z]*.py")} - {"loader"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cpu_has_numba_kernels_but_where_torch_is_as_fast(family: str) -> None:
    assert has_faster(family, "cpu") == (family not in BY_TORCH), "torch itself is as fast"


@pytest.mark.parametrize("family", FAMILIES)
def test_other_devices_have_the_reference(family: str) -> None:
    assert not has_faster(family, "meta")
    assert load_kernels(family, "meta").__name__.endswith(f"reference.{family}")


@pytest.mark.usefixtures("forgetful")
def test_without_numba_and_triton_plain_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = Chunks(Bucket((TensorSpec("weight", (100,)),)), 64, 8, 1)
    flat = torch.randn(100, generator=torch.Generator().manual_seed(0))
    packed, indices = quantizers.encode("natural", flat, chunks, 5), topk.topk_indices(flat, 7)
    loader.load_kernels.cache_clear()
    loader.load_faster.cache_clear()
    monkeypatch.setattr(loader, "find_spec", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not any(has_faster(family, device) for family in FAMILIES for device in ("cpu", "cuda"))
        assert torch.equal(quantizers.encode("natural", flat, chunks, 5), packed)
        assert torch.equal(topk.topk_indices(flat, 7), indices)


@pytest.mark.usefixtures("forgetful")
def test_a_numba_that_cannot_be_used_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> object:
        if "numba_cpu" in name:
            raise ImportError("Numba needs NumPy 1.0 or less")
        return real(name)

    real = loader.import_module
    monkeypatch.setattr(loader, "import_module", refuse)
    with pytest.warns(
        UserWarning, match=r"numba is installed but cannot be used .*NumPy 1.0.*Repair or uninstall numba"
    ):
        assert not has_faster("topk", "cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not any(has_faster(family, "cpu") for family in FAMILIES)
