"""Free ports for servers that need their port as an argument.

They lie below the kernel's ephemeral ports: a server may take seconds to bind, and meanwhile no
other connection is given its port.
"""

from __future__ import annotations

import random
import socket

FIRST, LAST = 20_000, 29_999
"""Ports above Ray's own choice for its workers, below the node ports of Kubernetes."""


def free_port() -> int:
    """A port without a listener at any address of this machine."""
    while True:
        port = random.randint(FIRST, LAST)
        try:
            socket.create_server(("", port)).close()
        except OSError:
            continue
        return port
