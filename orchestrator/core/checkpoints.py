"""The checkpoint ledger: shard reports -> committed; retention; what can be restored from where.

Owns: state.ledger. Must not: know why a generation begins or ends. The memory tier is never written
down here: what it holds is in the inventories of the nodes that live.
"""

from __future__ import annotations

from ..protocol.facts import Restore, ShardFile, ShardLocation
from ..protocol.manifest import directory_name
from .actions import CommitManifest, DeleteCheckpoint, Reason
from .context import StepContext
from .events import CheckpointRefused, ShardPersisted
from .state import CommittedCheckpoint, JobState, NodeRecord, PendingCheckpoint, StepKey

MAX_SOURCES_PER_SHARD = 4
"""Nodes named as sources of one shard: enough to survive losses, small enough for the message."""
COMMIT_RETRY_S = 2.0
DISTRUST_AFTER = 2
"""Generations that failed before their first step from the same state in memory."""


# -- the memory tier --------------------------------------------------------------------------
def in_memory(state: JobState, *, leaving_too: bool = True) -> list[tuple[StepKey, int]]:
    """((step, generation), num_shards) of every state whose shards all live, newest first.

    Without `leaving_too`: on nodes that stay and may be trained on."""
    found: dict[tuple[int, int, int], dict[int, None]] = {}
    for node in state.nodes.values():
        if not leaving_too and (node.preempting or node.name in state.cordoned):
            continue
        for shard in node.staged:
            key = (shard.step, shard.generation, shard.num_shards)
            found.setdefault(key, {})[shard.shard] = None
    complete = [
        ((step, generation), num_shards)
        for (step, generation, num_shards), shards in found.items()
        if len(shards) == num_shards
    ]
    return sorted(complete, reverse=True)


def sources(state: JobState, key: StepKey, num_shards: int) -> tuple[ShardLocation, ...]:
    """Who can serve each shard of a state from memory."""
    holders: dict[int, list[NodeRecord]] = {}
    for node in state.nodes.values():
        for shard in node.staged:
            if (shard.step, shard.generation, shard.num_shards) == (*key, num_shards):
                holders.setdefault(shard.shard, []).append(node)
    return tuple(
        ShardLocation(shard, node.name, node.facts.address, node.facts.data_port)
        for shard in sorted(holders)
        for node in holders[shard][:MAX_SOURCES_PER_SHARD]
    )


# -- the storage tier -------------------------------------------------------------------------
def newest_committed(state: JobState) -> CommittedCheckpoint | None:
    """The newest that no reader has refused and nobody deletes."""
    ledger = state.ledger
    good = [c for c in ledger.committed if not c.refused and c.key not in ledger.deleting]
    return max(good, key=lambda c: c.key, default=None)


def choose_restore(state: JobState) -> Restore | None:
    """Where the next generation begins; None: from the beginning. Memory wins a tie: it is near."""
    committed = newest_committed(state)
    for key, num_shards in in_memory(state):
        if committed is not None and key[0] < committed.step:
            break
        if state.ledger.distrusted.get(key, 0) < DISTRUST_AFTER:
            found = sources(state, key, num_shards)
            return Restore(step=key[0], generation=key[1], num_shards=num_shards, sources=found)
    if committed is None:
        return None
    return Restore(
        step=committed.step,
        generation=committed.generation,
        num_shards=committed.num_shards,
        directory=directory_name(*committed.key),
    )


def shard_persisted(turn: StepContext, event: ShardPersisted) -> None:
    """Collect; a complete set is committed. Refuses every generation but the current one and the
    one that is being drained: a zombie must not commit."""
    state, shard = turn.state, event.shard
    key = (shard.step, shard.generation)
    drained = state.drain is not None and key == (state.drain.step, state.drain.generation)
    if shard.generation != state.generation and not drained:
        turn.note(
            f"refused shard {shard.shard} of step {shard.step} from {event.node}: written by "
            f"generation {shard.generation}, the current one is {state.generation}"
        )
        if all(known.key != key for known in state.ledger.committed):
            state.ledger.strays[key] = None
        return
    newest = newest_committed(state)
    if newest is not None and newest.step >= shard.step:
        return
    mesh = state.meshes.get(shard.generation)
    if mesh is None or mesh.num_shards != shard.num_shards or shard.shard >= shard.num_shards:
        turn.note(f"refused shard {shard.shard} of {shard.num_shards}: not of the mesh {mesh}")
        return
    pending = state.ledger.pending.get(key)
    if pending is None:
        pending = PendingCheckpoint(shard.step, shard.generation, mesh)
        state.ledger.pending[key] = pending
    pending.files.setdefault(shard.shard, shard)
    if len(pending.files) == shard.num_shards and pending.commit_action is None:
        _commit(turn, pending)


def _commit(turn: StepContext, pending: PendingCheckpoint) -> None:
    files = tuple(pending.files[shard] for shard in sorted(pending.files))
    size = sum(file.num_bytes for file in files)
    pending.attempts += 1
    pending.commit_action = turn.emit(
        CommitManifest,
        Reason("checkpoint", f"all {len(files)} shards of step {pending.step}, {size} bytes"),
        pending.generation,
        step=pending.step,
        mesh=pending.mesh,
        files=files,
    )


