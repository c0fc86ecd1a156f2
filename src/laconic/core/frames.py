"""The frames on a socket: a fixed binary header, a table of tensors, a note and raw tensor bytes; never pickle.

    header    magic, version, kind, token, sender, number, key, note_bytes, num_tensors, payload_bytes     60 bytes
    table     dtype code and numel of each tensor                                                           9 bytes each
    note      UTF-8 text
    payload   the bytes of the tensors, little-endian, one after the other

Numbers are in network byte order. The token is checked first, then everything a header announces, before memory is
allocated for it. A refused frame leaves the stream at an unknown position, so code that catches FrameRefused must close
the connection.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch

from laconic.errors import CommunicationError, FrameRefused

MAGIC = b"LCNC"
VERSION = 2
TOKEN_BYTES = 16
MAX_TENSORS = 2**20
MAX_NOTE_BYTES = 2**27
"""Enough for the names of MAX_TENSORS tensors."""
LIMIT_BYTES = 2**40
"""Note and payload of one frame, unless the owner of the socket sets another limit. Larger than any bucket: it catches
sizes that make no sense. It does not protect memory: pages are allocated as bytes arrive, from a peer with the
token."""
HELLO = 0xFFFE
"""Reserved kind: the first frame of a caller, answered by the listener itself."""
ERROR = 0xFFFF
"""Reserved kind: the request failed and the note says why."""
FIRST_RESERVED_KIND = 0xFF00

_HEADER = struct.Struct("!4sHH16sIQQIIQ")
_ENTRY = struct.Struct("!BQ")
_DTYPES = {
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.bfloat16,
    8: torch.float32,
    9: torch.float64,
    10: torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_SLOWEST_BPS = 1e5
"""A payload that arrives more slowly than this is treated as an attack or a broken link."""
_BUFFERS_PER_CALL = 64
"""Linux takes up to 1024 buffers in one call; past a few dozen it gains nothing."""


@dataclass(frozen=True, eq=False)
class Frame:
    """One message: numbers, a note and flat tensors on the CPU."""

    kind: int
    """The kind of request; kinds below FIRST_RESERVED_KIND are defined by the owner of the socket."""
    sender: int
    """The rank that asks; an answer carries the rank it goes to."""
    number: int
    """Matches an answer to its request."""
    key: int = 0
    """A key defined by the owner: a bucket, a shard."""
    note: str = ""
    """Short text, JSON by custom."""
    tensors: tuple[torch.Tensor, ...] = ()
    """One-dimensional, contiguous, on the CPU; untouched until they have been sent."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def header_bytes(self) -> int:
        """Bytes of everything else."""
        return _HEADER.size + _ENTRY.size * len(self.tensors) + len(self.note.encode())

    def answer(self, tensors: Sequence[torch.Tensor] = (), note: str = "", *, kind: int | None = None) -> Frame:
        """The frame that answers this one; of the same kind unless another is given."""
        return replace(self, kind=self.kind if kind is None else kind, note=note, tensors=tuple(tensors))

    def error(self, text: str) -> Frame:
        """The error answer to this frame, with the reason."""
        # A text may hold characters that UTF-8 cannot encode, such as names of files; they are replaced.
        return self.answer(note=text.encode(errors="replace").decode(), kind=ERROR)


class StrangerRefused(FrameRefused):
    """The peer has another token or another version of laconic."""

    def __init__(self, text: str, header: Frame, token: bytes) -> None:
        super().__init__(text)
        self.header = header
        """The header of its frame, to be answered with an error."""
        self.token = token
        """The token for this answer: the peer's own, never the job's."""


def new_token() -> bytes:
    """A token for a new job, from the system's source of randomness."""
    return secrets.token_bytes(TOKEN_BYTES)


