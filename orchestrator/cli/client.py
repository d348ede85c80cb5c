"""Requests to the controller of a local job: one connection, one request, one reply."""

from __future__ import annotations

import getpass
import socket
from collections.abc import Mapping
from typing import Any

from .. import limits
from ..errors import HoldfastError
from ..hosts.local.job_directory import JobDirectory
from ..protocol.messages import BadFrame, Reply, Request, decode, encode, frame_length

TIMEOUT_S = 15.0
"""The controller answers from memory: it accepts a resize or a suspend without awaiting it."""


def extra_s(verb: str, arguments: Mapping[str, Any]) -> float:
    """How much longer than that an answer may take: agents are asked for it."""
    if verb == "profile":
        return float(arguments["seconds"]) + limits.QUESTION_TIMEOUT_S
    return limits.QUESTION_TIMEOUT_S if verb == "stacks" else 0.0


class ControllerGone(HoldfastError):
    """The controller of the job does not answer."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(
            f"job {name}: no controller answers ({why}). Its agents, if any, keep training for 15 "
            f"minutes; take the job over with `holdfast run --attach {name}`"
        )


class RequestRefused(HoldfastError):
    """The controller refused the request; the text is its reason."""

    exit_code = 2


def ask(directory: JobDirectory, verb: str, **arguments: Any) -> Reply:
    """Send a request and return the reply.

    Raises ControllerGone when no controller answers, RequestRefused when it refuses.
    """
    name = directory.name
    controller = directory.controller()
    if controller is None:
        raise ControllerGone(name, "none is running")
    arguments = {"by": user(), **arguments}
    request = Request(token=directory.token(), verb=verb, arguments=arguments)
    address = (str(controller["address"]), int(controller["port"]))
    try:
        with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
            connection.settimeout(TIMEOUT_S + extra_s(verb, arguments))
            connection.sendall(encode(request))
            with connection.makefile("rb") as stream:  # its read() returns less only at the end
                body = stream.read(frame_length(stream.read(4)))
        reply = decode(body)
    except (OSError, BadFrame) as error:
        raise ControllerGone(name, str(error) or type(error).__name__) from None
    if not isinstance(reply, Reply):
        raise ControllerGone(name, f"unexpected answer: {type(reply).__name__}")
    if not reply.ok:
        raise RequestRefused(f"job {name}: {reply.detail}")
    return reply


def user() -> str:
    """The name of the user, for the report."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
