"""What is done about a lost worker, node or controller, as transcripts."""

from __future__ import annotations

from orchestrator.core.actions import (
    CommitManifest,
    FinishJob,
    LaunchGroup,
    PersistStep,
    ReleaseNode,
    RequestNodes,
    StopGroup,
)
from orchestrator.core.events import (
    ActionUnknown,
    ControllerStarted,
    HangDetected,
    NodeJoined,
    PreemptionNoticed,
    WorkerExited,
)
from orchestrator.protocol.facts import Exit, StagedShard

from .story import Story, facts, spec, stack


def test_a_job_asks_for_its_nodes_and_its_spares_and_launches_when_all_are_there() -> None:
    story = Story(spec({"min": 1, "max": 2, "spares": 1}))
    story.submit()
    assert story.one(RequestNodes).count == 3
    story.succeed(RequestNodes)
    assert not story.join("a")
    story.join("b")
    launches = story.of(LaunchGroup)
    assert [launch.node for launch in launches] == ["a", "b"]
    assert [seat.rank for launch in launches for seat in launch.seats] == [0, 1, 2, 3]
    assert launches[0].membership.mesh.describe() == "replicate 2 x shard 2"
    assert launches[0].membership.restore is None
    # One rank of each replicate group writes to storage, spread over the nodes.
    assert [[s.persists for s in launch.seats] for launch in launches] == [
        [True, False],
        [False, True],
    ]
    assert not story.join("c"), "the spare waits"


def test_fewer_nodes_than_wanted_start_after_a_short_gathering() -> None:
    story = Story(spec({"min": 1, "max": 2}))
    story.submit()
    story.succeed(RequestNodes)
    story.join("a")
    assert not [a for a in story.wait(4.9) if isinstance(a, LaunchGroup)]
    story.wait(0.2)
    assert story.one(LaunchGroup).membership.num_nodes == 1
    story.succeed(LaunchGroup)
    story.step(0)
    story.join("b")
    assert not story.of(StopGroup), "arrivals are gathered"
    story.wait(5.1)
    assert story.one(StopGroup).reason.code == "resize"
    story.all_stopped(9)
    assert {launch.membership.num_nodes for launch in story.of(LaunchGroup)} == {2}
    assert story.state.restarts == {}, "growing is free"


def test_a_killed_worker_costs_a_new_generation_from_memory() -> None:
    story = Story().started(step=3)
    story.exits(2, signal=9, step=7)
    assert [stop.node for stop in story.of(StopGroup)] == ["a", "b"]
    assert all(stop.grace_s == 0 and not stop.stacks for stop in story.of(StopGroup))
    story.stopped("a", 8)
    assert not story.fresh, "the other node has not stopped"
    story.stopped("b", 7)
    launches = story.of(LaunchGroup)
    assert [launch.node for launch in launches] == ["a", "b"]
    restore = launches[0].membership.restore
    assert restore is not None and restore.directory == ""
    assert (restore.step, restore.generation) == (8, 1), "one node alone holds both shards of 8"
    assert {source.node for source in restore.sources} == {"a"}
    assert launches[0].membership.restart_count == 1
    story.succeed(LaunchGroup)
    story.step(9)
    assert story.state.phase == "running"
    incident = story.state.incidents[0]
    assert incident.title == "worker 2 on b was killed by SIGKILL"
    assert (incident.culprit_node, incident.culprit_rank) == ("b", 2)
    assert incident.restored_from == "memory"
    assert story.state.restarts == {"infrastructure": 1}


def test_the_master_port_is_new_in_every_generation() -> None:
    story = Story().started()
    first = story.last(LaunchGroup).membership
    story.exits(0, signal=9)
    story.all_stopped(3)
    second = story.of(LaunchGroup)[0].membership
    assert second.master_address == first.master_address
    assert second.master_port != first.master_port


def test_a_lost_node_is_replaced_by_the_spare() -> None:
    story = Story(spec({"min": 1, "max": 2, "spares": 1})).started("a", "b", "c")
    story.lose("a")
    assert story.one(RequestNodes).count == 1, "asked for with the stops, not after them"
    assert story.one(ReleaseNode).node == "a"
    assert story.one(StopGroup).node == "b"
    story.stopped("b", 12)
    launches = story.of(LaunchGroup)
    assert [launch.node for launch in launches] == ["c", "b"], "the spare takes the same place"
    restore = launches[0].membership.restore
    assert restore is not None
    assert {source.node for source in restore.sources} == {"b"}


