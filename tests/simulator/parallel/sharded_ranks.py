"""What ranks do in the test of memory: shard a small model with FSDP2 and tensor parallelism, and count its tensors."""

from __future__ import annotations

import torch
from torch import nn

from laconic.workload.transformer import Transformer
from tests.processes import gloo_group

TINY = Transformer(
    name="tiny", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=128, intermediate_size=96
)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width, inner = TINY.hidden_size, TINY.intermediate_size
        self.attention_norm, self.norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TINY.vocab_size, TINY.hidden_size)
        self.layers = nn.ModuleList(_Layer() for _ in range(TINY.num_hidden_layers))
        self.norm = nn.RMSNorm(TINY.hidden_size)
        self.head = nn.Linear(TINY.hidden_size, TINY.vocab_size, bias=False)


def state_bytes(tp: int, fsdp: int) -> dict[str, int]:
    """Bytes of this rank's parameters, gradients and moments of Adam."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with gloo_group():
        mesh = init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("fsdp", "tp"))
        model = _Model()
        if tp > 1:
            ways = {
                "qkv": ColwiseParallel(),
                "o": RowwiseParallel(),
                "up": ColwiseParallel(),
                "down": RowwiseParallel(),
            }
            for layer in model.layers:
                parallelize_module(layer, mesh["tp"], ways)
            parallelize_module(model, mesh["tp"], {"embedding": RowwiseParallel(), "head": ColwiseParallel()})
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["fsdp"])
        fully_shard(model, mesh=mesh["fsdp"])
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

        def size(tensor: torch.Tensor) -> int:
            here = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            return here.numel() * here.element_size()

        moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        return {
            "parameters": sum(size(parameter) for parameter in model.parameters()),
            "gradients": sum(size(parameter.grad) for parameter in model.parameters() if parameter.grad is not None),
            "optimizer": sum(map(size, moments)),
        }
