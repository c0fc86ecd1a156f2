"""One rank of one contest: the same task under torch DDP and under laconic strategies, taking turns in one job.

Started once per rank as `python -m laconic.experiments.contest CONFIG.json`. All measurements are written as events,
which laconic.report evaluates; live messages to the starting process are printed (rank_messages.py).
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from laconic.core.event import Event, EventLog
from laconic.errors import AttachError, LaconicError, StrategyError, UnsupportedGradient, one_line
from laconic.experiments.contender import Contender
from laconic.experiments.rank_messages import Failure, Refusal, tell
from laconic.experiments.sharded_model import ShardGrid
from laconic.experiments.tasks import TaskConfig, make_task
from laconic.report.results import is_torchs_own
from laconic.strategy import Strategy

BLOCK_STEPS = 5
"""Steps of one contender before the next one's turn, so that a drift of the machine favours none."""
_GPU_BLOCK_STEPS = 20
"""Steps of a turn on a GPU, which is timed by whole turns: longer, because nothing overlaps at the end of a turn."""
_DETAILED_STEPS = 200
"""After these, events inside a step are recorded for every tenth step only, to keep files small."""
_DETAILS = frozenset({"forward", "backward", "optimizer", "wait", "encode", "decode", "exchange"})


@dataclass(frozen=True, kw_only=True)
class ContestConfig:
    """The configuration of every rank of a contest."""

    task: TaskConfig
    contenders: tuple[str, ...]
    """Strategy texts, or PyTorch's own; all train the same model on the same batches."""
    steps: int | None
    """Steps of each contender; None: as many as fit in `seconds`."""
    seconds: float | None
    """Training time of each contender; None: as long as `steps` take."""
    link: str
    """The name of the link in the events."""
    events: str
    """The file every rank appends its events to."""
    device: Literal["cpu", "cuda"]
    ranks_per_host: int = 1
    sharded: bool = False
    """Whether the ranks of a host share one model."""

    def write(self, path: Path) -> None:
        """Save for the ranks to read."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> ContestConfig:
        """Read what `write` saved."""
        document = json.loads(path.read_text(encoding="utf-8"))
        task, contenders = TaskConfig(**document.pop("task")), tuple(document.pop("contenders"))
        return cls(task=task, contenders=contenders, **document)


def hold(config: ContestConfig, log: EventLog) -> None:
    """Train all contenders in the current process group, in turns."""
    contenders = _contenders(config, log)
    for contender in contenders:
        contender.rehearse()
    least = _GPU_BLOCK_STEPS if config.device == "cuda" else BLOCK_STEPS
    block, delay = _block_steps([contender.strategy for contender in contenders], least)

    def steps_left(contender: Contender) -> int:
        turn = block if contender.num_steps else block + delay
        if config.steps is not None:
            return min(turn, config.steps - contender.num_steps)
        assert config.seconds is not None
        return turn if contender.seconds < config.seconds else 0

    first = 0
    while any(steps_left(contender) for contender in contenders):
        # Another one begins each time, so that none always follows the same neighbour.
        for number in [(first + turn) % len(contenders) for turn in range(len(contenders))]:
            due = steps_left(contenders[number])
            if due:
                _record(log, contenders[number].turn(due))
        first += 1
    for contender in contenders:
        _record(log, contender.finish())


def _contenders(config: ContestConfig, log: EventLog) -> list[Contender]:
    """All contenders that can take part; a strategy that cannot be attached to this model is reported and left out."""
    device = torch.device("cuda", torch.cuda.current_device()) if config.device == "cuda" else torch.device("cpu")
    task = make_task(config.task)
    grid = ShardGrid.make(device.type, dist.get_world_size(), config.ranks_per_host) if config.sharded else None
    contenders: list[Contender] = []
    refusals: list[Refusal] = []
    for number, strategy in enumerate(config.contenders):
        try:
            made = Contender(number, strategy, task, device, grid, link=config.link, total_steps=config.steps)
            contenders.append(made)
        except (StrategyError, AttachError, UnsupportedGradient) as exc:
            refusals.append(Refusal(number, one_line(exc, 500)))
    refused = torch.zeros(len(config.contenders), device=device)
    refused[[refusal.contender for refusal in refusals]] = 1
    ranks = refused.clone()
    dist.all_reduce(ranks)
    if not torch.equal(ranks, refused * dist.get_world_size()):
        raise LaconicError("some ranks could attach strategies that others could not; see the output of each rank.")
    if dist.get_rank() == 0:
        for refusal in refusals:
            tell(refusal)
            about = {"strategy": config.contenders[refusal.contender], "link": config.link, "reason": refusal.reason}
            log.write(Event("refused", time.perf_counter(), 0, 0, data={**about}))
    return contenders


def _block_steps(contenders: Sequence[str], least: int) -> tuple[int, int]:
    """Steps in a turn, and additional steps in the first one.

    A turn is a whole number of the longest period, and ends when nothing is in flight: otherwise the rest of
    the communication would count in the next contender's turn.
    """
    ours = [name for name in contenders if not is_torchs_own(name)]
    rules = [Strategy.parse(name).synchronization for name in ours]
    period = max((rule.interval for rule in rules), default=1)
    return math.ceil(least / period) * period, max((rule.delay + 1 for rule in rules if rule.delay), default=0)


def _record(log: EventLog, events: list[Event]) -> None:
    for event in events:
        if event.kind not in _DETAILS or event.step < _DETAILED_STEPS or event.step % 10 == 0:
            log.write(event)


def main() -> int:
    """Run one rank."""
    config = ContestConfig.read(Path(sys.argv[1]))
    torch.set_num_threads(1)
    if config.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    try:
        dist.init_process_group("nccl" if config.device == "cuda" else "gloo")
    except (RuntimeError, ValueError) as exc:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return _fail(f"cannot start the process group at {where}: {one_line(exc)}")
    try:
        with EventLog(config.events) as log:
            hold(config, log)
    except LaconicError as exc:
        return _fail(f"{type(exc).__name__}: {exc}")
    except Exception as exc:
        _fail(f"{type(exc).__name__}: {exc}")
        raise
    dist.destroy_process_group()
    return 0


def _fail(error: str) -> int:
    """Report why this rank ends, before its child processes report that they end."""
    tell(Failure(int(os.environ["RANK"]), time.monotonic(), one_line(error, 500)))
    return 2


if __name__ == "__main__":
    sys.exit(main())
