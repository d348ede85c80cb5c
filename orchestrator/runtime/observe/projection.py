"""The read model of a job: folds its events, and the newest heartbeats, into a JobView.

Display, report, status, metrics and the listing of events all read that view, so they agree. The
projection is a pure function of the journal; only heartbeats (`beat`) come on top, and they change
neither the time accounting nor the incidents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.core import keeping, own_checkpoints
from holdfast.orchestrator.core.actions import AnyAction, CommitManifest
from holdfast.orchestrator.core.checkpoints import in_memory
from holdfast.orchestrator.core.context import SECOND_NS, recovery_of
from holdfast.orchestrator.core.host_memory import running
from holdfast.orchestrator.core.roster import NodeRecord
from holdfast.orchestrator.core.staging_interval import describe
from holdfast.orchestrator.core.state import JobState
from holdfast.orchestrator.parts import part
from holdfast.orchestrator.protocol.facts import (
    SCRIPT_SOURCES,
    StepReport,
    WorkerBeat,
    counting,
    largest,
    report_fields,
    state_after,
)
from holdfast.orchestrator.protocol.host_memory import describe as describe_memory
from holdfast.orchestrator.protocol.messages import Heartbeat, PersistFailed, ShardPersisted

from ...core.events import ActionFailed, ActionSucceeded, AnyEvent, FromNode, StepCompleted
from .goodput import TimeAccounting, TimeTotals
from .incidents import IncidentCounter, incident_views
from .view import (
    CheckpointView,
    HostMemoryView,
    JobView,
    NodeView,
    ProgressPoint,
    RefusedCheckpoint,
    WorkerView,
)

MAX_HISTORY = 240
"""Points of a chart. With more, every second one goes, and half as many come."""
SKIPPED_LIMIT = 3
"""Checkpoints skipped in a row, as an older one was being written, that are a problem."""


class NodeBeat(NamedTuple):
    at_ns: int
    heartbeat: Heartbeat


@dataclass(slots=True)
class ProjectionState:
    """The projection's state beside the controller's. Snapshots hold it by field name."""

    now_ns: int = 0
    """Time of the newest event."""
    accounts: TimeTotals = field(default_factory=TimeTotals)
    tally: IncidentCounter = field(default_factory=IncidentCounter)
    progress: StepCompleted | None = None
    history: list[ProgressPoint] = field(default_factory=list)
    history_stride: int = 1
    """Reports for each point of the history."""
    reports: int = 0
    tokens_total: int = 0
    first_step_ns: int | None = None
    commits: int = 0
    committing: dict[int, float] = field(default_factory=dict)
    """CommitManifest under way -> longest write of one of its shards."""
    writes: dict[tuple[int, int], float] = field(default_factory=dict)
    durable_s: float = 0.0
    storage_problem: str = ""
    storage_failures: int = 0
    storage_skipped: int = 0
    passed_over: dict[int, None] = field(default_factory=dict)
    """Steps skipped since the last commit because an older one was being written."""
    finished_ns: int | None = None


class JobProjection:
    """Folds events into a view. With `memory` and `state` it continues where another one ended."""

    def __init__(
        self, job: TrainingJob, memory: ProjectionState | None = None, state: JobState | None = None
    ) -> None:
        self._job = job
        self.memory = memory or ProjectionState()
        self._accounting = TimeAccounting(self.memory.accounts)
        self._state = state
        self._beats: dict[str, NodeBeat] = {}
        self.use_measurements(())

    def use_measurements(self, entries: Sequence[Any]) -> None:
        """Predict with the user's measurements of `holdfast spec plan --calibrate`."""
        figures = part("planned figures")
        self._planned = figures and figures(self._job, entries)

    @property
    def now_ns(self) -> int:
        """Time of the newest event."""
        return self.memory.now_ns

    def observe(
        self, now_ns: int, event: AnyEvent, actions: Iterable[AnyAction], state: JobState
    ) -> None:
        """An event of the journal, after the controller has taken it in."""
        self._state = state
        kept = self.memory
        kept.now_ns = now_ns
        match event:
            case StepCompleted() if event.generation == state.generation:
                self._advance(now_ns, event, state)
            case FromNode(fact=ShardPersisted() as written):
                key = (written.shard.step, written.shard.generation)
                kept.writes[key] = max(written.seconds, kept.writes.get(key, 0.0))
            case ActionSucceeded() if event.action_id in kept.committing:
                kept.commits += 1
                kept.durable_s = kept.committing.pop(event.action_id)
                kept.storage_problem = ""
                kept.passed_over.clear()
            case ActionFailed() if event.action_id in kept.committing:
                del kept.committing[event.action_id]
                self._storage_failed(f"a manifest could not be written: {event.detail}")
            case FromNode(fact=PersistFailed(tried=False) as failed):
                self._skip(failed)
            case FromNode(node, PersistFailed() as failed):
                what = f"shard {failed.shard} of {state_after(failed.step)} ({node})"
                self._storage_failed(f"{what} could not be written: {failed.detail}")
        for action in actions:
            if isinstance(action, CommitManifest):
                key = (action.step, action.generation)
                kept.committing[action.action_id] = kept.writes.get(key, 0.0)
                kept.writes = {k: v for k, v in kept.writes.items() if k > key}
        self._accounting.observe(now_ns, event, state)
        kept.tally.settle(state, no_steps=self._no_steps)
        if state.terminal and kept.finished_ns is None:
            kept.finished_ns = now_ns

    @property
    def _no_steps(self) -> bool:
        """A script that has not reported a step and may never do so."""
        return self._job.spec.entrypoint.recipe is None and self.memory.first_step_ns is None

    @property
    def _uses_mesh(self) -> bool:
        """The mesh is that of the workers: a recipe uses it, and a script whose steps the session
        counts. Any other script chooses its parallelism itself, unseen by Holdfast."""
        progress = self.memory.progress
        counts = progress is not None and progress.counted_by in ("session", "")
        return self._job.spec.entrypoint.recipe is not None or counts

    def _advance(self, now_ns: int, event: StepCompleted, state: JobState) -> None:
        kept = self.memory
        restore = state.group.membership.restore if state.group.membership else None
        before, began = restore.step if restore else -1, event.began_after
        if began is not None:  # the script restored a checkpoint of its own
            before = began
        last = kept.progress
        if last is not None and last.generation == event.generation:
            before = last.step
            if began is not None and last.began_after is not None:
                before += began - last.began_after  # the estimate has become better
        kept.tokens_total += event.tokens * max(0, event.step - before)
        kept.progress = event
        self._remember(now_ns, event)
        if kept.first_step_ns is None:
            kept.first_step_ns = now_ns

    def _remember(self, now_ns: int, event: StepCompleted) -> None:
        """Keep a point of the history, which covers the whole job."""
        kept = self.memory
        kept.reports += 1
        if kept.reports % kept.history_stride:
            return
        pace = event.tokens / event.step_s if event.step_s > 0 else 0.0
        point = ProgressPoint(
            at_ns=now_ns, step=event.step, loss=event.loss, step_s=event.step_s, tokens_per_s=pace
        )
        kept.history.append(point)
        if len(kept.history) > MAX_HISTORY:
            del kept.history[-2::-2]
            kept.history_stride *= 2

    def _storage_failed(self, text: str) -> None:
        self.memory.storage_problem = text
        self.memory.storage_failures += 1

    def _skip(self, failed: PersistFailed) -> None:
        """Count a skipped checkpoint: many in a row are a store that may not answer at all."""
        kept = self.memory
        kept.storage_skipped += failed.shard >= 0
        kept.passed_over[failed.step] = None
        many = len(kept.passed_over)
        if many >= SKIPPED_LIMIT and not kept.storage_problem:
            kept.storage_problem = f"{many} checkpoints were skipped: {failed.detail}"

    def beat(self, now_ns: int, node: str, heartbeat: Heartbeat) -> None:
        """A heartbeat: newer than any event, and not in the journal."""
        self._beats[node] = NodeBeat(now_ns, heartbeat)

    # -- the view ------------------------------------------------------------------------------
    def view(
        self,
        now_ns: int,
        *,
        live: bool = True,
        checkpoint_path: str = "",
        metrics_port: int = 0,
        copies: str = "",
    ) -> JobView:
        """The view at this time. `live`: with the newest heartbeats. `copies`: of the buddy tier,
        as CopyScheduler says."""
        state = self._state
        if state is None:
            return JobView(name=self._job.name, now_ns=now_ns, checkpoint_path=checkpoint_path)
        kept = self.memory
        until = kept.finished_ns or now_ns
        view = JobView(
            name=self._job.name,
            job_id=state.job_id,
            state=state.phase,
            reason=state.reason.text,
            submitted_ns=state.submitted_ns,
            finished_ns=kept.finished_ns,
            now_ns=now_ns,
            generation=state.generation,
            world_size=state.group.membership.world_size if state.group.membership else 0,
            gpus_per_worker=state.job.spec.resources.num_gpus,
            restarts={str(name): count for name, count in state.ledger.restarts.items()},
            relaunches=max(0, state.generation - 1),
            step=self._last_step(state),
            hold=state.hold.text if state.hold is not None else "",
            checkpoint_path=checkpoint_path,
            incidents=incident_views(state, no_steps=self._no_steps),
            ledger=self._accounting.seconds(until),
            goodput=self._accounting.goodput(until),
            traceback=state.traceback,
            metrics_port=metrics_port,
            controller_restarts=max(0, state.incarnation - 1),
        )
        view.tokens_total, view.commits = kept.tokens_total, kept.commits
        view.history = list(kept.history)
        view.durable_s = kept.durable_s
        view.planned = self._planned and self._planned.of(state)
        if state.mesh is not None and self._uses_mesh:
            view.mesh, view.strategy = state.mesh.describe(), state.mesh.strategy
        self._fill_checkpoints(view, state)
        view.storage_problem = kept.storage_problem
        view.storage_failures = kept.storage_failures
        view.storage_skipped = kept.storage_skipped
        if kept.first_step_ns is not None:
            view.first_step_s = (kept.first_step_ns - state.submitted_ns) / SECOND_NS
        current = state.nodes if live and not state.terminal else ()
        beats = {name: beat for name, beat in self._beats.items() if name in current}
        self._fill_progress(view, state, reports_of_all_ranks(state, beats))
        kept.tally.fill(view, state, no_steps=self._no_steps)
        if state.terminal:
            return view  # nodes and their memory have been released
        view.nodes = node_views(state, beats, now_ns)
        view.host_memory = _host_memory(state)
        steps = [beat.copied_step for beat in reports_of_all_ranks(state, beats)]
        view.copied_step = min(steps, default=-1)
        view.copies = copies if view.copied_step >= 0 else ""
        return view

    def _last_step(self, state: JobState) -> int:
        """The last step; before a restarted script reports, the last one before the restart."""
        before = self.memory.progress
        if state.step < 0 and before is not None and state.counted_by in SCRIPT_SOURCES:
            return before.step
        return state.step

    def _fill_checkpoints(self, view: JobView, state: JobState) -> None:
        catalog = state.catalog
        if state.may_keep_own_checkpoints and not catalog.committed:
            view.own_checkpoint = own_checkpoints.newest(state)
        view.checkpoints = [
            CheckpointView(
                step=checkpoint.step,
                generation=checkpoint.generation,
                num_bytes=checkpoint.num_bytes,
                committed_ns=checkpoint.committed_ns,
            )
            for checkpoint in catalog.committed
            if not checkpoint.refused
        ]
        view.refused_checkpoints = [
            RefusedCheckpoint(
                step=checkpoint.step,
                generation=checkpoint.generation,
                refusal=checkpoint.refusal or "damaged",
                problem=checkpoint.problem,
            )
            for checkpoint in catalog.committed
            if checkpoint.refused
        ]
        view.staging = describe(state)
        view.stage_every_steps = state.stage_every_steps if view.staging else 0

    def _fill_progress(self, view: JobView, state: JobState, heartbeats: list[Heartbeat]) -> None:
        """The newest numbers: from the last event, overridden by newer heartbeats."""
        numbers = report_fields(self.memory.progress or StepReport())
        workers = [worker for beat in heartbeats for worker in beat.workers]
        if workers:
            view.step = max(view.step, min(worker.step for worker in counting(workers)))
            said = {worker.rank: worker.keeps for worker in workers if worker.keeps}
            view.keeping = keeping.describe(state, said)
            workers.sort(key=lambda worker: (-worker.step, worker.rank))
            newest = largest(workers)
            del newest["step_s"]  # the event has the median over several steps
            peak = "device_memory_peak_bytes"
            newest[peak] = max(newest[peak], numbers[peak])
            numbers |= {name: value for name, value in newest.items() if value}
        recipe = self._job.spec.entrypoint.recipe
        if recipe is not None:
            view.result = recipe.config.result
            if recipe.config.total_steps:
                numbers["total_steps"] = recipe.config.total_steps
        for name, value in numbers.items():
            setattr(view, name, value)
        if view.step_s > 0:
            view.tokens_per_s = view.tokens / view.step_s
            device = self._planned.peak(state) if self._planned else 0.0
            if device and view.flops_per_step and view.world_size:
                view.mfu = (
                    view.flops_per_step
                    / view.step_s
                    / (device * view.world_size * max(1, view.gpus_per_worker))
                )
        if not state.terminal:
            staged = min((beat.staged_step for beat in heartbeats), default=-1)
            view.memory_step = max([staged, *(key[0] for key, _ in in_memory(state)[:1])])


