"""What each rank of the Trainer tests does; one process runs all of it, because importing transformers takes long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from laconic.integrations.transformers import LaconicCallback
from tests.integrations.problem import BATCH, LOSSLESS, Model, Rows, said, snapshot

DILOCO = "diloco(period=3)"
COMPRESSED = "bsp / all_reduce / int4 + error_feedback / fusion"


class Distances(TrainerCallback):
    """How far replicas are from their mean after each step."""

    def __init__(self, laconic: LaconicCallback) -> None:
        self._laconic = laconic
        self.seen: list[float] = []

    def on_step_end(self, *_: object, **__: object) -> None:
        assert self._laconic.session is not None
        self.seen.append(self._laconic.session.consensus_distance())


class Bytes(TrainerCallback):
    """Payload bytes sent until the end of each optimizer step, and how many were predicted for one."""

    def __init__(self, laconic: LaconicCallback) -> None:
        self._laconic = laconic
        self.sent: list[int] = []
        self.predicted = 0

    def on_step_end(self, *_: object, **__: object) -> None:
        session = self._laconic.session
        assert session is not None
        self.sent.append(session.traffic.sent_bytes("payload"))
        self.predicted = session.predicted_bytes_per_step()


def trainer(folder: str, model: nn.Module | None = None, *, steps: int = 6, **settings: Any) -> Trainer:
    args = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        learning_rate=0.05,
        use_cpu=True,
        ddp_backend="gloo",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        logging_strategy="no",
        **{"save_strategy": "no", "average_tokens_across_devices": False, **settings},
    )
    return Trainer(
        model=Model() if model is None else model, args=args, train_dataset=Rows(64), eval_dataset=Rows(16, seed=2)
    )


def train(folder: str, strategy: str | None, *, resume: bool = False, **settings: Any) -> dict[str, torch.Tensor]:
    made = trainer(folder, **settings)
    if strategy is None:
        made.train()
    else:
        with LaconicCallback(made, strategy):
            made.train(resume_from_checkpoint=resume)
    return snapshot(made.model)


def refusals(folder: str) -> dict[str, str]:
    """What a user reads who combines both wrappers, or settings of DDP, with laconic."""

    def message(make: Any) -> str:
        try:
            make()
        except Exception as error:  # noqa: BLE001 - the test reads it
            return said(error)
        return "nothing was refused"

    def wrapped_by_train() -> None:
        made = trainer(folder, steps=1)
        made.train()
        LaconicCallback(made, LOSSLESS)

    def made_by_train() -> None:
        made = trainer(folder, steps=1)
        callback = LaconicCallback(made, LOSSLESS)
        made.model = made.model_wrapped = Model()
        with callback:
            made.train()

    def model_init() -> None:
        args = TrainingArguments(output_dir=folder, use_cpu=True, ddp_backend="gloo")
        LaconicCallback(Trainer(model_init=lambda: Model(), args=args), LOSSLESS)

    return {
        "wrapped by train()": message(wrapped_by_train),
        "made by train()": message(made_by_train),
        "model_init": message(model_init),
        "bucket size": message(lambda: LaconicCallback(trainer(folder, ddp_bucket_cap_mb=5), LOSSLESS)),
        "no state": message(lambda: without_state(f"{folder}/no-state", "raise")),
        "too short": message(lambda: train(folder, "diloco(period=64)")),
    }


def without_state(folder: str, missing_state: Any) -> dict[str, torch.Tensor]:
    """Train under DDP, then continue from its checkpoint under laconic."""
    train(folder, None, steps=3, save_strategy="steps", save_steps=3)
    made = trainer(folder, steps=6)
    with LaconicCallback(made, LOSSLESS, missing_state=missing_state):
        made.train(resume_from_checkpoint=True)
    return snapshot(made.model)


def everything(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["ddp"] = train(folder, None)
    found["lossless"] = train(folder, LOSSLESS)

    found["ddp accumulating"] = train(folder, None, gradient_accumulation_steps=3)
    made = trainer(folder, gradient_accumulation_steps=3)
    with LaconicCallback(made, LOSSLESS) as laconic:
        counted = Bytes(laconic)
        made.add_callback(counted)
        made.train()
    found["lossless accumulating"] = snapshot(made.model)
    found["sent"], found["predicted"] = counted.sent, counted.predicted
    found["no_sync is left"] = hasattr(made.model, "no_sync")

    made = trainer(folder, steps=7)
    laconic = LaconicCallback(made, DILOCO)
    made.add_callback(laconic)
    distances = Distances(laconic)
    made.add_callback(distances)
    made.train()
    found["diloco"], found["distances"] = snapshot(made.model), distances.seen

    for name, strategy in {"compressed": COMPRESSED, "diloco": DILOCO}.items():
        saving = {"save_strategy": "steps", "save_steps": 4, "steps": 8}
        found[f"{name} at once"] = train(f"{folder}/{name}", strategy, **saving)
        # Checkpoint 8 is the end: continue from the one before.
        made = trainer(f"{folder}/{name}", **saving)
        with LaconicCallback(made, strategy):
            made.train(resume_from_checkpoint=f"{folder}/{name}/checkpoint-4")
        found[f"{name} resumed"] = snapshot(made.model)

    best = trainer(
        f"{folder}/best",
        steps=5,
        save_strategy="steps",
        eval_strategy="steps",
        save_steps=1,
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the loss falls, so that the best model is an early one
    )
    with LaconicCallback(best, DILOCO):
        best.train()
    found["best"], found["best folder"] = snapshot(best.model), Path(str(best.state.best_model_checkpoint)).name

    found["continued from ddp"] = without_state(f"{folder}/from-ddp", "reset")
    found["ddp at once"] = train(folder, None)
    found["refusals"] = refusals(folder)
    return found
