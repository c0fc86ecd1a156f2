"""Traces: what is read, what is refused, and that no text whatever makes the parser fail in another way."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.cluster import Cluster, Link
from laconic.errors import LaconicError, UsageError
from laconic.jobs import Throughputs, parse_policy, parse_trace, run
from laconic.jobs.batch_growth import AfterShare

HEADER = "job,arrival_s,gpus,duration_s"
SPEEDS = """# a comment
worker_type,model,gpus,steps_per_s
fast,M (batch size 8),1,10
fast,M (batch size 16),1,8
fast,M (batch size 32),1,5
fast,M (batch size 8),2,15
fast_unconsolidated,M (batch size 8),2,5
slow,M (batch size 8),1,0
"""


@pytest.fixture
def speeds(tmp_path: Path) -> Throughputs:
    path = tmp_path / "speeds.csv"
    path.write_text(SPEEDS)
    return Throughputs.load(path, "fast")


def test_a_trace_of_durations() -> None:
    first, second = parse_trace(f"# two jobs\n{HEADER},after\na,0,1,60,\nb,5.5,4,120,a\n")
    assert (first.name, first.arrival_s, first.gpus, first.duration_s) == ("a", 0.0, 1, 60.0)
    assert (second.after, second.gpus, second.duration_s) == ("a", 4, pytest.approx(120))


def test_columns_of_other_programs_are_known() -> None:
    text = "job_id,num_gpu,submit_time,iterations,model_name,duration,interval\n0,2,30,600,vgg19,164,30\n"
    (found,) = parse_trace(text)
    assert (found.name, found.gpus, found.arrival_s, found.model) == ("0", 2, 30.0, "vgg19")
    assert found.duration_s == pytest.approx(164)
    assert found.phases[0].steps_per_s == pytest.approx(600 / 164)


def test_batches_that_grow_change_the_speed(speeds: Throughputs) -> None:
    header = "job,arrival_s,gpus,steps,model,mode"
    text = f"{header}\n" + "\n".join(
        f"{mode},0,1,1000,M (batch size 8),{mode}" for mode in ("static", "accordion", "gns")
    )
    static, accordion, gns = parse_trace(text, speeds, growth=AfterShare(0.5))
    # 8,000 samples; 80, 128 and 160 samples per second with batches of 8, 16 and 32.
    assert static.duration_s == pytest.approx(100)
    assert accordion.duration_s == pytest.approx(4000 / 80 + 4000 / 160)
    assert gns.duration_s == pytest.approx(4000 / 80 + 2000 / 128 + 2000 / 160)
    assert [phase.steps_per_s for phase in gns.phases] == [10, 8, 5]


def test_speeds_by_number_of_gpus_and_by_placement(speeds: Throughputs) -> None:
    (found,) = parse_trace("job,arrival_s,gpus,steps,model\na,0,2,1500,M (batch size 8)\n", speeds)
    assert found.duration_s == pytest.approx(100)
    assert found.spread_slowdown == pytest.approx(3)
    assert found.speed_on(1) == pytest.approx(10 / 30)
    assert found.speed_on(4) == pytest.approx(2**0.9)
    spread = Cluster(links=(Link(bandwidth_bps=1e10),) * 2)
    assert run([found], spread, parse_policy("fifo"), fidelity="throughput").makespan_s == pytest.approx(300)


def test_a_job_begins_when_the_one_before_it_has_ended() -> None:
    jobs = parse_trace(f"{HEADER},after\nb,0,1,60,a\na,0,1,90,\nc,500,1,10,b\n")
    found = run(jobs, Cluster(links=(Link(bandwidth_bps=1e10),) * 3), parse_policy("fifo"))
    ends = {job.name: end for job, end in zip(found.jobs, found.finish_s.tolist(), strict=True)}
    assert ends == {"a": 90, "b": 180, "c": 610}
    assert {job.name: float(time) for job, time in zip(found.jobs, found.completion_s, strict=True)}["b"] == 90


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no header"),
        (f"{HEADER}\n", "there is no job"),
        ("job,gpus\na,1\n", "arrival_s"),
        (f"{HEADER},colour\na,0,1,60,red\n", 'no column "colour"'),
        (f"{HEADER}\na,-5,1,60\n", "arrival_s must be"),
        (f"{HEADER}\na,nan,1,60\n", "arrival_s must be a number"),
        (f"{HEADER}\na,0,1,-60\n", "duration_s must be above 0"),
        (f"{HEADER}\na,0,1.5,60\n", "gpus must be a whole number"),
        (f"{HEADER}\na,0,0,60\n", "gpus must be between"),
        (f"{HEADER}\na,0,1\n", "3 cells"),
        (f"{HEADER}\na,0,1,60\na,0,1,60\n", 'two jobs are called "a"'),
        (f"{HEADER},after\na,0,1,60,b\nb,0,1,60,c\nc,0,1,60,a\n", "in a circle"),
        (f"{HEADER},after\na,0,1,60,a\n", "in a circle"),
        (f"{HEADER},after\na,0,1,60,z\n", "which is missing"),
        (f"{HEADER},max_gpus\na,0,4,60,2\n", "max_gpus must be at least"),
        (f"{HEADER},strategy\na,0,4,60,ddp\n", "no effect without gradient_bytes"),
        (f"{HEADER},mode\na,0,4,60,gns\n", "--throughputs"),
        (f"{HEADER},gradient_bytes\na,0,4,60,1e8\n", "Give the number of steps"),
        ("job,arrival_s,gpus\na,0,4\n", "the job has no length"),
        ("job,arrival_s,gpus,steps\na,0,4,100\n", "steps need a speed"),
        (f'{HEADER}\n"a,0,4,100\n', "CSV"),
    ],
)
def test_bad_traces_are_refused_with_the_line(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_trace(text)


def test_a_job_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(UsageError, match="asks for 8 GPUs, but the cluster has 2"):
        run(parse_trace(f"{HEADER}\na,0,8,60\n"), Cluster(links=(Link(bandwidth_bps=1e9),) * 2), parse_policy("fifo"))


def test_tables_of_speeds_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "speeds.csv"
    path.write_text(SPEEDS)
    with pytest.raises(UsageError, match="has several worker types"):
        Throughputs.load(path)
    with pytest.raises(UsageError, match='no worker type "fats"'):
        Throughputs.load(path, "fats")
    with pytest.raises(UsageError, match="not in the table of throughputs"):
        parse_trace("job,arrival_s,gpus,steps,model\na,0,4,10,M (batch size 8)\n", Throughputs.load(path, "fast"))


cells = st.text(alphabet='0123456789.-+einfa ,"\n#\t\x00é', max_size=12)


@given(st.lists(st.lists(cells, min_size=1, max_size=6), max_size=6), st.booleans())
def test_any_text_is_read_or_refused(rows: list[list[str]], with_header: bool) -> None:
    text = "\n".join([HEADER] * with_header + [",".join(row) for row in rows])
    try:
        jobs = parse_trace(text)
    except LaconicError:
        return
    assert all(job.duration_s > 0 and job.gpus >= 1 for job in jobs)
