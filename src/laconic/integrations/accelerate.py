"""Hugging Face accelerate with laconic in place of DistributedDataParallel.

    accelerator = Accelerator(gradient_accumulation_steps=4)
    model, optimizer, session = prepare(accelerator, model, optimizer, "powersgd")
    loader, scheduler = accelerator.prepare(loader, scheduler)
    with session:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model(batch)))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

Devices, mixed precision, data loaders, accumulation and save_state() remain accelerate's.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from laconic.auto import Auto, attach
from laconic.core.event import EventSink
from laconic.errors import AttachError, CheckpointError
from laconic.integrations.rank_state import load_rank_file, save_rank_file
from laconic.runtime import Session
from laconic.strategy import Strategy

try:
    from accelerate import Accelerator, DistributedType
    from accelerate.optimizer import AcceleratedOptimizer
except ImportError as error:
    raise ImportError('this integration needs accelerate: pip install "laconic[accelerate]"') from error

_INSTEAD = "Pass the plain model: model, optimizer, session = prepare(accelerator, model, ...)"


def prepare(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Optimizer,
    strategy: Strategy | str | Auto,
    *,
    find_unused_parameters: bool | None = None,
    init_sync: bool = True,
    sync_optimizer: bool = False,
    timeout_s: float | None = None,
    total_steps: int | None = None,
    events: EventSink | None = None,
) -> tuple[nn.Module, AcceleratedOptimizer, Session]:
    """Prepare model and optimizer as accelerator.prepare() does, without DDP, and attach `strategy` to them.

    Pass data loaders and schedulers to accelerator.prepare() afterwards. accelerator.accumulate(model) and
    accelerator.no_sync(model) hold exchanges back. accelerator.save_state() saves what each rank needs to continue, and
    load_state() loads it. The remaining arguments are those of laconic.attach().
    """
    _refuse_ddp_settings(accelerator)
    if not isinstance(optimizer, Optimizer):
        raise AttachError(f"optimizer must be one torch.optim.Optimizer, got {type(optimizer).__name__}.")
    plain = prepare_without_ddp(accelerator, model, _INSTEAD)
    prepared = cast(AcceleratedOptimizer, accelerator.prepare_optimizer(optimizer))
    session = attach(
        plain,
        prepared,
        strategy,
        find_unused_parameters=find_unused_parameters,
        init_sync=init_sync,
        sync_optimizer=sync_optimizer,
        timeout_s=timeout_s,
        total_steps=total_steps,
        grad_scaler=accelerator.scaler,
        events=events,
    )
    with ExitStack() as undo:
        undo.enter_context(session)
        lend_no_sync(plain, session)
        checkpoints = _Checkpoints(session, plain, prepared)
        accelerator.register_for_checkpointing(checkpoints)
        session.call_on_detach(accelerator.register_save_state_pre_hook(checkpoints.before_save).remove)
        session.call_on_detach(accelerator.register_load_state_pre_hook(checkpoints.before_load).remove)
        session.call_on_detach(checkpoints.end)
        session.call_on_detach(lambda: forget_prepared(plain))
        undo.pop_all()
    return plain, prepared, session


def prepare_without_ddp(accelerator: Accelerator, model: nn.Module, instead: str) -> nn.Module:
    """The model on its device, with mixed precision and compilation as configured, but not wrapped in DDP.

    instead: a sentence that says what to write where the model is wrapped already.
    """
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise AttachError(
            f"the Accelerator is configured for {kind.value}, which synchronizes the model itself: both would "
            "communicate. Configure it for plain multi-process training. A model that fully_shard() shards can be "
            "attached with laconic.attach(), see docs/sharded.md."
        )
    if accelerator.parallelism_config is not None:
        raise AttachError(
            "Accelerator(parallelism_config=...) divides the model over ranks, which this integration does not combine "
            "with laconic. Leave it out, or use laconic.attach() in a loop of your own, see docs/sharded.md."
        )
    if isinstance(model, DistributedDataParallel):
        raise AttachError(
            "the model is wrapped in DistributedDataParallel already, by accelerator.prepare() or by your script, and "
            f"both would communicate. {instead}."
        )
    # Everything that prepare_model() does but the wrapper. The model is then marked as prepared, so that no later call
    # of accelerator.prepare() wraps it.
    return accelerator.prepare_model(model, evaluation_mode=True)


def forget_prepared(model: nn.Module) -> None:
    """Remove the mark that keeps accelerator.prepare() from wrapping the model: laconic no longer synchronizes it."""
    for one in (model, getattr(model, "_orig_mod", model)):
        vars(one).pop("_is_accelerate_prepared", None)


def lend_no_sync(model: nn.Module, session: Session) -> None:
    """Give the model DDP's method no_sync() while the session lasts: accelerate looks for it by this name."""
    if hasattr(model, "no_sync"):
        raise AttachError(
            f"{type(model).__name__} has an attribute no_sync of its own, which accelerator.accumulate() would call "
            "instead of holding back laconic's exchanges. Rename it."
        )
    vars(model)["no_sync"] = _NoSync(session)
    session.call_on_detach(lambda: vars(model).pop("no_sync"))


