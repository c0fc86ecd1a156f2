"""Registries: built-in names, third-party entry points from real distributions, and refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from laconic.errors import StrategyError, UnknownName
from laconic.registry import Registry
from laconic.settings import Method, count
from laconic.strategy import AXES


@dataclass(frozen=True, kw_only=True)
class Fruit(Method):
    """A contract."""

    axis: ClassVar[str] = "fruit"


@dataclass(frozen=True, kw_only=True)
class Apple(Fruit):
    """An apple."""

    name: ClassVar[str] = "apple"


@dataclass(frozen=True, kw_only=True)
class Pear(Fruit):
    """A pear."""

    name: ClassVar[str] = "pear"
    seeds: int = count(3)


Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a distribution: a module and a dist-info with entry points, on a sys.path entry of its own."""
    before = set(sys.modules)

    def one(distribution: str, code: str, *points: str, group: str = "laconic.fruit") -> None:
        place = tmp_path / distribution
        info = place / f"{distribution}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *points, ""]))
        (place / f"{distribution}.py").write_text(code)
        monkeypatch.syspath_prepend(place)

    yield one
    for name in set(sys.modules) - before:
        del sys.modules[name]


def plum(name: str, class_name: str = "Plum") -> str:
    return (
        "from tests.test_registry import Fruit\n"
        "from dataclasses import dataclass\nfrom typing import ClassVar\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        f'class {class_name}(Fruit):\n    """A plum."""\n    name: ClassVar[str] = "{name}"\n'
    )


def test_names_are_in_the_order_of_registration() -> None:
    registry = Registry("fruit", Fruit, [Pear, Apple])
    assert registry.names() == ["pear", "apple"]
    assert list(registry) == [Pear, Apple]
    assert registry.lookup("apple") is Apple
    assert "pear" in registry
    assert "plum" not in registry
    assert 3 not in registry


def test_unknown_name_offers_the_nearest_and_all() -> None:
    registry = Registry("fruit", Fruit, [Pear, Apple])
    with pytest.raises(UnknownName) as caught:
        registry.lookup("aple")
    assert str(caught.value) == 'fruit: there is no method "aple". Did you mean "apple"? Known: pear, apple.'
    with pytest.raises(UnknownName) as far:
        registry.lookup("x" * 500 + "\n")
    assert "Did you mean" not in str(far.value)
    assert "\n" not in str(far.value)
    assert len(str(far.value)) < 120


def test_a_name_is_not_replaced_and_the_same_class_may_come_twice() -> None:
    @dataclass(frozen=True, kw_only=True)
    class OtherApple(Fruit):
        name: ClassVar[str] = "apple"

    registry = Registry("fruit", Fruit, [Apple])
    registry.add(Apple)
    with pytest.raises(StrategyError, match=r'laconic\.fruit: the name "apple" is taken by .*Apple') as caught:
        registry.add(OtherApple)
    assert "\n" not in str(caught.value)
    assert registry.lookup("apple") is Apple


def test_what_is_no_method_or_has_no_name_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Nameless(Fruit):
        pass

    registry = Registry("fruit", Fruit, [])
    for wrong in (Method, object, Apple(), "apple"):
        with pytest.raises(StrategyError, match=r"is not a Fruit; derive it from laconic\.fruit\.Fruit"):
            registry.add(wrong)  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="Nameless has no name"):
        registry.add(Nameless)
    assert registry.names() == []


def test_entry_point_adds_a_method(install: Install) -> None:
    install("plumdist", plum("plum"), "plum = plumdist:Plum")
    registry = Registry("fruit", Fruit, [Apple])
    assert registry.lookup("apple") is Apple
    assert "plumdist" not in sys.modules, "a built-in name must not import third-party code"
    assert registry.names() == ["apple", "plum"]
    assert registry.lookup("plum").summary() == "A plum."
    assert "plum" in registry


def test_entry_point_of_another_axis_is_not_loaded(install: Install) -> None:
    install("plumdist", plum("plum"), "plum = plumdist:Plum", group="laconic.vegetable")
    assert Registry("fruit", Fruit, [Apple]).names() == ["apple"]
    assert "plumdist" not in sys.modules


@pytest.mark.parametrize(
    ("code", "point", "why"),
    [
        ("raise RuntimeError('no\\nGPU')", "bad = brokendist:Plum", "no GPU"),
        ("import a_module_that_is_not_there", "bad = brokendist:Plum", "a_module_that_is_not_there"),
        ("def broken(:", "bad = brokendist:Plum", "invalid syntax"),
        (plum("plum"), "bad = brokendist:Missing", "Missing"),
    ],
)
def test_a_broken_entry_point_is_named_each_time(install: Install, code: str, point: str, why: str) -> None:
    install("brokendist", code, point)
    registry = Registry("fruit", Fruit, [Apple])
    assert registry.lookup("apple") is Apple
    for ask in (registry.names, lambda: registry.lookup("plum"), lambda: "plum" in registry, lambda: list(registry)):
        with pytest.raises(StrategyError) as caught:
            ask()
        message = str(caught.value)
        assert 'laconic.fruit: the entry point "bad" (brokendist:' in message
        assert why in message
        assert "uninstall" in message
        assert "\n" not in message


def test_a_broken_entry_point_does_not_hide_others_for_good(install: Install) -> None:
    install("brokendist", "raise RuntimeError('no')", "bad = brokendist:Plum")
    install("plumdist", plum("plum"), "plum = plumdist:Plum")
    registry = Registry("fruit", Fruit, [Apple])
    with pytest.raises(StrategyError, match='"bad"'):
        registry.names()
    sys.modules.pop("brokendist", None)
    # The package is repaired while the process runs, as in a notebook.
    for place in sys.path:
        module = Path(place) / "brokendist.py"
        if module.exists():
            module.write_text(plum("cherry"))
    assert sorted(registry.names()) == ["apple", "cherry", "plum"]


def test_an_entry_point_that_takes_a_built_in_name_is_refused_and_named(install: Install) -> None:
    install("plumdist", plum("apple"), "mine = plumdist:Plum")
    registry = Registry("fruit", Fruit, [Apple])
    with pytest.raises(StrategyError) as caught:
        registry.names()
    message = str(caught.value)
    assert 'the name "apple" is taken by tests.test_registry.Apple' in message
    assert "plumdist" in message, "the user must learn which package to rename or uninstall"
    assert registry.lookup("apple") is Apple


def test_an_entry_point_that_is_no_method_is_refused_and_named(install: Install) -> None:
    install("plumdist", "class Plum: pass", "mine = plumdist:Plum")
    with pytest.raises(StrategyError, match=r"plumdist.*is not a Fruit"):
        Registry("fruit", Fruit, []).names()


@pytest.mark.parametrize("axis", AXES)
def test_every_built_in_method_says_what_it_is(axis: str) -> None:
    for method in AXES[axis]:
        assert method.axis == axis
        assert method.name == method.name.lower()
        assert method.summary().endswith((".", ":")), f"{method.name}: {method.summary()}"
        assert "\n" not in method.summary()
        help_texts = method.setting_help()
        assert list(help_texts) == list(method.declared())
        assert all(help_texts.values()), f"{method.name}: a setting without a docstring: {help_texts}"
