"""Which settings were chosen, what each is compared with, and which steps are watched."""

from __future__ import annotations

import pytest

from laconic.errors import InvalidSetting
from laconic.experiments.verification.changes import changes, comparisons
from laconic.experiments.verification.course import Course, course, opening
from laconic.experiments.verification.trainee import model_specs
from laconic.strategy import Strategy


def test_every_chosen_setting_is_found_however_deep() -> None:
    strategy = Strategy.parse(
        "diloco(period=8) / all_reduce / topk(density=0.1) + chain(second=int4(block=64)) + error_feedback / "
        "fusion(bytes=1MiB)"
    )
    assert [change.text(strategy) for change in changes(strategy)] == [
        "diloco.period=8",
        "chain.second=int4(block=64)",
        "topk.density=0.1",
        "int4.block=64",
        "fusion.bytes=1MiB",
    ]
    undone = [str(change.undone(strategy)) for change in changes(strategy)]
    assert undone[0].startswith("diloco / all_reduce / topk(density=0.1) + chain(second=int4(block=64))")
    assert undone[1].startswith("diloco(period=8) / all_reduce / topk(density=0.1) + chain + error_feedback")
    assert undone[2].startswith("diloco(period=8) / all_reduce / topk + chain(second=int4(block=64))")
    assert undone[3].startswith("diloco(period=8) / all_reduce / topk(density=0.1) + chain(second=int4)")
    assert undone[4].endswith("/ fusion")
    assert not changes(Strategy())


def test_settings_of_a_default_method_are_not_chosen() -> None:
    assert not changes(Strategy.parse("demo / all_reduce / dct_cyclic"))
    found = changes(Strategy.parse("demo / all_reduce / dct_cyclic(values=int4(block=64))"))
    assert [(change.path[-1], change.key) for change in found] == [("compression", "values"), ("values", "block")]


@pytest.mark.parametrize(
    ("text", "key", "pairs"),
    [
        ("bsp / all_reduce / int8(block=64)", "block", [("int8(block=64)", "int8")]),
        # What "auto" takes may be what was chosen.
        (
            "bsp / all_reduce / int8(route=gather)",
            "route",
            [("int8(route=gather)", "int8"), ("int8(route=gather)", "int8(route=scatter)")],
        ),
        # The default of one is refused beside the other.
        (
            "bsp / gossip(topology=random_pairs, seed=5)",
            "topology",
            [("gossip(topology=random_pairs)", "gossip")],
        ),
        (
            "streaming_diloco(period=2, fragments=2, overlap=1)",
            "overlap",
            [("streaming_diloco(fragments=2, overlap=1)", "streaming_diloco(fragments=2)")],
        ),
        # One server decides: every other number of servers is refused.
        ("backup / parameter_server(shards=1)", "shards", []),
    ],
)
def test_a_setting_is_compared_with_what_differs_in_it_alone(text: str, key: str, pairs: list[tuple[str, str]]) -> None:
    strategy = Strategy.parse(text)
    change = next(change for change in changes(strategy) if change.key == key)
    found = list(comparisons(strategy, change))
    assert len(found) == len(pairs)
    for strategies, texts in zip(found, pairs, strict=True):
        for one, words in zip(strategies, texts, strict=True):
            assert words in str(one).split(" / ")


@pytest.mark.parametrize("architecture", ["gossip(seed=5)", "push_sum(topology=ring, seed=5)"])
def test_a_seed_that_nothing_is_drawn_from_is_refused(architecture: str) -> None:
    with pytest.raises(InvalidSetting, match="seed=5 has no effect with topology=ring"):
        Strategy.parse(f"bsp / {architecture}")


@pytest.mark.parametrize(
    ("text", "watched"),
    [
        ("bsp", Course(0, 6)),
        ("local_sgd(period=4)", Course(0, 9)),
        ("local_sgd(period=4, post_local=100)", Course(98, 11)),
        ("streaming_diloco(period=8, overlap=3)", Course(0, 20)),
        ("diloco(period=500)", Course(497, 5)),
        ("bsp / all_reduce / topk + warmup(steps=100) + error_feedback", Course(2**20, 6)),
    ],
)
def test_the_steps_that_are_watched_hold_a_round(text: str, watched: Course) -> None:
    strategy = Strategy.parse(text)
    found = course(strategy, model_specs("small"), 3)
    assert found == watched
    assert any(strategy.synchronization.due(step + 1) for step in found.steps)
    first = opening(strategy, model_specs("small"), 3)
    assert first == (Course(0, 6) if "warmup" in text else None)
