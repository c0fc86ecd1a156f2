"""The page about many jobs: what it holds, that nothing typed can steer it, and that a browser draws it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from laconic.cluster import Cluster, Link, Racks
from laconic.jobs import Costs, Job, Outcome, Phase, Traffic, parse_policy, run
from laconic.report.schedule_page import render
from tests.report.chromium import Chromium, find_chromium

PROGRAM = find_chromium()
EVIL = "</script><script>alert(1)</script>&<b>"


def outcomes() -> tuple[list[Outcome], Cluster, Costs]:
    uplink = Link(bandwidth_bps=1e10)
    cluster = Cluster(links=(uplink,) * 8, topology=Racks(sizes=(4, 4), uplinks=(uplink, uplink)))
    phase = Phase(until=1.0, work_per_s=1 / 900, steps_per_s=5.0)
    jobs = [
        Job(
            name=EVIL if place == 3 else f"j{place}",
            arrival_s=100.0 * place,
            gpus=(1, 2, 4)[place % 3],
            phases=(phase,),
            traffic=Traffic(gradient_bytes=1e8),
        )
        for place in range(12)
    ]
    costs = Costs(start_s=10.0)
    return (
        [run(jobs, cluster, parse_policy(name), costs) for name in ("fifo", "max_min_fairness", "rack_aware")],
        cluster,
        costs,
    )


def page() -> tuple[str, list[Outcome]]:
    found, cluster, costs = outcomes()
    return render(found, cluster=cluster, costs=costs, trace="jobs.csv", notes=["something was assumed."]), found


def test_the_figures_draw_what_happened() -> None:
    text, found = page()
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    data = json.loads(match[1])
    assert [policy["name"] for policy in data["strategies"]] == ["fifo", "max_min_fairness", "rack_aware"]
    for outcome, cdf, chart, links in zip(found, data["cdfs"], data["charts"], data["links"], strict=True):
        assert cdf["seconds"] == sorted(cdf["seconds"])
        assert max(job[2] for job in chart["jobs"]) == round(outcome.makespan_s)
        assert len(chart["stays"]) == len(outcome.stays) == outcome.num_starts
        assert len(links["load"]) == len(links["names"]) > 0
        assert 0 < max(map(max, links["load"])) <= 1
    assert EVIL not in text


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page()[0])
    assert PROGRAM is not None
    with Chromium(PROGRAM) as browser:
        browser.look(width=1100, height=900, dark=False, phone=False)
        browser.open(path)
        browser.settle()
        for figure in ("cdf", "gantt", "links"):
            assert browser.value(f"document.querySelectorAll('#{figure} .trace').length") > 0, figure
        before = browser.value("document.getElementById('gantt').data.length")
        browser.value("document.querySelectorAll('input[name=policy]')[1].click()")
        assert browser.value("document.querySelector('[data-tag=gantt]').textContent") == "max_min_fairness"
        assert before > 1
        assert browser.logged == []
        assert browser.requested == []
