"""The rounds of the buddy tier: which step all agents copy next, and what the status says of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from holdfast.orchestrator.core.actions import LaunchGroup
from holdfast.orchestrator.core.copy_rounds import MAX_MARGIN, STEADY_ROUNDS, CopyScheduler
from holdfast.orchestrator.core.events import FromNode, StepCompleted
from holdfast.orchestrator.protocol.messages import CopyStep, NodeRemarked, StepCopied

from .harness import SECOND, Transcript, spec


def _pair() -> Transcript:
    return Transcript(spec({"min": 2, "max": 2}, workers=1)).started(step=None)


@dataclass
class Rounds:
    """Nodes a and b, each other's buddy; a test sends their reports."""

    job: Transcript = field(default_factory=_pair)
    rounds: CopyScheduler = field(default_factory=CopyScheduler)
    wanted: int = 0
    """The step of the last order."""

    def report(self, node: str, wanted: int = -1, **more: object) -> list[str]:
        """Returns which nodes get an order."""
        wanted = self.wanted if wanted < 0 else wanted
        known = {"generation": self.job.state.generation, "step": wanted, "staged_step": wanted}
        fact = StepCopied(wanted=wanted, **(known | more))  # type: ignore[arg-type]
        orders = self.rounds.observe(self.job.now_ns, node, fact, self.job.state)
        assert len({order.message for order in orders}) <= 1
        for order in orders:
            assert isinstance(order.message, CopyStep)
            assert order.message.generation == self.job.state.generation
            assert order.message.confirmed == self.rounds.confirmed
            self.wanted = order.message.step
        return [order.node for order in orders]

    def both(self, **more: object) -> None:
        """Both nodes copy the step of the last order."""
        wanted = self.wanted
        assert self.report("a", wanted, **more) == []
        assert self.report("b", wanted, **more) == ["a", "b"]

    def steps_take(self, step_s: float) -> None:
        self.job.apply(StepCompleted(generation=1, step=0, step_s=step_s))


def remarked(remark: FromNode) -> str:
    assert isinstance(remark.fact, NodeRemarked)
    return remark.fact.text


def test_the_next_round_begins_when_all_nodes_have_copied_the_step() -> None:
    one = Rounds()
    assert one.report("a", seconds=0.1) == []
    assert one.rounds.status == "" and one.rounds.confirmed == -1
    assert one.report("b", seconds=0.2) == ["a", "b"]
    assert (one.rounds.confirmed, one.wanted) == (0, 1)
    assert one.rounds.status == "the first step: the slowest push takes 0.2 s (b)"
    one.both(seconds=0.1)
    assert (one.rounds.confirmed, one.wanted) == (1, 2)
    assert one.rounds.status == "every step: the slowest push takes 0.1 s (a)"
    one.both(staged_step=5)
    assert (one.rounds.confirmed, one.wanted) == (2, 6), "later than what is staged already"
    one.both()
    assert one.rounds.status.startswith("every 4 steps: ")


def test_rounds_of_short_steps_begin_a_tenth_of_a_second_apart() -> None:
    one = Rounds()
    one.steps_take(0.04)
    one.report("a")
    one.job.now_ns += SECOND // 50
    assert one.report("b") == ["a", "b"] and one.wanted == 2, "0.08 s are two steps"
    one.job.now_ns += SECOND // 10
    one.both()
    assert one.wanted == 3
    one.both()
    assert one.wanted == 6, "0.1 s are three steps"


def test_nodes_that_copied_different_steps_copy_another_one() -> None:
    one = Rounds()
    one.report("a", step=0)
    assert one.report("b", step=1) == ["a", "b"]
    assert (one.rounds.confirmed, one.wanted) == (-1, 1)
    one.both()
    assert one.rounds.confirmed == 1


def test_a_failed_push_is_followed_by_a_step_about_a_second_later() -> None:
    one = Rounds()
    one.steps_take(0.04)
    assert one.report("a", detail="connection refused") == ["a", "b"]
    assert (one.rounds.confirmed, one.wanted) == (-1, 25)
    assert one.rounds.status == "a could not copy the state after 1 step: connection refused"
    one.both()
    assert one.rounds.confirmed == 25


