"""The one fold from a job's events to what there is to see of it.

Owns: the JobView. Display, report, status, metrics and the listing of events read it, so they
cannot disagree. Must not: read a clock or decide. It is a pure function of the journal: the
controller's state it reads is a function of the journal too. Only what comes from heartbeats
(`beat`) is live and not in a replay; it never reaches the ledger or the incidents.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.core.actions import AnyAction, CommitManifest
from holdfast.orchestrator.core.checkpoints import in_memory
from holdfast.orchestrator.core.events import (
    ActionFailed,
    ActionSucceeded,
    AnyEvent,
    HeartbeatReceived,
    PersistFailed,
    ShardPersisted,
    StepCompleted,
)
from holdfast.orchestrator.core.state import JobState
from holdfast.orchestrator.protocol.facts import StepReport, largest, report_fields

from .device_flops import peak_flops
from .goodput import NS, TimeAccounting, TimeTotals
from .incidents import IncidentCounter, incident_views
from .node_views import NodeBeat, node_views, reports_of_all_ranks
from .view import CheckpointView, JobView

PASSED_OVER_LIMIT = 3
"""Checkpoints in a row that were not tried because an older one was still being written."""


@dataclass(slots=True)
class ProjectionState:
    """All that the fold remembers; with the controller's state, all that a view needs."""

    now_ns: int = 0
    """Time of the newest event."""
    accounts: TimeTotals = field(default_factory=TimeTotals)
    tally: IncidentCounter = field(default_factory=IncidentCounter)
    progress: StepCompleted | None = None
    tokens_total: int = 0
    first_step_ns: int | None = None
    commits: int = 0
    committing: dict[int, float] = field(default_factory=dict)
    """CommitManifest under way -> the longest write among its shards."""
    writes: dict[tuple[int, int], float] = field(default_factory=dict)
    durable_s: float = 0.0
    storage_problem: str = ""
    storage_failures: int = 0
    storage_skipped: int = 0
    passed_over: dict[int, None] = field(default_factory=dict)
    """Steps that were not written, since the last commit, because others were."""
    finished_ns: int | None = None


