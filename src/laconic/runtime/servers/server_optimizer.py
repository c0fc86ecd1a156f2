"""The parameters of one bucket on a server, and what updates them: a torch optimizer, or the rule's outer steps."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from laconic.core.plan import Bucket
from laconic.errors import CommunicationError, one_line
from laconic.runtime.servers.protocol import OPTIMIZERS, Configuration, GroupSettings, group_settings
from laconic.synchronization import Synchronization

_HERE: GroupSettings = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
"""Settings of the implementation, not of the result: a worker's choice is for its own device."""


class Held(Protocol):
    """The parameters of one bucket, and the state of their updates."""

    values: torch.Tensor
    """All parameters, flat."""

    def read_groups(self, groups: object) -> dict[int, GroupSettings]:
        """The settings of parameter groups that come with a push; raises CommunicationError for an invalid one."""
        ...

    def apply(
        self, sent: torch.Tensor, settings: Mapping[int, GroupSettings], *, unused: Sequence[int], staleness: int
    ) -> None:
        """Update the parameters with what a worker has sent."""
        ...

    def state(self) -> dict[str, torch.Tensor]:
        """The state of updates, keyed "parameter|field|number of dimensions"."""
        ...

    def restore(self, values: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from saved parameters and state; raises, with nothing changed, if they do not fit."""
        ...


def hold(number: int, about: Configuration, rule: Synchronization, values: torch.Tensor) -> Held:
    """The parameters of a bucket, with the optimizer or the outer steps that the rule updates them by."""
    kind = HeldParameters if rule.optimizer_on_servers else OuterParameters
    return kind(number, about, rule, values)


class HeldParameters:
    """Parameters as views of one flat tensor, and their optimizer; settings come anew with every gradient."""

    def __init__(self, number: int, about: Configuration, rule: Synchronization, values: torch.Tensor) -> None:
        self._rule = rule
        self._world_size = about.world_size
        self._bucket = about.buckets[number]
        self._num_groups = len(about.groups)
        self.values = values.clone()
        """All parameters, flat."""
        self._parameters = {
            tensor.name: nn.Parameter(self.values[place].view(tensor.shape))
            for tensor, place in self._bucket.segments()
        }
        group_of = dict(about.group_of)
        members: dict[int, list[nn.Parameter]] = {}
        for name, parameter in self._parameters.items():
            if group_of[name] >= 0:
                members.setdefault(group_of[name], []).append(parameter)
        self._places = {group: place for place, group in enumerate(sorted(members))}
        kind = OPTIMIZERS[about.optimizer]
        known = set(inspect.signature(kind).parameters) | {"decoupled_weight_decay"}
        groups = [
            {
                "params": members[group],
                **{key: value for key, value in about.groups[group].items() if key in known},
                **{key: value for key, value in _HERE.items() if key in known},
            }
            for group in self._places
        ]
        self._optimizer: torch.optim.Optimizer | None = None
        try:
            if groups:
                self._optimizer = kind(groups)  # pyrefly: ignore[missing-argument] - every kind has its own
        except (TypeError, ValueError, KeyError) as exc:
            raise CommunicationError(f"a server cannot construct {about.optimizer}: {one_line(exc)}.") from exc

    def read_groups(self, groups: object) -> dict[int, GroupSettings]:
        """Settings of this bucket's parameter groups, by index; raises CommunicationError for an invalid one."""
        if self._optimizer is None:
            return {}
        if not isinstance(groups, list) or len(groups) != self._num_groups:
            raise CommunicationError(f"a push must have the settings of {self._num_groups} parameter groups.")
        found: dict[int, GroupSettings] = {}
        for group, place in self._places.items():
            if not isinstance(groups[group], dict):
                raise CommunicationError(f"the settings of parameter group {group} must be a JSON object.")
            settings = group_settings(groups[group])
            now = self._optimizer.param_groups[place]
            # Keys that the optimizer does not know belong to a scheduler, which runs on the worker.
            found[place] = {key: value for key, value in settings.items() if key in now and key not in _HERE}
            for key, value in found[place].items():
                if not _alike(now[key], value):
                    raise CommunicationError(
                        f'parameter group {group} has {one_line(value, 40)} as "{one_line(key, 40)}", which was '
                        f"{one_line(now[key], 40)}."
                    )
            if "lr" not in found[place]:
                raise CommunicationError(f"parameter group {group} has no learning rate.")
        return found

    def apply(
        self, sent: torch.Tensor, settings: Mapping[int, GroupSettings], *, unused: Sequence[int], staleness: int
    ) -> None:
        """Make one step with a gradient; parameters in `unused` got none, but may have a residual of an earlier one."""
        if self._optimizer is None:
            return
        rate = self._rule.rate(self._world_size, staleness)
        for place, group in settings.items():
            self._optimizer.param_groups[place].update(group)
            self._optimizer.param_groups[place]["lr"] = float(str(group["lr"])) * rate
        for index, (tensor, place) in enumerate(self._bucket.segments()):
            part = sent[place].view(tensor.shape)
            used = index not in unused or bool(part.any())
            self._parameters[tensor.name].grad = part if used else None
        self._optimizer.step()
        for parameter in self._parameters.values():
            parameter.grad = None

    def state(self) -> dict[str, torch.Tensor]:
        """The optimizer's state, keyed "parameter|field|number of dimensions"."""
        if self._optimizer is None:
            return {}
        return {
            f"{name}|{field}|{torch.as_tensor(value).dim()}": torch.as_tensor(value).detach().clone().view(-1)
            for name, parameter in self._parameters.items()
            for field, value in self._optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor | float | int)
        }

    def restore(self, values: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from saved parameters and optimizer state; raises, with nothing changed, if they do not fit."""
        check_values(self._bucket, values)
        found = _fields(self._bucket, state)
        self.values.copy_(values)
        if self._optimizer is not None:
            self._optimizer.state.clear()
            for name, fields in found.items():
                self._optimizer.state[self._parameters[name]] = fields


_ARRIVALS = "step"
"""The field with the number of changes that have arrived; under the name that a saved state knows for counts."""


class OuterParameters:
    """Parameters as one flat tensor, which the rule moves by each worker's change."""

    def __init__(self, number: int, about: Configuration, rule: Synchronization, values: torch.Tensor) -> None:
        self._rule = rule
        self._world_size = about.world_size
        self._bucket = about.buckets[number]
        self.values = values.clone()
        """All parameters, flat."""
        self._memory = {field: torch.zeros_like(self.values) for field in rule.server_fields}
        self._arrivals = 0

    def read_groups(self, groups: object) -> dict[int, GroupSettings]:
        """Nothing: the optimizer and its settings stay on the workers."""
        if groups != []:
            raise CommunicationError(f"a change of parameters comes without groups, got {one_line(groups, 40)}.")
        return {}

    def apply(
        self, sent: torch.Tensor, settings: Mapping[int, GroupSettings], *, unused: Sequence[int], staleness: int
    ) -> None:
        """Make the outer step of one worker's change."""
        self._rule.arrive(self.values, sent, self._memory, arrival=self._arrivals, world_size=self._world_size)
        self._arrivals += 1

    def state(self) -> dict[str, torch.Tensor]:
        """The fields of the rule and the number of changes, keyed "parameter|field|number of dimensions"."""
        found: dict[str, torch.Tensor] = {}
        for tensor, place in self._bucket.segments():
            for field, flat in self._memory.items():
                found[f"{tensor.name}|{field}|{len(tensor.shape)}"] = flat[place].clone()
            found[f"{tensor.name}|{_ARRIVALS}|0"] = torch.tensor([self._arrivals], dtype=torch.float64)
        return found

    def restore(self, values: torch.Tensor, state: Mapping[str, torch.Tensor]) -> None:
        """Continue from saved parameters and fields, or from zeros if there are none."""
        check_values(self._bucket, values)
        found = _fields(self._bucket, state)
        wanted = {*self._memory, _ARRIVALS} if state else set[str]()
        for tensor in self._bucket.tensors:
            for field in found.get(tensor.name, {}).keys() ^ wanted:
                problem = "lacks" if field in wanted else "has, but this server does not,"
                raise CommunicationError(f'a saved state {problem} "{one_line(field, 40)}" of {tensor.name}.')
        counts = {float(fields[_ARRIVALS]) for fields in found.values()} or {0.0}
        count = min(counts)
        if len(counts) > 1 or count < 0 or count != int(count):
            raise CommunicationError(f"a saved state has {one_line(sorted(counts), 60)} as the number of changes.")
        self.values.copy_(values)
        self._arrivals = int(count)
        for tensor, place in self._bucket.segments():
            for field, flat in self._memory.items():
                flat[place] = found[tensor.name][field].reshape(-1) if found else 0.0


def _fields(bucket: Bucket, state: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The fields of each parameter in a saved state; raises CommunicationError if one does not fit."""
    tensors = {tensor.name: tensor for tensor in bucket.tensors}
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in state.items():
        name, field, dims = key.rsplit("|", 2)
        if name not in tensors:
            raise CommunicationError(f'a saved state has "{one_line(key, 80)}", of a parameter that is not here.')
        shape = torch.Size() if dims == "0" else torch.Size(tensors[name].shape)
        if value.numel() != shape.numel() or (dims != "0" and value.dtype != bucket.dtype):
            raise CommunicationError(
                f'a saved state has {value.numel()} {value.dtype} values of "{one_line(key, 80)}" instead of '
                f"{shape.numel()} of {bucket.dtype}."
            )
        if not bool(torch.isfinite(value).all()):
            raise CommunicationError(f'a saved state has NaN or infinite values in "{one_line(key, 80)}".')
        found.setdefault(name, {})[field] = value.clone().view(shape)
    return found


def check_values(bucket: Bucket, values: torch.Tensor) -> None:
    """Raise CommunicationError unless `values` can be the parameters of a bucket."""
    if values.numel() != bucket.numel or values.dtype != bucket.dtype:
        raise CommunicationError(
            f"a bucket of {bucket.numel} {bucket.dtype} parameters was sent {values.numel()} of {values.dtype}."
        )


def _alike(old: object, new: object) -> bool:
    """Whether a setting can replace another: numbers for numbers, and the same number of them."""
    if isinstance(old, tuple | list):
        return isinstance(new, tuple) and len(old) == len(new) and all(map(_alike, old, new))
    if old is None or isinstance(old, bool):
        return new is None or isinstance(new, bool)
    if isinstance(old, int | float):
        # A setting that is not finite would make every parameter so.
        return isinstance(new, int | float) and not isinstance(new, bool) and math.isfinite(new)
    return type(old) is type(new)