def _host_memory(state: JobState) -> HostMemoryView | None:
    smallest = running(state)
    if smallest is None:
        return None
    node, memory = smallest
    return HostMemoryView(
        node=node,
        buffers=memory.grant.buffers,
        buddy=memory.grant.buddy,
        given_up=memory.grant.given_up,
        shard_bytes=memory.shard_bytes,
        workers=memory.workers,
        usable_bytes=memory.usable_bytes,
        limit_bytes=memory.room.limit_bytes,
        text=describe_memory(memory, node),
    )


# -- nodes and workers -------------------------------------------------------------------------
def node_views(state: JobState, beats: dict[str, NodeBeat], now_ns: int) -> list[NodeView]:
    views = [_node(state, node, beats.get(name), now_ns) for name, node in state.nodes.items()]
    if state.phase in ("recovering", "pending"):
        views += [
            NodeView(name=name, state="lost")
            for name in state.group.members
            if name not in state.nodes and name in state.supply.released
        ]
    order = {name: index for index, name in enumerate(state.group.members)}
    return sorted(views, key=lambda view: order.get(view.name, len(order)))


def _node(state: JobState, node: NodeRecord, beat: NodeBeat | None, now_ns: int) -> NodeView:
    member = state.is_member(node.name)
    view = NodeView(
        name=node.name,
        state="cordoned" if node.name in state.ledger.cordoned else "member" if member else "spare",
        address=node.facts.address,
        strikes=len(state.ledger.strikes.get(node.name, [])),
    )
    if beat is not None:
        view.heartbeat_age_s = max(0, now_ns - beat.at_ns) / SECOND_NS
    if member and node.name in state.group.launches:
        workers = {}
        if beat is not None and beat.heartbeat.generation == state.generation:
            workers = {worker.rank: worker for worker in beat.heartbeat.workers}
        view.workers = [
            _worker(state, seat.rank, seat.local_rank, workers.get(seat.rank))
            for seat in state.group.launches[node.name].seats
        ]
    return view


