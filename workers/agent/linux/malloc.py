"""malloc's limits of a worker, from its environment.

Owns: how glibc is told. Must not: choose the values (orchestrator/protocol/environment.py), or
touch PyTorch's own allocators of device or page-locked memory.

glibc reads its variables when a program starts; a worker is forked, so it would never see its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

PARAMETERS = {
    "MALLOC_TRIM_THRESHOLD_": -1,
    "MALLOC_TOP_PAD_": -2,
    "MALLOC_MMAP_THRESHOLD_": -3,
}
"""Variable -> parameter of mallopt(3), in bytes."""

_MOST = 2**31 - 1


def adopt(environment: Mapping[str, str]) -> None:
    """Set the limits that are there for this process. One that is not a number is passed over, as
    glibc does it, and all are where the C library has no mallopt."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for name, parameter in PARAMETERS.items():
        value = environment.get(name, "")
        if value.isdecimal():
            mallopt(parameter, min(int(value), _MOST))
