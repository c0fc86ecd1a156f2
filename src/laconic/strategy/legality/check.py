"""All rules in the order in which they are applied, and their callers."""

from __future__ import annotations

from collections.abc import Sequence

from laconic.compression import Wrapper
from laconic.errors import IllegalCombination
from laconic.strategy.legality import barriers, payloads, reductions, schedules, shards, wrappers
from laconic.strategy.legality.combination import Parts, Refusal, Rule

ALONE: tuple[Rule, ...] = (
    wrappers.no_wrapper_twice,
    wrappers.a_wrapper_fits_what_it_wraps,
    wrappers.a_method_in_a_setting_fits,
    wrappers.a_wrapper_needs_a_loss,
    wrappers.a_wrapper_needs_a_fair_loss,
    wrappers.a_wrapper_needs_sizes,
    wrappers.estimates_need_sums_that_are_not_rounded,
    wrappers.a_wrapper_that_gathers_leaves_no_route,
    wrappers.no_residual_twice,
    wrappers.no_momentum_twice,
    wrappers.residuals_are_kept_inside_momentum,
    wrappers.no_residual_of_what_is_enlarged,
)
"""The rules that look at compression alone."""

RULES: tuple[Rule, ...] = (
    *ALONE,
    barriers.without_a_barrier,
    barriers.one_server_decides,
    reductions.aggregators_only_add,
    reductions.what_may_be_missing_adds_up,
    barriers.an_outer_step_with_neighbours,
    payloads.payloads_take_a_route,
    barriers.a_round_reaches_everyone,
    barriers.ranks_can_be_weighted,
    payloads.servers_read_what_is_sent,
    payloads.a_step_is_made_of_factors,
    payloads.what_is_not_sent_is_remembered_once,
    payloads.neighbours_need_the_whole,
    payloads.differences_need_a_linear_compressor,
    payloads.a_payload_is_read_by_itself,
    payloads.a_change_is_compared_with_what_arrived,
    payloads.a_mean_that_is_used_again_holds_nothing_else,
    payloads.differences_that_add_up_lose_nothing,
    payloads.a_momentum_is_applied_as_it_arrives,
    payloads.parameters_are_moved_by_what_arrives,
    schedules.only_gradients_can_wait,
    schedules.a_given_momentum_needs_the_whole_step,
    schedules.a_question_needs_one_exchange,
    schedules.pieces_and_phases_fit_the_compressor,
    shards.shards_are_averaged_in_every_step,
    shards.owners_read_what_is_sent,
    shards.parts_are_the_models_own,
    reductions.sums_are_compressed,
    reductions.sums_are_formed_of_something,
)


def check_legal(parts: Parts) -> None:
    """Raise IllegalCombination, with the reason and the nearest legal choice, if the parts do not fit."""
    reasons, nearest = nearest_legal(parts)
    if reasons:
        raise IllegalCombination(f'{reasons[0]}. Nearest that works: "{nearest.text()}".')


def nearest_legal(parts: Parts) -> tuple[list[str], Parts]:
    """The nearest parts that fit, and why each change was made; no reasons if the parts fit as they are."""
    reasons: list[str] = []
    while (refused := first_refusal(parts)) is not None:  # each takes something away or further in, so this ends
        _, refusal = refused
        reasons.append(refusal.reason)
        parts = refusal.nearest
    return reasons, parts


def cannot_combine(parts: Parts, extensions: list[type[Wrapper]]) -> list[str]:
    """The wrappers that this legal strategy cannot be extended by, with the reasons."""
    found: list[str] = []
    for wrapper in extensions:
        extended = Parts(parts.synchronization, parts.architecture, wrapper(parts.compression), parts.scheduling)
        refused = first_refusal(extended)
        if refused is not None:
            found.append(f"+ {wrapper.name}: {refused[1].reason.removeprefix('compression: ')}")
    return found


def first_refusal(parts: Parts, rules: Sequence[Rule] = RULES) -> tuple[Rule, Refusal] | None:
    """The first rule that refuses these parts, and its refusal; None: they fit."""
    return next(((rule, refusal) for rule in rules if (refusal := rule(parts)) is not None), None)
