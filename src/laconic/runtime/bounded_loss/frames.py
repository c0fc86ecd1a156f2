"""The layout of a datagram between two ranks: a fixed header and up to 1440 bytes of values.

    magic  kind  code  rank  nbytes  exchange  rows  row  base  tag      32 bytes, little-endian
    2      1     1     2     2       4         4     4    4     8

`exchange` is the number of a sum in the job, the same on every rank; it stands for the step and the bucket. `rows`: how
many rows each rank owns. `base`: the sender has all means of exchanges below it. `tag` is drawn by rank 0 and sent to
the other ranks over the job's process group, so no frame from outside the job is mistaken for one of its own. Many
frames of one length are written, read and checked at a time; a frame with a wrong value in any field is dropped.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from laconic.architecture.datagrams.rows import ROW_BYTES
from laconic.runtime.datagrams import Bytes, Frames, frames_of

Numbers = npt.NDArray[np.int64]

HEADER: Final = np.dtype(
    {
        "names": ["magic", "kind", "code", "rank", "nbytes", "exchange", "rows", "row", "base", "tag"],
        "formats": ["<u2", "u1", "u1", "<u2", "<u2", "<u4", "<u4", "<u4", "<u4", "<u8"],
    }
)
HEADER_BYTES: Final = HEADER.itemsize
assert HEADER_BYTES == 32
FRAME_BYTES: Final = HEADER_BYTES + ROW_BYTES
_MAGIC: Final = 0x6C62

PART, MEAN, PARTS_END, MEANS_END, ASK, LACK, MISSED, DONE = range(1, 9)
"""PART: a row of the sender, for its owner. MEAN: a row of the sum, from its owner. PARTS_END, MEANS_END: all parts, or
all means, have been sent once. ASK: the sender waits for these means. LACK: the owner wants these parts. ASK and LACK
list rows as 32-bit numbers, and `row` says how many are known to be lost, because later ones have come. MISSED: the
owner goes on without this many parts, a 32-bit number. DONE: nothing but `base`."""
ROWS_PER_QUESTION: Final = ROW_BYTES // 4

DTYPES: Final = {1: torch.float32, 2: torch.float16, 3: torch.bfloat16, 4: torch.float64}
CODES: Final = {dtype: code for code, dtype in DTYPES.items()}
_ITEM_BYTES = np.zeros(256, np.int64)
"""Size of one value by code; 0: there is no such code."""
for _code, _dtype in DTYPES.items():
    _ITEM_BYTES[_code] = _dtype.itemsize


def write(
    kind: int, row: npt.ArrayLike, values: Bytes, *, exchange: int, rows: int, code: int, rank: int, base: int, tag: int
) -> Bytes:
    """Frames with these values, one row of values each; `row`: one row number for all frames, or one per frame."""
    count, nbytes = values.shape
    frames = np.empty((count, HEADER_BYTES + nbytes), np.uint8)
    headers = frames[:, :HEADER_BYTES].view(HEADER)[:, 0]
    fields = {"magic": _MAGIC, "kind": kind, "code": code, "rank": rank, "nbytes": nbytes, "exchange": exchange}
    for field, value in (fields | {"rows": rows, "base": base, "tag": tag}).items():
        headers[field] = value
    headers["row"] = row
    frames[:, HEADER_BYTES:] = values
    return frames


def in_32_bits(numbers: Numbers) -> Bytes:
    """The numbers that an ASK, a LACK or a MISSED carries, as the values of its frame."""
    return numbers[:ROWS_PER_QUESTION].astype("<u4").view(np.uint8)[None, :]


def from_32_bits(values: Bytes) -> Numbers:
    """The numbers that in_32_bits() has written into the values of a frame."""
    return np.ascontiguousarray(values).view("<u4").astype(np.int64)


def read(datagram: Bytes, segment_bytes: int, tag: int) -> list[Frames]:
    """The valid frames of a datagram; others are left out."""
    found: list[Frames] = []
    for frames in frames_of(datagram, segment_bytes, HEADER, FRAME_BYTES):
        right = frames.only(_right(frames.headers, frames.values.shape[1], tag))
        if len(right):
            found.append(right)
    return found


def _right(headers: np.ndarray, nbytes: int, tag: int) -> npt.NDArray[np.bool_]:
    kind, size = headers["kind"], _ITEM_BYTES[headers["code"]]
    right = (headers["magic"] == _MAGIC) & (headers["tag"] == np.uint64(tag)) & (headers["nbytes"] == nbytes)
    right &= (size > 0) & (headers["rows"] > 0) & (headers["row"] < headers["rows"])
    valued = (kind == PART) | (kind == MEAN)
    asks = (kind == ASK) | (kind == LACK) | (kind == MISSED)
    fits = np.where(valued, (nbytes > 0) & (nbytes % np.maximum(size, 1) == 0), nbytes == 0)
    fits = np.where(asks, (nbytes > 0) & (nbytes % 4 == 0), fits)
    return right & (kind >= PART) & (kind <= DONE) & fits
