"""Placement: what a launch waits for, which nodes it takes, and how its decision is described."""

from __future__ import annotations

from holdfast.orchestrator.core.actions import LaunchGroup, RequestNodes
from holdfast.orchestrator.core.events import ActionSucceeded, ControllerStarted, FromNode
from holdfast.orchestrator.protocol.messages import NodeJoined

from .harness import Transcript, facts, spec


def test_a_recovering_job_waits_for_its_nodes_to_reconnect_to_a_new_controller() -> None:
    job = Transcript().started()
    job.lose("b")
    job.succeed(RequestNodes)
    job.stopped("a", 5)
    staged = job.inventory("a", 5)
    job.controller = job.replayed()
    job.apply(ControllerStarted(incarnation=2, nodes=("a",)))
    job.wait(5)
    assert job.state.phase == "recovering" and not job.all(LaunchGroup)[2:]
    job.apply(FromNode("a", NodeJoined(facts=facts("a"), staged=staged)))
    launch = job.one(LaunchGroup)
    assert launch.reason.text == "shrink from 2 to 1 node, from memory after 6 steps"


def test_the_wait_for_more_nodes_begins_again_when_enough_were_lost() -> None:
    job = Transcript(spec({"min": 2, "max": 3}))
    job.submit()
    job.succeed(RequestNodes)
    job.join("a", "b")
    job.wait(3)
    job.lose("b")
    job.succeed(RequestNodes)
    job.wait(1)
    job.join("c")
    job.wait(4.9)
    assert not job.all(LaunchGroup), "grow.delaySeconds after c has joined"
    job.wait(0.2)
    assert len(job.of(LaunchGroup)) == 2


def test_the_damaged_replica_group_is_dropped_and_the_others_keep_their_nodes() -> None:
    names = ("a", "b", "c", "d", "e", "f")
    job = Transcript(spec({"min": 2, "max": 6}, shard=4)).started(*names)
    job.lose("b")
    job.fail(job.one(RequestNodes))
    for name in ("a", *names[2:]):
        job.stopped(name, 5)
    assert [launch.node for launch in job.of(LaunchGroup)] == ["c", "d", "e", "f"]


def test_a_launch_of_the_same_size_has_not_given_up_a_replacement() -> None:
    job = Transcript(spec({"min": 1, "max": 2, "spares": 1})).started("a", "b", "c")
    job.lose("a")
    request = job.one(RequestNodes)
    job.apply(ActionSucceeded(action_id=request.action_id, nodes=("d",), start_s=100.0))
    job.stopped("b", 5)
    assert job.of(LaunchGroup)[0].reason.text == "c replaces a, from memory after 6 steps"


def test_a_generation_begins_at_the_step_that_it_restores() -> None:
    job = Transcript().started(step=20)
    job.exits(0, signal=9)
    job.all_stopped(None)
    assert job.state.step == -1, "from the beginning"
    job.succeed(LaunchGroup)
    job.step(0)
    job.commit(9)
    job.step(20)
    job.exits(0, signal=9)
    job.all_stopped(None)
    assert job.state.step == 9


def test_a_launch_on_more_nodes_is_described_as_such() -> None:
    job = Transcript()
    job.submit()
    job.succeed(RequestNodes)
    job.join("a")
    job.wait(5.1)
    job.succeed(LaunchGroup)
    job.step(0)
    job.join("b")
    job.wait(5.1)
    job.stopped("a", 7)
    assert job.of(LaunchGroup)[0].reason.text == "grow from 1 to 2 nodes, from memory after 8 steps"


def test_the_first_step_of_a_script_that_runs_does_not_change_its_reason() -> None:
    job = Transcript(spec(script=True)).started(step=None)
    assert job.state.reason.text == "all workers run, on 2 nodes"
    job.step(0)
    assert job.state.reason.text == "all workers run, on 2 nodes"
    assert job.state.group.first_step_ns
