"""Facts of the ranks of a generation, and the activity of each. Pure.

Heartbeats show progress, CPU use and the pulse of each rank. Stacks, which the agents send while a
hang is suspected, show what the main threads are in. The rows of the table read both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from ... import limits
from ...api.v1alpha1 import Recovery
from ...protocol.facts import Stack, WorkerBeat, counting
from ..context import SECOND_NS, seconds
from ..liveness import FailureDetector
from ..state import JobState

RECENT_STEPS = 32
"""Step times that the median is taken over."""
WORKING = ("build", "restore", "compile", "evaluate", "save", "finish")
"""Worker phases other than training, which may take long without progress."""
PULSE_STALE_S = 3 * limits.PULSE_INTERVAL_S
"""Seconds without a pulse after which the process is stopped, or its interpreter is blocked."""
GAP_BEATS = 2.0
"""Heartbeat intervals that a time without progress may be longer than the heartbeats showed."""
STARVED_MEMORY_S = 10.0
"""Seconds after a starved heartbeat in which the job's machines count as starved."""
MIN_COLLECTIVES = 100
"""Ranks that have begun fewer may still be loading, with pauses as long as they like."""
POST_INTERVAL_S = 5.0
"""transformers 5.23 posts at most that often (KubeflowCallback._MIN_UPDATE_INTERVAL)."""
SUSPECT_AFTER_S = 4.0
"""Seconds without a collective after which the workers of a script without step times are asked
what they do. The answers name the rank that its peers wait for."""

Doing = Literal["busy", "unknown", "outside", "device", "waits"]
"""A rank works; it may work; it does nothing and is in no collective; it waits for its device,
which may compute; it waits for its peers."""
DOING: dict[str, tuple[Doing, Doing, Doing]] = {
    # It uses the CPU (a spinning wait, a large transfer), has just stopped to, is idle.
    "reads": ("busy", "busy", "busy"),
    "compiles": ("busy", "busy", "busy"),
    "staging": ("busy", "busy", "busy"),
    "device": ("device", "device", "device"),
    "peers": ("device", "device", "waits"),
    "engine": ("busy", "unknown", "waits"),  # native code computes, or waits for a collective
    "nothing": ("busy", "unknown", "outside"),
    "": ("unknown", "unknown", "unknown"),
}


@dataclass(frozen=True, slots=True)
class InspectedStack:
    """A stack, and when it came."""

    stack: Stack
    at_ns: int


@dataclass(slots=True)
class RankProgress:
    """The newest heartbeat of a rank."""

    beat: WorkerBeat
    moved_ns: int
    """Last sign of progress, by the controller's clock."""
    seen_ns: int = 0
    """Time at which the beat came."""
    ran_ns: int = 0
    """Time at which the process was last seen not stopped."""


@dataclass(slots=True)
class WatchedGeneration:
    """Heartbeats and inspections of one generation."""

    number: int = 0
    ranks: dict[int, RankProgress] = field(default_factory=dict)
    done: int = -1
    """Last step finished by all ranks, according to heartbeats."""
    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    num_steps: int = 0
    hung: bool = False
    suspected_ns: int | None = None
    """Time of the last suspicion of a hang; None: there is progress."""
    suspected_since_ns: int = 0
    """The last progress at that time."""
    inspected: dict[int, InspectedStack] = field(default_factory=dict)
    busy_ns: int = 0
    """Time at which a rank last worked while none had progress: no hang began before."""

    def record(self, now_ns: int, beat: WorkerBeat, interval_s: float) -> float:
        """Take in a heartbeat; returns the seconds without progress of this rank that it ended."""
        seen = self.ranks.get(beat.rank)
        if seen is not None and (beat.step, beat.ticks) < (seen.beat.step, seen.beat.ticks):
            return 0.0  # a newer one overtook it
        moved_ns = now_ns - seconds(beat.quiet_s)
        ran_ns = seen.ran_ns if beat.stopped and seen is not None else now_ns
        self.ranks[beat.rank] = RankProgress(beat, moved_ns, now_ns, ran_ns)
        if seen is None or {seen.beat.phase, beat.phase} & {*WORKING}:
            return 0.0
        trains = self.num_steps > 0 or (beat.silent and seen.beat.collectives >= MIN_COLLECTIVES)
        # Steps between two heartbeats are not seen.
        shown_s = seen.beat.quiet_s + GAP_BEATS * interval_s
        return min((moved_ns - seen.moved_ns) / SECOND_NS, shown_s) if trains else 0.0


