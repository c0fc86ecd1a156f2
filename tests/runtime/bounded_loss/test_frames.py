"""What is read from a network: whatever arrives, nothing raises, and only right frames get through."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from laconic.runtime.bounded_loss import frames as wire

TAG = 0x0123_4567_89AB_CDEF
FIELDS = {"exchange": 7, "rows": 100, "code": 1, "rank": 2, "base": 5, "tag": TAG}


def made(count: int = 3, nbytes: int = 40, kind: int = wire.PART) -> np.ndarray:
    values = np.arange(count * nbytes, dtype=np.uint8).reshape(count, nbytes)
    return wire.write(kind, np.arange(count), values, **FIELDS)


@given(st.integers(1, 44), st.integers(1, 360), st.sampled_from([wire.PART, wire.MEAN]))
def test_what_is_written_is_read(count: int, width: int, kind: int) -> None:
    rows = made(count, 4 * width, kind)
    (frames,) = wire.read(rows.reshape(-1), rows.shape[1], TAG)
    assert frames.headers["row"].tolist() == list(range(count))
    assert {name: frames.headers[name][0] for name in FIELDS} == FIELDS
    assert np.array_equal(frames.values, rows[:, wire.HEADER_BYTES :])


@given(st.binary(max_size=4000), st.integers(-2, 4000))
def test_any_bytes_are_left_out(content: bytes, segment_bytes: int) -> None:
    assert wire.read(np.frombuffer(content, np.uint8), segment_bytes, TAG) == []


@given(st.data(), st.integers(0, wire.HEADER_BYTES - 1), st.integers(1, 255))
def test_a_frame_with_any_byte_changed_is_left_out_or_right(data: st.DataObject, place: int, change: int) -> None:
    """Nothing protects what is right in itself, such as the number of a row; tag, lengths and kinds are checked."""
    kind = data.draw(st.sampled_from([wire.PART, wire.MEAN, wire.ASK, wire.LACK, wire.MISSED]))
    rows = made(1, 40, kind)
    rows[0, place] ^= change
    for frames in wire.read(rows.reshape(-1), rows.shape[1], TAG):
        header = frames.headers[0]
        assert (header["tag"], header["nbytes"]) == (TAG, 40)
        assert header["row"] < header["rows"]
        assert wire.PART <= header["kind"] < wire.DONE
        assert header["kind"] not in (wire.PARTS_END, wire.MEANS_END)
        assert int(header["code"]) in wire.DTYPES
        assert header["kind"] > wire.MEAN or 40 % wire.DTYPES[int(header["code"])].itemsize == 0


def test_questions_name_rows_and_are_bounded() -> None:
    numbers = np.arange(1000) * 70_000
    assert np.array_equal(wire.from_32_bits(wire.in_32_bits(numbers)[0]), numbers[: wire.ROWS_PER_QUESTION])
    assert wire.in_32_bits(numbers).shape[1] == 1440
