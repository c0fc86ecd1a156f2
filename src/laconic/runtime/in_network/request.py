"""A rank's request for a sum: tensors as ranges of chunks, and their sums as they arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from laconic.errors import CommunicationError, MethodError
from laconic.runtime.in_network.frames import (
    LARGEST_U16,
    SUM_I8,
    SUM_I16,
    SUM_I32,
    SUM_I64,
    VALUE_BYTES,
    Bytes,
    num_chunks,
)
from laconic.runtime.in_network.shared_scale import SharedScale

_INTEGERS = {torch.int8: SUM_I8, torch.int16: SUM_I16, torch.int32: SUM_I32, torch.int64: SUM_I64}


class Run:
    """Consecutive chunks of one code, numbered from `first` on."""

    def __init__(self, code: int, nbytes: int, content: Callable[[int, int], Bytes], *, waits_for: Run | None) -> None:
        """`content(first, last)`: a byte range of this rank's values. `waits_for`: a run that must finish first."""
        self.code = code
        self.nbytes = nbytes
        self.count = num_chunks(nbytes)
        self.first = 0
        self.sent = 0
        """Chunks that have been sent."""
        self._content = content
        self._waits_for = waits_for
        self._missing = self.count
        self._sums = np.empty((self.count, VALUE_BYTES), np.uint8)

    @property
    def ready(self) -> bool:
        """Whether its chunks may be sent."""
        return self._waits_for is None or self._waits_for.complete

    @property
    def complete(self) -> bool:
        """Whether all sums have arrived."""
        return self._missing == 0

    @property
    def sums(self) -> Bytes:
        """The bytes of all sums."""
        return self._sums.reshape(-1)[: self.nbytes]

    def rows(self, number: int, count: int) -> list[Bytes]:
        """The values of `count` chunks, from the `number`-th of this run on; a shorter last chunk is read by itself."""
        begin, end = number * VALUE_BYTES, min((number + count) * VALUE_BYTES, self.nbytes)
        flat = self._content(begin, end)
        whole = len(flat) // VALUE_BYTES * VALUE_BYTES
        found = [flat[:whole].reshape(-1, VALUE_BYTES), flat[whole:].reshape(1, -1)]
        return [rows for rows in found if rows.size]

    def take(self, numbers: np.ndarray, values: Bytes) -> None:
        """Store the sums of chunks that have not arrived before."""
        self._sums[numbers, : values.shape[1]] = values
        self._missing -= len(numbers)


class Request:
    """Tensors whose sums over all ranks were asked for; a Work."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], world_size: int, *, what: str, timeout_s: float, late: str
    ) -> None:
        """`late`: request and aggregator, for timeout messages. Tensors must not change until the request is done."""
        self.what = what
        """A description for messages."""
        self._tensors = tuple(tensors)
        self._late = late
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._come = threading.Event()
        self._error: CommunicationError | None = None
        self._scales: list[SharedScale | None] = []
        self._last_runs: list[Run | None] = []
        self.runs: list[Run] = []
        """Its runs in the order of their chunks."""
        for tensor in self._tensors:
            self._add(tensor, world_size)
        self.scale_bytes = sum(run.nbytes for run in self.runs if run.code == LARGEST_U16)
        """Bytes of the shared exponents."""
        if not self.runs:
            self._come.set()

    def _add(self, tensor: torch.Tensor, world_size: int) -> None:
        if not tensor.numel():
            self._scales.append(None)
            self._last_runs.append(None)
        elif tensor.is_floating_point() or tensor.is_complex():
            scale = SharedScale(tensor, world_size)
            exponents = scale.exponents().view(np.uint8)
            agreed = Run(LARGEST_U16, len(exponents), lambda first, last: exponents[first:last], waits_for=None)
            codes = Run(scale.code, scale.nbytes, _after(agreed, scale), waits_for=agreed)
            self.runs += [agreed, codes]
            self._scales.append(scale)
            self._last_runs.append(codes)
        elif tensor.dtype in _INTEGERS:
            flat = tensor.reshape(-1).numpy().view(np.uint8)
            run = Run(_INTEGERS[tensor.dtype], len(flat), lambda first, last: flat[first:last], waits_for=None)
            self.runs.append(run)
            self._scales.append(None)
            self._last_runs.append(run)
        else:
            raise MethodError(
                f"an aggregator adds up integers with a sign and floating-point values, got {tensor.dtype}."
            )

    @property
    def sums(self) -> tuple[torch.Tensor, ...]:
        """The sum of each tensor; waits for it."""
        self.wait()
        found: list[torch.Tensor] = []
        for tensor, run, scale in zip(self._tensors, self._last_runs, self._scales, strict=True):
            if run is None:
                found.append(tensor.clone())
            elif scale is not None:
                found.append(scale.decoded(run.sums, tensor))
            else:
                found.append(torch.from_numpy(run.sums).view(tensor.dtype).view(tensor.shape))
        return tuple(found)

    def wait(self) -> None:
        """Return when the sums have arrived; raises CommunicationError after a failure or a timeout."""
        if not self._come.wait(max(0.0, self._deadline_s - time.monotonic())):
            self.finish(CommunicationError(f"{self._late} did not answer in {self._timeout_s:g} s."))
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        """Whether `wait` would return or raise at once."""
        return self._come.is_set()

    def finish(self, error: CommunicationError | None = None) -> None:
        """All sums have arrived, or the request has failed; only the first call counts."""
        if not self._come.is_set():
            self._error = error
            self._come.set()


def _after(agreed: Run, scale: SharedScale) -> Callable[[int, int], Bytes]:
    """The codes of a tensor, once ranks have agreed on its exponents."""
    known = False

    def content(first: int, last: int) -> Bytes:
        nonlocal known
        if not known:
            scale.agree(agreed.sums.view("<u2"))
            known = True
        return scale.codes(first, last)

    return content
