"""The page in a real browser: figures are drawn, nothing is logged or fetched, phones do not scroll sideways."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from laconic.report.page import render
from tests.report.chromium import Chromium, find_chromium
from tests.report.run_folders import TEN, make_run
from tests.report.test_timeline import DEFERRED, deferred_steps

PROGRAM = find_chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.browser,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium here; apt-get install chromium"),
]

FIGURES = """
[...document.querySelectorAll(".plot")].map((plot) => ({
  name: plot.id,
  isShown: plot.offsetParent !== null,
  svgs: plot.querySelectorAll(".main-svg").length,
  marks: plot.querySelectorAll(".trace path, .trace text").length,
  height: plot.getBoundingClientRect().height,
  ink: getComputedStyle(plot.querySelector(".xtick text")).fill,
  isWithin: plot.querySelector(".main-svg").getBoundingClientRect().right <= innerWidth,
}))
"""
ONE = ["loss-time", "loss-bytes", "step-time", "timeline", "bytes"]
MANY = ["loss-time", "loss-bytes", "step-time", "speedup", "timeline", "bytes"]
REPLAY = ["step-time", "timeline", "bytes"]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    links = ("100mbit", "1gbit", "10gbit")
    one = make_run(folder / "one", problem="<script>alert(1)</script>")
    many = [make_run(folder / name, strategies=TEN, links=links, seed=seed) for seed, name in enumerate("ab")]
    replay = make_run(folder / "replay", learns=False, kind="paced")
    written = {}
    for name, runs in {"one": [one], "many": many, "replay": [replay]}.items():
        written[name] = folder / f"{name}.html"
        written[name].write_text(render(runs), encoding="utf-8")
    return written


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    assert PROGRAM is not None
    with Chromium(PROGRAM) as chromium:
        yield chromium


def figures(browser: Chromium, expected: list[str]) -> dict[str, Any]:
    """What is drawn; all that is expected, and without complaint."""
    browser.settle()
    found = {figure["name"]: figure for figure in browser.value(FIGURES)}
    assert list(found) == expected
    for figure in found.values():
        assert figure["isShown"], figure
        assert figure["svgs"] >= 2, figure
        assert figure["marks"] >= 6, figure
        assert figure["height"] > 100, figure
        assert figure["isWithin"], figure
    assert browser.logged == []
    assert browser.requested == []
    return found


def click(browser: Chromium, selector: str) -> None:
    browser.value(f'document.querySelector("{selector}").click()')
    browser.settle()


def number_of_curves(browser: Chromium) -> int:
    return browser.value("document.querySelectorAll('#loss-time .trace').length")


@pytest.mark.parametrize(("name", "expected"), [("one", ONE), ("many", MANY), ("replay", REPLAY)])
def test_every_figure_is_drawn_on_a_desk_and_on_a_phone(
    name: str, expected: list[str], browser: Chromium, pages: dict[str, Path]
) -> None:
    browser.look(width=1280)
    browser.open(pages[name])
    wide = figures(browser, expected)
    browser.look(width=390, height=844, phone=True)
    browser.open(pages[name])
    narrow = figures(browser, expected)
    assert browser.value("document.documentElement.scrollWidth") == 390
    browser.value("window.scrollTo(1000, 0)")
    assert browser.value("window.scrollX") == 0
    assert wide.keys() == narrow.keys()


def test_figures_follow_the_colour_scheme_even_while_the_page_is_open(
    browser: Chromium, pages: dict[str, Path]
) -> None:
    def colours() -> tuple[str, str]:
        inks = {figure["ink"] for figure in figures(browser, ONE).values()}
        assert len(inks) == 1
        return browser.value("getComputedStyle(document.body).backgroundColor"), inks.pop()

    browser.look(width=1280)
    browser.open(pages["one"])
    light = colours()
    browser.look(width=1280, dark=True)
    dark = colours()
    assert light == ("rgb(251, 251, 250)", "rgb(92, 101, 112)")
    assert dark == ("rgb(20, 23, 28)", "rgb(154, 164, 175)")


def test_one_link_is_shown_and_another_can_be_chosen(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.look(width=1280)
    browser.open(pages["many"])
    shown = "[...document.querySelectorAll('.table-block:not([hidden])')].map((block) => block.dataset.place)"
    tag = "document.querySelector('#step-time-heading [data-tag]').textContent"
    assert (browser.value(shown), browser.value(tag)) == (["0", "0"], "100mbit (shaped)")
    click(browser, "input[name=place][value='2']")
    assert (browser.value(shown), browser.value(tag)) == (["2", "2"], "10gbit (shaped)")
    figures(browser, MANY)


def test_strategies_and_runs_can_be_hidden_and_shown_again(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.look(width=1280)
    browser.open(pages["many"])
    assert number_of_curves(browser) == 2 * len(TEN)
    click(browser, "button[data-strategy='3']")
    assert number_of_curves(browser) == 2 * (len(TEN) - 1)
    assert browser.value("document.querySelectorAll('[data-strategy-row=\"3\"]:not([hidden])').length") == 0
    click(browser, "button[data-run='0']")
    assert number_of_curves(browser) == len(TEN) - 1
    assert browser.value("document.querySelector(\"button[data-run='0']\").getAttribute('aria-pressed')") == "false"
    click(browser, "#show-all")
    assert number_of_curves(browser) == 2 * len(TEN)
    figures(browser, MANY)


def test_the_timeline_shows_the_rank_that_is_chosen(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.look(width=1280)
    browser.open(pages["one"])
    begin = "document.getElementById('timeline').data.find((trace) => trace.name === 'forward').base[0]"
    assert browser.value(begin) == 0
    browser.value(
        "(() => { const rank = document.getElementById('timeline-rank');"
        "rank.value = '1'; rank.dispatchEvent(new Event('change')); })()"
    )
    browser.settle()
    assert browser.value(begin) == pytest.approx(2.0)
    figures(browser, ONE)


TIMELINE = """
(() => {
  const { data, layout } = document.getElementById("timeline");
  return {
    traces: data.map((trace) => trace.name),
    texts: data.flatMap((trace) => trace.text),
    words: layout.annotations.map((note) => note.text),
    shades: layout.shapes.filter((shape) => shape.type === "rect").map((shape) => [shape.x0, shape.x1]),
    ends: layout.shapes.filter((shape) => shape.type === "line").map((shape) => shape.x0),
    until: layout.xaxis.range[1],
  };
})()
"""


def test_the_timeline_says_what_a_step_waits_for(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.look(width=1280)
    browser.open(pages["one"])
    drawn = browser.value(TIMELINE)
    assert sum("is waited for longest" in text for text in drawn["words"]) == 5, "all but torch DDP"
    assert any("torch does not say when it exchanges" in text for text in drawn["words"])
    assert any(text.startswith("waits for bucket") for text in drawn["texts"])
    assert "4: 2.1 MiB" in drawn["texts"], "on an exchange, its bucket and what it sends"
    assert len(drawn["shades"]) >= 5
    assert drawn["ends"] == []
    assert "exchange of the step before" not in drawn["traces"]


def test_exchanges_that_go_on_are_drawn_into_the_next_step(browser: Chromium, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", strategies=((DEFERRED, "p3", 1.0),), links=("1gbit",))
    run.write_text("events.jsonl", "".join(event.to_json() + "\n" for event in deferred_steps(10, turn=5)))
    page = tmp_path / "page.html"
    page.write_text(render([run]), encoding="utf-8")
    browser.look(width=1280)
    browser.open(page)
    drawn = browser.value(TIMELINE)
    assert drawn["ends"] == [pytest.approx(1000)]
    assert drawn["until"] == pytest.approx(1200, rel=0.02), "when the last exchange has ended"
    assert "exchange of the step before" in drawn["traces"]
    assert any("exchanges of 2 of its 2 buckets end in the next step" in text for text in drawn["words"])
    assert "next step" in drawn["words"]
    assert "next forward" in drawn["texts"] or "forward" in drawn["texts"]
    assert drawn["shades"][-1] == [pytest.approx(1150), pytest.approx(1200)]
    assert browser.logged == []


def test_a_figure_can_be_saved_and_hovering_tells_more(browser: Chromium, pages: dict[str, Path]) -> None:
    browser.look(width=1280)
    browser.open(pages["one"])
    browser.value(
        "window.saved = new Promise((done) => HTMLAnchorElement.prototype.click = function () {"
        "done([this.download, this.href.slice(0, 5)]) }); 0"
    )
    click(browser, "[data-save=step-time]")
    assert browser.value("window.saved") == ["laconic-step-time.png", "blob:"]
    browser.value("Plotly.Fx.hover('step-time', [{curveNumber: 0, pointNumber: 2}])")
    told = browser.value("document.querySelector('#step-time .hoverlayer').textContent")
    assert "ddp-bf16" in told
    assert "waiting for the network" in told
    figures(browser, ONE)


def test_it_prints_in_light_colours_with_every_table(browser: Chromium, pages: dict[str, Path], tmp_path: Path) -> None:
    browser.look(width=1280, dark=True)
    browser.open(pages["many"])
    browser.value(
        "addEventListener('beforeprint', () => window.printed = ["
        "getComputedStyle(document.querySelector('#step-time .xtick text')).fill,"
        "document.querySelector('#step-time .main-svg').getBoundingClientRect().width])"
    )
    browser.print_pdf(tmp_path / "page.pdf")
    ink, width = browser.value("window.printed")
    assert ink == "rgb(92, 101, 112)"
    assert width <= 690
    assert (tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    figures(browser, MANY)
