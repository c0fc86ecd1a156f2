"""attach(model, optimizer, "auto"): measures the first steps, then lets the planner choose the strategy."""

from laconic.auto.attach import as_choice, attach
from laconic.auto.settings import Auto

__all__ = ["Auto", "as_choice", "attach"]
