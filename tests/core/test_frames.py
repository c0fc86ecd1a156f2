"""Frames: what goes in comes out, and whatever is not exactly a frame is refused before it costs anything."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.core import frames
from laconic.core.frames import ERROR, MAX_NOTE_BYTES, MAX_TENSORS, Frame, new_token, pack, receive_frame, send_frame
from laconic.errors import CommunicationError, FrameRefused
from tests.core.sockets import TOKEN

pytestmark = pytest.mark.timeout(30)

DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
)
# Offsets in the header, by the layout its docstring gives.
VERSION_AT, TOKEN_AT, NOTE_BYTES_AT, NUM_TENSORS_AT, PAYLOAD_BYTES_AT, TABLE_AT = 4, 8, 44, 48, 52, 60


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def raw(frame: Frame) -> bytearray:
    return bytearray(b"".join(pack(frame, TOKEN)))


def read(data: bytes, *, token: bytes = TOKEN, limit_bytes: int = 10_000) -> Frame | None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(data)
        left.shutdown(socket.SHUT_WR)
        return receive_frame(right, token, limit_bytes=limit_bytes, timeout_s=5)


def tensor_of(dtype: torch.dtype, numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (values > 127) if dtype is torch.bool else values.view(dtype)


FRAME = Frame(3, 5, 9, 11, "note", (torch.arange(4), torch.ones(3)))

a_tensor = st.builds(tensor_of, st.sampled_from(DTYPES), st.integers(0, 300), st.integers(0, 99))
a_frame = st.builds(
    Frame,
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=50),
    st.lists(a_tensor, max_size=8).map(tuple),
)


class TestRoundTrip:
    @given(a_frame)
    @settings(max_examples=150)
    def test_what_goes_in_comes_out(self, frame: Frame) -> None:
        data = raw(frame)
        assert len(data) == frame.header_bytes + frame.payload_bytes
        got = read(data, limit_bytes=2**20)
        assert got is not None
        assert (got.kind, got.sender, got.number, got.key, got.note) == (
            frame.kind,
            frame.sender,
            frame.number,
            frame.key,
            frame.note,
        )
        assert [tensor.dtype for tensor in got.tensors] == [tensor.dtype for tensor in frame.tensors]
        for there, here in zip(got.tensors, frame.tensors, strict=True):
            assert there.shape == here.shape
            assert torch.equal(there.view(torch.uint8), here.view(torch.uint8))  # bits: NaN travels too

    def test_the_layout_is_the_one_that_is_documented(self) -> None:
        frame = Frame(1, 2, 3, 4, "é", (torch.tensor([1.0]),))
        expected = b"LCNC" + struct.pack("!HH", 2, 1) + TOKEN + struct.pack("!IQQIIQ", 2, 3, 4, 2, 1, 4)
        assert raw(frame) == expected + struct.pack("!BQ", 8, 1) + "é".encode() + struct.pack("<f", 1.0)

    def test_a_large_frame_and_many_tensors(self, pair: tuple[socket.socket, socket.socket]) -> None:
        big = torch.arange(1_000_000)
        sent = Frame(1, 0, 0, 0, "x" * 100_000, (big, *(torch.full((2,), i) for i in range(1023))))
        thread = threading.Thread(target=send_frame, args=(pair[0], sent, TOKEN))
        thread.start()
        got = receive_frame(pair[1], TOKEN)
        thread.join()
        assert got is not None
        assert got.note == sent.note
        assert all(torch.equal(a, b) for a, b in zip(got.tensors, sent.tensors, strict=True))

    def test_received_tensors_can_be_written_and_do_not_share_memory(self) -> None:
        got = read(raw(FRAME))
        assert got is not None
        got.tensors[1].add_(1)
        assert got.tensors[1].tolist() == [2, 2, 2]
        assert got.tensors[0].tolist() == [0, 1, 2, 3]

    def test_tensors_are_sent_from_where_they_are(self) -> None:
        tensor = torch.zeros(4, requires_grad=True)
        pieces = pack(Frame(1, 0, 0, tensors=(tensor,)), TOKEN)
        with torch.no_grad():
            tensor.fill_(1.0)
        assert bytes(pieces[1]) == struct.pack("<4f", 1, 1, 1, 1)

    def test_frames_follow_each_other_and_the_end_is_none(self, pair: tuple[socket.socket, socket.socket]) -> None:
        for number in range(3):
            send_frame(pair[0], Frame(1, 0, number), TOKEN)
        pair[0].close()
        got = [receive_frame(pair[1], TOKEN) for _ in range(4)]
        assert [frame and frame.number for frame in got] == [0, 1, 2, None]

    def test_answers_and_errors(self) -> None:
        answer, error = FRAME.answer([torch.ones(1)], "ok"), FRAME.error("no")
        assert (answer.kind, answer.number, answer.key, answer.note, len(answer.tensors)) == (3, 9, 11, "ok", 1)
        assert (error.kind, error.number, error.note, error.tensors) == (ERROR, 9, "no", ())
        assert pack(FRAME.error("no \udcff"), TOKEN)

    def test_tokens_are_new_each_time(self) -> None:
        assert len(new_token()) == 16
        assert new_token() != new_token()


class TestRefusedOnReceipt:
    def test_wrong_magic(self) -> None:
        with pytest.raises(FrameRefused, match=r"begins with b'GET ' instead of b'LCNC'"):
            read(b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: something that is long enough\r\n\r\n")

    @pytest.mark.parametrize(
        ("place", "form", "value", "message"),
        [
            (VERSION_AT, "!H", 3, "has version 3, this side reads 2"),
            (NOTE_BYTES_AT, "!I", MAX_NOTE_BYTES + 1, "note of 134217729 bytes, allowed are 134217728"),
            (NOTE_BYTES_AT, "!I", 9_957, "a note and payload of 10001 bytes, allowed are 10000"),
            (NUM_TENSORS_AT, "!I", MAX_TENSORS + 1, "1048577 tensors, allowed are 1048576"),
            (PAYLOAD_BYTES_AT, "!Q", 2**63, "allowed are 10000"),
            (PAYLOAD_BYTES_AT, "!Q", 45, "need 44 bytes, but its header announces 45"),
            (TABLE_AT, "!B", 0, "tensor 0 of a frame has dtype code 0, known are 1 to 10"),
            (TABLE_AT + 9, "!B", 11, "tensor 1 of a frame has dtype code 11, known are 1 to 10"),
            (TABLE_AT + 1, "!Q", 2**64 - 1, "but its header announces 44"),
        ],
    )
    def test_changed_fields(self, place: int, form: str, value: int, message: str) -> None:
        data = raw(FRAME)
        struct.pack_into(form, data, place, value)
        taken = AssertionError("memory was taken for a frame to be refused")
        with mock.patch.object(np, "empty", side_effect=taken), pytest.raises(FrameRefused, match=message):
            read(data)

    @pytest.mark.parametrize("place", range(TOKEN_AT, TOKEN_AT + 16))
    def test_wrong_token(self, place: int) -> None:
        data = raw(FRAME)
        data[place] ^= 1
        with pytest.raises(FrameRefused, match="another token than this job's") as refused:
            read(data)
        assert TOKEN.hex() not in str(refused.value)
        assert repr(TOKEN) not in str(refused.value)

    def test_a_note_that_is_no_text(self) -> None:
        data = raw(FRAME)
        data[TABLE_AT + 18 + 2] = 0xFF
        with pytest.raises(FrameRefused, match="note of a frame is not UTF-8: invalid start byte at byte 2"):
            read(data)

    def test_bytes_that_are_no_bool(self) -> None:
        data = raw(Frame(1, 0, 0, tensors=(torch.tensor([True, False]),)))
        data[-1] = 7
        with pytest.raises(FrameRefused, match="bool tensor of a frame has a byte 7, allowed are 0 and 1"):
            read(data)

    def test_no_memory(self) -> None:
        refused = pytest.raises(FrameRefused, match="no memory for the 4 bytes that a frame announces")
        with mock.patch.object(np, "empty", side_effect=MemoryError), refused:
            read(raw(FRAME))

    def test_cut_off_at_every_byte(self) -> None:
        data = raw(FRAME)
        assert read(b"") is None
        for length in range(1, len(data)):
            with pytest.raises(FrameRefused, match=r"the connection ended \d+ bytes before the end of a frame's"):
                read(data[:length])
        assert read(data) is not None

    @pytest.mark.parametrize("length", [1, 57, 60, 100])
    def test_a_frame_that_stops_half_way(self, pair: tuple[socket.socket, socket.socket], length: int) -> None:
        pair[0].sendall(raw(FRAME)[:length])
        began_s = time.monotonic()
        with pytest.raises(FrameRefused, match=r"arrives too slowly or not at all: \d+ bytes are missing after \d"):
            receive_frame(pair[1], TOKEN, timeout_s=0.1)
        assert time.monotonic() - began_s < 5

    def test_a_frame_that_comes_a_byte_at_a_time(self, pair: tuple[socket.socket, socket.socket]) -> None:
        stop = threading.Event()

        def drip() -> None:
            for byte in raw(FRAME):
                if stop.wait(0.02):
                    return
                pair[0].sendall(bytes([byte]))

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(FrameRefused, match="header of a frame arrives too slowly"):
            receive_frame(pair[1], TOKEN, timeout_s=0.15)
        stop.set()
        thread.join()

    def test_a_slow_payload_is_given_time(self, pair: tuple[socket.socket, socket.socket]) -> None:
        data = raw(Frame(1, 0, 0, tensors=(torch.zeros(50_000, dtype=torch.uint8),)))

        def drip() -> None:
            for place in range(0, len(data), 10_000):
                pair[0].sendall(data[place : place + 10_000])
                time.sleep(0.15)

        thread = threading.Thread(target=drip)
        thread.start()
        got = receive_frame(pair[1], TOKEN, timeout_s=0.6)
        thread.join()
        assert got is not None
        assert got.payload_bytes == 50_000

    def test_nothing_at_all(self, pair: tuple[socket.socket, socket.socket]) -> None:
        with pytest.raises(FrameRefused, match=r"no frame arrived in 0.05 s"):
            receive_frame(pair[1], TOKEN, idle_timeout_s=0.05)


class TestRefusedBeforeSending:
    @pytest.mark.parametrize(
        "tensor",
        [torch.zeros(2, 2), torch.zeros(4)[::2], torch.zeros(2, dtype=torch.complex64), torch.zeros(2, device="meta")],
        ids=["two dimensions", "strided", "complex", "device"],
    )
    def test_tensors_that_cannot_travel(self, tensor: torch.Tensor) -> None:
        with pytest.raises(FrameRefused, match=r"contiguous one-dimensional tensors .* got \(2.*reshape\(-1\)"):
            pack(Frame(1, 0, 0, tensors=(tensor,)), TOKEN)

    @pytest.mark.parametrize(
        ("frame", "message"),
        [
            (Frame(2**16, 0, 0), "must fit 16, 32, 64 and 64 bits without a sign, got 65536"),
            (Frame(1, -1, 0), "got 1, -1, 0 and 0"),
            (Frame(1, 0, 0, note="a\udcff"), "note is UTF-8, got one with surrogates not allowed at character 1"),
            (Frame(1, 0, 0, note="x" * (MAX_NOTE_BYTES + 1)), "at most 134217728 bytes, got 134217729"),
            (Frame(1, 0, 0, tensors=(torch.zeros(1),) * (MAX_TENSORS + 1)), "at most 1048576 tensors, got 1048577"),
        ],
    )
    def test_frames_that_cannot_travel(self, frame: Frame, message: str) -> None:
        with pytest.raises(FrameRefused, match=message):
            pack(frame, TOKEN)

    def test_a_token_of_another_length(self) -> None:
        with pytest.raises(FrameRefused, match="16 bytes, got 3"):
            pack(FRAME, b"abc")

    def test_a_reader_that_does_not_read(self, pair: tuple[socket.socket, socket.socket]) -> None:
        frame = Frame(1, 0, 0, tensors=(torch.zeros(5_000_000),))
        with pytest.raises(CommunicationError, match=r"took no bytes for 0.1 s"):
            send_frame(pair[0], frame, TOKEN, timeout_s=0.1)

    def test_a_processor_with_the_other_byte_order(self) -> None:
        refused = pytest.raises(CommunicationError, match="little-endian")
        with mock.patch.object(frames.sys, "byteorder", "big"), refused:
            pack(FRAME, TOKEN)
