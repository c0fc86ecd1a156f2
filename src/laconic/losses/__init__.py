"""The cost of strategies in loss: measured runs, published tables, and the rules that extend them to other sizes.

All such figures are here. `measured.py` holds this project's own, which tests compare with the pages in
docs/results; `published.py` those of others, with their sources; `steps_needed.py` turns losses of small models at
equal steps into steps, `at_scale.py` does so for a model of a given size.
"""

from laconic.losses.at_scale import LossCost, Scale, loss_cost
from laconic.losses.steps_needed import SAME, StepsNeeded, steps_needed

__all__ = ["SAME", "LossCost", "Scale", "StepsNeeded", "loss_cost", "steps_needed"]
