"""Sinks for trackers: what arrives there, what happens without the package, and what happens when one fails."""

from __future__ import annotations

import socket
import sys
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import laconic
from laconic import sinks
from laconic.core.event import Event, EventSink
from laconic.errors import LaconicError, LaconicWarning

STEPS = 5


def train(transport: laconic.Transport, events: EventSink | None) -> int:
    """A few steps on one rank; the payload bytes it has sent."""
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = "bsp / all_reduce / powersgd(rank=1) + error_feedback"
    with laconic.attach(model, optimizer, strategy, transport=transport, events=events) as session:
        for _ in range(STEPS):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return session.traffic.sent_bytes()


def trained(sink: EventSink) -> int:
    """Train on two ranks, of which the first writes to the sink."""
    ranks = laconic.InProcessCluster(2, timeout_s=10)
    return ranks.run(lambda transport: train(transport, sink if transport.rank == 0 else None))[0]


class Collected(sinks.TrackerSink):
    """Keeps what is sent, and the thread that sent it."""

    def __init__(self) -> None:
        self.sent: list[sinks.StepValues] = []
        self.threads: set[int] = set()
        super().__init__()

    def send(self, values: sinks.StepValues) -> None:
        self.sent.append(values)
        self.threads.add(threading.get_ident())


class Broken(Collected):
    """Fails in step 1."""

    def send(self, values: sinks.StepValues) -> None:
        if values.step == 1:
            raise ConnectionError("the server\nhas gone")
        super().send(values)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """Stand in for a package that is large or talks to a server."""

    def install(name: str, **contents: object) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return install


def test_a_training_gives_every_step_once_and_all_its_bytes() -> None:
    with Collected() as sink:
        sent_bytes = trained(sink)
    assert [values.step for values in sink.sent] == list(range(STEPS))
    assert sum(values.values["sent_bytes"] for values in sink.sent) == sent_bytes > 0
    for values in sink.sent:
        assert values.rank == 0
        assert values.values["step_s"] >= values.values["wait_s"] >= 0
        assert values.values["exchange_s"] > 0
    assert sink.sent[0].values["residual_norm"] > 0
    assert 0 < sink.sent[0].values["relative_error"] < 1
    assert threading.get_ident() not in sink.threads


def test_a_tracker_that_fails_is_told_once_and_training_goes_on() -> None:
    log = laconic.EventList()
    with pytest.warns(LaconicWarning) as told, Broken() as sink:
        trained(laconic.EventTee(sink, log))
    (warning,) = told
    assert str(warning.message) == (
        "Broken failed in step 1 and ignores further events; training continues. ConnectionError: the server has gone"
    )
    assert isinstance(sink.failure, ConnectionError)
    assert [values.step for values in sink.sent] == [0]
    assert sum(event.kind == "step" for event in log.events) == STEPS


def test_a_failure_ends_the_run_where_warnings_are_errors() -> None:
    sink = Broken()
    with warnings.catch_warnings():
        warnings.simplefilter("error", LaconicWarning)
        for number in range(4):
            sink.write(Event("step", 0.0, 0, number, 1.0))
        with pytest.raises(LaconicWarning, match="Broken failed in step 1"):
            sink.close()
    sink.close()


def test_a_closed_sink_takes_nothing() -> None:
    sink = Collected()
    sink.close()
    sink.close()
    with pytest.raises(LaconicError, match="the Collected is closed"):
        sink.write(Event("step", 0.0, 0, 0, 1.0))


