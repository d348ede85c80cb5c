"""Whether ranks without progress are hung, busy, or short of CPU time. Pure functions.

What heartbeats and inspections show decides how long the job waits: no time beyond the hang limit
for a rank that does nothing while its peers wait for it, more for one that computes, reads or
compiles, most on a machine whose processes wait for the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from .. import limits
from ..protocol.facts import Stack, WorkerBeat
from .context import SECOND_NS

Condition = Literal["idle", "busy", "unknown", "starved"]
"""`idle`: a rank does nothing that its peers wait for, or all wait for each other. `busy`: a rank
works. `unknown`: what a rank does is not known. `starved`: threads of the nodes wait for the
CPU."""

PULSE_STALE_S = 3 * limits.PULSE_INTERVAL_S
"""Without a pulse for longer, the process is stopped, or its interpreter is blocked."""
WORDS: dict[str, str] = {
    "peers": "waits for its peers in a collective",
    "device": "waits for its device",
    "staging": "waits for the copy of its state",
    "engine": "is in the backward pass",
    "reads": "reads",
    "compiles": "compiles",
    "nothing": "is in no collective",
    "": "did not answer",
}


@dataclass(frozen=True, slots=True)
class InspectedStack:
    """A stack, and when it came."""

    stack: Stack
    at_ns: int


@dataclass(frozen=True, slots=True)
class Limit:
    """A hang, unless there is progress before `due_ns`."""

    due_ns: int
    limit_s: float
    name: str
    moved_ns: int = 0
    """When there last was progress; 0: not known."""

    def quiet_s(self, now_ns: int) -> float:
        """Seconds without progress; 0: not known."""
        return (now_ns - self.moved_ns) / SECOND_NS if self.moved_ns else 0.0


def condition(
    now_ns: int,
    beats: Iterable[WorkerBeat],
    inspected: Mapping[int, InspectedStack],
) -> Literal["idle", "busy", "unknown"]:
    """Of the live ranks of a generation without progress."""
    found = [_one(now_ns, beat, inspected.get(beat.rank)) for beat in beats]
    for first in ("busy", "unknown"):
        if first in found:
            return first
    return "idle" if "outside" in found or "device" not in found else "unknown"


def outside_since_ns(
    now_ns: int, beats: Iterable[WorkerBeat], inspected: Mapping[int, InspectedStack]
) -> int:
    """Since when a rank that is in no collective does nothing; without such a rank: now."""
    idle_s = [
        beat.idle_s for beat in beats if _one(now_ns, beat, inspected.get(beat.rank)) == "outside"
    ]
    return now_ns - round(max(idle_s, default=0.0) * SECOND_NS)


def _one(
    now_ns: int, beat: WorkerBeat, known: InspectedStack | None
) -> Literal["busy", "unknown", "outside", "device", "waits"]:
    idle = beat.idle_s >= limits.IDLE_S
    activity = _activity(now_ns, beat, known)
    match activity:
        case "reads" | "compiles" | "staging":
            return "busy"
        case "device":
            return "device"
        case "peers":
            # With CPU use it is a spinning wait or a large transfer.
            return "waits" if idle else "device"
        case "engine" | "nothing" if beat.idle_s == 0:
            return "busy"
        case "engine" if idle:
            return "waits"  # native code of the backward pass waits for a collective
        case "nothing" if idle:
            return "outside"
        case _:
            return "unknown"


def _activity(now_ns: int, beat: WorkerBeat, known: InspectedStack | None) -> str:
    """What the main thread is in now; empty: unknown. An idle process has not moved since its
    stack was taken, if it was idle then."""
    if known is None:
        return ""
    activity = known.stack.activity
    if not activity and known.stack.state != "D" and beat.pulse_age_s > PULSE_STALE_S:
        return "nothing"  # native code holds the interpreter lock
    idle_since_ns = now_ns - round(beat.idle_s * SECOND_NS)
    if activity in ("nothing", "engine") and beat.idle_s and idle_since_ns > known.at_ns:
        return ""
    return activity


def describe(rank: int, beat: WorkerBeat | None, known: InspectedStack | None) -> str:
    """`rank 3 is in no collective, at File "train.py", line 88 in load; it uses no CPU`."""
    if known is None or not known.stack.activity:
        return ""
    text = f"rank {rank} {WORDS[known.stack.activity]}"
    frame = next((line.strip() for line in known.stack.text.splitlines() if "line" in line), "")
    text += f" at {frame}" if frame else ""
    if beat is not None and beat.idle_s >= limits.IDLE_S:
        text += f"; it has used no CPU and done no I/O for {beat.idle_s:.1f} s"
    return text
