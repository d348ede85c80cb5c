"""The end of a job and its suspension: the newest state goes to storage, nodes are released."""

from __future__ import annotations

from ..protocol.facts import state_after
from . import drain
from .actions import FinishJob, Outcome, Reason, ReasonCode
from .checkpoints import in_memory, newest_committed, retained
from .context import StepContext
from .state import PLACEMENT, PLANNED, Drain, DrainKind, JobState, PendingStop


def workers_done(ctx: StepContext, stop: PendingStop) -> None:
    """All workers ended with exit code 0; their nodes have reported what their memory holds."""
    state = ctx.state
    final = min((exit.step for _node, exit in state.group.exits.values()), default=-1)
    newest, held = newest_committed(state), next(iter(in_memory(state)), None)
    best = max(newest.step if newest else -1, held[0][0] if held else -1)
    recipe = state.job.spec.entrypoint.recipe
    ours = recipe is not None or state.counted_by == "session" or newest is not None
    if stop.lost and best < final and ours:
        _train_again(ctx, f"{state_after(final)} was lost with {', '.join(stop.lost)}")
    else:
        start_drain(ctx, DrainKind.FINISH)


def _train_again(ctx: StepContext, text: str) -> None:
    """Finished steps would be lost with the end of the job."""
    drain.end(ctx)
    ctx.place()
    ctx.note(text)
    ctx.move("recovering", "infrastructure", text)


def end_early(ctx: StepContext, outcome: Outcome, reason: Reason, traceback: str = "") -> None:
    """End the job before its last step. Its newest state in memory goes to storage first."""
    state = ctx.state
    state.termination_reason, state.outcome, state.traceback = reason, outcome, traceback
    ctx.place(False)
    ctx.disarm(*PLACEMENT, *PLANNED, "rejoin", "deadline", "cadence")
    ctx.move("finishing", reason.code, reason.text)
    start_drain(ctx, DrainKind.END)


def end_now(ctx: StepContext, why: str) -> None:
    """A user does not want to wait for the last checkpoint of a job that ends early."""
    reason, outcome = ctx.state.termination_reason, ctx.state.outcome
    assert reason is not None and outcome is not None
    finish(ctx, outcome, Reason(reason.code, f"{reason.text}; not waiting for storage: {why}"))


def suspend(ctx: StepContext) -> None:
    """No workers run: write the newest state, then release all nodes."""
    ctx.place(False)
    ctx.disarm(*PLACEMENT, *PLANNED)
    ctx.move("suspending", _suspend_code(ctx), ctx.state.intent_reason)
    start_drain(ctx, DrainKind.SUSPEND)


def hold(ctx: StepContext, text: str) -> None:
    """Suspend the job until a user decides how it continues."""
    ctx.hold(text)
    ctx.note(text)
    suspend(ctx)


def _suspend_code(ctx: StepContext) -> ReasonCode:
    return "checkpoint" if ctx.state.hold is not None else "suspend"


def start_drain(ctx: StepContext, kind: DrainKind) -> None:
    state = ctx.state
    started = drain.start(ctx, kind)
    if started is None:
        _drained(ctx, kind, "")
        return
    text = f"writing {state_after(started.step)} to storage"
    code: ReasonCode = "finish" if kind == DrainKind.FINISH else _suspend_code(ctx)
    if state.termination_reason is not None:
        code = state.termination_reason.code
        text = f"{state.termination_reason.text}; {text}"
    ctx.move(state.phase, code, text)


def check_drain(ctx: StepContext) -> None:
    """Reconciler: is the state that is written committed, or lost?"""
    state, writing = ctx.state, ctx.state.drain
    if writing is None:
        return
    if writing.kind == DrainKind.AT_RISK:
        drain.check_at_risk(ctx, writing)
        return
    if writing.kind == DrainKind.SUSPEND and state.intent == "run":
        drain.end(ctx)
        ctx.place()
        ctx.move("recovering", "resume", "resumed before it was suspended")
        return
    match drain.progress(state, writing):
        case "committed":
            newest = newest_committed(state)
            assert newest is not None
            _drained(ctx, writing.kind, f"{state_after(newest.step)} is committed")
        case "lost":
            _drain_another(ctx, writing)
        case "under way" if ctx.due("persist") or writing.hopeless:
            _give_up(ctx, writing)


