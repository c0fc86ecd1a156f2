"""Random valid strategies over everything that is registered, so that a new method is covered without a new test."""

from __future__ import annotations

import re
from typing import TypeVar

from hypothesis import strategies as st

from laconic.compression import Compressor, Packed, Wrapper
from laconic.errors import IllegalCombination, InvalidSetting
from laconic.settings import Method, Setting
from laconic.strategy import AXES, Strategy

MethodT = TypeVar("MethodT", bound=Method)
WRAPPERS: list[type[Wrapper]] = [method for method in AXES["compression"] if issubclass(method, Wrapper)]


def bases(axis: str) -> list[type[Method]]:
    """The methods of an axis that stand by themselves."""
    return [method for method in AXES[axis] if not issubclass(method, Wrapper)]


def setting_values(setting: Setting) -> st.SearchStrategy[object]:
    """Values a setting accepts."""
    low = setting.at_least if setting.at_least is not None else setting.above
    match setting.kind:
        case "flag":
            return st.booleans()
        case "choice":
            return st.sampled_from(setting.choices)
        case "pattern":
            return st.text("ab_.*?|[]!-0", max_size=12)
        case "hosts":
            return st.sampled_from(["", "10.0.0.1:29500", "left.example:1|right:65535"])
        case "method":
            return st.sampled_from([kind for kind in bases("compression") if issubclass(kind, Packed)]).flatmap(
                lambda kind: settings_of(kind, but="route").map(lambda chosen: _as_far_as_they_fit(kind, chosen))
            )
        case "count" | "size":
            assert low is not None
            return st.integers(int(low), int(setting.at_most) if setting.at_most is not None else 10**30)
        case _:
            return st.floats(
                low,
                setting.at_most,
                exclude_min=setting.above is not None,
                allow_nan=False,
                allow_infinity=False,
            )


def settings_of(method: type[Method], *, but: str = "") -> st.SearchStrategy[dict[str, object]]:
    """Any subset of a method's settings with values it accepts."""
    return st.fixed_dictionaries(
        {}, optional={key: setting_values(setting) for key, setting in method.declared().items() if key != but}
    )


def _another_value(setting: Setting, default: object) -> object:
    """A value a setting accepts, other than its default where there is one."""
    match setting.kind:
        case "flag":
            return not default
        case "choice":
            return setting.choices[-1]
        case "pattern":
            return "*.bias|*norm*"
        case "hosts":
            return "10.0.0.1:29500"
        case "method":
            return default
        case "count" | "size":
            assert isinstance(default, int)
            if setting.at_most is not None and default >= setting.at_most:
                return default
            # A count of 0 means "nothing", and 1 then sometimes means the same.
            return default + 1 if default or setting.kind == "size" else 2
        case _:
            assert isinstance(default, int | float)
            return default * 0.9375


def _changed(method: MethodT) -> MethodT:
    """The same method with all settings changed, as far as they go together."""
    changes = {key: _another_value(setting, getattr(method, key)) for key, setting in method.declared().items()}
    inner = {"inner": method.inner} if isinstance(method, Wrapper) else {}
    return _as_far_as_they_fit(type(method), changes, **inner)


def variants(axis: str) -> list[Method]:
    """Every method of an axis with its defaults and with all settings changed; compressors also in some wrappers."""
    found: list[Method] = []
    for turn, kind in enumerate(bases(axis)):
        plain = kind()
        found += dict.fromkeys([plain, _changed(plain)])
        if isinstance(plain, Compressor):
            found += wrapped(plain, turn)
    return found


def wrapped(method: Compressor, turn: int) -> list[Compressor]:
    """The method in the first wrapper it may have, and in another one by turns.

    Not in all: what a wrapper does hardly depends on what it wraps, and there are many of both.
    """
    stacks = [stack for wrapper in WRAPPERS if is_legal(stack := wrapper(method))]
    return stacks[:1] + ([stacks[1 + turn % (len(stacks) - 1)]] if len(stacks) > 1 else [])


def is_legal(compression: Compressor) -> bool:
    """Whether a stack of compressors may be used at all."""
    try:
        Strategy(compression=compression)
    except IllegalCombination:
        return False
    return True


def changed_wrappers() -> list[Compressor]:
    """Every wrapper with all settings changed, on the first method it may wrap."""
    return [
        next(stack for kind in bases("compression") if is_legal(stack := _changed(wrapper(kind()))))
        for wrapper in WRAPPERS
    ]


def every_stack() -> list[Strategy]:
    """Strategies in which every variant of every axis occurs at least once; not their product."""
    choices = {axis: variants(axis) for axis in AXES}
    choices["compression"] += changed_wrappers()
    alone = [with_partners(method) for methods in choices.values() for method in methods]
    together = [
        nearest({axis: methods[index % len(methods)] for axis, methods in choices.items()})
        for index in range(max(map(len, choices.values())))
    ]
    return alone + together


def nearest(parts: dict[str, Method]) -> Strategy:
    """These parts as a strategy, or what its refusal names as the nearest that works."""
    try:
        return Strategy(**parts)  # type: ignore[arg-type]
    except IllegalCombination as refusal:
        message = str(refusal)
    named = re.search(r'Nearest that works: "(.+)"\.$', message)
    assert named is not None, message
    return Strategy.parse(named[1])


def with_partners(*methods: Method) -> Strategy:
    """These methods with the most ordinary others they work with."""
    strategy = nearest({method.axis: method for method in methods})
    for method in methods:
        assert getattr(strategy, method.axis) == method, f'"{strategy}" has lost {method}'
    return strategy


@st.composite
def methods(draw: st.DrawFn, axis: str) -> Method:
    """Any method of an axis with any settings; compressors with any wrappers, none of them twice."""
    kind = draw(st.sampled_from(bases(axis)))
    method = _as_far_as_they_fit(kind, draw(settings_of(kind)))
    if isinstance(method, Compressor):
        for wrapper in draw(st.lists(st.sampled_from(WRAPPERS), unique=True, max_size=2)):
            method = _as_far_as_they_fit(wrapper, draw(settings_of(wrapper)), inner=method)
    return method


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    """Any legal strategy."""
    return nearest({axis: draw(methods(axis)) for axis in AXES})


def _as_far_as_they_fit(kind: type[MethodT], chosen: dict[str, object], **inner: object) -> MethodT:
    """The method with these settings, without those that others of them rule out."""
    while True:
        try:
            return kind(**chosen, **inner)
        except InvalidSetting:
            chosen.popitem()
