"""Listeners: serve whoever has the token, survive everybody else, and leave nothing behind."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from benchmarks.fuzz_server import fuzz

from laconic.core import listener as listener_module
from laconic.core.frames import ERROR, HELLO, VERSION, Frame, pack, receive_frame, send_frame
from laconic.core.listener import Listener
from laconic.core.paced import PacedLink
from laconic.errors import CommunicationError, PeerLost
from tests.core.sockets import ECHO, KEEP, LOCAL, TOKEN, Recorder, caller, eventually, listener, nothing_left

pytestmark = pytest.mark.timeout(30)


def connected(server: Listener) -> socket.socket:
    return socket.create_connection(server.address, timeout=5)


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


class TestAddress:
    @pytest.mark.parametrize("host", ["", "0", "0.0", "000.0.0.0", "0x0", "0.0.0.0", "::"])
    def test_never_on_all_interfaces(self, host: str) -> None:
        message = f'server 7 would listen on all interfaces of this host, got the address "{host}"'
        with nothing_left(), pytest.raises(CommunicationError, match=message):
            listener(address=(host, 0))

    @pytest.mark.parametrize("port", [-1, 65536, 99999])
    def test_never_on_a_port_that_does_not_exist(self, port: int) -> None:
        with pytest.raises(CommunicationError, match=f"server 7 cannot listen on port {port}: .* from 0 to 65535"):
            listener(address=("127.0.0.1", port))

    @pytest.mark.parametrize("host", ["no.such.host.invalid", "a" * 70, "::1"])
    def test_a_host_that_cannot_be_bound(self, host: str) -> None:
        with nothing_left(), pytest.raises(CommunicationError, match="server 7 cannot listen on"):
            listener(address=(host, 0))

    def test_only_on_the_address_given(self) -> None:
        with listener(address=("127.0.0.2", 0)) as server:
            assert server.address[0] == "127.0.0.2"
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", server.address[1]), timeout=5)

    def test_an_address_that_is_taken_or_not_here(self) -> None:
        with listener() as server:
            message = rf"server 7 cannot listen on 127.0.0.1:{server.address[1]}: "
            with pytest.raises(CommunicationError, match=message):
                listener(address=server.address)
        with pytest.raises(CommunicationError, match=r"cannot listen on 192.0.2.1:0"):
            listener(address=("192.0.2.1", 0))

    def test_a_token_of_another_length(self) -> None:
        with pytest.raises(CommunicationError, match="token of server 7 must have 16 bytes, got 3"):
            listener(token=b"abc")


class TestRefusals:
    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"GET / HTTP/1.1\r\n" * 5, "instead of b'LCNC'"),
            (b"".join(pack(Frame(ECHO, 0, 0), b"another token...")), "another token than this job's"),
            (b"".join(pack(Frame(ECHO, 0, 0, tensors=(torch.zeros(1000),)), TOKEN)), "4000 bytes, allowed are 1000"),
            (b"".join(pack(Frame(0xFF00, 0, 0), TOKEN)), "reserved kind 65280, allowed are 0 to 65279"),
            (b"".join(pack(Frame(ECHO, 2, 0), TOKEN) + pack(Frame(ECHO, 3, 0), TOKEN)), "rank 3 came on .* rank 2"),
        ],
        ids=["garbage", "token", "size", "kind", "two ranks"],
    )
    def test_a_refused_frame_is_logged_and_ends_its_connection_alone(
        self, data: bytes, message: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        with listener(limit_bytes=1000) as server, caller(server, 1) as other, connected(server) as sock:
            with caplog.at_level(logging.WARNING, "laconic"):
                sock.sendall(data)
                while not is_closed(sock):
                    pass
                assert eventually(lambda: server.num_connections == 1)
            (line,) = caplog.messages
            assert re.search(rf"server 7: .*sent what this side refuses: .*{message}", line)
            assert other.call(ECHO, note="there?").frame.note == "there?"

    def test_a_half_open_connection_is_closed_and_others_are_served_meanwhile(self) -> None:
        with listener(frame_timeout_s=0.5) as server, caller(server) as other, connected(server) as sock:
            sock.sendall(b"".join(pack(Frame(ECHO, 0, 0), TOKEN))[:30])
            assert eventually(lambda: server.num_connections == 2)
            began_s = time.monotonic()
            served = 0
            while server.num_connections == 2 and time.monotonic() - began_s < 5:
                other.call(ECHO).wait()
                served += 1
            assert 0.3 < time.monotonic() - began_s < 5
            assert served > 10
            assert is_closed(sock)

    def test_who_connects_and_says_nothing_is_closed_but_a_known_rank_may_be_idle(self) -> None:
        handler = Recorder()
        with listener(handler, frame_timeout_s=0.4) as server, caller(server) as idle, connected(server) as sock:
            assert is_closed(sock)
            time.sleep(0.6)
            assert idle.call(ECHO, note="still here").frame.note == "still here"
            assert not handler.gone

    def test_more_ranks_than_connections(self, caplog: pytest.LogCaptureFixture) -> None:
        handler = Recorder()
        with listener(handler, max_connections=2) as server, caller(server, 0) as first, caller(server, 1):
            message = r"rank 2 cannot join server 7 at .* within 2 s: it closed \d+ connections without an answer"
            with pytest.raises(PeerLost, match=message) as failed:
                caller(server, 2, connect_timeout_s=2)
            assert "token" not in str(failed.value)
            assert first.call(ECHO, note="x").frame.note == "x"
            assert not handler.gone, "a rank that was never served cannot be missed"
        assert "rank 2 at 127.0.0.1:" in caplog.text
        assert "was turned away: all 2 connections are in use" in caplog.text

    def test_a_rank_waits_for_a_place(self) -> None:
        with listener(max_connections=1) as server:
            first = caller(server, 0)
            timer = threading.Timer(0.2, first.close)
            timer.start()
            with caller(server, 1, connect_timeout_s=5) as second:
                assert second.call(ECHO, note="x").frame.note == "x"
            timer.join()

    def test_connections_without_a_token_keep_no_rank_out(self, caplog: pytest.LogCaptureFixture) -> None:
        with listener(max_connections=3) as server:
            held = [connected(server) for _ in range(70)]
            for sock in held[::2]:
                sock.sendall(b"LCNC")  # and no more
            began_s = time.monotonic()
            with contextlib.ExitStack() as stack:
                ranks = [stack.enter_context(caller(server, rank)) for rank in range(3)]
                assert time.monotonic() - began_s < 2
                assert server.num_connections <= 3 + 32, "they are few, and so are their threads"
                assert all(one.call(ECHO, note="x").frame.note == "x" for one in ranks)
            assert is_closed(held[0])
            for sock in held:
                sock.close()
        assert "had not shown its token when newer connections needed its place" in caplog.text

    def test_a_peer_that_shows_no_token_is_closed_soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(listener_module, "_FIRST_FRAME_S", 0.2)
        with listener(frame_timeout_s=30) as server, connected(server) as silent, connected(server) as begun:
            begun.sendall(b"LCNC")
            began_s = time.monotonic()
            assert is_closed(silent)
            assert is_closed(begun)
            assert time.monotonic() - began_s < 3

    def test_a_wrong_token_is_answered_without_the_right_one(self) -> None:
        with listener() as server, connected(server) as sock:
            send_frame(sock, Frame(HELLO, 3, 9), b"another token...")
            answer = receive_frame(sock, b"another token...")
            assert answer is not None
            assert (answer.kind, answer.number) == (ERROR, 9)
            assert answer.note == "a frame carries another token than this job's"
            assert is_closed(sock)

    def test_another_version_is_answered_with_this_one(self) -> None:
        with listener() as server, connected(server) as sock:
            frame = bytearray(b"".join(pack(Frame(HELLO, 3, 9), TOKEN)))
            frame[4:6] = (1).to_bytes(2, "big")
            sock.sendall(frame)
            answer = sock.recv(1000)
            assert answer[:6] == b"LCNC" + VERSION.to_bytes(2, "big")
            assert TOKEN not in answer

    def test_a_flood_does_not_flood_the_log(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(listener_module, "_PERIOD_S", 0.5)
        with listener() as server:
            for _ in range(50):
                with connected(server) as sock:
                    sock.sendall(bytes(100))
                    assert is_closed(sock)
            assert eventually(lambda: server.num_connections == 0)
        counts = [int(line.split()[2]) for line in caplog.messages if line.startswith("...")]
        assert len(caplog.messages) <= 20
        assert sum(counts) + len(caplog.messages) - len(counts) == 50

    def test_fuzz(self) -> None:
        summary = fuzz(2_000)
        assert summary.passed, summary
        assert summary.refused > 1_500
        assert summary.answered > 10
        assert summary.log_lines < 30
        assert summary.memory_growth_bytes < 20 * 2**20


class TestWhoLeaves:
    def test_a_rank_that_closes(self) -> None:
        handler = Recorder()
        with listener(handler) as server:
            caller(server, 4).close()
            assert eventually(lambda: handler.gone == [(4, "closed the connection")])
            with connected(server):
                pass  # never said who it is
            assert eventually(lambda: server.num_connections == 0)
            assert len(handler.gone) == 1

    def test_a_rank_killed_in_the_middle_of_a_frame(self) -> None:
        handler = Recorder()
        with listener(handler) as server, caller(server, 1) as other:
            script = f"""
