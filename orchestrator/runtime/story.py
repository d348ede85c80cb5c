"""The one fold from a job's events to what there is to see of it.

Owns: the JobView. Display, report, status, metrics and the listing of events read it, so they
cannot disagree. Must not: read a clock or decide. It is a pure function of the journal: the
controller's state it reads is a function of the journal too. Only what comes from heartbeats
(`beat`) is live and not in a replay; it never reaches the ledger or the incidents.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from ..core.actions import AnyAction, CommitManifest
from ..core.checkpoints import in_memory
from ..core.controller import Controller
from ..core.events import (
    ActionFailed,
    ActionSucceeded,
    AnyEvent,
    Heartbeat,
    PersistFailed,
    ShardPersisted,
    StepsAdvanced,
)
from ..core.journal import Record
from ..core.state import IncidentRecord, JobState, Node
from ..protocol.facts import WorkerBeat
from ..protocol.spec import TrainingJob
from .ledger import NS, TERMINAL, TimeLedger
from .peaks import peak_flops
from .view import CheckpointView, Incident, JobView, NodeView, WorkerView

PASSED_OVER_LIMIT = 3
"""Checkpoints in a row that were not tried because an older one was still being written."""


class Beat(NamedTuple):
    at_ns: int
    heartbeat: Heartbeat


class Story:
    """What a job's events add up to."""

    def __init__(self, job: TrainingJob) -> None:
        self._job = job
        self._ledger = TimeLedger()
        self._progress: StepsAdvanced | None = None
        self._tokens_total = 0
        self._first_step_ns: int | None = None
        self._commits = 0
        self._committing: dict[int, float] = {}
        """CommitManifest under way -> the longest write among its shards."""
        self._writes: dict[tuple[int, int], float] = {}
        self._durable_s = 0.0
        self._storage_problem = ""
        self._storage_failures = 0
        self._storage_skipped = 0
        self._passed_over: set[int] = set()
        """Steps that were not written, since the last commit, because others were."""
        self._finished_ns: int | None = None
        self._state: JobState | None = None
        self._beats: dict[str, Beat] = {}
        self.now_ns = 0
        """Time of the newest event."""

    def observe(
        self, now_ns: int, event: AnyEvent, actions: Iterable[AnyAction], state: JobState
    ) -> None:
        """A durable event, after the controller has seen it."""
        self._state = state
        self.now_ns = now_ns
        match event:
            case StepsAdvanced() if event.generation == state.generation:
                self._advance(now_ns, event, state)
            case ShardPersisted():
                key = (event.shard.step, event.shard.generation)
                self._writes[key] = max(event.seconds, self._writes.get(key, 0.0))
            case ActionSucceeded() if event.action_id in self._committing:
                self._commits += 1
                self._durable_s = self._committing.pop(event.action_id)
                self._storage_problem = ""
                self._passed_over.clear()
            case ActionFailed() if event.action_id in self._committing:
                del self._committing[event.action_id]
                self._storage_failed(f"a manifest could not be written: {event.detail}")
            case PersistFailed(tried=False):
                self._skip(event)
            case PersistFailed():
                what = f"shard {event.shard} of step {event.step} ({event.node})"
                self._storage_failed(f"{what} could not be written: {event.detail}")
        for action in actions:
            if isinstance(action, CommitManifest):
                key = (action.step, action.generation)
                self._committing[action.action_id] = self._writes.get(key, 0.0)
                self._writes = {k: v for k, v in self._writes.items() if k > key}
        self._ledger.observe(now_ns, event, state)
        if state.terminal and self._finished_ns is None:
            self._finished_ns = now_ns

    def _advance(self, now_ns: int, event: StepsAdvanced, state: JobState) -> None:
        restore = state.membership.restore if state.membership else None
        before = restore.step if restore else -1
        if self._progress is not None and self._progress.generation == event.generation:
            before = self._progress.step
        self._tokens_total += event.tokens * max(0, event.step - before)
        self._progress = event
        if self._first_step_ns is None:
            self._first_step_ns = now_ns

    def _storage_failed(self, text: str) -> None:
        self._storage_problem = text
        self._storage_failures += 1

    def _skip(self, event: PersistFailed) -> None:
        """Once or twice is a slow store; more often, one that may not answer at all."""
        self._storage_skipped += event.shard >= 0
        self._passed_over.add(event.step)
        many = len(self._passed_over)
        if many >= PASSED_OVER_LIMIT and not self._storage_problem:
            self._storage_problem = f"{many} checkpoints were passed over: {event.detail}"

    def beat(self, now_ns: int, heartbeat: Heartbeat) -> None:
        """A heartbeat: newer than any event, and forgotten with this process."""
        self._beats[heartbeat.node] = Beat(now_ns, heartbeat)

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
        until = self._finished_ns or now_ns
        recipe = self._job.spec.entrypoint.recipe
        view = JobView(
            name=self._job.name,
            job_id=state.job_id,
            state=state.phase,
            reason=state.reason.text,
            submitted_ns=state.submitted_ns,
            finished_ns=self._finished_ns,
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
                for one in state.ledger.committed
                if not one.refused and one.key not in state.ledger.deleting
            ],
            checkpoint_path=checkpoint_path,
            incidents=self._incidents(state),
            ledger=self._ledger.seconds(until),
            goodput=self._ledger.goodput(until),
            traceback=state.traceback,
            metrics_port=metrics_port,
            controller_restarts=max(0, state.incarnation - 1),
        )
        view.tokens_total, view.commits = self._tokens_total, self._commits
        view.durable_s = self._durable_s
        view.storage_problem = self._storage_problem
        view.storage_failures = self._storage_failures
        view.storage_skipped = self._storage_skipped
        if self._first_step_ns is not None:
            view.first_step_s = (self._first_step_ns - state.submitted_ns) / NS
        self._fill_progress(view, state)
        if state.terminal:
            return view  # its nodes are given back, and their memory with them
        view.memory_step = next((key[0] for key, _ in in_memory(state)), -1)
        beats = self._current_beats(state) if live else {}
        view.nodes = _nodes(state, beats, now_ns)
        if beats:
            _overlay(view, state, beats)
        return view

    def _incidents(self, state: JobState) -> list[Incident]:
        silent = self._job.spec.entrypoint.recipe is None and self._first_step_ns is None
        found = [_incident(one, no_steps=silent) for one in state.incidents]
        for one, after in pairwise(found):
            if "total" not in one.seconds:
                one.overtaken_by = after.number
        return found

    def _fill_progress(self, view: JobView, state: JobState) -> None:
        progress = self._progress
        if progress is None:
            return
        view.loss, view.step_s, view.stall_s = progress.loss, progress.step_s, progress.stall_s
        view.device_memory_peak_bytes = progress.device_memory_peak_bytes
        if progress.step_s > 0:
            view.tokens_per_s = progress.tokens / progress.step_s
            peak = _peak(state)
            if peak and progress.flops_per_step and view.world_size:
                rate = progress.flops_per_step / progress.step_s
                view.mfu = rate / (peak * view.world_size)

    def _current_beats(self, state: JobState) -> dict[str, Beat]:
        return {name: beat for name, beat in self._beats.items() if name in state.nodes}