def test_a_replacement_on_its_way_is_waited_for_a_little() -> None:
    story = Story().started()
    story.lose("b")
    story.succeed(RequestNodes)
    story.stopped("a", 5)
    assert not story.fresh
    story.wait(1.5)
    assert not story.of(LaunchGroup)
    story.join("c")
    assert [launch.node for launch in story.of(LaunchGroup)] == ["a", "c"]


def test_without_a_replacement_the_job_shrinks_and_grows_again_later() -> None:
    story = Story().started()
    story.lose("b")
    story.succeed(RequestNodes)
    story.stopped("a", 5)
    story.wait(2.1)
    launch = story.one(LaunchGroup)
    assert launch.node == "a" and launch.membership.mesh.describe() == "shard 2"
    assert "shrink from 2 to 1 nodes" in launch.reason.text
    story.succeed(LaunchGroup)
    story.step(6)
    story.join("c")
    story.wait(5.1)
    story.stopped("a", 20)
    assert [launch.node for launch in story.of(LaunchGroup)] == ["a", "c"]
    assert story.state.restarts == {"infrastructure": 1}


def test_where_the_backend_has_no_room_nobody_waits() -> None:
    story = Story().started()
    story.lose("b")
    story.fail(story.one(RequestNodes))
    story.stopped("a", 5)
    assert story.one(LaunchGroup).membership.num_nodes == 1
    story.wait(5.1)
    assert story.one(RequestNodes).count == 1, "it is asked again every few seconds"


def test_below_the_minimum_the_job_waits_and_says_so() -> None:
    story = Story(spec({"min": 2, "max": 2})).started()
    story.lose("b")
    story.fail(story.one(RequestNodes))
    story.stopped("a", 5)
    assert story.state.phase == "pending"
    assert "1 usable, 2 needed" in story.state.reason.text
    story.wait(5.1)
    story.succeed(RequestNodes)
    story.join("c")
    restore = story.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.step == 5, "memory of the survivor was kept meanwhile"


def test_a_node_that_does_not_stop_is_treated_as_lost() -> None:
    story = Story().started()
    story.exits(2, signal=9)
    story.stopped("a", 4)
    story.wait(10.1)
    assert "b" not in story.state.nodes
    assert story.one(ReleaseNode).node == "b"
    assert story.one(RequestNodes).count == 1
    story.wait(2.1)
    assert story.state.incidents[0].rule == "outside-signal", "the first cause stays the cause"


def test_half_of_a_shard_group_is_never_launched() -> None:
    story = Story(spec({"min": 2, "max": 4}, workers=2, shard=4)).started("a", "b", "c", "d")
    story.lose("b")
    story.fail(story.one(RequestNodes))
    for node in ("a", "c", "d"):
        story.stopped(node, 5)
    launches = story.of(LaunchGroup)
    assert [launch.node for launch in launches] == ["c", "d"], "the whole group stays, a is idle"
    restore = launches[0].membership.restore
    assert restore is not None and "a" in {source.node for source in restore.sources}
    assert "a" in story.state.nodes, "its memory may still be needed"


def test_memory_of_a_lost_node_falls_back_to_storage() -> None:
    story = Story(spec({"min": 1, "max": 2}, workers=1, shard=2), ports=50_000)
    story.document["spec"]["nodes"]["min"] = 2
    story.started(step=20)
    story.commit(9)
    story.lose("b")
    story.succeed(RequestNodes)
    story.stopped("a", 21)
    story.join("c")
    restore = story.of(LaunchGroup)[0].membership.restore
    assert restore is not None
    assert (restore.step, restore.directory) == (9, "step-00000009.gen-1")


def test_a_hang_is_stopped_with_stacks_and_names_its_culprit() -> None:
    story = Story().started(step=10)
    story.tell(HangDetected(generation=1, ranks=(3, 0, 1, 2), evidence="rank 3 is stopped"))
    stops = story.of(StopGroup)
    assert all(stop.stacks for stop in stops)
    story.stopped("a", 10)
    story.stopped("b", 10, stacks=(stack(3), stack(2, True)))
    incident = story.state.incidents[0]
    assert (incident.failure_class, incident.culprit_node, incident.culprit_rank) == (
        "hang",
        "b",
        3,
    )
    assert incident.stacks == {3: "stack of 3", 2: "stack of 2"}
    assert story.state.restarts == {"hang": 1}


def test_a_hang_of_an_old_generation_is_nothing() -> None:
    story = Story().started()
    story.exits(0, signal=9)
    story.all_stopped(3)
    assert not story.tell(HangDetected(generation=1, ranks=(0,), evidence="late"))


