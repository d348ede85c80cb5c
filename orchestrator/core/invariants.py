"""What must hold after every step, in tests and in production.

Nothing is repaired. A broken invariant is a bug of Holdfast: the controller stops before it does
harm, and training goes on without it.
"""

from __future__ import annotations

from .state import JobState


class Broken(AssertionError):
    """The state contradicts itself; the message says how."""


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise Broken(text)


def check(state: JobState) -> None:
    """Raises Broken, naming what does not hold."""
    _membership(state)
    _phases(state)
    _checkpoints(state)


def _membership(state: JobState) -> None:
    # Checked after every event, for every node: texts are only made when something is wrong.
    members, wanted = dict.fromkeys(state.members), state.membership
    if len(members) != len(state.members):
        raise Broken(f"a node is a member twice: {state.members}")
    if wanted is not None and state.active:
        workers = state.job.spec.workers_per_node
        _require(wanted.generation == state.generation, "the membership is of another generation")
        if len(members) != wanted.num_nodes:
            raise Broken(f"{state.members}: {wanted.num_nodes} nodes wanted")
        _require(wanted.world_size == wanted.num_nodes * workers, f"world {wanted.world_size}")
        if state.launch_actions:
            ranks = [seat.rank for name in members for seat in state.launch_actions[name].seats]
            if ranks != list(range(wanted.world_size)):
                raise Broken(f"ranks are no bijection: {ranks}")
    pending = dict.fromkeys(promise.name for promise in state.pending_nodes)
    for name, node in state.nodes.items():
        if name in pending:
            raise Broken(f"{name} has joined and is pending")
        if name in state.released_nodes:
            raise Broken(f"{name} has joined and was released")
        if node.generation > state.generation:
            raise Broken(f"{name} runs a future generation")
    for name, action_id in state.launching.items():
        action = state.inflight.get(action_id)
        if name not in members:
            raise Broken(f"{name} is launching and is no member")
        if action is not None and action.generation != state.generation:
            raise Broken(f"{name} is being launched for generation {action.generation}")


def _phases(state: JobState) -> None:
    _require(
        not (state.active and state.needs_placement),
        "a generation runs while the next one is placed",
    )
    _require(state.stop is None or state.active, "a stop without a generation")
    if state.phase in ("pending", "suspended"):
        _require(not state.active, f"workers run in phase {state.phase}")
    if state.phase in ("starting", "running"):
        _require(state.active and state.stop is None, f"no generation runs in phase {state.phase}")
    if state.phase == "pending":
        _require(state.needs_placement, "a pending job wants no generation")
    if state.terminal:
        _require(state.outcome is not None, "a terminal phase without an outcome")
        _require(
            not state.needs_placement and state.stop is None, "a job that has ended is still busy"
        )


def _checkpoints(state: JobState) -> None:
    catalog = state.catalog
    keys = [known.key for known in catalog.committed]
    _require(len(dict.fromkeys(keys)) == len(keys), f"committed twice: {keys}")
    for pending in catalog.pending.values():
        _require(pending.generation <= state.generation, "a shard of a future generation")
        # Only the newest one: there may be thousands, and the others were checked before.
        last = next(reversed(pending.files), 0)
        if last >= pending.mesh.num_shards:
            raise Broken(f"shard {last} of {pending.mesh.num_shards}")
    good = [known.key for known in catalog.committed if not known.refused]
    if good:
        _require(max(good) not in catalog.deleting, "the newest good checkpoint is being deleted")
