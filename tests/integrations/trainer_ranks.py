"""What each rank of the Trainer tests does; one process runs all of it, because importing transformers takes long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainerState, TrainingArguments

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
        use_cpu=True,
        ddp_backend="gloo",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        logging_strategy="no",
        **{"learning_rate": 0.05, "save_strategy": "no", "average_tokens_across_devices": False, **settings},
    )
    return Trainer(
        model=Model() if model is None else model, args=args, train_dataset=Rows(64), eval_dataset=Rows(16, seed=2)
    )


def train(folder: str, strategy: str | None, **settings: Any) -> dict[str, torch.Tensor]:
    made = trainer(folder, **settings)
    if strategy is None:
        made.train()
    else:
        with LaconicCallback(made, strategy):
            made.train()
    return snapshot(made.model)


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens, some of which count no loss, so that ranks have different numbers of them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(32, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": torch.where(torch.arange(12) < index % 12, -100, tokens)}


def train_gpt2(folder: str, strategy: str | None) -> dict[str, torch.Tensor]:
    """A model of the library, with tied weights and a loss that counts the tokens of all ranks."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0)
    made = trainer(folder, GPT2LMHeadModel(config), average_tokens_across_devices=True, gradient_accumulation_steps=2)
    made.train_dataset = Sentences()
    if strategy is None:
        made.train()
    else:
        with LaconicCallback(made, strategy):
            made.train()
    return snapshot(made.model)


def chosen_during_training(folder: str) -> dict[str, torch.Tensor]:
    """A run with "auto" that continues from a checkpoint saved under a strategy that was chosen meanwhile."""

    class Choosing(TrainerCallback):
        def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
            if state.global_step == 2:
                assert laconic.session is not None
                laconic.session.change_strategy("local_sgd(period=4)")

    saving = {"save_strategy": "steps", "save_steps": 3}
    made = trainer(folder, **saving)
    made.add_callback(Choosing())
    with LaconicCallback(made, "auto(max_loss_gap=5%)") as laconic:
        made.train()
    made = trainer(folder, **saving)
    with LaconicCallback(made, "auto(max_loss_gap=5%)"):
        made.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    return snapshot(made.model)


def failure(folder: str) -> str:
    """What each rank is told when rank 1 raises in the third step."""

    class Failing(TrainerCallback):
        def on_step_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
            if state.global_step == 2 and args.process_index == 1:
                raise ValueError("a bad batch")

    made = trainer(folder)
    made.add_callback(Failing())
    callback = LaconicCallback(made, LOSSLESS, timeout_s=30)
    try:
        with callback:
            made.train()
    except Exception as error:  # noqa: BLE001 - the test reads it
        assert callback.session is None
        return said(error)
    return "nothing was raised"


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
        with LaconicCallback(made, LOSSLESS):
            made.train()

    def made_by_train() -> None:
        made = trainer(folder, steps=1)
        with LaconicCallback(made, LOSSLESS):
            made.model = made.model_wrapped = Model()
            made.train()

    def added_by_hand() -> None:
        made = trainer(folder, steps=1)
        made.add_callback(LaconicCallback(made, LOSSLESS))
        made.train()

    def never_entered() -> None:
        made = trainer(folder, steps=1)
        LaconicCallback(made, LOSSLESS)
        made.train()

    def model_init() -> None:
        def make() -> nn.Module:
            return Model()

        args = TrainingArguments(output_dir=folder, use_cpu=True, ddp_backend="gloo")
        LaconicCallback(Trainer(model_init=make, args=args), LOSSLESS)

    def other_folder() -> None:
        # Another run has a checkpoint of the same step in output_dir, where the callback looks.
        saving = {"save_strategy": "steps", "save_steps": 3}
        train(f"{folder}/one run", DILOCO, **saving)
        train(f"{folder}/other run", DILOCO, learning_rate=0.01, **saving)
        made = trainer(f"{folder}/other run", **saving)
        with LaconicCallback(made, DILOCO):
            made.train(resume_from_checkpoint=f"{folder}/one run/checkpoint-3")

    return {
        "wrapped by train()": message(wrapped_by_train),
        "made by train()": message(made_by_train),
        "added by hand": message(added_by_hand),
        "never entered": message(never_entered),
        "model_init": message(model_init),
        "bucket size": message(lambda: LaconicCallback(trainer(folder, ddp_bucket_cap_mb=5), LOSSLESS)),
        "no state": message(lambda: from_ddp(folder, "raise")),
        "other folder": message(other_folder),
        "too short": message(lambda: train(folder, "diloco(period=64)")),
    }


def from_ddp(folder: str, missing_state: Any) -> dict[str, torch.Tensor]:
    """Continue from a checkpoint of DDP."""
    made = trainer(folder)
    with LaconicCallback(made, LOSSLESS, missing_state=missing_state):
        made.train(resume_from_checkpoint=f"{folder}/ddp/checkpoint-3")
    return snapshot(made.model)


def everything(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["ddp"] = train(f"{folder}/ddp", None, save_strategy="steps", save_steps=3)
    found["lossless"] = train(folder, LOSSLESS)

    found["ddp bf16"] = train(folder, None, bf16=True)
    found["lossless bf16"] = train(folder, LOSSLESS, bf16=True)
    compiled = {"torch_compile": True, "torch_compile_backend": "eager", "gradient_accumulation_steps": 2}
    found["ddp compiled"] = train(folder, None, **compiled)
    found["lossless compiled"] = train(folder, LOSSLESS, **compiled)
    found["ddp deferred"] = train(folder, None, max_grad_norm=0.0)
    found["lossless deferred"] = train(folder, "bsp / all_reduce / none / dear", max_grad_norm=0.0)
    found["ddp gpt2"] = train_gpt2(folder, None)
    found["lossless gpt2"] = train_gpt2(folder, LOSSLESS)

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
    with LaconicCallback(made, DILOCO) as laconic:
        distances = Distances(laconic)
        made.add_callback(distances)
        made.train()
        found["diloco"], found["distances"] = snapshot(made.model), distances.seen
        made.remove_callback(distances)
        made.train()
        found["wrapped inside"] = made.model_wrapped is not made.model
    made.train()
    found["wrapped outside"] = type(made.model_wrapped).__name__

    for name, strategy in {"compressed": COMPRESSED, "diloco": DILOCO}.items():
        saving = {"save_strategy": "steps", "save_steps": 4, "steps": 8, "save_total_limit": 2}
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
    best_folder = Path(str(best.state.best_model_checkpoint))
    found["best"], found["best folder"] = snapshot(best.model), best_folder.name
    found["saved as best"] = load_file(best_folder / "model.safetensors")

    found["continued from ddp"] = from_ddp(folder, "reset")
    found["auto"] = chosen_during_training(f"{folder}/auto")
    found["refusals"] = refusals(folder)
    found["failure"] = failure(folder)
    return found
