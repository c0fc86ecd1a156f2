"""Hosts and the links between them, as data.

bandwidth = "100mbit"            # of every host's link, unless its own table says otherwise
delay = "5ms"                    # one way, added to every link
loss = "0.1%"
hosts = 4

[[host]]                         # exceptions
index = 2
bandwidth = "10mbit"

[[rack]]                         # instead of hosts = ...: racks behind an uplink of their own
hosts = 2
uplink = "50mbit"
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from laconic.errors import UsageError, did_you_mean, one_line
from laconic.units import format_rate, format_time, parse_quantity

_MOST_HOSTS = 250
"""Host numbers are the last byte of an address."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """One direction of one cable; both directions are alike."""

    bandwidth_bps: float
    delay_s: float = 0.0
    loss_ratio: float = 0.0

    def __post_init__(self) -> None:
        # Below a kilobit per second nothing useful happens; above 10 Tbit/s it is a typing error.
        if not 1e3 <= self.bandwidth_bps <= 1e13:
            raise UsageError(
                f"bandwidth must be between 1kbit and 10tbit per second, got {format_rate(self.bandwidth_bps)}."
            )
        if not 0 <= self.delay_s <= 10:
            raise UsageError(f"delay must be between 0 and 10 s, got {format_time(self.delay_s)}.")
        if not 0 <= self.loss_ratio < 1:
            raise UsageError(f"loss must be at least 0 and below 1, got {self.loss_ratio:g}.")

    def __str__(self) -> str:
        extra = f", delay {format_time(self.delay_s)}" if self.delay_s else ""
        extra += f", loss {self.loss_ratio:.3g}" if self.loss_ratio else ""
        return f"{format_rate(self.bandwidth_bps)}{extra}"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts, each with its link to a switch; racks, if any, each with an uplink to the core."""

    links: tuple[Link, ...]
    """One per host."""
    rack_of: tuple[int, ...] = ()
    """The rack of each host; empty when all hosts hang on one switch."""
    uplinks: tuple[Link, ...] = ()
    """One per rack."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.links) <= _MOST_HOSTS:
            raise UsageError(f"the number of hosts must be between 1 and {_MOST_HOSTS}, got {len(self.links)}.")

    @property
    def num_hosts(self) -> int:
        """How many hosts there are."""
        return len(self.links)

    @classmethod
    def uniform(cls, num_hosts: int, link: Link, exceptions: Mapping[int, Link] | None = None) -> Cluster:
        """Hosts on one switch, all with the same link but for some."""
        if not 1 <= num_hosts <= _MOST_HOSTS:
            raise UsageError(f"the number of hosts must be between 1 and {_MOST_HOSTS}, got {num_hosts}.")
        for host in exceptions or {}:
            _check_host(host, num_hosts)
        return cls(links=tuple((exceptions or {}).get(host, link) for host in range(num_hosts)))

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Read a TOML file."""
        try:
            return cls.from_toml(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as exc:
            reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
            raise UsageError(f"cannot read the cluster file {path}: {reason}.") from exc

    @classmethod
    def from_toml(cls, text: str) -> Cluster:
        """Read a TOML document."""
        try:
            table = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError, ValueError, OverflowError) as exc:
            raise UsageError(f"cluster TOML cannot be read: {one_line(exc)}.") from exc
        return cls.from_table(table)

    @classmethod
    def from_table(cls, table: Mapping[str, object]) -> Cluster:
        """Read a TOML document that has been parsed."""
        _check_keys(table, ("hosts", "bandwidth", "delay", "loss", "host", "rack"), "cluster TOML")
        link = _link(table, None, "cluster TOML")
        racks = _tables(table, "rack")
        rack_of: list[int] = []
        uplinks: list[Link] = []
        for number, rack in enumerate(racks):
            where = f"cluster TOML, rack {number}"
            _check_keys(rack, ("hosts", "uplink"), where)
            if "uplink" not in rack:
                raise UsageError(f'{where} needs uplink = "50mbit" or the like.')
            rack_of += [number] * _count(rack, "hosts", where)
            uplinks.append(Link(bandwidth_bps=_quantity(rack["uplink"], f"{where}.uplink")))
        if racks and "hosts" in table:
            raise UsageError("cluster TOML: give hosts or [[rack]] tables, not both.")
        num_hosts = len(rack_of) if racks else _count(table, "hosts", "cluster TOML")
        exceptions: dict[int, Link] = {}
        for host in _tables(table, "host"):
            _check_keys(host, ("index", "bandwidth", "delay", "loss"), "cluster TOML, host")
            index = _count(host, "index", "cluster TOML, host", least=0)
            _check_host(index, num_hosts)
            exceptions[index] = _link(host, link, f"cluster TOML, host {index}")
        uniform = cls.uniform(num_hosts, link, exceptions)
        return replace(uniform, rack_of=tuple(rack_of), uplinks=tuple(uplinks))

    def to_toml(self, table: str = "") -> str:
        """What from_toml reads; with `table`, as a table of that name in a larger document."""
        usual = max(self.links, key=self.links.count)
        lines = [f"[{table}]"] if table else []
        lines += _link_lines(usual)
        if not self.uplinks:
            lines.append(f"hosts = {self.num_hosts}")
        prefix = f"{table}." if table else ""
        for rack, uplink in enumerate(self.uplinks):
            lines += [f"[[{prefix}rack]]", f"hosts = {self.rack_of.count(rack)}"]
            lines.append(f'uplink = "{format_rate(uplink.bandwidth_bps)}"')
        for host, link in enumerate(self.links):
            if link != usual:
                lines += [f"[[{prefix}host]]", f"index = {host}", *_link_lines(link)]
        return "".join(f"{line}\n" for line in lines)

    def describe(self) -> str:
        """The links in one line."""
        kinds: dict[Link, list[int]] = {}
        for host, link in enumerate(self.links):
            kinds.setdefault(link, []).append(host)
        most = max(kinds, key=lambda link: len(kinds[link]))
        others = [f"host {', '.join(map(str, hosts))}: {link}" for link, hosts in kinds.items() if link != most]
        racks = [f"{len(self.uplinks)} racks behind {', '.join(map(str, self.uplinks))}"] if self.uplinks else []
        return "; ".join([f"{self.num_hosts} hosts at {most}", *others, *racks])


