"""The page about an elastic run: its numbers against sums by hand, and that nothing typed can steer it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from laconic.cli import main
from laconic.core.event import Event, EventLog
from laconic.errors import UsageError
from laconic.report.elastic_page import render
from laconic.report.elastic_run import elastic_run
from tests.report.chromium import Chromium, find_chromium

PROGRAM = find_chromium()
EVIL = "</script><script>alert(1)</script>&<b>"
BEGAN_S = 100.0


def view(
    number: int, time_s: float, members: str, *, noticed_s: float = 0.0, **data: str | bool | float
) -> list[Event]:
    """What every member writes, one a little later than the other."""
    said = {"view": number, "members": members, "lost": "", "joined": "", "leaving": "", "why": "", "redone": False}
    took_s = time_s - noticed_s if noticed_s else 0.0
    names = members.split(",")
    return [
        Event("view", BEGAN_S + time_s + rank / 1000, rank, 0, took_s + rank / 1000, {**said, **data})
        for rank in range(len(names))
    ]


def unit(number: int, time_s: float, view: int, ranks: int) -> list[Event]:
    data = {"unit": number, "what": "the gradients", "view": view, "members": ""}
    return [Event("unit", BEGAN_S + time_s + rank / 1000, rank, number, 0.0, {**data}) for rank in range(ranks)]


def events() -> list[Event]:
    """Steps of 0.1 s on three ranks; b is killed at 1.05 s and replaced at 3 s; a cut link costs a step 0.4 s."""
    said = view(0, 0.0, "a,b,c", joined="a,b,c")
    said += [event for number in range(10) for event in unit(number, 0.1 * (number + 1), 0, 3)]
    kill = {"fault": '--kill "rank=1 at=1.05s"', "fault_kind": "kill", "processes": "b", "over": False}
    said.append(Event("fault", BEGAN_S + 1.05, 1, -1, 0.0, {**kill}))
    said += view(1, 1.4, "a,c", noticed_s=1.08, lost="b", why=EVIL, redone=True, lost_residual_norm=2.5)
    said += [event for number in range(10) for event in unit(10 + number, 1.5 + 0.15 * number, 1, 2)]
    said += view(2, 2.9, "a,c,d", noticed_s=2.86, joined="d")
    said += [
        event for number in range(10) for event in unit(20 + number, 3.05 + 0.1 * number + 0.4 * (number > 4), 2, 3)
    ]
    cut = {"fault": '--cut-link "0-1 for=0.1s"', "fault_kind": "cut-link", "processes": "a,d", "over": False}
    said.append(Event("fault", BEGAN_S + 3.5, -1, -1, 0.0, {**cut}))
    said.append(Event("fault", BEGAN_S + 3.6, -1, -1, 0.0, {**cut, "over": True}))
    return said


def test_times_are_those_of_a_sum_by_hand() -> None:
    run = elastic_run(events(), "here")
    first, second = run.changes
    assert first.lost_s == pytest.approx(1.5 - 1.0 - 0.15)
    assert second.lost_s == pytest.approx(3.05 - (1.5 + 0.15 * 9) - 0.1)
    assert [fault.lost_s for fault in run.faults] == [0.0, pytest.approx(0.4)]
    assert run.goodput == pytest.approx(1 - (0.35 + 0.1 + 0.4) / (4.35 - 0.1))
    assert (run.num_units, run.seconds) == (30, pytest.approx(4.35))
    assert first.fault == '--kill "rank=1 at=1.05s"'
    assert first.noticed_s == pytest.approx(0.03)
    assert (first.num_before, first.num_ranks, first.died, first.redone) == (3, 2, ("b",), True)
    assert first.lost_residual_norm == 2.5
    assert (second.joined, second.fault, second.noticed_s) == (("d",), "", None)
    assert [(fault.text.split()[0], fault.view) for fault in run.faults] == [("--kill", 1), ("--cut-link", None)]
    stays = {stay.worker: (round(stay.begin_s, 3), round(stay.end_s, 3)) for stay in run.stays}
    assert stays == {"a": (0.0, 4.35), "b": (0.0, 1.08), "c": (0.0, 4.35), "d": (2.9, 4.35)}


def test_several_views_without_a_step_between_them_are_charged_once() -> None:
    said = view(0, 0.0, "a,b,c") + [one for number in range(5) for one in unit(number, 0.1 + 0.1 * number, 0, 3)]
    said += view(1, 1.0, "a,b", noticed_s=0.6, lost="c") + view(2, 1.5, "a", noticed_s=1.1, lost="b")
    said += [one for number in range(5, 10) for one in unit(number, 1.7 + 0.1 * (number - 5), 2, 1)]
    run = elastic_run(said, "here")
    assert [change.lost_s for change in run.changes] == [pytest.approx(1.7 - 0.5 - 0.1), 0.0]


def test_a_step_that_the_next_view_completes_is_charged_to_the_change() -> None:
    # c is frozen when all values of the last step have arrived, but not every vote.
    said = view(0, 0.0, "a,b,c") + [one for number in range(5) for one in unit(number, 0.1 + 0.1 * number, 0, 3)]
    said += view(1, 1.9, "a,b", noticed_s=1.85, lost="c") + unit(5, 1.91, 0, 2)
    # Noticed by one rank while the others were completing a step: only the last one waited for the change.
    said += view(2, 2.6, "a", noticed_s=2.12, lost="b")
    said += [one for number in range(6, 11) for one in unit(number, 2.01 + 0.1 * (number - 6), 1, 2)]
    said += [one for number in range(11, 15) for one in unit(number, 2.8 + 0.1 * (number - 11), 2, 1)]
    first, second = elastic_run(said, "here").changes
    assert first.lost_s == pytest.approx(1.91 - 0.5 - 0.1)
    assert second.lost_s == pytest.approx(2.8 - 2.41 - 0.1)


def test_a_change_before_the_first_step_is_charged_too() -> None:
    said = view(0, 0.0, "a,b,c") + view(1, 1.5, "a,b", noticed_s=1.2, lost="c")
    said += [one for number in range(5) for one in unit(number, 2.0 + 0.1 * number, 1, 2)]
    run = elastic_run(said, "here")
    assert run.changes[0].lost_s == pytest.approx(2.0 - 0.1)
    assert run.goodput == pytest.approx(1 - 1.9 / 2.4)
    assert run.num_units == 5


def fault(kind: str, processes: str, time_s: float) -> Event:
    data = {"fault": f"--{kind}", "fault_kind": kind, "processes": processes, "over": False}
    return Event("fault", BEGAN_S + time_s, -1, -1, 0.0, {**data})


def test_a_death_is_that_of_the_last_fault_that_struck_the_process() -> None:
    said = view(0, 0.0, "a,b,c") + unit(0, 0.1, 0, 3) + unit(1, 0.2, 0, 3)
    said += [fault("freeze", "c", 0.15), fault("cut-link", "a,c", 0.5), fault("slow", "c", 0.6), fault("slow", "b", 2)]
    said += view(1, 1.0, "a,b", noticed_s=0.6, lost="c") + unit(2, 1.1, 1, 2) + unit(3, 1.2, 1, 2)
    said += view(2, 3.0, "a", noticed_s=2.9, lost="b") + unit(4, 3.1, 2, 1)
    run = elastic_run(said, "here")
    assert [change.fault for change in run.changes] == ["--cut-link", ""]  # nobody dies of being slow


def test_a_process_joins_because_it_was_started_whatever_struck_it_then() -> None:
    said = view(0, 0.0, "a,b") + unit(0, 0.1, 0, 2) + unit(1, 0.2, 0, 2)
    said += [fault("join", "c", 0.3), fault("cut-link", "b,c", 0.4)]
    said += view(1, 1.0, "a,b,c", noticed_s=0.9, joined="c") + unit(2, 1.1, 1, 3) + unit(3, 1.2, 1, 3)
    said += view(2, 3.0, "a,b", noticed_s=2.9, lost="c") + unit(4, 3.1, 2, 2)
    run = elastic_run(said, "here")
    assert [change.fault for change in run.changes] == ["--join", "--cut-link"]


def test_what_is_no_elastic_run_is_said() -> None:
    with pytest.raises(UsageError, match="here holds no elastic run: events of kind view"):
        elastic_run([Event("forward", 0.0, 0, 0)], "here")
    with pytest.raises(UsageError, match="a step that was completed"):
        elastic_run(view(0, 0.0, "a"), "here")


def page() -> str:
    return render(elastic_run(events(), "here"), title=EVIL)


def test_the_figures_draw_what_happened() -> None:
    text = page()
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match is not None
    data = json.loads(match[1])
    assert [worker["name"] for worker in data["strategies"]] == ["a", "b", "c", "d"]
    assert data["counts"] == [[0.0, 3], [1.4, 2], [2.9, 3]]
    assert [change["lost"] for change in data["changes"]] == [0.35, 0.1]
    assert data["progress"][-1] == [4.35, 30]
    assert EVIL not in text
    assert "80.0%" in text  # the goodput


def write_events(folder: Path) -> None:
    """The run in two logs, as if two processes had written them."""
    folder.mkdir(parents=True, exist_ok=True)
    for worker in range(2):
        with EventLog(folder / f"{worker}.jsonl") as log:
            for event in events()[worker::2]:
                log.write(event)


def test_a_folder_of_logs_has_a_page_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_events(tmp_path)
    with (tmp_path / "1.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind":"un')  # killed in the middle of a line
    assert main(["report", str(tmp_path)]) == 0
    assert "goodput" in (tmp_path / "report.html").read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["report", str(tmp_path), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["kind"] == "elastic"
    assert [change["died"] for change in run["changes"]] == [["b"], []]
    (tmp_path / "other").mkdir()
    assert main(["report", str(tmp_path), str(tmp_path / "other")]) == 2
    assert "gets a page of its own" in capsys.readouterr().err


@pytest.mark.browser
@pytest.mark.skipif(PROGRAM is None, reason="no Chromium here")
def test_a_browser_draws_it(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page())
    assert PROGRAM is not None
    with Chromium(PROGRAM) as browser:
        browser.look(width=1100, height=900, dark=False, phone=False)
        browser.open(path)
        browser.settle()
        for figure in ("members", "progress", "lost"):
            assert browser.value(f"document.querySelectorAll('#{figure} .trace').length") > 0, figure
        assert browser.logged == []
        assert browser.requested == []
