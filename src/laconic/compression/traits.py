"""What a compressor is like: the facts that rules of legality, attach, the simulator and reports ask about."""

from __future__ import annotations

from dataclasses import dataclass

import torch

REAL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The facts about one compressor, with its settings and with everything that it wraps."""

    lossless: bool = False
    """Receivers get exactly the tensor that was sent, so there is no error to feed back."""
    unbiased: bool = False
    """What arrives equals what was sent on average over the compressor's random choices."""
    wants_error_feedback: bool = False
    """Trains worse, or not at all, unless something sends later what is lost now."""
    keeps_residual: bool = False
    """Remembers what it did not send and sends it in a later step."""
    keeps_scale: bool = True
    """False: only a direction is sent, so it can feed an optimizer but not update parameters directly."""
    scale_equivariant: bool = True
    """Twice the input, with its state rescaled, gives twice the output. False where a setting is an absolute magnitude
    or where only a direction is sent: there a GradScaler changes what the compressor does."""
    accumulates: bool = False
    """Sends a sum over several steps, such as a velocity; so input minus what was sent is not what was lost."""
    amplifies: bool = False
    """Enlarges what it sends so that it is right on average; a residual of that would grow without bound."""
    needs_whole_tensors: bool = False
    """Treats a tensor by its shape, its size or its name, so tensors must not be cut into pieces."""
    decodes_alone: bool = True
    """One rank's payload can be decoded without those of the others: `encode` and `decode` are written."""
    sums_only: bool = False
    """Every round of an exchange is a sum, so a server that only adds can take part without decoding."""
    payloads_add_up: bool = True
    """The sum of the payloads decodes to the sum of the inputs, so one all-reduce, even in two halves, carries them."""
    sends_sums_back: bool = False
    """A rank may add up payloads and compress the sum again, which loses something a second time."""
    warms_up: bool = False
    """Does something else in the first steps than later on."""
    exact_bytes: bool = True
    """`rounds` says exactly how many bytes are sent. False: they depend on the values, and `rounds` is a bound."""
    dtypes: tuple[torch.dtype, ...] = REAL_DTYPES
    """Dtypes of gradients that it can carry."""
    loss_gap: float | None = None
    """By which share the tiny GPT's loss ends above the uncompressed one, with the method's default settings and error
    feedback where it is wanted, as docs/results/convergence.md prints it; None: not measured, or nothing is lost."""
