"""The pulse of a script in the interpreter of a user where Holdfast is installed: it shows that the
interpreter runs and begins collectives, and it answers the agent's inspections.

As AgentChannel's, without the session, whose imports take as long as torch's. It ends when the
session attaches itself, which has a pulse of its own.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

INHERITED = "HOLDFAST_INHERITED"
"""The same as in worker_transport, which imports the whole spec and therefore takes longer."""


def start(wire_fd: int, asked_fd: int, load: Callable[[str], Any]) -> None:
    """Start the thread. If Holdfast cannot be imported, print it: the script runs all the same.
    `load`: other_python's, which loads a file without its package: session's imports torch."""
    try:
        import msgspec

        from holdfast.orchestrator import limits
        from holdfast.workers import packets, worker_protocol

        inspection = load("../../session/inspection")
    except Exception as error:
        print(f"holdfast: no pulse in this Python ({type(error).__name__}: {error})",
              file=sys.stderr)  # fmt: skip
        return

    def send(link: socket.socket, message: worker_protocol.FromWorker) -> None:
        packets.send(link, msgspec.msgpack.encode(message))

    def run() -> None:
        link, asked = socket.socket(fileno=os.dup(wire_fd)), os.dup(asked_fd)
        with link:
            try:
                while INHERITED in os.environ:
                    pulse = worker_protocol.Pulse(collectives=inspection.num_collectives())
                    send(link, pulse)
                    if not select.select([asked], [], [], limits.PULSE_INTERVAL_S)[0]:
                        continue
                    if not os.read(asked, packets.MAX_PACKET_BYTES):
                        return  # the agent has ended
                    stack = worker_protocol.StackReport(text=inspection.stacks())
                    groups = worker_protocol.CollectivesReport(groups=inspection.collectives())
                    send(link, stack)
                    send(link, groups)
            except (OSError, MemoryError):
                return  # the agent has ended, or the script reports the lack of memory

    threading.Thread(target=run, name="holdfast-pulse", daemon=True).start()
