"""A kernel that reads memory which is not allocated. Imported by a fault only."""

from __future__ import annotations

import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]


@triton.jit  # type: ignore[untyped-decorator]
def load(source, places):  # type: ignore[no-untyped-def]
    tl.store(source, tl.load(source + tl.load(places)))
