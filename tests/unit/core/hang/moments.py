"""Moments in the life of four ranks on two nodes, as the rows of the table see them."""

from __future__ import annotations

import functools
from typing import Any

from holdfast.orchestrator.core.context import recovery_of
from holdfast.orchestrator.core.hang.facts import (
    HangFacts,
    InspectedStack,
    RankProgress,
    WatchedGeneration,
)
from holdfast.orchestrator.core.liveness import FailureDetector
from holdfast.orchestrator.core.state import JobState
from holdfast.orchestrator.protocol.facts import Exit, Stack, WorkerBeat

from ..harness import SECOND, Transcript, spec

NOW = 10_000 * SECOND
LAUNCHED_S = 2_000.0
"""Seconds since the launch, unless a test says otherwise."""
WAITS = {"activity": "peers", "idle_s": 5.0}
OUTSIDE = {"activity": "nothing", "idle_s": 5.0}
WORKS = {"activity": "nothing"}
READS = {"activity": "reads", "idle_s": 5.0}
DEVICE = {"activity": "device", "idle_s": 5.0}
BEGUN = {"collectives": 100}


def ns(seconds: float) -> int:
    return round(seconds * SECOND)


@functools.cache
def _state(script: bool, recovery: tuple[tuple[str, Any], ...]) -> JobState:
    return Transcript(spec(script=script, recovery=dict(recovery))).started(step=None).state


def ranks(*given: dict[str, Any]) -> tuple[dict[int, RankProgress], dict[int, InspectedStack]]:
    """Heartbeats of four ranks, the last of `given` for the others, and their stacks."""
    known: dict[int, RankProgress] = {}
    stacks: dict[int, InspectedStack] = {}
    for rank in range(4):
        facts = {"quiet_s": 9.0, "phase": "train", "step": 9, "ticks": 20, "pulse_age_s": 0.1}
        facts |= given[min(rank, len(given) - 1)]
        activity, ran_s = facts.pop("activity", None), facts.pop("ran_s", 0.0)
        if facts.pop("never", False):
            continue
        stack = Stack(rank, facts.pop("text", ""), activity == "peers", "S", activity or "")
        if activity is not None:
            stacks[rank] = InspectedStack(stack, NOW)
        beat = WorkerBeat(rank=rank, **facts)
        known[rank] = RankProgress(beat, NOW - ns(beat.quiet_s), NOW, NOW - ns(ran_s))
    return known, stacks


def moment(
    *given: dict[str, Any],
    steps: int = 10,
    script: bool = False,
    ended: int = 0,
    busy_s: float | None = None,
    starved_s: float | None = None,
    gap_s: float = 0.0,
    launched_s: float = LAUNCHED_S,
    first_s: float | None = None,
    **recovery: Any,
) -> HangFacts:
    """`busy_s`, `starved_s`, `launched_s`: so many seconds ago; `ended`: so many ranks have ended;
    `first_s`: seconds from the launch to the first step."""
    state = _state(script, tuple(recovery.items()))
    state.group.launched_ns = NOW - ns(launched_s)
    state.group.first_step_ns = 0 if first_s is None else state.group.launched_ns + ns(first_s)
    state.group.exits = {rank: ("a", Exit(rank=rank, code=0)) for rank in range(ended)}
    generation = WatchedGeneration(1, num_steps=steps)
    generation.ranks, generation.inspected = ranks(*given)
    generation.step_s.extend([0.5] * min(steps, 32))
    generation.busy_ns = NOW - ns(busy_s) if busy_s is not None else 0
    silence, much_later = FailureDetector(), NOW + ns(1e5)
    silence.begin(much_later)  # heartbeats are always current
    for node in state.group.members:
        silence.observed(much_later, node, state.job.spec.recovery)
    starved_ns = None if starved_s is None else NOW - ns(starved_s)
    return HangFacts(state, recovery_of(state.job), generation, silence, gap_s, starved_ns)
