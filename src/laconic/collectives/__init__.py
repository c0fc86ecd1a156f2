"""HOW one all-reduce runs. One file per algorithm; its registration is its entry in the list below."""

from collections.abc import Callable, Mapping

from laconic.collectives.double_tree import double_tree
from laconic.collectives.halving_doubling import halving_doubling
from laconic.collectives.hierarchical import hierarchical
from laconic.collectives.ring import ring
from laconic.collectives.schedule import Collective
from laconic.collectives.torus2d import torus2d
from laconic.collectives.tree import tree
from laconic.core.hosts import Hosts

_Maker = Callable[[Hosts], Collective]


def _anywhere(make: Callable[[int], Collective]) -> _Maker:
    """An algorithm that does not care who shares a host."""
    return lambda hosts: make(sum(map(len, hosts)))


ALGORITHMS: Mapping[str, _Maker] = {
    "ring": _anywhere(ring),
    "tree": _anywhere(tree),
    "double_tree": _anywhere(double_tree),
    "halving_doubling": _anywhere(halving_doubling),
    "torus2d": _anywhere(torus2d),
    "hierarchical": hierarchical,
}
"""By name: the collective for ranks on these hosts."""

__all__ = ["ALGORITHMS", "Collective"]
