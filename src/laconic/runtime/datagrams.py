"""A UDP socket that sends many frames of one length in one system call, where the kernel can segment them.

On Linux one call carries up to 44 frames each way (UDP_SEGMENT, UDP_GRO); on the wire each frame is a packet of its
own. Where a kernel does not support that, frames are sent one by one. Where frames arrive one by one, because a network
card or a lossy link separates them, those of one sender are taken together: most of the work is done once for all.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from laconic.core.connection import Address
from laconic.errors import CommunicationError, one_line

Bytes = npt.NDArray[np.uint8]
"""Bytes; those of several frames have one row for each."""

_UDP, _UDP_SEGMENT, _UDP_GRO = 17, 103, 104
"""As in linux/udp.h; Python has no names for them."""
_RECEIVE_FORCED = 33
"""SO_RCVBUFFORCE: exceeds the limit of the machine, for privileged processes."""
_RECEIVE_BYTES = 2**23
"""Buffer for datagrams that arrive while this process is not scheduled."""
_SEND_BYTES = 2**18
"""Frames waiting for a slow link: fewer than the link's queue holds, so that a send blocks and nothing is dropped."""
_CALLS = 64
"""Receive calls whose frames are taken together; more would keep a rank from sending for too long."""
_LARGEST_BYTES = 2**16
FRAMES_PER_CALL = 44
"""As many as fit into 64 KiB if each fills an Ethernet packet."""


@dataclass(frozen=True)
class Frames:
    """Frames of one length."""

    headers: np.ndarray
    """One header for each."""
    values: Bytes

    def __len__(self) -> int:
        return len(self.headers)

    def only(self, which: npt.NDArray[np.bool_]) -> Frames:
        """The frames for which `which` is true."""
        return self if which.all() else Frames(self.headers[which], self.values[which])


def frames_of(datagram: Bytes, segment_bytes: int, header: np.dtype, most_bytes: int) -> Iterator[Frames]:
    """The frames of a datagram, which the kernel may have merged; frames that are too short or long are left out."""
    if segment_bytes <= 0:
        return
    whole = len(datagram) // segment_bytes
    for rows in (datagram[: whole * segment_bytes].reshape(whole, segment_bytes), datagram[whole * segment_bytes :]):
        table = rows if rows.ndim == 2 else rows[None, :]
        if table.size and header.itemsize <= table.shape[1] <= most_bytes:
            # A copy: headers in the middle of a row are not where the processor likes to read numbers.
            headers = np.ascontiguousarray(table[:, : header.itemsize]).view(header)[:, 0]
            yield Frames(headers, table[:, header.itemsize :])


@dataclass(frozen=True)
class Datagram:
    """Frames that one sender has sent."""

    content: Bytes
    segment_bytes: int
    """Length of each frame in it, except that the last may be shorter."""
    sender: Address


class Datagrams:
    """A socket on one interface, never on all of them."""

    def __init__(self, host: str, *, send_bytes: int = _SEND_BYTES) -> None:
        """`send_bytes`: how many bytes may wait for a slow link before a send blocks."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.bind((host, 0))
            bound = self._socket.getsockname()
            if bound[0] == "0.0.0.0":
                raise CommunicationError(
                    f'datagrams would be taken on all interfaces of this host, got the address "{host}". '
                    "Give the address of one interface."
                )
        except (OSError, UnicodeError) as exc:
            self._socket.close()
            raise CommunicationError(f"no datagrams can be received at {host}: {one_line(exc)}.") from exc
        except CommunicationError:
            self._socket.close()
            raise
        self.address: Address = (bound[0], bound[1])
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_bytes)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        with contextlib.suppress(OSError):  # only root may
            self._socket.setsockopt(socket.SOL_SOCKET, _RECEIVE_FORCED, _RECEIVE_BYTES)
        self._cuts = _can_cut(self._socket)
        self._buffer = np.empty(8 * _LARGEST_BYTES, np.uint8)

    def fileno(self) -> int:
        """For select()."""
        return self._socket.fileno()

    def receive(self) -> list[Datagram]:
        """Some of what has arrived, or nothing. The next call overwrites the contents."""
        merged: list[Datagram] = []
        single: dict[tuple[Address, int], list[Bytes]] = {}
        begin = 0
        for _ in range(_CALLS):
            datagram = self._read(begin)
            if datagram is None:
                break
            size = len(datagram.content)
            if datagram.segment_bytes < size:
                merged.append(datagram)
            else:
                single.setdefault((datagram.sender, size), []).append(datagram.content)
            begin += size
            if begin > len(self._buffer) - _LARGEST_BYTES:
                break
        return merged + [
            Datagram(contents[0] if len(contents) == 1 else np.concatenate(contents), size, sender)
            for (sender, size), contents in single.items()
        ]

    def _read(self, begin: int) -> Datagram | None:
        """The next datagram, into the buffer from `begin` on, or None."""
        into = self._buffer[begin : begin + _LARGEST_BYTES]
        try:
            size, notes, _, sender = self._socket.recvmsg_into([into.data], socket.CMSG_SPACE(4), socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            # An earlier datagram was refused. The job's connections show which rank is gone.
            return None
        segment = next((struct.unpack("i", data)[0] for level, kind, data in notes if (level, kind) == _GRO), size)
        return Datagram(into[:size], segment, sender)

    def send(self, rows: Bytes, address: Address) -> None:
        """Send frames of one length; frames that the kernel refuses count as lost."""
        for first in range(0, len(rows), FRAMES_PER_CALL):
            some = rows[first : first + FRAMES_PER_CALL]
            with contextlib.suppress(OSError):  # no buffers, or no receiver; the waiting rank will ask
                if self._cuts and len(some) > 1:
                    size = struct.pack("H", rows.shape[1])
                    self._socket.sendmsg([some.data], [(_UDP, _UDP_SEGMENT, size)], 0, address)
                else:
                    for row in some:
                        self._socket.sendto(row, address)

    def close(self) -> None:
        """Release the socket; closing twice is fine."""
        self._socket.close()


_GRO = (_UDP, _UDP_GRO)


def _can_cut(sock: socket.socket) -> bool:
    try:
        sock.setsockopt(_UDP, _UDP_GRO, 1)
        sock.getsockopt(_UDP, _UDP_SEGMENT)
    except OSError:
        return False
    return True
