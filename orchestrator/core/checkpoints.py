"""The checkpoint catalog: committing complete sets of shards, retention, and the choice of what to
restore. What the memory tier holds is not in the catalog but in the inventories of the nodes."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from ..protocol.facts import Restore, ShardFile, ShardLocation, state_after, steps_done
from ..protocol.manifest import MAX_NUMBER, directory_name
from ..protocol.messages import ShardPersisted
from .actions import CleanStorage, CommitManifest, Reason, Retained
from .context import StepContext
from .events import CheckpointRefused, CheckpointsListed
from .roster import NodeRecord, StepKey
from .state import CommittedCheckpoint, JobState, PendingCheckpoint, Refusal

MAX_SOURCES_PER_SHARD = 4
"""Nodes named as sources of one shard: enough to survive losses, few enough for one message."""
COMMIT_RETRY_S = 2.0
MAX_PROBLEM_CHARACTERS = 500
MAX_NAMED = 3
"""Checkpoints named in the reason of a job that holds."""
NONE: StepKey = (-1, -1)
"""Older than any checkpoint."""
DISTRUST_AFTER = 2
"""Generations that failed before their first step from the same state in memory."""


# -- the memory tier --------------------------------------------------------------------------
def in_memory(state: JobState, without: Iterable[str] = ()) -> list[tuple[StepKey, int]]:
    """Complete states that may be restored or written to storage, as Roster.complete has them."""
    return [held for held in state.nodes.complete(without) if not state.keeping.doubts(held[0][1])]


def unsaved(state: JobState) -> tuple[StepKey, int] | None:
    """The newest complete state in memory, if storage does not have its step: (key, shards)."""
    held, newest = next(iter(in_memory(state)), None), newest_committed(state)
    if held is None or (newest is not None and newest.step >= held[0][0]):
        return None
    return held


def sources(state: JobState, key: StepKey, num_shards: int) -> tuple[ShardLocation, ...]:
    """The nodes that can serve each shard of a state from memory."""
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
    """The newest that no reader has refused."""
    good = (c for c in state.catalog.committed if not c.refused)
    return max(good, key=lambda c: c.key, default=None)


def choose_restore(state: JobState) -> Restore | None:
    """State that the next generation restores; None: it starts from the beginning. At the same step
    memory is preferred: it is faster."""
    committed = newest_committed(state)
    for key, num_shards in in_memory(state):
        if committed is not None and key[0] < committed.step:
            break
        if state.catalog.distrusted.get(key, 0) < DISTRUST_AFTER:
            return Restore(
                step=key[0],
                generation=key[1],
                num_shards=num_shards,
                stages=state.meshes[key[1]].pipeline if key[1] in state.meshes else 1,
                sources=sources(state, key, num_shards),
            )
    if committed is None:
        return None
    return Restore(
        step=committed.step,
        generation=committed.generation,
        num_shards=committed.num_shards,
        directory=directory_name(*committed.key),
    )


# -- a job that has nothing to restore ----------------------------------------------------------
def must_not_begin(state: JobState) -> bool:
    """True if there were checkpoints: only a user may decide that the job begins at step 0."""
    return bool(state.catalog.committed) and not state.catalog.start_over


def why_nothing_usable(state: JobState) -> str:
    """The sentence of a job that holds: what is wrong with which checkpoint, and what to do."""
    newest = sorted(state.catalog.committed, key=lambda c: c.key, reverse=True)
    named = [
        f"that after {steps_done(bad.step)} is {bad.refusal or 'damaged'}"
        + (f" ({bad.problem})" * bool(bad.problem))
        for bad in newest[:MAX_NAMED]
    ]
    more = len(newest) - len(named)
    return (
        f"no committed checkpoint can be used: "
        f"{'; '.join(named)}{f'; and {more} more' if more else ''}. "
        f"`holdfast checkpoint repair {state.job.name}` restores what is intact, "
        f"`holdfast resume {state.job.name} --start-over` begins at step 0"
    )


def refuse(ctx: StepContext, key: StepKey, refusal: Refusal, problem: str) -> None:
    """A reader could not use this checkpoint; the one before it is restored."""
    for checkpoint in ctx.state.catalog.committed:
        if checkpoint.key == key:
            checkpoint.refused, checkpoint.refusal = True, refusal
            checkpoint.problem = problem[:MAX_PROBLEM_CHARACTERS]
            ctx.note(f"checkpoint after {steps_done(checkpoint.step)} is {refusal}: {problem}")


def shard_persisted(ctx: StepContext, node: str, fact: ShardPersisted) -> None:
    """Collect shards and commit a complete set. Shards of a generation that is neither the current
    one nor drained are refused: processes of old generations must not commit."""
    state, shard = ctx.state, fact.shard
    key = (shard.step, shard.generation)
    drained = state.drain is not None and key == (state.drain.step, state.drain.generation)
    rejected = f"rejected shard {shard.shard} of {state_after(shard.step)} from {node}: "
    if shard.generation != state.generation and not drained:
        ctx.note(f"{rejected}generation {shard.generation} wrote it, not {state.generation}")
        return
    newest = newest_committed(state)
    if newest is not None and newest.step >= shard.step:
        return
    mesh = state.meshes.get(shard.generation)
    if mesh is None or mesh.num_shards != shard.num_shards or shard.shard >= shard.num_shards:
        number, has = shard.num_shards, mesh.num_shards if mesh is not None else "no"
        ctx.note(f"{rejected}of {number}, and generation {shard.generation} has {has} shards")
        return
    pending = state.catalog.pending.get(key)
    if pending is None:
        pending = PendingCheckpoint(shard.step, shard.generation, mesh)
        state.catalog.pending[key] = pending
    pending.files.setdefault(shard.shard, shard)
    if len(pending.files) == shard.num_shards and pending.commit_action is None:
        _commit(ctx, pending)


def _commit(ctx: StepContext, pending: PendingCheckpoint) -> None:
    if ctx.state.keeping.doubts(pending.generation):
        ctx.note(f"{state_after(pending.step)} is not committed: its replicas may differ")
        return
    files = tuple(pending.files[shard] for shard in sorted(pending.files))
    size = sum(file.num_bytes for file in files)
    pending.commit_action = ctx.emit(
        CommitManifest,
        Reason("checkpoint", f"all {len(files)} shards of {state_after(pending.step)}, {size} B"),
        pending.generation,
        step=pending.step,
        mesh=pending.mesh,
        files=files,
    )


def commit_succeeded(ctx: StepContext, action: CommitManifest) -> None:
    """The manifest is durable: the checkpoint counts, and older ones may be deleted."""
    catalog = ctx.state.catalog
    catalog.pending.pop((action.step, action.generation), None)
    record(ctx, action.files)
    catalog.last_commit_ns = ctx.now_ns
    catalog.start_over = False
    clean(ctx)


def commit_failed(
    ctx: StepContext, action: CommitManifest, detail: str, *, final: bool = False
) -> None:
    """`final`: its shards do not hold every value, so it cannot be restored."""
    if final:
        _give_up_commit(ctx, action, detail)
        return
    ctx.state.catalog.pending[action.step, action.generation].commit_action = None
    text = f"the manifest after {steps_done(action.step)} was not written ({detail}); trying again"
    ctx.note(text)
    if ctx.state.drain is not None:
        ctx.state.drain.problem = text
    ctx.arm_once("commit", COMMIT_RETRY_S)


def _give_up_commit(ctx: StepContext, action: CommitManifest, detail: str) -> None:
    state, key = ctx.state, (action.step, action.generation)
    state.catalog.pending.pop(key, None)
    ctx.note(f"not committed: {detail}")
    clean(ctx, key)
    drain = state.drain
    if drain is not None and key == (drain.step, drain.generation):
        drain.problem, drain.hopeless = detail, True
        ctx.disarm("drain")


def retry_commits(ctx: StepContext) -> None:
    """Commit complete sets whose commit failed, also of a generation that has ended since."""
    ctx.disarm("commit")
    for pending in ctx.state.catalog.pending.values():
        if len(pending.files) == pending.mesh.num_shards and pending.commit_action is None:
            _commit(ctx, pending)


def record(ctx: StepContext, files: tuple[ShardFile, ...]) -> None:
    """Add one committed checkpoint, given all its files."""
    first, size = files[0], sum(file.num_bytes for file in files)
    new = CommittedCheckpoint(first.step, first.generation, first.num_shards, size, ctx.now_ns)
    if all(checkpoint.key != new.key for checkpoint in ctx.state.catalog.committed):
        ctx.state.catalog.committed.append(new)


def observed(ctx: StepContext, files: tuple[ShardFile, ...], *, listed: bool) -> None:
    """A new controller lists storage: commits and deletions whose results were lost, checkpoints
    that are gone. `listed`: storage has answered, so what is not in `files` is not there."""
    catalog = ctx.state.catalog
    if listed:
        compare(ctx, files)
    newest = max((c.key for c in catalog.committed if not c.refused), default=NONE)
    for key, its_files in sorted(_by_key(files).items()):
        if key > newest or key in catalog.pending:  # others that it lacks are being deleted
            record(ctx, tuple(its_files))
            catalog.pending.pop(key, None)
    for pending in catalog.pending.values():
        pending.commit_action = None
    # First: what is older than the newest checkpoint may have been deleted.
    if listed:
        clean(ctx)
    retry_commits(ctx)


def _by_key(files: tuple[ShardFile, ...]) -> dict[StepKey, list[ShardFile]]:
    files_by_key: dict[StepKey, list[ShardFile]] = {}
    for file in files:
        files_by_key.setdefault((file.step, file.generation), []).append(file)
    return files_by_key


def compare(ctx: StepContext, files: tuple[ShardFile, ...]) -> None:
    """Compare the catalog with what storage has. A store without any checkpoint is one that is not
    mounted: then nothing is refused, and its readers wait for it."""
    catalog, by_key = ctx.state.catalog, _by_key(files)
    if not by_key and catalog.committed:
        ctx.note("storage has none of the committed checkpoints; it may not be mounted")
        return
    for saved in catalog.committed:
        if saved.key in by_key and saved.refusal == "missing":
            saved.refused, saved.refusal, saved.problem = False, "", ""
        elif saved.key not in by_key and not saved.refused:
            refuse(ctx, saved.key, "missing", f"{directory_name(*saved.key)} is not in storage")


def listed(ctx: StepContext, event: CheckpointsListed) -> None:
    """A user resumes a job that holds: storage may have a repaired checkpoint."""
    state = ctx.state
    if state.group.active:
        return
    compare(ctx, event.files)
    for key, files in sorted(_by_key(event.files).items()):
        record(ctx, tuple(files))
        ctx.fence(key[1])  # its directory is never written again


def refused(ctx: StepContext, event: CheckpointRefused) -> bool:
    """A reader found damage. True if the current generation started from this checkpoint."""
    state = ctx.state
    refuse(ctx, (event.step, event.generation), "damaged", event.detail)
    restore = state.group.membership.restore if state.group.membership else None
    return (
        restore is not None
        and restore.directory == directory_name(event.step, event.generation)
        and not state.group.first_step_ns
    )


# -- retention --------------------------------------------------------------------------------
def clean(ctx: StepContext, given_up: StepKey = NONE) -> None:
    """Forget and delete what retention does not keep, and what gets no manifest any more: it is
    older than the newest checkpoint, or `given_up`."""
    catalog = ctx.state.catalog
    restore = ctx.state.group.membership.restore if ctx.state.group.membership else None
    kept = retained(ctx.state, restore.directory if restore is not None else "")
    abandoned = max(kept.newest, given_up)
    if abandoned == NONE:
        return
    for key, pending in list(catalog.pending.items()):
        if key < kept.newest and pending.commit_action is None:
            del catalog.pending[key]
    keep = dict.fromkeys(kept.keep)
    dropped = [c for c in catalog.committed if c.key < kept.newest and c.key not in keep]
    catalog.committed = [c for c in catalog.committed if c.key >= kept.newest or c.key in keep]
    num_kept = ctx.state.job.spec.checkpoint.retention.keep_last
    why = [
        f"checkpoint after {steps_done(c.step)}: "
        + (f"found {c.refusal or 'damaged'}" if c.refused else f"the newest {num_kept} are kept")
        for c in dropped
    ]
    reason = Reason("retention", "; ".join(why) or "nothing that agents have left is kept")
    kept = replace(kept, keep=(*kept.keep, *catalog.pending), abandoned=abandoned)
    ctx.emit(CleanStorage, reason, retained=kept)


def retained(state: JobState, in_use: str = "") -> Retained:
    """Checkpoints that stay of a job that has ended; `in_use`: a directory that stays too."""
    retention = state.job.spec.checkpoint.retention
    good = sorted(c.key for c in state.catalog.committed if not c.refused)
    interval, newest = retention.keep_every_steps, good[-retention.keep_last :]
    keep = [
        key
        for key in good
        if key >= newest[0]
        or (interval is not None and (key[0] + 1) % interval == 0)
        or directory_name(*key) == in_use
    ]
    last = good[-1] if good else NONE  # refused ones after it stay: their tensors may be needed
    return Retained(tuple(keep), last, (MAX_NUMBER, MAX_NUMBER), state.generation)
