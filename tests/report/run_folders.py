"""Made-up runs with plausible numbers, to draw."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from laconic.core.event import Event, Scalar
from laconic.report.results import TORCH_DDP, Curve, Links, Results, Row
from laconic.report.run_folder import RunFolder
from laconic.units import parse_quantity

SIX = (
    (TORCH_DDP, TORCH_DDP, 1.0),
    ("bsp / all_reduce / none / fusion(bytes=25MiB, first_bytes=1MiB)", "ddp", 1.0),
    ("bsp / all_reduce / bf16 / fusion(bytes=25MiB, first_bytes=1MiB)", "ddp-bf16", 0.5),
    ("bsp / all_reduce / bf16 + error_feedback / fusion(bytes=25MiB, first_bytes=1MiB)", "ddp-bf16-ef", 0.5),
    ("bsp / all_reduce / none / wfbp", "wfbp-a2a", 1.0),
    ("bsp / all_reduce / none / sequential", "bsp-a2a", 1.0),
)
"""Strategy, name, share of DDP's bytes."""
_NO_PRESET = "diloco(period=64) / all_reduce / int4(block=128) + error_feedback(decay=0.9) / fusion(bytes=12MiB)"
TEN = (
    *SIX,
    ("bsp / all_reduce / topk(density=0.01) + error_feedback / wfbp", "topk-1%", 0.02),
    ("bsp / all_reduce / qsgd(levels=7) + error_feedback / wfbp", "qsgd-7", 0.14),
    ("bsp / all_reduce / powersgd(rank=4) + error_feedback / wfbp", "powersgd-4", 0.03),
    (_NO_PRESET, _NO_PRESET, 0.01),
)
_MODEL_BYTES = 11_000_000
_COMPUTE_S = 0.17


def make_run(
    path: Path,
    *,
    strategies: Sequence[tuple[str, str, float]] = SIX,
    links: Sequence[str] = ("100mbit",),
    kind: Links = "shaped",
    learns: bool = True,
    steps: int = 60,
    num_ranks: int = 2,
    num_buckets: int = 5,
    problem: str | None = None,
    title: str = "GPT (small, 1.9 M parameters) on 4 hosts",
    seed: int = 0,
) -> RunFolder:
    """Write the folder of a run; everything in it follows from the arguments."""
    dice = random.Random(seed)
    rows, curves, lines = [], [], []
    clock_s = 1000.0
    for link in links:
        baseline_ms = 0.0
        for strategy, name, share in strategies:
            row, encode_s = _row(
                strategy,
                name,
                share,
                link=link,
                kind=kind,
                learns=learns,
                steps=steps,
                baseline_ms=baseline_ms,
                dice=dice,
            )
            baseline_ms = baseline_ms or row.step_ms
            rows.append(row)
            curves.append(_curve(row, steps, learns, dice))
            for event in _events(
                row, clock_s, encode_s, steps=steps, num_ranks=num_ranks, num_buckets=num_buckets, dice=dice
            ):
                lines.append(event.to_json() + "\n")
                clock_s = max(clock_s, event.time_s + event.duration_s)
    results = Results(
        kind="compare" if learns else "replay",
        title=title,
        began="2026-11-15T09:30:00",
        seconds=612.4,
        problem=problem,
        target_loss=3.0 if learns else None,
        rows=tuple(rows),
        curves=tuple(curves),
        refused=(),
        advice=tuple(_advice(link, rows) for link in links),
    )
    path.mkdir(parents=True)
    folder = RunFolder(path)
    folder.write_results(results)
    folder.write_text("events.jsonl", "".join(lines))
    names = ", ".join(f'"{name}"' for _, name, _ in strategies[1:])
    folder.write_text("config.toml", f"[compare]\nstrategies = [{names}]\nhosts = 4\nsteps = {steps}\n")
    machine = {
        "python": "3.11.7",
        "torch": "2.13.0",
        "machine": {"cores": 2, "memory_bytes": int(7.8 * 2**30)},
        "gpus": [],
    }
    folder.write_text("env.json", json.dumps(machine))
    return folder


def _advice(link: str, rows: Sequence[Row]) -> str:
    best = min((row for row in rows if row.link == link), key=lambda row: row.step_ms)
    return f"On {link} links use {best.name}: {best.speedup_over_ddp:.2f}x the speed of torch DDP at the same loss."


