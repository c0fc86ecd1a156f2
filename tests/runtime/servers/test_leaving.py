"""How a rank leaves its servers: after a failure it says no goodbye, waits for nothing and keeps the first error."""

from __future__ import annotations

import threading
import time

import pytest

import laconic
from laconic.core.in_process import InProcessTransport
from laconic.errors import PeerLost
from tests.core.sockets import nothing_left
from tests.runtime.replicas import mlp, sgd
from tests.runtime.servers.one_worker import steps

pytestmark = pytest.mark.timeout(60)
STRATEGIES = ["bsp / parameter_server", "bsp / parameter_server / none / wfbp", "asp / parameter_server"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_detaching_after_a_server_is_lost_keeps_the_first_error(strategy: str) -> None:
    """`finally: session.detach()`, as most training loops have it."""
    left_s: list[float] = []
    all_have_trained = threading.Barrier(3)

    def one(transport: InProcessTransport) -> PeerLost:
        model = mlp()
        optimizer = sgd(model)
        session = laconic.attach(model, optimizer, strategy, transport=transport)
        pool = session._pool
        assert pool is not None
        first: PeerLost | None = None
        try:
            steps(model, optimizer, 2, rank=transport.rank)
            all_have_trained.wait(10)
            if transport.rank == 0:
                for server in pool._started:
                    server.stop(at_once=True)
            with pytest.raises(PeerLost) as caught:
                steps(model, optimizer, 200, first=2, rank=transport.rank)
            first = caught.value
        finally:
            began_s = time.monotonic()
            pool.leave()
            pool.abandon()
            left_s.append(time.monotonic() - began_s)
            session.detach()
        return first

    with nothing_left():
        errors = laconic.InProcessCluster(3, timeout_s=10).run(one)
    for error in errors:
        assert "server" in str(error)
        assert "rank 0" in str(error) or "before the end of training" in str(error)
        assert "has already left" not in str(error)
        assert "has detached" not in str(error)
    assert max(left_s) < 2


def test_the_second_request_after_a_loss_tells_of_the_first() -> None:
    def one(transport: InProcessTransport) -> None:
        model = mlp()
        optimizer = sgd(model)
        session = laconic.attach(model, optimizer, "asp / parameter_server", transport=transport)
        pool = session._pool
        assert pool is not None
        assert pool.client is not None
        pool._started[0].stop(at_once=True)
        with pytest.raises(PeerLost, match="pull of bucket 0 on rank 0 cannot finish") as first:
            pool.client.pull(0)
        with pytest.raises(PeerLost) as second:
            pool.client.leave()
        assert str(second.value) == str(first.value)
        session.detach()

    with nothing_left():
        laconic.InProcessCluster(1, timeout_s=10).run(one)


def test_an_optimizer_that_does_not_get_its_state_back_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def one(transport: InProcessTransport) -> None:
        model = mlp()
        optimizer = sgd(model)
        session = laconic.attach(model, optimizer, "asp / parameter_server", transport=transport)
        assert session._pool is not None
        session._pool._started[0].stop(at_once=True)
        with pytest.raises(PeerLost):
            steps(model, optimizer, 1)
        session.detach()

    laconic.InProcessCluster(1, timeout_s=10).run(one)
    assert "rank 0 detaches after a failure, so its optimizer does not get back the state that servers" in caplog.text


def test_a_rank_that_waits_for_goodbyes_learns_of_a_failure() -> None:
    def one(transport: InProcessTransport) -> str:
        model = mlp()
        session = laconic.attach(model, sgd(model), "bsp / parameter_server(shards=1)", transport=transport)
        if transport.rank == 1:
            time.sleep(0.5)
            session.__exit__(ValueError, ValueError("the data loader broke"), None)
            return ""
        began_s = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            session.detach()
        assert time.monotonic() - began_s < 5
        return str(caught.value)

    with nothing_left():
        error = laconic.InProcessCluster(2, timeout_s=10).run(one)[0]
    assert "rank 1" in error
    assert "the data loader broke" in error


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_clean_end_says_goodbye(strategy: str) -> None:
    def one(transport: InProcessTransport) -> None:
        model = mlp()
        optimizer = sgd(model)
        session = laconic.attach(model, optimizer, strategy, transport=transport)
        steps(model, optimizer, 2, rank=transport.rank)
        session.detach()
        assert session._pool is not None
        session._pool.abandon()

    with nothing_left():
        laconic.InProcessCluster(3, timeout_s=10).run(one)
