"""Events of suspected and detected hangs, from the facts of a moment."""

from __future__ import annotations

from statistics import median

from ... import limits
from ...protocol.facts import steps_done
from ..context import SECOND_NS, seconds
from ..events import AnyEvent, HangDetected, HangSuspected, HangSuspicionEnded
from .facts import HangFacts
from .suspects import Suspects, find
from .table import Limit, decide

INSPECT_AGAIN_S = 5.0
"""Seconds between two inspections while a suspicion lasts: what workers do changes."""


def detect(now_ns: int, facts: HangFacts) -> list[AnyEvent]:
    """The events of this moment; each is returned once."""
    generation = facts.generation
    if facts.condition == "busy":
        generation.busy_ns = facts.now_ns
    limit = decide(facts)
    if limit is None or now_ns < limit.due_ns:
        return _suspicion(now_ns, facts)
    generation.hung = True
    suspects = _suspects(now_ns, facts)
    return [
        HangDetected(
            generation=generation.number,
            ranks=suspects.ranks,
            evidence=f"{suspects.why}; the {_explained(facts, limit)}; {_done(facts)}",
            basis=suspects.basis,
            quiet_s=(now_ns - limit.moved_ns) / SECOND_NS,
        )
    ]


def next_ns(facts: HangFacts) -> int | None:
    """Time of the next look, if no event comes until then."""
    limit = decide(facts)
    due = (limit.due_ns if limit is not None else None, _ask_ns(facts))
    return min((at for at in due if at is not None), default=None)


def _ask_ns(facts: HangFacts) -> int | None:
    """Time to ask what the workers do; None: there is no need."""
    generation, after_s = facts.generation, facts.ask_after_s
    if not facts.live or facts.moved_ns is None or after_s is None:
        return None
    due_ns = facts.due_ns(facts.moved_ns, after_s)
    if due_ns is None or generation.suspected_ns is None:
        return due_ns
    return max(due_ns, generation.suspected_ns + seconds(INSPECT_AGAIN_S))


def _suspicion(now_ns: int, facts: HangFacts) -> list[AnyEvent]:
    generation = facts.generation
    moved_ns = now_ns if facts.moved_ns is None else facts.moved_ns
    # A beat's age is rounded, so the same progress may seem a little newer.
    again = moved_ns > generation.suspected_since_ns + seconds(limits.SUSPICION_LEAD_S)
    if generation.suspected_ns is not None and again:
        gap_s = (moved_ns - generation.suspected_since_ns) / SECOND_NS
        generation.suspected_ns = None
        generation.inspected.clear()
        return [HangSuspicionEnded(generation=generation.number, seconds=gap_s)]
    due_ns = _ask_ns(facts)
    if due_ns is None or now_ns < due_ns:
        return []
    if generation.suspected_ns is None:
        generation.suspected_since_ns = moved_ns
    generation.suspected_ns = now_ns
    evidence = f"{_suspects(now_ns, facts).why}; {_done(facts)}"
    return [HangSuspected(generation=generation.number, evidence=evidence)]


def _suspects(now_ns: int, facts: HangFacts) -> Suspects:
    state, generation = facts.state, facts.generation
    assert state.group.membership is not None
    world_size = state.group.membership.world_size
    return find(now_ns, world_size, state.group.exits, generation.ranks, generation.inspected)


def _done(facts: HangFacts) -> str:
    if not facts.counted:
        return "no step was reported"
    return f"all ranks had finished {steps_done(facts.generation.done)}"


def _explained(facts: HangFacts, limit: Limit) -> str:
    text = f"{limit.row.name} limit"
    if limit.row.name == "hang":
        step_s = median(facts.generation.step_s)
        floor_s = limits.HANG_FLOOR_S + facts.pace_s
        text += f" ({floor_s:g} s + {limits.HANG_STEP_FACTOR:g} x {step_s:.2f} s)"
    return f"{text} is {limit.limit_s:.1f} s"
