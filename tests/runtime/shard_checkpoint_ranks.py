"""What the ranks of the tests of sharded checkpoints do: save, resume, load onto other shards and replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import laconic
from laconic.errors import CheckpointError
from tests.processes import gloo_group
from tests.runtime.shard_models import gpt_loss, make_mesh, pieces_of, sharded_gpt, train

STRATEGIES_TO_SAVE = (
    "bsp / all_reduce / int4 + error_feedback / fusion",
    "bsp / all_reduce / powersgd(rank=2) + error_feedback / fusion",
    "diloco(period=4) / all_reduce / int4 + error_feedback",
)


def save_and_resume(folder: str) -> dict[str, Any]:
    """Continue from a session's state, from memory and from torch.distributed.checkpoint: the same bits?"""
    import torch.distributed.checkpoint as dcp

    with gloo_group():
        mesh = make_mesh()
        found: dict[str, Any] = {}
        for number, strategy in enumerate(STRATEGIES_TO_SAVE):
            place = Path(folder) / str(number)
            model, optimizer = sharded_gpt(mesh["shard"])
            options = {"process_group": mesh["replicate"], "timeout_s": 40}
            with laconic.attach(model, optimizer, strategy, **options) as session:
                train(model, optimizer, gpt_loss, range(6))
                state = session.state_dict()
                pieces = pieces_of(model)
                inner = {key: value.clone() for key, value in _optimizer_pieces(model, optimizer).items()}
                dcp.save({"session": state, "model": model.state_dict()}, checkpoint_id=place)
                whole = _whole(state, session.rank)
                train(model, optimizer, gpt_loss, range(6, 10))
            expected = pieces_of(model)
            for way in ("memory", "checkpoint"):
                model, optimizer = sharded_gpt(mesh["shard"])
                with laconic.attach(model, optimizer, strategy, **options) as session:
                    train(model, optimizer, gpt_loss, range(4))  # so that the optimizer has a state
                    with torch.no_grad():
                        for name, parameter in model.named_parameters():
                            parameter._local_tensor.copy_(pieces[name])
                        for key, value in _optimizer_pieces(model, optimizer).items():
                            value.copy_(inner[key])
                    loaded = state
                    if way == "checkpoint":
                        loaded = {"session": session.state_dict()}
                        dcp.load(loaded, checkpoint_id=place)
                        loaded = loaded["session"]
                    session.load_state_dict(loaded)
                    train(model, optimizer, gpt_loss, range(6, 10))
                ours = pieces_of(model)
                found[f"{strategy}: {way}"] = all(torch.equal(expected[name], ours[name]) for name in expected)
            found[f"{strategy}: whole"] = whole
        return found


def load_torn(broken: int) -> dict[str, str]:
    """What every rank says if one of them loads a state that is not as it must be."""
    with gloo_group():
        mesh = make_mesh()
        found: dict[str, str] = {}
        for problem in ("a field is missing", "of another step"):
            model, optimizer = sharded_gpt(mesh["shard"])
            strategy = STRATEGIES_TO_SAVE[0]
            with laconic.attach(model, optimizer, strategy, process_group=mesh["replicate"], timeout_s=20) as session:
                states = []
                for step in range(2):
                    train(model, optimizer, gpt_loss, range(step, step + 1))
                    states.append(session.state_dict())
                state = states[1]
                island = mesh["shard"].get_local_rank() == broken % 2
                if problem == "of another step" and island:  # of one piece on all islands, so that these agree
                    state = {**state, "step": states[0]["step"]}
                if problem == "a field is missing" and dist.get_rank() == broken:
                    del state["ranks"][str(session.rank)]["norm.weight"]
                try:
                    session.load_state_dict(state)
                    found[problem] = "nothing"
                except CheckpointError as exc:
                    found[problem] = str(exc)
        return found


