"""A comparison as a TOML file, complete and re-runnable.

kind = "compare"
strategies = ["bsp / all_reduce / bf16 / fusion"]
hosts = 4
ranks_per_host = 1
sharded = false
links = "auto"
device = "cpu"
steps = 20                       # or seconds = 60.0
timeout_s = 1800.0

[task]
kind = "text"
size = "small"
batch = 2
learning_rate = 0.001
seed = 0

[[network]]
name = "100mbit"
[network.cluster]                # as in a cluster file; without it links are unlimited
bandwidth = "100mbit"
hosts = 4
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from laconic.cluster import Cluster
from laconic.errors import UsageError, did_you_mean, one_line
from laconic.experiments.comparison import Comparison, Network
from laconic.experiments.tasks import TaskConfig
from laconic.strategy.toml import write_value


def to_toml(comparison: Comparison) -> str:
    """The whole comparison; fields that are None are left out."""
    plain = {field.name: getattr(comparison, field.name) for field in fields(comparison)}
    networks, task = plain.pop("networks"), plain.pop("task")
    lines = [f"# Repeat this run with: laconic {comparison.kind} --config FILE\n"]
    lines += _pairs(plain)
    lines += ["\n[task]\n", *_pairs(asdict(task))]
    for network in networks:
        lines.append(f"\n[[network]]\nname = {write_value(network.name)}\n")
        if network.cluster is not None:
            lines.append(network.cluster.to_toml("network.cluster"))
    return "".join(lines)


def _pairs(table: Mapping[str, object]) -> list[str]:
    return [f"{key} = {write_value(value)}\n" for key, value in table.items() if value is not None]


def load(path: str, kind: str) -> Comparison:
    """Read a file that to_toml wrote; `kind` is the calling command."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as exc:
        raise UsageError(f"cannot read the configuration {path}: {exc.strerror}.") from exc
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError, ValueError, OverflowError) as exc:
        raise UsageError(f"the configuration {path} is not TOML: {one_line(exc, 120)}.") from exc
    if table.get("kind", kind) != kind:
        raise UsageError(f"{path} configures laconic {one_line(table['kind'], 40)}, not laconic {kind}.")
    networks = table.pop("network", None)
    task = table.pop("task", {})
    if not isinstance(networks, list) or not isinstance(task, Mapping):
        raise UsageError(f"{path}: a [task] table and [[network]] tables are needed.")
    # A setting that is not in the file is None where the dataclass allows it, not the default of another version.
    absent = {"steps": None, "seconds": None}
    return _build(
        Comparison,
        {
            **absent,
            **{key: tuple(value) if isinstance(value, list) else value for key, value in table.items()},
            "networks": tuple(_network(network, path) for network in networks),
            "task": _build(TaskConfig, task, f"{path}, [task]"),
        },
        path,
    )


def _network(table: object, where: str) -> Network:
    if not isinstance(table, Mapping):
        raise UsageError(f"{where}: write networks as [[network]] tables.")
    cluster = table.get("cluster")
    if cluster is not None and not isinstance(cluster, Mapping):
        raise UsageError(f"{where}: network.cluster must be a table.")
    made = None if cluster is None else Cluster.from_table(cluster)
    return _build(Network, {**table, "cluster": made}, f"{where}, [[network]]")


def _build(kind: type[Any], table: Mapping[str, object], where: str) -> Any:
    known = [field.name for field in fields(kind)]
    for key in table:
        if key not in known:
            raise UsageError(f'{where}: there is no setting "{one_line(key, 40)}". {did_you_mean(key, known)}')
    try:
        return kind(**table)
    except TypeError as exc:
        raise UsageError(f"{where}: {one_line(exc, 120)}.") from exc
