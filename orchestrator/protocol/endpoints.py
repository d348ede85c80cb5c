"""Where controllers listen, as operators and agents are told it.

Owns: reading the list. Must not: look anything up.
"""

from __future__ import annotations

from ..errors import Problem, UserError

Endpoint = tuple[str, int]
"""(host name or IP address, port)."""


def parse_endpoints(text: str, field: str = "--endpoint") -> tuple[Endpoint, ...]:
    """`HOST:PORT[,HOST:PORT...]`, an IPv6 address in brackets. Raises UserError."""
    found = []
    for part in text.split(","):
        host, colon, port = part.strip().rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        bracketed = host.startswith("[") and host.endswith("]")
        good = colon and bare and port.isdecimal() and 0 < int(port) < 65536
        if not good or (":" in bare and not bracketed):
            expected = "HOST:PORT[,HOST:PORT...], an IPv6 address in brackets"
            raise UserError(str(Problem(field, part.strip() or "nothing", expected)))
        found.append((bare, int(port)))
    return tuple(found)