def _row(
    strategy: str,
    name: str,
    share: float,
    *,
    link: str,
    kind: Links,
    learns: bool,
    steps: int,
    baseline_ms: float,
    dice: random.Random,
) -> tuple[Row, float]:
    rate_bps = 20e9 if link == "unlimited" else parse_quantity(link, "rate", "link")
    network_s = _MODEL_BYTES * share * 8 / rate_bps * (1.0 if "sequential" in strategy else 0.95)
    encode_s = 0.0 if share == 1.0 else 0.004 + 0.02 * (1 - share)
    exposed_s = max(0.003, network_s - (0 if "sequential" in strategy else 0.08))
    step_ms = (_COMPUTE_S + encode_s + exposed_s) * 1e3 * dice.uniform(0.98, 1.02)
    predicted = int(_MODEL_BYTES * share)
    is_ddp = strategy == TORCH_DDP
    counted = None if is_ddp else predicted
    kernel = int(predicted * 1.035) if kind == "shaped" else None
    loss = 2.9 + 0.02 * (1 - share) + dice.uniform(-0.01, 0.01) if learns else None
    row = Row(
        strategy=strategy,
        name=name,
        link=link,
        links=kind,
        steps=steps,
        step_ms=step_ms,
        step_ms_low=step_ms * 0.97,
        step_ms_high=step_ms * 1.04,
        compute_ms=step_ms - (encode_s + exposed_s) * 1e3,
        encode_ms=encode_s * 1e3,
        exposed_ms=exposed_s * 1e3,
        wire_bytes_per_step=kernel if kernel is not None else counted,
        wire_bytes_source="kernel" if kernel is not None else "transport" if counted is not None else None,
        counted_bytes_per_step=counted,
        predicted_bytes_per_step=None if is_ddp else predicted,
        final_loss=loss,
        loss_at_equal_steps=loss,
        seconds_to_target=steps * 0.8 * step_ms / 1e3 if learns and share > 0.01 else None,
        speedup_over_ddp=(baseline_ms or step_ms) / step_ms,
    )
    return row, encode_s


def _curve(row: Row, steps: int, learns: bool, dice: random.Random) -> Curve:
    number = list(range(1, steps + 1))
    end = row.final_loss or 0.0
    loss = [end + 1.6 * math.exp(-4 * step / steps) + dice.gauss(0, 0.05) for step in number] if learns else []
    sent = row.wire_bytes_per_step
    return Curve(
        strategy=row.strategy,
        link=row.link,
        step=number,
        loss=loss,
        seconds=[step * row.step_ms / 1e3 for step in number],
        wire_bytes=[] if sent is None else [step * sent for step in number],
    )


def _events(
    row: Row,
    clock_s: float,
    encode_s: float,
    *,
    steps: int,
    num_ranks: int,
    num_buckets: int,
    dice: random.Random,
) -> Iterator[Event]:
    """A few steps are enough: the page shows one."""
    about: dict[str, Scalar] = {"strategy": row.strategy, "link": row.link}
    end_s = clock_s
    durations_s = [row.step_ms / 1e3 * dice.uniform(0.97, 1.04) for _ in range(min(steps, 6))]
    for rank in range(num_ranks):
        now_s = clock_s + 0.002 * rank
        yield Event("alone", now_s, rank, 0, _COMPUTE_S, {**about})
        now_s += _COMPUTE_S
        for step, step_s in enumerate(durations_s):
            forward_s, optimizer_s = 0.055, 0.012
            backward_s = step_s - forward_s - optimizer_s
            yield Event("forward", now_s, rank, step, forward_s, {**about})
            yield Event("backward", now_s + forward_s, rank, step, backward_s, {**about})
            yield Event("optimizer", now_s + forward_s + backward_s, rank, step, optimizer_s, {**about})
            if row.strategy != TORCH_DDP:
                yield from _exchanges(
                    row,
                    now_s + forward_s,
                    backward_s,
                    encode_s,
                    rank=rank,
                    step=step,
                    num_buckets=num_buckets,
                    about=about,
                )
            data: dict[str, Scalar] = {**about, "loss": row.final_loss, "sent_bytes": row.counted_bytes_per_step}
            yield Event("iteration", now_s, rank, step, step_s, data)
            now_s += step_s
        end_s = max(end_s, now_s)
    for rank in range(num_ranks):
        yield Event("turn", clock_s, rank, 0, end_s - clock_s, {**about, "num_steps": 6, "kernel_bytes": None})


def _exchanges(
    row: Row,
    backward_begin_s: float,
    backward_s: float,
    encode_s: float,
    *,
    rank: int,
    step: int,
    num_buckets: int,
    about: dict[str, Scalar],
) -> Iterator[Event]:
    computing_s = max(0.02, backward_s - (row.exposed_ms / 1e3))
    wait_s = backward_s - computing_s
    yield Event("wait", backward_begin_s + computing_s, rank, step, wait_s, {**about})
    each_encode_s = max(encode_s / num_buckets * 0.6, 1e-4)
    each_decode_s = max(encode_s / num_buckets * 0.4, 1e-4)
    first_s = 0.0 if "sequential" not in row.strategy else computing_s
    for bucket in range(num_buckets):
        begin_s = backward_begin_s + first_s + (backward_s - first_s) * 0.8 * bucket / num_buckets
        # Two are in flight at a time.
        took_s = min(
            (backward_s - first_s) * 1.5 / num_buckets + each_encode_s + each_decode_s,
            backward_begin_s + backward_s - begin_s,
        )
        data: dict[str, Scalar] = {**about, "bucket": bucket}
        sent = row.counted_bytes_per_step or 0
        yield Event("encode", begin_s, rank, step, each_encode_s, {**data})
        yield Event("decode", begin_s + took_s - each_decode_s, rank, step, each_decode_s, {**data})
        yield Event("exchange", begin_s, rank, step, took_s, {**data, "wire_bytes": sent // num_buckets})
