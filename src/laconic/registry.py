"""The names one axis knows: its own methods, then third-party ones found through entry points.

A third-party package adds a method without touching laconic:

    [project.entry-points."laconic.compression"]
    mymethod = "mypackage.mymethod:MyMethod"
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from laconic.errors import StrategyError, one_line, unknown_method
from laconic.settings import Method

M = TypeVar("M", bound=Method)


class Registry(Generic[M]):
    """A fixed set of built-in methods plus whatever is installed under one entry-point group."""

    def __init__(self, axis: str, contract: type[M], methods: Iterable[type[M]]) -> None:
        self.axis = axis
        self.contract = contract
        self.group = f"laconic.{axis}"
        self._methods: dict[str, type[M]] = {}
        self._plugins_found = False
        for method in methods:
            self.add(method)

    def add(self, method: type[M]) -> None:
        """Register one method under its name; a name is never replaced silently."""
        if not (isinstance(method, type) and issubclass(method, self.contract)):
            raise StrategyError(
                f"{self.group}: {one_line(repr(method), 80)} is not a {self.contract.__name__}; "
                f"derive it from laconic.{self.axis}.{self.contract.__name__}."
            )
        if not method.name:
            raise StrategyError(f"{self.group}: {method.__name__} has no name; set the class variable `name`.")
        taken = self._methods.get(method.name)
        if taken is not None and taken is not method:
            raise StrategyError(
                f'{self.group}: the name "{method.name}" is taken by {taken.__module__}.{taken.__qualname__}; '
                f"give {method.__module__}.{method.__qualname__} another."
            )
        self._methods[method.name] = method

    def _find_plugins(self) -> None:
        # Only when a name is looked up or listed: importing laconic must not import third-party packages.
        if self._plugins_found:
            return
        for point in entry_points(group=self.group):
            try:
                loaded = point.load()
            except Exception as exc:  # a plug-in may fail in any way; the user must learn which one
                raise StrategyError(
                    f'{self.group}: the entry point "{point.name}" ({point.value}) failed to load: '
                    f"{one_line(exc)}. Repair or uninstall that package."
                ) from exc
            self.add(loaded)
        # Not before all are there: a broken one is reported every time, not once.
        self._plugins_found = True

    def lookup(self, name: str) -> type[M]:
        """The method called `name`."""
        if name not in self._methods:
            self._find_plugins()
        try:
            return self._methods[name]
        except KeyError:
            raise unknown_method(self.axis, name, self.names()) from None

    def names(self) -> list[str]:
        """Every known name, built-in ones first, in the order of registration."""
        self._find_plugins()
        return list(self._methods)

    def __iter__(self) -> Iterator[type[M]]:
        self._find_plugins()
        return iter(self._methods.values())

    def __contains__(self, name: object) -> bool:
        self._find_plugins()
        return name in self._methods
