"""Parameters that get no gradient in some steps, on some ranks, or never."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.beside_ddp.cases.contract import UNUSED, Turn, case, rounding


class Branches(nn.Module):
    """A trunk and four branches of which a forward pass uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 20)
        self.branches = nn.ModuleList(nn.Linear(20, width) for width in (3, 30, 10, 20))

    def forward(self, inputs: torch.Tensor, used: list[int]) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(inputs))
        return sum((self.branches[index](hidden).square().mean() for index in used), hidden.square().mean())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@case(model=Branches, find_unused_parameters=True, expected=UNUSED)
def never_used(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5), [0, 2]))


@case(model=Branches, find_unused_parameters=True, expected=UNUSED, steps=6)
def used_in_turns(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5), [turn.step % 4]))


@case(model=Branches, find_unused_parameters=True, expected=UNUSED, steps=6, optimizer=adam)
def used_in_turns_adamw(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5), [turn.step % 4]))


@case(model=Branches, find_unused_parameters=True, expected=UNUSED, steps=6)
def used_by_one_rank_only(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5), [0, 1, 2, 3] if turn.rank == turn.step % turn.world.size else [1]))


@case(model=Branches, find_unused_parameters=True, expected=UNUSED, steps=6)
def different_branches_on_every_rank(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5), [(turn.step + turn.rank) % 4]))


@case(model=Branches, find_unused_parameters=True, expected=UNUSED, steps=6, bucket_cap_mb=0.0005)
def different_branches_on_every_rank_many_buckets(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5), [(turn.step + turn.rank) % 4]))


@case(model=Branches, find_unused_parameters=True, expected=UNUSED, bucket_cap_mb=0.0005)
def unused_setting_without_need_many_buckets(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5), [3, 1, 0, 2]))


@case(model=Branches, find_unused_parameters=True, expected=UNUSED)
def unused_gradients_zeroed_not_dropped(turn: Turn) -> None:
    turn.call(turn.data(4, 5), [turn.step % 2]).backward()
    turn.optimizer.step()
    turn.optimizer.zero_grad(set_to_none=False)


@case(model=Branches, find_unused_parameters=True, expected=UNUSED)
def unused_gradients_never_zeroed(turn: Turn) -> None:
    turn.call(turn.data(4, 5), [turn.step % 3]).backward()
    turn.optimizer.step()


@case(model=Branches, find_unused_parameters=True, expected=UNUSED)
def unused_while_accumulating(turn: Turn) -> None:
    turn.optimizer.zero_grad()
    with turn.no_sync():
        turn.call(turn.data(4, 5), [turn.step % 4]).backward()
    turn.call(turn.data(4, 5), [(turn.step + 1) % 4]).backward()
    turn.optimizer.step()


STATIC = rounding("with static_graph=True DDP orders its buckets by a first pass that includes unused parameters")


@case(model=Branches, static_graph=True, expected=STATIC, bucket_cap_mb=0.0005)
def static_graph_with_unused_parameters(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5), [1, 3]))


@case(model=Branches, static_graph=True, expected=STATIC, bucket_cap_mb=0.0005)
def static_graph_many_buckets(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5), [0, 1, 2, 3]))


@case(model=Branches, steps=6)
def another_order_of_the_graph_in_every_step(turn: Turn) -> None:
    order = torch.randperm(4, generator=torch.Generator().manual_seed(turn.step)).tolist()
    turn.learn(turn.call(turn.data(4, 5), order))


@case(model=Branches, steps=6, bucket_cap_mb=0.0005)
def another_order_of_the_graph_on_every_rank(turn: Turn) -> None:
    order = torch.randperm(4, generator=torch.Generator().manual_seed(10 * turn.step + turn.rank)).tolist()
    turn.learn(turn.call(turn.data(4, 5), order))


@case(model=Branches, steps=5)
def branches_used_twice_on_one_rank(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5), [0, 1, 2, 3, 1, 2] if turn.rank else [2, 3, 0, 1]))


class Stop(torch.autograd.Function):
    """Legal: no gradient for this input."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


class Stopped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 5)
        self.b = nn.Linear(5, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.b(Stop.apply(self.a(inputs)) + inputs)


@case(model=Stopped, find_unused_parameters=True, expected=UNUSED)
def undefined_gradients_of_a_custom_function(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


class SometimesStopped(Stopped):
    def forward(self, inputs: torch.Tensor, stop: bool) -> torch.Tensor:
        hidden = self.a(inputs)
        return self.b((Stop.apply(hidden) if stop else hidden) + inputs)


@case(model=SometimesStopped, find_unused_parameters=True, expected=UNUSED)
def undefined_gradients_on_one_rank(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5), stop=turn.rank == turn.step % 2).square().mean())


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 2)
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs).square().mean()


@case(model=Empty, find_unused_parameters=True, expected=UNUSED)
def an_unused_parameter_of_size_zero(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4)
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 3)])

    def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.body(inputs)
        return tuple(head(hidden) for head in self.heads)


@case(model=TwoHeads, find_unused_parameters=True, expected=UNUSED)
def an_output_that_the_loss_leaves_out(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5))[turn.step % 2].square().mean())


@case(model=TwoHeads, find_unused_parameters=True, expected=UNUSED)
def a_loss_that_touches_no_parameter_on_one_rank(turn: Turn) -> None:
    first, second = turn.call(turn.data(4, 5))
    loss = first.square().mean() + second.square().mean()
    turn.learn(loss * 0 if turn.rank == 1 and turn.step == 1 else loss)


@case(model=TwoHeads, find_unused_parameters=True, expected=UNUSED)
def a_branch_multiplied_by_zero(turn: Turn) -> None:
    first, second = turn.call(turn.data(4, 5))
    turn.learn(first.square().mean() + 0.0 * second.sum())


class CheckpointedBranches(Branches):
    def forward(self, inputs: torch.Tensor, used: list[int]) -> torch.Tensor:
        return checkpoint(super().forward, inputs, used, use_reentrant=False)


@case(model=CheckpointedBranches, find_unused_parameters=True, expected=UNUSED)
def unused_inside_a_checkpoint(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5), [turn.step % 4]))


class Experts(nn.Module):
    """A mixture of experts: every token goes to one, which may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(5, 4)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.gate(inputs).softmax(-1).max(-1)
        outputs = inputs * weights[:, None]
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            if mine.any():
                outputs = outputs.index_add(0, mine.nonzero()[:, 0], expert(inputs[mine]))
        return outputs


@case(model=Experts, find_unused_parameters=True, expected=UNUSED, steps=6)
def a_mixture_of_experts(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(3, 5)).square().mean())


class DropsLayers(nn.Module):
    """Stochastic depth, drawn on each rank for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(5))

    def forward(self, inputs: torch.Tensor, kept: list[bool]) -> torch.Tensor:
        for layer, keep in zip(self.layers, kept, strict=True):
            inputs = inputs + torch.tanh(layer(inputs)) if keep else inputs
        return inputs


@case(model=DropsLayers, find_unused_parameters=True, expected=UNUSED, steps=6)
def stochastic_depth(turn: Turn) -> None:
    kept = (turn.data(5) > 0).tolist()
    kept[0] = True
    turn.learn(turn.call(turn.data(4, 5), kept).square().mean())
