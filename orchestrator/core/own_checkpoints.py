"""The checkpoints that a script writes by itself, as its ranks report them: the guard of each node
touches no others."""

from __future__ import annotations

from ..protocol.facts import OwnCheckpoint
from .context import StepContext
from .events import OwnCheckpointSeen
from .state import JobState

MAX_KNOWN = 64
"""The last ones; a launch carries them to each node."""


def seen(ctx: StepContext, event: OwnCheckpointSeen) -> None:
    known = ctx.state.own_checkpoints
    before = known.pop(event.path, None)
    times = max(event.times, before.times if before is not None else 1)
    known[event.path] = OwnCheckpoint(path=event.path, generation=event.generation, times=times)
    while len(known) > MAX_KNOWN:
        del known[next(iter(known))]


def newest(state: JobState) -> str:
    """The path of the one that was written last; empty: no rank was seen to write one."""
    return next(reversed(state.own_checkpoints), "")


def describe(state: JobState) -> str:
    """For the decision about a restart: Holdfast restores no state of this script."""
    path = newest(state)
    return f"the script last wrote {path}" if path else "no checkpoint of the script was seen"
