"""All rules, in the order in which they speak, and who asks them."""

from __future__ import annotations

from laconic.compression import Wrapper
from laconic.errors import IllegalCombination
from laconic.strategy.legality import barriers, orders, payloads, shards, sums, wrappers
from laconic.strategy.legality.combination import Parts, Refusal, Rule

RULES: tuple[Rule, ...] = (
    wrappers.no_wrapper_twice,
    wrappers.a_wrapper_fits_what_it_wraps,
    wrappers.a_method_in_a_setting_fits,
    wrappers.a_wrapper_needs_a_loss,
    wrappers.no_residual_twice,
    wrappers.no_momentum_twice,
    wrappers.residuals_are_kept_inside_momentum,
    wrappers.no_residual_of_what_is_enlarged,
    barriers.without_a_barrier,
    payloads.payloads_take_a_route,
    barriers.a_round_reaches_everyone,
    payloads.servers_read_what_is_sent,
    payloads.what_is_not_sent_is_remembered_once,
    payloads.neighbours_need_the_whole,
    payloads.a_payload_is_read_by_itself,
    payloads.a_momentum_is_applied_as_it_arrives,
    payloads.parameters_are_moved_by_what_arrives,
    orders.only_gradients_can_wait,
    orders.a_given_momentum_needs_the_whole_step,
    orders.pieces_and_halves_fit_the_compressor,
    shards.shards_are_averaged_in_every_step,
    shards.owners_read_what_is_sent,
    shards.parts_are_the_models_own,
    sums.sums_are_compressed,
    sums.sums_are_formed_of_something,
)


def check_legal(parts: Parts) -> None:
    """Raise IllegalCombination, with the reason and the nearest legal choice, if the parts do not fit."""
    reasons, nearest = nearest_legal(parts)
    if reasons:
        raise IllegalCombination(f'{reasons[0]}. Nearest that works: "{nearest.text()}".')


def nearest_legal(parts: Parts) -> tuple[list[str], Parts]:
    """The nearest parts that fit, and why each change was made; no reasons if the parts fit as they are."""
    reasons: list[str] = []
    while (refusal := _first_refusal(parts)) is not None:  # each takes something away or further in, so this ends
        reasons.append(refusal.reason)
        parts = refusal.nearest
    return reasons, parts


def cannot_combine(parts: Parts, extensions: list[type[Wrapper]]) -> list[str]:
    """What this legal strategy cannot be extended by, in words."""
    refused: list[str] = []
    for wrapper in extensions:
        extended = Parts(parts.synchronization, parts.architecture, wrapper(parts.compression), parts.scheduling)
        refusal = _first_refusal(extended)
        if refusal is not None:
            refused.append(f"+ {wrapper.name}: {refusal.reason.removeprefix('compression: ')}")
    return refused


def _first_refusal(parts: Parts) -> Refusal | None:
    return next((refusal for rule in RULES if (refusal := rule(parts)) is not None), None)
