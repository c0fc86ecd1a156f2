"""States of torch.distributed.checkpoint: read by a single process, for models that are not sharded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import CheckpointError
from laconic.runtime.checkpoint import redistribute
from laconic.runtime.distributed_checkpoint import read_checkpoint
from tests.runtime.test_checkpoint import run

pytestmark = pytest.mark.timeout(60)
BSP = "bsp / all_reduce / int4 + error_feedback(residual=int8) / fusion"
LOCAL = "diloco(period=2) / all_reduce / int4 + error_feedback / fusion"


def save(states: list[dict[str, Any]], folder: Path, key: str = "session") -> None:
    """As all ranks would do together."""
    whole = {**states[0]}
    for part in ("ranks", "digest"):
        whole[part] = {rank: value for state in states for rank, value in state[part].items()}
    with pytest.warns(UserWarning, match="torch.distributed"):
        dcp.save({key: whole, "other": {"step": 3}}, checkpoint_id=folder, no_dist=True)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return one == other


@pytest.mark.parametrize("strategy", [BSP, LOCAL])
@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_a_rank_reads_what_redistribute_gives_it(strategy: str, after: int, tmp_path: Path) -> None:
    old = run(strategy, 3)
    save(old, tmp_path)
    expected = old if after == 3 else redistribute(old, after)
    for rank in range(after):
        assert same(read_checkpoint(tmp_path, "session", {}, rank=rank, world_size=after), expected[rank])


def test_a_session_continues_from_it(tmp_path: Path) -> None:
    old = run(BSP, 2)
    save([{**state, "digest": {}} for state in old], tmp_path, key="laconic")

    def one_rank(transport: InProcessTransport) -> dict[str, Any]:
        model = torch.nn.ModuleDict({"layer": torch.nn.Linear(8, 9)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with laconic.attach(model, optimizer, BSP, transport=transport) as session:
            for folder, key, problem in (
                (tmp_path, "session", 'no session state under "session", only "laconic", "other"'),
                (tmp_path / "nowhere", "laconic", "holds no checkpoint"),
            ):
                with pytest.raises(CheckpointError, match=problem):
                    session.load_checkpoint(folder, key=key)
            session.load_checkpoint(tmp_path, key="laconic")
            assert session.step == 3
            return session.state_dict()

    for rank, state in enumerate(laconic.InProcessCluster(2).run(one_rank)):
        assert same(state["ranks"], old[rank]["ranks"])
