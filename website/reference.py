"""The reference: one entry for every public name, from its signature and docstrings.

docs/api.md says which names are public and in which section each belongs; its tables are read here, so a name that is
added there gets an entry. A heading "## Title" becomes a page; under "## Methods" each axis becomes one.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path

import laconic
from laconic.settings import Method

API = Path(__file__).resolve().parent.parent / "docs" / "api.md"
_ROW = re.compile(r"^\| `([\w.]+)` \|")
_ARXIV = re.compile(r"(?<![\w/])(?:arXiv:)?(\d{4}\.\d{5})(?!\w)")
_OTHER_MEMBERS = ("name", "declared", "settings", "changed_settings", "setting_help", "summary")
"""What a method has from its base class: every entry would repeat it."""


@dataclasses.dataclass
class Section:
    """One page of the reference."""

    title: str
    introduction: str
    names: list[str] = dataclasses.field(default_factory=list)

    @property
    def path(self) -> str:
        """Where the page lies on the site."""
        return f"reference/{re.sub(r'[^a-z]+', '-', self.title.lower())}.md"


@cache
def sections() -> tuple[Section, ...]:
    """The sections of docs/api.md, with the names in each."""
    found: list[Section] = []
    for line in API.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## (.+)", line):
            found.append(Section(heading[1], ""))
        elif axis := re.match(r"(Synchronization|Architecture|Compression|Scheduling), (.+):$", line):
            found.append(Section(axis[1], f"{axis[2][0].upper()}{axis[2][1:]}."))
        elif row := _ROW.match(line):
            found[-1].names.append(row[1])
    return tuple(section for section in found if section.names)


def pages() -> dict[str, str]:
    """The text of every page of the reference, by its path."""
    return {section.path: page(section) for section in sections()}


def link_names(markdown: str) -> str:
    """The text of docs/api.md with every name linked to its entry."""
    homes = {name: section.path for section in sections() for name in section.names}
    return re.sub(
        _ROW.pattern, lambda row: f"| [`{row[1]}`]({homes[row[1]]}#{_anchor(row[1])}) |", markdown, flags=re.MULTILINE
    )


def page(section: Section) -> str:
    """The text of one page of the reference."""
    lines = [f"# {section.title}", "", section.introduction, ""]
    for name in section.names:
        lines += [f"## {name.rpartition('.')[2]} {{#{_anchor(name)}}}", "", *_entry(name), ""]
    return "\n".join(lines)


def _anchor(name: str) -> str:
    return name.rpartition(".")[2].strip("_").lower()


def _entry(name: str) -> Iterator[str]:
    home, _, last = name.rpartition(".")
    value = getattr(importlib.import_module(home or "laconic"), last)
    if isinstance(value, str):
        yield f"`laconic.{last} = {value!r}`"
        return
    import_line = f"from {home or 'laconic'} import {last}"
    yield from ("```python", import_line, "```", "")
    if inspect.isclass(value):
        yield from _class(value)
    else:
        yield from _code(_signature(last, value))
        yield from _prose(value)


def _class(value: type) -> Iterator[str]:
    base = value.__bases__[0]
    if issubclass(value, BaseException) or base in _documented():
        yield f"Base: {_to_entry(base)}"
        yield ""
    is_method = issubclass(value, Method) and not inspect.isabstract(value) and "name" in vars(value)
    if is_method:
        yield f"In strategy text: `{value.name}`"  # pyrefly: ignore
        yield ""
    yield from _prose(value)
    if is_method:
        yield from _settings(value)
        return
    yield from _fields(value)
    for name, member in _members(value):
        anchor = f"{_anchor(value.__name__)}-{name.strip('_').lower()}"
        yield f'### {value.__name__}.{name} {{#{anchor} data-toc-label="{name}"}}'
        yield ""
        if inspect.isroutine(member):
            yield from _code(_signature(name, member))
        yield from _prose(member)


@cache
def _documented() -> dict[type, str]:
    """The public classes, with the page and anchor of each."""
    return {
        value: f"{section.path.removeprefix('reference/')}#{_anchor(name)}"
        for section in sections()
        for name in section.names
        if "." not in name and inspect.isclass(value := getattr(laconic, name))
    }


def _to_entry(value: type) -> str:
    there = _documented().get(value)
    return f"`{value.__name__}`" if there is None else f"[`{value.__name__}`]({there})"


def _owners(value: type) -> Iterator[type]:
    """The classes whose members an entry shows: up to a base class that has an entry of its own."""
    for owner in value.__mro__:
        if owner is not value and owner in _documented():
            return
        if owner.__module__.startswith("laconic"):
            yield owner


def _members(value: type) -> Iterator[tuple[str, object]]:
    """Public methods and properties with a docstring, those of laconic's base classes included."""
    seen: set[str] = set(_OTHER_MEMBERS) if issubclass(value, Method) else set()
    for owner in _owners(value):
        for name, member in vars(owner).items():
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            plain = member.__func__ if isinstance(member, classmethod | staticmethod) else member
            plain = plain.func if isinstance(plain, cached_property) else plain
            kept = isinstance(member, property | cached_property)
            if (inspect.isroutine(plain) or kept) and inspect.getdoc(plain):
                yield name, property(plain) if isinstance(member, cached_property) else plain


