"""The page about simulations: what it holds, that nothing typed can steer it, and how it looks in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from laconic.cluster import Cluster, Link
from laconic.cluster.place import Setting
from laconic.report.sweep_page import render
from laconic.simulator.simulation import Conditions
from laconic.simulator.sweep import Row, Sweep
from laconic.strategy import Strategy
from laconic.workload import Layer, TensorShape, Workload
from tests.report.chromium import Chromium, find_chromium

PROGRAM = find_chromium()
STRATEGIES = ("ddp", "dear", "powersgd", "local_sgd(period=16)", "bsp / all_reduce(algorithm=torus2d) / none")
EVIL = "</script><script>alert(1)</script>&<b>"
FIGURES = ["throughput", "efficiency", "step-bandwidth", "step-time", "target"]


def job(name: str = "small") -> Workload:
    layers = tuple(
        Layer(
            name=f"l{number}",
            forward_s=0.02,
            backward_s=0.04,
            tensors=(TensorShape(name=f"l{number}.weight", shape=(1000, 500)),),
        )
        for number in range(4)
    )
    return Workload(name=name, batch=4, layers=layers, source="Made up for tests.")


def made(workers: tuple[int, ...], gbit: tuple[float, ...], **conditions: float) -> tuple[Sweep, list[Row]]:
    settings = tuple(
        Setting(
            cluster=Cluster.uniform(number, Link(bandwidth_bps=rate * 1e9)), workers=number, bandwidth_bps=rate * 1e9
        )
        for rate in gbit
        for number in workers
    )
    sweep = Sweep(
        strategies=tuple(map(Strategy.parse, STRATEGIES)),
        workload=job(),
        settings=settings,
        conditions=Conditions(**conditions),
    )
    return sweep, list(sweep.rows())


def page(
    workers: tuple[int, ...] = (4, 7, 16), gbit: tuple[float, ...] = (1, 10), *, target: bool = True, **more: float
) -> tuple[str, list[Row]]:
    sweep, rows = made(workers, gbit, **more)
    names = {str(Strategy.parse(name)): name for name in STRATEGIES}
    return render(sweep, rows, names=names, warnings=["what is not known."], target=target), rows


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_figures_draw_what_was_predicted() -> None:
    text, rows = page()
    data = data_of(text)
    assert [strategy["name"] for strategy in data["strategies"]][:3] == ["ddp", "dear", "powersgd"]
    assert [strategy["colour"] for strategy in data["strategies"]] == ["ddp", "s0", "s1", "s2", "s3"]
    assert data["workers"] == [4, 7, 16]
    assert [place["label"] for place in data["bandwidths"]] == ["1gbit", "10gbit"]
    predicted = [row for row in rows if row.prediction is not None]
    assert len(predicted) == len(data["rows"]) == 5 * 6 - 2
    for row, drawn in zip(predicted, data["rows"], strict=True):
        assert row.prediction is not None
        assert data["strategies"][drawn["strategy"]]["text"] == str(row.strategy)
        assert data["workers"][drawn["workers"]] == row.setting.workers
        assert data["bandwidths"][drawn["bandwidth"]]["bps"] == row.setting.bandwidth_bps
        assert drawn["compute_ms"] + drawn["exposed_ms"] == pytest.approx(drawn["step_ms"])
        assert drawn["step_ms"] == row.prediction.step_s * 1e3
        assert (drawn["target_s"] is None) == ("period=16" in str(row.strategy))


def test_tables_hold_every_setting_and_what_is_refused() -> None:
    text, _ = page()
    assert text.count('class="table-block"') == 6
    assert "<b>7 workers</b>, 7 hosts at 1gbit" in text
    assert text.count(">refused<") == 2
    assert "7 is a prime" in text
    assert "What is not known." in text
    assert text.count(">not measured<") == 2 * 6


@pytest.mark.parametrize(
    ("workers", "gbit", "target", "expected"),
    [
        ((4, 8), (1, 10), True, FIGURES),
        ((4,), (1, 10), False, ["step-bandwidth", "step-time"]),
        ((4, 8), (1,), False, ["throughput", "efficiency", "step-time"]),
        ((4,), (1,), False, ["step-time"]),
    ],
)
def test_there_is_a_figure_for_what_varies(
    workers: tuple[int, ...], gbit: tuple[float, ...], target: bool, expected: list[str]
) -> None:
    text, _ = page(workers, gbit, target=target)
    assert re.findall(r'class="plot" id="([\w-]+)"', text) == expected
    assert ("steps needed" in text) == target


def test_nothing_typed_can_become_markup_and_only_its_own_scripts_run() -> None:
    sweep, rows = made((4,), (1,))
    evil = Sweep(strategies=sweep.strategies, workload=job(EVIL), settings=sweep.settings)
    text = render(evil, rows, names={str(Strategy()): EVIL}, warnings=[EVIL], target=False)
    assert "alert(1)</script>" not in text
    assert "<b>\n" not in text
    assert data_of(text)["strategies"][0]["text"] == str(Strategy())
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    allowed = set(re.findall(r"'(sha256-[^']+)'", policy[1]))
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = {f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}" for script in scripts}
    assert hashes == allowed
    assert policy[1].startswith("default-src 'none'")


DRAWN = """
[...document.querySelectorAll(".plot")].map((plot) => ({
  name: plot.id,
  isShown: plot.offsetParent !== null,
  marks: plot.querySelectorAll(".trace path, .trace text").length,
  height: plot.getBoundingClientRect().height,
  isWithin: plot.querySelector(".main-svg").getBoundingClientRect().right <= innerWidth,
}))
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    assert PROGRAM is not None
    with Chromium(PROGRAM) as running:
        yield running


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sweep") / "page.html"
    path.write_text(page(noise_ratio=0.05)[0], encoding="utf-8")
    return path


