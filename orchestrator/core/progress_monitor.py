"""Heartbeats of workers become events: a step is done by all ranks, a script trains, a node is lost
or slow, the job hangs. The monitor reads the controller's state and changes nothing.

A heartbeat says that an agent is alive; progress says that training moves.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from .. import limits
from ..api.v1alpha1 import Recovery, TrainingJob
from ..protocol.facts import WorkerBeat, counting, largest
from ..protocol.messages import Fact, GroupInspected, Heartbeat, NodeJoined, WorkerExited
from . import keeping
from .context import SECOND_NS, recovery_of, seconds
from .controller import Controller
from .events import (
    AdjustRequested,
    AnyEvent,
    CollectivesBegun,
    ControllerStarted,
    FromNode,
    HangDetected,
    NodeLost,
    StepCompleted,
    StragglerDetected,
)
from .hang import detector
from .hang.facts import STARVED_MEMORY_S, HangFacts, InspectedStack, WatchedGeneration
from .liveness import FailureDetector
from .state import JobState
from .stragglers import StragglerFinder

BIG_JOB_RANKS = 256
CHECK_NS_PER_RANK = 30_000
"""Checks of a big job are at least this far apart, times its ranks: a few percent of a core."""
PACE_COLLECTIVES = 64
"""A pause before this many collectives may show that a script was still loading."""
LOADING_PAUSE_S = 1.0
"""Shorter pauses are not taken for loading."""


@dataclass(slots=True)
class Began:
    """Time since which the ranks of a script without reports train. They begin some collectives
    while they load, such as a barrier before the model is built: a pause before the last ones that
    is twice as long as the next one was loading."""

    begun: int = 0
    """Collectives that every rank had begun by the last check."""
    at_ns: int = 0
    """Time at which these were seen first; 0: none yet."""
    pause_ns: int = 0
    """Nanoseconds before that in which no rank had begun any."""

    @property
    def known(self) -> bool:
        return self.begun >= PACE_COLLECTIVES

    def observe(self, begun: int, now_ns: int) -> float | None:
        """Seconds since the training began, if these collectives show it better than the last."""
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
    """Step after which a script began; `began_after` None: not known, or Holdfast restored it."""

    began_after: int | None = None
    began_estimated: bool = False


def beginning(beats: Iterable[WorkerBeat], done: int, step_s: float) -> Beginning:
    """`done`: the last finished step; `step_s`: the last known step time, 0: not known."""
    ranks = list(beats)
    said = [(b.began_after, b.began_estimated) for b in ranks if b.began_after is not None]
    if said:
        return Beginning(*min(said))
    began_s = next((beat.began_s for beat in ranks if beat.began_s is not None), 0.0)
    if not (began_s and step_s):
        return Beginning()
    return Beginning(max(-1, done - max(1, round(began_s / step_s))), True)


def first_ago_s(beats: Iterable[WorkerBeat], step_s: float) -> float:
    """Seconds since the first step of a framework that posts was finished: it began to train before
    its first post with a step. `step_s`: the last known step time; 0: not known."""
    began_s = next((beat.began_s for beat in beats if beat.began_s is not None), 0.0)
    return max(0.0, began_s - step_s)


@dataclass(slots=True)
class MonitoredGeneration(WatchedGeneration):
    """The generation with conclusions about its steps."""

    began: Began = field(default_factory=Began)
    first: int = -1
    """The step after which this generation began."""
    reported: int = -1
    """The step of the last StepCompleted."""
    reported_ns: int = 0
    stragglers: StragglerFinder = field(default_factory=StragglerFinder)


class ProgressMonitor:
    """The monitor of one controller. It observes every event after the controller has."""

    def __init__(self, job: TrainingJob, controller: Controller) -> None:
        self._script = job.spec.entrypoint.recipe is None
        self._controller = controller
        self._limits: tuple[TrainingJob, Recovery] | None = None
        self._detector = FailureDetector()
        self._current = MonitoredGeneration()
        self._worst_gap_s = 0.0
        """Longest time without progress of a rank in training that ended by itself."""
        self._contended: dict[str, int] = {}
        """Node -> when threads of its machine last shared cores."""
        self._starved_ns: int | None = None
        """Time at which a machine of the job was last short of CPU time."""
        self._unchecked = False
        """Heartbeats of this generation have come since the last check."""
        self._waiting = False
        """Events have come since the last check."""
        self._report_due = False  # An event that ends a generation has come.
        self._checked_ns = 0
        self._due: tuple[int | None] | None = None
        """The deadline as of the last check; None: not computed yet."""
        self._last_facts: HangFacts | None = None
        """The facts as of the last event."""

    @property
    def _state(self) -> JobState:
        return self._controller.state

    @property
    def _recovery(self) -> Recovery:
        """The current limits: users may change them."""
        job = self._state.job
        if self._limits is None or self._limits[0] is not job:
            self._limits = (job, recovery_of(job))
        return self._limits[1]

    # -- in -----------------------------------------------------------------------------------
    def arrived(self, now_ns: int, node: str) -> None:
        """A message of this node waits to be observed: the node is alive, however long it waits."""
        if self._controller.submitted:
            self._detector.arrived(now_ns, node, self._recovery)
            if not self._pause_ns():
                self._due = None

    def observe(self, now_ns: int, event: AnyEvent) -> tuple[AnyEvent, ...]:
        """Take an event in, after the controller; returns what follows, with what was unchecked."""
        self._last_facts = None
        out = self._follow(now_ns)
        self._take(now_ns, event)
        self._waiting = True
        if now_ns - self._checked_ns >= self._pause_ns():
            out += self._check(now_ns)
        return tuple(out)

    def _take(self, now_ns: int, event: AnyEvent) -> None:
        match event:
            case FromNode(node, fact):
                self._take_fact(now_ns, node, fact)
            case StepCompleted() if event.generation == self._current.number:
                # It comes back from the controller, or from a replay.
                self._current.reported = max(self._current.reported, event.step)
            case AdjustRequested():
                self._detector.reset(now_ns)
            case ControllerStarted():
                # How long agents may take to reconnect is a timer of the controller.
                self._detector.begin(now_ns)
                # A replay has no heartbeats, so what it shows of progress does not count.
                self._current, self._unchecked = MonitoredGeneration(), False
                self._follow(now_ns)
            case HangDetected() | NodeLost():
                self._report_due = True
            case _:
                pass

    def _take_fact(self, now_ns: int, node: str, fact: Fact) -> None:
        match fact:
            case Heartbeat() if node in self._state.nodes:
                self._detector.observed(now_ns, node, self._recovery)
                self._note_pressure(now_ns, node, fact)
                self._record(now_ns, node, fact)
            case NodeJoined():
                self._detector.observed(now_ns, node, self._recovery)
            case GroupInspected() if fact.generation == self._current.number:
                for stack in fact.stacks:
                    self._current.inspected[stack.rank] = InspectedStack(stack, now_ns)
            case WorkerExited():
                self._report_due = True
            case _:
                pass

    def _check(self, now_ns: int) -> list[AnyEvent]:
        """Goes over all nodes and ranks."""
        self._checked_ns, self._due, self._waiting = now_ns, None, False
        out = self._progress(now_ns)
        if self._report_due:
            out += self._report_step(now_ns)
        if not self._state.terminal:
            out += self._detector.judge(now_ns, self._state.nodes, self._recovery)
            out += self._hang(now_ns)
        return out

    def _hang(self, now_ns: int) -> list[AnyEvent]:
        facts = self._facts
        out = detector.detect(now_ns, facts) if facts is not None else []
        if out:
            self._last_facts = None
        return out

    def next_deadline_ns(self) -> int | None:
        """Latest time to observe a Tick."""
        if not self._controller.submitted or self._state.terminal:
            return None
        if self._due is None:
            self._due = (self._first_due_ns(),)
        due, check_ns = self._due[0], self._checked_ns + self._pause_ns()
        if self._waiting:
            return check_ns
        return max(due, check_ns) if due is not None else None

    def _first_due_ns(self) -> int | None:
        rough = self._pause_ns() > 0
        lost_ns = self._detector.next_ns(self._state.nodes, self._recovery, rough=rough)
        facts = self._facts
        due = (lost_ns, detector.next_ns(facts) if facts is not None else None)
        return min((at for at in due if at is not None), default=None)

    def _pause_ns(self) -> int:
        """Events of a big job that come shortly after each other are checked together."""
        ranks = len(self._state.nodes) * self._state.job.spec.workers_per_node
        return ranks * CHECK_NS_PER_RANK if ranks >= BIG_JOB_RANKS else 0

    # -- the generation -----------------------------------------------------------------------
    def _follow(self, now_ns: int) -> list[AnyEvent]:
        """Returns the last step of the generation before, if it has to be reported."""
        state = self._state
        if self._current.number == state.generation:
            return []
        out = self._report_step(now_ns) if self._report_due else []
        self._unchecked, step = False, state.step
        self._current = MonitoredGeneration(state.generation, first=step, done=step, reported=step)
        trained, membership = state.group.first_step_ns, state.group.membership
        if membership is not None and (trained or keeping.is_smaller(state, membership)):
            # A new controller, whose journal has the progress, or processes that have trained.
            restore = membership.restore if trained else None
            self._current.num_steps = step - (restore.step if restore else -1)
            self._current.step_s.extend([state.step_s] if state.step_s > 0 else [])
        return out

    def _record(self, now_ns: int, node: str, beat: Heartbeat) -> None:
        current, state = self._current, self._state
        if beat.generation != current.number or state.group.membership is None:
            return
        self._unchecked = True
        interval_s = self._recovery.heartbeat_interval_s
        for worker in beat.workers:
            if state.node_of(worker.rank) == node:
                gap_s = current.record(now_ns, worker, interval_s)
                self._worst_gap_s = max(self._worst_gap_s, gap_s)

    def _note_pressure(self, now_ns: int, node: str, beat: Heartbeat) -> None:
        if beat.cpu_pressure < limits.STRAGGLER_MAX_PRESSURE:
            return
        nodes = self._state.nodes
        here = nodes.on_host[nodes[node].facts.hostname]
        self._contended |= dict.fromkeys(here, now_ns)
        if beat.cpu_pressure >= limits.STARVED_PRESSURE:
            self._starved_ns = now_ns
            self._detector.starved(now_ns, here)

    def _progress(self, now_ns: int) -> list[AnyEvent]:
        """Events of steps, by the heartbeats since the last check."""
        current, state = self._current, self._state
        if not self._unchecked or state.group.membership is None:
            return []
        self._unchecked = False
        if len(current.ranks) < state.group.membership.world_size:
            return []
        done = min(beat.step for beat in counting(rank.beat for rank in current.ranks.values()))
        if done <= current.done:
            return self._collectives_begun(now_ns)
        return self._advance(now_ns, done)

    def _collectives_begun(self, now_ns: int) -> list[AnyEvent]:
        began, state = self._current.began, self._state
        silent = self._script and state.counted_by in ("", "collectives")
        silent = silent and all(watched.beat.silent for watched in self._current.ranks.values())
        # A new controller's journal has it already.
        if began.known or not silent or (state.sizes.began and not began.at_ns):
            return []
        begun = min(watched.beat.collectives for watched in self._current.ranks.values())
        ago_s = began.observe(begun, now_ns)
        return [] if ago_s is None else [CollectivesBegun(generation=state.generation, ago_s=ago_s)]

    def _advance(self, now_ns: int, done: int) -> list[AnyEvent]:
        current, state = self._current, self._state
        first = current.done == current.first
        membership = state.group.membership
        own = first and membership is not None and membership.restore is None
        # The number of its first step does not show how many steps a script has trained.
        current.num_steps += 1 if own else done - current.done
        current.done = done
        slowest = max(rank.beat.step_s for rank in current.ranks.values())
        # The time of a generation's first step includes the start-up.
        if slowest > 0 and not first:
            current.step_s.append(slowest)
        out: list[AnyEvent] = list(self._stragglers())
        keeps = current.ranks[0].beat.keeps is True  # known after the first step
        at_once = first or (keeps and not state.keeping.reported)
        if at_once or now_ns - current.reported_ns >= seconds(limits.PROGRESS_JOURNAL_INTERVAL_S):
            out += self._report_step(now_ns)
        return out

    def _report_step(self, now_ns: int) -> list[AnyEvent]:
        """Report the last step that all ranks have finished, unless it was reported."""
        current, self._report_due = self._current, False
        if current.done <= current.reported:
            return []
        first = current.reported == current.first
        current.reported, current.reported_ns = current.done, now_ns
        beats = [current.ranks[rank].beat for rank in sorted(current.ranks)]
        counted = counting(beats)
        # None, if a rank began to report after others that were further than it is now.
        at_step = [beat for beat in counted if beat.step == current.done]
        loss = next((beat.loss for beat in at_step if beat.loss is not None), None)
        numbers = largest(beats) | {"loss": loss}
        known_s = self._state.step_s or numbers["step_s"]  # of the generation before, if any
        if current.step_s:
            numbers["step_s"] = median(current.step_s)
        return [
            StepCompleted(
                generation=current.number,
                step=current.done,
                counted_by=(at_step or counted)[0].counted_by,
                first_ago_s=first_ago_s(beats, known_s) if first else 0,
                keeps=beats[0].keeps is True,
                ago_s=(now_ns - max(r.moved_ns for r in current.ranks.values())) / SECOND_NS,
                **beginning(beats, current.done, known_s)._asdict(),
                **numbers,
            )
        ]

    @property
    def _facts(self) -> HangFacts | None:
        """None: no progress is expected at this moment."""
        state, current = self._state, self._current
        if not state.group.active or state.stop is not None or current.hung:
            return None
        if self._last_facts is None:
            memory = (self._worst_gap_s, self._starved_ns)
            self._last_facts = HangFacts(state, self._recovery, current, self._detector, *memory)
        return self._last_facts

    def _stragglers(self) -> list[AnyEvent]:
        """Ranks that are slow for the first time, by the speed of their GPUs or by CPU time."""
        current, state = self._current, self._state
        node_of = {rank: state.node_of(rank) for rank in current.ranks}
        work_s = {rank: watched.beat.probe_s for rank, watched in current.ranks.items()}
        probed, contended = any(work_s.values()), dict[str, int]()
        kinds: dict[int, Hashable] = {r: state.gpu_model(node) for r, node in node_of.items()}
        if not probed and state.mesh is not None:
            work_s = {rank: watched.beat.work_s for rank, watched in current.ranks.items()}
            kinds = {rank: state.mesh.coordinates(rank)["pipeline"] for rank in node_of}
            now_ns = max(watched.seen_ns for watched in current.ranks.values())
            since_ns = now_ns - seconds(STARVED_MEMORY_S)
            contended = {node: at for node, at in self._contended.items() if at >= since_ns}
        return [
            StragglerDetected(
                generation=current.number,
                node=node_of[slow.rank],
                rank=slow.rank,
                evidence=slow.evidence(probed=probed),
            )
            for slow in current.stragglers.observe(current.done, work_s, kinds, node_of, contended)
        ]
