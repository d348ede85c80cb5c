"""How long a job's nodes take from promise to arrival, whether a shrink waits for one, and what
follows when they end before they arrive.

A replacement saves a second restart, so a shrink waits for one, but only for one that can be there
before the wait is over. Where nodes come from, and how long that takes, differs by a factor of a
hundred between backends. A backend may know it (on one machine the first nodes wait for torch to be
imported, later ones are forked); else the job's own nodes have shown it, each time one came.
"""

from __future__ import annotations

from .actions import RequestNodes
from .context import SECOND_NS, StepContext, seconds
from .state import JobState

RETRY_MIN_S, RETRY_MAX_S = 1.0, 300.0
"""Pauses between requests when nodes end before they join, each twice as long as the one before: a
wrong image or a low limit would otherwise make nodes as fast as they fail."""
UNSTARTED_KEPT = 2
"""Nodes that ended so and are not given back yet: their logs say why."""
STARTS_KEPT = 8
"""Newest starts that count. The first ones of a job may have pulled images; the last ones tell what
a replacement takes."""


def came(state: JobState, name: str) -> None:
    """A promised node is here."""
    since_ns = _no_longer_coming(state, name)
    if since_ns is not None and name not in state.recovered_pending:
        state.start_durations_ns.append(state.now_ns - since_ns)
        del state.start_durations_ns[:-STARTS_KEPT]
    state.recovered_pending = {
        one: None for one in state.recovered_pending if one in state.pending_nodes
    }
    state.num_failed_starts = 0
    state.failed_starts.clear()


def ended_early(ctx: StepContext, name: str, detail: str) -> list[str]:
    """A promised node ended before it joined. Returns those to give back now."""
    state = ctx.state
    _no_longer_coming(state, name)
    state.failed_starts[name] = detail
    if "request" not in state.timers:  # else it belongs to a failure that is waited out already
        state.num_failed_starts += 1
        doubled = 2.0 ** min(state.num_failed_starts - 1, 30)
        ctx.arm("request", min(RETRY_MIN_S * doubled, RETRY_MAX_S))
    surplus = list(state.failed_starts)[:-UNSTARTED_KEPT]
    for one in surplus:
        del state.failed_starts[one]
    return surplus


def _no_longer_coming(state: JobState, name: str) -> int | None:
    """Since when it was; a promise without a name stands for any node."""
    nameless = (promised for promised in state.pending_nodes if promised.startswith("?"))
    return state.pending_nodes.pop(
        name if name in state.pending_nodes else next(nameless, ""), None
    )


def why_none_comes(state: JobState) -> str:
    """To be added to the words of a job that waits for nodes; empty: nothing is known."""
    if not state.failed_starts:
        return ""
    name, detail = next(reversed(state.failed_starts.items()))
    return f"; {name} ended before it joined: {detail}"


def may_wait(ctx: StepContext) -> bool:
    """A node is on its way and the wait for one is not over."""
    due_ns = ctx.state.timers.get("replacement")
    return due_ns is not None and due_ns > ctx.now_ns and ctx.state.expected_nodes > 0


def worth_a_wait(ctx: StepContext) -> bool:
    """... and it can be here before the wait is over: as the backend says or, where it does not
    know, as the job's nodes have shown. As long as nothing is known, every promise is believed."""
    state = ctx.state
    known = _known(state)
    asked = any(isinstance(action, RequestNodes) for action in state.inflight.values())
    if not may_wait(ctx) or asked or not known:
        return may_wait(ctx)
    patience = seconds(state.job.spec.recovery.replacement_wait_s)
    # What is long overdue (a pod without a place, say) comes at no time that could be told.
    return any(
        since + min(known) <= state.timers["replacement"]
        and ctx.now_ns <= since + max([*known, *state.start_durations_ns]) + patience
        for since in state.pending_nodes.values()
    )


def why_no_wait(ctx: StepContext) -> str:
    """Said with a shrink that has not waited though a node is on its way; else empty."""
    if not may_wait(ctx) or worth_a_wait(ctx):
        return ""
    least_s = min(_known(ctx.state)) / SECOND_NS
    return f", without waiting for a replacement: nodes of this job took {least_s:.1f} s or more"


def _known(state: JobState) -> list[int]:
    """How long nodes take to start, in nanoseconds."""
    return (
        state.start_durations_ns if state.expected_start_ns is None else [state.expected_start_ns]
    )