in_a_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(PROGRAM is None, reason="no Chromium here; apt-get install chromium"),
]


def check_figures(browser: Chromium) -> None:
    browser.settle()
    found = browser.value(DRAWN)
    assert [figure["name"] for figure in found] == FIGURES
    for figure in found:
        assert figure["isShown"], figure
        assert figure["marks"] >= 4, figure
        assert figure["height"] > 100, figure
        assert figure["isWithin"], figure
    assert browser.logged == []
    assert browser.requested == []


class TestInABrowser:
    """What a reader sees."""

    pytestmark = in_a_browser

    @pytest.mark.slow
    @pytest.mark.parametrize(("width", "phone"), [(1280, False), (390, True)])
    def test_every_figure_is_drawn_and_nothing_is_fetched(
        self, width: int, phone: bool, browser: Chromium, written: Path
    ) -> None:
        browser.look(width=width, phone=phone)
        browser.open(written)
        check_figures(browser)
        assert browser.value("document.documentElement.scrollWidth") == width

    def test_another_setting_can_be_chosen_and_strategies_hidden(self, browser: Chromium, written: Path) -> None:
        browser.look(width=1280)
        browser.open(written)
        head = "document.querySelector('.table-block:not([hidden]) .table-head').textContent"
        bars = "document.getElementById('step-time').data[0].y.length"
        assert browser.value(head).startswith("4 workers, 4 hosts at 1gbit")
        assert browser.value(bars) == 5
        for name, value in (("workers", 1), ("bandwidth", 1)):
            browser.value(f"document.querySelector('input[name={name}][value=\"{value}\"]').click()")
        browser.settle()
        assert browser.value(head).startswith("7 workers, 7 hosts at 10gbit")
        assert browser.value("document.querySelector('[data-tag=step-time]').textContent") == "7 workers, 10gbit"
        assert browser.value(bars) == 4  # one cannot run with 7
        browser.value("document.querySelector('button[data-strategy=\"1\"]').click()")
        browser.settle()
        assert browser.value(bars) == 3
        browser.value("document.getElementById('show-all').click()")
        check_figures(browser)
        assert browser.value(bars) == 4

    def test_hovering_tells_why(self, browser: Chromium, written: Path) -> None:
        browser.look(width=1280)
        browser.open(written)
        browser.settle()
        browser.value("Plotly.Fx.hover('step-time', [{curveNumber: 1, pointNumber: 0}])")
        told = browser.value("document.querySelector('#step-time .hoverlayer').textContent")
        assert "4 workers, 1gbit" in told
        assert "waits for the all-reduce" in told
