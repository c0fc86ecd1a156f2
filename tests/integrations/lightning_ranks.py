"""What each rank of the Lightning tests does; one process runs all of it, because importing lightning takes long."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from laconic.integrations.lightning import LaconicStrategy
from tests.integrations.problem import BATCH, LOSSLESS, Model, Rows, said, snapshot

DILOCO = "diloco(period=3)"
COMPRESSED = "bsp / all_reduce / int4 + error_feedback / fusion"


class Module(pl.LightningModule):
    """Trains without calling its own forward(), as many do."""

    def __init__(self, *, automatic: bool = True) -> None:
        super().__init__()
        self.network: nn.Module = Model()
        self.automatic_optimization = automatic

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return self.network(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Watch(Callback):
    """What the session did until the end of each batch."""

    def __init__(self) -> None:
        self.distances: list[float] = []
        self.sent: list[int] = []
        self.predicted = 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        assert isinstance(trainer.strategy, LaconicStrategy)
        session = trainer.strategy.session
        assert session is not None
        self.distances.append(session.consensus_distance())
        self.sent.append(session.traffic.sent_bytes("payload"))
        self.predicted = session.predicted_bytes_per_step()


def fit(
    folder: str,
    strategy: Any,
    *callbacks: Callback,
    module: pl.LightningModule | None = None,
    resume: str | None = None,
    steps: int = 6,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    trained = Module() if module is None else module
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=steps,
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        **{"gradient_clip_val": 1.0, **settings},
    )
    # An epoch has 8 batches per rank. From a checkpoint at its end, Lightning continues with the same batches.
    trainer.fit(trained, DataLoader(Rows(64), batch_size=BATCH), ckpt_path=resume)
    return snapshot(trained)


def saving(folder: str, every: int) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)


def refusals(folder: str) -> dict[str, str]:
    def message(make: Any) -> str:
        try:
            make()
        except Exception as error:  # noqa: BLE001 - the test reads it
            return said(error)
        return "nothing was refused"

    def wrapped() -> None:
        class Wrapped(Module):
            def configure_model(self) -> None:
                if not isinstance(self.network, DistributedDataParallel):
                    self.network = DistributedDataParallel(self.network)

        fit(folder, LaconicStrategy(LOSSLESS), module=Wrapped())

    def manual() -> None:
        fit(folder, LaconicStrategy(LOSSLESS), module=Module(automatic=False), gradient_clip_val=None)

    return {
        "wrapped": message(wrapped),
        "manual": message(manual),
        "no state": message(lambda: fit(folder, LaconicStrategy(LOSSLESS), resume=f"{folder}/ddp/step=3.ckpt")),
        "setting": message(lambda: LaconicStrategy(LOSSLESS, missing_state="ignore")),  # pyrefly: ignore
    }


def tuned(folder: str, strategy: Any, resume: str | None = None) -> dict[str, torch.Tensor]:
    """Trained with a learning rate that Lightning finds in some steps, after which it begins anew."""

    class Tuned(Module):
        lr = 0.01

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    finder = LearningRateFinder(num_training_steps=8)
    return fit(folder, strategy, finder, saving(folder, 8), module=Tuned(), resume=resume, steps=12)


def failure(folder: str, *callbacks: Callback) -> str:
    """What each rank is told when rank 1 raises in the third step."""

    class Failing(Module):
        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            if index == 2 and self.global_rank == 1:
                raise ValueError("a bad batch")
            return super().training_step(batch, index)

    strategy = LaconicStrategy(LOSSLESS, timeout_s=30)
    try:
        fit(folder, strategy, *callbacks, module=Failing())
    except Exception as error:  # noqa: BLE001 - the test reads it
        assert strategy.session is None
        return said(error)
    return "nothing was raised"


def everything(folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: dict[str, Any] = {}
    found["ddp"] = fit(folder, DDPStrategy(), saving(f"{folder}/ddp", 3))
    found["lossless"] = fit(folder, LaconicStrategy(LOSSLESS))
    found["ddp without clipping"] = fit(folder, DDPStrategy(), gradient_clip_val=None)
    found["deferred"] = fit(folder, LaconicStrategy("bsp / all_reduce / none / dear"), gradient_clip_val=None)

    watch = Watch()
    found["ddp accumulating"] = fit(folder, DDPStrategy(), accumulate_grad_batches=4, steps=3)
    found["lossless accumulating"] = fit(folder, LaconicStrategy(LOSSLESS), watch, accumulate_grad_batches=4, steps=3)
    found["sent"], found["predicted"] = watch.sent, watch.predicted

    watch = Watch()
    strategy = LaconicStrategy(DILOCO)
    found["diloco"] = fit(folder, strategy, watch, steps=7)
    found["distances"], found["session is left"] = watch.distances, strategy.session is not None

    for name, text in {"compressed": COMPRESSED, "diloco": DILOCO}.items():
        place = f"{folder}/{name}"
        found[f"{name} at once"] = fit(place, LaconicStrategy(text), saving(place, 8), steps=14)
        resumed = LaconicStrategy(text)
        found[f"{name} resumed"] = fit(place, resumed, steps=14, resume=f"{place}/step=8.ckpt")
    found["files"] = sorted(path.name for path in Path(f"{folder}/diloco/laconic").iterdir())

    place = f"{folder}/removed"
    keep_last = ModelCheckpoint(dirpath=place, filename="{step}", every_n_train_steps=2, save_top_k=1)
    fit(place, LaconicStrategy(DILOCO), keep_last)
    found["files that are left"] = sorted(str(path.relative_to(place)) for path in Path(place).rglob("*.*"))

    found["ddp tuned"] = tuned(f"{folder}/tuned ddp", DDPStrategy())
    found["lossless tuned"] = tuned(f"{folder}/tuned", LaconicStrategy(LOSSLESS))
    found["tuned and resumed"] = tuned(
        f"{folder}/tuned", LaconicStrategy(LOSSLESS), resume=f"{folder}/tuned/step=8.ckpt"
    )

    found["onebit_adam"] = fit(folder, LaconicStrategy("onebit_adam(warmup_share=0.34)"))
    found["auto"] = fit(folder, LaconicStrategy("auto"))
    found["refusals"] = refusals(folder)
    found["failure"] = failure(folder)
    saved_on_failure = OnExceptionCheckpoint(f"{folder}/failed")
    found["failure that is saved"] = failure(folder, saved_on_failure, saving(f"{folder}/unused", 50))
    return found
