"""Waits for a condition with a bound."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


class Waited(AssertionError):
    """The condition did not become true in time; the text shows the last state."""


def until(
    condition: Callable[[], Found | None],
    what: str,
    *,
    timeout_s: float,
    every_s: float = 0.1,
    last: Callable[[], object] | None = None,
) -> Found:
    """Return the first true value of the condition. `last` describes the state at a timeout."""
    ends_s = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() >= ends_s:
            seen = f"; last seen: {last()}" if last else ""
            raise Waited(f"waited {timeout_s:g} s for {what}{seen}")
        time.sleep(every_s)
