"""The grammar alone: which texts are which calls."""

from __future__ import annotations

import pytest

from laconic.errors import SyntaxProblem
from laconic.grammar import Call, parse_text


def test_calls_arguments_and_wrappers() -> None:
    assert parse_text("a / b(1, k=v) + c() + d / e") == [
        [Call("a")],
        [Call("b", ((None, "1"), ("k", "v"))), Call("c"), Call("d")],
        [Call("e")],
    ]


@pytest.mark.parametrize(
    "word",
    [
        "25MiB",
        "1e-3",
        "5ms",
        "1e-07s",
        "2.5e-3MiB",
        "1E+9",
        "1e+16",
        "-1",
        "-2.5e-8",
        ".5",
        "1%",
        "0.1%",
        "1_000",
        "26214400",
    ],
)
def test_a_quantity_is_one_word(word: str) -> None:
    assert parse_text(f"m({word}, k={word})") == [[Call("m", ((None, word), ("k", word)))]]


@pytest.mark.parametrize("text", ['m("a b/c+d(e)")', "m('a b/c+d(e)')"])
def test_quotes_hold_anything(text: str) -> None:
    assert parse_text(text) == [[Call("m", ((None, "a b/c+d(e)"),))]]


def test_a_value_may_be_a_call() -> None:
    inner = Call("n", ((None, "7"), ("k", "v")))
    assert parse_text("m(n(7, k=v))") == [[Call("m", ((None, inner),))]]
    assert parse_text("m(1, k=n(7, k=v), l=n()) + o") == [
        [Call("m", ((None, "1"), ("k", inner), ("l", Call("n")))), Call("o")]
    ]
    assert str(inner) == "n(7, k=v)"
    assert parse_text("a(b(c))") == [[Call("a", ((None, Call("b", ((None, "c"),))),))]]


@pytest.mark.parametrize(
    "text", ["m(n(1)=2)", "m(k=n(1) n)", "m(7(1))", "m('a'(1))", "m(n(1)", "m(n + o)", "a(a(a(a(1))))"]
)
def test_refused_calls_within_calls(text: str) -> None:
    with pytest.raises(SyntaxProblem) as caught:
        parse_text(text)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("text", ["m(1e-3+c)", "m(1e-)", "m('a\nb')", 'm("a)', "m(=1)", "m(k==1)", "m((1))", "1e-3"])
def test_refused(text: str) -> None:
    with pytest.raises(SyntaxProblem) as caught:
        parse_text(text)
    assert len(str(caught.value).splitlines()) == 1
