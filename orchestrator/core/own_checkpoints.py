"""The checkpoints that a script writes by itself, as its ranks report them: the guard of each node
touches no others."""

from __future__ import annotations

from ..protocol.facts import OwnCheckpoint
from .context import StepContext
from .events import OwnCheckpointSeen

MAX_KNOWN = 64
"""The last ones; a launch carries them to each node."""


def seen(ctx: StepContext, event: OwnCheckpointSeen) -> None:
    known = ctx.state.own_checkpoints
    before = known.pop(event.path, None)
    times = max(event.times, before.times if before is not None else 1)
    known[event.path] = OwnCheckpoint(path=event.path, generation=event.generation, times=times)
    while len(known) > MAX_KNOWN:
        del known[next(iter(known))]
