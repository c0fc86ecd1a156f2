"""HOW one all-reduce runs. One file per algorithm; its registration is its entry in the list below."""

from collections.abc import Mapping

from laconic.collectives.algorithm import Algorithm
from laconic.collectives.double_tree import DOUBLE_TREE
from laconic.collectives.halving_doubling import HALVING_DOUBLING
from laconic.collectives.hierarchical import HIERARCHICAL
from laconic.collectives.ring import RING
from laconic.collectives.schedule import Collective
from laconic.collectives.torus2d import TORUS2D
from laconic.collectives.tree import TREE

ALGORITHMS: Mapping[str, Algorithm] = {
    algorithm.name: algorithm for algorithm in (RING, TREE, DOUBLE_TREE, TORUS2D, HIERARCHICAL, HALVING_DOUBLING)
}
"""By name, as the setting `algorithm` of all_reduce takes them."""

__all__ = ["ALGORITHMS", "Algorithm", "Collective"]
