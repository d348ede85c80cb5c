"""Requests to the controller of a job: one connection, one request, one reply.

Owns: finding the controller and speaking to it, synchronously. Must not: know what the verbs mean.
"""

from __future__ import annotations

import getpass
import socket
from typing import Any

from ..errors import HoldfastError
from ..hosts.local.job_directory import JobDirectory
from ..protocol.messages import BadFrame, Reply, Request, decode, encode, frame_length

TIMEOUT_S = 15.0
"""The controller answers from memory; a resize or a suspend is accepted, not awaited."""


class ControllerGone(HoldfastError):
    """Nobody answers for this job."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"job {name}: no controller answers ({why}); its agents, if any, go on training for 15 "
            f"minutes. Take it over with `holdfast run --attach {name}`"
        )


class RequestRefused(HoldfastError):
    """The controller said no; the text is its reason."""

    exit_code = 2


def ask(directory: JobDirectory, verb: str, **arguments: Any) -> Reply:
    """Send a request and return the reply.

    Raises ControllerGone when there is no controller, RequestRefused when it says no.
    """
    name = directory.name
    where = directory.controller()
    if where is None:
        raise ControllerGone(name, "none is running")
    arguments = {"by": user(), **arguments}
    request = Request(token=directory.token(), verb=verb, arguments=arguments)
    place = (str(where["address"]), int(where["port"]))
    try:
        with socket.create_connection(place, timeout=TIMEOUT_S) as link:
            link.sendall(encode(request))
            header = _read_exactly(link, 4)
            reply = decode(_read_exactly(link, frame_length(header)))
    except (OSError, EOFError, BadFrame) as error:
        raise ControllerGone(name, str(error) or type(error).__name__) from None
    if not isinstance(reply, Reply):
        raise ControllerGone(name, f"it answered with {type(reply).__name__}")
    if not reply.ok:
        raise RequestRefused(f"job {name}: {reply.detail}")
    return reply


def user() -> str:
    """Who asks, for the report."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


def _read_exactly(link: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = link.recv(min(length, 1 << 20))
        if not part:
            raise EOFError("it closed the connection")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
