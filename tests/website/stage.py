"""Runs the Python blocks of the documentation on real ranks.

A block is executed as it stands. The names that a page takes for granted (`model`, `optimizer`, `data`, `train`, ...)
are those of a small problem. Each block has its own model, and `session` is attached if a block uses one that it does
not make. Meshes that a page makes on eight GPUs per host are made of these ranks on CPUs.
"""

from __future__ import annotations

import ast
import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import laconic

STEPS = 4
WIDTH = 16
"""Of all layers: wide enough for powersgd to compress them."""


class Blocks(nn.Module):
    """A model with a list of blocks, as pages about sharding have it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


class Labelled(nn.Module):
    """The same, with a loss as Trainer and Lightning want it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = Blocks()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        predicted = self.network(x)
        return {"loss": (predicted - labels[:, None]).square().mean(), "logits": predicted}


def _rows(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.randn(WIDTH), "labels": torch.randn(())} for _ in range(count)]


def run(blocks: list[dict[str, Any]], shared: str) -> list[str]:
    """Execute blocks one after the other, each in a folder of its own; return "ok" or the error of each.

    shared: a folder that all ranks see, for checkpoints.
    """
    dist.init_process_group("gloo")
    outcomes = []
    for block in blocks:
        with tempfile.TemporaryDirectory() as folder, _inside(Path(folder)):
            try:
                _execute(block["where"], block["code"], checkpoint=f"{shared}/{len(outcomes)}")
                outcomes.append("ok")
            except Exception as error:  # noqa: BLE001 - a reader wants to see all blocks that fail
                outcomes.append(f"{block['where']}: {type(error).__name__}: {error}")
        dist.barrier()
    dist.destroy_process_group()
    return outcomes


def run_frameworks(blocks: list[dict[str, Any]]) -> list[str]:
    """The same for blocks about frameworks, which make process groups themselves; the first error ends it."""
    for block in blocks:
        framework = block["code"].split("laconic.integrations.")[1].split()[0]
        with tempfile.TemporaryDirectory() as folder, _inside(Path(folder)):
            exec(compile(block["code"], block["where"], "exec"), _FRAMEWORKS[framework]())
        if dist.is_initialized():
            dist.barrier()
    if dist.is_initialized():
        dist.destroy_process_group()
    return ["ok" for _ in blocks]


def _execute(where: str, code: str, *, checkpoint: str) -> None:
    names = {**_names(), "folder": checkpoint}
    Path("strategy.toml").write_text(laconic.Strategy.parse("powersgd").to_toml(), encoding="utf-8")
    tree = ast.parse(code, where)
    made = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    with ExitStack() as stack:
        if "mesh" in used - made:
            names["mesh"] = mesh = init_device_mesh(
                "cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard")
            )
            _shard(names, mesh["shard"])
        if "session" in used - made:
            names["session"] = stack.enter_context(
                laconic.attach(names["model"], names["optimizer"], "diloco(period=2)")
            )
        exec(compile(tree, where, "exec"), names)


def _names() -> dict[str, Any]:
    """What a page takes for granted."""
    torch.manual_seed(0)
    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(1 + dist.get_rank())
    data = [torch.randn(2, WIDTH) for _ in range(STEPS)]

    def loss(predicted: torch.Tensor) -> torch.Tensor:
        return predicted.square().mean()

    def train(transport: laconic.Transport | None = None) -> None:
        """The whole loop; in a thread of an InProcessCluster with a model and a session of its own."""
        ours, its = model, optimizer
        with ExitStack() as stack:
            if transport is not None:
                ours = Blocks()
                its = torch.optim.AdamW(ours.parameters())
                stack.enter_context(laconic.attach(ours, its, "ddp", transport=transport))
            for batch in data:
                loss(ours(batch)).backward()
                its.step()
                its.zero_grad()

    return {
        **{
            "__name__": "__page__",
            "laconic": laconic,
            "torch": torch,
            "nn": nn,
            "functional": functional,
            "dist": dist,
        },
        **{"model": model, "optimizer": optimizer, "data": data, "batch": data[0], "loss": loss, "train": train},
        **{"rank": dist.get_rank(), "world_size": dist.get_world_size(), "make_model": Blocks},
        **{"hosts": dist.get_world_size(), "step": 3, "loss_value": 2.8},
        **{"began_s": time.time(), "duration_s": 0.1, "log": laconic.EventLog("events.jsonl")},
        **{"init_device_mesh": _mesh, "fully_shard": fully_shard},
    }


def _mesh(device: str, shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...]) -> DeviceMesh:
    """The mesh of a page, with as many ranks as there are here in its first dimension."""
    return init_device_mesh("cpu", (dist.get_world_size(), *(1 for _ in shape[1:])), mesh_dim_names=mesh_dim_names)


def _shard(names: dict[str, Any], mesh: DeviceMesh) -> None:
    for block in names["model"].blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(names["model"], mesh=mesh)
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=0.01)


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Work in a folder, and come back."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _transformers() -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir="trainer",
        max_steps=STEPS,
        per_device_train_batch_size=4,
        use_cpu=True,
        ddp_backend="gloo",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        save_strategy="no",
    )
    return {"Trainer": Trainer, "arguments": arguments, "model": Labelled(), "data": _rows(64)}


def _accelerate() -> dict[str, Any]:
    from accelerate import Accelerator

    model = Blocks()
    optimizer = torch.optim.AdamW(model.parameters())
    return {
        "Accelerator": functools.partial(Accelerator, cpu=True),
        "model": model,
        "optimizer": optimizer,
        "loader": torch.utils.data.DataLoader(torch.randn(32, WIDTH), batch_size=2),  # pyrefly: ignore
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "loss": lambda predicted: predicted.square().mean(),
    }


def _lightning() -> dict[str, Any]:
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        """A module as Lightning's documentation has it."""

        def __init__(self) -> None:
            super().__init__()
            self.network = Labelled()

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            return self.network(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    def trainer(*, devices: int, num_nodes: int, **settings: Any) -> pl.Trainer:
        """A trainer on the ranks that there are, on CPUs."""
        return pl.Trainer(
            **settings, devices=2, num_nodes=1, accelerator="cpu", max_steps=2, logger=False, enable_progress_bar=False
        )

    loader = torch.utils.data.DataLoader(_rows(32), batch_size=4)  # pyrefly: ignore
    return {"Trainer": trainer, "module": Module(), "loader": loader}


_FRAMEWORKS: dict[str, Callable[[], dict[str, Any]]] = {
    "transformers": _transformers,
    "accelerate": _accelerate,
    "lightning": _lightning,
}
