"""The FSDP2 parameter groups of a model: parameters that are gathered together, and in which order.

PyTorch has no public name for that order, and the traffic does not show whether all ranks agree on it. So this file
reads FSDP2's private lists; no other file does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from laconic.core.tensor import TensorSpec
from laconic.errors import AttachError
from laconic.runtime.shards import fsdp_modules, local, part_name, plain_name


@dataclass(frozen=True, eq=False)
class FsdpPart:
    """One call of fully_shard(), on a module or on a list of modules."""

    name: str
    """Name of its first module."""
    module: Any
    """The first module, which represents all of them."""
    tensors: tuple[TensorSpec, ...]
    """Its whole parameters in memory order, frozen ones included."""
    weights_dtype: torch.dtype
    """The dtype in which weights are gathered."""
    gradients_dtype: torch.dtype
    """The dtype in which gradients are summed."""
    group: Any
    """FSDP2's own object for it."""

    def weights(self, gathers: int) -> list[TensorSpec]:
        """The tensors that are gathered, once or more per step."""
        return [replace(tensor, dtype=self.weights_dtype, gathers=gathers) for tensor in self.tensors]

    def gradients(self, trained: Collection[str]) -> list[TensorSpec]:
        """The gradients that are summed, of trained parameters only."""
        return [replace(tensor, dtype=self.gradients_dtype) for tensor in self.tensors if tensor.name in trained]

    @property
    def communication(self) -> tuple[Any, Any]:
        """The objects that now gather weights and sum gradients."""
        return self.group._all_gather_comm, self.group._reduce_scatter_comm

    def use(self, gather: Any, scatter: Any) -> None:
        """Let these objects gather weights and sum gradients from now on."""
        self.module.set_custom_all_gather(gather)
        self.module.set_custom_reduce_scatter(scatter)

    @property
    def sums_unused(self) -> bool | None:
        """Whether parameters without a gradient are summed as zeros; None: this PyTorch cannot."""
        return getattr(self.group, "reduce_scatter_unused_params", None)

    def sum_unused(self, enabled: bool) -> None:
        """Sum parameters without a gradient as zeros, or leave them out."""
        self.module.set_reduce_scatter_unused_params(enabled, recurse=False)

    @contextmanager
    def not_summing(self) -> Iterator[None]:
        """Inside, gradients are accumulated locally."""
        before: bool = self.group.reduce_grads
        self.module.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            self.module.set_requires_gradient_sync(before, recurse=False)


def fsdp_parts(model: nn.Module) -> list[FsdpPart]:
    """All parts that have parameters of their own, in the order of modules."""
    names = {id(parameter): plain_name(name) for name, parameter in model.named_parameters()}
    found: dict[int, FsdpPart] = {}
    for path, module in fsdp_modules(model):
        state, groups = module._get_fsdp_state(), _groups(module)
        name = part_name(path)
        if len(groups) > 1:
            raise AttachError(
                f'"{name}" has parameters on several meshes, and FSDP hands over only those on one. Shard all of them '
                "over one mesh, without shard_placement_fn."
            )
        for group in groups:
            if group is not None and id(group) not in found:
                found[id(group)] = _part(name, module, group, state._mp_policy, names)
    return list(found.values())


def place_among_averaged(model: nn.Module) -> tuple[int, int]:
    """This rank's place among the ranks over which FSDP averages gradients, and their number; 0 and 1 without FSDP.

    These ranks train on different samples; ranks of tensor parallelism train on the same.
    """
    modules = [module for _, module in fsdp_modules(model)]
    found = {_place(group.mesh_info) for module in modules for group in _groups(module) if group is not None}
    if len(found) > 1:
        raise AttachError(
            "parts of the model are sharded over meshes of different sizes, so it is unclear which ranks train on "
            "which samples. Give all calls of fully_shard() one mesh."
        )
    return next(iter(found), (0, 1))


def _groups(module: Any) -> list[Any]:
    """FSDP2's own objects for a part: one for each mesh, None where it has no parameters of its own."""
    state = module._get_fsdp_state()
    return getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]


def _place(mesh: Any) -> tuple[int, int]:
    rank, size = mesh.shard_mesh_rank, mesh.shard_mesh_size
    replicas = getattr(mesh, "replicate_mesh_size", 1)
    return getattr(mesh, "replicate_mesh_rank", 0) * size + rank, replicas * size


def _part(name: str, module: Any, group: Any, policy: Any, names: dict[int, str]) -> FsdpPart:
    parameters = [one.sharded_param for one in group.fsdp_params]
    tensors = tuple(
        TensorSpec(
            names[id(parameter)], tuple(parameter.shape), parameter.dtype, local(parameter).device, ready_with=name
        )
        for parameter in parameters
    )
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise AttachError(
            f'parameters of "{name}" have several dtypes ("{tensors[0].name}" is {tensors[0].dtype}), which FSDP sends '
            "as raw bytes. Give all parameters one dtype, and set the dtype of computation in MixedPrecisionPolicy."
        )
    weights = policy.param_dtype or tensors[0].dtype
    return FsdpPart(name, module, tensors, weights, policy.reduce_dtype or weights, group)
