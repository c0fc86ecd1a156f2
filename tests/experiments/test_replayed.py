"""Replayed compute: passes take their time, gradients have their shapes and come in order, under DDP and laconic."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import UsageError
from laconic.experiments.replayed import NoUpdate, ReplayedLayer, ReplayedModel, SleptCompute
from laconic.workload import Layer, TensorShape, Workload, workload


def layer(name: str, time_s: float, *shapes: tuple[int, ...]) -> Layer:
    tensors = tuple(TensorShape(name=f"{name}.{index}", shape=shape) for index, shape in enumerate(shapes))
    return Layer(name=name, forward_s=time_s, backward_s=2 * time_s, tensors=tensors)


def job(time_s: float = 0.002, dtype: torch.dtype = torch.float32) -> Workload:
    layers = (
        layer("stem", time_s, (5, 3), (5,), (2, 2), (7,), (1,)),
        layer("pool", time_s),
        layer("block.0", time_s, (11, 13)),
        layer("block.1", time_s, (), (3, 1), (4,)),
        layer("head", time_s, (17,), (2, 3, 5)),
        layer("loss", time_s),
    )
    return Workload(name="job", batch=1, layers=layers, source="made up", dtype=dtype)


class PretendedThread:
    """A clock that moves only when the thread works, waits or sleeps; sleeps are a little too long."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.busy_s = 3.0
        self.sleeps: list[float] = []

    def now(self) -> float:
        return self.now_s

    def busy(self) -> float:
        return self.busy_s

    def sleep(self, time_s: float) -> None:
        self.sleeps.append(time_s)
        self.now_s += time_s + 0.0002

    def work(self, time_s: float) -> None:
        self.now_s += time_s
        self.busy_s += time_s

    def wait(self, time_s: float) -> None:
        self.now_s += time_s


@pytest.fixture
def pretended() -> PretendedThread:
    return PretendedThread()


@pytest.fixture
def compute(pretended: PretendedThread) -> SleptCompute:
    return SleptCompute(clock=pretended, busy_s=pretended.busy, sleep=pretended.sleep)


def test_overhead_and_long_sleeps_do_not_add_up(pretended: PretendedThread, compute: SleptCompute) -> None:
    for _ in range(100):
        pretended.work(0.0005)
        compute.spend(0.003)
    assert pretended.now_s == pytest.approx(100 + 100 * 0.003 + 0.0002)


def test_tiny_layers_are_caught_up_with(pretended: PretendedThread, compute: SleptCompute) -> None:
    for _ in range(50):
        pretended.work(0.0001)
        compute.spend(0.00001)
        pretended.work(0.0001)
        compute.spend(0.003)
    assert pretended.now_s == pytest.approx(100 + 50 * 0.00301 + 0.0002)


def test_a_sleep_that_was_much_too_long_is_caught_up_with(pretended: PretendedThread) -> None:
    compute = SleptCompute(clock=pretended, busy_s=pretended.busy, sleep=lambda time_s: pretended.sleep(time_s + 0.02))
    for _ in range(8):
        compute.spend(0.003)
    assert len(pretended.sleeps) == 2
    assert pretended.now_s == pytest.approx(100 + 8 * 0.003 + 0.0202)


def test_waiting_moves_everything_after_it(pretended: PretendedThread, compute: SleptCompute) -> None:
    for _ in range(10):
        pretended.wait(0.002)
        pretended.work(0.0003)
        compute.spend(0.003)
    assert pretended.now_s == pytest.approx(100 + 10 * (0.002 + 0.003) + 0.0002)


def test_work_that_outlasts_a_layer_is_not_caught_up_with(pretended: PretendedThread, compute: SleptCompute) -> None:
    pretended.work(0.5)
    compute.spend(0.003)
    assert pretended.sleeps == []
    for _ in range(10):
        compute.spend(0.003)
    assert pretended.now_s == pytest.approx(100 + 0.5 - 0.001 + 10 * 0.003 + 0.0002)


def test_a_restart_forgets_what_came_before(pretended: PretendedThread, compute: SleptCompute) -> None:
    compute.spend(0.003)
    pretended.work(0.002)
    compute.restart()
    compute.spend(0.003)
    assert pretended.sleeps == pytest.approx([0.003, 0.003])


def test_another_thread_begins_its_own_slots(pretended: PretendedThread, compute: SleptCompute) -> None:
    pretended.work(0.002)
    other = threading.Thread(target=lambda: compute.spend(0.003))
    other.start()
    other.join()
    assert pretended.sleeps == pytest.approx([0.003])


def test_a_pass_takes_as_long_as_the_workload_says() -> None:
    model = ReplayedModel(job())
    model().backward()
    model.zero_grad()
    began_s = time.perf_counter()
    loss = model()
    middle_s = time.perf_counter()
    loss.backward()
    ended_s = time.perf_counter()
    assert middle_s - began_s >= model.workload.forward_s - 1e-6
    assert ended_s - began_s >= model.workload.compute_s - 1e-6
    # Loose: other processes use the cores too.
    assert ended_s - began_s < 3 * model.workload.compute_s + 0.5


