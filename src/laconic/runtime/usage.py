"""Which parameters were used by anyone: a parameter no rank used keeps its gradient as it was, usually None.

Optimizers treat "no gradient" and "zero gradient" differently (weight decay, momentum), so replicas must agree on it.

On a CPU, ranks ask each other only when it can matter: when the exchanged gradient of some parameter is zero
throughout, which every rank sees in its own copy of the same result. On a GPU that look would make the host wait for
the device in every step, so there ranks always exchange one byte per parameter, and only a rank that misses a
gradient waits for the answer.
"""

from __future__ import annotations

import torch

from laconic.core.exchange import Exchange, one_round
from laconic.core.transport import Transport
from laconic.runtime.buckets import Buckets
from laconic.runtime.engine import Engine, Task


def unused_everywhere(
    used_here: dict[str, bool], buckets: Buckets, transport: Transport, engine: Engine, *, step: int, ask: bool
) -> set[str]:
    """Names of the parameters that got no gradient on any rank.

    ask: without a look at the result, which may not be there yet.
    """
    on_gpu = ask or any(bucket.device.type == "cuda" for bucket in buckets.plan.buckets)
    if not on_gpu and not buckets.some_parameter_is_zero():
        return set()
    device = transport.control_device
    all_used_here = all(used_here.values())
    what = "which parameters were used"
    flags: list[torch.Tensor] = []

    def start() -> Exchange:
        # Made here, on the communication thread's own stream: on a GPU nobody waits for this exchange, and memory of
        # the training stream could be given to something else while the exchange still writes to it.
        if all_used_here:
            used = torch.ones(len(used_here), dtype=torch.uint8, device=device)
        else:
            used = torch.tensor(list(used_here.values()), dtype=torch.uint8).to(device)
        flags.append(used)
        return one_round(transport.all_reduce(used, op="max", purpose="control", what=what))

    task = engine.submit(Task(what, start, step=step, device=device))
    if on_gpu and all_used_here:
        return set()
    engine.wait(task)
    nobody = [name for name, anyone in zip(used_here, flags[0].tolist(), strict=True) if not anyone]
    # What compression still owed may have arrived for a parameter nobody used: that is to be applied.
    return {name for name in nobody if not bool(buckets.views[name].any())}