def pack(frame: Frame, token: bytes, *, limit_bytes: int = LIMIT_BYTES) -> deque[memoryview]:
    """The frame as buffers to be sent in order, tensors uncopied; FrameRefused if no frame can carry it."""
    if len(token) != TOKEN_BYTES:
        raise FrameRefused(f"a token has {TOKEN_BYTES} bytes, got {len(token)}.")
    try:
        note = frame.note.encode()
    except UnicodeEncodeError as exc:
        raise FrameRefused(f"a note is UTF-8, got one with {exc.reason} at character {exc.start}.") from exc
    if len(note) > MAX_NOTE_BYTES:
        raise FrameRefused(f"a note has at most {MAX_NOTE_BYTES} bytes, got {len(note)}.")
    if len(frame.tensors) > MAX_TENSORS:
        raise FrameRefused(f"a frame has at most {MAX_TENSORS} tensors, got {len(frame.tensors)}.")
    if len(note) + frame.payload_bytes > limit_bytes:
        raise FrameRefused(
            f"a frame has a note and payload of at most {limit_bytes} bytes, got {len(note) + frame.payload_bytes}."
        )
    table = b"".join(_ENTRY.pack(_code(tensor), tensor.numel()) for tensor in frame.tensors)
    sizes = (len(note), len(frame.tensors), frame.payload_bytes)
    try:
        header = _HEADER.pack(MAGIC, VERSION, frame.kind, token, frame.sender, frame.number, frame.key, *sizes)
    except struct.error as exc:
        raise FrameRefused(
            f"kind, sender, number and key must fit 16, 32, 64 and 64 bits without a sign, got {frame.kind}, "
            f"{frame.sender}, {frame.number} and {frame.key}."
        ) from exc
    return deque(
        [memoryview(header + table + note), *(_bytes_of(tensor) for tensor in frame.tensors if tensor.numel())]
    )


