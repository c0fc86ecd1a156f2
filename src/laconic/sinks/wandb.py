"""Numbers of every step in Weights & Biases."""

from __future__ import annotations

from typing import Protocol

from laconic.errors import LaconicError
from laconic.sinks.step_values import StepValues
from laconic.sinks.tracker import TrackerSink, tracker_package


class WandbRun(Protocol):
    """The part of a Weights & Biases run that is used."""

    def define_metric(self, name: str, step_metric: str | None = None) -> object:
        """Give metrics an axis."""
        ...

    def log(self, data: dict[str, float], *, commit: bool) -> None:
        """Add to the history of the run."""
        ...


class WandbSink(TrackerSink):
    """Logs laconic/step_s, laconic/wait_s, ... to a run, against an axis of their own, laconic/step.

    run:    the run; default: the one that wandb.init() has started.
    commit: False: numbers join the next row that the script logs. Choose it where the script gives `step=` to
            run.log(), because Weights & Biases refuses a step that is lower than the number of rows.
    """

    def __init__(self, run: WandbRun | None = None, *, commit: bool = True) -> None:
        wandb = tracker_package("wandb", package="wandb", sink="WandbSink")
        chosen: WandbRun | None = wandb.run if run is None else run
        if chosen is None:
            raise LaconicError("WandbSink: no run is active. Call wandb.init() first, or pass run=.")
        chosen.define_metric("laconic/step")
        chosen.define_metric("laconic/*", step_metric="laconic/step")
        self._run_of_wandb = chosen
        self._commit = commit
        super().__init__()

    def send(self, values: StepValues) -> None:
        """Log one row."""
        row = {f"laconic/{name}": value for name, value in values.values.items()}
        self._run_of_wandb.log({"laconic/step": values.step, **row}, commit=self._commit)