class _NoSync:
    """Holds back exchanges of gradients; in a copy of the model, or in a saved one, it does nothing."""

    def __init__(self, session: Session | None) -> None:
        self._session = session

    def __call__(self) -> AbstractContextManager[None]:
        return nullcontext() if self._session is None else self._session.accumulate()

    def __reduce__(self) -> tuple[type[_NoSync], tuple[None]]:
        return _NoSync, (None,)


class _Checkpoints:
    """Saves and loads each rank's own state with accelerator.save_state() and load_state().

    accelerate calls before_save() and before_load() on every rank with the folder, and load_state_dict() on every rank
    once model and optimizer have been loaded. What state_dict() returns is saved by rank 0 alone, so it is empty.
    """

    def __init__(self, session: Session, model: nn.Module, optimizer: AcceleratedOptimizer) -> None:
        self._session: Session | None = session
        self._model = model
        self._optimizer = optimizer
        self._folder: Path | None = None
        self._number = 0

    def before_save(self, models: list[nn.Module], weights: list[Mapping[str, Any]], folder: str) -> None:
        """Save this rank's state."""
        assert self._session is not None
        number = self._number_among(models)
        save_rank_file(Path(folder), self._session, self._model, [self._optimizer], number=number)

    def before_load(self, models: list[nn.Module], folder: str) -> None:
        """Remember where this rank's state is."""
        self._folder, self._number = Path(folder), self._number_among(models)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: rank 0 would save it for all."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's state."""
        if self._session is None:
            return  # model and optimizer are all there is after detach()
        assert self._folder is not None
        instead = "load the model's weights before prepare() and do not call load_state()"
        load_rank_file(
            self._folder, self._session, self._model, [self._optimizer], how_to_reset=instead, number=self._number
        )

    def _number_among(self, models: list[nn.Module]) -> int:
        """The number of this model among those of the accelerator, as in accelerate's own names of files."""
        mine = getattr(self._model, "_orig_mod", self._model)
        for number, model in enumerate(models):
            if getattr(model, "_orig_mod", model) is mine:
                return number
        raise CheckpointError(
            "the accelerator no longer knows the model that prepare() has attached, so its checkpoints do not hold the "
            "model. Call accelerator.free_memory() only after session.detach()."
        )

    def end(self) -> None:
        """The session is being detached."""
        self._session = None


def _refuse_ddp_settings(accelerator: Accelerator) -> None:
    if accelerator.ddp_handler is not None:
        raise AttachError(
            "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(...)]) has no effect, because laconic takes "
            "the place of DDP. Leave it out. Bucket sizes belong in the strategy, as in fusion(25MiB), and "
            "find_unused_parameters is an argument of prepare()."
        )
