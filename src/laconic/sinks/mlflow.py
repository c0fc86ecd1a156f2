"""Numbers of every step in MLflow."""

from __future__ import annotations

from laconic.errors import LaconicError
from laconic.sinks.step_values import StepValues
from laconic.sinks.tracker import TrackerSink, tracker_package


class MlflowSink(TrackerSink):
    """Logs metrics laconic/step_s, laconic/wait_s, ... to a run.

    run_id: the run; default: the one that mlflow.start_run() has started on this thread.
    """

    def __init__(self, run_id: str | None = None) -> None:
        self._mlflow = tracker_package("mlflow", package="mlflow", sink="MlflowSink")
        if run_id is None:
            active = self._mlflow.active_run()
            if active is None:
                raise LaconicError("MlflowSink: no run is active. Call mlflow.start_run() first, or pass run_id=.")
            run_id = active.info.run_id
        # By its id: MLflow keeps the active run per thread, and another thread would start a run of its own.
        self._run_id = run_id
        super().__init__()

    def send(self, values: StepValues) -> None:
        """Log one metric for each number."""
        metrics = {f"laconic/{name}": value for name, value in values.values.items()}
        self._mlflow.log_metrics(metrics, step=values.step, run_id=self._run_id)
