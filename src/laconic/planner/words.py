"""An answer in sentences: the verdict, the reasons, the costs, crossovers, and what the answer is based on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from laconic.planner.answer import Answer
from laconic.planner.candidates import DDP, FSDP, short_name
from laconic.planner.choice import FORMULA_ERROR, PROBED_ERROR, Choice
from laconic.planner.crossovers import BandwidthRange
from laconic.strategy import Strategy
from laconic.units import human_bytes, human_count, human_duration, human_factor, human_rate, human_seconds

_WORTH_IT = 1.02
"""Below this nothing is gained."""
_FEWER = 1.1

NOT_MODELLED = (
    "lost packets and congestion",
    "loading data",
    "activations and the allocator's reserve in memory",
    "the time of the optimizer",
    "other learning rates, which should be tuned for every method",
)


def name_of(strategy: Strategy) -> str:
    """The common name of a strategy."""
    return {DDP: "plain DDP", FSDP: "plain FSDP2"}.get(strategy, short_name(strategy))


def choice_name(choice: Choice) -> str:
    """The common name of a choice, which says whether hosts are its workers."""
    name = name_of(choice.strategy)
    return f"FSDP2 inside hosts with {name} between them" if choice.islands else name


def verdict(answer: Answer) -> str:
    """What to use, in one sentence."""
    best, baseline = answer.best, answer.baseline
    plain = name_of(baseline.strategy)
    if best is baseline or answer.sooner(best)[0] < _WORTH_IT:
        what = "no lossless strategy is" if answer.question.limits.lossless else "no other strategy is"
        return f"Use {plain}: {what} predicted to reach its loss noticeably sooner here."
    times, low, high = answer.sooner(best)
    return (
        f"Use {choice_name(best)}: it is predicted to have the loss of {plain} after "
        f"{human_duration(best.seconds)} instead of {human_duration(baseline.seconds)}, {human_factor(times)} times "
        f"sooner{f' ({human_factor(low)} to {human_factor(high)})' if low != high else ''}."
    )


def reasons(choice: Choice, answer: Answer) -> list[str]:
    """The reasons for a strategy's rank: time, bytes, memory, loss, and its requirements."""
    baseline = answer.baseline
    found = [_time_goes_to(choice, baseline), _bytes(choice, baseline)]
    if choice.memory.strategy:
        found.append(f"It keeps {human_bytes(choice.memory.strategy)} of state besides model and optimizer.")
    found.append(loss_in_words(choice))
    found += demands(choice.strategy)
    if choice.islands:
        found.append('Shard inside hosts, attach between them: attach(..., process_group=mesh["replicate"]).')
    return [sentence for sentence in found if sentence]


def _time_goes_to(choice: Choice, baseline: Choice) -> str:
    told = choice.prediction.in_words().removeprefix("Of a step ")
    average = (
        ""
        if math.isclose(choice.step_s, choice.prediction.step_s, rel_tol=1e-3)
        else " on average, early ones included"
    )
    compared = "" if choice is baseline else f", {human_seconds(baseline.step_s)} for {name_of(baseline.strategy)}"
    return f"A step takes {human_seconds(choice.step_s)}{average}{compared}; of it {told}"


def _bytes(choice: Choice, baseline: Choice) -> str:
    sent, plain = choice.prediction.wire_bytes, baseline.prediction.wire_bytes
    if not sent:
        return ""
    fewer = f", {human_factor(plain / sent)} times fewer" if choice is not baseline and plain / sent >= _FEWER else ""
    return f"A worker sends {human_bytes(sent)} per step{fewer}."


def loss_in_words(choice: Choice) -> str:
    """Its cost in loss."""
    loss = choice.loss
    if loss is None:
        return "Its loss was not measured."
    if loss.known == "same":
        return "Its loss is that of plain DDP: it computes the same."
    if not loss.gap:
        what = f"at equal steps the loss is as low, or up to {loss.gap_high:.1%} higher"
    else:
        what = f"at equal steps the loss ends {loss.gap:.1%} higher ({loss.gap_low:.1%} to {loss.gap_high:.1%})"
    ends = f"{human_factor(loss.ratio_low)} to {human_factor(loss.ratio_high)}"
    more = f"{human_factor(loss.ratio)} times the steps ({ends}) make up for it"
    return f"Loss: {what}; {more}. Source: {loss.because}."


def demands(strategy: Strategy) -> list[str]:
    """The changes that it requires in a training script."""
    rule, found = strategy.synchronization, list[str]()
    if not rule.keeps_scale:
        found.append(f"It replaces the optimizer: use SGD without momentum, with a learning rate {rule.usual_rate}.")
    if rule.asks_for_length:
        found.append("It needs the length of training: attach(..., total_steps=N).")
    return found


def ranges_in_words(ranges: Sequence[BandwidthRange], *, inside: bool) -> list[str]:
    """From slow links to fast ones, a line for each range of bandwidths."""
    where = " between the devices of a host" if inside else ""
    found: list[str] = []
    for band in ranges:
        if len(ranges) == 1:
            place = f"at every simulated bandwidth{where}"
        elif not band.from_bps:
            place = f"below {human_rate(band.to_bps)}{where}"
        elif math.isinf(band.to_bps):
            place = f"above {human_rate(band.from_bps)}{where}"
        else:
            place = f"{human_rate(band.from_bps)} to {human_rate(band.to_bps)}{where}"
        found.append(f"{place}: {choice_name(band.choice)}")
    return found


def grounds(answer: Answer) -> dict[str, list[str]]:
    """Measurements, assumptions, and effects that are not modelled."""
    question = answer.question
    probed = question.setting.cluster.measured is not None
    error = PROBED_ERROR if probed else FORMULA_ERROR
    measured = [*question.measured]
    measured.append(
        f"step times: predictions were at most {error:.1%} off in the lab "
        f"({'on probed links' if probed else 'the worst case; these links were not probed'}), which is their range here"
    )
    losses = sorted({choice.loss.known for choice in answer.top if choice.loss is not None} - {"same"})
    if "measured" in losses:
        measured.append(
            "losses: this project's own runs of small models (docs/results); what compressors cost a larger model is "
            "taken to grow as it did for those that were trained with two sizes"
        )
    if "published" in losses:
        measured.append("losses of DiLoCo: published scaling laws, not runs of this project")
    assumed = [
        *question.assumed,
        f"training takes {question.steps:,} optimizer steps of {question.setting.workers} workers under plain DDP",
        f"the loss falls with steps as it did for published models near {human_count(question.scale.num_parameters)} "
        "parameters, so that 1% of it costs many steps",
    ]
    without = sorted(
        {text for choice in answer.choices for text in choice.prediction.warnings if "is not known and counted" in text}
    )
    not_modelled = [*NOT_MODELLED]
    if without:
        not_modelled.append(f"what encoding costs for {len(without)} of the compressors, counted as nothing")
    return {"measured": measured, "assumed": assumed, "not modelled": not_modelled}
