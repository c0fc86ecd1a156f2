"""One fault: which strategy, on which rank, at which moment."""

from __future__ import annotations

import random
from dataclasses import dataclass

TIMEOUT_S = 8.0
"""Of every wait in the jobs; longer than a rank is frozen for."""
LATE_S = 2.0
"""By how much a survivor may exceed the job's own time limit."""
FROZEN_S = 5.0
STEPS = 16
"""A multiple of every period: the last step of all strategies needs everybody."""

STRATEGIES = {
    "fusion": "bsp / all_reduce / none / fusion(bytes=64KiB, first_bytes=16KiB)",
    "sequential": "bsp / all_reduce / none / sequential",
    "wfbp": "bsp / all_reduce / none / wfbp",
    "mg_wfbp": "bsp / all_reduce / none / mg_wfbp",
    "priority": "bsp / all_reduce / none / priority(partition_bytes=64KiB)",
    "dear": "bsp / all_reduce / none / dear(bytes=64KiB)",
    "dear, one bucket": "bsp / all_reduce / none / dear(bytes=25MiB)",
    "ring": "bsp / all_reduce(algorithm=ring) / none / fusion",
    "int8": "bsp / all_reduce / int8 / fusion",
    "topk": "bsp / all_reduce / topk + error_feedback / fusion(bytes=64KiB, first_bytes=16KiB)",
    "powersgd": "bsp / all_reduce / powersgd + error_feedback / fusion(bytes=64KiB, first_bytes=16KiB)",
    "local_sgd": "local_sgd(period=4)",
    "diloco": "diloco(period=4) / all_reduce / int4 + error_feedback",
    "streaming_diloco": "streaming_diloco(period=8, fragments=4, overlap=1) / all_reduce / int4 + error_feedback",
    "demo": "demo / all_reduce / dct_topk",
    "servers": "bsp / parameter_server / none / fusion",
    "servers, priority": "bsp / parameter_server / none / priority(partition_bytes=64KiB)",
    "servers, topk": "bsp / parameter_server / topk + error_feedback / fusion",
    "ssp": "ssp / parameter_server",
    "asp": "asp / parameter_server",
    "gossip": "bsp / gossip",
    "choco": "bsp / choco / topk(density=0.1)",
    "push_sum": "bsp / push_sum",
    "pairs": "asp / gossip",
}
UNORDERED = {"ssp", "asp", "pairs"}
"""Where nobody waits for others, so that no two runs give the same."""

MOMENTS = ("attach", "forward", "backward", "before step", "between", "state_dict", "average", "detach")
FAULTS = ("SIGKILL", "SIGSTOP", "SIGTERM", "exception", "frozen")


@dataclass(frozen=True)
class Scenario:
    """What is done to which rank when."""

    number: int
    strategy: str
    moment: str
    fault: str
    world_size: int
    victim: int
    step: int
    store: str
    """"launcher" or "rank 0": who hosts the job's store."""
    style: str
    """How the script ends a session: "with", "finally" or "bare"."""
    batch_norm: bool
    delay_s: float
    """How long after the moment was announced a signal comes."""

    @property
    def text(self) -> str:
        """One line."""
        return (
            f"{self.number}: {self.strategy}, {self.fault} of rank {self.victim} of {self.world_size} at {self.moment} "
            f"(step {self.step}, {self.style}, store: {self.store})"
        )


def draw(number: int, seed: int, only: str | None) -> Scenario:
    """The scenario with this number; strategies, moments and faults come equally often."""
    chance = random.Random(f"{seed}/{number}")
    names = [name for name in STRATEGIES if only is None or only in name]
    combined = chance.randrange(10**6)
    moment = MOMENTS[combined % len(MOMENTS)]
    # Late enough to come at any moment, and early enough that the rank is still there.
    delay_s = chance.choice((0.0, 0.0, 0.001) if moment == "detach" else (0.0, 0.0, 0.001, 0.01, 0.03))
    return Scenario(
        number=number,
        strategy=names[number % len(names)],
        moment=moment,
        fault=FAULTS[combined // len(MOMENTS) % len(FAULTS)],
        world_size=(world_size := chance.choice((3, 4))),
        victim=chance.randrange(world_size),
        step=chance.randrange(1, STEPS // 2 if delay_s else STEPS - 1),
        store=chance.choice(("launcher", "rank 0")),
        style=chance.choice(("with", "finally", "bare")),
        batch_norm=chance.random() < 0.3,
        delay_s=delay_s,
    )
