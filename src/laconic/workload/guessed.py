"""A workload for a model of which little is known: a decoder of a likely shape, or one from a config.json.

The shapes are those of a published family of decoders: for a number of parameters, the depth of the member nearest in
size, and the width that gives the number.

    parameters = blocks (4 + 8) width^2 + vocabulary width

Reference: Brown et al. 2020, arXiv:2005.14165, Table 2.1 (depths and widths).
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from laconic.errors import UsageError
from laconic.units import human_count
from laconic.workload.decoder import DecoderShape, decoder_layers
from laconic.workload.devices import SHARE, KnownDevice
from laconic.workload.roofline import DIVISION, timed_layers
from laconic.workload.workload import Workload

_FAMILY = (
    (125e6, 12),
    (350e6, 24),
    (760e6, 24),
    (1.3e9, 24),
    (2.7e9, 32),
    (6.7e9, 32),
    (13e9, 40),
    (175e9, 96),
)
"""Parameters, blocks."""
_VOCABULARY = 50_257
_HEAD_WIDTH = 64
_FEWEST, _MOST = 10_000_000, 2_000_000_000_000
BATCH, SEQUENCE = 8, 1024
"""The default batch of one rank in a step."""


def guessed_shape(num_parameters: int, *, batch: int = BATCH, sequence: int = SEQUENCE) -> DecoderShape:
    """The shape of a decoder with about this many parameters."""
    if not _FEWEST <= num_parameters <= _MOST:
        raise UsageError(
            f"a shape can be guessed for {human_count(_FEWEST)} to {human_count(_MOST)} parameters, got "
            f"{num_parameters:,}. Give a config.json, or profile the model: --model script.py:make_model."
        )
    blocks = min(_FAMILY, key=lambda member: abs(math.log(member[0] / num_parameters)))[1]
    # The positive root of 12 blocks w^2 + vocabulary w = parameters, as a whole number of heads.
    quadratic = 12 * blocks
    width = (math.sqrt(_VOCABULARY**2 + 4 * quadratic * num_parameters) - _VOCABULARY) / (2 * quadratic)
    heads = max(1, round(width / _HEAD_WIDTH))
    return DecoderShape(
        blocks=blocks,
        width=heads * _HEAD_WIDTH,
        inner=4 * heads * _HEAD_WIDTH,
        heads=heads,
        kv_heads=heads,
        vocabulary=_VOCABULARY,
        sequence=sequence,
        batch=batch,
        gated=False,
        tied=True,
    )


def decoder_workload(
    name: str, shape: DecoderShape, device: KnownDevice, *, dtype: torch.dtype, shape_from: str
) -> Workload:
    """The workload of a decoder on a known device, not measured; shape_from: where its shape comes from, in words."""
    for what in ("batch", "sequence"):
        if not 1 <= getattr(shape, what) <= 2**24:
            raise UsageError(f"{what} must be between 1 and {2**24}, got {getattr(shape, what)}.")
    work = list(decoder_layers(shape))
    made = Workload(
        name=name,
        batch=shape.batch,
        layers=timed_layers(work, device.peaks, compute_s=device.compute_s(work)),
        source="to be said",
        dtype=dtype,
    )
    return replace(
        made,
        source=(
            f"Nothing was measured: {shape_from} ({shape.blocks} blocks of width {shape.width:,}, a vocabulary of "
            f"{shape.vocabulary:,}, {human_count(made.num_parameters)} parameters), and a step of {shape.batch} "
            f"sequences of {shape.sequence:,} tokens takes the time that follows from {SHARE:.0%} of the peaks of one "
            f"{device.name}. {DIVISION}"
        ),
    )
