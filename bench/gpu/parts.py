"""All measurements, in the order of the page."""

from __future__ import annotations

from . import check

PARTS = {"check": check}
EVERY = tuple(one for part in PARTS.values() for one in part.measurements())
