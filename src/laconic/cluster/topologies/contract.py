"""The contract of a topology: links between hosts, and the route of each message over them.

A topology is a frozen dataclass with a `kind`; its fields are made by `whole`, `number`, `seconds`, `rate` and
`wholes`, which check Python objects and TOML alike. A field's key in TOML is its name without the unit: delay_s is
delay = "1us".
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self, cast

import numpy as np
import numpy.typing as npt

from laconic.cluster.fabric import Floats, Indices
from laconic.cluster.link import Link
from laconic.cluster.link_table import LinkTable
from laconic.cluster.values import Kind, Number, Rate, Seconds, Several, Whole, check_keys
from laconic.errors import UsageError

NOT_CROSSED = -1
"""In a column of links: this message has no such hop."""


@dataclass(frozen=True, kw_only=True)
class Ports:
    """The hosts that a topology connects."""

    num_hosts: int
    nics: int
    """The number of NICs of each host."""
    capacity_bytes_per_s: Floats
    """The capacity of the link of each NIC, per host."""
    delay_s: Floats
    """The delay of the link of each NIC, per host."""
    usual: Link
    """The link most hosts have, which cables between switches are derived from."""


@dataclass(frozen=True, kw_only=True)
class Messages:
    """Messages between different hosts."""

    source: Indices
    """The source host of each message."""
    destination: Indices
    source_nic: Indices
    """The NIC, counted within its host, of the device that each message comes from."""
    destination_nic: Indices
    spread: npt.NDArray[np.uint64]
    """A hash of (source device, destination device), which spreads messages over equal paths, as ECMP does."""

    def choose(self, num_paths: int, *, level: int = 0) -> Indices:
        """One of several equal paths for each message; different levels choose independently."""
        return ((self.spread >> np.uint64(16 * level)) % np.uint64(num_paths)).astype(np.int64)


Paths = Callable[[Messages], Sequence[Indices]]
"""The links messages cross, hop by hop: each column holds one link per message, or NOT_CROSSED."""


@dataclass(frozen=True, kw_only=True)
class Topology(ABC):
    """How hosts are joined."""

    kind: ClassVar[str] = ""
    in_lab: ClassVar[bool] = False
    """Whether the lab can connect virtual hosts with this topology."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if "kind" in field.metadata and not (value is None and field.default is None):
                read = _kind(field).read(value, f"topology {self.kind}: {_key(field.name)}")
                object.__setattr__(self, field.name, read)

    def check(self, num_hosts: int, nics: int, devices_per_host: int) -> None:
        """Raise UsageError if this topology cannot connect such hosts."""
        if max(nics, devices_per_host) % min(nics, devices_per_host):
            raise UsageError(
                f"{devices_per_host} devices cannot share {nics} NICs evenly. One number must divide the other."
            )

    @abstractmethod
    def connect(self, ports: Ports, table: LinkTable) -> Paths:
        """Lay the links between hosts and say how messages cross them."""
        ...

    @property
    def is_nonblocking(self) -> bool:
        """Whether only the hosts' own links limit messages."""
        return False

    @abstractmethod
    def describe(self) -> str:
        """In a few words; empty if there is nothing to say."""
        ...

    @classmethod
    def from_table(cls, table: Mapping[str, object], where: str) -> Self:
        """Read its settings."""
        fields = {_key(field.name): field for field in dataclasses.fields(cls)}
        check_keys(table, tuple(fields), where)
        for key, field in fields.items():
            if field.default is dataclasses.MISSING and key not in table:
                raise UsageError(f"{where}: {key} is missing. Needed: {', '.join(cls._required())}.")
        return cls(**{fields[key].name: value for key, value in table.items()})

    @classmethod
    def _required(cls) -> list[str]:
        return [_key(field.name) for field in dataclasses.fields(cls) if field.default is dataclasses.MISSING]

    def to_lines(self) -> list[str]:
        """The inverse of from_table, one key per line; defaults are left out."""
        return [
            f"{_key(field.name)} = {_kind(field).write(getattr(self, field.name))}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        ]


def whole(default: int | None = 0, *, least: int = 1, most: int = 65_536) -> int:
    """A whole number; without a default (0) it must be given."""
    return cast(int, _field(dataclasses.MISSING if default == 0 else default, Whole(least=least, most=most)))


def number(default: float, *, least: float, most: float) -> float:
    """A number."""
    return cast(float, _field(default, Number(least=least, most=most)))


def seconds() -> float:
    """A time, 0 if left out."""
    return cast(float, _field(0.0, Seconds()))


def rate() -> float | None:
    """A bandwidth; None if left out."""
    return cast("float | None", _field(None, Rate()))


def wholes(*, least: int, most: int, of: Whole) -> tuple[int, ...]:
    """A list of whole numbers, which must be given."""
    return cast("tuple[int, ...]", _field(dataclasses.MISSING, Several(of, least, most)))


def _field(default: object, kind: Kind[object]) -> object:
    return dataclasses.field(default=default, metadata={"kind": kind})


def _kind(field: dataclasses.Field[object]) -> Kind[object]:
    return field.metadata["kind"]


def _key(name: str) -> str:
    return name.removesuffix("_s").removesuffix("_bps")


def lay_nic_links(ports: Ports, table: LinkTable, switch_of: Callable[[int, int], str]) -> tuple[int, int]:
    """A link up and one down for every NIC of every host, to the switch that `switch_of` names; their first numbers.

    The link of NIC j of host h is number h * nics + j of its block.
    """

    def ends(place: int) -> tuple[str, str]:
        host, nic = divmod(place, ports.nics)
        return f"host {host}" + (f", NIC {nic}" if ports.nics > 1 else ""), switch_of(host, nic)

    capacity = np.repeat(ports.capacity_bytes_per_s, ports.nics)
    delay_s = np.repeat(ports.delay_s, ports.nics)
    up = table.add(capacity, delay_s, lambda place: " -> ".join(ends(place)))
    down = table.add(capacity, delay_s, lambda place: " -> ".join(reversed(ends(place))))
    return up, down