def test_the_same_exception_at_the_same_step_twice_fails_fast_with_its_traceback() -> None:
    story = Story().started()
    crash = {
        "code": 1,
        "step": 41,
        "error_type": "ValueError",
        "error_message": "bad sample",
        "traceback": 'Traceback\n  File "train.py", line 7, in step\nValueError: bad sample',
    }
    story.exits(1, **crash)
    story.all_stopped(41)
    assert len(story.of(LaunchGroup)) == 2
    story.succeed(LaunchGroup)
    story.exits(3, **crash)
    story.all_stopped(41)
    finish = story.one(FinishJob)
    assert finish.outcome == "failed" and finish.reason.code == "user-error"
    assert "ValueError after step 41 twice" in finish.reason.text
    assert "line 7" in story.state.traceback


def test_the_same_exception_at_another_step_is_only_charged() -> None:
    story = Story().started()
    for step in (4, 5, 6):
        story.exits(1, code=1, step=step, error_type="ValueError", error_message="x")
        story.all_stopped(step)
        assert story.of(LaunchGroup)
        story.succeed(LaunchGroup)
    assert story.state.restarts == {"user": 3}
    story.exits(1, code=1, step=7, error_type="ValueError", error_message="x")
    story.all_stopped(7)
    assert story.one(FinishJob).reason.code == "budget"


def test_a_budget_is_a_window() -> None:
    story = Story(
        spec(recovery={"budgets": {"infrastructure": {"restarts": 1, "windowSeconds": 60}}})
    ).started()
    for _ in range(3):
        story.exits(2, signal=9)
        story.all_stopped(5)
        assert story.of(LaunchGroup), story.state.reason
        story.succeed(LaunchGroup)
        story.wait(61)
    story.exits(2, signal=9)
    story.all_stopped(5)
    story.succeed(LaunchGroup)
    story.exits(2, signal=9)
    story.all_stopped(5)
    assert story.one(FinishJob).outcome == "failed"
    assert "infrastructure budget is used up" in story.state.reason.text


def test_ten_lost_nodes_are_not_the_users_fault() -> None:
    story = Story(spec({"min": 1, "max": 2})).started()
    for number in range(10):
        story.lose(story.state.members[0])
        story.succeed(RequestNodes)
        story.all_stopped(number)
        story.join(f"n{number}")
        assert story.of(LaunchGroup)
        story.succeed(LaunchGroup)
    assert story.state.restarts == {"infrastructure": 10}


def test_a_node_blamed_again_and_again_is_not_used_again() -> None:
    story = Story(spec({"min": 1, "max": 2}, recovery={"badNodeStrikes": 2})).started()
    story.exits(2, signal=9)
    story.all_stopped(3)
    story.succeed(LaunchGroup)
    story.step(4)
    story.exits(3, signal=9)
    story.stopped("a", 5)
    story.stopped("b", 5)
    request = story.one(RequestNodes)
    assert (request.count, request.avoid) == (1, ("b",))
    story.succeed(RequestNodes)
    story.join("c")
    assert [launch.node for launch in story.of(LaunchGroup)] == ["a", "c"]
    story.succeed(LaunchGroup)
    story.step(6)
    assert story.one(ReleaseNode).node == "b"


def test_a_rehearsed_failure_is_neither_charged_nor_held_against_the_node() -> None:
    from orchestrator.core.events import ChaosInjected

    story = Story().started()
    story.tell(ChaosInjected(kind="kill-worker", node="b", rank=2))
    story.exits(2, signal=9)
    story.all_stopped(3)
    assert story.state.incidents[0].rehearsal
    assert story.state.restarts == {} and story.state.strikes == {}


def test_an_announced_loss_is_replaced_before_it_happens() -> None:
    story = Story().started()
    story.tell(PreemptionNoticed(node="b", detail="spot"))
    assert story.one(RequestNodes).count == 1
    assert not story.of(StopGroup), "it trains on until somebody can take its place"
    story.succeed(RequestNodes)
    story.join("c")
    assert [stop.reason.code for stop in story.of(StopGroup)] == ["preemption"] * 2
    story.all_stopped(30)
    launches = story.of(LaunchGroup)
    assert [launch.node for launch in launches] == ["a", "c"]
    story.succeed(LaunchGroup)
    story.step(31)
    assert story.one(ReleaseNode).node == "b", "given back once nobody needs its memory"
    assert story.state.restarts == {"preemption": 1}