def doing(now_ns: int, beat: WorkerBeat, known: InspectedStack | None) -> Doing:
    """A rank's present activity. Its stack holds for as long as the process has been idle since."""
    if known is None:
        return "unknown"
    activity, idle = known.stack.activity, (beat.idle_s > 0) + (beat.idle_s >= limits.IDLE_S)
    if not activity and known.stack.state != "D" and beat.pulse_age_s > PULSE_STALE_S:
        return DOING["nothing"][idle]  # native code holds the interpreter lock
    holds = activity not in ("nothing", "engine") or now_ns - seconds(beat.idle_s) <= known.at_ns
    return DOING[activity][idle] if holds or not idle else "unknown"


def condition(every: Collection[Doing]) -> Literal["busy", "unknown", "idle"]:
    """`idle`: a rank does nothing that its peers wait for, or all wait for each other."""
    if "busy" in every:
        return "busy"
    waits = "outside" in every or "device" not in every
    return "idle" if waits and "unknown" not in every else "unknown"


class HangFacts:
    """Facts that the rows of the table read, at one moment."""

    def __init__(
        self,
        state: JobState,
        recovery: Recovery,
        generation: WatchedGeneration,
        silence: FailureDetector,
        worst_gap_s: float,
        starved_ns: int | None,
    ) -> None:
        """`worst_gap_s`: the longest time without progress that ended by itself; `starved_ns`: when
        a machine of the job was last short of CPU time."""
        self.state, self.recovery, self.generation = state, recovery, generation
        self._silence, self._worst_gap_s = silence, worst_gap_s
        ranks = generation.ranks
        self.live = {
            rank: watched
            for rank, watched in ranks.items()
            if rank not in state.group.exits and not watched.beat.leaves
        }
        """Ranks that have neither ended nor run to the end of their script."""
        live = self.live.values()
        self.now_ns = max((watched.seen_ns for watched in live), default=0)
        self.auto = recovery.hang_timeout_s == "auto"
        self.counted = generation.num_steps > 0
        enough = generation.num_steps >= limits.HANG_SAMPLES and bool(generation.step_s)
        self.learned = self.auto and enough
        """The job's own step time is known."""
        script = state.job.spec.entrypoint.recipe is None
        self.silent = script and not self.counted and all(k.beat.silent for k in live)
        """No step of the script was counted, and no rank prepares for one."""
        self.begun = bool(live) and all(k.beat.collectives >= MIN_COLLECTIVES for k in live)
        early = script and self.counted and self.auto and not self.learned
        self.by_collectives = self.begun and (self.silent or early)
        """No step was counted, or too few to know how long one takes."""
        self.works = any(watched.beat.phase in WORKING for watched in live)
        newest_ns = max([state.group.launched_ns, *(watched.moved_ns for watched in live)])
        reporting = [beat.rank for beat in counting(watched.beat for watched in ranks.values())]
        oldest_ns = min((ranks[r].moved_ns for r in reporting if r in self.live), default=None)
        any_counts = self.works or self.by_collectives or not self.counted
        self.moved_ns = newest_ns if any_counts else oldest_ns
        """The last progress of the job. In steps all ranks wait for the one whose progress is the
        oldest. None: the ranks that report steps have ended."""
        unsaid = any(k.beat.counted_by in ("posted", "counted") for k in ranks.values())
        self.pace_s = POST_INTERVAL_S if unsaid else 0.0
        """Seconds between reports of progress of a training that moves; 0: no rank has
        steps that its framework counts or posts, without a word of what else it does."""
        self._read_activity(-1 if starved_ns is None else starved_ns + seconds(STARVED_MEMORY_S))

    def _read_activity(self, starved_until_ns: int) -> None:
        ranks, live, stacks = self.generation.ranks, self.live.values(), self.generation.inspected
        self.stopped_ns = min((k.ran_ns for k in live if k.beat.stopped), default=None)
        """Time at which the rank that has been stopped for longest ran last."""
        self.starved = starved_until_ns >= self.now_ns
        does = {r: doing(self.now_ns, k.beat, stacks.get(r)) for r, k in self.live.items()}
        self.condition = condition(does.values())
        self.hangs = self.condition == "idle" and not self.starved
        outside_s = [self.live[r].beat.idle_s for r in does if does[r] == "outside"]
        outside_ns = self.now_ns - seconds(max(outside_s, default=0.0))
        self.excused_ns = max(self.generation.busy_ns, min(starved_until_ns, outside_ns))
        """Time until which a rank worked or its machine was starved; an idle rank needs no CPU."""
        launched_ns, startup_s = self.state.group.launched_ns, self.recovery.startup_timeout_s
        complete = bool(live) and len(live) == len(ranks)
        worked = (watched.seen_ns - seconds(watched.beat.idle_s) for watched in live)
        self.idle_ns = max([launched_ns, *worked])
        """Time since which no rank of a script uses the CPU or does I/O."""
        early = self.idle_ns - launched_ns <= seconds(startup_s)
        self.loads = self.silent and complete and not self.begun and early
        """Few collectives were begun, and no rank has worked for longer than a start may take."""
        judged = self.begun and complete and len(live) > 1 and (self.hangs or not self.auto)
        gone = self.moved_ns is None or (bool(ranks) and not live)
        self.unwatched = not judged if self.silent else gone
        """No progress is expected, or none would show."""

    # -- limits -------------------------------------------------------------------------------
    @property
    def hang_limit_s(self) -> float:
        step_s = limits.HANG_STEP_FACTOR * median(self.generation.step_s)
        return limits.HANG_FLOOR_S + self.pace_s + step_s

    @property
    def busy_limit_s(self) -> float:
        """Limit for a rank that may evaluate or save without a word from its framework."""
        unsaid_s = limits.SAVE_TIMEOUT_S if self.pace_s else 0.0
        gap_s = limits.WORST_GAP_FACTOR * self._worst_gap_s
        return max(self.hang_limit_s, self.recovery.busy_timeout_s, gap_s, unsaid_s)

    @property
    def collectives_limit_s(self) -> float:
        """A step after the first ones may take as long as the first one did."""
        state, first_s = self.state, self.recovery.startup_timeout_s
        if state.group.first_step_ns:
            took_s = (state.group.first_step_ns - state.group.launched_ns) / SECOND_NS
            first_s = min(limits.HANG_STEP_FACTOR * took_s, first_s)
        gap_s = limits.WORST_GAP_FACTOR * self._worst_gap_s
        return max(2 * self.recovery.busy_timeout_s, gap_s, first_s if self.counted else 0.0)

    @property
    def ask_after_s(self) -> float | None:
        """Seconds without progress after which workers are asked what they do, not in a start."""
        if not self.counted and not self.silent:
            return None
        if self.works:
            return limits.SAVE_TIMEOUT_S - limits.SUSPICION_LEAD_S
        if self.by_collectives:
            return SUSPECT_AFTER_S + (POST_INTERVAL_S if self.counted else 0.0)
        return self.hang_limit_s - limits.SUSPICION_LEAD_S if self.learned else None

    def due_ns(self, since_ns: int, limit_s: float) -> int | None:
        """End of the limit; None: a node sends no heartbeats by then. The node returns with
        progress, or is lost: neither is a hang."""
        # While no node sent heartbeats, the workers may have been stopped as well.
        started_ns = max(since_ns, self._silence.ended_ns)
        latest_ns = since_ns + seconds(limits.ALL_SILENT_FACTOR * limit_s)
        due_ns = min(started_ns + seconds(limit_s), latest_ns)
        current = self._silence.current_at(due_ns, self.state.group.members, self.recovery)
        return due_ns if current else None
