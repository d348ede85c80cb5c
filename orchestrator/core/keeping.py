"""Kept processes: workers that survive the stop of their generation and go on in the next one with
their model and optimizer.

A generation with kept processes that fails before its first step charges no restart, and the next
one is forked. Invariant: kept processes go on only if each rank finds the same shards and peers.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from .. import limits
from ..protocol.facts import AGAIN, Exit, Membership, Restore
from ..protocol.mesh import Mesh
from ..protocol.messages import GroupStopped
from ..protocol.rank_stacks import rank_list
from .actions import Reason
from .context import StepContext, seconds
from .failure import DIVERGED, DIVERGED_TYPES, Failure
from .state import Cause, JobState

TRIES = 2
"""Generations with kept processes that may fail before a job keeps none any more."""
OTHER_FAULTS = (
    "launch-failed", "journal-behind", "checkpoint-refused", "preempted", "lost-first", "node-lost",
    "outside-signal", "out-of-memory-kill",
)  # fmt: skip
"""Rules of failures that have nothing to do with kept processes."""
GOES_ON = ("failure", "resize", "preemption")
"""Purposes of stops in which processes may be kept."""
NOT_KEPT = "not-kept"
"""The rule of an incident in which kept processes could not continue; it charges no restart."""


def may_keep(state: JobState, cause: Cause) -> bool:
    """True if workers may keep their processes in a stop with this cause. A generation that has not
    trained shows that something else is wrong."""
    spec = state.job.spec
    wanted = spec.recovery.keep_processes == "auto" and not spec.resources.num_gpus
    goes_on = cause.purpose in GOES_ON and _trains(state)
    return wanted and goes_on and not state.keeping.why_never


def _trains(state: JobState) -> bool:
    """The running generation has finished a step, or a script that reports none communicates."""
    return bool(state.group.first_step_ns) or state.sizes.began


def kept(state: JobState, node: str, fact: GroupStopped) -> None:
    """A node has stopped its workers, and some processes may wait."""
    state.keeping.why_not = state.keeping.why_not or fact.why_not
    if fact.again:
        state.keeping.again = fact.generation
    if fact.kept:
        state.keeping.workers[node] = len(fact.kept)
        state.keeping.fixed_size = state.keeping.fixed_size or fact.fixed_size


def _waiting(state: JobState) -> dict[str, int]:
    """Node -> kept processes that wait for a seat; their node ends them after KEPT_S."""
    stopped_ns = state.incident.stopped_ns if state.incident is not None else None
    over = stopped_ns is None or state.now_ns - stopped_ns >= seconds(limits.KEPT_S)
    return {} if over or state.keeping.why_never else state.keeping.workers


def _replicas(state: JobState) -> list[tuple[str, ...]]:
    """Nodes of each replica of the last generation. Those that share a node are one."""
    group, each = state.group, state.job.spec.workers_per_node
    assert group.membership is not None
    size = max(1, group.membership.world_size // group.membership.mesh.replicate // each)
    return [group.members[at : at + size] for at in range(0, len(group.members), size)]


def whole_nodes(state: JobState) -> list[str]:
    """Nodes of those replicas of which every process waits for a seat."""
    each, here = state.job.spec.workers_per_node, _waiting(state)
    return [n for part in _replicas(state) if all(here.get(n) == each for n in part) for n in part]


def reported(state: JobState, *, keeps: bool) -> None:
    """Rank 0 of the running generation has said whether it keeps its process."""
    state.keeping.reported = state.keeping.reported or keeps


def would_keep(state: JobState, mesh: Mesh, members: tuple[str, ...]) -> bool:
    """True if survivors keep their processes in a resize to `members`, as far as is known."""
    stay = dict.fromkeys(filter(state.is_member, members), state.job.spec.workers_per_node)
    resize = Cause("resize", Reason("resize", ""))
    keeps = state.keeping.reported and may_keep(state, resize)
    return keeps and not _why_unfit(state, mesh, members, stay)


def kept_from(
    state: JobState, mesh: Mesh, members: tuple[str, ...], restore: Restore | None
) -> tuple[int, str]:
    """The generation whose processes go on in a launch, 0: none do; and why not all, if known."""
    here, keeping = _waiting(state), state.keeping
    if not here:
        late = f"kept processes end after {limits.KEPT_S:g} s" if keeping.workers else ""
        return 0, keeping.why_never or late or keeping.why_not
    why = _why_unfit(state, mesh, members, here) if restore else "no state is restored"
    return (0, why) if why else (state.generation, keeping.why_not)


def _why_unfit(
    state: JobState, mesh: Mesh, members: tuple[str, ...], here: Mapping[str, int]
) -> str:
    """Reason why the processes that nodes keep, `here`, cannot continue in a launch on `members`.
    In a smaller world all ranks must be kept ones, which know the process groups of the larger one.
    New ones have groups over replicas if there are several, and kept ones if there were."""
    before = state.group
    if before.membership is None or not before.members or state.new_code:
        return "the code is new"
    was = before.membership.mesh
    if state.keeping.fixed_size and mesh.replicate != was.replicate:
        return state.keeping.fixed_size
    if replace(was, replicate=mesh.replicate) != mesh:
        return "the model is divided in another way"
    each = state.job.spec.workers_per_node
    whole = all(here.get(name) == each for name in members)
    if mesh.replicate >= was.replicate:
        if not any(name in here for name in members):
            return "none of these nodes has a kept process"
        alike = (mesh.replicate == 1) == (state.keeping.replicas == 1)
        return "" if whole or alike else "new workers have other process groups than kept ones"
    # Two halves of different replicas never had process groups with each other.
    replicas = _replicas(state)
    parts = (members[at : at + len(replicas[0])] for at in range(0, len(members), len(replicas[0])))
    fits = whole and all(part in replicas for part in parts)
    return "" if fits else "a smaller world needs whole replicas of kept processes"


def is_smaller(state: JobState, membership: Membership) -> bool:
    """True for a smaller world, in which all processes were kept."""
    was = state.meshes.get(membership.kept_from)
    return was is not None and membership.mesh.replicate < was.replicate


def describe(state: JobState, said: Mapping[int, bool | str]) -> str:
    """Sentence on the workers that start again after a failure. `said`: rank -> WorkerBeat.keeps;
    ranks that have said nothing are left out."""
    why_not = {rank: text for rank, text in sorted(said.items()) if isinstance(text, str)}
    why = state.keeping.why_never or next(iter(why_not.values()), "")
    if state.keeping.why_never or len(why_not) == len(said):
        return f"all workers start again: {why}" if why else ""
    others = f", but not {rank_list(list(why_not))}: {why}" if why else ""
    return f"survivors keep their process{others}"


def decision(state: JobState, membership: Membership, members: tuple[str, ...], why: str) -> str:
    """The part of a launch's decision about kept processes. `why`: some are not; empty: unknown."""
    if membership.kept_from:
        num, size = sum(state.keeping.workers.get(n, 0) for n in members), membership.world_size
        others = f", others do not: {why}" if why and num < size else ""
        return f"; {num} of {size} workers keep their process{others}"
    wanted, incident = state.job.spec.recovery.keep_processes == "auto", state.incident
    explains = wanted and incident is not None and incident.purpose in GOES_ON
    why = "; ".join(filter(None, (why, AGAIN * _runs_again(state))))
    return f"; all workers start again: {why}" if explains and why else ""


