"""What there is to see of nodes and workers: the core's state, with the newest heartbeats over it.

Owns: NodeView and WorkerView. Must not: remember anything.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.orchestrator.core.events import HeartbeatReceived
from holdfast.orchestrator.core.state import JobState, NodeRecord
from holdfast.orchestrator.protocol.facts import WorkerBeat

from .goodput import NS
from .view import NodeView, WorkerView


class NodeBeat(NamedTuple):
    at_ns: int
    heartbeat: HeartbeatReceived


def node_views(state: JobState, beats: dict[str, NodeBeat], now_ns: int) -> list[NodeView]:
    views = [_node(state, node, beats.get(name), now_ns) for name, node in state.nodes.items()]
    if state.phase in ("recovering", "pending"):
        views += [
            NodeView(name=name, state="lost")
            for name in state.members
            if name not in state.nodes and name in state.released_nodes
        ]
    order = {name: index for index, name in enumerate(state.members)}
    return sorted(views, key=lambda view: order.get(view.name, len(order)))


def _node(state: JobState, node: NodeRecord, beat: NodeBeat | None, now_ns: int) -> NodeView:
    member = state.active and node.name in state.members
    view = NodeView(
        name=node.name,
        state="cordoned" if node.name in state.cordoned else "member" if member else "spare",
        address=node.facts.address,
        strikes=len(state.strikes.get(node.name, [])),
    )
    if beat is not None:
        view.heartbeat_age_s = max(0, now_ns - beat.at_ns) / NS
    if member and node.name in state.launch_actions:
        workers = {}
        if beat is not None and beat.heartbeat.generation == state.generation:
            workers = {worker.rank: worker for worker in beat.heartbeat.workers}
        view.workers = [
            _worker(state, seat.rank, seat.local_rank, workers.get(seat.rank))
            for seat in state.launch_actions[node.name].seats
        ]
    return view


def _worker(state: JobState, rank: int, local_rank: int, beat: WorkerBeat | None) -> WorkerView:
    view = WorkerView(rank=rank, local_rank=local_rank)
    running = state.phase in ("running", "finishing")
    view.state = "running" if running else "starting"
    view.step = state.step
    if beat is not None:
        # A script that does not use holdfast.workers.session has neither phases nor a pulse.
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


def reports_of_all_ranks(state: JobState, beats: dict[str, NodeBeat]) -> list[HeartbeatReceived]:
    """The newest heartbeats of the current generation, if they report every rank of it."""
    current = [beats[name].heartbeat for name in state.members if name in beats]
    current = [beat for beat in current if beat.generation == state.generation]
    size = state.membership.world_size if state.membership else 0
    complete = state.stop is None and sum(len(beat.workers) for beat in current) == size
    return current if complete else []
