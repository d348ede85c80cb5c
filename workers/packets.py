"""Packets with file descriptors over a SOCK_SEQPACKET socket. A message of any size is one packet:
above MAX_PACKET_BYTES it travels as a memory file (memfd), the last of the packet's descriptors."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

MAX_PACKET_BYTES = 128 * 1024
"""The kernel refuses packets above the socket's buffer, 208 KiB by default."""
IN_FILE = b"\xc1"
"""The packet of a message that is in a memory file; no msgpack message begins with this byte."""


def send(link: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Raises OSError when the peer has ended."""
    if len(data) <= MAX_PACKET_BYTES:
        socket.send_fds(link, [data], fds)
        return
    file = os.memfd_create("holdfast-message", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, len(data))
        view, at = memoryview(data), 0
        while at < len(data):
            at += os.pwrite(file, view[at:], at)
        socket.send_fds(link, [IN_FILE], [*fds, file])
    finally:
        os.close(file)


def receive(link: socket.socket, max_fds: int) -> tuple[bytes, list[int]]:
    """The next message and its descriptors, at most `max_fds`; no bytes when the peer has ended."""
    data, fds, _flags, _address = socket.recv_fds(link, MAX_PACKET_BYTES, max_fds + 1)
    if data != IN_FILE:
        return data, fds
    with os.fdopen(fds.pop(), "rb") as file:
        return file.read(), fds
