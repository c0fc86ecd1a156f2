"""Event sinks for trackers of experiments, each of which needs a package of its own when it is made.

    with laconic.TensorBoardSink("runs/tb") as sink, laconic.attach(model, optimizer, "powersgd", events=sink):
        ...

Several at once, with the complete log beside them: `laconic.EventTee(laconic.EventLog("events.jsonl"), sink)`.
"""

from laconic.sinks.mlflow import MlflowSink
from laconic.sinks.prometheus import PrometheusSink
from laconic.sinks.step_values import StepValues
from laconic.sinks.tensorboard import TensorBoardSink
from laconic.sinks.tracker import TrackerSink
from laconic.sinks.wandb import WandbSink

__all__ = ["MlflowSink", "PrometheusSink", "StepValues", "TensorBoardSink", "TrackerSink", "WandbSink"]
