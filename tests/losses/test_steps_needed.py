"""Steps needed are what the benchmark's losses say, converted as the formula says, and never more than was measured."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from laconic.losses.measured import BASELINE, CELLS, COMPRESSIONS, DEVIATION_RATIO, LATER_CELLS, OTHER_RUNS
from laconic.losses.steps_needed import BSP_STEPS, SAME, steps_needed
from laconic.strategy import PRESETS, Strategy

DOCS = Path(__file__).resolve().parents[2] / "docs" / "results"
PAGE = (DOCS / "convergence.md").read_text(encoding="utf-8")
FAST, SLOW = math.log(2.4434 / 1.7097) / math.log(2048 / 384), math.log(1.7097 / 1.5461) / math.log(2)
LAST = math.log(1.5461 / 1.4665) / math.log(2)
"""p early in a run, late in it, and in the longest."""
AROUND = {
    **dict.fromkeys((300, 384), (FAST, SLOW)),
    **dict.fromkeys((1500, 2048), (FAST, SLOW, LAST)),
    4096: (SLOW, LAST),
    8192: (LAST,),
}


def printed(page: str) -> list[tuple[str, str]]:
    """What every row of the tables for text is called, and by how much its loss differs."""
    return [
        (name, change.replace("-0.0%", "+0.0%"))
        for name, change in re.findall(r"^text +(\S.*?)  +[0-9.]+ +([-+][0-9.]+%)", page, re.MULTILINE)
    ]


_SETTING = r"^(\w+\(.*?\)) +[0-9.]+ +([-+][0-9.]+%)"


def deviations(page: str) -> list[tuple[str, str]]:
    """What every row with several seeds is called, and the deviation of the changes of single seeds."""
    return re.findall(r"^text +(\S.*?)  +[0-9.]+ +[-+][0-9.]+% .* of changes ([0-9.]+%)$", page, re.MULTILINE)


def tables() -> dict[int, list[tuple[str, str]]]:
    """By the number of steps."""
    compressions, cells = PAGE.split("## Cells of synchronization and architecture")
    short, _, rest = cells.partition("runs of 4096 steps")
    long, _, rest = rest.partition("with 2048 steps")
    other, _, longest = rest.partition("runs of 8192 steps")
    return {
        300: printed(compressions),
        384: printed(short),
        4096: printed(long),
        2048: re.findall(_SETTING, other, re.MULTILINE),
        8192: re.findall(f"{_SETTING}.*AdamW 0.003$", longest, re.MULTILINE),
    }


@pytest.mark.parametrize("steps", [384, 2048, 4096, 8192])
def test_cells_are_what_the_page_says_and_all_of_it(steps: int) -> None:
    typed = {(cell.printed or cell.text, f"{cell.loss_gap:+.1%}") for cell in CELLS if cell.steps == steps}
    assert typed == set(tables()[steps])


def test_deviations_are_what_the_page_says_and_all_of_it() -> None:
    compressions, cells = PAGE.split("## Cells of synchronization and architecture")
    typed = {(cell.text, f"{cell.deviation:.1%}") for cell in CELLS if cell.steps == 384}
    assert typed == set(deviations(cells))
    others = {(found.text, f"{found.deviation:.1%}") for found in COMPRESSIONS}
    assert others <= set(deviations(compressions)), "defaults are declared by methods"


def test_later_cells_are_what_the_page_says_and_all_of_it() -> None:
    section = PAGE.partition("## Synchronizations added later")[2].partition("\n## ")[0]
    said = re.findall(r"^text +(\S.*?)  +[0-9.]+ +([-+][0-9.]+%) \(\+-([0-9.]+%)\)", section, re.MULTILINE)
    typed = {(cell.text, f"{cell.loss_gap:+.1%}", f"{cell.deviation:.1%}") for cell in LATER_CELLS}
    assert typed == set(said)


def test_long_runs_are_what_their_page_says_and_all_of_it() -> None:
    page = (DOCS / "time_to_loss.md").read_text(encoding="utf-8")
    rows = re.findall(r"^(\S.*?)  +[0-9.]+ +(\d+) +[0-9.]+ +([-+][0-9.]+%) \(\+-([0-9.]+%)\)", page, re.MULTILINE)
    said = {(name, int(steps), gap, deviation) for name, steps, gap, deviation in rows if name != "ddp"}
    typed = {
        (cell.printed or cell.text, cell.steps, f"{cell.loss_gap:+.2%}", f"{cell.deviation:.2%}")
        for cell in CELLS
        if cell.steps == 1500
    }
    assert typed == said


def test_other_runs_are_what_their_page_says() -> None:
    page = " ".join((DOCS / "time_to_loss.md").read_text(encoding="utf-8").split())
    demo, sparse, cyclic, onebit, qsgd, int8, warm, short = OTHER_RUNS
    (long,) = (cell for cell in CELLS if cell.steps == 1000)
    assert f"GPT-2 ({demo.num_parameters // 10**6} M parameters)" in page
    for run, steps in ((sparse, "600 "), (cyclic, "600 "), (onebit, "")):
        gap = re.escape(f"{run.loss_gap:+.2%}")
        assert re.search(rf"1gbit {re.escape(run.printed)} 0.0006 {steps}[0-9.]+ {gap} ", page)
    for row in ("torch DDP 0.0006 20% 600 0 3.8742", f"{demo.printed} 0.0006 20% 600 0 3.9419"):
        assert f"{row} " in page
    assert demo.loss_gap == pytest.approx(3.9419 / 3.8742 - 1, abs=5e-5)
    assert f"10gbit auto: {qsgd.text} 0.0006 4.0517 {qsgd.loss_gap:+.1%} " in page
    assert f"10gbit auto: {int8.text} 0.0006 3.8752 {int8.loss_gap:+.2%} " in page
    assert f"40gbit {warm.printed} 0.0006 4.0278 {warm.loss_gap:+.2%} " in page
    gap = re.escape(f"{short.loss_gap:+.1%}")
    assert re.search(rf"{re.escape(short.text)} [0-9.]+ {gap} ", page)
    first, second = 2.0001 / 1.9851 - 1, 1.9124 / 1.8806 - 1
    assert "uncompressed 1.9851 and 1.8806; `onebit-adam` 2.0001 and 1.9124 (+0.8% and +1.7%)" in page
    assert long.loss_gap == pytest.approx((first + second) / 2, abs=1e-4)
    assert long.deviation == pytest.approx(abs(first - second) / math.sqrt(2), abs=2e-4)


def test_compressions_are_what_the_page_says_beyond_the_defaults() -> None:
    in_page = tables()[300]
    # Defaults come first, one row each; methods declare those themselves.
    names = [name for name, _ in in_page]
    others = in_page[names.index("dct_cyclic + error_feedback") + 1 :]
    assert {(found.text, f"{found.loss_gap:+.1%}") for found in COMPRESSIONS} == set(others)
    assert {found.steps for found in COMPRESSIONS} == {300}


def test_defaults_are_as_methods_declare_them() -> None:
    names = [name for name, _ in tables()[300]]
    spreads = dict(deviations(PAGE.partition("## Cells of synchronization and architecture")[0]))
    for name, change in tables()[300][: names.index("dct_cyclic + error_feedback") + 1]:
        found = steps_needed(Strategy.parse(f"bsp / all_reduce / {name}"))
        assert found is not None
        said = found.because.partition(": loss ")[2]
        assert f"{change} after 300 steps (+-{spreads[name]} between seeds)" == said.partition(", ")[0]


def test_the_baseline_is_what_the_page_says() -> None:
    for steps, loss in BASELINE:
        assert re.search(rf"[ :] ?{loss:.4f}[ ,\n]", PAGE)
        assert f"{steps} steps" in PAGE or f"--steps {steps}" in PAGE
    cells = PAGE.partition("## Cells of synchronization and architecture")[2]
    steps, loss = BASELINE[0]
    row = rf"^text +none .*seeds: {loss:.4f}, .*, deviation {DEVIATION_RATIO:.1%}$"
    assert f"--steps {steps}" in cells.replace("\n", " ")
    assert re.search(row, cells, re.MULTILINE), "the first seed's, and the deviation of all"


def test_texts_are_canonical_so_that_they_are_found() -> None:
    for cell in (*CELLS, *OTHER_RUNS):
        assert str(Strategy.parse(cell.text)).rpartition(" / ")[0] == cell.text
    for found in COMPRESSIONS:
        assert str(Strategy.parse(f"bsp / all_reduce / {found.text}").compression) == found.text


@pytest.mark.parametrize(
    ("strategy", "power", "gaps"),
    [
        ("ssp / parameter_server / none", FAST, {384: (0.093, 0.039)}),
        ("bsp / all_reduce / powersgd + error_feedback", FAST, {300: (0.006, 0.023), 1500: (0.0857, 0.0536)}),
        ("bsp / all_reduce / gtopk + error_feedback", FAST, {300: (0.219, 0.030)}),
        ("diloco / all_reduce / none", LAST, {384: (0.142, 0.019), 4096: (0.082, 0.019), 8192: (0.018, 0.019)}),
        (
            "streaming_diloco / all_reduce / int4 + error_feedback",
            LAST,
            {384: (0.116, 0.018), 4096: (0.065, 0.019)},
        ),
        ("slowmo / all_reduce / none", SLOW, {2048: (0.404, 0.019)}),
    ],
)
def test_a_gap_becomes_steps_as_the_formula_says(
    strategy: str, power: float, gaps: dict[int, tuple[float, float]]
) -> None:
    found = steps_needed(Strategy.parse(strategy))
    assert found is not None
    assert found.ratio == pytest.approx((1 + gaps[max(gaps)][0]) ** (1 / power))
    corners = [
        (1 + gap + error) ** (1 / p)
        for steps, (gap, deviation) in gaps.items()
        for error in (-deviation, deviation)
        for p in AROUND[steps]
    ]
    assert (found.low, found.high) == pytest.approx((min(corners), max(corners)))
    assert not found.is_product


@pytest.mark.parametrize(
    ("strategy", "gap", "deviation"),
    [("demo / all_reduce / dct_topk", -0.036, 0.023), ("bsp / all_reduce / qsgd", -0.037, 0.02)],
)
def test_a_negative_gap_counts_as_zero(strategy: str, gap: float, deviation: float) -> None:
    found = steps_needed(Strategy.parse(strategy))
    assert found is not None
    assert (found.loss_gap, found.ratio, found.likely, found.high) == (gap, 1.0, 1.0, 1.0)
    assert found.low == pytest.approx((1 + gap - deviation) ** (1 / SLOW)), "as measured"
    worse = steps_needed(Strategy.parse("diloco / all_reduce / none"))
    assert worse is not None
    assert worse.times(found).loss_gap == pytest.approx(worse.loss_gap), "it does not make up for another's"


def test_what_seeds_do_not_tell_apart_is_the_same_only_if_the_gap_is_small() -> None:
    small, large = (steps_needed(Strategy.parse(f"bsp / all_reduce / {name}")) for name in ("signsgd", "atomo"))
    assert small is not None
    assert large is not None
    assert small.low < 1 < small.ratio
    assert large.low < 1 < large.ratio
    assert (small.likely, large.likely) == (1.0, large.ratio)


def test_the_figures_in_words() -> None:
    found = steps_needed(Strategy.parse("diloco / all_reduce / none"))
    assert found is not None
    said = (
        "diloco / all_reduce / none: loss +14.2% after 384 steps (+-1.9% between seeds), +8.2% after 4096 steps, "
        "+1.8% after 8192 steps"
    )
    assert found.because == said
    assert (round(found.ratio, 2), round(found.low, 2), round(found.high, 2)) == (1.26, 0.99, 3.53)
    seconds, low_s, high_s = found.seconds(0.5)
    assert seconds == pytest.approx(found.ratio * 0.5 * BSP_STEPS)
    assert low_s < seconds < high_s


@pytest.mark.parametrize("name", PRESETS)
def test_the_range_holds_the_figure_and_is_a_range_unless_nothing_differs(name: str) -> None:
    found = steps_needed(Strategy.parse(name))
    if found is None:
        return
    assert found.low <= found.ratio <= found.high
    assert (found.low == found.high) == (found is SAME)


@pytest.mark.parametrize(
    "strategy",
    ["ddp", "dear", "bsp-ps", "bytescheduler-ps", "bsp / all_reduce(algorithm=tree) / none", "wfbp-a2a", "mg-wfbp"],
)
def test_what_computes_the_same_needs_as_many_steps(strategy: str) -> None:
    assert steps_needed(Strategy.parse(strategy)) is SAME


def test_how_sums_are_formed_and_in_which_order_changes_nothing() -> None:
    plain = steps_needed(Strategy.parse("bsp / all_reduce / topk + error_feedback / fusion"))
    assert steps_needed(Strategy.parse("bsp / all_reduce / topk + error_feedback / wfbp")) == plain
    assert steps_needed(Strategy.parse("bsp / all_reduce(algorithm=ring) / bf16")) == steps_needed(
        Strategy.parse("bsp / all_reduce / bf16")
    )


def test_parts_that_were_measured_apart_multiply_and_say_so() -> None:
    cell = steps_needed(Strategy.parse("diloco / all_reduce / none"))
    code = steps_needed(Strategy.parse("bsp / all_reduce / int8"))
    both = steps_needed(Strategy.parse("diloco / all_reduce / int8"))
    assert cell is not None
    assert code is not None
    assert both is not None
    assert both.is_product
    assert "product was not measured" in both.because
    assert (both.ratio, both.low, both.high) == pytest.approx(
        (cell.ratio * code.ratio, cell.low * code.low, cell.high * code.high)
    )
    with_servers = steps_needed(Strategy.parse("bsp / parameter_server / int8"))
    assert with_servers is not None
    assert with_servers.is_product
    assert with_servers.ratio == pytest.approx(code.ratio)


@pytest.mark.parametrize(
    "strategy",
    [
        "diloco(period=64)",  # a round of 64 steps
        "local_sgd(period=16)",
        "bsp / all_reduce / topk(density=0.5) + error_feedback",
        "bsp / all_reduce / int8 + error_feedback",
        "bsp / all_reduce / powersgd",  # only with error feedback
        "bsp / gossip(topology=torus) / none",
        "bsp / choco / int4",
        "diloco(period=64) / all_reduce / int8",
        "bsp / all_reduce(algorithm=hierarchical, compress=between_hosts) / int8",
        "ssp(staleness=9) / parameter_server",
    ],
)
def test_what_was_not_measured_has_no_number(strategy: str) -> None:
    assert steps_needed(Strategy.parse(strategy)) is None
