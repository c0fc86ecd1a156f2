"""The page as text: complete, safe, and honest about links. How it looks is test_page_in_chromium.py's affair."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laconic.report.figure_data import KINDS, document, inks, places
from laconic.report.ink import NUM_COLOURS, SYMBOLS
from laconic.report.page import render
from laconic.report.results import TORCH_DDP
from laconic.report.run_folder import RunFolder
from tests.report.run_folders import SIX, TEN, make_run

EVIL = '</script><script>alert("x")</script><img src=x onerror=alert(1)>&amp;'
FIGURES = ["loss-time", "loss-bytes", "step-time", "speedup", "timeline", "bytes"]


class Page(HTMLParser):
    """What a browser would find in the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = ""
        """All that is shown, tags left out."""
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self._inside: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag in ("script", "style"):
            self._inside.append(tag)
            if tag == "script":
                self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.text += data
        elif self._inside[-1] == "script":
            self.scripts[-1] += data

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])

    @property
    def figures(self) -> list[str]:
        return [about["id"] for _, about in self.elements if about.get("class") == "plot"]

    def values(self, attribute: str) -> list[str]:
        return [about[attribute] for _, about in self.elements if attribute in about]


def page_of(*runs: RunFolder) -> Page:
    return Page(render(runs))


def with_results(run: RunFolder, **changes: Any) -> RunFolder:
    run.write_results(replace(run.results(), **changes))
    return run


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(make_run(tmp_path_factory.mktemp("runs") / "20261115-093000-compare"))


def test_it_says_what_was_done_and_what_to_use(one: Page) -> None:
    assert "GPT (small, 1.9 M parameters) on 4 hosts" in one.text
    assert "5 strategies and torch DDP on 100mbit" in " ".join(one.text.split())
    assert "use ddp-bf16-ef: " in one.text or "use ddp-bf16: " in one.text
    assert one.figures == [name for name in FIGURES if name != "speedup"]
    assert one.text.count("fastest") == 1
    assert one.text.count("first at target") == 1
    assert 'strategies = ["ddp"' in one.text
    assert "cores: 2, memory: 7.8 GiB" in one.text


def test_a_table_has_a_line_for_every_row_with_the_full_text_on_hover(one: Page) -> None:
    numbers = [about for tag, about in one.elements if tag == "tr" and "data-strategy-row" in about]
    assert len(numbers) == len(SIX)
    titles = one.values("title")
    assert all(titles.count(text) == 2 for text, _, _ in SIX)  # in the table and in the legend


def test_it_loads_nothing(one: Page) -> None:
    assert not one.values("src")
    assert one.values("href") == ["data:,"]
    assert [tag for tag, _ in one.elements].count("link") == 1
    assert "url(" not in files("laconic.report").joinpath("page.css").read_text(encoding="utf-8")
    assert not [script for script in one.scripts[2:] if "http" in script]


