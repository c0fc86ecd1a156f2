"""Tensors cut into pieces and packed into runs of about the same size."""

from __future__ import annotations

from collections.abc import Sequence

from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec


def partitions(tensors: Sequence[TensorSpec], nbytes: int, *, cut: bool) -> list[Bucket]:
    """Runs of at least `nbytes`, the last of each dtype and device excepted.

    With `cut`, tensors larger than that are cut into pieces of at most `nbytes`.
    """
    found: list[Bucket] = []
    open_runs: dict[object, list[TensorSpec]] = {}
    filled: dict[object, int] = {}

    def close(kind: object) -> None:
        filled.pop(kind, None)
        if run := open_runs.pop(kind, None):
            found.append(Bucket(tuple(run)))

    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        if cut and tensor.nbytes > nbytes:
            close(kind)
            step = max(1, nbytes // tensor.dtype.itemsize)
            begins = range(0, tensor.numel, step)
            found += [Bucket((tensor.piece(begin, min(begin + step, tensor.numel)),)) for begin in begins]
            continue
        open_runs.setdefault(kind, []).append(tensor)
        filled[kind] = filled.get(kind, 0) + tensor.nbytes
        if filled[kind] >= nbytes:
            close(kind)
    for kind in list(open_runs):
        close(kind)
    return found
