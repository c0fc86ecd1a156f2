"""Measured workloads: order and ownership of gradients against autograd itself, times against a clock that is set."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from laconic.core.clock import VirtualClock
from laconic.errors import UsageError
from laconic.experiments.small_gpt import SmallGpt, gpt_shape
from laconic.workload import Workload
from laconic.workload.profiler import Profile, Subject, profile


class Pretend(torch.autograd.Function):
    """Takes a second of the virtual clock forward and another backward time."""

    @staticmethod
    def forward(ctx, clock, seconds, values):  # type: ignore[no-untyped-def]
        ctx.clock, ctx.seconds = clock, seconds
        clock.advance_to(clock.now() + seconds[0])
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        ctx.clock.advance_to(ctx.clock.now() + ctx.seconds[1])
        return None, None, gradient


class Slow(nn.Module):
    """A layer that takes exactly so long."""

    def __init__(self, clock: VirtualClock, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self._clock, self._seconds = clock, (forward_s, backward_s)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return Pretend.apply(self._clock, self._seconds, values * self.scale)


class Known(nn.Module):
    """Linear and ReLU, tied weights, a module that is called twice, and parameters that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.idle = nn.Linear(8, 8)
        self.first = nn.Linear(8, 8)
        self.twice = nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)
        self.between = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight
        self.offset = nn.Parameter(torch.zeros(8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.relu(self.first(self.tokens(tokens) + self.offset))
        hidden = hidden + self.twice(hidden)
        hidden = self.twice(functional.gelu(self.between(hidden)))
        return self.head(hidden)


def step_loss(model: nn.Module, batch: object) -> torch.Tensor:
    assert isinstance(batch, torch.Tensor)
    return model(batch).square().mean()


def real_order(model: nn.Module, loss: Callable[[], torch.Tensor]) -> list[str]:
    """The order in which autograd itself completes gradients."""
    seen: list[str] = []
    handles = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
        for name, parameter in model.named_parameters()
    ]
    loss().backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return seen


def names(workload: Workload) -> list[str]:
    return [tensor.name for tensor in workload.tensors]


def by_layer(workload: Workload) -> dict[str, list[str]]:
    return {layer.name: [tensor.name for tensor in layer.tensors] for layer in workload.layers}


def profiled_known() -> tuple[Known, Profile]:
    model = Known()
    tokens = torch.randint(11, (5, 7))
    return model, profile(Subject(model=model, batch=tokens, loss=step_loss), name="known", device="cpu", steps=3)


def test_order_is_the_real_one_and_unused_parameters_come_last() -> None:
    model, measured = profiled_known()
    real = real_order(model, lambda: step_loss(model, torch.randint(11, (5, 7))))
    assert set(dict(model.named_parameters())) - set(real) == {"idle.weight", "idle.bias"}
    assert names(measured.workload) == [*real, "idle.bias", "idle.weight"]
    assert len(measured.notes) == 1
    assert "No gradient came to idle.bias, idle.weight" in measured.notes[0]
    assert measured.notes[0] in measured.workload.source
    shapes = {tensor.name: tensor.shape for tensor in measured.workload.tensors}
    assert shapes == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def test_who_owns_which_gradient() -> None:
    owners = by_layer(profiled_known()[1].workload)
    # The root has a parameter of its own, so it is a layer, and stands where that one is used. The tied weight is
    # complete in the embedding, what is called twice stands where it was called first, what is never called nowhere.
    assert list(owners) == ["tokens", "(model)", "first", "relu", "twice", "between", "head"]
    assert owners["tokens"][0] == "tokens.weight"
    assert owners["(model)"] == ["offset"]
    assert owners["first"] == ["first.bias", "first.weight"]
    assert owners["twice"] == ["twice.bias", "twice.weight"]
    assert owners["between"] == ["between.weight", "between.bias"]
    assert owners["relu"] == owners["head"] == []


def test_times_add_up_to_the_passes_without_hooks() -> None:
    _, measured = profiled_known()
    job = measured.workload
    assert job.batch == 5
    assert measured.forward_factor > 0
    assert measured.backward_factor > 0
    assert all(layer.forward_s >= 0 and layer.backward_s >= 0 for layer in job.layers)
    assert sum(layer.forward_s for layer in job.layers) == pytest.approx(job.forward_s)
    assert job.forward_s > 0
    assert job.backward_s > 0
    assert measured.ready_error_s >= 0
    assert Workload.from_json(job.to_json()) == job


def virtual(layers: Iterable[tuple[float, float]], clock: VirtualClock) -> nn.Sequential:
    return nn.Sequential(*(Slow(clock, *seconds) for seconds in layers))


def test_on_a_virtual_clock_every_layer_has_exactly_its_time() -> None:
    clock = VirtualClock()
    model = virtual([(1.0, 3.0), (2.0, 5.0), (4.0, 7.0)], clock)
    measured = profile(
        Subject(model=model, batch=torch.ones(6, 3), loss=step_loss), name="v", device="cpu", steps=2, clock=clock
    )
    assert [(layer.name, layer.forward_s, layer.backward_s) for layer in measured.workload.layers] == [
        ("0", 1.0, 3.0),
        ("1", 2.0, 5.0),
        ("2", 4.0, 7.0),
    ]
    assert (measured.forward_factor, measured.backward_factor, measured.ready_error_s) == (1.0, 1.0, 0.0)
    assert measured.workload.batch == 6


def test_what_hooks_cost_is_scaled_away() -> None:
    class Ticking(VirtualClock):
        """Whoever asks for the time has to wait for it; hooks ask often."""

        def now(self) -> float:
            self.advance_to(super().now() + 0.25)
            return super().now()

    clock = Ticking()
    model = virtual([(1.0, 2.0), (3.0, 6.0)], clock)
    job = profile(
        Subject(model=model, batch=torch.ones(2, 3), loss=step_loss), name="v", device="cpu", steps=2, clock=clock
    )
    assert job.forward_factor < 1
    assert job.backward_factor < 1
    # Without hooks: what the layers take, one look at the clock by each of them, and one at the end.
    assert job.workload.forward_s == pytest.approx(4.0 + 2 * 0.25 + 0.25)
    assert job.workload.backward_s == pytest.approx(8.0 + 2 * 0.25 + 0.25)


class Twice(nn.Module):
    """One module, called before and after another."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.outer, self.inner = Slow(clock, 1.0, 2.0), Slow(clock, 4.0, 8.0)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(self.outer(values)))


def test_a_module_that_is_called_twice_is_one_layer_with_the_time_of_both() -> None:
    clock = VirtualClock()
    job = profile(
        Subject(model=Twice(clock), batch=torch.ones(2, 3), loss=step_loss),
        name="v",
        device="cpu",
        steps=1,
        clock=clock,
    ).workload
    assert [(layer.name, layer.forward_s, layer.backward_s) for layer in job.layers] == [
        ("outer", 2.0, 4.0),
        ("inner", 4.0, 8.0),
    ]
    assert names(job) == ["inner.scale", "outer.scale"]


class Functions(nn.Module):
    """Slow functions between, before and after modules."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.a, self.b = Slow(clock, 1.0, 1.0), Slow(clock, 2.0, 2.0)
        self._clock = clock

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = Pretend.apply(self._clock, (10.0, 20.0), values * 1.0)
        values = Pretend.apply(self._clock, (100.0, 200.0), self.a(values))
        return Pretend.apply(self._clock, (1000.0, 2000.0), self.b(values.relu()))


def test_functions_belong_to_the_layer_before_them_in_both_passes() -> None:
    clock = VirtualClock()
    batch = torch.ones(2, 3, requires_grad=True)  # so that autograd goes through the first function too
    job = profile(
        Subject(model=Functions(clock), batch=batch, loss=step_loss), name="v", device="cpu", steps=1, clock=clock
    ).workload
    assert [(layer.name, layer.forward_s, layer.backward_s) for layer in job.layers] == [
        ("a", 111.0, 221.0),
        ("b", 1002.0, 2002.0),
    ]


class Around(nn.Module):
    """Parameters of its own, used before and after those of a module inside it."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.ones(3))
        self.after = nn.Parameter(torch.ones(3))
        self.inside = Slow(clock, 1.0, 2.0)
        self._clock = clock

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = Pretend.apply(self._clock, (4.0, 8.0), values * self.before)
        return Pretend.apply(self._clock, (16.0, 32.0), self.inside(values) * self.after)


def test_a_layer_around_another_has_its_own_time_and_the_order_is_kept() -> None:
    clock = VirtualClock()
    model = nn.Sequential(Around(clock), nn.Identity())
    job = profile(
        Subject(model=model, batch=torch.ones(2, 3), loss=step_loss), name="v", device="cpu", steps=1, clock=clock
    ).workload
    assert names(job) == ["0.after", "0.inside.scale", "0.before"]
    assert {layer.name: (layer.forward_s, layer.backward_s) for layer in job.layers} == {
        "0": (20.0, 40.0),
        "0.inside": (1.0, 2.0),
        "1": (0.0, 0.0),
    }


def test_modules_that_work_in_place_or_do_nothing() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Identity(), nn.Flatten(), nn.Linear(144, 2)
    )
    images = torch.randn(2, 3, 8, 8)
    job = profile(Subject(model=model, batch=images, loss=step_loss), name="cnn", device="cpu", steps=1).workload
    assert names(job) == real_order(model, lambda: step_loss(model, images))
    assert by_layer(job)["1"] == ["1.weight", "1.bias"]


def test_frozen_layers_compute_but_exchange_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    job = profile(Subject(model=model, batch=torch.ones(3, 4), loss=step_loss), name="f", device="cpu", steps=1)
    assert list(by_layer(job.workload)) == ["0", "1", "2"]
    assert names(job.workload) == ["2.bias", "2.weight", "1.bias", "1.weight"]
    assert job.workload.layers[0].backward_s == 0
    assert job.notes == ()


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_layers_belong_to_the_backward_pass(reentrant: bool) -> None:
    clock = VirtualClock()
    inner = virtual([(1.0, 2.0), (4.0, 8.0)], clock)
    last = Slow(clock, 16.0, 32.0)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = inner, last

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.last(checkpoint(self.inner, values, use_reentrant=reentrant))

    batch = torch.ones(2, 3, requires_grad=True)
    model = Checkpointed()
    job = profile(Subject(model=model, batch=batch, loss=step_loss), name="c", device="cpu", steps=1, clock=clock)
    assert job.workload.forward_s == 21.0
    # What is not re-entrant stops as soon as it has all that was saved: there, before the second layer takes its time.
    assert job.workload.backward_s == 42.0 + (5.0 if reentrant else 1.0)
    assert names(job.workload) == ["last.scale", "inner.1.scale", "inner.0.scale"]


def test_the_embedded_gpt() -> None:
    model = SmallGpt(gpt_shape("tiny"))
    tokens = torch.randint(256, (2, 33))

    def loss(model: nn.Module, batch: object) -> torch.Tensor:
        assert isinstance(model, SmallGpt)
        assert isinstance(batch, dict)
        return model.loss(batch["tokens"])

    job = profile(Subject(model=model, batch={"tokens": tokens}, loss=loss), name="gpt", device="cpu", steps=1).workload
    assert names(job) == real_order(model, lambda: model.loss(tokens))
    assert job.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert by_layer(job)["tokens"] == ["positions.weight", "tokens.weight"]
    assert by_layer(job)["head"] == []


def test_the_model_is_left_as_it_was() -> None:
    model, _ = profiled_known()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in model.parameters())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    again = weakref.ref(model)
    del model, module
    gc.collect()
    assert again() is None


def test_a_hook_that_raises_leaves_no_hooks() -> None:
    model = nn.Linear(2, 2)

    def loss(model: nn.Module, batch: object) -> torch.Tensor:
        if model._forward_hooks:
            raise RuntimeError("no more")
        return step_loss(model, batch)

    with pytest.raises(RuntimeError, match="no more"):
        profile(Subject(model=model, batch=torch.ones(1, 2), loss=loss), name="r", device="cpu")
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_two_dtypes_are_told() -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 1))

    def loss(model: nn.Module, batch: object) -> torch.Tensor:
        assert isinstance(model, nn.Sequential)
        return model[1](model[0](batch).float()).sum()

    batch = torch.ones(2, 4, dtype=torch.bfloat16)
    measured = profile(Subject(model=model, batch=batch, loss=loss), name="d", device="cpu", steps=1)
    assert measured.workload.dtype == torch.bfloat16
    assert measured.notes == ("5 of 25 parameters have another dtype than bfloat16.",)


@pytest.mark.parametrize(
    ("batch", "loss", "told"),
    [
        ("text", step_loss, "the batch holds no tensor"),
        (
            torch.ones(2, 2),
            lambda model, batch: 3.0,
            "the loss must be a tensor with one number and a gradient, got 3.0",
        ),
        (torch.ones(2, 2), lambda model, batch: model(batch), r"got one of shape \[2, 2\] with a gradient"),
        (torch.ones(2, 2), lambda model, batch: batch.sum(), r"got one of shape \[\] without a gradient"),
        (
            torch.ones(2, 2, requires_grad=True),
            lambda model, batch: batch.sum(),
            "no parameter got a gradient",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(batch: object, loss: Callable[..., torch.Tensor], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        profile(Subject(model=nn.Linear(2, 2), batch=batch, loss=loss), name="x", device="cpu", steps=1)


def test_no_steps_and_compiled_models_are_refused() -> None:
    subject = Subject(model=nn.Linear(2, 2), batch=torch.ones(1, 2), loss=step_loss)
    with pytest.raises(UsageError, match="must be >= 1, got 0"):
        profile(subject, name="x", device="cpu", steps=0)
    compiled = torch.compile(nn.Linear(2, 2))
    assert isinstance(compiled, nn.Module)
    with pytest.raises(UsageError, match=r"without torch\.compile"):
        profile(Subject(model=compiled, batch=torch.ones(1, 2), loss=step_loss), name="x", device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="no CUDA device"):
        profile(Subject(model=nn.Linear(2, 2), batch=torch.ones(1, 2), loss=step_loss), name="x", device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64 * 62 * 62, 10))
    images = torch.randn(8, 3, 64, 64)
    measured = profile(Subject(model=model, batch=images, loss=step_loss), name="cnn", device="cuda", steps=5)
    job = measured.workload
    assert names(job) == real_order(model, lambda: step_loss(model, images.cuda()))
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in job.layers)
    assert 0 < job.compute_s < 1
    assert measured.ready_error_s < job.backward_s
    assert torch.cuda.get_device_name() in job.source
