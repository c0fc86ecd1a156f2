"""Which combinations cannot work, why, and the nearest one that can.

A rule looks only at what methods declare about themselves, never at their names, so a new method is judged by the
same rules as the old ones. The modules:

    wrappers    compression with itself
    barriers    synchronization with architecture
    payloads    compression with architecture and synchronization
    reductions  architecture with compression, where sums are formed
    schedules   scheduling with the rest
    shards      architectures in which each rank holds a shard, with the rest
"""

from laconic.strategy.legality.check import ALONE, RULES, cannot_combine, check_legal, first_refusal, nearest_legal
from laconic.strategy.legality.combination import Parts, Refusal, Rule

__all__ = [
    "ALONE",
    "RULES",
    "Parts",
    "Refusal",
    "Rule",
    "cannot_combine",
    "check_legal",
    "first_refusal",
    "nearest_legal",
]
