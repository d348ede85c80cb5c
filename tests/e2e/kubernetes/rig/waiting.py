"""Waits for conditions with a bound. Owns no condition; must not be used as a plain sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


class Waited(AssertionError):
    """The condition did not come in time; the text says what was seen last."""


def until(
    condition: Callable[[], Found | None],
    what: str,
    *,
    timeout_s: float,
    every_s: float = 0.1,
    last: Callable[[], object] | None = None,
) -> Found:
    """Returns the first true value of the condition.

    `last` describes what is there instead; it is asked once, when time is up.
    """
    ends_s = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() >= ends_s:
            seen = f"; last seen: {last()}" if last else ""
            raise Waited(f"waited {timeout_s:g} s for {what}{seen}")
        time.sleep(every_s)
