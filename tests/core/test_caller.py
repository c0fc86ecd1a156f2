"""Callers: many calls in flight, every failure named, and nothing left behind."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import torch

from laconic.core.caller import Caller
from laconic.core.frames import Frame, receive_frame, send_frame
from laconic.core.paced import PacedLink
from laconic.core.transport import AllWork, Work
from laconic.errors import CommunicationError, FrameRefused, PeerLost
from tests.core.sockets import ECHO, KEEP, RAISE, TOKEN, Recorder, caller, eventually, listener, nothing_left

pytestmark = pytest.mark.timeout(30)


class TestCalls:
    def test_an_answer(self) -> None:
        with listener() as server, caller(server, 3) as one:
            sent = [torch.randn(1000), torch.arange(0), torch.tensor([True])]
            frame = one.call(ECHO, 17, sent, '{"step": 1}').frame
            assert (frame.kind, frame.sender, frame.key, frame.note) == (ECHO, 3, 17, '{"step": 1}')
            assert all(torch.equal(a, b) for a, b in zip(frame.tensors, sent, strict=True))

    def test_large_and_small_frames_in_flight_keep_apart(self) -> None:
        with listener() as server, caller(server) as one:
            sizes = [5, 100_000, 1, 2_000_000, 0, 30_000] * 5
            replies = [one.call(ECHO, key, [torch.full((size,), key)]) for key, size in enumerate(sizes)]
            for key, (size, reply) in enumerate(zip(sizes, replies, strict=True)):
                assert reply.frame.key == key
                assert torch.equal(reply.frame.tensors[0], torch.full((size,), key))

    def test_deferred_answers_in_another_order_from_another_thread(self) -> None:
        handler = Recorder()
        with listener(handler) as server, caller(server, 0) as first, caller(server, 1) as second:
            replies: list[Work] = [one.call(KEEP, key) for key in range(10) for one in (first, second)]
            assert first.call(ECHO).frame.kind == ECHO  # overtakes them
            assert eventually(lambda: len(handler.kept) == 20)
            assert not any(reply.done() for reply in replies)

            def answer() -> None:
                for frame, reply in sorted(handler.kept, key=lambda item: -item[0].key):
                    reply(frame.answer([torch.tensor([frame.sender, frame.key])]))

            thread = threading.Thread(target=answer)
            thread.start()
            AllWork(replies).wait()
            thread.join()
            for index, reply in enumerate(replies):
                assert reply.done()
                assert reply.frame.tensors[0].tolist() == [index % 2, index // 2]  # type: ignore[attr-defined]

    def test_many_threads_on_one_caller(self) -> None:
        wrong: list[int] = []

        def work(index: int) -> None:
            for key in range(30):
                tensor = torch.full((index * 300 + 1,), key)
                if not torch.equal(one.call(ECHO, key, [tensor]).frame.tensors[0], tensor):
                    wrong.append(index)

        with listener() as server, caller(server) as one:
            threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not wrong

    def test_a_call_does_not_wait_for_a_slow_link(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server, nothing_left():
            go_on = threading.Event()
            calls = threading.Thread(target=_greet_and_read_nothing, args=(server, go_on))
            calls.start()
            with Caller(server.getsockname(), token=TOKEN, rank=0) as one:
                began_s = time.monotonic()
                replies = [one.call(ECHO, tensors=[torch.zeros(5_000_000)]) for _ in range(3)]
                assert time.monotonic() - began_s < 2
                assert not any(reply.done() for reply in replies)
                go_on.set()
            calls.join()

    def test_bytes_are_counted_and_paced(self) -> None:
        counted: list[tuple[int, int]] = []
        with (
            listener() as server,
            caller(server, count=lambda *sizes: counted.append(sizes), link=PacedLink(8e6, delay_s=0.05)) as one,
        ):
            began_s = time.monotonic()
            replies = [one.call(ECHO, tensors=[torch.zeros(25_000)]) for _ in range(2)]
            replies[0].wait()
            assert time.monotonic() - began_s > 0.15
            replies[1].wait()
            assert time.monotonic() - began_s > 0.25
        assert counted == [(0, 60), (100_000, 69), (100_000, 69)]


class TestFailures:
    def test_an_exception_of_the_handler(self, caplog: pytest.LogCaptureFixture) -> None:
        with listener() as server, caller(server, 2) as one:
            where = f"server 7 at 127.0.0.1:{server.address[1]}"
            reply = one.call(RAISE, what="push of bucket 3")
            with pytest.raises(CommunicationError) as failed:
                reply.wait()
            assert str(failed.value) == f"push of bucket 3 on rank 2 failed at {where}: ValueError: no such shard."
            assert one.call(ECHO, note="goes on").frame.note == "goes on"
        assert "server 7 failed to serve rank 2: ValueError: no such shard" in caplog.text

    def test_no_answer_in_time(self) -> None:
        handler = Recorder()
        with listener(handler) as server, caller(server, 2, timeout_s=0.1) as one:
            reply = one.call(KEEP, 5)
            message = r"request 2 for key 5 on rank 2: server 7 at 127.0.0.1:\d+ did not answer in 0.1 s"
            for _ in range(2):
                with pytest.raises(CommunicationError, match=message):
                    reply.wait()
            frame, late = handler.kept[0]
            late(frame.answer(note="late"))
            assert one.call(ECHO, note="in time", timeout_s=5).frame.note == "in time"
            with pytest.raises(CommunicationError, match=message):
                reply.wait()

    def test_a_server_that_closes_while_calls_are_pending(self) -> None:
        with nothing_left():
            server = listener()
            one = caller(server, 2)
            replies = [one.call(KEEP, key, what=f"pull of bucket {key}") for key in range(5)]
            assert one.lost is None
            server.close()
            for key, reply in enumerate(replies):
                with pytest.raises(PeerLost, match=rf"pull of bucket {key} on rank 2 cannot finish: server 7 at 127"):
                    reply.wait()
            with pytest.raises(PeerLost, match=r"cannot finish: server 7 at .* its log says which"):
                one.call(ECHO)
            assert isinstance(one.lost, PeerLost)
            one.close()

    def test_another_token(self) -> None:
        with nothing_left(), listener() as server:
            began_s = time.monotonic()
            with pytest.raises(CommunicationError, match=r"joining on rank 1 failed at server 7 .*: .* another token"):
                caller(server, 1, token=b"another token...")
            assert time.monotonic() - began_s < 2, "it is told at once and does not try again"
            assert eventually(lambda: server.num_connections == 0)

    def test_a_token_of_another_length(self) -> None:
        with pytest.raises(CommunicationError, match="token for server must have 16 bytes, got 1"):
            Caller(("127.0.0.1", 1), token=b"x", rank=0)

    @pytest.mark.parametrize("port", [0, 99999])
    def test_a_port_that_does_not_exist(self, port: int) -> None:
        with pytest.raises(CommunicationError, match=rf"rank 0 cannot reach server at 127.0.0.1:{port}: a port is"):
            Caller(("127.0.0.1", port), token=TOKEN, rank=0)

    def test_a_host_that_does_not_exist(self) -> None:
        for host in ("no.such.host.invalid", "a" * 70):
            with nothing_left(), pytest.raises(PeerLost, match="rank 0 cannot reach server at"):
                Caller((host, 5), token=TOKEN, rank=0, connect_timeout_s=1)

    def test_a_frame_over_the_limit_is_refused_before_it_is_sent(self) -> None:
        with listener(limit_bytes=1000) as server, caller(server, limit_bytes=1000) as one:
            with pytest.raises(FrameRefused, match="at most 1000 bytes, got 4000"):
                one.call(ECHO, tensors=[torch.zeros(1000)])
            assert one.call(ECHO, note="goes on").frame.note == "goes on"

    def test_nobody_listens(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = free.getsockname()
        message = r"rank 0 cannot reach server at 127.0.0.1:\d+ within 0.2 s: .*refused"
        with nothing_left(), pytest.raises(PeerLost, match=message):
            Caller(address, token=TOKEN, rank=0, connect_timeout_s=0.2)

    def test_a_server_that_listens_a_little_later(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = free.getsockname()
        started: list[object] = []
        timer = threading.Timer(0.2, lambda: started.append(listener(address=address)))
        timer.start()
        with Caller(address, token=TOKEN, rank=0, connect_timeout_s=5) as one:
            assert one.call(ECHO, note="x").frame.note == "x"
        timer.join()
        started[0].close()  # type: ignore[attr-defined]

    def test_somebody_listens_and_says_nothing(self) -> None:
        refused = pytest.raises(CommunicationError, match=r"joining on rank 0: server at .* did not answer in 0\.")
        with socket.create_server(("127.0.0.1", 0)) as silent, nothing_left(), refused:
            Caller(silent.getsockname(), token=TOKEN, rank=0, connect_timeout_s=0.2)

    def test_a_server_that_answers_garbage_or_what_nobody_asked(self) -> None:
        for answer, message in [
            (bytes(100), "sent what this side refuses: a frame begins with"),
            (Frame(ECHO, 0, 99), "an answer has number 99, but only 2 were asked for"),
        ]:
            with socket.create_server(("127.0.0.1", 0)) as server, nothing_left():
                thread = threading.Thread(target=_greet_and_answer, args=(server, answer))
                thread.start()
                with Caller(server.getsockname(), token=TOKEN, rank=0, timeout_s=5) as one:
                    reply = one.call(ECHO)
                    with pytest.raises(PeerLost, match=message):
                        reply.wait()
                thread.join()

    def test_what_no_frame_can_carry_is_refused_at_the_call(self) -> None:
        with listener() as server, caller(server) as one:
            with pytest.raises(FrameRefused, match="contiguous one-dimensional"):
                one.call(ECHO, tensors=[torch.zeros(2, 2)])
            with pytest.raises(FrameRefused, match="reserved kind 65535"):
                one.call(0xFFFF)
            assert one.call(ECHO, note="goes on").frame.note == "goes on"


class TestClose:
    def test_pending_calls_fail_and_closing_twice_is_fine(self) -> None:
        with nothing_left(), listener() as server:
            one = caller(server)
            reply = one.call(KEEP)
            one.close()
            one.close()
            for attempt in (reply.wait, lambda: one.call(ECHO)):
                with pytest.raises(CommunicationError, match="the connection was closed here") as failed:
                    attempt()
                assert not isinstance(failed.value, PeerLost)

    def test_while_a_frame_waits_on_a_paced_link(self) -> None:
        with nothing_left(), listener() as server:
            link = PacedLink(8e6)
            one = caller(server, link=link)
            one.call(ECHO, tensors=[torch.zeros(25_000_000)])  # a hundred seconds
            began_s = time.monotonic()
            one.close()
            assert time.monotonic() - began_s < 4


def _greet(server: socket.socket) -> socket.socket:
    sock, _ = server.accept()
    hello = receive_frame(sock, TOKEN)
    assert hello is not None
    send_frame(sock, hello.answer(), TOKEN)
    return sock


def _greet_and_read_nothing(server: socket.socket, go_on: threading.Event) -> None:
    with _greet(server):
        go_on.wait(20)


def _greet_and_answer(server: socket.socket, answer: bytes | Frame) -> None:
    with _greet(server) as sock:
        assert receive_frame(sock, TOKEN) is not None
        if isinstance(answer, Frame):
            send_frame(sock, answer, TOKEN)
        else:
            sock.sendall(answer)
        sock.recv(1)