@pytest.mark.parametrize(
    ("module", "package", "make"),
    [
        ("torch.utils.tensorboard", "tensorboard", lambda: sinks.TensorBoardSink("anywhere")),
        ("wandb", "wandb", sinks.WandbSink),
        ("mlflow", "mlflow", sinks.MlflowSink),
        ("prometheus_client", "prometheus_client", sinks.PrometheusSink),
    ],
)
def test_without_the_package_it_says_what_to_install(
    module: str, package: str, make: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(LaconicError, match=f'needs {package}. Install it with "pip install {package}"'):
        make()


def test_tensorboard_shows_every_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with sinks.TensorBoardSink(tmp_path) as sink:
        sent_bytes = trained(sink)
    shown = EventAccumulator(str(tmp_path))
    shown.Reload()
    assert {"laconic/step_s", "laconic/wait_s", "laconic/exchange_s"} <= set(shown.Tags()["scalars"])
    assert [point.step for point in shown.Scalars("laconic/step_s")] == list(range(STEPS))
    assert sum(point.value for point in shown.Scalars("laconic/sent_bytes")) == sent_bytes


def test_tensorboard_says_where_it_cannot_write(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    with pytest.raises(LaconicError, match=r"TensorBoardSink: cannot write to .*file/tb: Not a directory"):
        sinks.TensorBoardSink(tmp_path / "file" / "tb")


def test_prometheus_serves_the_last_step() -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with sinks.PrometheusSink(port=port) as sink:
        trained(sink)
        with pytest.raises(LaconicError, match=f"cannot listen on 127.0.0.1:{port}"):
            sinks.PrometheusSink(port=port)
        served: dict[str, str] = {}
        until_s = time.monotonic() + 10
        # The last two steps are sent when the sink is closed.
        while float(served.get('laconic_steps_total{rank="0"}', 0)) < STEPS - 2 and time.monotonic() < until_s:
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
            served = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert float(served['laconic_steps_total{rank="0"}']) == STEPS - 2
    assert float(served['laconic_sent_bytes_total{rank="0"}']) > 0
    assert float(served['laconic_step_seconds{rank="0"}']) > 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_prometheus_gives_its_names_back() -> None:
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    for _ in range(2):
        with sinks.PrometheusSink(registry=registry) as sink:
            trained(sink)
    assert not list(registry.collect())


def test_wandb_gets_rows_with_an_axis_of_their_own(recording: Callable[..., ModuleType]) -> None:
    rows: list[tuple[dict[str, float], bool]] = []
    axes: list[tuple[str, str | None]] = []
    run = SimpleNamespace(
        define_metric=lambda name, step_metric=None: axes.append((name, step_metric)),
        log=lambda data, commit: rows.append((data, commit)),
    )
    wandb = recording("wandb", run=None)
    with pytest.raises(LaconicError, match=r"Call wandb\.init\(\) first"):
        sinks.WandbSink()
    wandb.run = run
    with sinks.WandbSink() as sink:
        trained(sink)
    with sinks.WandbSink(run, commit=False) as sink:
        trained(sink)
    assert axes[:2] == [("laconic/step", None), ("laconic/*", "laconic/step")]
    assert [row["laconic/step"] for row, _ in rows] == [*range(STEPS), *range(STEPS)]
    assert [commit for _, commit in rows] == [True] * STEPS + [False] * STEPS
    assert rows[0][0]["laconic/step_s"] > 0


def test_mlflow_gets_metrics_for_the_run_of_the_thread_that_made_the_sink(
    recording: Callable[..., ModuleType],
) -> None:
    logged: list[tuple[dict[str, float], int, str]] = []
    mlflow = recording(
        "mlflow",
        active_run=lambda: None,
        log_metrics=lambda metrics, step, run_id: logged.append((metrics, step, run_id)),
    )
    with pytest.raises(LaconicError, match=r"Call mlflow\.start_run\(\) first"):
        sinks.MlflowSink()
    mlflow.active_run = lambda: SimpleNamespace(info=SimpleNamespace(run_id="abc"))
    with sinks.MlflowSink() as sink:
        trained(sink)
    with sinks.MlflowSink("def") as sink:
        trained(sink)
    assert [(step, run_id) for _, step, run_id in logged] == [
        *((step, "abc") for step in range(STEPS)),
        *((step, "def") for step in range(STEPS)),
    ]
    assert logged[0][0]["laconic/step_s"] > 0