def _worker(state: JobState, rank: int, local_rank: int, beat: WorkerBeat | None) -> WorkerView:
    view = WorkerView(rank=rank, local_rank=local_rank)
    running = state.phase in ("running", "finishing")
    view.state = "running" if running else "starting"
    view.step = state.step
    if beat is not None:
        # A script need not report steps or phases; in an interpreter of its own it has no pulse.
        reports = beat.ticks > 0
        view.phase, view.step = beat.phase if beat.phase != "start" else "", beat.step
        view.memory_bytes = beat.device_memory_peak_bytes
        view.state = "running" if beat.phase == "train" or running else "starting"
        limit_s = recovery_of(state.job).heartbeat_timeout_s
        if beat.stopped or (reports and beat.pulse_age_s > limit_s):
            view.state = "suspect"
    hang = state.stop.hang if state.stop is not None else None
    if hang is not None and rank in hang[0]:
        view.state = "hung"
    if rank in state.group.exits:
        view.state = "exited"
        view.step = state.group.exits[rank][1].step
    return view


def reports_of_all_ranks(state: JobState, beats: dict[str, NodeBeat]) -> list[Heartbeat]:
    """The newest heartbeats of the current generation, if they report every rank of it."""
    current = [beats[name].heartbeat for name in state.group.members if name in beats]
    current = [beat for beat in current if beat.generation == state.generation]
    size = state.group.membership.world_size if state.group.membership else 0
    complete = state.stop is None and sum(len(beat.workers) for beat in current) == size
    return current if complete else []