def parse_bandwidth(text: str, where: str) -> float:
    """Bits per second from text such as 100mbit."""
    return parse_quantity(text, "rate", where)


def _link_lines(link: Link) -> list[str]:
    return [
        f'bandwidth = "{format_rate(link.bandwidth_bps)}"',
        f'delay = "{format_time(link.delay_s)}"',
        f"loss = {link.loss_ratio!r}",
    ]


def _check_host(host: int, num_hosts: int) -> None:
    if not 0 <= host < num_hosts:
        raise UsageError(f"there is no host {host}; hosts are numbered 0 to {num_hosts - 1}.")


def _check_keys(table: Mapping[str, object], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            raise UsageError(f'{where}: there is no key "{one_line(key, 40)}". {did_you_mean(key, known)}')


def _tables(table: Mapping[str, object], key: str) -> list[Mapping[str, object]]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise UsageError(f"cluster TOML: write {key} as [[{key}]] tables.")
    return value


def _count(table: Mapping[str, object], key: str, where: str, least: int = 1) -> int:
    value = table.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _MOST_HOSTS:
        shown = "nothing" if value is None else one_line(repr(value), 40)
        raise UsageError(f"{where}: {key} must be a whole number from {least} to {_MOST_HOSTS}, got {shown}.")
    return value


def _quantity(value: object, where: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return parse_bandwidth(str(value), where)


def _link(table: Mapping[str, object], base: Link | None, where: str) -> Link:
    if base is None and "bandwidth" not in table:
        raise UsageError(f'{where}: bandwidth is missing. Write e.g. bandwidth = "100mbit".')
    bandwidth = _quantity(table["bandwidth"], f"{where}.bandwidth") if "bandwidth" in table else None
    delay = parse_quantity(str(table["delay"]), "time", f"{where}.delay") if "delay" in table else None
    loss = parse_quantity(str(table["loss"]), "share", f"{where}.loss") if "loss" in table else None
    return Link(
        bandwidth_bps=bandwidth if bandwidth is not None else base.bandwidth_bps if base else 0.0,
        delay_s=delay if delay is not None else base.delay_s if base else 0.0,
        loss_ratio=loss if loss is not None else base.loss_ratio if base else 0.0,
    )
