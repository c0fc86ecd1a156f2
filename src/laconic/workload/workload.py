"""A training job as data: layers in forward order, their tensors, and how long each computes.

{
  "name": "two layers",
  "batch": 8,
  "dtype": "float32",              default: float32
  "source": "where the times come from, in a sentence",
  "num_parameters": 26,            default: not checked
  "layers": [
    {"name": "first", "forward_s": 0.001, "backward_s": 0.002, "tensors": [{"name": "first.weight", "shape": [4, 5]}]},
    {"name": "relu", "forward_s": 0.0001, "backward_s": 0.0001},
    {"name": "last", "forward_s": 0.001, "backward_s": 0.002, "tensors": [{"name": "last.weight", "shape": [6]}]}
  ],
  "codecs": [                      default: none
    {"compressor": "int8", "encode_startup_s": 2e-5, "encode_byte_s": 4e-10, "decode_startup_s": 2e-5,
     "decode_byte_s": 4e-10, "source": "where these times come from, in a sentence"}
  ]
}
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch

from laconic.core.tensor import TensorSpec
from laconic.errors import UsageError, did_you_mean, one_line
from laconic.units import format_time
from laconic.workload import strict_json
from laconic.workload.codecs import CodecCost, read_codec
from laconic.workload.limits import check_count, check_name, check_time

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
"""The dtypes that gradients may have, as a file spells them."""
_MOST_ELEMENTS = 2**42
"""A tensor above this would not fit into any host."""
_SCALED = " Times scaled to "


@dataclass(frozen=True, kw_only=True)
class TensorShape:
    """One parameter of a layer."""

    name: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        check_name(self.name, "a tensor's name")
        for extent in self.shape:
            check_count(extent, f'tensor "{one_line(self.name, 80)}": every entry of shape', least=0)
        if self.numel > _MOST_ELEMENTS:
            raise UsageError(
                f'tensor "{one_line(self.name, 80)}": shape must give at most {_MOST_ELEMENTS} elements, '
                f"got {one_line(list(self.shape), 60)}."
            )

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A unit of computation; the gradients of its tensors are ready at the end of its backward time."""

    name: str
    forward_s: float
    backward_s: float
    tensors: tuple[TensorShape, ...] = ()
    """In the order in which their gradients become ready; none for a layer that only computes."""

    def __post_init__(self) -> None:
        check_name(self.name, "a layer's name")
        for direction, time_s in (("forward_s", self.forward_s), ("backward_s", self.backward_s)):
            check_time(time_s, f'layer "{one_line(self.name, 80)}": {direction}')


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step of one rank, without communication and without the optimizer."""

    name: str
    batch: int
    """Samples of one rank in one step; `source` says what a sample is."""
    layers: tuple[Layer, ...]
    """In the order of the forward pass; the backward pass takes them in reverse."""
    source: str
    """A sentence that says where shapes and times come from."""
    dtype: torch.dtype = torch.float32
    """Of all gradients."""
    codecs: tuple[CodecCost, ...] = ()
    """The cost of measured compressors on the device of the source."""

    def __post_init__(self) -> None:
        check_name(self.name, "a workload's name")
        where = f'workload "{one_line(self.name, 80)}"'
        check_count(self.batch, f"{where}: batch", least=1)
        if not isinstance(self.source, str) or not self.source.strip():
            raise UsageError(f"{where}: source is empty. Say in a sentence where shapes and times come from.")
        if self.dtype not in DTYPES.values():
            raise UsageError(f"{where}: dtype must be one of {', '.join(DTYPES)}, got {self.dtype}.")
        if not any(layer.tensors for layer in self.layers):
            raise UsageError(
                f"{where} has no tensor, so there is nothing to exchange. Give at least one layer a tensor."
            )
        for kind, names in (
            ("layers", [layer.name for layer in self.layers]),
            ("tensors", [tensor.name for layer in self.layers for tensor in layer.tensors]),
        ):
            twice = _twice(names)
            if twice is not None:
                raise UsageError(
                    f'{where}: two {kind} are called "{one_line(twice, 80)}". Give each a name of its own; a tensor '
                    "that several layers use belongs to the first of them, where its gradient is complete."
                )
        twice = _twice([codec.compressor for codec in self.codecs])
        if twice is not None:
            raise UsageError(f'{where}: two codecs are called "{one_line(twice, 80)}". Keep one.')

    @cached_property
    def num_parameters(self) -> int:
        """Elements of all tensors."""
        return sum(tensor.numel for layer in self.layers for tensor in layer.tensors)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients, uncompressed."""
        return self.num_parameters * self.dtype.itemsize

    @cached_property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """All tensors in the order in which their gradients become ready: last layer first."""
        return tuple(
            TensorSpec(tensor.name, tensor.shape, self.dtype)
            for layer in reversed(self.layers)
            for tensor in layer.tensors
        )

    @cached_property
    def forward_s(self) -> float:
        """The time of the forward pass."""
        return math.fsum(layer.forward_s for layer in self.layers)

    @cached_property
    def backward_s(self) -> float:
        """The time of the backward pass."""
        return math.fsum(layer.backward_s for layer in self.layers)

    @property
    def compute_s(self) -> float:
        """The time of both passes."""
        return self.forward_s + self.backward_s

    def least_step_s(self, byte_s: float) -> float:
        """The shortest step of any order of exchanges, if each byte of a gradient keeps the network busy for `byte_s`.

            max over layers l:  compute - compute of the layers before l + byte_s x bytes of the layers up to l

        Gradients of the first layers are ready when the backward pass of all others is over, and are needed before
        their next forward pass: only the compute of the first layers themselves can hide their exchange.
        """
        left_s, nbytes, least_s = self.compute_s, 0, self.compute_s
        for layer in self.layers:
            nbytes += sum(tensor.numel for tensor in layer.tensors) * self.dtype.itemsize
            least_s = max(least_s, left_s + nbytes * byte_s)
            left_s -= layer.forward_s + layer.backward_s
        return least_s

    def scaled(self, *, compute_s: float) -> Workload:
        """The same job on a faster or slower device: all times in the same proportion, `compute_s` in sum.

        The measured costs of compressors do not change.
        """
        where = f'workload "{one_line(self.name, 80)}"'
        check_time(compute_s, f"{where}: compute_s to scale to")
        if self.compute_s <= 0:
            raise UsageError(f"all compute times of {where} are 0, so they cannot be scaled. Give its layers times.")
        source = f"{self.source.partition(_SCALED)[0]}{_SCALED}{format_time(compute_s)} of compute."
        return replace(self, layers=scaled_layers(self.layers, compute_s=compute_s), source=source)

    def to_json(self) -> str:
        """A document that `from_json` reads back to an equal workload; one line per layer."""
        layers = [
            {
                "name": layer.name,
                "forward_s": layer.forward_s,
                "backward_s": layer.backward_s,
                "tensors": [{"name": tensor.name, "shape": list(tensor.shape)} for tensor in layer.tensors],
            }
            for layer in self.layers
        ]
        head = {
            "name": self.name,
            "batch": self.batch,
            "dtype": str(self.dtype).removeprefix("torch."),
            "source": self.source,
            "num_parameters": self.num_parameters,
        }
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        body = ",\n".join(f"    {json.dumps(layer)}" for layer in layers)
        lines += ['  "layers": [', body, "  ]"]
        if self.codecs:
            codecs = ",\n".join(f"    {json.dumps(codec.to_table())}" for codec in self.codecs)
            lines[-1] = "  ],"
            lines += ['  "codecs": [', codecs, "  ]"]
        return "\n".join(["{", *lines, "}", ""])

    @classmethod
    def load(cls, path: str | Path) -> Workload:
        """Read a JSON file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, ValueError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
            raise UsageError(f"cannot read the workload file {path}: {reason}.") from exc
        try:
            return cls.from_json(text)
        except UsageError as exc:
            raise UsageError(f"{path}: {exc}") from exc

    @classmethod
    def from_json(cls, text: str) -> Workload:
        """Read a JSON document; unknown or missing keys and values of a wrong type are refused."""
        where = "workload JSON"
        table = strict_json.read_object(
            strict_json.parse(text, where),
            where,
            required=("name", "batch", "source", "layers"),
            optional=("dtype", "num_parameters", "codecs"),
        )
        dtype = table.get("dtype", "float32")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise UsageError(
                f"{where}: there is no dtype {strict_json.shown(dtype)}. {did_you_mean(str(dtype), DTYPES)}"
            )
        layers = strict_json.read_list(
            table["layers"], f"{where}: layers", of='objects {"name": ..., "forward_s": ..., "backward_s": ...}'
        )
        codecs = strict_json.read_list(
            table.get("codecs", []), f"{where}: codecs", of='objects {"compressor": ..., "encode_startup_s": ...}'
        )
        made = cls(
            name=strict_json.read_text(table["name"], f"{where}: name"),
            batch=strict_json.read_whole(table["batch"], f"{where}: batch"),
            layers=tuple(_read_layer(layer, f"{where}: layers[{index}]") for index, layer in enumerate(layers)),
            source=strict_json.read_text(table["source"], f"{where}: source"),
            dtype=DTYPES[dtype],
            codecs=tuple(read_codec(codec, f"{where}: codecs[{index}]") for index, codec in enumerate(codecs)),
        )
        if "num_parameters" in table:
            stated = strict_json.read_whole(table["num_parameters"], f"{where}: num_parameters")
            if stated != made.num_parameters:
                raise UsageError(
                    f"{where}: num_parameters says {stated}, but the shapes add up to {made.num_parameters}. "
                    "Correct the shapes, or leave num_parameters out."
                )
        return made


def scaled_layers(layers: Sequence[Layer], *, compute_s: float) -> tuple[Layer, ...]:
    """The layers with all times multiplied by one factor, so that both passes take `compute_s` in sum."""
    factor = compute_s / math.fsum(layer.forward_s + layer.backward_s for layer in layers)
    return tuple(
        replace(layer, forward_s=layer.forward_s * factor, backward_s=layer.backward_s * factor) for layer in layers
    )


def _twice(names: Sequence[str]) -> str | None:
    """A name that stands more than once, if there is one."""
    ordered = sorted(names)
    return next((name for name, other in pairwise(ordered) if name == other), None)


def _read_layer(value: object, where: str) -> Layer:
    table = strict_json.read_object(value, where, required=("name", "forward_s", "backward_s"), optional=("tensors",))
    tensors = strict_json.read_list(
        table.get("tensors", []), f"{where}.tensors", of='objects {"name": ..., "shape": [...]}'
    )
    return Layer(
        name=strict_json.read_text(table["name"], f"{where}.name"),
        forward_s=strict_json.read_seconds(table["forward_s"], f"{where}.forward_s"),
        backward_s=strict_json.read_seconds(table["backward_s"], f"{where}.backward_s"),
        tensors=tuple(_read_tensor(tensor, f"{where}.tensors[{index}]") for index, tensor in enumerate(tensors)),
    )


def _read_tensor(value: object, where: str) -> TensorShape:
    table = strict_json.read_object(value, where, required=("name", "shape"))
    shape = strict_json.read_list(table["shape"], f"{where}.shape", of="whole numbers such as [64, 3, 7, 7]")
    return TensorShape(
        name=strict_json.read_text(table["name"], f"{where}.name"),
        shape=tuple(strict_json.read_whole(extent, f"{where}.shape[{index}]") for index, extent in enumerate(shape)),
    )
