"""Numbers of every step in TensorBoard."""

from __future__ import annotations

from pathlib import Path

from laconic.errors import LaconicError
from laconic.sinks.step_values import StepValues
from laconic.sinks.tracker import TrackerSink, tracker_package


class TensorBoardSink(TrackerSink):
    """Writes scalars laconic/step_s, laconic/wait_s, ... into a folder that `tensorboard --logdir` shows."""

    def __init__(self, folder: str | Path) -> None:
        tensorboard = tracker_package("torch.utils.tensorboard", package="tensorboard", sink="TensorBoardSink")
        try:
            self._writer = tensorboard.SummaryWriter(str(folder))
        except OSError as exc:
            raise LaconicError(f"TensorBoardSink: cannot write to {folder}: {exc.strerror}.") from exc
        super().__init__()

    def send(self, values: StepValues) -> None:
        """Add a scalar for each number."""
        for name, value in values.values.items():
            self._writer.add_scalar(f"laconic/{name}", value, values.step)

    def finish(self) -> None:
        """Write the rest to disk."""
        self._writer.close()
