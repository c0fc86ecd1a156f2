"""`laconic profile SCRIPT.py:FUNCTION`: measure a model's layers, and what compressors cost, into a workload file.

With --json, one stable document:

    {"workload": {...},                    as in the file, docs/workloads.md says what is in it
     "forward_factor": float, "backward_factor": float,        factors on the times measured with hooks
     "ready_error_s": float,               largest error of the time at which the workload has a gradient ready
     "notes": [str]}
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from laconic.cli.options.profile import Arguments
from laconic.cli.terminal import emit_json, emit_sections, plain_table
from laconic.compression import Compressor
from laconic.errors import UsageError
from laconic.experiments.codec_costs import measured_codec
from laconic.strategy import Strategy
from laconic.workload import CodecCost, Workload
from laconic.workload.device_time import DeviceTime
from laconic.workload.profiler import Profile, profile
from laconic.workload.script import explained, load_subject, script_path

if TYPE_CHECKING:
    from rich.console import RenderableType


def run(arguments: Arguments) -> int:
    """Measure, keep, print."""
    output = None if arguments.output is None else _checked(Path(arguments.output))
    compressors = list(dict.fromkeys(_compressor(text) for text in arguments.compressor))
    if arguments.steps < 1:
        raise UsageError(f"profile: --steps must be >= 1, got {arguments.steps}.")
    DeviceTime(torch.device(arguments.device))  # refuses a device that is not there, before anything is loaded
    measured = _profiled(arguments)
    if compressors:
        codecs = tuple(
            measured_codec(compressor, device=arguments.device, dtype=measured.workload.dtype)
            for compressor in compressors
        )
        measured = dataclasses.replace(measured, workload=dataclasses.replace(measured.workload, codecs=codecs))
    if output is not None:
        _write(output, measured.workload)
    if arguments.json:
        shown = {field.name: getattr(measured, field.name) for field in dataclasses.fields(measured)}
        emit_json({**shown, "workload": json.loads(measured.workload.to_json())})
    else:
        emit_sections(*_sections(measured, output))
    return 0


def _checked(path: Path) -> Path:
    """Check, before anything is measured, that the output file can be written and found by `workload()`."""
    if path.suffix.lower() != ".json":
        raise UsageError(f"profile: --output must end in .json, got {path}. Only such files are read as workloads.")
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(f"profile: --output {path} cannot be written: there is no folder {path.parent}.")
    return path


def _compressor(text: str) -> Compressor:
    return Strategy.from_table({"compression": text}).compression


def _profiled(arguments: Arguments) -> Profile:
    subject, path = load_subject(arguments.script), script_path(arguments.script)
    name = arguments.name or f"{path.stem}:{arguments.script.rpartition(':')[2]}"
    with explained(arguments.script, path):
        return profile(subject, name=name, device=arguments.device, steps=arguments.steps)


def _write(path: Path, workload: Workload) -> None:
    try:
        path.write_text(workload.to_json(), encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"cannot write the workload file {path}: {exc.strerror}.") from exc


def _sections(measured: Profile, output: Path | None) -> list[RenderableType]:
    from rich.text import Text

    workload = measured.workload
    sections: list[RenderableType] = [_layer_table(workload), Text(_told(measured))]
    if workload.codecs:
        sections.append(_codec_table(workload.codecs))
    if output is not None:
        sections.append(Text(f"Written to {output}. Replay it with: laconic replay --workload {output}"))
    return sections


def _layer_table(workload: Workload) -> RenderableType:
    """The layers in forward order, so that gradients become ready from the bottom up."""
    numbers = ("parameters", "forward ms", "backward ms", "ready at ms")
    table = plain_table("layer", *numbers, numbers=numbers)
    left_s = workload.backward_s
    for layer in workload.layers:
        count = sum(tensor.numel for tensor in layer.tensors)
        table.add_row(
            layer.name,
            f"{count:,}" if layer.tensors else "",
            f"{layer.forward_s * 1e3:.3f}",
            f"{layer.backward_s * 1e3:.3f}",
            f"{left_s * 1e3:.3f}" if layer.tensors else "",
        )
        left_s = max(0.0, left_s - layer.backward_s)
    table.add_row(
        "total",
        f"{workload.num_parameters:,}",
        f"{workload.forward_s * 1e3:.3f}",
        f"{workload.backward_s * 1e3:.3f}",
        "",
        style="bold",
    )
    return table


def _told(measured: Profile) -> str:
    return " ".join(
        [
            f"{measured.workload.batch} samples a step. Times of layers were multiplied by "
            f"{measured.forward_factor:.3f} forward and {measured.backward_factor:.3f} backward, so that they add up "
            "to passes without hooks. Seen through hooks, no gradient was complete more than "
            f"{measured.ready_error_s * 1e3:.3f} ms from where the table has it.",
            *measured.notes,
        ]
    )


def _codec_table(codecs: tuple[CodecCost, ...]) -> RenderableType:
    numbers = ("encode us", "+ us per MB", "decode us", "+ us per MB ")
    table = plain_table("compressor", *numbers, numbers=numbers)
    for codec in codecs:
        startups = codec.encode_startup_s * 1e6, codec.decode_startup_s * 1e6
        per_mb = codec.encode_byte_s * 1e12, codec.decode_byte_s * 1e12
        table.add_row(
            codec.compressor,
            f"{startups[0]:.1f}",
            f"{per_mb[0]:.1f}",
            f"{startups[1]:.1f}",
            f"{per_mb[1]:.1f}",
        )
    return table
