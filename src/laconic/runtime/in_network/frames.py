"""The format of datagrams between ranks and an aggregator: a fixed header and up to 1440 bytes of values.

    magic  kind  code  rank  nbytes  chunk  tag      24 bytes, little-endian
    2      1     1     2     2       8      8

A frame fits into one Ethernet packet of 1500 bytes. `chunk` numbers the frames of a job, equally on every rank. `tag`
is drawn by the server and sent to ranks that have shown the job's token, so that frames of other jobs or strangers are
rejected. Many frames of one length are written, read and checked at a time; frames with an invalid field are dropped.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from laconic.architecture.servers.layout import HEADER_BYTES, VALUE_BYTES
from laconic.runtime.datagrams import Bytes, Frames, frames_of

HEADER: Final = np.dtype(
    {
        "names": ["magic", "kind", "code", "rank", "nbytes", "chunk", "tag"],
        "formats": ["<u2", "u1", "u1", "<u2", "<u2", "<u8", "<u8"],
    }
)
assert HEADER.itemsize == HEADER_BYTES
FRAME_BYTES: Final = HEADER_BYTES + VALUE_BYTES
_MAGIC: Final = 0x6C6E

PART, SUM, ASK, LACK, FAIL = range(1, 6)
"""PART: a rank's contribution to a chunk. SUM: the chunk, once all ranks have contributed. ASK: a rank waits for the
chunks from this one on. LACK: the answer, if frames of this rank are missing: how far each is from that chunk, as
16-bit numbers. FAIL: the job cannot continue, with the reason as text."""

LARGEST_U16, SUM_I8, SUM_I16, SUM_I32, SUM_I64 = range(1, 6)
"""How the values of a PART are combined: the maximum of 16-bit numbers, or the sum of integers."""
DTYPES: Final = {
    LARGEST_U16: np.dtype("<u2"),
    SUM_I8: np.dtype("i1"),
    SUM_I16: np.dtype("<i2"),
    SUM_I32: np.dtype("<i4"),
    SUM_I64: np.dtype("<i8"),
}
_ITEM_BYTES = np.zeros(256, np.int64)
"""Size of one value by code; 0: there is no such code."""
for _code, _dtype in DTYPES.items():
    _ITEM_BYTES[_code] = _dtype.itemsize


def num_chunks(nbytes: int) -> int:
    """The number of frames for this many bytes."""
    return -(-nbytes // VALUE_BYTES)


def write(kind: int, chunks: npt.ArrayLike, values: Bytes, *, code: int = 0, rank: int, tag: int) -> Bytes:
    """Frames with these rows of values, one row each."""
    count, nbytes = values.shape
    rows = np.empty((count, HEADER_BYTES + nbytes), np.uint8)
    headers = rows[:, :HEADER_BYTES].view(HEADER)[:, 0]
    for field, value in (("magic", _MAGIC), ("kind", kind), ("code", code), ("rank", rank), ("nbytes", nbytes)):
        headers[field] = value
    headers["chunk"], headers["tag"] = chunks, tag
    rows[:, HEADER_BYTES:] = values
    return rows


def write_one(kind: int, chunk: int, content: bytes, *, rank: int, tag: int) -> Bytes:
    """One frame that adds nothing to a chunk."""
    return write(kind, [chunk], np.frombuffer(content, np.uint8)[None, :], rank=rank, tag=tag)


def read(datagram: Bytes, segment_bytes: int, tag: int) -> list[Frames]:
    """The frames of a datagram, which the kernel may have merged from segments; invalid frames are dropped."""
    found: list[Frames] = []
    for frames in frames_of(datagram, segment_bytes, HEADER, FRAME_BYTES):
        right = frames.only(_right(frames.headers, frames.values.shape[1], tag))
        if len(right):
            found.append(right)
    return found


def _right(headers: np.ndarray, nbytes: int, tag: int) -> npt.NDArray[np.bool_]:
    kind = headers["kind"]
    right = (headers["magic"] == _MAGIC) & (headers["tag"] == np.uint64(tag)) & (headers["nbytes"] == nbytes)
    right &= (kind >= PART) & (kind <= FAIL) & (headers["chunk"] < np.uint64(2**63))
    valued = (kind == PART) | (kind == SUM)
    size = _ITEM_BYTES[headers["code"]]
    return right & (~valued | ((size > 0) & (nbytes > 0) & (nbytes % np.maximum(size, 1) == 0)))
