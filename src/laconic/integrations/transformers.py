"""Hugging Face Trainer with laconic in place of DistributedDataParallel.

    trainer = Trainer(model=model, args=arguments, ...)
    with LaconicCallback(trainer, "powersgd"):
        trainer.train()

The script is started with torchrun, as before. The session lasts from the beginning of train() to its end.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.optim import Optimizer

from laconic.auto import Auto, as_choice, attach
from laconic.core.event import EventSink
from laconic.errors import AttachError, warn_user
from laconic.integrations.rank_state import (
    MissingState,
    load_rank_file,
    rank_file,
    replicas_differ,
    save_rank_file,
)
from laconic.runtime import Session
from laconic.strategy import Strategy

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
except ImportError as error:
    raise ImportError('this integration needs transformers: pip install "laconic[transformers]"') from error

from laconic.integrations.accelerate import forget_prepared, lend_no_sync, prepare_without_ddp

_INSTEAD = "Pass the plain model to Trainer(...) and write: with LaconicCallback(trainer, ...): trainer.train()"

_DDP_SETTINGS = {
    "ddp_find_unused_parameters": "write LaconicCallback(..., find_unused_parameters=...)",
    "ddp_bucket_cap_mb": "write the size into the strategy, as in fusion(25MiB)",
    "ddp_broadcast_buffers": "laconic broadcasts module buffers before each training forward pass",
    "ddp_static_graph": "laconic needs no such promise",
}
"""Settings of TrainingArguments that only DDP reads, and what to do instead."""


class LaconicCallback(TrainerCallback):
    """Attaches a strategy to the model that a Trainer trains.

    trainer: the Trainer, before its train() is called.
    strategy: as for laconic.attach().
    resume_from_checkpoint: the folder given to train(resume_from_checkpoint=...). Only needed if that folder is neither
        in TrainingArguments.output_dir nor TrainingArguments.resume_from_checkpoint.
    missing_state: "reset" begins a new state if the checkpoint holds none, e.g. because it was saved under DDP.
    find_unused_parameters, sync_optimizer, timeout_s, events: as for laconic.attach().

    Use it as a context manager around train(). Inside the block the Trainer does not wrap its model in DDP; a train()
    before the block raises. The number of steps of the whole training is passed to laconic.attach(). At the end of
    train(), replicas that differ are averaged, unless load_best_model_at_end has loaded the same model on all ranks.
    """

    def __init__(
        self,
        trainer: Trainer,
        strategy: Strategy | str | Auto,
        *,
        resume_from_checkpoint: str | Path | None = None,
        missing_state: MissingState = "raise",
        find_unused_parameters: bool | None = None,
        sync_optimizer: bool = False,
        timeout_s: float | None = None,
        events: EventSink | None = None,
    ) -> None:
        if missing_state not in ("raise", "reset"):
            raise AttachError(f'missing_state must be "raise" or "reset", got {missing_state!r}.')
        self._strategy = as_choice(strategy)
        self._resume_from = resume_from_checkpoint
        self._missing_state = missing_state
        self._find_unused_parameters = find_unused_parameters
        self._sync_optimizer = sync_optimizer
        self._timeout_s = timeout_s
        self._events = events
        self._session: Session | None = None
        self._model: nn.Module | None = None
        _check_arguments(trainer)
        self._trainer = trainer
        self._model_before = trainer.model_wrapped
        # From here on, so that a train() outside the block raises.
        trainer.add_callback(self)

    @property
    def session(self) -> Session | None:
        """The session; None before train() has begun and after it has ended."""
        return self._session

    def __enter__(self) -> Self:
        trainer = self._trainer
        self._model_before = trainer.model_wrapped
        self._model = prepare_without_ddp(trainer.accelerator, trainer.model_wrapped, _INSTEAD)
        # Compiling makes another module, which the Trainer does not make again if it finds it here.
        trainer.model_wrapped = self._model
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._model is not None
        self._trainer.remove_callback(self)
        forget_prepared(self._model)
        self._trainer.model_wrapped = self._model_before
        session, self._session, self._model = self._session, None, None
        if session is not None:
            session.__exit__(kind, error, trace)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
    ) -> None:
        """Attach, and load the session's state if training is resumed."""
        trainer, model = self._trainer, self._model
        if model is None:
            raise AttachError(
                "LaconicCallback has no effect outside of its with block, and the Trainer would train without laconic. "
                f"{_INSTEAD}."
            )
        if self._session is not None:
            raise AttachError(f"the last train() ended with an error and its session is still attached. {_INSTEAD}.")
        if trainer.model_wrapped is not model:
            raise AttachError(
                f"the Trainer is about to train a {type(trainer.model_wrapped).__name__} that it got after "
                f"LaconicCallback was entered, so laconic would train another model. {_INSTEAD}."
            )
        trains_alone = isinstance(self._strategy, Strategy) and not self._strategy.exchanges_gradients()
        if args.world_size > 1 and args.average_tokens_across_devices and trains_alone:
            warn_user(
                "TrainingArguments.average_tokens_across_devices gathers a number from all ranks in every step, so "
                f'every step waits for the slowest link, also under "{self._strategy}". Set it to False.'
            )
        resumed = state.global_step > 0
        with ExitStack() as undo:
            session = attach(
                model,
                self._optimizer(),
                self._strategy,
                find_unused_parameters=self._find_unused_parameters,
                sync_optimizer=self._sync_optimizer,
                timeout_s=self._timeout_s,
                total_steps=state.max_steps,
                grad_scaler=trainer.accelerator.scaler if resumed else None,
                events=self._events,
            )
            undo.enter_context(session)
            lend_no_sync(model, session)
            if resumed:
                self._load(session, model, args, state)
            undo.pop_all()
        self._session = session

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Save the session's state of every rank in the checkpoint's folder."""
        if self._session is not None and not args.save_only_model:
            assert self._model is not None
            save_rank_file(
                _folder(args, state),
                self._session,
                self._model,
                [self._optimizer()],
                is_in_checkpoint=state.is_world_process_zero,
            )

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        """Detach; replicas that differ become their mean."""
        if self._session is None:
            return
        session, self._session = self._session, None
        with session:
            best = args.load_best_model_at_end and state.best_model_checkpoint is not None
            if replicas_differ(session) and not best:
                session.average()

    def _optimizer(self) -> Optimizer:
        assert self._trainer.optimizer is not None, "train() makes it before it calls callbacks"
        return self._trainer.optimizer

    def _load(self, session: Session, model: nn.Module, args: TrainingArguments, state: TrainerState) -> None:
        candidates = [self._resume_from] if self._resume_from else [args.resume_from_checkpoint, _folder(args, state)]
        folders = [Path(folder) for folder in candidates if isinstance(folder, str | Path)]
        found = next((folder for folder in folders if rank_file(folder, session.rank).exists()), None)
        if found is None and self._missing_state == "reset":
            return
        instead = (
            'write LaconicCallback(..., missing_state="reset"); if the checkpoint is elsewhere, '
            "LaconicCallback(..., resume_from_checkpoint=folder)"
        )
        load_rank_file(
            found or folders[0],
            session,
            model,
            [self._optimizer()],
            how_to_reset=instead,
            how_to_find="Write LaconicCallback(..., resume_from_checkpoint=folder) with the folder given to train().",
        )


def _folder(args: TrainingArguments, state: TrainerState) -> Path:
    """The folder of the checkpoint of this step."""
    if args.output_dir is None:
        raise AttachError("TrainingArguments.output_dir is not set, so there is no folder for checkpoints. Set it.")
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _check_arguments(trainer: Trainer) -> None:
    """Raise where the Trainer would do something else than train one plain model per process."""
    args: Any = trainer.args
    if args.n_gpu > 1:
        raise AttachError(
            f"the Trainer would use torch.nn.DataParallel, because this process sees {args.n_gpu} GPUs. Start the "
            "script with torchrun, one process per GPU."
        )
    if trainer.model_init is not None:
        raise AttachError(
            "Trainer(model_init=...) makes another model in train(), which would be wrapped in "
            "DistributedDataParallel. Pass the model itself: Trainer(model=model_init(), ...)."
        )
    if args.auto_find_batch_size:
        raise AttachError(
            "auto_find_batch_size=True starts again on a rank that runs out of memory, while the other ranks continue. "
            "Choose per_device_train_batch_size yourself."
        )
    for name, instead in _DDP_SETTINGS.items():
        if getattr(args, name) is not None:
            raise AttachError(
                f"TrainingArguments.{name} has no effect, because laconic takes the place of DDP; {instead}. "
                "Leave it out."
            )
