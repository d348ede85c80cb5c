"""The checkpoints that a script writes by itself, as its ranks report them.

The guard of each node touches no others. A script that was started again and reads none of them
has begun at step 0: the job is held before it overwrites one, or a remark names it.
"""

from __future__ import annotations

from pathlib import PurePath

from msgspec.structs import replace

from ..protocol.facts import OwnCheckpoint
from ..protocol.messages import OwnCheckpointRead, OwnCheckpointSeen
from .context import StepContext
from .state import JobState

MAX_KNOWN = 64
"""The last ones; a launch carries them to each node."""


def seen(ctx: StepContext, _node: str, fact: OwnCheckpointSeen) -> None:
    """A rank is about to write one."""
    state = ctx.state
    if fact.unread and fact.generation == state.generation:
        _ignored(ctx, fact)
    if fact.waits:
        return
    written = state.own.written
    before = written.pop(fact.path, None)
    times = max(fact.times, before.times if before is not None else 1)
    if before is None or before.generation != fact.generation:
        before = OwnCheckpoint(path=fact.path, generation=fact.generation)
    written[fact.path] = replace(before, times=times)
    while len(written) > MAX_KNOWN:
        del written[next(iter(written))]


def was_read(ctx: StepContext, _node: str, fact: OwnCheckpointRead) -> None:
    """Rank 0 has opened one, or a file in one."""
    state, opened = ctx.state, PurePath(fact.path)
    state.own.read_in = fact.generation
    path = next((str(p) for p in (opened, *opened.parents) if str(p) in state.own.written), "")
    if path:
        checkpoint = state.own.written[path]
        state.own.written[path] = replace(checkpoint, read_by=fact.generation)
        if (incident := state.led_to(fact.generation)) is not None:
            incident.decision += f"; it read {path}"


def start_failed(ctx: StepContext) -> bool:
    """This generation ended with an error of the script before it trained: what it read is not
    offered again while an older one exists. Whether it read one, and another one is known."""
    written, failed = ctx.state.own.written, False
    for path, checkpoint in written.items():
        if checkpoint.read_by == ctx.state.generation:
            written[path], failed = replace(checkpoint, failed=True), True
            ctx.note(f"the start that read {path} failed: an older checkpoint comes first now")
    return failed and not all(c.failed for c in written.values())


def _ignored(ctx: StepContext, fact: OwnCheckpointSeen) -> None:
    """Hold a job whose rank waits, whatever the spec says by now."""
    state = ctx.state
    if not state.group.active or state.stop is not None or state.hold is not None:
        return
    if state.own.ignored_in == fact.generation:
        return
    state.own.ignored_in = fact.generation
    last = newest(state, fact.generation) or newest(state)
    then = "would write" if fact.waits else "writes"
    over = f"{then} over it" if fact.path == last else f"{then} {fact.path}"
    text = f"the restarted script began at step 0: it has not opened {last}, and {over}"
    ctx.note(text)
    incident = state.incidents[-1] if state.incidents else None
    if incident is not None and incident.generation_after == fact.generation:
        incident.evidence = "; ".join(filter(None, (incident.evidence, text)))
    if fact.waits and state.intent == "run":
        name = state.job.name
        ways = (
            f"have it read HOLDFAST_RESUME_FROM_CHECKPOINT and `holdfast resume {name}`, or give a "
            f"new job resumeArgs; `holdfast resume {name} --start-over` trains from step 0"
        )
        ctx.hold(f"{text}; {ways}", text, ignored=True)
    elif state.phase == "running":
        ctx.move("running", state.reason.code, text)


def training_began(ctx: StepContext) -> None:
    """Remark on the beginning; a script may still read a checkpoint."""
    state = ctx.state
    restarted = state.group.membership is not None and state.group.membership.restart_count > 0
    seen_to_read = not state.job.spec.entrypoint.program.words
    last = newest(state, state.generation)
    unread = state.own.read_in != state.generation
    if restarted and seen_to_read and last and unread and state.may_keep_own_checkpoints:
        ctx.note(f"rank 0 trains, and has not opened a checkpoint such as {last} (yet)")


def resumed(ctx: StepContext, *, start_over: bool) -> None:
    """A user has decided about a job that is held."""
    if start_over:
        ctx.state.own.written.clear()


def newest(state: JobState, before: int | None = None) -> str:
    """The path of the one that was written last, one that is written again and again first; empty:
    no rank was seen to write one. `before`: by generations before this one."""
    kept = [
        c for c in reversed(state.own.written.values()) if before is None or c.generation < before
    ]
    return next((c.path for c in kept if c.times > 1), kept[0].path if kept else "")


def describe(state: JobState) -> str:
    """Clause of a decision to restart a script whose state Holdfast does not restore."""
    path = newest(state)
    return f"the script last wrote {path}" if path else "no checkpoint of the script was seen"
