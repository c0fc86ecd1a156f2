"""Scheduling with the rest: deferred updates, pieces of tensors, and decoupled sums."""

from __future__ import annotations

import dataclasses

from laconic.scheduling import Fusion
from laconic.strategy.legality.combination import SPLITS, Parts, Refusal


def only_gradients_can_wait(parts: Parts) -> Refusal | None:
    """Deferred updates work only for gradients that all ranks average."""
    when, whom, order = parts.synchronization, parts.architecture, parts.scheduling
    gradients = when.quantity != "change" and when.barrier and whom.scope == "everyone"
    if gradients or not (order.defers or order.needs_timing):
        return None
    return Refusal(
        f"scheduling: {order.name} plans by when gradients become ready, and {when.name} with {whom.name} exchanges "
        "something else or at another time",
        dataclasses.replace(parts, scheduling=Fusion()),
    )


def a_given_momentum_needs_the_whole_step(parts: Parts) -> Refusal | None:
    """An optimizer whose momentum is set at step() must update all layers there, not in the next forward pass."""
    when, order = parts.synchronization, parts.scheduling
    if when.quantity != "momentum" or not (order.defers or order.decoupled):
        return None
    return Refusal(
        f"scheduling: {order.name} updates layers during the next forward pass, and {when.name} gives the optimizer "
        "its momentum at step()",
        dataclasses.replace(parts, scheduling=Fusion()),
    )


def a_question_needs_one_exchange(parts: Parts) -> Refusal | None:
    """Where all ranks are asked first whether to exchange, the exchange cannot be decoupled."""
    when, order = parts.synchronization, parts.scheduling
    if not when.lazy or not order.decoupled:
        return None
    return Refusal(
        f"scheduling: {order.name} {SPLITS}, and {when.name} may leave a whole sum out",
        dataclasses.replace(parts, scheduling=Fusion()),
    )


def pieces_and_phases_fit_the_compressor(parts: Parts) -> Refusal | None:
    """Decoupled sums need payloads that add up; pieces of a tensor have no shape."""
    order, what = parts.scheduling, parts.compression
    if order.decoupled and not what.traits.payloads_add_up:
        return Refusal(
            f'scheduling: {order.name} {SPLITS}, and what "{what}" sends cannot be added up',
            dataclasses.replace(parts, scheduling=Fusion()),
        )
    if order.cuts_tensors and what.traits.needs_whole_tensors:
        return Refusal(
            f'scheduling: {order.name} cuts tensors into pieces, and "{what}" works on their shapes',
            dataclasses.replace(parts, scheduling=Fusion()),
        )
    return None
