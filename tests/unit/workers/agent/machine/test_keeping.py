"""Workers that keep their process when their generation stops: halt, wait, and the next seat."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers import worker_protocol
from holdfast.workers.agent.machine import commands, inputs
from holdfast.workers.agent.machine.commands import Command

from .harness import SECOND_NS, AgentHarness, running

DDP = Mesh(replicate=2)


def training(*keepable: int, mesh: Mesh = DDP) -> AgentHarness:
    agent = running(mesh=mesh)
    for rank in keepable:
        agent.from_worker(rank, worker_protocol.KeepReported(why_not=""))
    return agent


def beats(agent: AgentHarness) -> list[bool | str]:
    (sent,) = (c.message for c in agent.after(1) if isinstance(c, commands.Send))
    assert isinstance(sent, m.Heartbeat)
    return [worker.keeps for worker in sent.workers]


def stop(agent: AgentHarness, **more: object) -> tuple[Command, ...]:
    return agent.receive(m.StopWorkers(action_id=5, generation=1, keep=True, **more))  # type: ignore[arg-type]


def halted(agent: AgentHarness, rank: int) -> tuple[Command, ...]:
    return agent.from_worker(rank, worker_protocol.Halted(step=3))


def waiting() -> AgentHarness:
    agent = training(0, 1)
    stop(agent)
    halted(agent, 0)
    halted(agent, 1)
    return agent


def stopped(out: tuple[Command, ...]) -> m.GroupStopped:
    (found,) = (c.message for c in out if isinstance(c, commands.Send))
    assert isinstance(found, m.GroupStopped)
    return found


def kills(out: tuple[Command, ...]) -> list[tuple[int, int]]:
    return [(c.generation, c.rank) for c in out if isinstance(c, commands.Kill)]


def forks(agent: AgentHarness, generation: int = 2, **more: object) -> tuple[Command, ...]:
    return agent.launch(generation, **{"mesh": DDP, "kept_from": 1, **more})


def test_workers_that_leave_their_step_are_reported_as_ended_by_us_and_get_the_next_seats() -> None:
    agent = training(0, 1)
    out = stop(agent)
    assert out == (commands.Halt(1, (0, 1)),)
    assert not halted(agent, 0)
    report = stopped(halted(agent, 1))
    assert report.kept == (0, 1) and all(exit.by_us for exit in report.exits)
    assert not agent.from_worker(0, worker_protocol.Pulse()), "it says nothing else until then"
    out = forks(agent)
    assert [c.kept for c in out if isinstance(c, commands.Fork)] == [(1, 0), (1, 1)]
    assert not kills(out)


def test_a_stop_reports_why_kept_processes_cannot_have_another_size() -> None:
    for ended in (False, True):
        agent = training(0, 1)
        stop(agent)
        agent.from_worker(0, worker_protocol.Halted(step=3, fixed_size="it reads world_size"))
        if ended:
            agent.worker_ends(0, signal=9)
        report = stopped(halted(agent, 1))
        assert report.fixed_size == ("" if ended else "it reads world_size") and not report.why_not


def test_a_stop_reports_why_a_worker_was_not_kept_also_if_it_said_so_meanwhile() -> None:
    agent = training(0, 1)
    stop(agent)
    halted(agent, 0)
    why = worker_protocol.KeepReported(why_not="it draws random numbers")
    assert kills(agent.from_worker(1, why)) == [(1, 1)], "at once: it waits for that"
    report = stopped(agent.worker_ends(1, signal=9))
    assert (report.kept, report.why_not) == ((0,), "it draws random numbers")


def test_a_worker_that_cannot_be_kept_is_killed_at_once_and_one_that_halts_late_after_1_s() -> None:
    agent = training(0)
    assert kills(stop(agent)) == [(1, 1)]
    assert not agent.worker_ends(1, signal=9)
    out = agent.after(1)
    assert kills(out) == [(1, 0)]
    why = "it did not wait for a seat in time"
    assert commands.Note(f"rank 0 is not kept: {why}") in out
    assert not halted(agent, 0), "too late: its kill is under way"
    report = stopped(agent.worker_ends(0, signal=9))
    assert report.kept == () and report.why_not == why


def test_a_kept_worker_that_ends_while_it_waits_gets_no_seat() -> None:
    agent = waiting()
    assert not agent.worker_ends(0, signal=9)
    assert [c.kept for c in forks(agent) if isinstance(c, commands.Fork)] == [None, (1, 1)]


def test_kept_workers_that_the_next_generation_does_not_use_are_killed() -> None:
    for more in ({"kept_from": 0}, {"mesh": Mesh(shard=2)}):
        agent = training(0, 1)
        stop(agent)
        halted(agent, 0)
        halted(agent, 1)
        out = forks(agent, **more)
        assert (1, 1) in kills(out)
        assert [c.kept for c in out if isinstance(c, commands.Fork)][1] is None


def test_late_messages_of_a_kept_worker_do_not_count_in_its_next_generation() -> None:
    agent = waiting()
    forks(agent)
    assert not agent.from_worker(0, worker_protocol.Progress(step=9), generation=1)
    assert agent.machine.group is not None
    assert agent.machine.group.workers[0].step == -1
    assert not agent.machine.group.workers[0].keeps


def test_heartbeats_have_why_ranks_are_not_kept_and_that_rank_0_is() -> None:
    agent, compiled = training(0, 1), worker_protocol.KeepReported(why_not="it is compiled")
    assert beats(agent) == [True, ""]
    agent.from_worker(1, compiled)
    assert beats(agent) == [True, "it is compiled"]
    agent.from_worker(0, compiled)
    assert beats(agent) == ["it is compiled", "it is compiled"]


def test_without_the_order_nothing_is_halted() -> None:
    agent = training(0, 1)
    out = agent.receive(m.StopWorkers(action_id=5, generation=1))
    assert kills(out) == [(1, 0), (1, 1)]


def test_a_kept_worker_whose_seat_is_not_given_after_all_is_killed() -> None:
    agent = waiting()
    forks(agent)
    out = agent.give(inputs.ForkFailed(2, 0, "the code is unavailable"))
    assert kills(out) == [(1, 0), (2, 1)]


def test_a_kept_worker_that_gets_no_seat_is_killed_after_two_minutes() -> None:
    agent = waiting()
    for waits_s, killed in ((100, []), (21, [(1, 0), (1, 1)]), (200, [])):
        assert kills(agent.after(waits_s)) == killed
        due = agent.machine.next_deadline_ns()
        assert due is not None and due > agent.now_ns
    agent.worker_ends(0, signal=9)
    kept = [c.kept for c in forks(agent) if isinstance(c, commands.Fork)]
    assert kept == [None, None], "rank 1 still ends"


def again(*ranks: int, state_kept: bool = False) -> AgentHarness:
    """The script of these ranks may run again, and they have left it in a stop."""
    agent = training(*ranks if state_kept else ())
    for rank in ranks:
        agent.from_worker(rank, worker_protocol.RunsAgain())
    assert stop(agent)[-1] == commands.Halt(1, ranks)
    for rank in ranks:
        out = agent.from_worker(rank, worker_protocol.Halted(step=3, runs_again=not state_kept))
    if len(ranks) == 2:
        assert stopped(out).again == ranks
        assert stopped(out).kept == (ranks if state_kept else ())
    return agent


def seats(out: tuple[Command, ...]) -> list[tuple[int, int] | None]:
    return [c.kept for c in out if isinstance(c, commands.Fork)]


@pytest.mark.parametrize("state_kept", [False, True])
def test_a_process_whose_state_is_not_used_runs_its_script_again(state_kept: bool) -> None:
    """Another mesh does not matter."""
    out = forks(again(0, 1, state_kept=state_kept), kept_from=0, mesh=Mesh(shard=2))
    assert seats(out) == [(1, 0), (1, 1)] and not kills(out)


def test_a_process_without_state_gets_a_seat_beside_kept_ones_but_not_one_of_another_rank() -> None:
    assert seats(forks(again(0, 1))) == [(1, 0), (1, 1)]
    other = again(0, 1)
    out = other.launch(2, mesh=Mesh(replicate=4), first_rank=2)
    assert seats(out) == [None, None] and kills(out) == [(1, 0), (1, 1)]


def test_a_script_that_ends_a_save_or_has_failed_is_not_halted() -> None:
    agent = training()
    for rank in (0, 1):
        agent.from_worker(rank, worker_protocol.RunsAgain())
    agent.from_worker(0, worker_protocol.PhaseChanged(phase="save"))
    out = stop(agent, save_grace_s=5.0)
    assert out == (commands.Halt(1, (1,)),)


def test_a_planned_stop_with_grace_lets_a_script_save() -> None:
    agent = training()
    agent.from_worker(0, worker_protocol.RunsAgain())
    assert not any(isinstance(c, commands.Halt) for c in stop(agent, grace_s=5.0))


def test_a_script_that_runs_on_is_killed_and_the_reason_says_so() -> None:
    agent = training()
    for rank in (0, 1):
        agent.from_worker(rank, worker_protocol.RunsAgain())
    stop(agent)
    agent.now_ns += SECOND_NS
    assert commands.Note("rank 0 is not kept: it did not wait for a seat in time") in agent.give(
        inputs.ClockTick()
    )