def test_only_its_own_scripts_may_run(one: Page) -> None:
    (policy,) = (about["content"] for tag, about in one.elements if about.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    for script in one.scripts[1:]:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy


def test_what_browsers_and_readers_need_is_there(one: Page) -> None:
    found = dict(one.elements)
    assert found["html"]["lang"] == "en"
    assert found["meta"]
    metas = [about for tag, about in one.elements if tag == "meta"]
    assert {"charset": "utf-8"} in metas
    assert any(about.get("name") == "viewport" and "width=device-width" in about["content"] for about in metas)
    regions = [about for _, about in one.elements if about.get("class") == "scroll"]
    assert regions
    assert all(about["tabindex"] == "0" and about["aria-label"] for about in regions)


def test_data_from_a_run_is_text_and_never_markup(tmp_path: Path) -> None:
    run = make_run(tmp_path / "<b>run", strategies=((TORCH_DDP, TORCH_DDP, 1.0), (EVIL, EVIL, 0.5)), title=EVIL)
    with_results(run, problem=EVIL, advice=(EVIL,))
    run.write_text("config.toml", EVIL)
    run.write_text("env.json", json.dumps({EVIL: [{EVIL: EVIL}]}))
    page = page_of(run)
    assert len(page.scripts) == 6
    assert [tag for tag, _ in page.elements].count("img") == 0
    assert not page.values("onerror")
    assert page.text.count(EVIL) >= 6
    assert page.data["strategies"][1]["text"] == EVIL
    assert "<" not in page.scripts[0]


@pytest.mark.parametrize("kind", ["paced", "unlimited"])
def test_links_that_are_not_shaped_say_so(kind: Any, tmp_path: Path) -> None:
    link = "unlimited" if kind == "unlimited" else "100mbit"
    page = page_of(make_run(tmp_path / "run", links=(link,), kind=kind))
    assert ("paced, not shaped" if kind == "paced" else "unlimited bandwidth") in " ".join(page.text.split())
    assert "real link" not in page.text
    assert page.data["places"] == [
        {"link": link, "links": kind, "label": "unlimited" if kind == "unlimited" else "100mbit (paced, not shaped)"}
    ]


def test_a_run_without_losses_has_no_figures_of_them(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", learns=False, links=("100mbit", "1gbit")))
    assert page.figures == ["step-time", "speedup", "timeline", "bytes"]
    assert "loss" not in page.text.replace("at the same loss", "")


def test_a_run_that_ended_early_says_so_first(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run", problem="rank 2 stopped answering."))
    assert page.text.index("The run ended early: rank 2 stopped answering.") < page.text.index("Results")


def test_a_run_that_measured_nothing_still_says_why(tmp_path: Path) -> None:
    run = with_results(make_run(tmp_path / "run"), rows=(), curves=(), advice=(), problem="no rank started.")
    page = page_of(run)
    assert "no rank started." in page.text
    assert page.figures == []


def test_several_runs_share_figures_and_have_tables_of_their_own(tmp_path: Path) -> None:
    links = ("1gbit", "100mbit", "unlimited")
    runs = [make_run(tmp_path / name, strategies=TEN, links=links, seed=seed) for seed, name in enumerate("xy")]
    page = page_of(*runs)
    assert [(run["letter"], run["label"]) for run in page.data["runs"]] == [("A", "x"), ("B", "y")]
    assert [place["link"] for place in page.data["places"]] == ["100mbit", "1gbit", "unlimited"]
    assert page.figures == FIGURES
    blocks = [about for _, about in page.elements if about.get("class") == "table-block"]
    assert [(about["data-place"], about["data-run-block"]) for about in blocks] == [
        (str(place), str(run)) for place in range(3) for run in range(2)
    ]
    assert len(page.data["strategies"]) == len(TEN)
    assert len(page.data["rows"]) == len(page.data["curves"]) == len(page.data["timelines"]) == 2 * 3 * len(TEN)


def test_folders_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / parent / "run") for parent in ("a", "b")]
    assert [run["label"] for run in page_of(*runs).data["runs"]] == [str(run.path) for run in runs]


def test_the_same_link_shaped_in_one_run_and_paced_in_another_is_two_places(tmp_path: Path) -> None:
    shaped, paced = make_run(tmp_path / "a"), make_run(tmp_path / "b", kind="paced")
    data = page_of(shaped, paced).data
    assert [place["links"] for place in data["places"]] == ["shaped", "paced"]
    assert {(curve["run"], curve["place"]) for curve in data["curves"]} == {(0, 0), (1, 1)}


def test_a_loss_that_diverged_is_shown_and_drawn_around(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    results = run.results()
    rows = [replace(results.rows[0], final_loss=math.nan, step_ms_high=math.inf), *results.rows[1:]]
    curves = [replace(results.curves[0], loss=[math.nan] * 60), *results.curves[1:]]
    page = page_of(with_results(run, rows=tuple(rows), curves=tuple(curves)))
    assert page.data["curves"][0]["loss"] == [None] * 60
    assert "diverged" in page.text


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("events.jsonl", "{]\n", "The timeline is missing, events.jsonl cannot be read"),
        ("env.json", "{]", "The environment is missing, env.json cannot be read"),
        ("env.json", "[1]", "The environment is missing, env.json cannot be read"),
    ],
)
def test_a_damaged_file_costs_its_part_of_the_page_only(name: str, text: str, told: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.write_text(name, text)
    page = page_of(run)
    assert told in page.text
    assert "step-time" in page.figures


def test_a_folder_with_results_alone_is_enough(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for name in ("events.jsonl", "env.json", "config.toml"):
        (run.path / name).unlink()
    page = page_of(run)
    assert page.figures == ["loss-time", "loss-bytes", "step-time", "bytes"]
    assert "Configuration" not in page.text


def rows_named(names: Sequence[str], tmp_path: Path) -> Any:
    strategies = ((TORCH_DDP, TORCH_DDP, 1.0), *((f"{name}{number}", name, 0.5) for number, name in enumerate(names)))
    return make_run(tmp_path / "run", strategies=strategies, steps=2, num_ranks=1).results().rows


def test_every_strategy_has_its_own_look(tmp_path: Path) -> None:
    looks = inks(rows_named([f"s{number}" for number in range(40)], tmp_path))
    assert looks[TORCH_DDP].colour == "ddp"
    others = [(ink.colour, ink.symbol) for ink in looks.values() if ink.text != TORCH_DDP]
    assert len(set(others)) == len(others)
    assert len({colour for colour, _ in others[:NUM_COLOURS]}) == NUM_COLOURS
    assert {symbol for _, symbol in others} <= set(SYMBOLS)


def test_long_names_are_short_and_still_differ(tmp_path: Path) -> None:
    long = "diloco(period=64) / all_reduce / int4(block=128) + error_feedback / fusion"
    names = [ink.name for ink in inks(rows_named([long, long, "a" * 30], tmp_path)).values()]
    assert names == [TORCH_DDP, "diloco(period=64) /…k / fusion", "diloco(period=64) /…k / fusion #2", "a" * 30]


def test_a_page_for_many_ranks_stays_small(tmp_path: Path) -> None:
    timelines: Any = page_of(make_run(tmp_path / "run", num_ranks=20, num_buckets=2)).data["timelines"]
    assert all(list(timeline["ranks"]) == [str(rank) for rank in range(8)] for timeline in timelines)


def test_slow_links_stand_first_and_files_of_clusters_last(tmp_path: Path) -> None:
    rows = make_run(tmp_path / "run", links=("10gbit", "10mbit", "1gbit")).results().rows
    rows = [*rows, replace(rows[0], link="two-sites.toml")]
    assert [place.link for place in places(rows)] == ["10mbit", "1gbit", "10gbit", "two-sites.toml"]


def test_curves_carry_the_digits_that_can_be_seen(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for curve, drawn in zip(run.results().curves, page_of(run).data["curves"], strict=True):
        assert drawn["step"] == curve.step
        assert drawn["bytes"] == curve.wire_bytes
        for values, shown in ((curve.loss, drawn["loss"]), (curve.seconds, drawn["seconds"])):
            assert shown == pytest.approx(values, rel=1e-5)
            assert all(len(str(value)) <= 8 for value in shown)


def test_nothing_is_drawn_from_nothing() -> None:
    drawing = document([])
    assert drawing["rows"] == drawing["curves"] == drawing["timelines"] == []


def colours(scheme: str) -> dict[str, str]:
    """Every colour that page.css names, for light or dark."""
    light, _, dark = files("laconic.report").joinpath("page.css").read_text(encoding="utf-8").partition("@media screen")
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light if scheme == "light" else dark))


def linear(colour: str) -> np.ndarray:
    """Red, green, blue as amounts of light."""
    parts = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    darker, lighter = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out_from_the_page(scheme: str) -> None:
    known = colours(scheme)
    assert {f"s{number}" for number in range(NUM_COLOURS)} | {"ddp", *KINDS} <= set(known)
    for name in ["ddp", *(f"s{number}" for number in range(NUM_COLOURS))]:
        assert contrast(known[name], known["page"]) >= 3, name
    for name in ("text", "muted"):
        assert contrast(known[name], known["page"]) >= 4.5, name
        assert contrast(known[name], known["card"]) >= 4.5, name
    assert contrast(known["warn"], known["warn-soft"]) >= 4.5
    assert contrast(known["accent"], known["card"]) >= 4.5


# Full dichromacy as in Machado, Oliveira & Fernandes 2009, and the eye as it is; OKLab as in Ottosson 2020.
EYES = {
    "usual": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
CONES = [[0.41222147, 0.53633254, 0.05144599], [0.2119035, 0.68069955, 0.10739696], [0.08830246, 0.28171884, 0.6299787]]
LAB = [
    [0.21045426, 0.79361778, -0.00407205],
    [1.9779985, -2.4285922, 0.45059371],
    [0.02590404, 0.78277177, -0.80867577],
]


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_are_apart_for_every_eye(scheme: str, eye: str) -> None:
    def seen(colour: str) -> np.ndarray:
        light = np.clip(np.array(EYES[eye]) @ linear(colour), 0, 1)
        return np.array(LAB) @ np.cbrt(np.array(CONES) @ light)

    known = colours(scheme)
    points = {name: seen(known[name]) for name in ["ddp", *(f"s{number}" for number in range(NUM_COLOURS))]}
    pairs = itertools.combinations(points, 2)
    nearest = min((float(np.linalg.norm(points[one] - points[other])), one, other) for one, other in pairs)
    assert nearest[0] >= 0.08, nearest
