"""Which parameters were used by anyone: a parameter no rank used keeps its gradient as it was, usually None.

Optimizers treat "no gradient" and "zero gradient" differently (weight decay, momentum), so replicas must agree. Ranks
ask each other only when it can matter: when the exchanged gradient of some parameter is zero throughout, which every
rank sees in its own copy of the same result.
"""

from __future__ import annotations

import torch

from laconic.core.exchange import one_round
from laconic.core.transport import Transport
from laconic.runtime.buckets import Buckets
from laconic.runtime.engine import Engine


def unused_everywhere(
    used_here: dict[str, bool], buckets: Buckets, transport: Transport, engine: Engine, *, step: int
) -> set[str]:
    """Names of the parameters that got no gradient on any rank."""
    if not buckets.some_parameter_is_zero():
        return set()
    used = torch.tensor(list(used_here.values()), dtype=torch.uint8, device=transport.control_device)
    what = "which parameters were used"
    engine.call(
        what,
        lambda: one_round(transport.all_reduce(used, op="max", purpose="control", what=what)),
        step=step,
        device=transport.control_device,
    )
    return {name for name, anyone in zip(used_here, used.tolist(), strict=True) if not anyone}
