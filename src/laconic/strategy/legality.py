"""Which combinations cannot work, why, and the nearest one that can.

A rule looks only at what methods declare about themselves, never at their names, so a new method is judged by the
same rules as the old ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from laconic.architecture import AllReduce, Architecture, Choco, Gossip, ParameterServer
from laconic.compression import Compressor, DctTopK, EfSignSgd, ErrorFeedback, NoCompression, Packed, TopK, Wrapper
from laconic.core.moment import Moment
from laconic.core.plan import Bucket
from laconic.core.tensor import TensorSpec
from laconic.errors import IllegalCombination
from laconic.scheduling import Fusion, Schedule
from laconic.settings import Method
from laconic.synchronization import Asynchronous, Synchronization

_SAMPLE = Bucket((TensorSpec("weight", (64, 64)), TensorSpec("bias", (64,))))
"""What models have: some methods treat matrices and vectors differently."""


@dataclass(frozen=True)
class Parts:
    """One choice per axis, not yet known to fit together."""

    synchronization: Synchronization
    architecture: Architecture
    compression: Compressor
    scheduling: Schedule

    def text(self) -> str:
        """Canonical text."""
        return " / ".join(map(str, (self.synchronization, self.architecture, self.compression, self.scheduling)))


@dataclass(frozen=True)
class Refusal:
    """Why a combination cannot work, and what to use instead."""

    reason: str
    nearest: Parts
    """Free of this fault; other rules may still refuse it."""


Rule = Callable[[Parts], Refusal | None]


def _a_wrapper_needs_a_loss(parts: Parts) -> Refusal | None:
    """A wrapper that works on what is lost has no effect where nothing is."""
    for layer in parts.compression.layers():
        if isinstance(layer, Wrapper) and layer.needs_loss and layer.inner.lossless:
            return Refusal(
                f'compression: {layer.name} has no effect on "{layer.inner}", which loses nothing',
                dataclasses.replace(parts, compression=_without(parts.compression, layer)),
            )
    return None


def _no_wrapper_twice(parts: Parts) -> Refusal | None:
    """The same wrapper twice would keep the same error twice."""
    seen: set[str] = set()
    for layer in parts.compression.layers():
        if isinstance(layer, Wrapper):
            if layer.name in seen:
                return Refusal(
                    f'compression: {layer.name} is applied twice in "{parts.compression}"',
                    dataclasses.replace(parts, compression=_without(parts.compression, layer)),
                )
            seen.add(layer.name)
    return None


def _a_wrapper_fits_what_it_wraps(parts: Parts) -> Refusal | None:
    """Some wrappers reach into what they wrap."""
    for layer in parts.compression.layers():
        if isinstance(layer, Wrapper) and not isinstance(layer.inner, layer.wraps):
            # Further in, directly around what it fits on, or nowhere.
            around = next(
                (
                    inner
                    for inner in layer.layers()
                    if isinstance(inner, Wrapper) and isinstance(inner.inner, layer.wraps)
                ),
                None,
            )
            moved = (
                _moved_beneath(parts.compression, layer, around)
                if around is not None
                else _without(parts.compression, layer)
            )
            return Refusal(
                f'compression: {layer.name} does not fit around "{layer.inner}"; it wants {_in_words(layer.wraps)}',
                dataclasses.replace(parts, compression=moved),
            )
    return None


def _a_method_in_a_setting_fits(parts: Parts) -> Refusal | None:
    """A setting that holds a method works with one kind of methods."""
    for layer in parts.compression.layers():
        for field in dataclasses.fields(layer):
            setting = layer.declared().get(field.name)
            held = getattr(layer, field.name)
            if setting is not None and setting.wants is not None and not isinstance(held, setting.wants):
                usual = dataclasses.replace(layer, **{field.name: field.default})
                wanted = _in_words(setting.wants)
                return Refusal(
                    f'compression: {layer.name} cannot use "{held}" as {field.name}; it wants {wanted}',
                    dataclasses.replace(parts, compression=_with(parts.compression, layer, usual)),
                )
    return None


def _no_residual_twice(parts: Parts) -> Refusal | None:
    """What is lost must be sent later once, not twice."""
    keepers = [layer for layer in parts.compression.layers() if layer.keeps_residual]
    if len(keepers) < 2:
        return None
    return Refusal(
        f"compression: {keepers[-1].name} sends later itself what it does not send now; {keepers[0].name} would send "
        "that twice",
        dataclasses.replace(parts, compression=_without(parts.compression, keepers[0])),
    )


def _no_momentum_twice(parts: Parts) -> Refusal | None:
    """Velocities of velocities are not what anybody means."""
    builders = [layer for layer in parts.compression.layers() if layer.accumulates]
    if len(builders) < 2:
        return None
    return Refusal(
        f"compression: {builders[-1].name} has momentum already; {builders[0].name} would add it again",
        dataclasses.replace(parts, compression=_without(parts.compression, builders[0])),
    )


def _residuals_are_kept_inside_momentum(parts: Parts) -> Refusal | None:
    """A residual is input minus what was sent, so what is sent must not hold more than the input."""
    layers = list(parts.compression.layers())
    for position, layer in enumerate(layers):
        beneath = next((inner for inner in layers[position + 1 :] if inner.accumulates), None)
        if isinstance(layer, Wrapper) and layer.keeps_residual and beneath is not None:
            moved = (
                _moved_beneath(parts.compression, layer, beneath)
                if isinstance(beneath, Wrapper)
                else _without(parts.compression, layer)
            )
            return Refusal(
                f"compression: {layer.name} outside {beneath.name} would take earlier gradients, which are not lost, "
                "for a loss",
                dataclasses.replace(parts, compression=moved),
            )
    return None


def _no_residual_of_what_is_enlarged(parts: Parts) -> Refusal | None:
    """The part of a payload that was only added to be right on average would come back, larger every step."""
    for layer in parts.compression.layers():
        if isinstance(layer, Wrapper) and layer.keeps_residual and layer.inner.amplifies():
            return Refusal(
                f'compression: {layer.name} around "{layer.inner}" would grow for ever, because what is sent there is '
                "enlarged to be right on average",
                dataclasses.replace(parts, compression=_without(parts.compression, layer)),
            )
    return None


def _a_round_reaches_everyone(parts: Parts) -> Refusal | None:
    """Some rules work on the mean over all replicas."""
    when, whom = parts.synchronization, parts.architecture
    if not when.needs_everyone or whom.scope == "everyone":
        return None
    return Refusal(
        f"synchronization: {when.name} works on the mean over all replicas, and with {whom.name} each has only that "
        "over its neighbours",
        dataclasses.replace(parts, architecture=AllReduce()),
    )


def _what_is_not_sent_is_remembered_once(parts: Parts) -> Refusal | None:
    """A rule or an architecture that keeps what was not sent wants a compressor that loses something and forgets it."""
    when, whom, what = parts.synchronization, parts.architecture, parts.compression
    owner = when if when.remembers_unsent else whom if whom.compensates else None
    if owner is None:
        return None
    keeper = next((layer for layer in what.layers() if layer.keeps_residual or layer.accumulates), None)
    if keeper is not None:
        return Refusal(
            f"compression: {keeper.name} would keep what is not sent a second time; {owner.name} does that itself",
            dataclasses.replace(parts, compression=_without(what, keeper)),
        )
    if what.amplifies():
        return Refusal(
            f'compression: what "{what}" sends is enlarged to be right on average; {owner.name} would keep the '
            "difference, and it would grow for ever",
            dataclasses.replace(parts, compression=TopK()),
        )
    direction = next((layer for layer in what.layers() if not layer.keeps_scale), None)
    if when.remembers_unsent and direction is not None:
        return Refusal(
            f"compression: {direction.name} sends directions without a size, so what is left of a momentum after "
            f"sending cannot be kept by {owner.name}",
            dataclasses.replace(parts, compression=_with(what, direction, EfSignSgd())),
        )
    if when.remembers_unsent and what.lossless:
        return Refusal(
            f'{owner.axis}: {owner.name} keeps what is not sent, and "{what}" sends everything',
            dataclasses.replace(parts, compression=DctTopK()),
        )
    return None


def _neighbours_need_the_whole(parts: Parts) -> Refusal | None:
    """What was lost of parameters would be missing for good, unless public copies are kept."""
    if parts.architecture.scope == "everyone" or parts.architecture.compensates or parts.compression.lossless:
        return None
    return Refusal(
        f'architecture: {parts.architecture.name} mixes parameters, and what "{parts.compression}" loses of these '
        "would never be sent; choco keeps public copies for that",
        dataclasses.replace(parts, architecture=Choco()),
    )


def _a_payload_is_read_by_itself(parts: Parts) -> Refusal | None:
    """Neighbours decode what each of them sends, one at a time."""
    if not parts.architecture.compensates or (parts.compression.alone() and parts.compression.exact()):
        return None
    return Refusal(
        f"compression: with {parts.architecture.name} each payload is decoded by itself and has a known length, which "
        f'that of "{parts.compression}" is not',
        dataclasses.replace(parts, compression=TopK()),
    )


def _parameters_are_moved_by_what_arrives(parts: Parts) -> Refusal | None:
    """A change of parameters must arrive with its size, and once."""
    if parts.synchronization.quantity == "gradient" and parts.architecture.scope == "everyone":
        return None
    for layer in parts.compression.layers():
        if not layer.keeps_scale:
            return Refusal(
                f"compression: {layer.name} sends directions without a size, by which no parameter can be moved",
                dataclasses.replace(parts, compression=_with(parts.compression, layer, EfSignSgd())),
            )
        for key, setting in layer.declared().items():
            held = getattr(layer, key)
            if setting.kind == "method" and isinstance(held, Compressor) and not held.keeps_scale:
                usual = dataclasses.replace(layer, **{key: type(layer).__dataclass_fields__[key].default})
                return Refusal(
                    f"compression: {held.name} sends directions without a size, by which no parameter can be moved",
                    dataclasses.replace(parts, compression=_with(parts.compression, layer, usual)),
                )
        if layer.accumulates:
            return Refusal(
                f"compression: {layer.name} adds up gradients of several steps, but here parameters are exchanged",
                dataclasses.replace(parts, compression=_without(parts.compression, layer)),
            )
    return None


def _payloads_take_a_route(parts: Parts) -> Refusal | None:
    """Where each payload is read by itself there is one way for it to go."""
    if parts.architecture.scope == "everyone" and not parts.architecture.has_servers:
        return None
    for layer in parts.compression.layers():
        if isinstance(layer, Packed) and "route" in layer.changed_settings():
            usual = str(next(field.default for field in dataclasses.fields(layer) if field.name == "route"))
            return Refusal(
                f"compression: {layer.name}.route has no effect with {parts.architecture.name}, which passes payloads "
                "on one by one",
                dataclasses.replace(
                    parts, compression=_with(parts.compression, layer, dataclasses.replace(layer, route=usual))
                ),
            )
    return None


def _without_a_barrier(parts: Parts) -> Refusal | None:
    """Going on without waiting needs somebody who answers at any time, and waiting for some needs clocks."""
    when, whom = parts.synchronization, parts.architecture
    if not isinstance(when, Asynchronous):
        return None
    if not whom.asynchronous:
        return Refusal(
            f"synchronization: {when.name} waits for nobody, but in {whom.name} everybody meets everybody",
            dataclasses.replace(parts, architecture=ParameterServer()),
        )
    if when.needs_clocks and not whom.keeps_clocks:
        return Refusal(
            f"synchronization: {when.name} needs to know how far every worker is, and nobody does in {whom.name}",
            dataclasses.replace(parts, architecture=ParameterServer()),
        )
    if not whom.has_servers and not whom.meets_the_same():
        return Refusal(
            f"architecture: {whom} has other neighbours in every round, and without a barrier there are no rounds",
            dataclasses.replace(parts, architecture=Gossip()),
        )
    unused = next((key for key in when.changed_settings() if key in when.for_servers), None)
    if unused is not None and not whom.has_servers:
        return Refusal(
            f"synchronization: {when.name}.{unused} has no effect with {whom.name}, which has no servers",
            dataclasses.replace(parts, synchronization=type(when)()),
        )
    return None


def _servers_read_what_is_sent(parts: Parts) -> Refusal | None:
    """A server adds up what it can decode by itself, or plain sums."""
    when, whom, what = parts.synchronization, parts.architecture, parts.compression
    if not whom.has_servers or what.alone() or (when.barrier and what.sums_only()):
        return None
    return Refusal(
        f"compression: a server of {whom.name} with {when.name} must decode each payload by itself, which it cannot "
        f'with "{what}"',
        dataclasses.replace(parts, compression=ErrorFeedback(TopK())),
    )


def _only_gradients_can_wait(parts: Parts) -> Refusal | None:
    """A layer's next use can wait for gradients that everyone averages, and for nothing else."""
    when, whom, order = parts.synchronization, parts.architecture, parts.scheduling
    gradients = when.quantity == "gradient" and when.barrier and whom.scope == "everyone"
    if gradients or not (order.defers or order.needs_timing):
        return None
    return Refusal(
        f"scheduling: {order.name} plans by when gradients become ready, and {when.name} with {whom.name} exchanges "
        "something else or at another time",
        dataclasses.replace(parts, scheduling=Fusion()),
    )


