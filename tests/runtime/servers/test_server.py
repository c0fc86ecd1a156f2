"""A server that is spoken to over sockets: who may come, what it refuses, and how a job ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from laconic.core.caller import Caller
from laconic.core.listener import Listener
from laconic.errors import CommunicationError
from laconic.runtime.servers.protocol import (
    BYE,
    CONFIGURE,
    JOIN,
    MISSING,
    PULL,
    PUSH,
    REDUCE,
    REST,
    RESTORE,
    STATE,
)
from laconic.runtime.servers.server import Server
from tests.core.sockets import LOCAL, TOKEN, eventually, nothing_left
from tests.runtime.servers.hand_made import BUCKET, SGD, configuration

ASP, BSP = "asp / parameter_server", "bsp / parameter_server"
START = torch.arange(float(BUCKET.numel))
STEP = json.dumps({"step": 0, "groups": [SGD], "unused": []})
SUM = json.dumps({"step": 0, "round": 0, "decoded": True})


class Job:
    """A service on a socket, and callers that have joined it."""

    def __init__(self, service: Server, listener: Listener, strategy: str, world_size: int, timeout_s: float) -> None:
        self.service = service
        self.listener = listener
        self.callers = [self.caller(rank) for rank in range(world_size)]
        held = strategy.startswith(("asp", "ssp"))
        groups = {"optimizer": "SGD", "groups": [SGD]} if held else {}
        about = configuration(strategy, world_size, timeout_s=timeout_s, **groups)  # type: ignore[arg-type]
        for caller in self.callers:
            caller.call(JOIN, note="this job").wait()
        self.callers[0].call(CONFIGURE, note=about.write()).wait()
        if held:
            with pytest.raises(CommunicationError, match="holds no parameters of bucket 0"):
                self.callers[0].call(PULL).wait()
            self.callers[0].call(RESTORE, tensors=[START], note="[]").wait()

    def caller(self, rank: int) -> Caller:
        return Caller(self.listener.address, token=TOKEN, rank=rank, timeout_s=10)

    def values(self) -> torch.Tensor:
        return self.callers[0].call(PULL).frame.tensors[0]


@contextmanager
def job(strategy: str = ASP, world_size: int = 2, timeout_s: float = 60.0) -> Iterator[Job]:
    with nothing_left():
        service = Server("server 7")
        with Listener(service, address=LOCAL, token=TOKEN, name="server 7") as listener:
            found = Job(service, listener, strategy, world_size, timeout_s)
            try:
                yield found
            finally:
                for caller in found.callers:
                    caller.close()
        service.finished.set()


NONSENSE = [
    (99, 0, STEP, [], "knows no request of kind 99"),
    (REDUCE, 0, SUM, [START], "forms no sums of bucket 0"),
    (PUSH, 5, STEP, [START], "holds no parameters of bucket 5"),
    (PUSH, 0, "", [START], "not JSON"),
    (PUSH, 0, STEP, [START[:3]], "a payload of rank 1 has 12 bytes, expected 44"),
    (PUSH, 0, STEP, [], "a payload of rank 1 has 0 bytes"),
    (STATE, 3, "", [], "has no bucket 3"),
    (RESTORE, 0, "{", [], "names of a saved state are not JSON"),
    (RESTORE, 0, "[1]", [], "must name its fields"),
    (RESTORE, 0, "[]", [START[:3]], "a bucket of 11 torch.float32 parameters was sent 3"),
    (RESTORE, 0, "[]", [], "has 0 fields and 0 tensors"),
    (RESTORE, 5, "[]", [START], "has no bucket 5"),
    (CONFIGURE, 0, "[]", [], "must be a JSON object"),
    (CONFIGURE, 0, configuration("bsp / parameter_server", 2).write(), [], "already serves a job"),
    (CONFIGURE, 0, configuration("asp / parameter_server", 2).write(), [], "another kind of job"),
    (CONFIGURE, 0, configuration("bsp / nonsense", 2).write(), [], "nonsense"),
    (JOIN, 0, "another job", [], "serves another job"),
]


@pytest.mark.parametrize(("kind", "key", "note", "tensors", "error"), NONSENSE, ids=lambda value: str(value)[:24])
def test_nonsense_is_answered_with_an_error_and_changes_nothing(
    kind: int, key: int, note: str, tensors: list[torch.Tensor], error: str
) -> None:
    with job() as one:
        with pytest.raises(CommunicationError, match=error):
            one.callers[1].call(kind, key, tensors, note).wait()
        assert torch.equal(one.values(), START)
        one.callers[1].call(PUSH, 0, [torch.ones(BUCKET.numel)], STEP).wait()
        torch.testing.assert_close(one.values(), START - 0.25)


def test_a_rank_that_is_none_and_one_that_has_not_joined() -> None:
    with job() as one:
        with one.caller(2) as outsider, pytest.raises(CommunicationError, match="serves 2 ranks, not rank 2"):
            outsider.call(PUSH, 0, [START], STEP).wait()
        time.sleep(0.05)
        assert one.service.lost is None, "nobody misses it"
        assert torch.equal(one.values(), START)
    listener = Listener(Server("server 7"), address=LOCAL, token=TOKEN)
    with listener, Caller(listener.address, token=TOKEN, rank=0, timeout_s=10) as early:
        with pytest.raises(CommunicationError, match="rank 0 has not joined"):
            early.call(PULL).wait()
        early.call(JOIN, note="a job").wait()
        with pytest.raises(CommunicationError, match="has not been configured by rank 0 yet"):
            early.call(PULL).wait()


def test_another_job_is_turned_away_and_does_no_harm() -> None:
    with job() as one:
        for rank in (0, 1):
            with one.caller(rank) as other, pytest.raises(CommunicationError, match="serves another job"):
                other.call(JOIN, note="another job").wait()
        assert eventually(lambda: one.listener.num_connections == 2)
        assert one.service.lost is None
        one.callers[1].call(PUSH, 0, [torch.ones(BUCKET.numel)], STEP).wait()


def test_a_job_that_never_began_leaves_room_for_the_next() -> None:
    service = Server("server 7")
    with Listener(service, address=LOCAL, token=TOKEN) as listener:
        with Caller(listener.address, token=TOKEN, rank=0, timeout_s=10) as first:
            first.call(JOIN, note="one").wait()
        assert eventually(lambda: listener.num_connections == 0)
        with Caller(listener.address, token=TOKEN, rank=0, timeout_s=10) as second:
            second.call(JOIN, note="two").wait()


@pytest.mark.parametrize("strategy", [BSP, "ssp(staleness=0) / parameter_server"])
def test_who_keeps_others_waiting_is_named_before_their_time_is_up(strategy: str) -> None:
    with job(strategy, world_size=3, timeout_s=1.0) as one:
        kind, note = (REDUCE, SUM) if strategy == BSP else (PUSH, STEP)
        began_s = time.monotonic()
        replies = [one.callers[rank].call(kind, 0, [START], note, timeout_s=5.0) for rank in (0, 2)]
        for reply in replies:
            with pytest.raises(CommunicationError, match="rank 1 stalled at bucket 0"):
                reply.wait()
        assert 0.8 < time.monotonic() - began_s < 2.0
        with pytest.raises(CommunicationError, match="rank 1 stalled"):
            one.callers[1].call(kind, 0, [START], note).wait()
        for caller in one.callers:
            caller.close()
        assert one.service.finished.wait(5)


@pytest.mark.parametrize("strategy", [BSP, "ssp(staleness=0) / parameter_server"])
def test_a_rank_that_goes_without_a_word_is_named_to_all(strategy: str) -> None:
    with job(strategy, world_size=3) as one:
        kind, note = (REDUCE, SUM) if strategy == BSP else (PUSH, STEP)
        waiting = one.callers[0].call(kind, 0, [START], note)
        time.sleep(0.05)
        one.callers[1].close()
        with pytest.raises(CommunicationError, match="rank 1 closed the connection before the end of training"):
            waiting.wait()
        with pytest.raises(CommunicationError, match="rank 1 closed the connection before the end of training"):
            one.callers[2].call(kind, 0, [START], note).wait()
        assert not one.service.finished.is_set(), "it stays until everybody knows"
        one.callers[0].close()
        one.callers[2].close()
        assert one.service.finished.wait(5)


def test_goodbyes() -> None:
    with job(BSP, world_size=2) as one:
        one.callers[0].call(BYE).wait()
        note = json.loads(one.callers[0].call(MISSING).frame.note)
        assert note["ranks"] == [1]
        assert 0 <= note["quiet_s"] < 5
        with pytest.raises(CommunicationError, match="rank 0 has already left"):
            one.callers[0].call(REDUCE, 0, [START], SUM).wait()
        with pytest.raises(CommunicationError, match="rank 0 has detached"):
            one.callers[1].call(REDUCE, 0, [START], SUM).wait()
        one.callers[1].call(BYE).wait()
        assert json.loads(one.callers[0].call(MISSING).frame.note)["ranks"] == []
        assert not one.service.finished.is_set()
        for caller in one.callers:
            caller.close()
        assert one.service.finished.wait(5)
        assert one.service.lost is None


def test_one_who_waits_costs_no_time_of_the_processor() -> None:
    with job("ssp(staleness=0) / parameter_server") as one:
        waiting = one.callers[0].call(PUSH, 0, [START], STEP)
        time.sleep(0.1)
        before_s = time.process_time()
        time.sleep(1.0)
        spent_s = time.process_time() - before_s
        one.callers[1].call(REST).wait()
        waiting.wait()
        assert spent_s < 0.05


def test_a_hundred_pushes_of_four_ranks_at_a_time_are_all_applied() -> None:
    with job("asp(learning_rate=full) / parameter_server", world_size=4) as one:

        def push(caller: Caller) -> None:
            for step in range(25):
                note = json.dumps({"step": step, "groups": [SGD], "unused": []})
                caller.call(PUSH, 0, [torch.full((BUCKET.numel,), 0.25)], note).wait()

        threads = [threading.Thread(target=push, args=(caller,)) for caller in one.callers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.testing.assert_close(one.values(), START - 100 * 0.5 * 0.25)
