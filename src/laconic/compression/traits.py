"""The facts about a compressor that rules of legality, attach, the simulator and reports ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TypeVar

import torch

Owner = TypeVar("Owner")
Value = TypeVar("Value")

REAL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The facts about one compressor, with its settings and with everything that it wraps."""

    lossless: bool = False
    """Receivers get exactly the tensor that was sent, so there is no error to feed back."""
    unbiased: bool = False
    """The decoded values equal the input on average over the compressor's random choices."""
    wants_error_feedback: bool = False
    """Trains worse, or not at all, without error feedback."""
    keeps_residual: bool = False
    """Keeps the values that it did not send and sends them in a later step."""
    keeps_scale: bool = True
    """False: only a direction is sent, so it can feed an optimizer but not update parameters directly."""
    scale_equivariant: bool = True
    """Twice the input, with its state rescaled, gives twice the output. False where a setting is an absolute magnitude
    or where only a direction is sent: a GradScaler then changes the result."""
    accumulates: bool = False
    """Sends a sum over several steps, such as a velocity, so input minus output is not the loss of one step."""
    amplifies: bool = False
    """Its error may exceed its input, so a residual of it would grow without bound."""
    needs_whole_tensors: bool = False
    """Treats a tensor by its shape, its size or its name, so tensors must not be cut into pieces."""
    tensor_by_tensor: bool = False
    """The decoded values of a tensor do not depend on the others in its bucket, so encoding several at once changes
    only the time it takes."""
    rounds_by_place: bool = False
    """Multiplies a matrix where it lies in its bucket: at another address, processors may round the last bits of a
    product in another way. So results are the same bits in the same buckets, and close in others."""
    by_name: bool = False
    """Treats a tensor by its name, so tensors of one shape may be treated differently."""
    decodes_alone: bool = True
    """One rank's payload can be decoded without those of the others: `encode` and `decode` are written."""
    sums_only: bool = False
    """Every round of an exchange is a sum, so a server that only adds can take part without decoding."""
    linear: bool = False
    """Every round is a sum, and the decoded values follow from the sum of the inputs alone, with an error relative to
    that sum: so it can carry a small difference of two large tensors. Not set for wrappers."""
    gives_factors: bool = False
    """Decodes parameters as products of two thin matrices, which all ranks have and which it puts into
    `BucketState.factors` where that is requested."""
    payloads_add_up: bool = True
    """The sum of payloads decodes to the sum of the inputs, so one all-reduce carries them, even a decoupled one."""
    density: float = 1.0
    """The share of values that a payload carries; 1 where it carries all, or where the share depends on the values."""
    at_random: bool = False
    """The values that a payload carries are drawn at random, so a value may wait long until it is sent."""
    sends_every_value: bool = True
    """One sum has a number for every value of the input."""
    sends_sums_back: bool = False
    """A rank may add up payloads and compress the sum, which loses precision a second time."""
    rounds_sums: bool = False
    """Sums are rounded to 16 bits where they are formed, so no rank knows what they have lost."""
    estimates_all: bool = False
    """All ranks keep the sum of everything sent so far, from which the part of a rank that dies cannot be removed."""
    warms_up: bool = False
    """Works differently in the first steps."""
    exact_bytes: bool = True
    """`rounds` says exactly how many bytes are sent. False: they depend on the values, and `rounds` is a bound."""
    dtypes: tuple[torch.dtype, ...] = REAL_DTYPES
    """Dtypes of gradients that it can carry."""
    loss_gap: float | None = None
    """The share by which the tiny GPT's loss ends above the uncompressed one, with the method's default settings and
    error feedback where it is wanted, as docs/results/convergence.md prints it; None: not measured, or lossless."""
    loss_deviation: float | None = None
    """The standard deviation of the gaps of single seeds; None: one seed was trained."""


def computed_once(method: Callable[[Owner], Value]) -> Callable[[Owner], Value]:
    """Cache the result of a method without arguments, of an immutable object: every exchange asks for traits.

    Each class that has such a method keeps its own result, so `super().traits` is what the base class computes.
    """
    key = f"computed once: {method.__module__}.{method.__qualname__}"

    @wraps(method)
    def found(self: Owner) -> Value:
        kept = vars(self)
        if key not in kept:
            kept[key] = method(self)
        value: Value = kept[key]
        return value

    return found