def _pieces_and_halves_fit_the_compressor(parts: Parts) -> Refusal | None:
    """Sums in two halves need payloads that add up; pieces of a tensor have no shape."""
    order, what = parts.scheduling, parts.compression
    if order.halves and not what.adds_up():
        return Refusal(
            f'scheduling: {order.name} forms sums in two halves, and what "{what}" sends cannot simply be added up',
            dataclasses.replace(parts, scheduling=Fusion()),
        )
    if order.cuts_tensors and any(layer.sees_shapes for layer in what.layers()):
        return Refusal(
            f'scheduling: {order.name} cuts tensors into pieces, and "{what}" works on their shapes',
            dataclasses.replace(parts, scheduling=Fusion()),
        )
    return None


def _sums_are_formed_of_something(parts: Parts) -> Refusal | None:
    """How a sum is formed matters only where there is one."""
    whom, what = parts.architecture, parts.compression
    if not whom.forms_sums() or whom.compresses_sums() or _ever_sums(what):
        return None
    return Refusal(
        f'architecture: {whom} has no effect with "{what}", whose payloads are gathered and never added up on the way',
        dataclasses.replace(parts, architecture=AllReduce()),
    )


def _sums_are_compressed(parts: Parts) -> Refusal | None:
    """What compresses the sum of a host needs something that compresses, and nobody who must know his part of it."""
    when, whom, what = parts.synchronization, parts.architecture, parts.compression
    if not whom.compresses_sums():
        return None
    nearest = dataclasses.replace(parts, architecture=AllReduce(algorithm="hierarchical"))
    if what.lossless:
        return Refusal(f'architecture: {whom} has no effect with "{what}", which compresses nothing', nearest)
    if when.remembers_unsent:
        return Refusal(
            f"synchronization: {when.name} keeps what of its own was not sent, and with {whom} that is lost in the sum "
            "of a host",
            nearest,
        )
    if parts.scheduling.halves:
        return Refusal(
            f"scheduling: {parts.scheduling.name} forms sums in two halves, and with {whom} they are compressed in "
            "between",
            nearest,
        )
    return None


