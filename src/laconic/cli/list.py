"""`laconic list`: every method on every axis, and the presets.

With --json, one stable document:

    {"axes": {AXIS: [{"name": str, "summary": str, "wrapper": bool,
                      "partners": {AXIS: str},                            synchronization only: parts left off
                      "lossless": bool,                                   compression only, null for wrappers
                      "unbiased": bool, "wants_error_feedback": bool,     likewise
                      "keeps_residual": bool,                             likewise
                      "ratio": float,                                     likewise: times fewer bytes than fp32
                      "exact": bool,                                      likewise: false if that is the least
                      "loss_gap": float,                                  likewise: 0.02 is 2% above; null: not measured
                      "settings": [{"name": str, "kind": str, "default": value, "default_text": str,
                                    "allowed": str, "help": str}]}]},
     "questions": {AXIS: str},                                            what each axis decides
     "presets": [{"name": str, "strategy": str, "what": str, "loss": str}],
     "loss": str}                                                         how losses of presets were measured

AXIS is synchronization, architecture, compression, scheduling, in this order. A default is in the base unit (bytes,
seconds), so a number stays a number; a default that is a method is its text. A ratio is computed from the method's own
formulas with its defaults, for the tensors of GPT-2 and four workers, against a plain fp32 all-reduce. A loss gap
is what docs/results/convergence.md prints for text: how far the loss ends above that without compression.
"""

from __future__ import annotations

from rich.console import Group
from rich.text import Text

from laconic.cli.catalogue import Catalogue, MethodEntry, catalogue
from laconic.cli.options.list import Arguments
from laconic.cli.terminal import emit_json, emit_sections, plain_table, summary_with_settings

_NEAR = 0.02
"""A loss this far above the uncompressed one is as good as that; beyond it, the list says so."""


def run(arguments: Arguments) -> int:
    """Print the list."""
    found = catalogue()
    if arguments.json:
        emit_json(found)
    else:
        emit_sections(*(_axis_as_text(axis, found) for axis in found["axes"]), _presets_as_text(found), _last(found))
    return 0


def _axis_as_text(axis: str, found: Catalogue) -> Group:
    table = plain_table()
    for method in found["axes"][axis]:
        name = f"  + {method['name']}" if method["wrapper"] else f"  {method['name']}"
        summary = Text(method["summary"])
        for line in _properties(method):
            summary.append(f"\n{line}", style="dim")
        settings = {
            f"{setting['name']}={setting['default_text']}": ("one of: " if setting["kind"] == "choice" else "")
            + setting["allowed"]
            for setting in method["settings"]
        }
        table.add_row(Text(name, style="cyan", no_wrap=True), summary_with_settings(summary, settings))
    question, _, note = found["questions"][axis].partition("\n")
    title = Text.assemble((axis, "bold"), f": {question}")
    if note:
        title.append(f"\n{note}", style="dim")
    return Group(title, table)


def _properties(method: MethodEntry) -> list[str]:
    """What else there is to say about a method, in lines."""
    if method["wrapper"]:
        return ["A wrapper: write it after another method and a +."]
    if (ratio := method.get("ratio")) is not None:
        gap = method["loss_gap"]
        far = gap is not None and gap > _NEAR
        loss = [f"Loss {gap:+.1%} compared with no compression: docs/results/convergence.md."] if far else []
        return [_saving_and_cost(method, ratio), *loss]
    if partners := method.get("partners"):
        return [f"If left off: {', '.join(f'{other} {text}' for other, text in partners.items())}."]
    return []


def _saving_and_cost(method: MethodEntry, ratio: float) -> str:
    """What a compressor saves and what it costs, in a few words."""
    times = f"{ratio:.3g} times fewer bytes" if ratio >= 1 else f"{1 / ratio:.3g} times MORE bytes"
    words = [
        "the same number of bytes" if ratio == 1 else times if method["exact"] else f"at worst {times}",
        "lossless" if method["lossless"] else "unbiased" if method["unbiased"] else "biased",
    ]
    if method["keeps_residual"]:
        words.append("keeps a residual")
    elif method["wants_error_feedback"]:
        words.append("wants error_feedback")
    return ", ".join(words)


def _presets_as_text(found: Catalogue) -> Group:
    table = plain_table()
    for preset in found["presets"]:
        about = Text.assemble(f"{preset['strategy']}\n", (f"{preset['what']}\nLoss: {preset['loss']}", "dim"))
        table.add_row(Text(f"  {preset['name']}", style="cyan", no_wrap=True), about)
    title = Text.assemble(("presets", "bold"), ": strategies with a name of their own")
    title.append(f"\n  {found['loss']}", style="dim")
    return Group(title, table)


def _last(found: Catalogue) -> Text:
    return Text(
        f"A strategy names one method per axis:\n  {' / '.join(found['axes'])}\n"
        "Parts left off at the end take defaults: those of the synchronization, then\n  all_reduce / none / fusion\n"
        "Look at one with\n  laconic explain ddp-bf16"
    )
