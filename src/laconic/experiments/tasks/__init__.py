"""The embedded tasks: a small GPT on text, a small CNN on images, and replayed compute."""

from __future__ import annotations

from laconic.experiments.tasks.contract import Task, TaskConfig, TaskKind
from laconic.experiments.tasks.images import ImageTask
from laconic.experiments.tasks.replay import ReplayTask
from laconic.experiments.tasks.text import TextTask

__all__ = ["Task", "TaskConfig", "TaskKind", "make_task"]

_TASKS: dict[TaskKind, type[TextTask | ImageTask | ReplayTask]] = {
    "text": TextTask,
    "images": ImageTask,
    "replay": ReplayTask,
}


def make_task(config: TaskConfig) -> Task:
    """The task `config` describes; raises UsageError if its data cannot be read."""
    return _TASKS[config.kind](config)
