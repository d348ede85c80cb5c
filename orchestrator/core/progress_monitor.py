"""Heartbeats and progress of workers become events: a node is lost, the job hangs, a node is slow,
a step is done by all ranks. The monitor reads the controller's state and changes nothing.

A heartbeat says that an agent is alive; progress says that training moves. All ranks of a job wait
for each other in every step, so one rank without progress means that none can have any; the limit
applies to the rank whose progress is the oldest.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from .. import limits
from ..api.v1alpha1 import Recovery, TrainingJob
from ..protocol.facts import WorkerBeat, counting, largest
from . import script_progress
from .context import SECOND_NS, recovery_of, seconds
from .controller import Controller
from .events import (
    AdjustRequested,
    AnyEvent,
    CollectivesBegun,
    ControllerStarted,
    GroupInspected,
    HangDetected,
    HangSuspected,
    HangSuspicionEnded,
    HeartbeatReceived,
    NodeJoined,
    NodeLost,
    StepCompleted,
    StragglerDetected,
    WorkerExited,
)
from .hang_limits import Condition, InspectedStack, Limit, condition, outside_since_ns
from .hang_suspects import Suspects
from .liveness import FailureDetector
from .rank_progress import WORKING, RankProgress, WatchedGeneration, any_works
from .state import JobState

GAP_BEATS = 2.0
"""Heartbeat intervals that a time without progress may be longer than the heartbeats showed."""
STARVED_MEMORY_S = 10.0
"""For so long after a starved heartbeat the job's machines count as starved."""
INSPECT_AGAIN_S = 5.0
"""While a suspicion lasts: what workers do changes."""
BIG_JOB_RANKS = 256
CHECK_NS_PER_RANK = 30_000
"""Checks of a big job are at least this far apart, times its ranks: a few percent of a core."""


