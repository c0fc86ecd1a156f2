"""config.toml: complete, re-runnable, and strict."""

from __future__ import annotations

from pathlib import Path

import pytest

from laconic.cluster import Cluster
from laconic.errors import LaconicError, UsageError
from laconic.experiments.comparison import Comparison, Network, uniform_network
from laconic.experiments.config_file import load, to_toml
from laconic.experiments.tasks import TaskConfig

RACKS = Cluster.from_toml(
    'bandwidth = "1gbit"\ndelay = "5ms"\n[[rack]]\nhosts = 2\nuplink = "50mbit"\n[[rack]]\nhosts = 1\n'
    'uplink = "20mbit"\n[[host]]\nindex = 2\nbandwidth = "10mbit"\nloss = "1%"\n'
)

COMPARISONS = [
    Comparison(networks=(uniform_network(4, 100e6), uniform_network(4, 10e6))),
    Comparison(networks=(Network(name="racks", cluster=RACKS),), hosts=3, steps=None, seconds=2.5, target_loss=1.25),
    Comparison(
        networks=(Network(name="unlimited", cluster=None),),
        strategies=("bsp / all_reduce / bf16 + error_feedback / fusion(bytes=1MiB)",),
        task=TaskConfig(
            kind="images", size="tiny", batch=7, seed=3, data='some/a "quoted" näme.npz', learning_rate=0.1
        ),
        links="paced",
        timeout_s=60.0,
    ),
    Comparison(
        kind="replay",
        networks=(uniform_network(2, 1e9),),
        hosts=2,
        task=TaskConfig(kind="replay", data="resnet50", compute_s=0.5),
    ),
]


@pytest.mark.parametrize("comparison", COMPARISONS)
def test_round_trip(comparison: Comparison, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(to_toml(comparison))
    assert load(str(path), comparison.kind) == comparison


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("steps = 36", "step = 36", 'Did you mean "steps"?'),
        ("steps = 36", "", "steps or seconds"),
        ("steps = 36", "steps = 0", "steps must be >= 1"),
        ('size = "small"', 'sise = "small"', 'Did you mean "size"?'),
        ('kind = "compare"', 'kind = "replay"', "configures laconic replay"),
        ('bandwidth = "100mbit"', 'bandwidth = "fast"', "must be a rate"),
        ("[[network]]", "[network]", "[[network]] tables"),
        ("steps = 36", "steps =", "is not TOML"),
        ("hosts = 4\nranks", "hosts = 3\nranks", "hosts is 3, but 100mbit has 4 hosts"),
        ("seed = 0", "seed = 0\ncompute_s = 1.0", "compute_s has no effect on the task text"),
        ('name = "100mbit"\n', "", "name"),
    ],
)
def test_bad_files_are_refused(old: str, new: str, told: str, tmp_path: Path) -> None:
    text = to_toml(Comparison(networks=(uniform_network(4, 100e6),)))
    assert old in text
    path = tmp_path / "config.toml"
    path.write_text(text.replace(old, new))
    with pytest.raises(LaconicError) as caught:
        load(str(path), "compare")
    assert told in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the configuration"):
        load(str(tmp_path / "none.toml"), "compare")


def test_networks_with_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="given once"):
        Comparison(networks=(uniform_network(2, 1e6), uniform_network(2, 1e6)))
