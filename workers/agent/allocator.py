"""What the C library does with memory that a worker frees: it keeps it for the next step.

Owns: these limits. Must not: touch PyTorch's own allocators of device or page-locked memory.

glibc hands the freed end of a heap back to the kernel, and the next step has it given anew, page by
page: 2 us each in a virtual machine. A training step frees and asks for the same again and again.
How often the end of a heap is free depends on where things happen to lie, so ranks differed by ten
times in their page faults, and all of them wait for the slowest (bench/results/malloc.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

LIMITS = {
    "MALLOC_TRIM_THRESHOLD_": (-1, 512 * 2**20),
    "MALLOC_TOP_PAD_": (-2, 64 * 2**20),
    "MALLOC_MMAP_THRESHOLD_": (-3, 32 * 2**20),
}
"""Variable of glibc -> (parameter of mallopt, bytes), see mallopt(3). Free memory at the end of a
heap that is kept; what a heap grows by (as long as a thread's heap can be: those end otherwise when
they are empty); from where on a block is a mapping of its own, which goes back when it is freed
(the most that glibc takes)."""

_MOST = 2**31 - 1


def keep_freed_memory(environment: Mapping[str, str]) -> None:
    """Set the limits for this process.

    Those in its environment win: glibc itself reads them when a program starts, and a worker is
    forked. Nothing happens where GLIBC_TUNABLES are set for malloc, or where the C library has no
    mallopt.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "glibc.malloc." in environment.get("GLIBC_TUNABLES", ""):
        return
    for name, (parameter, num_bytes) in LIMITS.items():
        given = environment.get(name, "")
        mallopt(parameter, min(int(given), _MOST) if given.isdecimal() else num_bytes)
