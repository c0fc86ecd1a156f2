"""Files of a run in which values have types they cannot have: an error that names file and key, or a page that says
what is missing. Never a traceback."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.cli import main
from laconic.errors import LaconicError
from laconic.report import standalone_html
from laconic.report.page import render
from laconic.report.run_folder import RunFolder
from tests.report.run_folders import SIX, make_run

HUGE = 10**400
"""No float holds it."""
DEEP = 900
NO_NUMBERS = (None, True, "x", "", "\ud800", [], {}, [[]], {"a": 1})
WRONG = (*NO_NUMBERS, 0, -1, 0.5, 10**30, HUGE, 1e308, float("nan"), float("inf"))
Place = tuple[str | int, ...]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFolder]:
    """A small run; its page carries no plotting library, which takes most of the time to write."""
    with patch.object(standalone_html, "plotly_script", lambda: ""):
        yield make_run(tmp_path_factory.mktemp("run") / "run", strategies=SIX[:3], steps=8, num_buckets=2)


def places(value: object, place: Place = ()) -> Iterator[Place]:
    """Where values stand in a document; of a long list, in the first three."""
    if place:
        yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*place, key))


def replaced(document: object, place: Place, value: object) -> object:
    """The document with another value in one place."""
    changed = copy.deepcopy(document)
    inside = changed
    for key in place[:-1]:
        inside = inside[key]  # pyrefly: ignore[bad-index]
    inside[place[-1]] = value  # pyrefly: ignore[unsupported-operation]
    return changed


def outcome(folder: RunFolder) -> tuple[str, str]:
    """The page, or the error; anything else than a LaconicError fails."""
    try:
        text = render([folder])
    except LaconicError as exc:
        return "", str(exc)
    text.encode()
    return text, ""


@pytest.mark.slow
@settings(max_examples=120)
@given(data=st.data())
def test_results(folder: RunFolder, data: st.DataObject) -> None:
    text = folder.read_text("results.json")
    original = json.loads(text)
    place = data.draw(st.sampled_from(list(places(original))))
    value = data.draw(st.sampled_from(WRONG))
    try:
        folder.write_text("results.json", json.dumps(replaced(original, place, value)))
        written, error = outcome(folder)
        assert written or str(folder.path / "results.json") in error
        if error and place[0] != "format":
            # Lists within a curve may also differ in length.
            assert str(place[0]) in error
    finally:
        folder.write_text("results.json", text)


@pytest.mark.slow
@settings(max_examples=50)
@given(data=st.data())
def test_events(folder: RunFolder, data: st.DataObject) -> None:
    text = folder.read_text("events.jsonl")
    lines = text.splitlines(keepends=True)
    number = data.draw(st.integers(0, len(lines) - 1))
    event = json.loads(lines[number])
    key = data.draw(st.sampled_from(sorted(event)))
    value = data.draw(st.sampled_from(WRONG))
    lines[number] = json.dumps({**event, key: value}) + "\n"
    try:
        folder.write_text("events.jsonl", "".join(lines))
        written, error = outcome(folder)
        assert written, error
        if isinstance(value, list | dict) or value in ("\ud800", HUGE):
            assert f"events.jsonl cannot be read: line {number + 1} is not an event record" in written
            assert key in written
    finally:
        folder.write_text("events.jsonl", text)


@pytest.mark.slow
@settings(max_examples=30)
@given(data=st.data())
def test_environment(folder: RunFolder, data: st.DataObject) -> None:
    text = folder.read_text("env.json")
    original = json.loads(text)
    place = data.draw(st.sampled_from(list(places(original))))
    value = data.draw(st.sampled_from(WRONG))
    try:
        folder.write_text("env.json", json.dumps(replaced(original, place, value)))
        written, error = outcome(folder)
        assert written, error
    finally:
        folder.write_text("env.json", text)


@pytest.mark.parametrize("text", ['{"a":' * DEEP + "1" + "}" * DEEP, '{"a":' + "[" * DEEP + "]" * DEEP + "}", "[]"])
def test_an_environment_that_is_nested_too_deep_is_left_out(folder: RunFolder, text: str) -> None:
    kept = folder.read_text("env.json")
    try:
        folder.write_text("env.json", text)
        written, error = outcome(folder)
        assert "The environment is missing, env.json cannot be read" in written, error
    finally:
        folder.write_text("env.json", kept)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ((("title",), ["a"]), "title must be text, got a list"),
        ((("seconds",), "x"), 'seconds must be a number, got "x"'),
        ((("rows", 0, "step_ms"), "fast"), 'rows[0]: step_ms must be a number, got "fast"'),
        ((("rows", 0, "step_ms"), None), "rows[0]: step_ms must be a number, got null"),
        pytest.param(
            (("rows", 1, "wire_bytes_per_step"), HUGE), "wire_bytes_per_step must be a whole number", id="huge"
        ),
        ((("rows", 1, "links"), "weird"), 'links must be "shaped" or "paced" or "unlimited", got "weird"'),
        ((("rows", 1), 3), "rows[1] must be an object, got 3"),
        ((("curves", 0, "loss"), [1.0]), "curves[0]: step, loss, seconds and wire_bytes differ in length"),
        ((("curves", 0, "seconds"), "abc"), "curves[0]: seconds must be a list"),
        ((("advice",), [1]), "advice[0] must be text, got 1"),
        ((("other",), 1), 'the key "other" is not known'),
    ],
)
def test_the_command_names_file_and_key(
    folder: RunFolder, wrong: tuple[Place, object], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = replaced(json.loads(folder.read_text("results.json")), *wrong)
    RunFolder(tmp_path).write_text("results.json", json.dumps(document))
    for words in ([], ["--json"]):
        assert main(["report", str(tmp_path), *words]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert "results.json: " in captured.err
        assert told in captured.err