def _drain_another(ctx: StepContext, writing: Drain) -> None:
    """Shards of the state were lost: write an older state, or train the lost steps again."""
    shards = drain.lost_shards(ctx.state, writing)
    ctx.note(f"{state_after(writing.step)}: shards {shards} were lost before they were written")
    if writing.kind == DrainKind.FINISH:
        _train_again(ctx, f"{state_after(writing.step)} was lost before it was written")
    else:
        start_drain(ctx, writing.kind)


def _give_up(ctx: StepContext, writing: Drain) -> None:
    """Storage does not take the last checkpoint. What was trained is lost with the nodes' memory,
    so a job whose workers are done has not succeeded."""
    newest = newest_committed(ctx.state)
    within = "" if writing.hopeless else f" in {drain.final_timeout_s(ctx.state):g} s"
    text = (
        f"{state_after(writing.step)} was not written to storage{within} "
        f"({writing.problem or 'the store did not answer'}); storage holds "
        f"{state_after(newest.step) if newest else 'no checkpoint'}"
    )
    ctx.note(text)
    if writing.kind == DrainKind.FINISH:
        text = f"all workers ended with exit code 0, but {text}"
        finish(ctx, "failed", Reason("checkpoint", text))
    else:
        _drained(ctx, writing.kind, text)


def _drained(ctx: StepContext, kind: DrainKind, text: str) -> None:
    state = ctx.state
    drain.end(ctx)
    if kind == DrainKind.END:
        reason, outcome = state.termination_reason, state.outcome
        assert reason is not None and outcome is not None
        finish(ctx, outcome, Reason(reason.code, f"{reason.text}; {text}".rstrip("; ")))
        return
    if kind == DrainKind.FINISH:
        text = f"all workers ended with exit code 0; {text}".rstrip("; ")
        finish(ctx, "succeeded", Reason("finish", text))
        return
    # provisioning.release_surplus releases its nodes.
    state.group.members = ()
    ctx.place(False)
    state.deadline_left_s = ctx.left_s("deadline")
    ctx.disarm("deadline", "rejoin")
    if state.hold is not None:
        text = f"{state.hold.text}; {text}".rstrip("; ")
    ctx.move("suspended", _suspend_code(ctx), text or "nothing had to be written")


def finish(ctx: StepContext, outcome: Outcome, reason: Reason) -> None:
    """The last action of the job."""
    state = ctx.state
    drain.end(ctx)
    ctx.place(False)
    state.outcome = outcome
    state.timers.clear()
    state.inflight.clear()
    ctx.move(outcome, reason.code, reason.text)
    _emit_finish(ctx, reason)


def finished(ctx: StepContext, detail: str) -> None:
    """The result of FinishJob."""
    ctx.state.finish_action = None
    ctx.state.inflight.clear()
    if detail:
        ctx.note(detail)


def take_deadline_left_s(state: JobState) -> float | None:
    left_s, state.deadline_left_s = state.deadline_left_s, None
    return left_s


def retry_finish(ctx: StepContext, why: str) -> None:
    """The result of FinishJob was lost, or it failed."""
    state = ctx.state
    ctx.disarm("finish")
    _emit_finish(ctx, Reason(state.reason.code, f"{state.reason.text} ({why})"))


def _emit_finish(ctx: StepContext, reason: Reason) -> None:
    state = ctx.state
    assert state.outcome is not None
    kept = retained(state)
    state.finish_action = ctx.emit(FinishJob, reason, outcome=state.outcome, retained=kept)
