"""The table: losses beside torch DDP's, and how much sooner its final loss is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.time_to_loss.gpt2.job import DDP, Outcome


def table(outcomes: Sequence[Outcome], steps: int) -> Iterator[str]:
    """One row per training; torch DDP's final loss is the best over rates, for the same seed and text."""
    curves = [found for found in outcomes if found.job.contender == DDP and found.losses and found.job.steps == steps]
    timed = {found.job.link: found for found in outcomes if found.job.contender == DDP and found.job.link}
    width = max((len(found.job.contender) for found in outcomes), default=0)
    yield (
        f"{'link':8} {'contender':{width}} {'rate':>7} {'warm-up':>7} {'steps':>5} {'seed':>4} {'text':8} "
        f"{'loss':>7} {'change':>7} {'ms/step':>9} {'MB/step':>8} {'fewer':>7} {'memory':>9}  DDP's loss after"
    )
    for found in outcomes:
        job = found.job
        alike = [curve for curve in curves if (curve.job.seed, curve.job.text) == (job.seed, job.text)]
        of_seed = [curve.losses[-1] for curve in alike]
        ddp = timed.get(job.link)
        loss = change = sooner = ""
        if found.losses:
            loss = f"{found.losses[-1]:.4f}"
        if found.losses and of_seed:
            target = min(of_seed)
            change = f"{found.losses[-1] / target - 1:+.2%}"
            if job.link:
                sooner = _sooner(found, target, ddp, steps)
        fewer = f"{ddp.sent_bytes / found.sent_bytes:.1f}x" if ddp and found.sent_bytes else ""
        memory = f"{found.memory_bytes / 2**30:.1f} GiB"
        how = f"{job.rate:7.4g} {job.warmup:7.0%} {job.steps:5} {job.seed:4} {job.text:8}"
        yield (
            f"{job.link or '-':8} {job.contender:{width}} {how} "
            f"{loss:>7} {change:>7} {1e3 * found.step_s:9.1f} {found.sent_bytes / 1e6:8.1f} {fewer:>7} {memory:>9}  "
            f"{sooner}"
        )


def _sooner(found: Outcome, target: float, ddp: Outcome | None, steps: int) -> str:
    reached_s = found.reached_s(target)
    if reached_s is None:
        return f"not in {found.seconds[-1]:.0f} s"
    if ddp is None:
        return f"{reached_s:.0f} s"
    return f"{reached_s:.0f} s, {steps * ddp.step_s / reached_s:.1f} times sooner"