def send_some(sock: socket.socket, pieces: deque[memoryview]) -> bool:
    """Send as much as possible without blocking, and remove it from `pieces`; returns whether nothing is left."""
    while pieces:
        try:
            sent = sock.sendmsg(islice(pieces, _BUFFERS_PER_CALL), (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        while sent:
            first = pieces.popleft()
            if len(first) > sent:
                pieces.appendleft(first[sent:])
            sent -= min(sent, len(first))
    return True


def send_all(sock: socket.socket, pieces: deque[memoryview], *, timeout_s: float) -> None:
    """Send `pieces`; CommunicationError if the other side takes nothing for `timeout_s`."""
    while not send_some(sock, pieces):
        if not _ready(sock, select.POLLOUT, timeout_s):
            raise CommunicationError(f"the other side took no bytes for {timeout_s:g} s.")


def send_frame(sock: socket.socket, frame: Frame, token: bytes, *, timeout_s: float = 30.0) -> None:
    """Send one frame; CommunicationError if the other side takes nothing for `timeout_s`."""
    send_all(sock, pack(frame, token), timeout_s=timeout_s)


def receive_frame(
    sock: socket.socket,
    token: bytes,
    *,
    limit_bytes: int = LIMIT_BYTES,
    timeout_s: float = 30.0,
    idle_timeout_s: float | None = None,
) -> Frame | None:
    """The next frame, or None if the connection ended before one began; FrameRefused for anything else.

    Header, table and note must arrive within `timeout_s` of the first byte; a payload may take longer, but must not
    stall for `timeout_s`. The wait for the first byte is `idle_timeout_s`, or unlimited.
    """
    if idle_timeout_s is not None and not _ready(sock, select.POLLIN, idle_timeout_s):
        raise FrameRefused(f"no frame arrived in {idle_timeout_s:g} s.")
    header = bytearray(_HEADER.size)
    got = sock.recv_into(header)
    if not got:
        return None
    rest = _Rest(sock, timeout_s)
    if got < len(header):
        rest.fill(memoryview(header)[got:], "header")
    magic, version, kind, found, sender, number, key, note_bytes, num_tensors, payload_bytes = _HEADER.unpack(header)
    if magic != MAGIC:
        raise FrameRefused(f"a frame begins with {magic!r} instead of {MAGIC!r}: this is not laconic.")
    if version != VERSION:
        # Its header may have other fields; it learns the version of this side from the answer's header.
        raise StrangerRefused(
            f"a frame has version {version}, this side reads {VERSION}. Run the same laconic on all hosts.",
            Frame(HELLO, 0, 0),
            bytes(TOKEN_BYTES),
        )
    if not hmac.compare_digest(found, token):
        header_only = Frame(kind, sender, number, key)
        raise StrangerRefused("a frame carries another token than this job's.", header_only, found)
    if note_bytes > MAX_NOTE_BYTES:
        raise FrameRefused(f"a frame announces a note of {note_bytes} bytes, allowed are {MAX_NOTE_BYTES}.")
    if num_tensors > MAX_TENSORS:
        raise FrameRefused(f"a frame announces {num_tensors} tensors, allowed are {MAX_TENSORS}.")
    if note_bytes + payload_bytes > limit_bytes:
        raise FrameRefused(
            f"a frame announces a note and payload of {note_bytes + payload_bytes} bytes, allowed are {limit_bytes}."
        )
    specs = _read_table(rest, num_tensors, payload_bytes)
    note = _read_note(rest, note_bytes) if note_bytes else ""
    rest.allow(payload_bytes)
    return Frame(kind, sender, number, key, note, tuple([_read_tensor(rest, *spec) for spec in specs]))


def _read_table(rest: _Rest, num_tensors: int, payload_bytes: int) -> list[tuple[torch.dtype, int]]:
    table = bytearray(_ENTRY.size * num_tensors)
    rest.fill(memoryview(table), "table")
    specs: list[tuple[torch.dtype, int]] = []
    for code, numel in _ENTRY.iter_unpack(table):
        if code not in _DTYPES:
            raise FrameRefused(f"tensor {len(specs)} of a frame has dtype code {code}, known are 1 to {len(_DTYPES)}.")
        specs.append((_DTYPES[code], numel))
    needed = sum(dtype.itemsize * numel for dtype, numel in specs)
    if needed != payload_bytes:
        raise FrameRefused(f"the tensors of a frame need {needed} bytes, but its header announces {payload_bytes}.")
    return specs


def _read_note(rest: _Rest, nbytes: int) -> str:
    text = _room(nbytes).data
    rest.fill(text, "note")
    try:
        return str(text, "utf-8")
    except UnicodeDecodeError as exc:
        raise FrameRefused(f"the note of a frame is not UTF-8: {exc.reason} at byte {exc.start}.") from exc


def _read_tensor(rest: _Rest, dtype: torch.dtype, numel: int) -> torch.Tensor:
    if not numel:
        return torch.empty(0, dtype=dtype)
    values = _room(numel * dtype.itemsize)
    rest.fill(values.data, "payload")
    if dtype is torch.bool and values.max() > 1:
        raise FrameRefused(f"a bool tensor of a frame has a byte {values.max()}, allowed are 0 and 1.")
    return torch.frombuffer(values, dtype=dtype)


def _room(nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Memory for incoming bytes; it is not touched before they arrive, so announced bytes cost next to nothing."""
    try:
        return np.empty(nbytes, dtype=np.uint8)
    except MemoryError as exc:
        raise FrameRefused(f"there is no memory for the {nbytes} bytes that a frame announces.") from exc


class _Rest:
    """The rest of a frame that has begun, with its timeouts."""

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        self._sock = sock
        self._timeout_s = timeout_s
        self._began_s = time.monotonic()
        self._deadline_s = self._began_s + timeout_s

    def allow(self, nbytes: int) -> None:
        self._deadline_s = time.monotonic() + self._timeout_s + 8 * nbytes / _SLOWEST_BPS

    def fill(self, buffer: memoryview, part: str) -> None:
        while buffer:
            try:
                got = self._sock.recv_into(buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                left_s = self._deadline_s - time.monotonic()
                if left_s <= 0 or not _ready(self._sock, select.POLLIN, min(left_s, self._timeout_s)):
                    raise FrameRefused(
                        f"the {part} of a frame arrives too slowly or not at all: {len(buffer)} bytes are missing "
                        f"after {time.monotonic() - self._began_s:.3g} s."
                    ) from None
                continue
            if not got:
                raise FrameRefused(f"the connection ended {len(buffer)} bytes before the end of a frame's {part}.")
            buffer = buffer[got:]


def _ready(sock: socket.socket, event: int, timeout_s: float) -> bool:
    """Whether the socket can be read (POLLIN) or written (POLLOUT), or has failed, within `timeout_s`."""
    poll = select.poll()  # select.select cannot watch descriptors from 1024 on
    poll.register(sock, event)
    return bool(poll.poll(1000 * timeout_s))


def _code(tensor: torch.Tensor) -> int:
    code = _CODES.get(tensor.dtype)
    if code is None or tensor.dim() != 1 or not tensor.is_contiguous() or not tensor.is_cpu:
        raise FrameRefused(
            "a frame carries contiguous one-dimensional tensors on the CPU of the dtypes "
            f"{', '.join(str(dtype).removeprefix('torch.') for dtype in _CODES)}; got {tuple(tensor.shape)} "
            f"{tensor.dtype} on {tensor.device}. Send tensor.cpu().reshape(-1)."
        )
    return code


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if sys.byteorder != "little":
        raise CommunicationError("frames carry little-endian tensors; a big-endian processor cannot send them.")
    if tensor.requires_grad:
        tensor = tensor.detach()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.int16)  # numpy does not know bfloat16
    return tensor.numpy().data.cast("B")
