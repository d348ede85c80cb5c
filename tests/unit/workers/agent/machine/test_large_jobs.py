"""A restore from memory with 4,096 ranks: the real messages from the controller to the workers,
their sizes, and which nodes are asked for shards."""

from __future__ import annotations

from collections import Counter

from holdfast.orchestrator import limits
from holdfast.orchestrator.core.actions import LaunchGroup, Reason
from holdfast.orchestrator.core.rank_assignment import seats_for
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import Membership, NodeFacts, Restore, ShardLocation
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.orchestrator.runtime import translate
from holdfast.workers import worker_protocol, worker_transport
from holdfast.workers.agent.machine import commands, inputs
from holdfast.workers.agent.machine.machine import AgentMachine

from .harness import of

WORKERS, NODES, COPIES = 8, 512, 4
ENVIRONMENT = {f"VARIABLE_{number}": "x" * 30 for number in range(60)}
MAX_LAUNCH_BYTES = 32 * 1024


def node_name(shard: int, copy: int) -> str:
    return f"llama-70b-pretrain-7f9c-node-{shard // WORKERS:04d}-{copy}"


def launch(mesh: Mesh) -> Membership:
    """A state of `mesh.num_shards` shards, each in the memory of COPIES nodes."""
    sources = tuple(
        ShardLocation(
            shard, node_name(shard, copy), f"10.112.{shard // WORKERS % 250}.{copy}", 40000
        )
        for shard in range(mesh.num_shards)
        for copy in range(COPIES)
    )
    restore = Restore(step=1000, generation=1, num_shards=mesh.num_shards, sources=sources)
    return Membership(
        generation=2, mesh=mesh, num_nodes=NODES, workers_per_node=WORKERS, restart_count=1,
        master_address="10.112.0.1", master_port=29500, restore=restore,
    )  # fmt: skip


def received(order: LaunchGroup) -> tuple[AgentMachine, list[commands.Fork], int]:
    """The agent of one node after the launch has come over the wire, and the size of the frame."""
    frame = m.encode(translate.to_message(order))
    message = m.decode(frame[4:])
    assert isinstance(message, m.LaunchWorkers)
    machine = AgentMachine(job="j", node=order.node, token="t", slots=WORKERS)
    facts = NodeFacts(hostname="h", address="10.112.9.9", data_port=1, slots=WORKERS)
    machine.step(0, inputs.LinkUp(facts, 29500))
    welcome = m.Welcome(
        spec={}, spec_directory="", checkpoint_path="", log_directory="", heartbeat_interval_s=0.5
    )
    machine.step(0, inputs.Received(welcome))
    forks = of(commands.Fork, machine.step(0, inputs.Received(message)))
    return machine, forks, len(frame)


def orders(mesh: Mesh, own_shards: bool = True) -> list[LaunchGroup]:
    membership = launch(mesh)
    return [
        LaunchGroup(
            action_id=rank + 1,
            generation=2,
            reason=Reason("infrastructure", ""),
            node=f"new-{rank:04d}",
            node_rank=rank,
            membership=membership,
            seats=seats,
            own_shards=own_shards,
        )
        for rank, seats in enumerate(seats_for(mesh, NODES, WORKERS))
    ]


def test_every_worker_of_4096_shards_gets_its_assignment() -> None:
    agent, worker = worker_transport.pair()
    ranks = []
    for order in orders(Mesh(shard=4096)):
        _, forks, size = received(order)
        assert size < MAX_LAUNCH_BYTES
        for fork in forks:
            assign = worker_protocol.Assign(
                membership=fork.membership, seat=fork.seat, node_rank=fork.node_rank,
                environment=ENVIRONMENT,
            )  # fmt: skip
            worker_transport.send(agent, assign)
            got, _ = worker_transport.receive(worker)
            assert got == assign
            restore = assign.membership.restore
            assert restore is not None
            assert [source.shard for source in restore.sources] == [assign.seat.shard] * COPIES
            ranks.append(assign.seat.rank)
    assert ranks == list(range(4096))
    agent.close()
    worker.close()


def test_nodes_are_asked_for_as_many_shards_each() -> None:
    """Four replicas become eight: the ranks of the new ones fetch all of their shards."""
    asked: Counter[str] = Counter()
    for order in orders(Mesh(replicate=8, shard=512))[NODES // 2 :]:
        machine, forks, _ = received(order)
        for fork in forks:
            wanted = worker_protocol.FetchShard(shard=fork.seat.shard)
            out = machine.step(0, inputs.FromRank(2, fork.seat.rank, wanted))
            (fetch,) = of(commands.FetchFromPeer, out)
            assert fetch.readers == 1, "each rank of the node has a shard of its own"
            copies = {node_name(fork.seat.shard, copy) for copy in range(COPIES)}
            assert {source.node for source in fetch.sources} == copies, "all of them may be tried"
            asked[fetch.sources[0].node] += 1
    assert len(asked) == 64 * COPIES, "every node that holds shards"
    assert set(asked.values()) == {WORKERS}


def test_a_node_fetches_the_shard_of_all_its_ranks_once() -> None:
    """A new node of DDP over 4,096 ranks: its 8 ranks hold the same state."""
    machine, forks, _ = received(orders(Mesh(replicate=4096, shard=1))[7])
    for fork in forks:
        wanted = inputs.FromRank(2, fork.seat.rank, worker_protocol.FetchShard(shard=0))
        (fetch,) = of(commands.FetchFromPeer, machine.step(0, wanted))
        assert fetch.readers == WORKERS


def test_ranks_of_another_mesh_are_sent_all_sources() -> None:
    """The ranks may need any shard, and a frame holds the sources of all."""
    order = orders(Mesh(shard=4096), own_shards=False)[7]
    machine, forks, size = received(order)
    assert MAX_LAUNCH_BYTES < size < limits.MAX_FRAME_BYTES
    assert all(len(f.membership.restore.sources) == COPIES for f in forks if f.membership.restore)
    far = inputs.FromRank(2, forks[0].seat.rank, worker_protocol.FetchShard(shard=4000))
    (fetch,) = of(commands.FetchFromPeer, machine.step(0, far))
    assert {source.shard for source in fetch.sources} == {4000}
