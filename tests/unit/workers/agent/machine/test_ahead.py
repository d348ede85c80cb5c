"""Workers that are started beside the running generation of other nodes, for the next one."""

from __future__ import annotations

from holdfast.orchestrator import limits
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import commands
from holdfast.workers.agent.machine.commands import Command

from .harness import AgentHarness, of, running

DDP = Mesh(replicate=2)


def building() -> AgentHarness:
    agent = AgentHarness()
    out = agent.launch(4, mesh=DDP, ahead=True)
    assert [c.membership.ahead for c in of(commands.Fork, out)] == [True, True]
    assert not of(m.Launched, out), "they have to build first"
    return agent


def built(agent: AgentHarness, rank: int) -> list[m.Launched]:
    return of(m.Launched, agent.from_worker(rank, worker_protocol.Halted(step=7), 4))


def kills(out: tuple[Command, ...]) -> list[int]:
    return [command.rank for command in of(commands.Kill, out)]


def places(out: tuple[Command, ...]) -> list[tuple[int, int] | None]:
    return [command.kept for command in of(commands.Fork, out)]


def test_they_wait_for_the_next_generation_and_no_heartbeat_shows_them() -> None:
    agent = building()
    (beat,) = of(m.Heartbeat, agent.after(1))
    assert (beat.generation, beat.workers) == (0, ())
    assert not built(agent, 0)
    (answer,) = built(agent, 1)
    assert answer.ok and answer.action_id == 14
    assert places(agent.launch(5, mesh=DDP, kept_from=4)) == [(4, 0), (4, 1)]


def test_a_launch_that_comes_before_they_are_ready_ends_them() -> None:
    """An attempt without peers may never end: it waits for what only peers send."""
    agent = building()
    built(agent, 0)
    out = agent.launch(5, mesh=DDP, kept_from=4)
    assert kills(out) == [0, 1] and places(out) == [None, None]


def test_a_launch_of_another_size_or_of_new_processes_ends_them() -> None:
    for more in ({"mesh": DDP, "kept_from": 0}, {"mesh": Mesh(replicate=4), "kept_from": 4}):
        agent = building()
        for rank in range(2):
            built(agent, rank)
        out = agent.launch(5, **more)
        assert kills(out) == [0, 1] and places(out) == [None, None]


def test_one_that_fails_ends_the_others_and_answers_why() -> None:
    agent = building()
    failed = worker_protocol.Failed(error_type="NotKept", message="no step left", traceback="")
    out = agent.from_worker(0, failed, 4)
    (answer,) = of(m.Launched, out)
    assert not answer.ok and answer.detail == "rank 0: no step left"
    assert kills(out) == [1]
    assert places(agent.launch(5, mesh=DDP, kept_from=4)) == [None, None], "rank 1 still ends"


def test_one_that_ends_is_no_exit_of_the_job_and_standbys_take_its_place() -> None:
    agent = building()
    assert not of(m.WorkerExited, agent.worker_ends(0, code=1, generation=4))
    assert of(commands.RefillStandbys, agent.after(60))
    agent = building()
    (answer,) = of(m.Launched, agent.worker_ends(1, code=0, generation=4))
    assert answer.detail == "rank 1: its process has ended"


def test_the_same_seats_are_built_once_and_others_not_beside_what_still_ends() -> None:
    agent = building()
    again = agent.launch(4, mesh=DDP, ahead=True)
    assert not of(commands.Fork, again)
    built(agent, 0)
    assert len(built(agent, 1)) == 2
    out = agent.launch(4, mesh=Mesh(replicate=4), ahead=True)
    assert kills(out) == [0, 1] and not of(commands.Fork, out)
    assert [answer.ok for answer in of(m.Launched, out)] == [False]


def test_a_node_whose_workers_train_builds_nothing() -> None:
    agent = running(3, mesh=DDP)
    out = agent.launch(4, mesh=DDP, ahead=True)
    assert [answer.detail for answer in of(m.Launched, out)] == ["workers run here"]


def test_they_do_not_wait_for_ever() -> None:
    agent = building()
    assert kills(agent.after(2 * limits.JOIN_WAIT_S)) == [0, 1]
