"""The catalogue, from the classes of the methods: `python -m laconic.cli.method_facts` writes catalogue.json anew."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from typing import Any

from laconic.cli.catalogue import PATH, Catalogue, MethodEntry, PresetEntry, SettingEntry
from laconic.cli.loss_words import HOW_MEASURED, loss_in_words, what_keeps_it
from laconic.compression import Compressor, NoCompression, Wrapper
from laconic.core.tensor import TensorSpec
from laconic.settings import Method
from laconic.strategy import AXES, PRESETS, Strategy
from laconic.synchronization import Synchronization
from laconic.workload import workload

MODEL = "gpt2"
"""The workload whose tensors ratios are computed for."""
WORKERS = 4


def describe() -> Catalogue:
    """Every method and preset that is installed."""
    return Catalogue(
        axes={axis: [_method(method) for method in registry] for axis, registry in AXES.items()},
        questions={axis: _question(axis) for axis in AXES},
        presets=[_preset(name) for name in PRESETS],
        loss=f"Loss {HOW_MEASURED}. {what_keeps_it()}",
    )


def _question(axis: str) -> str:
    """What the axis decides."""
    contract = AXES[axis].contract
    if not issubclass(contract, Compressor):
        return contract.summary()
    return f"{contract.summary()}\n  Bytes compared with fp32, for the tensors of {MODEL} and {WORKERS} workers."


def _method(method: type[Method]) -> MethodEntry:
    entry = MethodEntry(
        name=method.name,
        family=method.family or method.axis,
        summary=method.summary(),
        good_for=method.good_for,
        wrapper=issubclass(method, Wrapper),
    )
    if issubclass(method, Synchronization):
        entry["partners"] = dict(method.partners)
    if issubclass(method, Compressor):
        # The properties of a wrapper depend on the method it wraps.
        compressor = None if issubclass(method, Wrapper) else method()
        traits = None if compressor is None else compressor.traits
        entry["lossless"] = None if traits is None else traits.lossless
        entry["unbiased"] = None if traits is None else traits.unbiased
        entry["wants_error_feedback"] = None if traits is None else traits.wants_error_feedback
        entry["keeps_residual"] = None if traits is None else traits.keeps_residual
        entry["ratio"] = None if compressor is None else _ratio(compressor)
        entry["exact"] = None if traits is None else traits.exact_bytes
        entry["loss_gap"] = None if traits is None else traits.loss_gap
        entry["loss_deviation"] = None if traits is None else traits.loss_deviation
    entry["settings"] = _settings(method)
    return entry


def _settings(method: type[Method]) -> list[SettingEntry]:
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(method)}
    helps = method.setting_help()
    return [
        SettingEntry(
            name=key,
            kind=setting.kind,
            default=str(defaults[key]) if isinstance(defaults[key], Method) else defaults[key],
            default_text=setting.show(defaults[key]),
            allowed=setting.allowed(),
            help=helps[key],
        )
        for key, setting in method.declared().items()
    ]


def _ratio(compressor: Compressor) -> float:
    """How many times fewer bytes the compressor sends than fp32, from its own formulas."""
    sent, plain = (
        Strategy(compression=method).wire_bytes_per_step(_tensors(), WORKERS)
        for method in (compressor, NoCompression())
    )
    return plain / sent


@cache
def _tensors() -> tuple[TensorSpec, ...]:
    return workload(MODEL).tensors


def _preset(name: str) -> PresetEntry:
    text, what = PRESETS[name]
    return PresetEntry(name=name, strategy=text, what=what, loss=loss_in_words(Strategy.parse(text)))


if __name__ == "__main__":
    PATH.write_text(json.dumps(describe(), indent=1) + "\n", encoding="utf-8")
