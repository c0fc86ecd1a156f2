"""A contest on sharded models: the ranks of a host share one model, and every host has one."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from laconic.report.results import TORCH_HSDP, is_torchs_own
from laconic.strategy import Strategy


@dataclass(frozen=True)
class ShardGrid:
    """The ranks that shard a model, and the ranks that hold the same shard of it."""

    hosts: DeviceMesh
    """Two dimensions: the hosts, and the ranks of a host."""
    inside: DeviceMesh
    """The ranks on this rank's host."""
    between: DeviceMesh
    """The ranks with the same position on other hosts."""
    everyone: DeviceMesh
    """All ranks in one dimension."""

    @classmethod
    def make(cls, device: str, world_size: int, ranks_per_host: int) -> ShardGrid:
        """Ranks of a host have consecutive numbers."""
        shape = (world_size // ranks_per_host, ranks_per_host)
        hosts = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
        return cls(hosts, hosts["shard"], hosts["replicate"], init_device_mesh(device, (world_size,)))

    def shard(self, model: nn.Module, strategy: str) -> DeviceMesh | None:
        """Shard the model as this contender needs it; return laconic's group, None where PyTorch does the exchange.

        HSDP shards inside a host and averages between hosts by itself. A strategy that compresses FSDP2's own traffic
        shards over all ranks; any other strategy leaves the exchange inside a host to FSDP2.
        """
        if is_torchs_own(strategy):
            _fully_shard(model, self.hosts if strategy == TORCH_HSDP else self.inside)
            return None
        if Strategy.parse(strategy).architecture.holds_shards:
            _fully_shard(model, self.everyone)
            return self.everyone
        _fully_shard(model, self.inside)
        return self.between


def _fully_shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard block by block, as is usual with FSDP2: the modules of the first ModuleList, then the rest."""
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for block in module:
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
