"""Event sinks for experiment trackers; each needs the tracker's package when it is constructed.

    with laconic.TensorBoardSink("runs/tb") as sink, laconic.attach(model, optimizer, "powersgd", events=sink):
        ...

Several at once, together with the complete log: `laconic.EventTee(laconic.EventLog("events.jsonl"), sink)`.
"""

from laconic.sinks.mlflow import MlflowSink
from laconic.sinks.prometheus import PrometheusSink
from laconic.sinks.step_values import StepValues
from laconic.sinks.tensorboard import TensorBoardSink
from laconic.sinks.tracker import TrackerSink
from laconic.sinks.wandb import WandbSink

__all__ = ["MlflowSink", "PrometheusSink", "StepValues", "TensorBoardSink", "TrackerSink", "WandbSink"]