RULES: tuple[Rule, ...] = (
    _no_wrapper_twice,
    _a_wrapper_fits_what_it_wraps,
    _a_method_in_a_setting_fits,
    _a_wrapper_needs_a_loss,
    _no_residual_twice,
    _no_momentum_twice,
    _residuals_are_kept_inside_momentum,
    _no_residual_of_what_is_enlarged,
    _without_a_barrier,
    _payloads_take_a_route,
    _a_round_reaches_everyone,
    _servers_read_what_is_sent,
    _what_is_not_sent_is_remembered_once,
    _neighbours_need_the_whole,
    _a_payload_is_read_by_itself,
    _parameters_are_moved_by_what_arrives,
    _only_gradients_can_wait,
    _pieces_and_halves_fit_the_compressor,
    _sums_are_compressed,
    _sums_are_formed_of_something,
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


def cannot_combine(parts: Parts, wrappers: list[type[Wrapper]]) -> list[str]:
    """What this legal strategy cannot be extended by, in words."""
    refused: list[str] = []
    for wrapper in wrappers:
        extended = Parts(parts.synchronization, parts.architecture, wrapper(parts.compression), parts.scheduling)
        refusal = _first_refusal(extended)
        if refusal is not None:
            refused.append(f"+ {wrapper.name}: {refusal.reason.removeprefix('compression: ')}")
    return refused


def _first_refusal(parts: Parts) -> Refusal | None:
    return next((refusal for rule in RULES if (refusal := rule(parts)) is not None), None)


def _without(compression: Compressor, unwanted: Compressor) -> Compressor:
    """The same stack of wrappers with one layer taken out."""
    if compression is unwanted:
        return compression.inner if isinstance(compression, Wrapper) else NoCompression()
    if isinstance(compression, Wrapper):
        return dataclasses.replace(compression, inner=_without(compression.inner, unwanted))
    return compression


def _with(compression: Compressor, old: Compressor, new: Compressor) -> Compressor:
    """The same stack with one layer replaced."""
    if compression is old:
        return new
    assert isinstance(compression, Wrapper)
    return dataclasses.replace(compression, inner=_with(compression.inner, old, new))


def _ever_sums(compression: Compressor) -> bool:
    """Whether some round of an exchange is a sum: at the start of training, or later."""
    return any(
        round.kind == "sum"
        for moment in (Moment(world_size=4), Moment.steady(4))
        for round in compression.rounds(_SAMPLE, moment)
    )


def _in_words(kind: type[Method]) -> str:
    """What kind of method that is, from the first half of its first sentence."""
    words = kind.summary().split(";")[0].rstrip(".")
    return words[0].lower() + words[1:]


def _moved_beneath(compression: Compressor, layer: Wrapper, target: Wrapper) -> Compressor:
    """The same stack with `layer` taken out and put around what `target` wraps."""
    if compression is target:
        return dataclasses.replace(target, inner=dataclasses.replace(layer, inner=target.inner))
    assert isinstance(compression, Wrapper)
    inner = _moved_beneath(compression.inner, layer, target)
    return inner if compression is layer else dataclasses.replace(compression, inner=inner)
