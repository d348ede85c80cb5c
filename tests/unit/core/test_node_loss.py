"""What is done about a lost worker or node, as transcripts."""

from __future__ import annotations

from holdfast.orchestrator.core.actions import LaunchGroup, ReleaseNode, RequestNodes, StopGroup

from .harness import Transcript, spec


def test_a_job_asks_for_its_nodes_and_its_spares_and_launches_when_all_are_there() -> None:
    story = Transcript(spec({"min": 1, "max": 2, "spares": 1}))
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
    story = Transcript(spec({"min": 1, "max": 2}))
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
    story = Transcript().started(step=3)
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
    story = Transcript().started()
    first = story.last(LaunchGroup).membership
    story.exits(0, signal=9)
    story.all_stopped(3)
    second = story.of(LaunchGroup)[0].membership
    assert second.master_address == first.master_address
    assert second.master_port != first.master_port


def test_a_lost_node_is_replaced_by_the_spare() -> None:
    story = Transcript(spec({"min": 1, "max": 2, "spares": 1})).started("a", "b", "c")
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
    story = Transcript().started()
    story.lose("b")
    story.succeed(RequestNodes)
    story.stopped("a", 5)
    assert not story.fresh
    story.wait(1.5)
    assert not story.of(LaunchGroup)
    story.join("c")
    assert [launch.node for launch in story.of(LaunchGroup)] == ["a", "c"]


def test_without_a_replacement_the_job_shrinks_and_grows_again_later() -> None:
    story = Transcript().started()
    story.lose("b")
    story.succeed(RequestNodes)
    story.stopped("a", 5)
    story.wait(2.1)
    launch = story.one(LaunchGroup)
    assert launch.node == "a" and launch.membership.mesh.describe() == "shard 2"
    assert "shrink from 2 to 1 node" in launch.reason.text
    story.succeed(LaunchGroup)
    story.step(6)
    story.join("c")
    story.wait(5.1)
    story.stopped("a", 20)
    assert [launch.node for launch in story.of(LaunchGroup)] == ["a", "c"]
    assert story.state.restarts == {"infrastructure": 1}


def test_where_the_backend_has_no_room_nobody_waits() -> None:
    story = Transcript().started()
    story.lose("b")
    story.fail(story.one(RequestNodes))
    story.stopped("a", 5)
    assert story.one(LaunchGroup).membership.num_nodes == 1
    story.wait(5.1)
    assert story.one(RequestNodes).count == 1, "it is asked again every few seconds"


def test_below_the_minimum_the_job_waits_and_says_so() -> None:
    story = Transcript(spec({"min": 2, "max": 2})).started()
    story.lose("b")
    story.fail(story.one(RequestNodes))
    story.stopped("a", 5)
    assert story.state.phase == "pending"
    assert "1 usable, at least 2 needed" in story.state.reason.text
    story.wait(5.1)
    story.succeed(RequestNodes)
    story.join("c")
    restore = story.of(LaunchGroup)[0].membership.restore
    assert restore is not None and restore.step == 5, "memory of the survivor was kept meanwhile"


def test_a_node_that_does_not_stop_is_treated_as_lost() -> None:
    story = Transcript().started()
    story.exits(2, signal=9)
    story.stopped("a", 4)
    story.wait(10.1)
    assert "b" not in story.state.nodes
    assert story.one(ReleaseNode).node == "b"
    assert story.one(RequestNodes).count == 1
    story.wait(2.1)
    assert story.state.incidents[0].rule == "outside-signal", "the first cause stays the cause"


def test_half_of_a_shard_group_is_never_launched() -> None:
    story = Transcript(spec({"min": 2, "max": 4}, workers=2, shard=4)).started("a", "b", "c", "d")
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
    story = Transcript(spec({"min": 1, "max": 2}, workers=1, shard=2), ports=50_000)
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
