"""laconic.attach: the runtime's function, which also takes "auto" as a strategy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, cast

from laconic.auto.settings import read_auto
from laconic.runtime import Session
from laconic.runtime.attach import attach as attach_in_runtime
from laconic.runtime.change import Chooser
from laconic.strategy import Strategy, as_strategy

_P = ParamSpec("_P")
_PLACE = 2
"""Position of the strategy among the arguments."""


def _reading_auto(inner: Callable[_P, Session]) -> Callable[_P, Session]:
    """`inner`, extended to parse "auto", because the runtime does not import the planner above it."""

    @functools.wraps(inner)
    def attach(*args: _P.args, **kwargs: _P.kwargs) -> Session:
        positional = list(args)
        if len(positional) > _PLACE:
            positional[_PLACE] = read_auto(positional[_PLACE])
        elif "strategy" in kwargs:
            kwargs["strategy"] = read_auto(kwargs["strategy"])
        return inner(*positional, **kwargs)  # pyrefly: ignore[invalid-param-spec]

    return attach


def as_choice(strategy: Strategy | str | Chooser) -> Strategy | Chooser:
    """What attach() takes, read and checked before a session is attached."""
    read = read_auto(strategy)
    return read if isinstance(read, Chooser) else as_strategy(cast(Strategy | str, read))


attach = _reading_auto(attach_in_runtime)
