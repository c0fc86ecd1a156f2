"""Which strategy to use for a model on a cluster: the cost of each in time and in loss, the best one, and why."""

from laconic.planner.answer import Answer, answer
from laconic.planner.choice import Choice
from laconic.planner.question import Limits, Question

__all__ = ["Answer", "Choice", "Limits", "Question", "answer"]
