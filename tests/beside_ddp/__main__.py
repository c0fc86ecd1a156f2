"""Compare laconic with DDP and write what came of it as a page.

    python -m tests.beside_ddp --machine "a virtual machine with 2 ARM cores" > docs/results/beside_ddp.md

Exit status 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import sys
import textwrap
from collections import Counter, defaultdict

import torch

from tests.beside_ddp import test_cases, test_optimizers, test_pytorch_own
from tests.beside_ddp.cases import CASES
from tests.beside_ddp.cases import verdict as verdict_of_case
from tests.beside_ddp.matrix import SCHEDULES, cell
from tests.beside_ddp.optimizers import ROWS
from tests.beside_ddp.pytorch_tables import NOT_APPLICABLE, REFUSED

Counts = dict[int, Counter[str]]


def main() -> int:
    """Run everything; print the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.beside_ddp", description=main.__doc__)
    parser.add_argument("--machine", required=True, help="the machine, in words")
    machine = parser.parse_args().machine
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123 - a device
        parts = [_pytorch_own(), _cases(), _optimizers()]
    about = f"`python -m tests.beside_ddp`, {datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}, on {machine}, torch "
    about += f"{torch.__version__.partition('+')[0]}, CPU ranks over Gloo. CI runs the same comparisons as tests."
    page = "\n\n".join(["# Compared with DDP: what is equal, what is refused, what is not", about, *parts])
    print("\n".join(map(_wrapped, page.splitlines())))
    return int(any("WRONG" in part for part in parts))


def _wrapped(line: str) -> str:
    if line.startswith(("|", "#")):
        return line
    later = "  " if line.startswith("- ") else ""
    return textwrap.fill(line, 120, subsequent_indent=later, break_long_words=False, break_on_hyphens=False)


def _counted(counts: Counts, kind_of_thing: str) -> str:
    kinds = sorted({kind for counter in counts.values() for kind in counter}, key=lambda kind: -counts[2][kind])
    lines = [f"| {kind_of_thing} | {' | '.join(f'{size} ranks' for size in counts)} |"]
    lines.append("|---" * (len(counts) + 1) + "|")
    lines += [f"| {kind} | {' | '.join(str(counter[kind]) for counter in counts.values())} |" for kind in kinds]
    return "\n".join(lines)


def _pytorch_own() -> str:
    counts: Counts = {}
    wrong: list[str] = []
    for size in (2, 3):
        verdicts = {
            name: test_pytorch_own.verdict(name, outcome) for name, outcome in test_pytorch_own.outcomes(size).items()
        }
        counts[size] = Counter(verdicts.values()) + Counter({"not applicable": len(NOT_APPLICABLE)})
        wrong += [f"- WRONG with {size} ranks: `{name}`" for name, kind in verdicts.items() if kind == "WRONG"]
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, reason in NOT_APPLICABLE.items():
        by_reason[reason].append(name.removeprefix("test_"))
    listed = [f"- {reason} ({len(names)}): {', '.join(names)}" for reason, names in by_reason.items()]
    refused = [f'- {name.removeprefix("test_")}: "{pattern}"' for name, pattern in REFUSED.items()]
    return "\n\n".join(
        [
            "## PyTorch's own tests of DistributedDataParallel",
            f"This section runs the {len(test_pytorch_own.NAMES)} tests of "
            "torch.testing._internal.distributed.distributed_test that use DDP. A wrapper that attaches laconic takes "
            "the place of DDP. Devices are CPUs.",
            _counted(counts, "outcome"),
            *(["\n".join(wrong)] if wrong else []),
            "Refused by design, with an error that says:",
            "\n".join(refused),
            "Not applicable:",
            "\n".join(listed),
        ]
    )


def _cases() -> str:
    outcomes = {size: test_cases.outcomes(size) for size in test_cases.WORLD_SIZES}
    verdicts = {
        size: {name: verdict_of_case(name, outcome.ranks) for name, outcome in found.items()}
        for size, found in outcomes.items()
    }
    counts: Counts = {size: Counter(each.values()) for size, each in verdicts.items()}
    lines = [f"| case | {' | '.join(f'{size} ranks' for size in verdicts)} |", "|---" * (len(verdicts) + 1) + "|"]
    for name in CASES:
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(each.get(name, '') for each in verdicts.values())} |")
    reasons = [
        f"- {case.name.replace('_', ' ')}: {case.expected.why}"
        for case in CASES.values()
        if case.expected.kind in ("rounding", "right")
    ]
    return "\n\n".join(
        [
            f"## {len(CASES)} awkward models and loops",
            "The same loop runs with DDP and with laconic, from the same seeds. After every step, parameters, "
            "gradients and their strides, buffers and the optimizer's state are compared bit for bit.",
            _counted(counts, "outcome"),
            "\n".join(lines),
            "`right`: DDP raises an error or lets replicas diverge, and laconic gives the result of averaging by hand; "
            "`rounding`: sums are formed in another order, which makes a difference from 3 ranks on.",
            "\n".join(reasons),
        ]
    )


def _optimizers() -> str:
    cells = {
        (name, schedule): cell(name, schedule, test_optimizers.reference(name))
        for name in ROWS
        for schedule in SCHEDULES
    }
    return "\n\n".join(
        [
            f"## {len(ROWS)} optimizers under {len(SCHEDULES)} schedules",
            "Replicas are threads, and every operation is delayed by a random time, on each rank independently. "
            "`equal`: replicas are equal to each other and to plain `fusion`, bit for bit, and so are the optimizer's "
            "state, its groups and its own counters. `equal, waits`: the optimizer's step is not separable by "
            "parameter, so `step()` waits for all gradients, and a warning says so.",
            test_optimizers.table(cells),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
