"""Operations on a device that are aborted: nothing may read what they have received."""

from __future__ import annotations

import os

import pytest
import torch

from laconic.errors import CommunicationError
from laconic.membership.group import _errors_left_to_us
from laconic.membership.transport import _DeviceWork
from laconic.membership.view import ViewBroken


class Stream:
    """A stream whose work ends after a number of looks."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def record_event(self) -> Stream:
        return self

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0


class Operation:
    """What NCCL says of an operation: at once that it has completed, as after an error of a peer."""

    def __init__(self, error: str = "") -> None:
        self._error = error

    def wait(self) -> None:
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return True


class Transport:
    """A view that is over once the stream has ended, if it was broken."""

    timeout_s = 0.5

    def __init__(self, stream: Stream, *, broken: bool) -> None:
        self._stream = stream
        self._broken = broken
        self.waited_for: list[object] = []

    def ended(self, work: object) -> None:
        self.waited_for.append(work)

    def raise_if_over(self, operation: str) -> None:
        if self._broken and self._stream.looks < 0:
            raise ViewBroken(operation)

    def failed(self, operation: str, exc: Exception) -> CommunicationError:
        return ViewBroken(f"{operation}: {exc}")

    def timed_out(self, operation: str) -> CommunicationError:
        return CommunicationError(f"{operation} did not finish")


def wait(monkeypatch: pytest.MonkeyPatch, *, looks: int, broken: bool, error: str = "") -> Transport:
    stream = Stream(looks)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    transport = Transport(stream, broken=broken)
    _DeviceWork(transport, [Operation(error)], "a sum").wait()  # pyrefly: ignore[bad-argument-type]
    assert stream.looks < 0, "the host did not wait for the device"
    return transport


def test_the_host_waits_until_the_stream_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(wait(monkeypatch, looks=5, broken=False).waited_for) == 1


def test_an_aborted_operation_raises_when_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ViewBroken, match="a sum"):
        wait(monkeypatch, looks=5, broken=True)


def test_an_operation_that_fails_breaks_the_view(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ViewBroken, match="a sum: reset"):
        wait(monkeypatch, looks=0, broken=False, error="reset")


def test_a_device_that_never_ends_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CommunicationError, match="did not finish"):
        wait(monkeypatch, looks=10**9, broken=False)


@pytest.mark.parametrize("before", [None, "3"])
def test_only_groups_of_elastic_jobs_survive_errors(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    if before is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, before)
    with _errors_left_to_us():
        assert os.environ[name] == "0"
    assert os.environ.get(name) == before
