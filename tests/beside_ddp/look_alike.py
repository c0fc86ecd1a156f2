"""A module wrapper that passes for DistributedDataParallel and lets laconic do the work, for PyTorch's own tests.

It takes DDP's arguments, forwards calls to the module, has `no_sync`, and can be copied, saved and loaded. An argument
or attribute that laconic has no counterpart for raises NotApplicable, which no test can catch by accident.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

import laconic
import laconic.runtime  # before the tests put something else in DistributedDataParallel's place

TIMEOUT_S = 15.0
_wrappers: list[LookAlike] = []
"""Those that are attached, in the order in which they were: the same on every rank."""


_OF_DDP = {"broadcast_bucket_size", "bucket_bytes_cap_list", "logger", "parameters_to_ignore", "reducer"}
"""Attributes that DDP sets on its instances and tests ask for."""


class NotApplicable(BaseException):
    """A test asks for something of DDP's that laconic does not have."""


class Nothing(torch.optim.Optimizer):
    """Steps without changing anything: it tells laconic where a step ends while the test's own optimizer steps."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: object = None) -> None:
        """Do nothing."""


class LookAlike(nn.Module):
    """Stands where a test writes DistributedDataParallel."""

    def __init__(  # noqa: PLR0917 - DDP's signature
        self,
        module: nn.Module,
        device_ids: object = None,
        output_device: object = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: torch.distributed.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        forward_sync_buffers: bool | None = None,
        **others: object,
    ) -> None:
        super().__init__()
        if others:
            raise NotApplicable(f"argument {', '.join(others)}")
        if False in (broadcast_buffers, forward_sync_buffers) and any(True for _ in module.buffers()):
            raise NotApplicable("argument forward_sync_buffers=False")
        self.module = module
        self.find_unused_parameters = find_unused_parameters
        # A static graph may leave parameters out, in every step the same ones.
        self._unused = find_unused_parameters or static_graph
        self._bytes = int((bucket_cap_mb or 25) * 2**20)
        self.process_group = process_group or torch.distributed.group.WORLD
        self._attach()

    def _attach(self) -> None:
        # DDP lets a module be wrapped again; laconic asks to detach first.
        mine = {id(p) for p in self.module.parameters()}
        for other in list(_wrappers):
            if any(id(p) in mine for p in other.module.parameters()):
                other.detach()
        self._idle = Nothing([p for p in self.module.parameters() if p.requires_grad] or [nn.Parameter(torch.zeros(1))])
        self._session = laconic.attach(
            self.module,
            self._idle,
            f"bsp / all_reduce / none / fusion({self._bytes}B)",
            process_group=self.process_group,
            find_unused_parameters=self._unused,
            timeout_s=TIMEOUT_S,
        )
        _wrappers.append(self)

    def forward(self, *inputs: object, **named: object) -> Any:
        """Call the module."""
        return self.module(*inputs, **named)

    @contextlib.contextmanager
    def no_sync(self) -> Any:
        """As DDP's."""
        with self._session.accumulate():
            yield

    def detach(self) -> None:
        """Let go of the module."""
        if self in _wrappers:
            _wrappers.remove(self)
        self._session.detach()

    def abandon(self, error: BaseException) -> None:
        """Let go of the module after an error: nothing waits for other ranks."""
        if self in _wrappers:
            _wrappers.remove(self)
        self._session.__exit__(type(error), error, None)

    def step_of(self, optimizer: torch.optim.Optimizer) -> None:
        """A test's optimizer is about to step."""
        mine = {id(p) for p in self.module.parameters()}
        if optimizer is not self._idle and all(id(p) in mine for g in optimizer.param_groups for p in g["params"]):
            self._idle.step()

    _remove_autograd_hooks = detach

    def _set_static_graph(self) -> None:
        """A promise laconic does not need."""

    def _set_ddp_sink_clone(self, value: bool) -> None:
        """laconic has no such copy."""

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(*_: object) -> None:
        raise NotApplicable("ignored parameters")

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key not in ("_session", "_idle", "process_group")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.process_group = torch.distributed.group.WORLD
        self._attach()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if hasattr(DistributedDataParallel, name) or name in _OF_DDP:
                raise NotApplicable(f"attribute {name}") from None
            raise


def let_go(error: BaseException | None) -> None:
    """Detach whatever a test has left attached."""
    for wrapper in list(_wrappers):
        if error is None:
            wrapper.detach()
        else:
            wrapper.abandon(error)


def _before_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if torch._C._current_autograd_node() is None:  # steps inside a backward pass end nothing
        for wrapper in list(_wrappers):
            wrapper.step_of(optimizer)


def follow_optimizers() -> None:
    """From now on every optimizer's step is one of the wrapper whose parameters it has."""
    register_optimizer_step_pre_hook(_before_step)
