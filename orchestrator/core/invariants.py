"""Invariants that hold after every step.

Nothing is repaired. A broken invariant is a bug of Holdfast: the controller stops before it does
harm, and training continues without it. Tests and the simulation check the whole state after each
step; in production a step checks what its event touched, and the whole state after a launch.
"""

from __future__ import annotations

from .state import JobState


class Broken(AssertionError):
    """The state contradicts itself; the message says how."""


def check(state: JobState) -> None:
    """Raises Broken, naming what does not hold."""
    _membership(state)
    if not state.nodes.index_is_right():
        raise Broken("the index of the nodes is not what the nodes are")
    for name in state.nodes:
        _node(state, name)
    for name in state.group.launching:
        _launching(state, name)
    check_touched(state, "")


def check_touched(state: JobState, node: str) -> None:
    """Same for a step that touched one node at most; empty: none."""
    if node in state.nodes:
        _node(state, node)
    if node in state.group.launching:
        _launching(state, node)
    _phases(state)
    _checkpoints(state)


def _membership(state: JobState) -> None:
    group = state.group
    members, wanted = dict.fromkeys(group.members), group.membership
    if len(members) != len(group.members):
        raise Broken(f"a node is a member twice: {group.members}")
    if wanted is not None and group.active:
        if wanted.generation != state.generation:
            raise Broken(f"the membership is of generation {wanted.generation}")
        if len(members) != wanted.num_nodes:
            raise Broken(f"{group.members}: {wanted.num_nodes} nodes wanted")
        if wanted.world_size != wanted.num_nodes * state.job.spec.workers_per_node:
            raise Broken(f"a world of {wanted.world_size} on {wanted.num_nodes} nodes")
        if members.keys() != group.launches.keys():
            raise Broken(f"{group.members} are members, {list(group.launches)} were launched")
        ranks = [seat.rank for name in members for seat in group.launches[name].seats]
        if ranks != list(range(wanted.world_size)):
            raise Broken(f"ranks are not a bijection: {ranks}")


def _node(state: JobState, name: str) -> None:
    if state.supply.promised.named(name) is not None:
        raise Broken(f"{name} has joined and is pending")
    if name in state.supply.released:
        raise Broken(f"{name} has joined and was released")
    if state.nodes[name].generation > state.generation:
        raise Broken(f"{name} runs a future generation")


def _launching(state: JobState, name: str) -> None:
    action = state.inflight.get(state.group.launching[name])
    if name not in state.group.launches:
        raise Broken(f"{name} is launching and is not a member")
    if action is not None and action.generation != state.generation:
        raise Broken(f"{name} is being launched for generation {action.generation}")


def _phases(state: JobState) -> None:
    phase, runs = state.phase, state.runs
    if state.group.active and state.needs_placement:
        raise Broken("a generation runs while the next one is placed")
    if state.stop is not None and not state.group.active:
        raise Broken("a stop without a generation")
    if phase in ("pending", "suspended") and state.group.active:
        raise Broken(f"workers run in phase {phase}")
    if phase in ("starting", "running") and not runs:
        raise Broken(f"no generation runs in phase {phase}")
    if phase == "pending" and not state.needs_placement:
        raise Broken("a pending job waits for no generation")
    if state.terminal and state.outcome is None:
        raise Broken("a terminal phase without an outcome")
    if state.terminal and (state.needs_placement or state.stop is not None):
        raise Broken("a job that has ended is still busy")


def _checkpoints(state: JobState) -> None:
    catalog = state.catalog
    keys = [checkpoint.key for checkpoint in catalog.committed]
    if len(dict.fromkeys(keys)) != len(keys):
        raise Broken(f"committed twice: {keys}")
    for pending in catalog.pending.values():
        if pending.generation > state.generation:
            raise Broken(f"a shard of generation {pending.generation}, which is in the future")
        # Only the newest one: there may be thousands, and the others were checked before.
        last = next(reversed(pending.files), 0)
        if last >= pending.mesh.num_shards:
            raise Broken(f"shard {last} of {pending.mesh.num_shards}")