def _settings(method: type[Method]) -> Iterator[str]:
    """A table of the settings of a method."""
    helps = method.setting_help()
    defaults = {field.name: field.default for field in dataclasses.fields(method)}  # pyrefly: ignore
    if not helps:
        yield "No settings."
        return
    yield "| setting | default | allowed | meaning |"
    yield "|---|---|---|---|"
    for key, setting in method.declared().items():
        default = setting.show(defaults[key])  # pyrefly: ignore
        cells = (f"`{key}`", f"`{default}`" if default else "none", setting.allowed(), helps[key])
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _fields(value: type) -> Iterator[str]:
    """A table of the documented fields of a class."""
    rows = dict(reversed([row for owner in _owners(value) for row in reversed(_documented_fields(owner))]))
    if not rows:
        return
    yield "| field | meaning |"
    yield "|---|---|"
    for name, text in rows.items():
        yield f"| `{name}` | {_linked(text).replace('|', chr(92) + '|')} |"
    yield ""


def _documented_fields(owner: type) -> list[tuple[str, str]]:
    """Annotated names in the body of a class that a docstring follows."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    assert isinstance(tree, ast.ClassDef)
    return [
        (field.target.id, " ".join(text.value.value.split()))
        for field, text in zip(tree.body, tree.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and not field.target.id.startswith("_")
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    ]


def _signature(name: str, function: object) -> str:
    """The signature as it would be written, one parameter per line where one line is too long."""
    signature = inspect.signature(function)  # pyrefly: ignore
    parameters = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    signature = signature.replace(parameters=parameters)
    line = re.sub(r"'([^']*)'", r"\1", f"{name}{signature}") if "'" in str(signature) else f"{name}{signature}"
    if len(line) <= 76:
        return line
    kinds, rows = [p.kind for p in parameters], []
    for place, parameter in enumerate(parameters):
        if parameter.kind == parameter.KEYWORD_ONLY and parameter.KEYWORD_ONLY not in kinds[:place]:
            rows.append("    *,")
        rows.append(f"    {re.sub(chr(39), '', str(parameter))},")
    returned = signature.return_annotation
    arrow = "" if returned is signature.empty else f" -> {returned}"
    return "\n".join([f"{name}(", *rows, f"){arrow}"])


def _code(text: str) -> Iterator[str]:
    yield from ("```python", text, "```", "")


def _prose(value: object) -> Iterator[str]:
    """A docstring as Markdown: indented formulas stay as they are, and arguments become a list."""
    names: set[str] = set()
    if inspect.isfunction(value):
        names = set(inspect.signature(value).parameters)
    elif inspect.isclass(value) and "__init__" in vars(value):
        names = set(inspect.signature(value.__init__).parameters)
    within = False
    for line in _docstring(value).splitlines():
        argument = re.match(r"(\w+): (.*)", line)
        if argument and argument[1] in names:
            if not within:
                yield ""
            within = True
            yield f"- `{argument[1]}`: {_linked(argument[2])}"
        elif within and line.startswith("    "):
            yield f"  {_linked(line.strip())}"
        elif line.startswith("    "):
            yield line
        elif _is_formula(line):
            yield f"    {line}"
        else:
            if within:
                yield ""
            within = False
            yield _linked(line)
    yield ""


def _is_formula(line: str) -> bool:
    """Whether a line is a formula without indentation, which ruff takes from a docstring that has no other text."""
    return re.match(r"[\w ]+ = ", line) is not None and not line.endswith(".")


def _docstring(value: object) -> str:
    """The docstring without the indentation of its code; inspect would take that of a lone formula for it."""
    own = getattr(value, "__doc__", None)
    if not own:  # an overriding method without one has that of its contract
        return inspect.getdoc(value) or ""
    first, _, rest = own.partition("\n")
    margin = len(rest) - len(rest.rstrip(" ")) if rest.rstrip(" ").endswith("\n") else 0
    return "\n".join([first, *(line[margin:] for line in rest.splitlines())]).strip("\n")


def _linked(text: str) -> str:
    """Numbers of arXiv as links."""
    return _ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)
