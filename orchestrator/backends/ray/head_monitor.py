"""Whether the head of the Ray cluster still answers, for a command that stays attached.

Owns: asking it, in a thread of its own. Must not: decide what becomes of the command.

Ray's own processes wait for a head that is gone, and end themselves when it stays away too long
(RAY_gcs_rpc_server_reconnect_timeout_s): with a line for Ray's developers, and from within. Who
watches a job learns at once that there is no head, and is told what is left just before that.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PERIOD_S = 1.0
ENV = "RAY_gcs_rpc_server_reconnect_timeout_s"
PATIENCE_S = 60.0
"""Ray's default of that."""
MARGIN_S = 3.0
"""Before Ray's own end."""


@contextmanager
def watched(
    on_gone: Callable[[str, float], None],
    on_back: Callable[[str], None],
    on_end: Callable[[str], None],
) -> Iterator[None]:
    """Tell of its loss (address, seconds until the end), its return, and that it stayed away.
    They are called in another thread; `on_end` is about to be the last that this process does."""
    address = _address()
    over = threading.Event()
    if address:
        watch = _Watch(address, over, on_gone, on_back, on_end)
        threading.Thread(target=watch.run, name="watch the head", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class _Watch:
    def __init__(
        self,
        address: str,
        over: threading.Event,
        on_gone: Callable[[str, float], None],
        on_back: Callable[[str], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._address, self._over = address, over
        self._on_gone, self._on_back, self._on_end = on_gone, on_back, on_end

    def run(self) -> None:
        limit_s = max(PERIOD_S, float(os.environ.get(ENV, PATIENCE_S)) - MARGIN_S)
        since: float | None = None
        while not self._over.wait(PERIOD_S):
            now = time.monotonic()
            if self._answers():
                if since is not None:
                    self._on_back(self._address)
                since = None
            elif since is None:
                since = now
                self._on_gone(self._address, limit_s)
            elif now - since > limit_s:
                self._on_end(self._address)
                return

    def _answers(self) -> bool:
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), PERIOD_S).close()
        except OSError:
            return False
        return True


def _address() -> str:
    """Empty through a Ray client, which has a connection to its server only."""
    import ray

    if ray.util.client.ray.is_connected():
        return ""
    return str(ray.get_runtime_context().gcs_address)
