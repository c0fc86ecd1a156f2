"""laconic's work has names in torch's profiler, by bucket; without a profiler there is nothing to pay."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd import profiler

import laconic
from laconic.runtime.profiler_range import profiler_range

CPU = torch.device("cpu")
STRATEGY = "bsp / all_reduce / powersgd(rank=1) + error_feedback / wfbp"


def train(transport: laconic.Transport, steps: int = 3) -> None:
    torch.manual_seed(transport.rank)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with laconic.attach(model, optimizer, STRATEGY, transport=transport):
        for _ in range(steps):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def all_threads() -> torch._C._profiler._ExperimentalConfig:
    return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)


def test_the_profiler_shows_every_phase_of_every_bucket() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, experimental_config=all_threads()) as seen:
        laconic.InProcessCluster(2, timeout_s=10).run(train)
    found = {entry.key: entry.count for entry in seen.key_averages() if entry.key.startswith("laconic ")}
    for phase in ("encode", "exchange", "decode", "wait"):
        for bucket in (0, 1):
            assert found[f"laconic {phase} bucket {bucket}"] >= 2 * 2, found


def test_ranges_hold_the_operations_inside_them() -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, experimental_config=all_threads()) as seen:
        laconic.InProcessCluster(2, timeout_s=10).run(train)
    encodes = [event for event in seen.events() if event.name == "laconic encode bucket 0"]
    assert any(child.name.startswith("aten::") for event in encodes for child in event.cpu_children)


def test_without_a_profiler_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> object:
        raise AssertionError(f"{name} was recorded, and nobody looks")

    monkeypatch.setattr(torch.profiler, "record_function", refuse)
    assert profiler._is_profiler_enabled is False
    assert isinstance(profiler_range("encode", "bucket 0", CPU), nullcontext)
    laconic.InProcessCluster(2, timeout_s=10).run(train)


def test_work_on_a_gpu_is_named_for_nsight(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without torch's profiler; the NVTX library is replaced, because this needs no GPU."""
    named: list[str] = []

    def named_range(name: str) -> nullcontext[None]:
        named.append(name)
        return nullcontext()

    if not hasattr(torch._C, "_nvtx"):
        with profiler_range("encode", "bucket 7", torch.device("cuda", 0)):
            assert named == [], "a torch without NVTX has no ranges, and no error"
    monkeypatch.setattr("laconic.runtime.profiler_range._HAS_NVTX", True)
    monkeypatch.setattr(torch.cuda.nvtx, "range", named_range)
    with profiler_range("decode", "bucket 7", torch.device("cuda", 0)):
        pass
    seen = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with seen, profiler_range("wait", "bucket 7", torch.device("cuda", 0)):
        pass
    assert named == ["laconic decode bucket 7", "laconic wait bucket 7"]
    assert [entry.key for entry in seen.key_averages() if "laconic" in entry.key] == ["laconic wait bucket 7"]
