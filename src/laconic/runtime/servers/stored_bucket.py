"""The parameters of one bucket on a server: pushes are decoded and applied, answers are encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from laconic.compression import Compressor
from laconic.core.frames import Frame
from laconic.core.moment import Moment
from laconic.errors import CommunicationError
from laconic.runtime.servers.protocol import Configuration, GroupSettings, decode_payload
from laconic.runtime.servers.server_optimizer import hold
from laconic.synchronization import Synchronization


class StoredBucket:
    """The parameters of one bucket, the state of their updates, and the copies that workers have of them.

    It has no lock: its owner calls it from one thread at a time.
    """

    def __init__(
        self,
        number: int,
        about: Configuration,
        compression: Compressor,
        rule: Synchronization,
        values: torch.Tensor,
    ) -> None:
        bucket = about.buckets[number]
        self._compression = compression
        self._rule = rule
        self._world_size = about.world_size
        self._server = about.server
        self._held = hold(number, about, rule, values)
        self._read = compression.init(bucket)
        # The difference from a worker's copy is its residual; no other residual is needed.
        back = compression.back().forgetful()
        self._back = None if back.traits.lossless or not back.traits.keeps_scale else back
        remember = self._back is not None or rule.compensation > 0
        self._known = [values.clone() if remember else None for _ in range(about.world_size)]
        # The state of the compressor for the answers to each worker.
        self._answers = [(self._back or compression).init(bucket) for _ in range(about.world_size)]

    def read_groups(self, groups: object) -> dict[int, GroupSettings]:
        """Settings of parameter groups, as a push has them; raises CommunicationError for an invalid one."""
        return self._held.read_groups(groups)

    def decode(self, frame: Frame, step: int) -> torch.Tensor:
        """The gradient or change that a worker has pushed; raises CommunicationError if it cannot be decoded."""
        values, known = self._held.values, self._known[frame.sender]
        sent = torch.empty_like(values)
        self._read.moment = Moment(step, frame.sender, self._world_size, self._rule.round_number(step))
        decode_payload(frame.tensors, sent, self._compression, self._read)
        if self._rule.compensation and known is not None:
            sent.addcmul_(sent * sent, values - known, value=self._rule.compensation)
        return sent

    def apply(
        self, sent: torch.Tensor, settings: Mapping[int, GroupSettings], *, unused: Sequence[int], staleness: int
    ) -> None:
        """Update the parameters with a gradient or a change; `staleness`: the updates since its worker got them."""
        self._held.apply(sent, settings, unused=unused, staleness=staleness)

    def answer(self, sender: int, step: int) -> tuple[torch.Tensor, ...]:
        """The answer for a worker: all parameters, or their difference from its copy."""
        known, values = self._known[sender], self._held.values
        if self._back is None:
            if known is not None:
                known.copy_(values)
            return (values.clone(),)
        assert known is not None
        # The worker's step, which it decodes by; random numbers that differ from those of any worker.
        rank, state = self._world_size * (1 + self._server) + sender, self._answers[sender]
        state.moment = Moment(step, rank, self._world_size, self._rule.round_number(step))
        payload = self._back.encode(values - known, state)
        sent = torch.empty_like(values)
        self._back.decode(payload, sent, state)
        known += sent
        return payload.tensors

    def pull(self, sender: int) -> torch.Tensor:
        """The current parameters."""
        known = self._known[sender]
        if known is not None:
            known.copy_(self._held.values)
        return self._held.values.clone()

    def state(self) -> dict[str, torch.Tensor]:
        """The state of updates, keyed "parameter|field|number of dimensions"."""
        return self._held.state()

    def restore(self, tensors: tuple[torch.Tensor, ...], keys: list[str]) -> None:
        """Continue from saved parameters, the first tensor, and the saved state of their updates."""
        if len(tensors) != len(keys) + 1:
            raise CommunicationError(f"a saved state has {len(keys)} fields and {len(tensors)} tensors.")
        self._held.restore(tensors[0], dict(zip(keys, tensors[1:], strict=True)))
        for known in self._known:
            if known is not None:
                known.copy_(self._held.values)
