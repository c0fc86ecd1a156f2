"""Settings of a strategy that differ from their defaults, and the strategies to compare each with."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from laconic.errors import StrategyError
from laconic.settings import Method, Setting, Value
from laconic.strategy import AXES, Strategy


@dataclass(frozen=True)
class Change:
    """One setting with a value other than its default."""

    path: tuple[str, ...]
    """The fields from the strategy to the method: an axis, then nested methods."""
    key: str

    def method(self, strategy: Strategy) -> Method:
        """The method that has the setting."""
        found: object = strategy
        for field in self.path:
            found = getattr(found, field)
        assert isinstance(found, Method)
        return found

    def setting(self, strategy: Strategy) -> Setting:
        """The declaration of the setting."""
        return self.method(strategy).declared()[self.key]

    def value(self, strategy: Strategy) -> Value:
        """The chosen value."""
        return self.method(strategy).settings()[self.key]

    def default(self, strategy: Strategy) -> Value:
        """Its default."""
        defaults = {field.name: field.default for field in dataclasses.fields(self.method(strategy))}
        return cast(Value, defaults[self.key])

    def text(self, strategy: Strategy) -> str:
        """The setting as it is written in a strategy: topk.density=0.1."""
        method = self.method(strategy)
        return f"{method.name}.{self.key}={self.setting(strategy).show(self.value(strategy))}"

    def undone(self, strategy: Strategy, value: Value | None = None) -> Strategy | None:
        """The strategy with another value, the default if none is given; None if that is refused."""
        return _with(strategy, {self: self.default(strategy) if value is None else value})


def _with(strategy: Strategy, values: Mapping[Change, Value]) -> Strategy | None:
    """The same strategy with some settings replaced, at any depth; None if that is refused."""
    try:
        found = _rebuilt(strategy, {(*change.path, change.key): value for change, value in values.items()})
    except StrategyError:
        return None
    assert isinstance(found, Strategy)
    return found


def _rebuilt(holder: object, values: Mapping[tuple[str, ...], Value]) -> object:
    """A method with these settings replaced: the path to each, and its value."""
    assert dataclasses.is_dataclass(holder)
    assert not isinstance(holder, type)
    new: dict[str, object] = {}
    for field in dict.fromkeys(path[0] for path in values):
        inside = {path[1:]: value for path, value in values.items() if path[0] == field}
        new[field] = inside[()] if () in inside else _rebuilt(getattr(holder, field), inside)
    return dataclasses.replace(holder, **new)


def changes(strategy: Strategy) -> list[Change]:
    """Every setting of every method, wrapped and nested ones included, that differs from its default."""
    return [change for axis in AXES for change in _of(getattr(strategy, axis), (axis,))]


def _of(method: Method, path: tuple[str, ...]) -> Iterator[Change]:
    for key in method.changed_settings():
        yield Change(path, key)
    for field in dataclasses.fields(method):
        held = getattr(method, field.name)
        # A default that is a method may have settings of its own; nobody chose them.
        if isinstance(held, Method) and held != field.default:
            yield from _of(held, (*path, field.name))


def comparisons(strategy: Strategy, change: Change) -> Iterator[tuple[Strategy, Strategy]]:
    """Pairs of strategies that differ in this setting alone; any difference between them is its effect.

    The strategy is compared with the same strategy with the default. Where that is refused because another chosen
    setting requires this one, both are compared without the other setting; where neither setting works without the
    other, the strategy is compared with the same strategy without both; where that is refused too, with the nearest
    allowed value, if there is one. A default of "auto" may resolve to the chosen value, so the strategy is also
    compared with the other choices.
    """
    usual = change.undone(strategy)
    setting = change.setting(strategy)
    if usual is not None:
        yield strategy, usual
        if setting.kind == "choice" and change.default(strategy) == "auto":
            yield from _beside(strategy, change, [choice for choice in setting.choices if choice != "auto"])
        return
    for other in changes(strategy):
        without = other.undone(strategy) if other != change else None
        bare = change.undone(without) if without is not None and change in changes(without) else None
        if without is not None and bare is not None:
            yield without, bare
            return
    for other in changes(strategy):
        both = _with(strategy, {one: one.default(strategy) for one in (change, other)}) if other != change else None
        if both is not None:
            yield strategy, both
            return
    value = change.value(strategy)
    if isinstance(value, int) and not isinstance(value, bool):
        yield from list(_beside(strategy, change, [value + 1, value - 1, 2 * value]))[:1]


def _beside(strategy: Strategy, change: Change, values: Sequence[Value]) -> Iterator[tuple[Strategy, Strategy]]:
    for value in values:
        other = change.undone(strategy, value) if value != change.value(strategy) else None
        if other is not None:
            yield strategy, other
