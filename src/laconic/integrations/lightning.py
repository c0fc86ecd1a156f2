"""Lightning with laconic in place of DistributedDataParallel.

    trainer = Trainer(strategy=LaconicStrategy("powersgd"), devices=4, accumulate_grad_batches=2)
    trainer.fit(module, loader)

Processes are launched as by strategy="ddp". The session lasts from the beginning of fit() to its end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from laconic.auto import Auto, as_choice, attach
from laconic.core.event import EventSink
from laconic.errors import AttachError, warn_user
from laconic.integrations.rank_state import MissingState, load_rank_state, no_state, rank_state, replicas_differ
from laconic.runtime import Session
from laconic.strategy import Strategy

try:
    import lightning.pytorch as pl
    from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
    from lightning.pytorch.plugins.precision import Precision
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise ImportError('this integration needs lightning: pip install "laconic[lightning]"') from error


class LaconicStrategy(DDPStrategy):
    """Trains one replica per process under a strategy of laconic; automatic optimization, one optimizer.

    strategy: as for laconic.attach().
    missing_state: "reset" begins a new state if a checkpoint that fit() continues from holds none, e.g. because it was
        saved under DDP.
    find_unused_parameters, sync_optimizer, timeout_s, events: as for laconic.attach().
    The remaining arguments are those of Lightning's DDPStrategy; process_group_timeout is its `timeout`.

    The number of steps of the whole training is passed to laconic.attach(). Each rank saves its own state in the folder
    "laconic" next to the checkpoint. At the end of fit(), replicas that differ are averaged.
    """

    strategy_name = "laconic"

    def __init__(
        self,
        strategy: Strategy | str | Auto,
        *,
        missing_state: MissingState = "raise",
        find_unused_parameters: bool | None = None,
        sync_optimizer: bool = False,
        timeout_s: float | None = None,
        events: EventSink | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        process_group_timeout: timedelta = timedelta(minutes=30),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        if missing_state not in ("raise", "reset"):
            raise AttachError(f'missing_state must be "raise" or "reset", got {missing_state!r}.')
        super().__init__(
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=process_group_timeout,
            start_method=start_method,
        )
        self._strategy = as_choice(strategy)
        self._missing_state = missing_state
        self._find_unused_parameters = find_unused_parameters
        self._sync_optimizer = sync_optimizer
        self._timeout_s = timeout_s
        self._events = events
        self._session: Session | None = None
        self._step: _TrainingStep | None = None
        self._continues_from: str | Path | None = None
        self._saved_before_training: dict[str, str | Path | None] = {}
        """Checkpoints of this run without a session's state -> the checkpoint that training would begin from."""

    @property
    def session(self) -> Session | None:
        """The session; None before the first step of fit() and after the last."""
        return self._session

    # -- the model stays as it is ------------------------------------------------------------------------------

    def configure_ddp(self) -> None:
        """Leave the model as it is: DDPStrategy would wrap it here."""

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step of the LightningModule as a forward pass of the attached model."""
        if self._step is None:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            return self._step(*args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Inside, gradients add up on this rank: Lightning enters it for all but the last batch of a step."""
        assert self._session is not None
        with self._session.accumulate():
            yield

    # -- beginning and end -------------------------------------------------------------------------------------

    def connect(self, model: pl.LightningModule) -> None:
        """A run of the Trainer begins."""
        super().connect(model)
        self._continues_from = None
        self._saved_before_training.clear()

    def on_train_start(self) -> None:
        """Attach: model and optimizer are on their device, and loaded if fit() continues from a checkpoint."""
        super().on_train_start()
        module = self.lightning_module
        assert module is not None
        optimizer = self._only_optimizer(module)
        step = _TrainingStep(module)
        with ExitStack() as undo:
            # Before laconic's own hook, so that the gradients are there when that one is called.
            closures = optimizer.register_step_pre_hook(_run_closure_first)
            undo.callback(closures.remove)
            session = attach(
                step,
                optimizer,
                self._strategy,
                find_unused_parameters=self._find_unused_parameters,
                sync_optimizer=self._sync_optimizer,
                timeout_s=self._timeout_s,
                total_steps=_num_steps(module.trainer),
                grad_scaler=getattr(self.precision_plugin, "scaler", None) if self._continues_from else None,
                events=self._events,
            )
            undo.enter_context(session)
            if self._continues_from is not None:
                self._load(session, self._continues_from)
            session.call_on_detach(closures.remove)
            undo.pop_all()
        self._session, self._step = session, step

    def on_train_end(self) -> None:
        """Detach; replicas that differ become their mean."""
        super().on_train_end()
        if self._session is None:
            return
        session, self._session, self._step = self._session, None, None
        with session:
            if replicas_differ(session):
                session.average()

    def on_exception(self, exception: BaseException) -> None:
        """Detach without waiting for other ranks, and tell them why this rank stops."""
        super().on_exception(exception)
        self._leave(exception)

    def _leave(self, exception: BaseException) -> None:
        session, self._session, self._step = self._session, None, None
        if session is not None:
            session.__exit__(type(exception), exception, exception.__traceback__)

    def _only_optimizer(self, module: pl.LightningModule) -> Optimizer:
        if not module.automatic_optimization:
            raise AttachError(
                f"{type(module).__name__} sets automatic_optimization=False, so LaconicStrategy cannot know which "
                "backward passes belong to a step. Use automatic optimization, or laconic.attach() in a loop of your "
                "own."
            )
        (optimizer,) = self.optimizers  # Lightning allows no other number with automatic optimization
        return optimizer

    # -- checkpoints -------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save the checkpoint, and next to it what each rank needs to continue."""
        exception = sys.exception()
        if self._session is not None and exception is not None and self._is_interrupted():
            # OnExceptionCheckpoint and the like save before on_exception() is called, and other ranks need not do so.
            self._leave(exception)
            warn_user(
                f"{filepath} is saved while {type(exception).__name__} is handled, so it holds no state of laconic. To "
                'continue from it, write LaconicStrategy(..., missing_state="reset").'
            )
        # First: what is in flight may still change parameters, which the checkpoint refers to.
        if self._session is not None and "optimizer_states" in checkpoint:
            assert self.lightning_module is not None
            state = rank_state(self._session, self.lightning_module, self.optimizers)
            self.checkpoint_io.save_checkpoint(state, self._rank_path(filepath), storage_options=storage_options)
        elif self._session is None:
            self._saved_before_training[str(filepath)] = self._continues_from
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the checkpoint, and remember where this rank's state is."""
        # LearningRateFinder and BatchSizeFinder train for some steps, and return with this to where they began.
        self._continues_from = self._saved_before_training.get(str(checkpoint_path), checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove the checkpoint and this rank's state."""
        super().remove_checkpoint(filepath)
        self.checkpoint_io.remove_checkpoint(self._rank_path(filepath))

    def _is_interrupted(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.interrupted

    def _rank_path(self, checkpoint: str | Path) -> str:
        """Where this rank's state of a checkpoint is: not in its folder, where Lightning looks for checkpoints."""
        folder, _, name = str(checkpoint).rpartition("/")
        return f"{folder or '.'}/laconic/{name}.rank{self.global_rank}"

    def _load(self, session: Session, checkpoint: str | Path) -> None:
        assert self.lightning_module is not None
        local = Path(checkpoint)
        # ModelCheckpoint(save_last="link") makes a link to another checkpoint.
        path = self._rank_path(local.resolve() if local.exists() else checkpoint)
        try:
            state: Mapping[str, Any] = self.checkpoint_io.load_checkpoint(path, weights_only=True)
        except FileNotFoundError as error:
            if self._missing_state == "raise":
                raise no_state(path, session, 'write LaconicStrategy(..., missing_state="reset")') from error
        else:
            load_rank_state(state, session, self.lightning_module, self.optimizers)


class _TrainingStep(nn.Module):
    """A LightningModule as a module whose forward pass is training_step().

    Lightning calls training_step() directly, and that need not call the module's own forward(), so hooks on forward
    passes might never run. Its parameters and submodules are those of the LightningModule, under the same names.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        super().__init__()
        # In a list, so that it does not become a submodule, which would change all names.
        self._of = [module]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._of[0].training_step(*args, **kwargs)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Generator[tuple[str, nn.Module]]:
        """Those of the LightningModule; nn.Module finds parameters and buffers by this."""
        yield from self._of[0].named_modules(memo, prefix, remove_duplicate)


def _run_closure_first(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Compute gradients before optimizer.step(): Lightning would have them computed inside, by a closure.

    Strategies that act on gradients before the step (onebit_adam, ssp) and schedules that defer updates need them then.
    """
    closure: Callable[[], object] | None = kwargs.pop("closure", args[1] if len(args) > 1 else None)
    if closure is not None:
        with torch.enable_grad():
            closure()
    return args[:1], kwargs


def _num_steps(trainer: pl.Trainer) -> int | None:
    """How many optimizer steps fit() makes, where that is known."""
    steps = trainer.estimated_stepping_batches
    return int(steps) if 0 < steps < float("inf") else None
