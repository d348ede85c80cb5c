"""SIGTERM to a node, as its machine sees it: in virtual time, to the last second of the grace."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import StagedShard
from holdfast.workers.agent.machine import commands, inputs
from holdfast.workers.agent.machine.machine import MachineTiming

from .harness import NS, AgentHarness, T, of, request_buffers

GRACE_S = 30.0
MARGIN_S, SAVE_AT = MachineTiming().margin_s, MachineTiming().save_share


def trained(bench: AgentHarness, step: int = 3) -> None:
    """Both workers have staged a step."""
    bench.launch()
    request_buffers(bench)
    bench.stage(step)


def one(kind: type[T], outputs: Iterable[object]) -> T:
    found = of(kind, outputs)
    assert len(found) == 1, outputs
    return found[0]


def until_the_end(bench: AgentHarness) -> dict[str, float]:
    """Seconds until workers get SIGKILL and until the agent ends, if only time passes."""
    began, at = bench.now_ns, dict[str, float]()
    while (due := bench.machine.next_deadline_ns()) is not None:
        bench.now_ns = max(bench.now_ns, due)
        for output in bench.give(inputs.ClockTick()):
            if isinstance(output, commands.WriteStorage | commands.Kill | commands.EndNode):
                at.setdefault(type(output).__name__, (bench.now_ns - began) / NS)
    return at


def test_sigterm_is_told_at_once_with_the_time_that_is_left() -> None:
    bench = AgentHarness()
    trained(bench)
    told = one(m.NodeLeaving, bench.give(inputs.Terminated(GRACE_S)))
    assert told.grace_s == GRACE_S - MARGIN_S
    assert bench.give(inputs.Terminated(GRACE_S)) == (), "containers may be told twice"


def test_it_is_told_again_to_a_controller_that_comes_back() -> None:
    bench = AgentHarness()
    trained(bench)
    bench.give(inputs.LinkDown())
    bench.give(inputs.Terminated(GRACE_S))
    bench.now_ns += 4 * NS
    told = one(m.NodeLeaving, bench.join())
    assert told.grace_s == GRACE_S - MARGIN_S - 4


def test_memory_is_served_and_launches_are_obeyed_until_the_controller_lets_go() -> None:
    bench = AgentHarness()
    trained(bench)
    bench.give(inputs.Terminated(GRACE_S))
    assert bench.machine.lend(step=3, generation=1, shard=0)
    stop = bench.tell(m.StopWorkers(action_id=5, generation=1))
    assert len([o for o in stop if isinstance(o, commands.Kill)]) == 2
    for rank in range(2):
        last = bench.give(inputs.WorkerEnded(1, rank, None, 9))
    assert {s.step for s in one(m.Stopped, last).staged} == {3}
    assert bench.machine.lend(step=3, generation=1, shard=1)
    assert one(commands.EndNode, bench.tell(m.Shutdown(detail="free to go"))).detail == "free to go"


def test_with_a_controller_nothing_is_written_unasked_and_the_node_ends_in_time() -> None:
    bench = AgentHarness()
    trained(bench)
    bench.give(inputs.Terminated(GRACE_S))
    at = until_the_end(bench)
    assert at == {"Kill": GRACE_S - MARGIN_S, "EndNode": GRACE_S - MARGIN_S / 2}


def test_without_a_controller_what_is_staged_is_written_at_half_time() -> None:
    bench = AgentHarness()
    trained(bench)
    bench.give(inputs.LinkDown())
    assert bench.give(inputs.Terminated(GRACE_S)) == ()
    at = until_the_end(bench)
    assert at["WriteStorage"] == SAVE_AT * GRACE_S
    assert at["EndNode"] < GRACE_S


def test_a_controller_that_comes_back_in_time_hears_of_what_was_written() -> None:
    bench = AgentHarness()
    trained(bench)
    bench.give(inputs.LinkDown())
    bench.give(inputs.Terminated(GRACE_S))
    bench.now_ns += int(SAVE_AT * GRACE_S * NS)
    for order in bench.give(inputs.ClockTick()):
        assert isinstance(order, commands.WriteStorage)
        bench.give(inputs.WriteDone(order.buffer, order.staged, order.file, checksum="aa"))
    told = [report.shard.shard for report in of(m.Persisted, bench.join())]
    assert sorted(told) == [0, 1]


def test_a_node_with_nothing_to_give_and_nobody_to_tell_ends_at_once() -> None:
    bench = AgentHarness(joined=False)
    assert one(commands.EndNode, bench.give(inputs.Terminated(GRACE_S)))


def test_a_copy_of_another_nodes_shard_is_something_to_give() -> None:
    bench = AgentHarness()
    buffer, _ = bench.machine.accept_copy(StagedShard(3, 1, 0, 2, 8))
    assert isinstance(buffer, int)
    bench.give(inputs.CopyDone(buffer, ok=True))
    bench.give(inputs.LinkDown())
    assert bench.give(inputs.Terminated(GRACE_S)) == ()


def test_however_short_the_grace_the_node_ends_within_it() -> None:
    for grace_s in (0.1, 1.0, 4.0, 3600.0):
        bench = AgentHarness()
        trained(bench)
        bench.give(inputs.Terminated(grace_s))
        at = until_the_end(bench)
        assert 0 < at["Kill"] < at["EndNode"] < grace_s


def test_no_standbys_are_forked_for_a_launch_that_will_not_come() -> None:
    bench = AgentHarness()
    bench.give(inputs.Terminated(GRACE_S))
    bench.now_ns += 10 * NS
    assert not [o for o in bench.give(inputs.ClockTick()) if isinstance(o, commands.RefillStandbys)]
