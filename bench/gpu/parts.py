"""All measurements, in the order of the page."""

from __future__ import annotations

from . import check, numbers, plan, recover, stage, train

PARTS = {
    "check": check,
    "recover": recover,
    "stage": stage,
    "plan": plan,
    "numbers": numbers,
    "train": train,
}
EVERY = tuple(one for part in PARTS.values() for one in part.measurements())
