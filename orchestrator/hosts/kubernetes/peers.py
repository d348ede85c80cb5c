"""Search for another replica of the operator that leads, without the API server.

Only the leader listens at the port for agents. A replica that cannot renew its lease because the
API server does not answer may go on as long as each other replica refuses connections there: then
none has taken over. Its agents stay connected, and it continues when the API server is back. Where
a replica cannot be reached, or names cannot be resolved, the answer is that another one may lead.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

from holdfast.orchestrator.protocol.messages import parse_endpoints

PROBE_TIMEOUT_S = 1.0


async def no_other_leads(endpoint: str, own: frozenset[str] | None = None) -> bool:
    """`endpoint`: where agents look for the leader, HOST:PORT[,HOST:PORT...]. `own`: addresses of
    this replica; found by its host name if they are not given."""
    try:
        if own is None:
            own = frozenset(await _addresses(socket.gethostname(), 0))
        others: set[tuple[str, int]] = set()
        for host, port in parse_endpoints(endpoint, "--agent-endpoint"):
            others |= {(a, port) for a in await _addresses(host, port) if a not in own}
    except OSError:
        return False
    return all(await asyncio.gather(*(_refuses(*peer) for peer in sorted(others))))


async def _addresses(host: str, port: int) -> set[str]:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(PROBE_TIMEOUT_S):
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return {str(address[0]) for *_kind, address in infos}


async def _refuses(address: str, port: int) -> bool:
    """Nothing listens there, and the machine answers."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _reader, writer = await asyncio.open_connection(address, port)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return False
