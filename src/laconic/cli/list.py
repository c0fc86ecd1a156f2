"""`laconic list`: every method on every axis, and the presets.

With --json, one stable document:

    {"axes": {AXIS: [{"name": str, "summary": str, "wrapper": bool,
                      "partners": {AXIS: str},                            synchronization only: parts left off
                      "lossless": bool,                                   compression only, null for wrappers
                      "unbiased": bool, "wants_error_feedback": bool,     likewise
                      "ratio": float,                                     likewise: times fewer bytes than fp32
                      "exact": bool,                                      likewise: false if that is the least
                      "loss_gap": float,                                  likewise: 0.02 is 2% above; null: not measured
                      "settings": [{"name": str, "kind": str, "default": value,
                                    "allowed": str, "help": str}]}]},
     "presets": [{"name": str, "strategy": str, "what": str}]}

AXIS is synchronization, architecture, compression, scheduling, in this order. A default is in the base unit (bytes,
seconds), so a number stays a number; a default that is a method is its text. A ratio is computed from the method's own
formulas with its defaults, for the tensors of GPT-2 and four workers, against a plain fp32 all-reduce. A loss gap
is what docs/results/convergence.md prints for text: how far the loss ends above that without compression.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache

from rich.console import Group
from rich.text import Text

from laconic.cli.loss_words import HOW_MEASURED, loss_in_words, what_keeps_it
from laconic.cli.terminal import emit_json, emit_sections, plain_table, summary_with_settings
from laconic.compression import Compressor, NoCompression, Wrapper
from laconic.core.tensor import TensorSpec
from laconic.settings import Method
from laconic.strategy import AXES, PRESETS, Strategy
from laconic.synchronization import Synchronization
from laconic.workload import workload

_MODEL = "gpt2"
_WORKERS = 4
_NEAR = 0.02
"""A loss this far above the uncompressed one is as good as that; beyond it, the list says so."""


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Show every method on each of the four axes with its settings, and the presets."""

    json: bool = False
    """Print JSON instead of tables."""


def run(arguments: Arguments) -> int:
    """Print the list."""
    if arguments.json:
        emit_json(
            {
                "axes": {axis: [_method_as_json(method) for method in registry] for axis, registry in AXES.items()},
                "presets": [{"name": name, "strategy": text, "what": what} for name, (text, what) in PRESETS.items()],
            }
        )
    else:
        emit_sections(*(_axis_as_text(axis) for axis in AXES), _presets_as_text(), _last_words())
    return 0


def _method_as_json(method: type[Method]) -> dict[str, object]:
    defaults = {field.name: field.default for field in dataclasses.fields(method)}
    helps = method.setting_help()
    entry: dict[str, object] = {
        "name": method.name,
        "summary": method.summary(),
        "wrapper": issubclass(method, Wrapper),
    }
    if issubclass(method, Synchronization):
        entry["partners"] = dict(method.partners)
    if issubclass(method, Compressor):
        # What a wrapper is like depends on what it wraps.
        compressor = None if issubclass(method, Wrapper) else method()
        traits = None if compressor is None else compressor.traits
        entry["lossless"] = traits and traits.lossless
        entry["unbiased"] = traits and traits.unbiased
        entry["wants_error_feedback"] = traits and traits.wants_error_feedback
        entry["ratio"] = compressor and _ratio(compressor)
        entry["exact"] = traits and traits.exact_bytes
        entry["loss_gap"] = traits and traits.loss_gap
    entry["settings"] = [
        {
            "name": key,
            "kind": setting.kind,
            "default": str(defaults[key]) if isinstance(defaults[key], Method) else defaults[key],
            "allowed": setting.allowed(),
            "help": helps[key],
        }
        for key, setting in method.declared().items()
    ]
    return entry


def _axis_as_text(axis: str) -> Group:
    registry = AXES[axis]
    table = plain_table()
    for method in registry:
        is_wrapper = issubclass(method, Wrapper)
        name = f"  + {method.name}" if is_wrapper else f"  {method.name}"
        summary = Text(method.summary())
        if is_wrapper:
            summary.append("\nA wrapper: write it after another method and a +.", style="dim")
        elif issubclass(method, Compressor):
            compressor = method()
            summary.append(f"\n{_properties(compressor)}", style="dim")
            gap = compressor.traits.loss_gap
            if gap is not None and gap > _NEAR:
                figure = f"{gap:+.1%}"
                summary.append(
                    f"\nLoss {figure} compared with no compression: docs/results/convergence.md.", style="dim"
                )
        elif issubclass(method, Synchronization) and method.partners:
            partners = ", ".join(f"{other} {text}" for other, text in method.partners.items())
            summary.append(f"\nIf left off: {partners}.", style="dim")
        defaults = {field.name: field.default for field in dataclasses.fields(method)}
        settings = {
            f"{key}={setting.show(defaults[key])}": ("one of: " if setting.kind == "choice" else "") + setting.allowed()
            for key, setting in method.declared().items()
        }
        table.add_row(Text(name, style="cyan", no_wrap=True), summary_with_settings(summary, settings))
    title = Text.assemble((axis, "bold"), f": {registry.contract.summary()}")
    if issubclass(registry.contract, Compressor):
        title.append(f"\n  Bytes compared with fp32, for the tensors of {_MODEL} and {_WORKERS} workers.", style="dim")
    return Group(title, table)


def _properties(compressor: Compressor) -> str:
    """What it saves and what it costs, in a few words."""
    ratio, traits = _ratio(compressor), compressor.traits
    times = f"{ratio:.3g} times fewer bytes" if ratio >= 1 else f"{1 / ratio:.3g} times MORE bytes"
    words = [
        "the same number of bytes" if ratio == 1 else times if traits.exact_bytes else f"at worst {times}",
        "lossless" if traits.lossless else "unbiased" if traits.unbiased else "biased",
    ]
    if traits.wants_error_feedback or traits.keeps_residual:
        words.append("keeps a residual" if traits.keeps_residual else "wants error_feedback")
    return ", ".join(words)


def _ratio(compressor: Compressor) -> float:
    """How many times fewer bytes it sends than fp32, from its own formulas."""
    tensors = _tensors()
    sent, plain = (
        Strategy(compression=method).wire_bytes_per_step(tensors, _WORKERS) for method in (compressor, NoCompression())
    )
    return plain / sent


@cache
def _tensors() -> tuple[TensorSpec, ...]:
    return workload(_MODEL).tensors


def _presets_as_text() -> Group:
    table = plain_table()
    for name, (text, what) in PRESETS.items():
        loss = loss_in_words(Strategy.parse(text))
        about = Text.assemble(f"{text}\n", (f"{what}\nLoss: {loss}", "dim"))
        table.add_row(Text(f"  {name}", style="cyan", no_wrap=True), about)
    title = Text.assemble(("presets", "bold"), ": strategies with a name of their own")
    title.append(f"\n  Loss {HOW_MEASURED}. {what_keeps_it()}", style="dim")
    return Group(title, table)


def _last_words() -> Text:
    return Text(
        f"A strategy names one method per axis:\n  {' / '.join(AXES)}\n"
        "Parts left off at the end take defaults: those of the synchronization, then\n  all_reduce / none / fusion\n"
        "Look at one with\n  laconic explain ddp-bf16"
    )