def test_copies_that_stop_are_one_event_and_so_is_their_return() -> None:
    one = Rounds()
    one.both()
    for second in range(30):
        one.job.now_ns += SECOND
        one.report("b", detail="a: timed out")
        remarks = one.rounds.take_remarks()
        assert bool(remarks) == (second == 9)
        if remarks:
            assert remarks[0].node == "b"
            text = remarked(remarks[0])
            assert text.startswith("could not copy the state after 11 steps to its buddy (a: timed")
            assert "no copy of all nodes for 10 s; the last is the state after 1 step" in text
    one.both()
    (remark,) = one.rounds.take_remarks()
    last = f"the state after {one.rounds.confirmed + 1} steps"
    assert remarked(remark) == f"all nodes copy to their buddies again: {last}"
    one.report("b", detail="a: timed out")
    assert one.rounds.take_remarks() == []


def test_orders_lie_further_ahead_after_each_missed_step_and_nearer_after_steady_rounds() -> None:
    one, margins = Rounds(), []
    for _ in range(8):
        before = one.wanted
        assert one.report("a", detail="missed", missed=True) == ["a", "b"]
        margins.append(one.wanted - before - 1)
    assert margins == [1, 3, 7, 15, 31, 63, MAX_MARGIN, MAX_MARGIN]
    assert one.rounds.status == "", "a missed step is no problem"

    def margin_after(rounds: int) -> int:
        before = 0
        for _ in range(rounds):
            before = one.wanted
            one.both()
        return one.wanted - before - 1

    assert margin_after(STEADY_ROUNDS - 1) == MAX_MARGIN
    one.report("a", detail="no room")
    assert margin_after(STEADY_ROUNDS - 1) == MAX_MARGIN
    assert margin_after(1) == MAX_MARGIN // 2
    assert margin_after(STEADY_ROUNDS - 1) == MAX_MARGIN // 2
    assert margin_after(1) == MAX_MARGIN // 4


def test_a_node_that_missed_an_order_gets_it_again() -> None:
    one = Rounds()
    one.both()
    assert one.report("a", 0) == ["a"] and one.wanted == 1


def test_a_new_controller_goes_on_with_the_latest_order_of_the_one_before() -> None:
    one = Rounds()
    one.steps_take(0.04)
    assert one.report("b", 3) == []
    one.job.now_ns += SECOND
    assert one.report("a", 8) == ["b"] and one.wanted == 8
    assert one.report("b", 8) == ["a", "b"]
    assert (one.rounds.confirmed, one.wanted) == (8, 11), "the round began with the report of a"
    failed = Rounds()
    assert failed.report("a", 8, detail="no room") == []
    assert failed.report("b", 8) == []
    assert failed.report("a", 8) == ["a", "b"] and failed.rounds.confirmed == 8


def test_each_generation_begins_with_the_first_step_that_it_stages() -> None:
    one = Rounds()
    one.both()
    one.job.step(5)
    one.job.exits(0, signal=9)
    one.job.all_stopped(5)
    one.job.succeed(LaunchGroup)
    assert one.report("a", 3) == ["a"] and one.wanted == 6
    assert one.report("a", 6) == []
    assert (one.rounds.status, one.rounds.confirmed) == ("", -1)
    assert one.report("b", 6) == ["a", "b"]
    assert one.rounds.confirmed == 6
    assert one.rounds.status.startswith("the first step")
    assert one.report("a", 1) == ["a"]


@pytest.mark.parametrize("which", ["before", "generation", "node", "stopping", "stopped"])
def test_only_reports_of_running_members_count(which: str) -> None:
    one = Rounds()
    if which == "before":
        one.job = Transcript()
        one.job.submit()
    if which in ("stopping", "stopped"):
        one.job.exits(0, signal=9)
    if which == "stopped":
        one.job.lose("a")
        one.job.lose("b")
        assert not one.job.state.group.active and one.job.state.stop is None
    for node in ("a", "b", "a", "b"):
        node = {"node": "x"}.get(which, node)
        more = {"generation": 7} if which == "generation" else {}
        assert one.report(node, 0, **more) == []
    assert one.rounds.confirmed == -1 and one.rounds.status == ""
