"""SIGTERM to a node, in virtual time, until the end of its grace."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import StagedShard
from holdfast.workers.agent.machine import commands, inputs
from holdfast.workers.agent.machine.preemption import MARGIN_S
from holdfast.workers.agent.machine.preemption import SAVE_SHARE as SAVE_AT

from .harness import SECOND_NS, AgentHarness, T, of, request_buffers

GRACE_S = 30.0


def trained(harness: AgentHarness, step: int = 3) -> None:
    """Both workers have staged a step."""
    harness.launch()
    request_buffers(harness)
    harness.stage(step)


def one(kind: type[T], outputs: Iterable[object]) -> T:
    found = of(kind, outputs)
    assert len(found) == 1, outputs
    return found[0]


def until_the_end(harness: AgentHarness) -> dict[str, float]:
    """Seconds until the write, the SIGKILL of workers and the end of the agent, with ticks only."""
    began, at = harness.now_ns, dict[str, float]()
    while (due := harness.machine.next_deadline_ns()) is not None:
        harness.now_ns = max(harness.now_ns, due)
        for output in harness.give(inputs.ClockTick()):
            if isinstance(output, commands.WriteStorage | commands.Kill | commands.EndNode):
                at.setdefault(type(output).__name__, (harness.now_ns - began) / SECOND_NS)
    return at


def test_sigterm_is_reported_at_once_with_the_remaining_time() -> None:
    harness = AgentHarness()
    trained(harness)
    notice = one(m.PreemptionNoticed, harness.give(inputs.Terminated(GRACE_S)))
    assert notice.grace_s == GRACE_S - MARGIN_S
    assert harness.give(inputs.Terminated(GRACE_S)) == (), "a second SIGTERM changes nothing"


def test_the_notice_is_sent_again_after_a_reconnect() -> None:
    harness = AgentHarness()
    trained(harness)
    harness.give(inputs.LinkDown())
    harness.give(inputs.Terminated(GRACE_S))
    harness.now_ns += 4 * SECOND_NS
    notice = one(m.PreemptionNoticed, harness.join())
    assert notice.grace_s == GRACE_S - MARGIN_S - 4


def test_memory_is_served_and_stops_are_obeyed_until_shutdown() -> None:
    harness = AgentHarness()
    trained(harness)
    harness.give(inputs.Terminated(GRACE_S))
    assert harness.machine.tiers.lend(step=3, generation=1, shard=0)
    stop = harness.receive(m.StopWorkers(action_id=5, generation=1))
    assert len([o for o in stop if isinstance(o, commands.Kill)]) == 2
    for rank in range(2):
        last = harness.give(inputs.WorkerEnded(1, rank, None, 9))
    assert {s.step for s in one(m.GroupStopped, last).staged} == {3}
    assert harness.machine.tiers.lend(step=3, generation=1, shard=1)
    assert (
        one(commands.EndNode, harness.receive(m.Shutdown(detail="free to go"))).detail
        == "free to go"
    )


def test_with_a_controller_nothing_is_written_without_request_and_the_node_ends_in_time() -> None:
    harness = AgentHarness()
    trained(harness)
    harness.give(inputs.Terminated(GRACE_S))
    at = until_the_end(harness)
    assert at == {"Kill": GRACE_S - MARGIN_S, "EndNode": GRACE_S - MARGIN_S / 2}


def test_without_a_controller_the_staged_state_is_written_at_half_of_the_grace() -> None:
    harness = AgentHarness()
    trained(harness)
    harness.give(inputs.LinkDown())
    assert harness.give(inputs.Terminated(GRACE_S)) == ()
    at = until_the_end(harness)
    assert at["WriteStorage"] == SAVE_AT * GRACE_S
    assert at["EndNode"] < GRACE_S


def test_a_controller_that_reconnects_in_time_gets_the_reports_of_written_shards() -> None:
    harness = AgentHarness()
    trained(harness)
    harness.give(inputs.LinkDown())
    harness.give(inputs.Terminated(GRACE_S))
    for order in harness.after(SAVE_AT * GRACE_S):
        assert isinstance(order, commands.WriteStorage)
        harness.give(inputs.WriteDone(order.buffer, order.staged, order.file, checksum="aa"))
    reported = [report.shard.shard for report in of(m.ShardPersisted, harness.join())]
    assert sorted(reported) == [0, 1]


def test_a_node_without_state_and_without_controller_ends_at_once() -> None:
    harness = AgentHarness(joined=False)
    assert one(commands.EndNode, harness.give(inputs.Terminated(GRACE_S)))


def test_a_buddy_copy_is_state_that_keeps_the_node_alive() -> None:
    harness = AgentHarness()
    buffer, _ = harness.machine.accept_copy(StagedShard(3, 1, 0, 2, 8))
    assert isinstance(buffer, int)
    harness.give(inputs.CopyDone(buffer, ok=True))
    harness.give(inputs.LinkDown())
    assert harness.give(inputs.Terminated(GRACE_S)) == ()


def test_the_node_ends_within_its_grace_however_short() -> None:
    for grace_s in (0.1, 1.0, 4.0, 3600.0):
        harness = AgentHarness()
        trained(harness)
        harness.give(inputs.Terminated(grace_s))
        at = until_the_end(harness)
        assert 0 < at["Kill"] < at["EndNode"] < grace_s


def test_a_node_that_will_be_taken_away_forks_no_standbys() -> None:
    harness = AgentHarness()
    harness.give(inputs.Terminated(GRACE_S))
    harness.now_ns += 10 * SECOND_NS
    assert not [
        o for o in harness.give(inputs.ClockTick()) if isinstance(o, commands.RefillStandbys)
    ]