def test_a_failed_launch_is_charged_to_its_node() -> None:
    story = Story().started(step=None)
    story.exits(0, signal=9)
    story.all_stopped(None)
    story.fail(story.of(LaunchGroup)[1], "cannot fork")
    story.all_stopped(None)
    incident = story.state.incidents[-1]
    assert (incident.rule, incident.culprit_node) == ("launch-failed", "b")


def test_a_launch_without_an_answer_is_said_again_and_then_given_up() -> None:
    story = Story()
    story.submit()
    story.succeed(RequestNodes)
    story.join("a", "b")
    story.wait(15.1)
    assert len(story.of(LaunchGroup)) == 2
    story.wait(15.1)
    assert len(story.of(StopGroup)) == 2


def test_facts_of_an_old_generation_are_noted_and_nothing_else() -> None:
    story = Story().started()
    story.exits(0, signal=9)
    story.all_stopped(3)
    before = len(story.actions)
    late = Exit(rank=0, signal=9)
    story.tell(WorkerExited(node="a", generation=1, exit=late))
    assert story.persisted(3, 0, generation=1) == []
    assert len(story.actions) == before
    assert len(story.state.notes) == 2


# -- the controller ---------------------------------------------------------------------------
def _rejoin(story: Story, node: str, step: int = 30) -> list[object]:
    ranks = tuple(seat.rank for seat in story.state.launch[node].seats)
    staged = story.inventory(node, step)
    return list(
        story.tell(
            NodeJoined(
                node=node,
                facts=facts(node),
                generation=story.state.generation,
                ranks=ranks,
                staged=staged,
            )
        )
    )


def test_a_new_controller_adopts_what_runs_without_disturbing_it() -> None:
    story = Story().started()
    story.controller = story.replayed()
    assert not story.tell(ControllerStarted(incarnation=2))
    assert not _rejoin(story, "a")
    assert not _rejoin(story, "b")
    assert not story.wait(60)
    assert story.state.phase == "running"


def test_a_node_that_does_not_come_back_to_a_new_controller_is_lost() -> None:
    story = Story().started()
    story.controller = story.replayed()
    story.tell(ControllerStarted(incarnation=2))
    _rejoin(story, "a")
    story.wait(8.1)
    assert story.one(ReleaseNode).node == "b"
    assert story.one(StopGroup).node == "a"
    story.all_stopped(30)
    assert story.state.incidents[0].culprit_node == "b"


def test_a_launch_that_may_not_have_been_heard_is_said_again() -> None:
    story = Story()
    story.submit()
    story.succeed(RequestNodes)
    story.join("a", "b")
    story.controller = story.replayed()
    story.tell(ControllerStarted(incarnation=2))
    _rejoin(story, "a")
    assert not story.fresh, "a runs it already"
    story.tell(NodeJoined(node="b", facts=facts("b"), offered_port=1))
    assert story.one(LaunchGroup).node == "b"


def test_a_stop_that_may_not_have_been_heard_is_said_again() -> None:
    story = Story().started()
    story.exits(0, signal=9)
    story.controller = story.replayed()
    story.tell(ControllerStarted(incarnation=2))
    _rejoin(story, "a")
    assert story.one(StopGroup).node == "a"
    _rejoin(story, "b")
    story.all_stopped(30)
    assert len(story.of(LaunchGroup)) == 2


def test_nodes_that_the_backend_has_are_not_asked_for_again() -> None:
    story = Story()
    story.submit()
    story.controller = story.replayed()
    story.tell(ControllerStarted(incarnation=2, nodes=("x", "y")))
    story.tell(ActionUnknown(action_id=1))
    assert not story.wait(30)
    story.join("x", "y")
    assert len(story.of(LaunchGroup)) == 2


def test_a_node_that_ended_meanwhile_is_lost_at_once() -> None:
    story = Story().started()
    story.controller = story.replayed()
    story.tell(ControllerStarted(incarnation=2, nodes=("a",)))
    assert story.one(ReleaseNode).node == "b"
    assert story.one(StopGroup).node == "a"


def test_a_stale_node_is_told_to_stop_and_used_when_it_has() -> None:
    story = Story()
    story.submit()
    story.succeed(RequestNodes)
    story.state.generation = 4
    story.tell(NodeJoined(node="a", facts=facts("a"), generation=2, ranks=(0, 1)))
    stop = story.one(StopGroup)
    assert (stop.node, stop.generation) == ("a", 2)
    story.join("b")
    assert not story.of(LaunchGroup)
    from orchestrator.core.events import GroupStopped

    story.tell(GroupStopped(action_id=stop.action_id, node="a", generation=2, offered_port=7))
    assert [launch.node for launch in story.of(LaunchGroup)] == ["a", "b"]


