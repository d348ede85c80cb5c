"""What people want, and planned interruptions: suspend, cancel, deadline, resize, preemption.

Owns: state.intent and the wanted size. Must not: know how a generation is stopped or placed.
"""

from __future__ import annotations

from . import ending, membership, recovery
from .actions import Reason
from .events import CancelRequested, ResizeRequested, ResumeRequested, SuspendRequested
from .ranks import check_resize, resized
from .state import PURPOSE_CODE, JobState
from .turn import Turn


def resize(turn: Turn, event: ResizeRequested) -> None:
    state = turn.state
    problem = check_resize(state.job, event.nodes)
    if problem:
        turn.note(problem)
        return
    state.resized = event.nodes != state.target_nodes
    state.job = resized(state.job, event.nodes)


def suspend(turn: Turn, event: SuspendRequested) -> None:
    state = turn.state
    if state.phase == "finishing":
        turn.note("suspend: the job is finishing already")
    elif state.intent == "run":
        state.intent, state.asked = "suspend", _by("suspend", event.by)


def resume(turn: Turn, event: ResumeRequested) -> None:
    if turn.state.intent == "suspend":
        turn.state.intent = "run"


def cancel(turn: Turn, event: CancelRequested) -> None:
    state = turn.state
    if state.verdict is not None:
        ending.end_now(turn, _by("cancel", event.by))
    else:
        state.intent, state.asked = "cancel", _by("cancel", event.by)


def _by(what: str, who: str) -> str:
    return f"{what} was asked for" + (f" by {who}" if who else "")


def follow_intent(turn: Turn) -> None:
    """Suspend, cancel or the deadline: end what runs, then the job."""
    state = turn.state
    if state.intent == "run":
        if state.phase == "suspended":
            turn.move("pending", "resume", "resumed; waiting for nodes")
            state.placing = True
        elif state.active and state.stop is None and _all_done(state):
            text = f"all {len(state.exits)} workers ended with exit code 0"
            recovery.interrupt(turn, "finish", Reason("finish", text))
        return
    if state.active:
        if state.stop is None:
            recovery.interrupt(turn, state.intent, Reason(PURPOSE_CODE[state.intent], state.asked))
    elif state.verdict is not None:
        return
    elif state.intent == "cancel":
        ending.end_early(turn, "cancelled", "cancel", state.asked)
    elif state.intent == "deadline":
        ending.end_early(turn, "failed", "deadline", state.asked)
    elif state.drain is None and state.phase != "suspended":
        state.placing = False
        ending.start_drain(turn, "suspend")


def _all_done(state: JobState) -> bool:
    size = state.membership.world_size if state.membership else 0
    return len(state.exits) == size and all(e.code == 0 for _n, e in state.exits.values())


def planned(turn: Turn) -> None:
    """Another size, or a node that will be taken away: a planned interruption."""
    state = turn.state
    if state.phase != "running" or not state.active or state.stop is not None:
        return
    size, full = len(state.members), membership.full_size(state)
    possible = membership.possible_size(state)
    leaving = [n for n in state.members if n in state.nodes and state.nodes[n].preempting]
    if leaving:
        if possible >= min(size, full) or turn.due("preempt"):
            text = f"{', '.join(leaving)} will be taken away; {possible} nodes are usable"
            recovery.interrupt(turn, "preemption", Reason("preemption", text))
        else:
            turn.arm_once("preempt", state.job.spec.recovery.replacement_wait_s)
    elif size > full:
        text = f"from {size} to {full} nodes, as asked"
        recovery.interrupt(turn, "resize", Reason("resize", text))
    elif possible > size:
        turn.arm_once("grow", state.job.spec.recovery.grow_delay_s)
        if turn.due("grow") or (state.resized and possible == full):
            text = f"{possible} nodes are usable, {size} are used"
            recovery.interrupt(turn, "resize", Reason("resize", text))
    else:
        turn.disarm("grow")
