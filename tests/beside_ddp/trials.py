"""Many small trials on the same real ranks: processes are started once, each trial gets a process group of its own.

    outcomes = run_trials("tests.beside_ddp.cases:compare", names, world_size=3, limit_s=30)
    outcomes["tied embeddings"].ranks    # what each rank returned, in rank order

A trial is one call of `target` with a name; it returns a line of text. A trial that raises is "raised ...", and does
not disturb the next one: its ranks leave their process group, meet at a store and begin anew. A trial that runs longer
than `limit_s` or ends a process is named ("hung" or "crashed", with the stack where it stood), and the trials after it
run in new processes. Time is kept by faulthandler, which needs no interpreter lock: a deadlock may hold that.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.processes import RankResult, run_processes

_GROUP_TIMEOUT_S = 20.0
"""How long a collective waits for a rank that has gone another way."""
_ENVIRONMENT = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""torch's store looks up the name of every peer; where the name server is slow that took 5 s per connection."""
_SHOWN_LINES = 12


@dataclass(frozen=True)
class Outcome:
    """How one trial ended."""

    ranks: list[str]
    """What each rank has to say."""
    seconds: float

    @property
    def text(self) -> str:
        """What all ranks say, once if they agree."""
        return (
            self.ranks[0]
            if len(set(self.ranks)) == 1
            else "\n".join(f"rank {rank}: {said}" for rank, said in enumerate(self.ranks))
        )


def run_trials(target: str, names: Sequence[str], *, world_size: int, limit_s: float = 40.0) -> dict[str, Outcome]:
    """Run all trials; for each name how it ended."""
    outcomes: dict[str, Outcome] = {}
    left = list(names)
    while left:
        with tempfile.TemporaryDirectory(prefix="laconic-trials-") as folder:
            results = run_processes(
                "tests.beside_ddp.trials:be_rank",
                world_size=world_size,
                arguments={"target": target, "names": left, "folder": folder, "limit_s": limit_s},
                timeout_s=len(left) * limit_s + 60,
                may_fail=True,
                environment=_ENVIRONMENT,
            )
            journals = [_journal(Path(folder), rank) for rank in range(world_size)]
            stacks = [_stack(Path(folder), rank) for rank in range(world_size)]
            for name in list(left):
                left.remove(name)
                outcomes[name] = outcome = _outcome(
                    name, last=not left, journals=journals, stacks=stacks, results=results
                )
                if any(text.startswith(("hung", "crashed")) for text in outcome.ranks):
                    break  # the processes ended there; the trials after it need new ones
    return outcomes


def _outcome(
    name: str,
    *,
    last: bool,
    journals: list[dict[str, tuple[str, float]]],
    stacks: list[str],
    results: list[RankResult],
) -> Outcome:
    texts = []
    for journal, stack, result in zip(journals, stacks, results, strict=True):
        if name not in journal:
            code = result.exit_code
            texts.append(f"hung.\n{stack}" if stack else f"crashed: the process ended with exit code {code}.")
        elif last and stack:
            texts.append(f"hung on the way out, after: {journal[name][0]}\n{stack}")
        else:
            texts.append(journal[name][0])
    return Outcome(texts, max((journal[name][1] for journal in journals if name in journal), default=0.0))


def be_rank(target: str, names: list[str], folder: str, limit_s: float) -> None:
    """What each process does."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    stack = Path(folder, f"{rank}.stack").open("w")  # noqa: SIM115 - open as long as the process lives

    def begin_limit() -> None:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=stack)

    begin_limit()
    module, _, function = target.partition(":")
    trial = getattr(importlib.import_module(module), function)
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, timeout=timedelta(seconds=limit_s + 20))
    journal = Path(folder, f"{rank}.jsonl")
    for index, name in enumerate(names):
        began_s = time.monotonic()
        begin_limit()
        outcome = _one(trial, name, dist.PrefixStore(f"trial/{index}", store), rank, world_size)
        _write(journal, name, outcome, time.monotonic() - began_s)
        # Nobody begins the next trial while others still wait for this one.
        store.set(f"ended/{index}/{rank}", "")
        store.wait([f"ended/{index}/{other}" for other in range(world_size)])
    begin_limit()  # for the way out


def _one(trial, name: str, store: dist.Store, rank: int, world_size: int) -> str:
    try:
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=_GROUP_TIMEOUT_S)
        )
        # A rank that takes no part in the trial must not close its connections while another is still making its own.
        store.set(f"connected/{rank}", "")
        store.wait([f"connected/{other}" for other in range(world_size)])
        return trial(name)
    except BaseException as exc:  # noqa: BLE001 - whatever a trial raises is its outcome
        last = "".join(traceback.format_exception(exc)).splitlines()[-_SHOWN_LINES:]
        return "\n".join([f"raised {type(exc).__name__}: {exc}", *last])
    finally:
        with contextlib.suppress(AssertionError, ValueError):  # the trial may have left it already
            dist.destroy_process_group()


def _write(journal: Path, name: str, outcome: str, seconds: float) -> None:
    with journal.open("a") as file:
        file.write(json.dumps({"name": name, "outcome": outcome, "seconds": seconds}) + "\n")


def _read(journal: Path) -> dict[str, tuple[str, float]]:
    if not journal.exists():
        return {}
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    return {line["name"]: (line["outcome"], line["seconds"]) for line in lines}


def _stack(folder: Path, rank: int) -> str:
    """Where each thread of the rank stood when its time was over; empty if it never was."""
    path = folder / f"{rank}.stack"
    return path.read_text() if path.exists() else ""


def _journal(folder: Path, rank: int) -> dict[str, tuple[str, float]]:
    return _read(folder / f"{rank}.jsonl")