def load_onto_other_shards(folder: str) -> dict[str, Any]:
    """As `save_and_resume` has left it, on half as many ranks: two islands of one shard."""
    import torch.distributed.checkpoint as dcp

    with gloo_group():
        mesh = make_mesh()
        strategy = STRATEGIES_TO_SAVE[0]
        model, optimizer = sharded_gpt(mesh["shard"])
        with laconic.attach(model, optimizer, strategy, process_group=mesh["replicate"], timeout_s=40) as session:
            train(model, optimizer, gpt_loss, range(1))
            loaded = {"session": session.state_dict(), "model": model.state_dict()}
            dcp.load(loaded, checkpoint_id=Path(folder) / "0")
            model.load_state_dict(loaded["model"])
            session.load_state_dict(loaded["session"])
            return _whole(session.state_dict(), session.rank)


STREAMING = "streaming_diloco(period=6, fragments=2, overlap=2) / all_reduce / int4 + error_feedback / fusion"


def load_onto_other_replicas(folder: str) -> dict[str, bool]:
    """Save by torch.distributed.checkpoint, and load with other numbers of replicas and of shards."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh

    with gloo_group():
        found: dict[str, bool] = {}
        grids = [(4, 1), (2, 2)]
        meshes = [init_device_mesh("cpu", grid, mesh_dim_names=("replicate", "shard")) for grid in grids]
        for number, strategy in enumerate((STRATEGIES_TO_SAVE[0], STREAMING)):
            mesh, place = meshes[number], Path(folder) / str(number)
            model, optimizer = sharded_gpt(mesh["shard"])
            with laconic.attach(model, optimizer, strategy, process_group=mesh["replicate"], timeout_s=40) as session:
                train(model, optimizer, gpt_loss, range(7))
                state, pieces = session.state_dict(), pieces_of(model)
                pending = any("rounds.pending" in fields for fields in state["ranks"][str(session.rank)].values())
                found[f"{strategy}: in flight"] = pending == (strategy == STREAMING)
                dcp.save({"session": state}, checkpoint_id=place)
                before = _summed(state, session.rank, mesh)
                inner = {key: value.clone() for key, value in _optimizer_pieces(model, optimizer).items()}
                train(model, optimizer, gpt_loss, range(7, 11))
            expected = pieces_of(model)
            for grid, mesh in zip(grids, meshes, strict=True):
                name = f"{strategy} on {grid}"
                model, optimizer = sharded_gpt(mesh["shard"])
                options = {"process_group": mesh["replicate"], "timeout_s": 40}
                with laconic.attach(model, optimizer, strategy, **options) as session:
                    train(model, optimizer, gpt_loss, range(2))  # so that the optimizer has a state
                    same = mesh is meshes[number]
                    with torch.no_grad():
                        for key, parameter in model.named_parameters() if same else ():
                            parameter._local_tensor.copy_(pieces[key])
                        for key, value in _optimizer_pieces(model, optimizer).items() if same else ():
                            value.copy_(inner[key])
                    session.load_checkpoint(place)
                    found[f"{name}: step"] = session.step == 7
                    after = _summed(session.state_dict(), session.rank, mesh)
                    found[f"{name}: sums"] = (
                        bool(before)
                        and before.keys() == after.keys()
                        and all(torch.allclose(before[key], after[key], rtol=1e-5, atol=1e-7) for key in before)
                    )
                    train(model, optimizer, gpt_loss, range(7, 11))
                ours = pieces_of(model)
                found[f"{name}: finite"] = all(bool(piece.isfinite().all()) for piece in ours.values())
                if same:
                    found[f"{name}: bits"] = all(torch.equal(expected[key], ours[key]) for key in expected)
        return found


def _summed(state: dict[str, Any], rank: int, mesh: Any) -> dict[str, torch.Tensor]:
    """Each field of all shards together; residuals of all replicas added up, other fields as each has them."""
    found: dict[str, torch.Tensor] = {}
    for key, value in sorted(_whole(state, rank).items()):
        if "owed" in key:  # begins anew
            continue
        whole = value.clone()
        if "residual" in key:
            dist.all_reduce(whole, group=mesh.get_group("replicate"))
        found[key] = whole
    return found


def _whole(state: dict[str, Any], rank: int) -> dict[str, torch.Tensor]:
    """Residuals of all shards together."""
    fields = state["ranks"][str(rank)]
    return {
        f"{name} {key}": value.full_tensor()
        for name, of in fields.items()
        for key, value in of.items()
        if hasattr(value, "full_tensor")
    }


def _optimizer_pieces(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{name} {key}": getattr(value, "_local_tensor", value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor)
    }