class JobProjection:
    """What a job's events add up to. With `memory` and `state` it goes on where another ended."""

    def __init__(
        self, job: TrainingJob, memory: ProjectionState | None = None, state: JobState | None = None
    ) -> None:
        self._job = job
        self.memory = memory or ProjectionState()
        self._ledger = TimeAccounting(self.memory.accounts)
        self._state = state
        self._beats: dict[str, NodeBeat] = {}

    @property
    def now_ns(self) -> int:
        """Time of the newest event."""
        return self.memory.now_ns

    def observe(
        self, now_ns: int, event: AnyEvent, actions: Iterable[AnyAction], state: JobState
    ) -> None:
        """A durable event, after the controller has seen it."""
        self._state = state
        kept = self.memory
        kept.now_ns = now_ns
        match event:
            case StepCompleted() if event.generation == state.generation:
                self._advance(now_ns, event, state)
            case ShardPersisted():
                key = (event.shard.step, event.shard.generation)
                kept.writes[key] = max(event.seconds, kept.writes.get(key, 0.0))
            case ActionSucceeded() if event.action_id in kept.committing:
                kept.commits += 1
                kept.durable_s = kept.committing.pop(event.action_id)
                kept.storage_problem = ""
                kept.passed_over.clear()
            case ActionFailed() if event.action_id in kept.committing:
                del kept.committing[event.action_id]
                self._storage_failed(f"a manifest could not be written: {event.detail}")
            case PersistFailed(tried=False):
                self._skip(event)
            case PersistFailed():
                what = f"shard {event.shard} of step {event.step} ({event.node})"
                self._storage_failed(f"{what} could not be written: {event.detail}")
        for action in actions:
            if isinstance(action, CommitManifest):
                key = (action.step, action.generation)
                kept.committing[action.action_id] = kept.writes.get(key, 0.0)
                kept.writes = {k: v for k, v in kept.writes.items() if k > key}
        self._ledger.observe(now_ns, event, state)
        kept.tally.settle(state, no_steps=self._silent)
        if state.terminal and kept.finished_ns is None:
            kept.finished_ns = now_ns

    @property
    def _silent(self) -> bool:
        """A script that has not reported a step, and may never."""
        return self._job.spec.entrypoint.recipe is None and self.memory.first_step_ns is None

    def _advance(self, now_ns: int, event: StepCompleted, state: JobState) -> None:
        kept = self.memory
        restore = state.membership.restore if state.membership else None
        before = restore.step if restore else -1
        if kept.progress is not None and kept.progress.generation == event.generation:
            before = kept.progress.step
        kept.tokens_total += event.tokens * max(0, event.step - before)
        kept.progress = event
        if kept.first_step_ns is None:
            kept.first_step_ns = now_ns

    def _storage_failed(self, text: str) -> None:
        self.memory.storage_problem = text
        self.memory.storage_failures += 1

    def _skip(self, event: PersistFailed) -> None:
        """Once or twice is a slow store; more often, one that may not answer at all."""
        kept = self.memory
        kept.storage_skipped += event.shard >= 0
        kept.passed_over[event.step] = None
        many = len(kept.passed_over)
        if many >= PASSED_OVER_LIMIT and not kept.storage_problem:
            kept.storage_problem = f"{many} checkpoints were passed over: {event.detail}"

    def beat(self, now_ns: int, heartbeat: HeartbeatReceived) -> None:
        """A heartbeat: newer than any event, and forgotten with this process."""
        self._beats[heartbeat.node] = NodeBeat(now_ns, heartbeat)

    # -- the view ------------------------------------------------------------------------------
    def view(
        self,
        now_ns: int,
        *,
        live: bool = True,
        checkpoint_path: str = "",
        metrics_port: int = 0,
    ) -> JobView:
        """Everything there is to see at this time."""
        state = self._state
        if state is None:
            return JobView(name=self._job.name, now_ns=now_ns, checkpoint_path=checkpoint_path)
        kept = self.memory
        until = kept.finished_ns or now_ns
        recipe = self._job.spec.entrypoint.recipe
        view = JobView(
            name=self._job.name,
            job_id=state.job_id,
            state=state.phase,
            reason=state.reason.text,
            submitted_ns=state.submitted_ns,
            finished_ns=kept.finished_ns,
            now_ns=now_ns,
            generation=state.generation,
            world_size=state.membership.world_size if state.membership else 0,
            mesh=state.mesh.describe() if state.mesh else "",
            strategy=state.mesh.strategy if state.mesh else "",
            restarts={str(name): count for name, count in state.restarts.items()},
            step=state.step,
            total_steps=recipe.config.steps if recipe else None,
            checkpoints=[
                CheckpointView(
                    step=one.step,
                    generation=one.generation,
                    num_bytes=one.num_bytes,
                    committed_ns=one.committed_ns,
                )
                for one in state.catalog.committed
                if not one.refused and one.key not in state.catalog.deleting
            ],
            checkpoint_path=checkpoint_path,
            incidents=incident_views(state, no_steps=self._silent),
            ledger=self._ledger.seconds(until),
            goodput=self._ledger.goodput(until),
            traceback=state.traceback,
            metrics_port=metrics_port,
            controller_restarts=max(0, state.incarnation - 1),
        )
        view.tokens_total, view.commits = kept.tokens_total, kept.commits
        view.durable_s = kept.durable_s
        view.storage_problem = kept.storage_problem
        view.storage_failures = kept.storage_failures
        view.storage_skipped = kept.storage_skipped
        if kept.first_step_ns is not None:
            view.first_step_s = (kept.first_step_ns - state.submitted_ns) / NS
        beats = self._current_beats(state) if live and not state.terminal else {}
        self._fill_progress(view, state, reports_of_all_ranks(state, beats))
        kept.tally.fill(view, state, no_steps=self._silent)
        if state.terminal:
            return view  # its nodes are given back, and their memory with them
        view.nodes = node_views(state, beats, now_ns)
        return view

    def _fill_progress(
        self, view: JobView, state: JobState, heartbeats: list[HeartbeatReceived]
    ) -> None:
        """The newest numbers: of the last event, and over them those of newer heartbeats."""
        numbers = report_fields(self.memory.progress or StepReport())
        workers = [worker for beat in heartbeats for worker in beat.workers]
        if workers:
            view.step = max(view.step, min(worker.step for worker in workers))
            workers.sort(key=lambda worker: (-worker.step, worker.rank))
            newest = largest(workers)
            del newest["step_s"]  # the event has the median over several steps
            peak = "device_memory_peak_bytes"
            newest[peak] = max(newest[peak], numbers[peak])
            numbers |= {name: value for name, value in newest.items() if value}
        for name, value in numbers.items():
            setattr(view, name, value)
        if view.step_s > 0:
            view.tokens_per_s = view.tokens / view.step_s
            device = _peak(state)
            if device and view.flops_per_step and view.world_size:
                view.mfu = view.flops_per_step / view.step_s / (device * view.world_size)
        if not state.terminal:
            staged = min((beat.staged_step for beat in heartbeats), default=-1)
            in_tier = next((key[0] for key, _ in in_memory(state)), -1)
            view.memory_step = max(staged, in_tier)

    def _current_beats(self, state: JobState) -> dict[str, NodeBeat]:
        return {name: beat for name, beat in self._beats.items() if name in state.nodes}


def _peak(state: JobState) -> float:
    """FLOP/s of one worker's device; 0: not known."""
    node = state.nodes.get(state.members[0]) if state.members else None
    return peak_flops(node.facts.gpus[0].name) if node and node.facts.gpus else 0.0


__all__ = ["JobProjection", "NodeBeat", "ProjectionState"]
