"""The scripts of the pages: nothing is written twice, numbers are written in one place, and the page stays small."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from itertools import combinations
from pathlib import Path

import pytest

from laconic.report.page import render
from laconic.report.sentences import milliseconds
from laconic.report.standalone_html import SHARED_SCRIPTS, plotly_script, resource
from laconic.units import human_bytes
from tests.report.chromium import Chromium, find_chromium
from tests.report.run_folders import TEN, make_run

PROGRAM = find_chromium()
SCRIPTS = (*SHARED_SCRIPTS, "elastic_page.js", "page.js", "plan_page.js", "schedule_page.js", "sweep_page.js")
TEMPLATES = (
    "standalone.html.jinja",
    "parts.html.jinja",
    "elastic_page.html.jinja",
    "page.html.jinja",
    "plan_page.html.jinja",
    "schedule_page.html.jinja",
    "sweep_page.html.jinja",
)
LARGEST_PAGE_BYTES = 2_000_000


def lines(text: str) -> list[str]:
    """Lines that say something: no blank ones, and none of brackets or a return alone."""
    stripped = (line.strip() for line in text.splitlines())
    return [line for line in stripped if len(re.findall(r"\w", line)) >= 6 and line != "return null;"]


def copies(one: str, other: str, num_lines: int) -> set[tuple[str, ...]]:
    """So many lines, one after the other, that two texts share."""

    def runs(text: str) -> Iterator[tuple[str, ...]]:
        said = lines(text)
        return (tuple(said[at : at + num_lines]) for at in range(len(said) - num_lines + 1))

    return set(runs(one)) & set(runs(other))


def test_a_copy_is_found_whatever_its_indentation() -> None:
    body = "const a = first(1);\n\nconst b = second(a);\n}\nconst c = third(b);\n"
    assert copies(body, "start();\n" + body.replace("const", "    const"), 3)
    assert not copies(body, body.replace("second", "another"), 3)


# Tables of two pages begin and end alike, in markup that says nothing by itself.
@pytest.mark.parametrize(("names", "num_lines"), [(SCRIPTS, 3), (TEMPLATES, 6)])
def test_no_lines_are_copied_from_one_file_to_another(names: tuple[str, ...], num_lines: int) -> None:
    for one, other in combinations(names, 2):
        assert not copies(resource(one), resource(other), num_lines), f"{one} and {other}"


def test_every_script_and_template_is_looked_at() -> None:
    found = {entry.name for entry in files("laconic.report").iterdir() if entry.name.endswith((".js", ".jinja"))}
    assert found == {*SCRIPTS, *TEMPLATES}


@pytest.mark.parametrize("page_name", ["page.js", "plan_page.js", "sweep_page.js"])
def test_pages_format_no_sizes_and_times_of_their_own(page_name: str) -> None:
    text = resource(page_name)
    assert not re.findall(r'"(?:[KMGT]iB|min)"|toLocaleString|toPrecision\(3\)', text)


def test_plotly_comes_with_its_licence_and_in_the_version_on_record() -> None:
    version = re.search(r"plotly\.js \(basic - minified\) v([\d.]+)", plotly_script())
    assert version is not None
    assert "MIT License" in resource("plotly/LICENSE")
    root = Path(__file__).parents[2]
    record = (root / "docs" / "decisions" / "0023-a-part-of-plotly-js.md").read_text(encoding="utf-8")
    assert f"`plotly.js-basic-dist-min` {version[1]}" in record
    assert "src/laconic/report/plotly/LICENSE" in (root / "pyproject.toml").read_text(encoding="utf-8")


def test_plotly_cannot_end_its_element() -> None:
    assert "</script" not in plotly_script().lower()
    assert "<!--" not in plotly_script()


def test_the_page_of_a_long_run_is_below_two_megabytes(tmp_path: Path) -> None:
    links = ("100mbit", "1gbit", "10gbit")
    run = make_run(tmp_path / "run", strategies=TEN, links=links, steps=200)
    text = render([run])
    assert text.count('class="plot"') == 6
    assert len(text.encode()) < LARGEST_PAGE_BYTES


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="no Chromium here; apt-get install chromium")
def test_figures_write_numbers_as_tables_do(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(render([make_run(tmp_path / "run", steps=4)]), encoding="utf-8")
    times = [0, 0.004, 0.0123, 0.0967, 0.1, 0.567, 1.234, 9.87, 12.34, 99.94, 123.4, 4567.8, 1234567.8]
    sizes = [0, 1, 1023, 1024, 10_000, 3_456_789, 2**30, 5 * 2**40]
    assert PROGRAM is not None
    with Chromium(PROGRAM) as browser:
        browser.open(path)
        assert browser.value(f"{times}.map(units.ms)") == [milliseconds(value) for value in times]
        assert browser.value(f"{sizes}.map(units.bytes)") == [human_bytes(value) for value in sizes]
        assert browser.value("[179, 180, 10799, 10800].map((value) => units.timeUnit(value)[0])") == [
            "s",
            "min",
            "min",
            "h",
        ]
        assert browser.value("[30, 600, 36000].map((value) => units.duration(value))") == [
            "30.0 s",
            "10.0 min",
            "10.0 h",
        ]
        assert browser.value("[units.ms(null), units.percent(0.456), units.count(1234567)]") == [
            "?",
            "46 %",
            "1,234,567",
        ]