def launched(state: JobState, membership: Membership) -> None:
    state.keeping.workers, state.keeping.fixed_size, state.keeping.why_not = {}, "", ""
    if not membership.kept_from:
        state.keeping.reported = False
        state.keeping.replicas = membership.mesh.replicate
        state.keeping.renewed_in = membership.generation


def exited(state: JobState, exit: Exit) -> None:
    """A worker has ended. Where replicas differ, no rank is known to be right: nothing that was
    staged since processes were kept counts, whatever else ends the generation."""
    membership, keeping = state.group.membership, state.keeping
    if membership is not None and membership.kept_from and exit.error_type in DIVERGED_TYPES:
        keeping.doubtful = (keeping.renewed_in + 1, state.generation)
        keeping.why_never = f"{exit.error_type}: {exit.error_message}"


def _runs_again(state: JobState) -> bool:
    """Processes run their script again in this generation."""
    return 0 < state.keeping.again == state.generation - 1


def failed(ctx: StepContext, failure: Failure) -> str:
    """The rule of an incident that is due to kept processes; empty: it is not."""
    state, keeping = ctx.state, ctx.state.keeping
    assert state.group.membership is not None
    diverged = failure.rule == DIVERGED
    early = not _trains(state) and failure.rule not in OTHER_FAULTS
    in_place = bool(state.group.membership.kept_from)
    again = not in_place and _runs_again(state)
    if not (in_place or again) or not (diverged or early):
        return ""
    keeping.workers, keeping.num_failures = {}, keeping.num_failures + 1
    if diverged and state.incident is not None:
        state.incident.culprit_node, state.incident.culprit_rank = "", None
    if diverged or again or keeping.num_failures >= TRIES:
        keeping.why_never = f"{failure.title}: {failure.evidence}"
    then = "no process is kept any more" if keeping.why_never else "all workers are forked again"
    ctx.note(f"kept processes could not continue ({failure.evidence}); {then}")
    return DIVERGED if diverged else NOT_KEPT
