"""Heartbeats and progress -> verdicts: a node is silent, the job hangs, a node is slow, a step is
done by all ranks.

Owns: what was heard last, the learned step time, the limits. Must not: change the controller's
state (it only reads it) or decide what is done about a verdict.

Heartbeat (the agent lives) and progress (the training moves) are two different things. All ranks of
a job wait for each other in every step, so one rank without progress means that none can have any;
the limit is held against the rank that has been quiet the longest.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from .. import limits
from ..api.v1alpha1 import Recovery, TrainingJob
from ..protocol.facts import WorkerBeat, largest
from .context import SECOND_NS, seconds
from .controller import Controller
from .events import (
    AdjustRequested,
    AnyEvent,
    ControllerStarted,
    HangDetected,
    HeartbeatReceived,
    NodeJoined,
    NodeLost,
    StepCompleted,
    StragglerDetected,
    WorkerExited,
)
from .liveness import FailureDetector
from .state import JobState

RECENT_STEPS = 32
"""Step times that the median is taken over."""
PULSE_STALE_S = 3 * limits.PULSE_INTERVAL_S
"""A pulse thread silent for longer: the process is stopped, or its interpreter blocked."""
FRESH_BEATS = 1.5
"""Heartbeat intervals for which a beat is taken for the present."""
BIG_JOB_RANKS = 256
LOOK_NS_PER_RANK = 10_000
"""Looks at a big job are at least this far apart, times its ranks: a few percent of a core."""
STRAGGLER_FACTOR = 1.5
STRAGGLER_SAMPLES = 10
WORKING = ("build", "restore", "compile", "evaluate", "save", "finish")
"""Phases that are no training and may be quiet for long."""


@dataclass(slots=True)
class _Rank:
    beat: WorkerBeat
    moved_ns: int
    """Last sign of progress, on our clock."""


@dataclass(slots=True)
class _Generation:
    number: int = 0
    ranks: dict[int, _Rank] = field(default_factory=dict)
    done: int = -1
    """Last step finished by all ranks, as far as heard."""
    first: int = -1
    """The step after which this generation began."""
    told: int = -1
    told_ns: int = 0
    step_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    num_steps: int = 0
    hung: bool = False
    slow: dict[str, int] = field(default_factory=dict)
    """Node -> steps in a row that it was slow."""
    named: dict[str, None] = field(default_factory=dict)


class ProgressMonitor:
    """Looks over the shoulder of one controller. Give it every event after the controller."""

    def __init__(self, job: TrainingJob, controller: Controller) -> None:
        self._recipe = job.spec.entrypoint.recipe is not None
        self._controller = controller
        self._silence = FailureDetector()
        self._now = _Generation()
        self._news = False
        """Beats of this generation have been noted since the last look."""
        self._looked_ns = 0
        self._due: tuple[int | None] | None = None
        """The deadline as of the last look, in a job so big that looking costs."""

    @property
    def _state(self) -> JobState:
        return self._controller.state

    @property
    def _recovery(self) -> Recovery:
        """As it is now: people may change it."""
        return self._state.job.spec.recovery

    # -- in -----------------------------------------------------------------------------------
    def arrived(self, now_ns: int, node: str) -> None:
        """Something of this node has come and will be observed in its ctx: the node is not silent,
        however long that takes."""
        if self._controller.submitted:
            self._silence.arrived(now_ns, node, self._recovery)

    def observe(self, now_ns: int, event: AnyEvent) -> tuple[AnyEvent, ...]:
        """Take an event in, after the controller has; the verdicts are events of their own."""
        self._follow()
        if isinstance(event, HeartbeatReceived):
            if event.node in self._state.nodes:
                self._silence.heard(now_ns, event.node, self._recovery)
                self._note(now_ns, event)
            if now_ns - self._looked_ns < self._pause_ns():
                return ()
        self._looked_ns, self._due = now_ns, None
        out = self._progress(now_ns)
        match event:
            case StepCompleted() if event.generation == self._now.number:
                # Our own verdict comes back, or a replay: it is told.
                self._now.told = max(self._now.told, event.step)
                self._now.told_ns = now_ns
            case NodeJoined():
                self._silence.heard(now_ns, event.node, self._recovery)
            case AdjustRequested():
                self._silence.forgive(now_ns)
            case ControllerStarted():
                # How long agents may take to come back is the controller's deadline.
                self._silence.begin(now_ns)
                # A replay has no heartbeats: what it made us think of progress is worth nothing.
                self._now, self._news = _Generation(), False
                self._follow()
            case WorkerExited() | HangDetected() | NodeLost():
                out += self._flush(now_ns)
            case _:
                pass
        if not self._state.terminal:
            out += self._silence.judge(now_ns, self._state.nodes, self._recovery)
        return (*out, *self._hang(now_ns))

    def next_deadline_ns(self) -> int | None:
        """When to observe again at the latest, with Tick."""
        if not self._controller.submitted or self._state.terminal:
            return None
        pause_ns = self._pause_ns()
        if self._due is None or not pause_ns:
            self._due = (self._first_due_ns(),)
        due = self._due[0]
        if self._news:
            look_ns = self._looked_ns + pause_ns
            due = look_ns if due is None else min(due, look_ns)
        return due

    def _first_due_ns(self) -> int | None:
        hang = self._hang_due()
        due = (self._silence.next_ns(self._state.nodes, self._recovery), hang and hang[0])
        return min((at for at in due if at is not None), default=None)

    def _pause_ns(self) -> int:
        """A look goes over all ranks, and beats come by the thousand in a big job: those that come
        shortly after each other are looked at together."""
        ranks = len(self._now.ranks)
        return ranks * LOOK_NS_PER_RANK if ranks >= BIG_JOB_RANKS else 0

    # -- the generation -----------------------------------------------------------------------
    def _follow(self) -> None:
        state = self._state
        if self._now.number == state.generation:
            return
        self._news, step = False, state.step
        self._now = _Generation(state.generation, first=step, done=step, told=step)
        if state.first_step_done and state.membership is not None:
            # A controller that comes back: its journal says how far it is, and how fast.
            restore = state.membership.restore
            self._now.num_steps = step - (restore.step if restore else -1)
            self._now.step_s.extend([state.step_s] if state.step_s > 0 else [])

    def _watching(self) -> bool:
        state = self._state
        return state.active and state.stop is None and not self._now.hung

    def _note(self, now_ns: int, beat: HeartbeatReceived) -> None:
        now, state = self._now, self._state
        if beat.generation != now.number or state.membership is None:
            return
        self._news = True
        for worker in beat.workers:
            if state.node_of(worker.rank) != beat.node:
                continue
            moved = now_ns - seconds(worker.quiet_s)
            known = now.ranks.get(worker.rank)
            if known is not None and (worker.step, worker.ticks) < (
                known.beat.step, known.beat.ticks,
            ):  # fmt: skip
                continue
            now.ranks[worker.rank] = _Rank(worker, moved)

    def _progress(self, now_ns: int) -> list[AnyEvent]:
        """What the beats since the last look say of steps."""
        now, state = self._now, self._state
        if not self._news or state.membership is None:
            return []
        self._news = False
        if len(now.ranks) < state.membership.world_size:
            return []
        done = min(rank.beat.step for rank in now.ranks.values())
        if done <= now.done:
            return []
        return self._stepped(now_ns, done)

    def _stepped(self, now_ns: int, done: int) -> list[AnyEvent]:
        now = self._now
        first = now.done == now.first
        now.num_steps += done - now.done
        now.done = done
        slowest = max(rank.beat.step_s for rank in now.ranks.values())
        # The first step of a generation carries the start-up with it.
        if slowest > 0 and not first:
            now.step_s.append(slowest)
        out: list[AnyEvent] = list(self._stragglers())
        if first or now_ns - now.told_ns >= seconds(limits.PROGRESS_JOURNAL_INTERVAL_S):
            out += self._flush(now_ns)
        return out

    def _flush(self, now_ns: int) -> list[AnyEvent]:
        """Tell the last step that all ranks have finished, if it was not told."""
        now = self._now
        if now.done <= now.told or now.number != self._state.generation:
            return []
        now.told, now.told_ns = now.done, now_ns
        beats = [now.ranks[rank].beat for rank in sorted(now.ranks)]
        at_step = [beat for beat in beats if beat.step == now.done]
        numbers = largest(beats) | {"loss": largest(at_step)["loss"]}
        if now.step_s:
            numbers["step_s"] = median(now.step_s)
        return [StepCompleted(generation=now.number, step=now.done, **numbers)]

    # -- verdicts -----------------------------------------------------------------------------
    def _hang(self, now_ns: int) -> list[AnyEvent]:
        due = self._hang_due()
        if due is None or now_ns < due[0]:
            return []
        _at, limit_s, what = due
        now = self._now
        now.hung = True
        suspects = self._suspects(now_ns)
        return [
            HangDetected(
                generation=now.number,
                ranks=tuple(rank for rank, _why in suspects),
                evidence=self._evidence(now_ns, suspects, limit_s, what),
            )
        ]

    def _hang_due(self) -> tuple[int, float, str] | None:
        """(when it is a hang, the limit, what limit); None: nothing is measured."""
        if not self._watching():
            return None
        now, state = self._now, self._state
        live = {rank: known for rank, known in now.ranks.items() if rank not in state.exits}
        if now.num_steps == 0:
            # A script that never speaks to its agent has no progress to be held to.
            if not self._recipe and all(known.beat.ticks == 0 for known in live.values()):
                return None
            busy = [known.moved_ns for known in live.values() if known.beat.phase != "start"]
            began = max([state.launched_ns, *busy])
            limit = self._recovery.startup_timeout_s
            return began + seconds(limit), limit, "start-up"
        if not live:
            return None
        oldest = min(known.moved_ns for known in live.values())
        newest = max(known.moved_ns for known in live.values())
        if any(known.beat.phase in WORKING for known in live.values()):
            return newest + seconds(limits.SAVE_TIMEOUT_S), limits.SAVE_TIMEOUT_S, "save"
        limit_s = self.hang_limit_s()
        quietest = min(live, key=lambda rank: (live[rank].moved_ns, rank))
        # While nobody was heard of, nobody may have been able to move either.
        since = max(oldest, self._silence.ended_ns)
        latest = oldest + seconds(limits.ALL_SILENT_FACTOR * limit_s)
        due = min(since + seconds(limit_s), latest)
        # What the agent has not told lately is not known to be quiet: wait for its next beat.
        heard = self._silence.last(state.node_of(quietest))
        if due > heard + seconds(FRESH_BEATS * self._recovery.heartbeat_interval_s):
            return None
        return due, limit_s, "hang"

    def hang_limit_s(self) -> float:
        """How long a rank may be quiet in phase `train`."""
        if self._recovery.hang_timeout_s != "auto":
            return self._recovery.hang_timeout_s
        now = self._now
        if now.num_steps < limits.HANG_SAMPLES or not now.step_s:
            return self._recovery.startup_timeout_s
        return limits.HANG_FLOOR_S + limits.HANG_STEP_FACTOR * median(now.step_s)

    def _suspects(self, now_ns: int) -> list[tuple[int, str]]:
        """Live ranks that stand out, the likeliest culprit first, with why."""
        state, found = self._state, []
        size = state.membership.world_size if state.membership else 0
        unheard = [r for r in range(size) if r not in self._now.ranks and r not in state.exits]
        for rank, known in self._now.ranks.items():
            if rank in state.exits:
                continue
            beat, age = known.beat, (now_ns - known.moved_ns) / SECOND_NS
            stale = beat.pulse_age_s > PULSE_STALE_S
            order = (not beat.stopped, not stale, beat.step, beat.ticks, -age, rank)
            if beat.stopped:
                why = f"rank {rank} is stopped (state T), last progress {age:.1f} s ago"
            elif stale:
                why = f"rank {rank} has not shown a pulse for {beat.pulse_age_s:.1f} s"
            else:
                why = f"rank {rank} is at step {beat.step} (phase {beat.phase}), {age:.1f} s ago"
            found.append((order, rank, why))
        found.sort()
        named = [(rank, why) for _order, rank, why in found]
        silent = [(rank, f"rank {rank} has never been heard of") for rank in unheard]
        return silent + named

    def _evidence(
        self, now_ns: int, suspects: list[tuple[int, str]], limit_s: float, what: str
    ) -> str:
        now = self._now
        of = "start-up limit" if what == "start-up" else f"{what} limit"
        if what == "hang" and now.step_s and self._recovery.hang_timeout_s == "auto":
            step_s = median(now.step_s)
            of += f" ({limits.HANG_FLOOR_S:g} s + {limits.HANG_STEP_FACTOR:g} x {step_s:.2f} s)"
        why = suspects[0][1] if suspects else "no rank was heard of"
        return f"{why}; the {of} is {limit_s:.1f} s; all ranks had finished step {now.done}"

    def _stragglers(self) -> list[AnyEvent]:
        """Nodes whose ranks say that they take much longer for a step than the others."""
        now, state = self._now, self._state
        slowest: dict[str, float] = {}
        for rank, known in now.ranks.items():
            node = state.node_of(rank)
            slowest[node] = max(slowest.get(node, 0.0), known.beat.step_s)
        if len(slowest) < 2:
            return []
        out: list[AnyEvent] = []
        for node in list(slowest):
            others = median(value for name, value in slowest.items() if name != node)
            slow = others > 0 and slowest[node] > STRAGGLER_FACTOR * others
            now.slow[node] = now.slow.get(node, 0) + 1 if slow else 0
            if now.slow[node] >= STRAGGLER_SAMPLES and node not in now.named:
                now.named[node] = None
                evidence = (
                    f"{slowest[node]:.2f} s a step, {others:.2f} s on the others, in "
                    f"{now.slow[node]} samples in a row"
                )
                out.append(StragglerDetected(generation=now.number, node=node, evidence=evidence))
        return out
