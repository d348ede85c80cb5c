"""What heartbeats show of a script that does not keep its state with Holdfast. Pure functions.

A script reports each step (`session.report`), or a hook in its framework does, or a program posts
the progress of all ranks every few seconds, or no step is reported. Then the collectives that its
ranks begin are the only sign of progress.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .. import limits
from ..protocol.facts import WorkerBeat
from .context import SECOND_NS, seconds
from .state import JobState

POST_INTERVAL_S = 5.0
"""transformers 5.23 posts at most that often (KubeflowCallback._MIN_UPDATE_INTERVAL)."""
MIN_COLLECTIVES = 100
"""Ranks that have begun fewer may still be loading, with pauses as long as they like."""
SUSPECT_AFTER_S = 4.0
"""Without a new collective for so long, workers are asked what they do. The answers name the rank
that its peers wait for."""


PACE_COLLECTIVES = 64
"""A pause before this many collectives may show that a script was still loading."""
LOADING_PAUSE_S = 1.0
"""Shorter pauses are not taken for loading."""


@dataclass(slots=True)
class Began:
    """Since when the ranks of a script that reports nothing train. They begin some collectives
    while they load, such as a barrier before the model is built: a pause before the last ones that
    is twice as long as the next one was loading."""

    begun: int = 0
    """Collectives that every rank had begun by the last check."""
    at_ns: int = 0
    """When these were seen first; 0: none yet."""
    pause_ns: int = 0
    """How long no rank had begun any before that."""

    @property
    def known(self) -> bool:
        return self.begun >= PACE_COLLECTIVES

    def observe(self, begun: int, now_ns: int) -> float | None:
        """How many seconds ago the training began, if these collectives show it better than the
        last ones; else None."""
        if begun <= self.begun:
            return None
        last_ns, pause_ns, now_pause_ns = self.at_ns, self.pause_ns, now_ns - self.at_ns
        first = self.begun < limits.BEGUN_COLLECTIVES <= begun
        loaded = pause_ns >= max(seconds(LOADING_PAUSE_S), 2 * now_pause_ns)
        self.begun, self.at_ns = begun, now_ns
        self.pause_ns = now_pause_ns if last_ns else 0
        if first:
            return 0.0
        return now_pause_ns / SECOND_NS if loaded and begun >= limits.BEGUN_COLLECTIVES else None


class Beginning(NamedTuple):
    """After which step a script began; `began_after` None: not known, or Holdfast restored it."""

    began_after: int | None = None
    began_estimated: bool = False


def beginning(beats: Iterable[WorkerBeat], done: int, step_s: float) -> Beginning:
    """`done`: the last finished step; `step_s`: the last known step time, 0: not known."""
    every = list(beats)
    known = [(b.began_after, b.began_estimated) for b in every if b.began_after is not None]
    if known:
        return Beginning(*min(known))
    began_s = next((beat.began_s for beat in every if beat.began_s is not None), 0.0)
    if not (began_s and step_s):
        return Beginning()
    return Beginning(max(-1, done - max(1, round(began_s / step_s))), True)


def first_ago_s(beats: Iterable[WorkerBeat], step_s: float) -> float:
    """Seconds since the first step of a framework that posts was finished: it began to train before
    its first post with a step. `step_s`: the last known step time; 0: not known."""
    began_s = next((beat.began_s for beat in beats if beat.began_s is not None), 0.0)
    return max(0.0, began_s - step_s)


def pace_s(beats: Iterable[WorkerBeat]) -> float:
    """How far apart reports of progress may be although the training moves; 0: no rank has steps
    that its framework counts or posts, without a word of what else it does."""
    unsaid = any(beat.counted_by in ("posted", "counted") for beat in beats)
    return POST_INTERVAL_S if unsaid else 0.0


def last_collective_ns(beats: Iterable[tuple[WorkerBeat, int]]) -> int | None:
    """When a rank last began a collective. `beats`: with the times at which they came. None: the
    ranks have begun too few to conclude anything."""
    newest = None
    for beat, seen_ns in beats:
        if beat.collectives < MIN_COLLECTIVES:
            return None
        at_ns = seen_ns - seconds(beat.collectives_age_s)
        newest = at_ns if newest is None else max(newest, at_ns)
    return newest


def early_limit_s(state: JobState) -> float:
    """How long a script that has counted its first steps may do nothing: another step may take as
    long as the first one, in which a rank may wait for a model on another machine."""
    startup_s = state.job.spec.recovery.startup_timeout_s
    first_s = (state.first_step_ns - state.launched_ns) / SECOND_NS
    return min(limits.HANG_STEP_FACTOR * first_s, startup_s) if state.first_step_done else startup_s


def gap_s(before: WorkerBeat, seen_ns: int, after: WorkerBeat, now_ns: int) -> float:
    """Seconds without a collective of this rank between two heartbeats, if they ended by themselves
    in a script that reports no steps; else 0."""
    if (
        not after.silent
        or before.collectives < MIN_COLLECTIVES
        or after.collectives <= before.collectives
    ):
        return 0.0
    began_ns = seen_ns - seconds(before.collectives_age_s)
    return max(0.0, (now_ns - seconds(after.collectives_age_s) - began_ns) / SECOND_NS)
