"""`laconic list`: every method on every axis, and the presets.

Without arguments it is short: one line for each method, compressors by family with what they cost and what they are
good for. With search words or --family, the methods found are shown with their settings.

With --json, one stable document, which search words and --family filter as they filter the text:

    {"axes": {AXIS: [{"name": str, "summary": str, "wrapper": bool,
                      "family": str,                                      the axis, where it has no families
                      "good_for": str,                                    when to choose it; may be empty
                      "partners": {AXIS: str},                            synchronization only: parts left off
                      "lossless": bool,                                   compression only, null for wrappers
                      "unbiased": bool, "wants_error_feedback": bool,     likewise
                      "keeps_residual": bool,                             likewise
                      "ratio": float,                                     likewise: times fewer bytes than fp32
                      "exact": bool,                                      likewise: false if that is the least
                      "loss_gap": float,                                  likewise: 0.02 is 2% above; null: not measured
                      "loss_deviation": float,                            of loss_gap between seeds; null: one seed
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

from collections.abc import Iterable

from rich.console import Group
from rich.text import Text

from laconic.cli.catalogue import Catalogue, MethodEntry, catalogue
from laconic.cli.options.list import Arguments
from laconic.cli.terminal import emit_json, emit_sections, names_and_texts, plain_table, summary_with_settings
from laconic.errors import UnknownName, UsageError, did_you_mean, one_line
from laconic.units import human_factor

_NEAR = 0.02
"""A loss at most this share above the uncompressed one counts as equal; the list mentions a larger gap."""


def run(arguments: Arguments) -> int:
    """Print the list, or the part of it that was asked for."""
    everything = catalogue()
    chosen = bool(arguments.words or arguments.family)
    found = _part(everything, arguments) if chosen else everything
    if arguments.json:
        emit_json(found)
    elif chosen:
        axes = [_axis_as_text(axis, found) for axis, methods in found["axes"].items() if methods]
        emit_sections(*axes, *([_presets_as_text(found)] if found["presets"] else []))
    else:
        axes = [section for axis in found["axes"] for section in _overview(axis, found)]
        emit_sections(*axes, _presets_overview(found), _last(found))
    return 0


def _part(found: Catalogue, arguments: Arguments) -> Catalogue:
    """The methods of a family, and the presets, whose descriptions have all the words."""
    axes, words = found["axes"], [word.lower() for word in arguments.words]
    family = arguments.family.lower().replace("-", "_")
    families = list(dict.fromkeys(method["family"] for methods in axes.values() for method in methods))
    known = list(dict.fromkeys([*axes, *families]))
    if family and family not in known:
        raise UnknownName(f'list: there is no family "{one_line(family, 40)}". {did_you_mean(family, known)}')
    part = Catalogue(
        axes={
            axis: [
                method
                for method in methods
                if family in ("", axis, method["family"]) and _has_all(words, _described(method))
            ]
            for axis, methods in axes.items()
        },
        questions=found["questions"],
        presets=[
            preset
            for preset in found["presets"]
            if not family and _has_all(words, (preset["name"], preset["strategy"], preset["what"]))
        ],
        loss=found["loss"],
    )
    if not part["presets"] and not any(part["axes"].values()):
        said = f'"{one_line(" ".join(words), 60)}"' + (f" in the family {family}" if family else "")
        raise UsageError(f'no method or preset matches {said}. "laconic list" shows all of them.')
    return part


def _has_all(words: Iterable[str], texts: Iterable[str]) -> bool:
    whole = " ".join(texts).lower()
    return all(word in whole for word in words)


def _described(method: MethodEntry) -> list[str]:
    """All text about a method."""
    settings = [text for setting in method["settings"] for text in (setting["name"], setting["help"])]
    return [method["name"], method["family"], method["summary"], method["good_for"], *_properties(method), *settings]


def _overview(axis: str, found: Catalogue) -> list[Group]:
    """A short table of the methods of an axis, or one for each family."""
    methods = found["axes"][axis]
    question = Text.assemble((axis, "bold"), f": {found['questions'][axis].splitlines()[0]}")
    if not any("ratio" in method for method in methods):
        table = names_and_texts()
        for method in methods:
            table.add_row(_name(method), Text(method["good_for"] or method["summary"]))
        return [Group(question, table)]
    families: dict[str, list[MethodEntry]] = {}
    for method in methods:
        families.setdefault(method["family"], []).append(method)
    note = Text("\n".join([*found["questions"][axis].splitlines()[1:], *_NOTES]), style="dim")
    return [Group(question, note), *(_family_as_table(name, family) for name, family in families.items())]


_NOTES = (
    "  bits: what a worker sends for one value, where an fp32 all-reduce sends 32.",
    "  loss: how far it ended above no compression; *: with error_feedback.",
)


def _family_as_table(name: str, family: list[MethodEntry]) -> Group:
    costs = not all(method["wrapper"] for method in family)
    table = plain_table(*(("", "bits", "loss", "good for") if costs else ("", "good for")), numbers=("bits", "loss"))
    for method in family:
        columns = (Text(_bits(method)), Text(_loss(method))) if costs else ()
        table.add_row(_name(method), *columns, Text(method["good_for"] or method["summary"]))
    return Group(Text(f"  {name}", style="bold"), table)


def _name(method: MethodEntry) -> Text:
    return Text(f"  + {method['name']}" if method["wrapper"] else f"  {method['name']}", style="cyan", no_wrap=True)


def _bits(method: MethodEntry) -> str:
    ratio = method["ratio"]
    if ratio is None:
        return ""
    return f"{'' if method['exact'] else '<= '}{32 / ratio:.3g}"


def _loss(method: MethodEntry) -> str:
    if method["lossless"]:
        return "0"
    gap = method["loss_gap"]
    return "not measured" if gap is None else f"{gap:+.1%}{'*' if method['wants_error_feedback'] else ' '}"


def _presets_overview(found: Catalogue) -> Group:
    table = names_and_texts()
    for preset in found["presets"]:
        table.add_row(Text(f"  {preset['name']}", style="cyan", no_wrap=True), Text(preset["what"]))
    return Group(Text.assemble(("presets", "bold"), ": strategies with a name of their own"), table)


def _axis_as_text(axis: str, found: Catalogue) -> Group:
    table = names_and_texts()
    for method in found["axes"][axis]:
        summary = Text(method["summary"])
        if method["good_for"]:
            summary.append(f"\nGood for {method['good_for']}.")
        for line in _properties(method):
            summary.append(f"\n{line}", style="dim")
        settings = {
            f"{setting['name']}={setting['default_text']}": ("one of: " if setting["kind"] == "choice" else "")
            + setting["allowed"]
            for setting in method["settings"]
        }
        table.add_row(_name(method), summary_with_settings(summary, settings))
    question, _, note = found["questions"][axis].partition("\n")
    title = Text.assemble((axis, "bold"), f": {question}")
    if note:
        title.append(f"\n{note}", style="dim")
    return Group(title, table)


def _properties(method: MethodEntry) -> list[str]:
    """Further facts about a method, in lines."""
    if method["wrapper"]:
        return ["A wrapper: write it after another method and a +."]
    if (ratio := method.get("ratio")) is not None:
        gap = method["loss_gap"]
        far = gap is not None and gap > _NEAR
        spread = "" if method["loss_deviation"] is None else f" (+-{method['loss_deviation']:.1%} between seeds)"
        loss = [f"Loss {gap:+.1%}{spread} compared with no compression: docs/results/convergence.md."] if far else []
        unknown = ["Loss not measured."] if gap is None and not method["lossless"] else []
        return [_saving_and_cost(method, ratio), *loss, *unknown]
    if partners := method.get("partners"):
        return [f"If left off: {', '.join(f'{other} {text}' for other, text in partners.items())}."]
    return []


def _saving_and_cost(method: MethodEntry, ratio: float) -> str:
    """The savings and costs of a compressor, in a few words."""
    times = f"{human_factor(ratio)} times fewer bytes" if ratio >= 1 else f"{human_factor(1 / ratio)} times MORE bytes"
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
    table = names_and_texts()
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
        "Look for methods, with their settings, by words or by family with\n"
        "  laconic list sparse    laconic list --family quantization\n"
        "and look at a strategy with\n  laconic explain ddp-bf16"
    )
