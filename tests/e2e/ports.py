"""Ports for servers that must be told theirs before they start.

Owns: which ones. They lie below those that the kernel gives away by itself: a server may take
seconds to bind, and meanwhile no connection of anybody else is given its port.
"""

from __future__ import annotations

import random
import socket

FIRST, LAST = 20_000, 29_999
"""Above Ray's own choice for its workers, below the node ports of Kubernetes."""


def free_port() -> int:
    """One that nobody listens on now, at any address of this machine."""
    while True:
        port = random.randint(FIRST, LAST)
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        return port