def _peak(state: JobState) -> float:
    """FLOP/s of one worker's device; 0: not known."""
    node = state.nodes.get(state.members[0]) if state.members else None
    return peak_flops(node.facts.gpus[0].name) if node and node.facts.gpus else 0.0


# -- nodes and workers ------------------------------------------------------------------------
def _nodes(state: JobState, beats: dict[str, Beat], now_ns: int) -> list[NodeView]:
    views = [_node(state, node, beats.get(name), now_ns) for name, node in state.nodes.items()]
    if state.phase in ("recovering", "pending"):
        views += [
            NodeView(name=name, state="lost")
            for name in state.members
            if name not in state.nodes and name in state.gone
        ]
    order = {name: index for index, name in enumerate(state.members)}
    return sorted(views, key=lambda view: order.get(view.name, len(order)))


def _node(state: JobState, node: Node, beat: Beat | None, now_ns: int) -> NodeView:
    member = state.active and node.name in state.members
    view = NodeView(
        name=node.name,
        state="cordoned" if node.name in state.cordoned else "member" if member else "spare",
        address=node.facts.address,
        strikes=len(state.strikes.get(node.name, [])),
    )
    if beat is not None:
        view.heartbeat_age_s = max(0, now_ns - beat.at_ns) / NS
    if member and node.name in state.launch:
        workers = {}
        if beat is not None and beat.heartbeat.generation == state.generation:
            workers = {worker.rank: worker for worker in beat.heartbeat.workers}
        view.workers = [
            _worker(state, seat.rank, seat.local_rank, workers.get(seat.rank))
            for seat in state.launch[node.name].seats
        ]
    return view