import socket, time
sock = socket.create_connection({server.address!r})
sock.sendall({b"".join(pack(Frame(HELLO, 3, 0), TOKEN))!r})
sock.sendall({b"".join(pack(Frame(ECHO, 3, 1, tensors=(torch.zeros(1000),)), TOKEN))[:2000]!r})
print("sent", flush=True)
time.sleep(60)
"""
            process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
            assert process.stdout is not None
            assert process.stdout.readline() == b"sent\n"
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            assert eventually(lambda: bool(handler.gone))
            assert handler.gone[0][0] == 3
            # With bytes it had not read, its kernel resets the connection instead of ending it.
            assert "of a frame's payload" in handler.gone[0][1] or "reset" in handler.gone[0][1]
            assert other.call(ECHO, note="x").frame.note == "x"

    def test_a_rank_that_does_not_read_its_answers(self) -> None:
        handler = Recorder()
        with listener(handler, frame_timeout_s=0.3) as server, connected(server) as sock:
            send_frame(sock, Frame(KEEP, 2, 0), TOKEN)
            assert eventually(lambda: bool(handler.kept))
            frame, reply = handler.kept[0]
            reply(frame.answer([torch.zeros(10_000_000)]))  # does not block
            assert eventually(lambda: handler.gone == [(2, "took no bytes for 0.3 s")]), handler.gone
            reply(frame.answer())  # goes nowhere, and harms nobody

    def test_a_handler_that_fails_when_told(self, caplog: pytest.LogCaptureFixture) -> None:
        class Fragile(Recorder):
            def left(self, sender: int, reason: str) -> None:
                raise KeyError(sender)

        with listener(Fragile()) as server:
            caller(server, 6).close()
            assert eventually(lambda: "failed when rank 6" in caplog.text)
            with caller(server, 1) as other:
                assert other.call(ECHO, note="x").frame.note == "x"


class TestClose:
    def test_nothing_is_left_with_fifty_connections(self) -> None:
        with nothing_left():
            server = listener()
            callers = [caller(server, rank) for rank in range(50)]
            big = torch.arange(50_000)  # larger than what leaves at once, so the writing threads work too
            replies = [one.call(ECHO, tensors=[big + one.rank]) for one in callers for _ in range(2)]
            for index, reply in enumerate(replies):
                assert torch.equal(reply.frame.tensors[0], big + index // 2)
            began_s = time.monotonic()
            server.close()
            assert time.monotonic() - began_s < 4
            for one in callers:
                one.close()

    def test_twice_and_from_several_threads(self) -> None:
        with nothing_left():
            server = listener()
            threads = [threading.Thread(target=server.close) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            server.close()
            with pytest.raises(ConnectionRefusedError):
                connected(server)

    def test_while_answers_wait_to_be_sent(self) -> None:
        with nothing_left():
            handler = Recorder()
            server = listener(handler)
            with connected(server) as sock:
                send_frame(sock, Frame(KEEP, 0, 0), TOKEN)
                assert eventually(lambda: bool(handler.kept))
                frame, reply = handler.kept[0]
                reply(frame.answer([torch.zeros(10_000_000)]))
                server.close()
                assert not handler.gone  # close() is no news to who closes

    def test_from_the_handler_itself(self) -> None:
        class Quits(Recorder):
            def left(self, sender: int, reason: str) -> None:
                server.close()

        with nothing_left():
            server = listener(Quits())
            caller(server).close()
            assert eventually(server._closing.is_set)
            server.close()

    def test_a_handler_that_does_not_return_is_named(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(listener_module, "_JOIN_S", 0.1)
        go_on = threading.Event()

        class Slow(Recorder):
            def frame(self, frame: Frame, reply: object) -> None:
                go_on.wait()

        with nothing_left(), listener(Slow()) as server, connected(server) as sock:
            send_frame(sock, Frame(ECHO, 0, 0), TOKEN)
            assert eventually(lambda: server.num_connections == 1)
            time.sleep(0.05)
            server.close()
            assert "server 7: the handler still serves 1 requests 0.1 s after close" in caplog.text
            go_on.set()


def test_bytes_are_counted_and_paced() -> None:
    counted: list[tuple[int, int]] = []
    link = PacedLink(8e6)  # a megabyte per second
    handler = Recorder()
    with (
        Listener(
            handler,
            address=LOCAL,
            token=TOKEN,
            count=lambda payload, overhead: counted.append((payload, overhead)),
            link=link,
        ) as server,
        connected(server) as sock,
    ):
        began_s = time.monotonic()
        send_frame(sock, Frame(ECHO, 0, 0, note="ab", tensors=(torch.zeros(50_000),)), TOKEN)
        assert receive_frame(sock, TOKEN) is not None
        assert time.monotonic() - began_s > 0.2
    assert counted == [(200_000, 60 + 9 + 2)]