def test_a_hook_that_waits_before_a_layer_delays_the_pass() -> None:
    model = ReplayedModel(job())
    for replayed in model.layers:
        replayed.register_forward_pre_hook(lambda *_: time.sleep(0.01))
    began_s = time.perf_counter()
    model().backward()
    assert time.perf_counter() - began_s >= model.workload.compute_s + 6 * 0.01 - 1e-3


def note_arrivals(model: ReplayedModel) -> list[str]:
    """A list to which every gradient adds its tensor's name when it is there."""
    arrived: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, tensor=model.tensor_names[name]: arrived.append(tensor))
    return arrived


def test_gradients_arrive_in_the_order_of_the_workload() -> None:
    model = ReplayedModel(job(time_s=0.0))
    arrived = note_arrivals(model)
    for _ in range(2):
        arrived.clear()
        model(torch.zeros(3)).backward()
        assert arrived == [tensor.name for tensor in model.workload.tensors]
        model.zero_grad()


def test_gradients_arrive_while_earlier_layers_still_compute() -> None:
    model = ReplayedModel(job())
    arrived_s: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, tensor=model.tensor_names[name]: arrived_s.__setitem__(tensor, time.perf_counter())
        )
    began_s = time.perf_counter()
    model().backward()
    # Forward takes 12 ms, each layer's backward 4 ms.
    for tensor, num_layers in (("head.0", 2), ("block.1.0", 3), ("block.0.0", 4), ("stem.0", 6)):
        assert arrived_s[tensor] - began_s >= 0.012 + num_layers * 0.004 - 1e-6
    assert arrived_s["head.0"] < arrived_s["block.0.0"] < arrived_s["stem.0"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_have_the_shapes_of_the_workload_and_are_not_zero(dtype: torch.dtype) -> None:
    model = ReplayedModel(job(time_s=0.0, dtype=dtype))
    model().backward()
    shapes = {tensor.name: tensor.shape for tensor in model.workload.tensors}
    names = model.tensor_names
    assert sorted(names.values()) == sorted(shapes)
    for name, parameter in model.named_parameters():
        assert name.rpartition(".")[2] == names[name].replace(".", "/")
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape == shapes[names[name]]
        assert parameter.grad.dtype == dtype
        assert parameter.grad.all()


def test_gradients_need_no_memory_and_never_grow() -> None:
    model = ReplayedModel(job(time_s=0.0))
    parameters = list(model.parameters())
    seen = []
    for _ in range(3):  # without zero_grad()
        model().backward()
        seen.append([parameter.grad.clone() for parameter in parameters if parameter.grad is not None])
    assert len({parameter.grad.data_ptr() for parameter in parameters if parameter.grad is not None}) == 1
    for later in seen[1:]:
        assert all(map(torch.equal, seen[0], later))


def test_frozen_parameters_get_none() -> None:
    model = ReplayedModel(job(time_s=0.0))
    frozen, *others = model.parameters()
    frozen.requires_grad_(False)
    model().backward()
    assert frozen.grad is None
    assert all(parameter.grad is not None for parameter in others)


def test_no_backward_pass_without_gradients() -> None:
    with torch.no_grad():
        assert not ReplayedModel(job(time_s=0.0))().requires_grad


def test_each_layer_is_a_module_with_its_parameters() -> None:
    model = ReplayedModel(job())
    assert all(isinstance(replayed, ReplayedLayer) for replayed in model.layers)
    assert [len(list(replayed.parameters())) for replayed in model.layers] == [5, 0, 1, 3, 2, 0]
    assert not list(model.buffers())


def test_models_share_storage_but_not_gradients() -> None:
    first = ReplayedModel(job(time_s=0.0), seed=3)
    second = ReplayedModel(first.workload, storage=first)
    third = ReplayedModel(first.workload, storage=second)
    for ours, theirs in zip(first.parameters(), third.parameters(), strict=True):
        assert ours is not theirs
        assert ours.data_ptr() == theirs.data_ptr()
    first().backward()
    assert all(parameter.grad is None for parameter in third.parameters())
    third().backward()
    for ours, theirs in zip(first.parameters(), third.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_contenders_that_share_storage_do_not_see_each_others_writes() -> None:
    """Under `priority` updates wait between turns, in which others, such as `local_sgd`, write to the same memory."""

    def one_rank(transport: InProcessTransport) -> list[int]:
        model = ReplayedModel(job(time_s=0.0))
        other = ReplayedModel(model.workload, storage=model)
        optimizer = NoUpdate(model.parameters())
        strategy = "bsp / all_reduce / none / priority(partition_bytes=1KiB)"
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for _ in range(3):
                for _ in range(5):
                    model().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                session.wait()
                with torch.no_grad():
                    for parameter in other.parameters():
                        parameter.copy_(parameter + 0.0)
        return [parameter._version for parameter in model.parameters()]

    for versions in laconic.InProcessCluster(2, timeout_s=20).run(one_rank):
        assert len(set(versions)) == 1, "each counts its own writes alone"


def test_parameters_of_one_model_do_not_overlap() -> None:
    model = ReplayedModel(job())
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(number)
    for number, parameter in enumerate(model.parameters()):
        assert (parameter == number).all()


def test_a_model_can_be_moved_and_cast() -> None:
    model = ReplayedModel(job(time_s=0.0))
    sharing = ReplayedModel(model.workload, storage=model)
    assert model.to("cpu") is model
    assert next(model.parameters()).data_ptr() == next(sharing.parameters()).data_ptr()
    model.double()
    model().backward()
    sharing().backward()
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.float64}
    assert {parameter.grad.dtype for parameter in sharing.parameters() if parameter.grad is not None} == {torch.float32}


def test_what_cannot_be_shared_or_named_is_refused() -> None:
    model = ReplayedModel(job())
    with pytest.raises(UsageError, match="device and seed have no effect with storage"):
        ReplayedModel(job(), storage=model, seed=1)
    with pytest.raises(UsageError, match=r'"job" cannot use the storage of one of "job": their tensors differ'):
        ReplayedModel(job(dtype=torch.float64), storage=model)
    for names in (("training",), ("a.b", "a/b")):
        tensors = tuple(TensorShape(name=name, shape=(2,)) for name in names)
        one = Layer(name="one", forward_s=0.0, backward_s=0.0, tensors=tensors)
        with pytest.raises(UsageError, match=f'tensor "{names[-1]}" cannot be replayed'):
            ReplayedModel(Workload(name="odd", batch=1, layers=(one,), source="made up"))


def test_a_step_that_changes_nothing_still_calls_hooks() -> None:
    model = ReplayedModel(job(time_s=0.0))
    optimizer = NoUpdate(model.parameters())
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model().backward()
    assert optimizer.step() is None
    assert optimizer.step(lambda: 2.5) == 2.5
    assert called == ["before", "after"] * 2
    assert all(map(torch.equal, before, model.parameters()))
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(UsageError, match="set_to_none=False would zero"):
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("strategy", ["bsp / all_reduce / none / wfbp", "bsp / all_reduce / bf16 / fusion(1KiB)"])
def test_under_laconic(strategy: str) -> None:
    def one_rank(transport: InProcessTransport) -> list[torch.Tensor]:
        model = ReplayedModel(job(time_s=0.0005), seed=transport.rank)
        optimizer = NoUpdate(model.parameters())
        with laconic.attach(model, optimizer, strategy, transport=transport) as session:
            for _ in range(3):
                with session.accumulate():
                    model().backward()
                optimizer.zero_grad()
                before = session.traffic.sent_bytes("payload")
                model().backward()
                assert session.traffic.sent_bytes("payload") - before == session.predicted_bytes_per_step() > 0
                means = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
                optimizer.step()
                optimizer.zero_grad()
        return means

    own = []
    for rank in range(2):
        model = ReplayedModel(job(time_s=0.0), seed=rank)
        model().backward()
        own.append([parameter.grad for parameter in model.parameters()])
    for means in laconic.InProcessCluster(2, timeout_s=10).run(one_rank):
        for mean, left, right in zip(means, *own, strict=True):
            torch.testing.assert_close(mean, (left + right) / 2, rtol=0.02, atol=0.02)


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.usefixtures("process_group")
def test_under_ddp(views: bool) -> None:
    model = ReplayedModel(job(time_s=0.0005))
    expected = ReplayedModel(model.workload)
    expected().backward()
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=views)
    optimizer = NoUpdate(model.parameters())
    for _ in range(3):
        with wrapped.no_sync():
            wrapped(torch.zeros(1)).sum().backward()
        optimizer.zero_grad()
        wrapped(torch.zeros(1)).sum().backward()
        for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad)
        optimizer.step()
        optimizer.zero_grad()


def test_a_known_model_is_replayed_with_its_own_names() -> None:
    model = ReplayedModel(workload("resnet50").scaled(compute_s=0.02))
    assert next(iter(model.tensor_names.items())) == ("layers.0.conv1/weight", "conv1.weight")
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    model().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu() -> None:
    made, moved = ReplayedModel(job(), device="cuda"), ReplayedModel(job()).to("cuda")
    for model in (made, moved, ReplayedModel(job(), storage=moved)):
        arrived = note_arrivals(model)
        began_s = time.perf_counter()
        model().backward()
        took_s = time.perf_counter() - began_s
        assert took_s >= model.workload.compute_s - 1e-6
        assert arrived == [tensor.name for tensor in model.workload.tensors]
        assert all(parameter.grad is not None and parameter.grad.is_cuda for parameter in model.parameters())
