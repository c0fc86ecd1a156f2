"""The optimizers' state of each parameter, for rules that average it as well."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from laconic.runtime.job import Job
from laconic.runtime.shards import local


class OptimizerMoments:
    """Tensors of the optimizers' state under the names that exchanges have for them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        kept = job.strategy.synchronization.moments
        self._places = {f"{moment} of {name}": (name, moment) for moment in kept for name in job.parameters}

    def read(self, into: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors; state that an optimizer has not created yet is zero."""
        for held, view in self._held(into):
            if held is None:
                view.zero_()
            else:
                view.copy_(held)

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the tensors, as far as an optimizer has created them."""
        for held, view in self._held(values):
            if held is not None:
                held.copy_(view)

    def _held(self, views: Mapping[str, torch.Tensor]) -> Iterator[tuple[torch.Tensor | None, torch.Tensor]]:
        states = {p: state for optimizer in self._job.optimizers for p, state in optimizer.state.items()}
        for key, view in views.items():
            name, moment = self._places[key]
            found = states.get(self._job.parameters[name], {}).get(moment)
            yield None if found is None else local(found), view
