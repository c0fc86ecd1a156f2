"""Strategy text as a tree of calls, before any name is looked up.

strategy  = axis { "/" axis }
axis      = call { "+" call }
call      = name [ "(" [ argument { "," argument } ] ")" ]
argument  = [ name "=" ] value
value     = a word: letters, digits and . _ % + - (so 25MiB, 1e-3 and 5ms are words), a quoted string, or a call
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from laconic.errors import SyntaxProblem, one_line

_TOKEN = re.compile(
    r"""\s*(?:(?P<word>[-.]?\d[\w.]*(?:(?<=[eE])[+-]\d\w*)?%?|[A-Za-z_][\w.-]*)
         |(?P<string>"[^"\n]*"|'[^'\n]*')
         |(?P<mark>[/+(),=]))""",
    re.VERBOSE,
)
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_LIMIT = 2000
"""No strategy is this long; text that is was pasted by mistake."""
_DEPTH = 3
"""The deepest nesting of calls; no strategy needs more."""


@dataclass(frozen=True)
class Call:
    """A name with its arguments as written; positional arguments have no key."""

    name: str
    arguments: tuple[tuple[str | None, str | Call], ...] = ()

    def __str__(self) -> str:
        written = ", ".join(f"{key}={value}" if key else str(value) for key, value in self.arguments)
        return f"{self.name}({written})"


def parse_text(text: str) -> list[list[Call]]:
    """The calls of each axis, in the order written."""
    return _Parser(text).strategy()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        if len(text) > _LIMIT:
            raise SyntaxProblem(f"strategy text must be at most {_LIMIT} characters, got {len(text)}.")
        self._tokens: list[tuple[str, str, int]] = []
        position = 0
        while position < len(text.rstrip()):
            match = _TOKEN.match(text, position)
            if match is None or match.lastgroup is None:
                position += len(text[position:]) - len(text[position:].lstrip())
                raise self._problem(f"unexpected {text[position]!r}", position)
            self._tokens.append((match.lastgroup, match[match.lastgroup], match.start(match.lastgroup)))
            position = match.end()
        self._next = 0

    def _problem(self, what: str, position: int | None = None) -> SyntaxProblem:
        if position is None:
            position = self._tokens[self._next][2] if self._next < len(self._tokens) else len(self._text)
        return SyntaxProblem(
            f'strategy "{one_line(self._text, 100)}", character {position + 1}: {what}. '
            'Write e.g. "bsp / all_reduce / fp16 + error_feedback / fusion(bytes=25MiB)".'
        )

    def _peek(self, mark: str) -> bool:
        return self._next < len(self._tokens) and self._tokens[self._next][:2] == ("mark", mark)

    def _take(self, mark: str) -> bool:
        if self._peek(mark):
            self._next += 1
            return True
        return False

    def _word(self, expected: str, *, quoted: bool = False) -> str:
        if self._next < len(self._tokens):
            kind, value, _ = self._tokens[self._next]
            if kind == "word" or (quoted and kind == "string"):
                self._next += 1
                return value[1:-1] if kind == "string" else value
            raise self._problem(f"expected {expected}, found {value!r}")
        raise self._problem(f"expected {expected}, found the end")

    def strategy(self) -> list[list[Call]]:
        axes = [self._axis()]
        while self._take("/"):
            axes.append(self._axis())
        if self._next < len(self._tokens):
            raise self._problem(f"expected '/' or the end, found {self._tokens[self._next][1]!r}")
        return axes

    def _axis(self) -> list[Call]:
        calls = [self._call()]
        while self._take("+"):
            calls.append(self._call())
        return calls

    def _call(self, depth: int = 1) -> Call:
        if depth > _DEPTH:
            raise self._problem(f"more than {_DEPTH} methods inside each other")
        name = self._word("a method name")
        if not _NAME.fullmatch(name):
            self._next -= 1
            raise self._problem(f"expected a method name, found {name!r}")
        arguments: list[tuple[str | None, str | Call]] = []
        if self._take("(") and not self._take(")"):
            arguments.append(self._argument(arguments, depth))
            while self._take(","):
                arguments.append(self._argument(arguments, depth))
            if not self._take(")"):
                raise self._problem("expected ',' or ')'")
        return Call(name, tuple(arguments))

    def _argument(self, earlier: list[tuple[str | None, str | Call]], depth: int) -> tuple[str | None, str | Call]:
        value = self._value("a setting", depth)
        if isinstance(value, Call) or not self._take("="):
            if any(key is not None for key, _ in earlier):
                raise self._problem("a value without a name must come before named settings")
            return None, value
        if any(key == value for key, _ in earlier):
            raise self._problem(f"{value!r} is set twice")
        return value, self._value(f"a value for {value!r}", depth)

    def _value(self, expected: str, depth: int) -> str | Call:
        begin = self._next
        value = self._word(expected, quoted=True)
        if not self._peek("("):
            return value
        self._next = begin
        return self._call(depth + 1)
