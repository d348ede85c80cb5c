"""Calls to the cluster's head that are made again while it does not answer.

Owns: that, in a thread. Must not: know what the calls do; they are safe to repeat.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from holdfast.orchestrator.errors import HoldfastError

PATIENCE_S = 120.0
"""A head that restarts is back within a minute where Ray keeps its state; training goes on."""
PAUSE_S = 0.5

log = logging.getLogger("holdfast.ray")
T = TypeVar("T")


async def patiently(work: Callable[[], T], what: str, patience_s: float = PATIENCE_S) -> T:
    """In a thread, until it succeeds. Raises HoldfastErrors of `work`, and after that long what it
    raised last."""
    loop = asyncio.get_running_loop()
    give_up = loop.time() + patience_s
    while True:
        try:
            return await asyncio.to_thread(work)
        except HoldfastError:
            raise
        # Ray raises its own RpcError, but also plain RuntimeErrors, depending on its version.
        except Exception as error:
            if loop.time() > give_up:
                raise
            log.warning("%s: %s; trying again", what, error)
        await asyncio.sleep(PAUSE_S)
