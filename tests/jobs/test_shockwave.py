"""The published run: its constant comes back from an outcome that was made with it; the real tables, where they are."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

import pytest

from laconic.errors import UsageError
from laconic.jobs.batch_growth import Growth, Training
from laconic.jobs.shockwave import CALIBRATED_ON, OUTCOMES, PREDICTED, SPEEDS, TRACE, Tables, calibrate, predict
from laconic.jobs.shockwave_batches import SAMPLES, by_epochs

FOLDER = os.environ.get("LACONIC_TABLES", "")
HEAD = "policy,kind,makespan_s,avg_jct_s,geo_mean_jct_s,unfair_share,cluster_util"


def made(folder: Path, start_s: float) -> Tables:
    """Tables of a run that went exactly as the simulator says."""
    speeds = [(20, 1000.0), (40, 900.0), (80, 700.0)]
    lines = [f"v100,LM (batch size {batch}),{gpus},{speed}" for gpus in (1, 2, 4) for batch, speed in speeds]
    (folder / SPEEDS).write_text("\n".join(["worker_type,model,gpus,steps_per_s", *lines]))
    modes, model = ("gns", "accordion", "static"), "LM (batch size 20)"
    jobs = [
        f"{place},{model},{70_000 * (6 + place % 9)},{(1, 1, 2, 4)[place % 4]},{modes[place % 3]},{20 * place}"
        for place in range(60)
    ]
    (folder / TRACE).write_text("\n".join(["job,model,total_steps,gpus,mode,arrival_s", *jobs]))
    tables = Tables(folder)
    own_gpu_s = sum(job.gpus * job.duration_s for job in tables.jobs())
    found = predict(tables.jobs(), CALIBRATED_ON, start_s)
    rows = [
        f"{CALIBRATED_ON},physical,{found.makespan_s},{found.average_completion_s},1,0,0",
        f"{CALIBRATED_ON},simulation,1000,1,1,0,{own_gpu_s / 32000}",
    ]
    (folder / OUTCOMES).write_text("\n".join([HEAD, *rows]))
    return tables


def test_the_constant_comes_back(tmp_path: Path) -> None:
    found = calibrate(made(tmp_path, 23.0))
    assert found.own_gpu_s_error == pytest.approx(0.0, abs=1e-9)
    assert found.start_s == pytest.approx(23.0, abs=1.0)
    assert abs(found.makespan_error) < 0.01
    assert abs(found.completion_error) < 0.01


def test_tables_that_cannot_be_used(tmp_path: Path) -> None:
    tables = made(tmp_path, 20.0)
    (tmp_path / OUTCOMES).write_text(f"{HEAD}\n{CALIBRATED_ON},physical,1,1,1,1,1\n")
    with pytest.raises(UsageError, match="no row max_min_fairness,simulation"):
        calibrate(tables)
    (tmp_path / OUTCOMES).unlink()
    with pytest.raises(UsageError, match="cannot read"):
        calibrate(tables)


def batches(model: str, growth: Growth, batch: int, gpus: int, epochs: int, *measured: int) -> list[tuple[int, int]]:
    """(epochs with this batch, batch)."""
    training = Training(
        growth=growth,
        model=model,
        batch=batch,
        gpus=gpus,
        samples=epochs * SAMPLES[model],
        measured=sorted({batch, *measured}),
    )
    ends = [(round(until * epochs), size) for until, size in by_epochs(training)]
    return [(end - begin, size) for (begin, _), (end, size) in pairwise([(0, 0), *ends])]


def test_batches_grow_after_the_epochs_of_the_training_scripts() -> None:
    assert batches("LM", "gns", 20, 1, 60, 40, 80) == [(11, 20), (30, 40), (19, 80)]
    assert batches("LM", "gns", 20, 2, 35, 40, 80) == [(31, 20), (4, 40)]
    assert batches("LM", "static", 20, 1, 60, 40, 80) == [(60, 20)]
    assert batches("Transformer", "accordion", 16, 1, 100, 128) == [(100, 16)]
    # 30% of 100 epochs are critical; the first epoch that is not ends with the starting batch.
    assert batches("LM", "accordion", 20, 1, 100, 40, 80) == [(31, 20), (69, 80)]
    assert batches("ResNet-50", "accordion", 32, 1, 60, 64, 128) == [(19, 32), (12, 128), (10, 32), (19, 128)]
    with pytest.raises(UsageError, match="not among the models"):
        by_epochs(Training(growth="gns", model="M", batch=8, gpus=1, samples=100.0, measured=[8]))


@pytest.mark.skipif(not FOLDER, reason="LACONIC_TABLES does not name the folder of the published tables")
def test_the_published_run() -> None:
    tables = Tables(Path(FOLDER))
    found = calibrate(tables)
    assert abs(found.makespan_error) < 0.03
    assert abs(found.completion_error) < 0.03
    assert abs(found.own_gpu_s_error) < 0.02
    jobs = tables.jobs()
    outcomes = {policy: predict(jobs, policy, found.start_s) for policy in PREDICTED}
    # What each policy is for.
    assert min(outcomes, key=lambda name: outcomes[name].makespan_s) == "min_total_duration"
    assert min(outcomes, key=lambda name: outcomes[name].average_completion_s) == "allox"