class ProgressMonitor:
    """Of one controller. It observes every event after the controller has."""

    def __init__(self, job: TrainingJob, controller: Controller) -> None:
        self._recipe = job.spec.entrypoint.recipe is not None
        self._controller = controller
        self._limits: tuple[TrainingJob, Recovery] | None = None
        self._detector = FailureDetector()
        self._current = WatchedGeneration()
        self._worst_gap_s = 0.0
        """Longest time without progress of a rank in training that ended by itself."""
        self._contended: dict[str, int] = {}
        """Node -> when threads of its machine last shared cores."""
        self._starved_ns: int | None = None
        """When a machine of the job was last short of CPU time."""
        self._unchecked = False
        """Heartbeats of this generation have come since the last check."""
        self._waiting = False
        """Events have come since the last check."""
        self._report_due = False  # An event that ends a generation has come.
        self._checked_ns = 0
        self._due: tuple[int | None] | None = None
        """The deadline as of the last check, in a job so big that computing it costs."""
        self._live_ranks: dict[int, RankProgress] | None = None
        """The live ranks and the quietest of them, as of the last event."""
        self._quiet: tuple[tuple[int, int] | None] | None = None

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
        """A message of this node waits to be observed: the node is alive, however long the message
        waits."""
        if self._controller.submitted:
            self._detector.arrived(now_ns, node, self._recovery)

    def observe(self, now_ns: int, event: AnyEvent) -> tuple[AnyEvent, ...]:
        """Take an event in, after the controller has; returns what follows from it, and from events
        that were not checked yet."""
        self._live_ranks = self._quiet = None
        out = self._follow(now_ns)
        self._take(now_ns, event)
        self._waiting = True
        if now_ns - self._checked_ns >= self._pause_ns():
            out += self._check(now_ns)
        return tuple(out)

    def _take(self, now_ns: int, event: AnyEvent) -> None:
        match event:
            case HeartbeatReceived() if event.node in self._state.nodes:
                self._detector.observed(now_ns, event.node, self._recovery)
                self._note_pressure(now_ns, event)
                self._record(now_ns, event)
            case StepCompleted() if event.generation == self._current.number:
                # It comes back from the controller, or from a replay.
                self._current.reported = max(self._current.reported, event.step)
            case NodeJoined():
                self._detector.observed(now_ns, event.node, self._recovery)
            case AdjustRequested():
                self._detector.reset(now_ns)
            case GroupInspected() if event.generation == self._current.number:
                for stack in event.stacks:
                    self._current.inspected[stack.rank] = InspectedStack(stack, now_ns)
            case ControllerStarted():
                # How long agents may take to reconnect is a timer of the controller.
                self._detector.begin(now_ns)
                # A replay has no heartbeats, so what it shows of progress does not count.
                self._current, self._unchecked = WatchedGeneration(), False
                self._follow(now_ns)
            case WorkerExited() | HangDetected() | NodeLost():
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
            out += self._hang(now_ns) or self._suspicion(now_ns)
        return out

    def next_deadline_ns(self) -> int | None:
        """When to observe a Tick at the latest."""
        if not self._controller.submitted or self._state.terminal:
            return None
        pause_ns = self._pause_ns()
        if self._due is None or not pause_ns:
            self._due = (self._first_due_ns(),)
        due = self._due[0]
        check_ns = self._checked_ns + pause_ns
        if self._waiting:
            return check_ns
        return max(due, check_ns) if due is not None else None

    def _first_due_ns(self) -> int | None:
        hang, rough = self._hang_limit(), self._pause_ns() > 0
        lost_ns = self._detector.next_ns(self._state.nodes, self._recovery, rough=rough)
        suspicion_ns = self._suspicion_ns()
        due = (lost_ns, hang.due_ns if hang is not None else None, suspicion_ns)
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
        self._current = WatchedGeneration(state.generation, first=step, done=step, reported=step)
        if state.first_step_done and state.membership is not None:
            # A new controller: its journal has the progress and the step time.
            restore = state.membership.restore
            self._current.num_steps = step - (restore.step if restore else -1)
            self._current.step_s.extend([state.step_s] if state.step_s > 0 else [])
        return out

    def _record(self, now_ns: int, beat: HeartbeatReceived) -> None:
        current, state = self._current, self._state
        if beat.generation != current.number or state.membership is None:
            return
        self._unchecked = True
        for worker in beat.workers:
            if state.node_of(worker.rank) != beat.node:
                continue
            known = current.ranks.get(worker.rank)
            if known is not None:
                gap_s = script_progress.gap_s(known.beat, known.seen_ns, worker, now_ns)
                self._worst_gap_s = max(self._worst_gap_s, gap_s)
            now = (worker.step, worker.ticks)
            if known is None or now >= (known.beat.step, known.beat.ticks):
                moved_ns = now_ns - seconds(worker.quiet_s)
                ran_ns = known.ran_ns if worker.stopped and known is not None else now_ns
                if known is not None and now > (known.beat.step, known.beat.ticks):
                    self._note_gap(known, worker, moved_ns)
                current.ranks[worker.rank] = RankProgress(worker, moved_ns, now_ns, ran_ns)

    def _note_gap(self, known: RankProgress, worker: WorkerBeat, moved_ns: int) -> None:
        """A rank has made progress. Steps between two heartbeats are not seen, so the time without
        any is at most what the last heartbeat showed and the time until the next ones."""
        if self._current.num_steps == 0 or {known.beat.phase, worker.phase} & {*WORKING, "start"}:
            return
        shown_s = known.beat.quiet_s + GAP_BEATS * self._recovery.heartbeat_interval_s
        gap_s = min((moved_ns - known.moved_ns) / SECOND_NS, shown_s)
        self._worst_gap_s = max(self._worst_gap_s, gap_s)

    def _note_pressure(self, now_ns: int, beat: HeartbeatReceived) -> None:
        if beat.cpu_pressure < limits.STRAGGLER_MAX_PRESSURE:
            return
        nodes = self._state.nodes
        here = nodes.on_host[nodes[beat.node].facts.hostname]
        self._contended |= dict.fromkeys(here, now_ns)
        if beat.cpu_pressure >= limits.STARVED_PRESSURE:
            self._starved_ns = now_ns
            self._detector.starved(now_ns, here)

    def _progress(self, now_ns: int) -> list[AnyEvent]:
        """What the heartbeats since the last check say about steps."""
        current, state = self._current, self._state
        if not self._unchecked or state.membership is None:
            return []
        self._unchecked = False
        if len(current.ranks) < state.membership.world_size:
            return []
        done = min(beat.step for beat in counting(rank.beat for rank in current.ranks.values()))
        if done <= current.done:
            return self._collectives_begun(now_ns)
        return self._advance(now_ns, done)

    def _collectives_begun(self, now_ns: int) -> list[AnyEvent]:
        began, state = self._current.began, self._state
        silent = self._silent(self._current.ranks) and state.counted_by in ("", "collectives")
        # A new controller's journal has it already.
        if began.known or not silent or (state.sizes.began and not began.at_ns):
            return []
        begun = min(known.beat.collectives for known in self._current.ranks.values())
        ago_s = began.observe(begun, now_ns)
        return [] if ago_s is None else [CollectivesBegun(generation=state.generation, ago_s=ago_s)]

    def _advance(self, now_ns: int, done: int) -> list[AnyEvent]:
        current, state = self._current, self._state
        first = current.done == current.first
        own = first and state.membership is not None and state.membership.restore is None
        # The number of its first step does not show how many steps a script has trained.
        current.num_steps += 1 if own else done - current.done
        current.done = done
        slowest = max(rank.beat.step_s for rank in current.ranks.values())
        # The time of a generation's first step includes the start-up.
        if slowest > 0 and not first:
            current.step_s.append(slowest)
        out: list[AnyEvent] = list(self._stragglers())
        if first or now_ns - current.reported_ns >= seconds(limits.PROGRESS_JOURNAL_INTERVAL_S):
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
        at_step = [beat for beat in beats if beat.step == current.done]
        numbers = largest(beats) | {"loss": largest(at_step)["loss"]}
        known_s = self._state.step_s or numbers["step_s"]  # of the generation before, if any
        if current.step_s:
            numbers["step_s"] = median(current.step_s)
        return [
            StepCompleted(
                generation=current.number,
                step=current.done,
                counted_by=at_step[0].counted_by if at_step else "",
                first_ago_s=script_progress.first_ago_s(beats, known_s) if first else 0,
                **script_progress.beginning(beats, current.done, known_s)._asdict(),
                **numbers,
            )
        ]

    # -- hangs --------------------------------------------------------------------------------
    def _hang(self, now_ns: int) -> list[AnyEvent]:
        limit = self._hang_limit()
        if limit is None or now_ns < limit.due_ns:
            return []
        self._current.hung = True
        suspects = self._suspects(now_ns)
        return [
            HangDetected(
                generation=self._current.number,
                ranks=suspects.ranks,
                evidence=self._evidence(suspects, limit),
                basis=suspects.basis,
                quiet_s=limit.quiet_s(now_ns),
            )
        ]

    def _hang_limit(self) -> Limit | None:
        """None: progress is not expected at this moment."""
        current, state = self._current, self._state
        if not state.active or state.stop is not None or current.hung:
            return None
        live = self._live()
        if not live and (current.ranks or current.num_steps):
            return None
        if (stopped := self._stopped_limit(live)) is not None:
            return stopped
        if current.num_steps == 0:
            if self._silent(live):
                return self._collectives_limit(live)
            busy = [known.moved_ns for known in live.values() if known.beat.phase != "start"]
            limit_s = self._recovery.startup_timeout_s
            began_ns = max([state.launched_ns, *busy])
            return Limit(began_ns + seconds(limit_s), limit_s, "start-up")
        if self._by_collectives(live) and (limit := self._collectives_limit(live)) is not None:
            return limit
        if any_works(live):
            newest_ns = max(known.moved_ns for known in live.values())
            limit_s = limits.SAVE_TIMEOUT_S
            return Limit(newest_ns + seconds(limit_s), limit_s, "save")
        limit, found = self._train_limit(live), self._quietest(live)
        if found is None:
            return None
        oldest_ns = found[1]
        if limit.name == "hang":
            oldest_ns = max(oldest_ns, current.busy_ns, current.starved_ns)
        due_ns = self._due_after(oldest_ns, limit.limit_s)
        limit = replace(limit, due_ns=due_ns, moved_ns=found[1])
        return limit if self._current_at(due_ns) else None

    def _live(self) -> dict[int, RankProgress]:
        """Ranks that have neither ended nor run to the end of their script."""
        if self._live_ranks is None:
            ranks, exits = self._current.ranks.items(), self._state.exits
            self._live_ranks = {
                rank: r for rank, r in ranks if rank not in exits and not r.beat.leaves
            }
        return self._live_ranks

    def _silent(self, live: dict[int, RankProgress]) -> bool:
        """A script of which no step was ever counted, and no rank prepares for one."""
        return not self._recipe and all(known.beat.silent for known in live.values())

    def _by_collectives(self, live: dict[int, RankProgress]) -> bool:
        """Collectives show the progress of a script: no step was counted, or too few to know how
        long one takes."""
        if self._recipe or self._learned:
            return False
        if self._current.num_steps == 0:
            return self._silent(live)
        least = script_progress.MIN_COLLECTIVES
        begun = all(known.beat.collectives >= least for known in live.values())
        return begun and self._recovery.hang_timeout_s == "auto"

    def _quietest(self, live: dict[int, RankProgress]) -> tuple[int, int] | None:
        if self._quiet is None:
            self._quiet = (self._find_quietest(live),)
        return self._quiet[0]

    def _find_quietest(self, live: dict[int, RankProgress]) -> tuple[int, int] | None:
        """The rank with the oldest progress, and when that was. Of a script, one of those that
        report; if collectives show its progress, that is a collective, a step or a phase of any
        rank. None: not known, also when the ranks that report have ended."""
        if self._by_collectives(live):
            seen = ((known.beat, known.seen_ns) for known in live.values())
            begun_ns = script_progress.last_collective_ns(seen)
            if begun_ns is None:
                return None
            steps = self._current.num_steps
            moved_ns = [k.moved_ns for k in live.values() if k.beat.ticks or steps]
            return min(live), max([begun_ns, *moved_ns])
        every = counting(known.beat for known in self._current.ranks.values())
        reporting = [beat.rank for beat in every if beat.rank in live]
        if not reporting:
            return None
        oldest_ns, rank = min((live[rank].moved_ns, rank) for rank in reporting)
        return rank, oldest_ns

    def _collectives_limit(self, live: dict[int, RankProgress]) -> Limit | None:
        """Limit of a script whose progress is its collectives: a rank does nothing that its peers
        wait for, or while it loads, no rank does. None: what they do is not known, or they work."""
        current, recovery = self._current, self._recovery
        if not live or len(live) != len(current.ranks):
            return None
        if (found := self._quietest(live)) is None:
            idle_ns = max(known.seen_ns - seconds(known.beat.idle_s) for known in live.values())
            limit_s, idle_ns = recovery.startup_timeout_s, max(idle_ns, self._state.launched_ns)
            limit = Limit(self._due_after(idle_ns, limit_s), limit_s, "start-up", idle_ns)
            early = idle_ns - self._state.launched_ns <= seconds(limit_s)
            return limit if early and self._current_at(limit.due_ns) else None
        if len(live) == 1:
            return None
        begun_ns = found[1]
        if recovery.hang_timeout_s == "auto":
            if self._condition(live) != "idle":
                return None
            gap_s = limits.WORST_GAP_FACTOR * self._worst_gap_s
            early_s = script_progress.early_limit_s(self._state) if current.num_steps else 0.0
            limit_s = max(2 * recovery.busy_timeout_s, gap_s, early_s)
            since_ns = max(current.busy_ns, min(current.starved_ns, self._outside_ns(live)))
        else:
            limit_s, since_ns = recovery.hang_timeout_s, 0
        if any_works(live):
            limit_s = max(limit_s, limits.SAVE_TIMEOUT_S)
        due_ns = self._due_after(max(begun_ns, since_ns), limit_s)
        limit = Limit(due_ns, limit_s, "collectives", begun_ns)
        return limit if self._current_at(due_ns) else None

    def _due_after(self, oldest_ns: int, limit_s: float) -> int:
        # While no node sent heartbeats, the workers may have been stopped as well.
        since_ns = max(oldest_ns, self._detector.ended_ns)
        latest_ns = oldest_ns + seconds(limits.ALL_SILENT_FACTOR * limit_s)
        return min(since_ns + seconds(limit_s), latest_ns)

    def _current_at(self, due_ns: int, *ranks: int) -> bool:
        """The last heartbeats of these ranks' nodes, or of all, count as current at `due_ns`. A
        rank of another node may have moved, or the node is lost: that is not a hang."""
        nodes = [*map(self._state.node_of, ranks)] or self._state.members
        return self._detector.current_at(due_ns, nodes, self._recovery)

    def _stopped_limit(self, live: dict[int, RankProgress]) -> Limit | None:
        """A stopped process makes no progress, in whatever phase."""
        stopped = [rank for rank, known in live.items() if known.beat.stopped]
        if not stopped or self._recovery.hang_timeout_s != "auto":
            return None
        first = min(stopped, key=lambda rank: (live[rank].ran_ns, rank))
        limit_s = limits.HANG_FLOOR_S
        due_ns = self._due_after(live[first].ran_ns, limit_s)
        if not self._current_at(due_ns, first):
            return None
        return Limit(due_ns, limit_s, "stopped-process", live[first].ran_ns)

    def _train_limit(self, live: dict[int, RankProgress]) -> Limit:
        """How long the live ranks may make no progress, by what they do; due_ns is not set."""
        limit_s = self.hang_limit_s()
        if not self._learned:
            return Limit(0, limit_s, "hang")
        found = self._condition(live)
        if found == "idle":
            return Limit(0, limit_s, "hang")
        gap_s = limits.WORST_GAP_FACTOR * self._worst_gap_s
        busy_s = max(limit_s, self._recovery.busy_timeout_s, gap_s)
        if script_progress.pace_s(known.beat for known in self._current.ranks.values()):
            # It may evaluate or save, which its framework does not say.
            busy_s = max(busy_s, limits.SAVE_TIMEOUT_S)
        if found == "starved":
            return Limit(0, limits.STARVED_FACTOR * busy_s, "starved-machine")
        return Limit(0, busy_s, "busy-worker")

    def _condition(self, live: dict[int, RankProgress]) -> Condition:
        if self._starved_ns is None and not self._current.inspected:
            return "unknown"
        now_ns = max(known.seen_ns for known in live.values())
        beats = [known.beat for known in live.values()]
        found = condition(now_ns, beats, self._current.inspected)
        if found == "busy":
            self._current.busy_ns = now_ns
        if not self._starved(now_ns):
            return found
        self._current.starved_ns = now_ns
        return "starved"

    def _outside_ns(self, live: dict[int, RankProgress]) -> int:
        """Since when a rank does nothing that its peers wait for. It does not wait for a CPU, so
        a starved machine is no excuse for it. Without such a rank: now."""
        now_ns = max(known.seen_ns for known in live.values())
        return outside_since_ns(now_ns, (r.beat for r in live.values()), self._current.inspected)

    def _starved(self, now_ns: int) -> bool:
        at_ns = self._starved_ns
        return at_ns is not None and now_ns - at_ns <= seconds(STARVED_MEMORY_S)

    @property
    def _learned(self) -> bool:
        """The measured limits apply."""
        auto = self._recovery.hang_timeout_s == "auto"
        return (
            auto and self._current.num_steps >= limits.HANG_SAMPLES and bool(self._current.step_s)
        )

    def hang_limit_s(self) -> float:
        """How long a rank may have no progress in phase `train`."""
        if self._recovery.hang_timeout_s != "auto":
            return self._recovery.hang_timeout_s
        current = self._current
        if not self._learned:
            return self._recovery.startup_timeout_s
        pace_s = script_progress.pace_s(known.beat for known in current.ranks.values())
        return limits.HANG_FLOOR_S + pace_s + limits.HANG_STEP_FACTOR * median(current.step_s)

    # -- suspicions ---------------------------------------------------------------------------
    def _suspicion_ns(self) -> int | None:
        """When to ask what the workers do; None: there is no need."""
        current, state, live = self._current, self._state, self._live()
        if not state.active or state.stop is not None or current.hung or not live:
            return None
        by_collectives, works = self._by_collectives(live), any_works(live)
        silent = by_collectives and current.num_steps == 0
        if works and not silent:
            return None
        found = self._quietest(live) if by_collectives or self._learned else None
        if found is None:
            return None
        quietest, oldest_ns = found
        limit_s = limits.SAVE_TIMEOUT_S if works else self.hang_limit_s()
        if by_collectives and not works:
            limit_s = script_progress.SUSPECT_AFTER_S + limits.SUSPICION_LEAD_S
            limit_s += 0.0 if silent else script_progress.POST_INTERVAL_S
        due_ns = self._due_after(oldest_ns, limit_s - limits.SUSPICION_LEAD_S)
        if current.suspected_ns is not None:
            due_ns = max(due_ns, current.suspected_ns + seconds(INSPECT_AGAIN_S))
        return due_ns if self._current_at(due_ns, quietest) else None

    def _suspicion(self, now_ns: int) -> list[AnyEvent]:
        current, live = self._current, self._live()
        found = self._quietest(live) if live else None
        oldest_ns = found[1] if found is not None else now_ns
        # A beat's age is rounded, so the same progress may seem a little newer.
        moved = oldest_ns > current.suspected_since_ns + seconds(limits.SUSPICION_LEAD_S)
        if current.suspected_ns is not None and moved:
            gap_s = (oldest_ns - current.suspected_since_ns) / SECOND_NS
            current.suspected_ns = None
            current.inspected.clear()
            return [HangSuspicionEnded(generation=current.number, seconds=gap_s)]
        due_ns = self._suspicion_ns()
        if due_ns is None or now_ns < due_ns:
            return []
        if current.suspected_ns is None:
            current.suspected_since_ns = oldest_ns
        current.suspected_ns = now_ns
        text = f"{self._suspects(now_ns).why}; {self._done()}"
        return [HangSuspected(generation=current.number, evidence=text)]

    def _suspects(self, now_ns: int) -> Suspects:
        state, current = self._state, self._current
        assert state.membership is not None
        world_size = state.membership.world_size
        return Suspects.find(now_ns, world_size, state.exits, current.ranks, current.inspected)

    def _done(self) -> str:
        if self._current.num_steps == 0:
            return "no step was reported"
        return f"all ranks had finished step {self._current.done}"

    def _evidence(self, suspects: Suspects, limit: Limit) -> str:
        current = self._current
        of = f"{limit.name} limit"
        if limit.name == "hang" and current.step_s and self._recovery.hang_timeout_s == "auto":
            step_s = median(current.step_s)
            floor_s = limits.HANG_FLOOR_S
            floor_s += script_progress.pace_s(known.beat for known in current.ranks.values())
            of += f" ({floor_s:g} s + {limits.HANG_STEP_FACTOR:g} x {step_s:.2f} s)"
        return f"{suspects.why}; the {of} is {limit.limit_s:.1f} s; {self._done()}"

    # -- stragglers ---------------------------------------------------------------------------
    def _stragglers(self) -> list[AnyEvent]:
        current, state = self._current, self._state
        now_ns = max(known.seen_ns for known in current.ranks.values())
        since_ns = now_ns - seconds(STARVED_MEMORY_S)
        contended = {node for node, at_ns in self._contended.items() if at_ns >= since_ns}
        beats = {rank: known.beat for rank, known in current.ranks.items()}
        return [
            StragglerDetected(generation=current.number, node=node, rank=rank, evidence=evidence)
            for node, rank, evidence in current.stragglers.observe(
                state, current.done, beats, contended
            )
        ]
