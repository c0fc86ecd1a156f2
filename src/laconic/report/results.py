"""The results of a run: one row per strategy and link, and the curves behind the rows."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

from laconic.errors import UsageError, one_line
from laconic.report import typed_json

Links = Literal["shaped", "paced", "unlimited"]
"""shaped: real links of virtual hosts; paced: limited in software; unlimited: neither."""

TORCH_DDP = "torch DDP"
"""The name under which torch's own DistributedDataParallel runs as the baseline."""
TORCH_HSDP = "torch HSDP"
"""The baseline where the ranks of a host share one model: fully_shard over hosts and their ranks."""
BASELINES = (TORCH_DDP, TORCH_HSDP)
NO_COMMUNICATION = "no communication"
"""Every replica trains alone, which is the fastest possible step."""
TORCH_HOOKS = {"fp16": "torch DDP + fp16 hook", "powersgd": "torch DDP + PowerSGD hook"}
"""torch's own communication hooks, which can be compared as well: the option, and the name in results."""
FORMAT = 2


def is_torchs_own(contender: str) -> bool:
    """Whether it trains without laconic."""
    return contender in (*BASELINES, NO_COMMUNICATION, *TORCH_HOOKS.values())


def baseline_of(contenders: Iterable[str]) -> str:
    """The baseline with which the other contenders are compared."""
    return TORCH_HSDP if TORCH_HSDP in contenders else TORCH_DDP


@dataclass(frozen=True, kw_only=True)
class Row:
    """One strategy on one link, compared with the baseline."""

    strategy: str
    """The strategy's full text, or the name of one of PyTorch's own."""
    name: str
    """Its short name: that of an equal preset, if there is one."""
    link: str
    """A bandwidth such as 100mbit, the name of a cluster file, or "unlimited"."""
    links: Links
    steps: int
    """Steps it trained, warm-up included."""
    step_ms: float
    """Median of the timed steps, on a GPU the wall clock of whole turns; step_ms_low and _high are the quartiles."""
    step_ms_low: float
    step_ms_high: float
    compute_ms: float
    """The rest of step_ms: forward, backward and optimizer."""
    encode_ms: float
    """Time the step waited while its own communication thread encoded or decoded."""
    exposed_ms: float
    """Time the step waited for the network: forward and backward take this much longer than without communication."""
    wire_bytes_per_step: int | None
    """Bytes each rank sent per step to other hosts, averaged over the ranks of a host; None: not counted."""
    wire_bytes_source: Literal["kernel", "transport"] | None
    """kernel: the link's own counter, headers of all layers included."""
    counted_bytes_per_step: int | None
    """Bytes counted by laconic's transport; PyTorch's own traffic does not go through it."""
    predicted_bytes_per_step: int | None
    final_loss: float | None
    """Mean over the last tenth of its steps; None where nothing is learnt (replayed compute)."""
    loss_at_equal_steps: float | None
    """The loss, averaged likewise, at the number of steps that every strategy on this link has done."""
    seconds_to_target: float | None
    """Training time until the smoothed loss reached the target; None if it did not."""
    speedup_over_ddp: float | None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The curves of one row, step by step; at most a thousand points."""

    strategy: str
    link: str
    step: list[int]
    loss: list[float | None]
    """Empty where nothing is learnt; None at steps whose loss was not a number."""
    seconds: list[float]
    """Training time at the end of each step, this strategy's own steps only."""
    wire_bytes: list[int]
    """Bytes sent so far; empty where they were not counted."""


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A strategy that could not be attached to the model, and was left out."""

    strategy: str
    name: str
    link: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Results:
    """All results of a run, as in results.json."""

    kind: Literal["compare", "replay"]
    title: str
    """The work in one line, e.g. "GPT (small, 1.84 M parameters) on 4 hosts"."""
    began: str
    """Local time, ISO 8601."""
    seconds: float
    """How long the run took."""
    problem: str | None
    """Why the run ended early; the rows then hold the measurements until then."""
    target_loss: float | None
    rows: tuple[Row, ...]
    curves: tuple[Curve, ...]
    refused: tuple[Refused, ...]
    advice: tuple[str, ...]
    """One sentence per link: which strategy to use there and what it costs."""

    def to_json(self) -> str:
        """This as a JSON document."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, where: str) -> Results:
        """Read a document of to_json; `where` names the file in errors."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as exc:
            raise UsageError(f"{where} does not hold the results of a run: {one_line(exc, 120)}.") from exc
        if not isinstance(document, dict) or "format" not in document:
            raise UsageError(f"{where} does not hold the results of a run.")
        if document.pop("format") != FORMAT:
            raise UsageError(f"{where} was written by another version of laconic. Repeat the run from its config.toml.")
        results = typed_json.record(cls, document, where)
        for number, curve in enumerate(results.curves):
            lengths = {len(curve.seconds), *(len(series) for series in (curve.loss, curve.wire_bytes) if series)}
            if lengths != {len(curve.step)}:
                raise UsageError(f"{where}: curves[{number}]: step, loss, seconds and wire_bytes differ in length.")
        return results