def commit_succeeded(turn: StepContext, action: CommitManifest) -> None:
    """The manifest is durable: the checkpoint counts, older ones may go."""
    ledger = turn.state.ledger
    key = (action.step, action.generation)
    ledger.pending.pop(key, None)
    record(turn, action.files)
    ledger.last_commit_ns = turn.now
    clean(turn)


def commit_failed(turn: StepContext, action: CommitManifest, detail: str) -> None:
    pending = turn.state.ledger.pending.get((action.step, action.generation))
    if pending is None or pending.commit_action != action.action_id:
        return
    pending.commit_action = None
    text = f"the manifest of step {action.step} was not written ({detail}); trying again"
    turn.note(text)
    if turn.state.drain is not None:
        turn.state.drain.problem = text
    turn.arm_once("commit", COMMIT_RETRY_S)


def retry_commits(turn: StepContext) -> None:
    """Complete sets without a commit under way."""
    turn.disarm("commit")
    for pending in turn.state.ledger.pending.values():
        if len(pending.files) == pending.mesh.num_shards and pending.commit_action is None:
            _commit(turn, pending)


def record(turn: StepContext, files: tuple[ShardFile, ...]) -> None:
    """Add one committed checkpoint, given all its files."""
    ledger, first = turn.state.ledger, files[0]
    key = (first.step, first.generation)
    ledger.strays.pop(key, None)
    if all(known.key != key for known in ledger.committed):
        size = sum(file.num_bytes for file in files)
        ledger.committed.append(
            CommittedCheckpoint(first.step, first.generation, first.num_shards, size, turn.now)
        )


def observed(turn: StepContext, files: tuple[ShardFile, ...]) -> None:
    """A new controller lists storage: commits and deletions whose results were lost."""
    ledger = turn.state.ledger
    by_key: dict[StepKey, list[ShardFile]] = {}
    for file in files:
        by_key.setdefault((file.step, file.generation), []).append(file)
    for key in sorted(by_key):
        record(turn, tuple(by_key[key]))
        ledger.pending.pop(key, None)
    for key in list(ledger.deleting):  # a manifest goes first: without one, files may be left
        _delete(turn, key, "its deletion may not have been carried out")
    for pending in ledger.pending.values():
        pending.commit_action = None
    retry_commits(turn)
    clean(turn)


def refused(turn: StepContext, event: CheckpointRefused) -> bool:
    """A reader found damage. True if the current generation was started from it."""
    state = turn.state
    for known in state.ledger.committed:
        if known.key == (event.step, event.generation):
            known.refused = True
            turn.note(f"checkpoint of step {event.step} is damaged: {event.detail}")
    restore = state.membership.restore if state.membership else None
    return (
        restore is not None
        and restore.directory == directory_name(event.step, event.generation)
        and not state.stepped
    )


# -- retention --------------------------------------------------------------------------------
def clean(turn: StepContext) -> None:
    """Delete what retention does not keep, and attempts that a newer commit has overtaken."""
    state, ledger = turn.state, turn.state.ledger
    newest = newest_committed(state)
    if newest is None:
        return
    for pending in list(ledger.pending.values()):
        key = (pending.step, pending.generation)
        if pending.step < newest.step and pending.commit_action is None:
            ledger.pending.pop(key)
            _delete(turn, key, f"abandoned: step {newest.step} is committed")
    for key in [stray for stray in ledger.strays if stray < newest.key]:
        if key not in ledger.pending:
            ledger.strays.pop(key)
            _delete(turn, key, f"written too late, by generation {key[1]}")
    retention = state.job.spec.checkpoint.retention
    good = sorted((c for c in ledger.committed if not c.refused), key=lambda c: c.key)
    keep = {c.key for c in good[-retention.keep_last :]}
    restore = state.membership.restore if state.membership else None
    for known in list(ledger.committed):
        every = retention.keep_every_steps
        periodic = every is not None and not known.refused and (known.step + 1) % every == 0
        in_use = restore is not None and restore.directory == directory_name(*known.key)
        if known.key in keep or periodic or in_use or known.key in ledger.deleting:
            continue
        why = "found damaged" if known.refused else f"the newest {retention.keep_last} are kept"
        _delete(turn, known.key, why)


def _delete(turn: StepContext, key: StepKey, why: str) -> None:
    reason = Reason("retention", f"checkpoint of step {key[0]}: {why}")
    turn.state.ledger.deleting[key] = turn.emit(
        DeleteCheckpoint, reason, step=key[0], written_by=key[1]
    )


def deleted(turn: StepContext, action: DeleteCheckpoint) -> None:
    ledger = turn.state.ledger
    key = (action.step, action.written_by)
    if ledger.deleting.get(key) == action.action_id:
        ledger.deleting.pop(key)
        ledger.committed = [c for c in ledger.committed if c.key != key]