def _worker(state: JobState, rank: int, local_rank: int, beat: WorkerBeat | None) -> WorkerView:
    view = WorkerView(rank=rank, local_rank=local_rank)
    running = state.phase in ("running", "finishing")
    view.state = "running" if running else "starting"
    view.step = state.step
    if beat is not None:
        # A script that does not use workers.session has neither phases nor a pulse.
        speaks = beat.ticks > 0
        view.phase, view.step = beat.phase if speaks else "", beat.step
        view.state = "running" if beat.phase == "train" or running else "starting"
        limit_s = state.job.spec.recovery.heartbeat_timeout_s
        if beat.stopped or (speaks and beat.pulse_age_s > limit_s):
            view.state = "suspect"
    hang = state.stop.hang if state.stop is not None else None
    if hang is not None and rank in hang[0]:
        view.state = "hung"
    if rank in state.exits:
        view.state = "exited"
        view.step = state.exits[rank][1].step
    return view


def _overlay(view: JobView, state: JobState, beats: dict[str, Beat]) -> None:
    """What the workers said since the last sampled event."""
    current = [beats[name].heartbeat for name in state.members if name in beats]
    current = [beat for beat in current if beat.generation == state.generation]
    workers = [worker for beat in current for worker in beat.workers]
    if state.stop is not None or not workers or len(workers) != view.world_size:
        return
    view.step = max(view.step, min(worker.step for worker in workers))
    staged = min(beat.staged_step for beat in current)
    view.memory_step = max(staged, view.memory_step) if staged >= 0 else view.memory_step
    told = [worker for worker in workers if worker.loss is not None]
    if told:
        view.loss = max(told, key=lambda worker: (worker.step, -worker.rank)).loss
    view.stall_s = max(worker.stall_s for worker in workers) or view.stall_s
    peak = max(worker.device_memory_peak_bytes for worker in workers)
    view.device_memory_peak_bytes = max(view.device_memory_peak_bytes, peak)


# -- incidents --------------------------------------------------------------------------------
def _incident(record: IncidentRecord, *, no_steps: bool) -> Incident:
    lost = None
    if record.resumed_after_step is not None and not no_steps:
        lost = max(0, record.step_before - record.resumed_after_step)
    planned = record.purpose if record.purpose not in ("failure", "preemption") else ""
    return Incident(
        number=record.number,
        at_ns=record.at_ns,
        failure_class=record.failure_class or planned or "infrastructure",
        title=record.title,
        culprit_node=record.culprit_node,
        culprit_rank=record.culprit_rank,
        evidence=record.evidence,
        decision=record.decision,
        rehearsal=record.rehearsal,
        generation_before=record.generation_before,
        generation_after=record.generation_after,
        world_size_before=record.world_size_before,
        world_size_after=record.world_size_after,
        resumed_after_step=record.resumed_after_step,
        restored_from=record.restored_from,
        steps_lost=lost,
        seconds=_seconds(record, no_steps=no_steps),
        no_steps=no_steps,
        traceback=record.traceback,
        stacks={str(rank): text for rank, text in record.stacks.items()},
    )


def _seconds(record: IncidentRecord, *, no_steps: bool) -> dict[str, float]:
    """By phase, in order; the phases so far add up to the time so far."""
    ends = {
        "stop": record.stopped_ns,
        "place": record.launched_ns,
        "launch": record.started_ns,
        "first-step": record.first_step_ns,
    }
    seconds: dict[str, float] = {}
    at_ns = record.at_ns
    for phase, end_ns in ends.items():
        if end_ns is not None:
            seconds[phase] = max(0, end_ns - at_ns) / NS
            at_ns = max(at_ns, end_ns)
    over_ns = record.started_ns if no_steps else record.first_step_ns
    if over_ns is not None:
        seconds["total"] = (over_ns - record.at_ns) / NS
    return seconds


# -- from the journal alone -------------------------------------------------------------------
def replay(job: TrainingJob, records: Iterable[Record]) -> Story:
    """The story of a journal."""
    controller, story = Controller(), Story(job)
    for now_ns, event in records:
        actions = controller.step(now_ns, event)
        story.observe(now_ns, event, actions, controller.state)
    return story


__all__ = ["TERMINAL", "Beat", "Story", "replay"]