def test_a_node_that_was_given_up_is_not_taken_back() -> None:
    story = Story().started()
    story.lose("b", "silent")
    story.succeed(ReleaseNode)
    story.tell(NodeJoined(node="b", facts=facts("b"), generation=1, ranks=(2, 3)))
    assert story.one(ReleaseNode).node == "b"
    assert "b" not in story.state.nodes


def test_a_release_that_failed_is_tried_again() -> None:
    story = Story().started()
    story.lose("b")
    story.fail(story.one(ReleaseNode), "the backend does not answer")
    story.wait(5.1)
    assert story.one(ReleaseNode).node == "b"


def test_a_promised_node_that_never_comes_is_given_back() -> None:
    from orchestrator.core.events import ActionSucceeded

    story = Story()
    story.submit()
    request = story.one(RequestNodes)
    story.tell(ActionSucceeded(action_id=request.action_id, detail="x y"))
    story.join("x")
    story.wait(6)
    story.succeed(LaunchGroup)
    story.wait(295)
    assert [action.node for action in story.of(ReleaseNode)] == ["y"]
    assert story.one(RequestNodes).count == 1


def test_a_member_that_lost_its_workers_breaks_the_generation() -> None:
    story = Story().started()
    story.tell(NodeJoined(node="b", facts=facts("b"), offered_port=9))
    assert len(story.of(StopGroup)) == 2
    story.all_stopped(4)
    assert story.state.incidents[0].culprit_node == "b"


def test_a_replay_gives_the_same_state() -> None:
    story = Story().started()
    story.exits(2, signal=9, step=3)
    story.stopped("a", 3)
    story.lose("b")
    story.wait(1)
    story.commit(3)
    assert story.replayed().state == story.state


def test_at_the_end_the_last_step_reaches_storage_before_the_job_is_over() -> None:
    story = Story().started()
    for rank in range(4):
        story.exits(rank, code=0, step=49)
    assert story.state.phase == "finishing"
    story.all_stopped(49)
    asked = story.of(PersistStep)
    assert [(p.node, p.step) for p in asked] == [("a", 49)], "one node holds all shards"
    story.persisted(49, 0)
    story.persisted(49, 1)
    assert not story.of(FinishJob)
    story.succeed(CommitManifest)
    assert story.one(FinishJob).outcome == "succeeded"


def test_a_script_without_a_session_ends_at_once() -> None:
    story = Story(spec(script=True)).started(step=None)
    assert story.state.phase == "running", "its progress is unknown"
    for rank in range(4):
        story.exits(rank, code=0)
    story.all_stopped(None)
    assert story.one(FinishJob).outcome == "succeeded"


def test_a_node_lost_with_the_last_step_has_it_computed_again() -> None:
    story = Story(spec({"min": 2, "max": 2}, workers=1, shard=2)).started(step=40)
    story.commit(39)
    for rank in range(2):
        story.exits(rank, code=0, step=49)
    story.stopped("a", 49)
    story.lose("b")
    assert story.state.phase == "recovering"
    story.succeed(RequestNodes)
    story.join("c")
    restore = story.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.step == 39


def test_a_last_step_that_cannot_be_written_does_not_hold_the_job_for_ever() -> None:
    story = Story().started()
    for rank in range(4):
        story.exits(rank, code=0, step=49)
    story.all_stopped(49)
    story.wait(601)
    assert story.one(FinishJob).outcome == "failed", "what was trained is not kept"
    assert "was not written" in story.state.reason.text


def test_the_finish_is_carried_out_by_the_next_controller_if_need_be() -> None:
    story = Story(spec(script=True)).started(step=None)
    for rank in range(4):
        story.exits(rank, code=0)
    story.all_stopped(None)
    story.controller = story.replayed()
    story.tell(ControllerStarted(incarnation=2))
    assert story.one(FinishJob).outcome == "succeeded"
    story.succeed(FinishJob)
    assert story.state.finish_action is None
    assert not story.join("late"), "after the end nothing happens"


def test_an_unfinished_pair_of_shards_is_no_restore_point() -> None:
    story = Story(spec({"min": 2, "max": 2}, workers=1, shard=2)).started()
    story.exits(0, signal=9)
    old, new = StagedShard(5, 1, 0, 2, 1), StagedShard(6, 1, 0, 2, 1)
    story.stopped("a", staged=(old, new))
    story.stopped("b", staged=(StagedShard(5, 1, 1, 2, 1),))
    restore = story.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.step == 5
