"""Models that are awkward in themselves: shared, checkpointed, recurrent, odd layouts, odd buffers."""

from __future__ import annotations

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.beside_ddp.cases.contract import Turn, case, refused, right


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def deep() -> nn.Module:
    """Layers of many sizes."""
    return nn.Sequential(*[layer for i in range(12) for layer in (nn.Linear(5 + i, 6 + i), nn.Tanh())])


def tokens(turn: Turn, vocabulary: int, *shape: int) -> torch.Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(100 * turn.step + turn.rank))


@case(model=mlp)
def an_ordinary_mlp(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


@case(model=deep, bucket_cap_mb=0.0002)
def many_buckets(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


@case(model=deep, bucket_cap_mb=0.001, optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01))
def many_buckets_adamw(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


@case(model=deep, bucket_cap_mb=1e-6)
def a_bucket_for_each_tensor(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.middle = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(torch.tanh(self.middle(self.embedding(ids)))))


@case(model=TiedLanguageModel)
def tied_embeddings_and_a_module_used_twice(turn: Turn) -> None:
    turn.learn(turn.call(tokens(turn, 11, 4, 3)).square().mean())


class SharedModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = self.first
        self.last = nn.Sequential(nn.Tanh(), nn.Linear(5, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(inputs)))


@case(model=SharedModule)
def one_module_under_two_names(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


class PartlyFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.live = nn.Linear(5, 2)
        self.live.bias.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.live(self.frozen(inputs))


@case(
    model=PartlyFrozen,
    optimizer=lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
)
def frozen_layers_and_a_frozen_bias(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


class Checkpointed(nn.Module):
    reentrant = False
    nested = False

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.last = nn.Linear(6, 2)

    def block(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        if self.nested and index % 2 == 0:
            return checkpoint(lambda h: torch.tanh(self.blocks[index](h)), hidden, use_reentrant=self.reentrant)
        return torch.tanh(self.blocks[index](hidden))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for index in range(4):
            hidden = checkpoint(lambda h, i=index: self.block(i, h), hidden, use_reentrant=self.reentrant)
        return self.last(hidden)


class ReentrantCheckpointed(Checkpointed):
    reentrant = True


class NestedCheckpointed(Checkpointed):
    nested = True


class NestedReentrantCheckpointed(Checkpointed):
    nested = True
    reentrant = True


@case(model=Checkpointed)
def checkpointing(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


@case(model=ReentrantCheckpointed)
def checkpointing_reentrant(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


@case(model=ReentrantCheckpointed, bucket_cap_mb=1e-6)
def checkpointing_reentrant_many_buckets(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


@case(model=NestedCheckpointed)
def checkpointing_nested(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


@case(model=NestedReentrantCheckpointed)
def checkpointing_nested_reentrant(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


class AllInside(nn.Module):
    """Everything inside one checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, inputs.requires_grad_(), use_reentrant=True)


@case(model=AllInside)
def checkpointing_reentrant_of_everything(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


class SharedByCheckpoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.shared = nn.Linear(5, 5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            hidden = checkpoint(self.shared, hidden, use_reentrant=True)
        return hidden


@case(model=SharedByCheckpoints, bucket_cap_mb=1e-6, expected=refused("second gradient"))
def a_parameter_in_two_reentrant_checkpoints(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(inputs)[0][:, -1])


@case(model=Recurrent)
def lstm(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(3, 4, 5)).square().mean())


@case(model=lambda: nn.GRUCell(5, 5))
def a_cell_unrolled_outside_of_the_model(turn: Turn) -> None:
    hidden = turn.call(turn.data(3, 5))
    for _ in range(3):
        hidden = turn.call(turn.data(3, 5), hidden)
    turn.learn(hidden.square().mean())


@case(model=lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
def a_transformer_layer(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(2, 4, 8)).square().mean())


@case(model=lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
def dropout_that_differs_by_rank(turn: Turn) -> None:
    torch.manual_seed(100 * turn.step + turn.rank)
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


class Scalars(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.5]))
        self.linear = nn.Linear(5, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs) * self.scale + self.shift


@case(model=Scalars)
def scalar_parameters(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


class ZeroSize(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 2)
        self.empty = nn.Parameter(torch.zeros(0))
        self.grid = nn.Parameter(torch.zeros(3, 0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.linear(inputs).square().mean() + self.empty.sum() + self.grid.sum()


@case(model=ZeroSize)
def parameters_of_size_zero(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(1 + i % 3)) for i in range(1000)])

    def forward(self, scale: float) -> torch.Tensor:
        return torch.cat([part * scale for part in self.parts]).square().mean()


@case(model=Tiny, steps=2, ranks=(2,), bucket_cap_mb=0.001)
def a_thousand_tiny_parameters(turn: Turn) -> None:
    turn.learn(turn.call(1.0 + turn.rank))


class Uncalled(nn.Module):
    """Its parameters are used without its forward method."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 4)
        self.b = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(torch.tanh(nn.functional.linear(inputs, self.a.weight, self.a.bias)), self.b.weight)


@case(model=Uncalled, find_unused_parameters=True, ranks=(2,))
def parameters_used_without_their_module(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3))


@case(model=convolutions)
def batch_norm(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(3, 2, 8, 8)).square().mean())


@case(model=lambda: convolutions().to(memory_format=torch.channels_last))
def channels_last(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(3, 2, 8, 8).to(memory_format=torch.channels_last)).square().mean())


@case(model=lambda: convolutions().to(memory_format=torch.channels_last))
def channels_last_model_with_contiguous_input(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(3, 2, 8, 8)).square().mean())


@case(model=lambda: nn.Conv3d(2, 3, 3).to(memory_format=torch.channels_last_3d))
def channels_last_3d(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(2, 2, 5, 5, 5)).square().mean())


class OddStrides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(4, 5).t())
        self.permuted = nn.Parameter(torch.randn(2, 3, 4).permute(2, 0, 1))
        self.strided = nn.Parameter(torch.randn(8, 4)[::2])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs @ self.transposed @ self.strided
        return hidden.square().mean() + (self.permuted * hidden.sum()).square().mean()


@case(model=OddStrides)
def parameters_with_odd_strides(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(3, 5)))


class ManyBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 2)
        dtypes = "float32 float64 float16 bfloat16 int8 int32 int64 uint8 bool complex64"
        for dtype in dtypes.split():
            self.register_buffer(f"of_{dtype}", (torch.rand(3) * 5).to(getattr(torch, dtype)))
        self.register_buffer("hidden", torch.rand(2), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.of_float32.add_(inputs.mean().detach())
        self.hidden.mul_(0.5)
        self.of_int64 = self.of_int64 + 1  # another tensor under the same name
        return self.linear(inputs) + self.of_float32[:2]


@case(model=ManyBuffers)
def buffers_of_many_dtypes_some_reassigned(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


@case(model=convolutions, steps=6)
def buffers_between_training_and_evaluation(turn: Turn) -> None:
    # With DDP every rank evaluates with rank 0's statistics; laconic does not communicate then (documented), so the
    # comparison is of training alone.
    turn.learn(turn.call(turn.data(3, 2, 8, 8)).square().mean())
    turn.model.eval()
    with torch.no_grad():
        turn.model(turn.data(3, 2, 8, 8))
    turn.model.train()


def normed() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(5, 6)),
        nn.Tanh(),
        parametrizations.spectral_norm(nn.Linear(6, 6)),
        parametrizations.orthogonal(nn.Linear(6, 6)),
    )


@case(model=normed)
def parametrizations_weight_spectral_orthogonal(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


class DataParallelInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.DataParallel(nn.Linear(5, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.inside(inputs))


@case(model=DataParallelInside)
def data_parallel_inside(turn: Turn) -> None:
    turn.learn(turn.call(turn.data(4, 5)).square().mean())


class ManyOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 4)
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})

    def forward(self, *, inputs: torch.Tensor) -> dict[str, object]:
        hidden = self.body(inputs)
        return {"list": [head(hidden) for head in self.heads.values()], "nested": {"tuple": (hidden, None, "text")}}


@case(model=ManyOutputs)
def keyword_inputs_and_nested_outputs(turn: Turn) -> None:
    outputs = turn.call(inputs=turn.data(4, 5))
    turn.learn(sum(part.square().mean() for part in outputs["list"]) + outputs["nested"]["tuple"][0].sum())


@case(model=mlp)
def a_functional_call_beside_the_model(turn: Turn) -> None:
    inputs = turn.data(4, 5)
    halved = {name: value.detach() / 2 for name, value in turn.model.named_parameters()}
    other = functional_call(turn.model, halved, (inputs,))
    turn.learn((turn.call(inputs) - other).square().mean())


@case(model=mlp, expected=right("DDP's hooks expect gradients of all parameters in one pass"))
def backward_of_some_inputs_only(turn: Turn) -> None:
    turn.optimizer.zero_grad()
    loss = turn.call(turn.data(4, 5)).square().mean()
    loss.backward(inputs=[turn.model[0].weight, turn.model[2].bias])
    turn.optimizer.step()


class NoBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.norm = nn.LayerNorm(3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(inputs))


@case(model=NoBatch)
def batches_of_different_sizes_some_empty(turn: Turn) -> None:
    rows = (turn.step + turn.rank) % 3  # 0, 1 or 2
    turn.learn(turn.call(turn.data(rows, 5)).square().sum())
