"""Use of the nodes' memory on which all nodes agree: copies for buddies, and the memory tier.

Both are of use only on all nodes together. How many buffers a worker has is a matter of its node.
Agents report what they measured, and the reports are in the journal, so a replay decides the same.
Before the first one everything is taken to fit: an agent whose node is too small gives less.
"""

from __future__ import annotations

from ..planner.choose import needs_buddy
from ..protocol.host_memory import HostMemory, least, scaled
from ..protocol.mesh import Mesh
from ..protocol.messages import NodeMemoryPlanned
from .context import StepContext
from .state import JobState


def planned(ctx: StepContext, node: str, fact: NodeMemoryPlanned) -> None:
    """Record it. What is given up takes effect with the next copy, or report of a step."""
    state = ctx.state
    if node not in state.nodes:
        return
    state.nodes.change(node, host_memory=fact.memory)
    if state.is_member(node) and state.mesh is not None:
        plan = _for_mesh(state, fact.memory, state.mesh)
        state.given_up.copies |= plan.grant.given_up != "nothing"
        state.given_up.memory_tier |= plan.grant.buffers <= 1


def begin_generation(state: JobState, members: tuple[str, ...], mesh: Mesh) -> None:
    """Begin with what is known of its members."""
    smallest = _least(state, members, mesh)
    given_up = smallest[1].grant.given_up if smallest is not None else "nothing"
    state.given_up.copies = given_up != "nothing"
    state.given_up.memory_tier = given_up in ("memory-tier", "checkpoints")


def running(state: JobState) -> tuple[str, HostMemory] | None:
    """The member of the running generation that can hold least, with its plan; None: not known."""
    return _least(state, state.group.members, state.mesh) if state.mesh is not None else None


def _least(state: JobState, members: tuple[str, ...], mesh: Mesh) -> tuple[str, HostMemory] | None:
    nodes = [state.nodes[name] for name in members if name in state.nodes]
    memory_of = {node.name: node.host_memory for node in nodes if node.host_memory is not None}
    return least({name: _for_mesh(state, held, mesh) for name, held in memory_of.items()})


def _for_mesh(state: JobState, memory: HostMemory, mesh: Mesh) -> HostMemory:
    """Plan with copies if they are wanted, as an agent does that is launched with a buddy."""
    wanted = needs_buddy(state.job, mesh)
    workers = state.job.spec.workers_per_node
    shards = mesh.shards_per_node(workers)
    return scaled(memory, num_shards=mesh.num_shards, workers=workers, buddy=wanted, shards=shards)
