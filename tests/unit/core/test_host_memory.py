"""Agreement of all nodes when the memory of one is short; it survives the controller."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.orchestrator.core.actions import LaunchGroup
from holdfast.orchestrator.core.copy_rounds import CopyScheduler
from holdfast.orchestrator.core.events import FromNode, StepCompleted
from holdfast.orchestrator.core.host_memory import running
from holdfast.orchestrator.core.staging_interval import describe, orders
from holdfast.orchestrator.protocol.host_memory import HostRoom, plan_host_memory
from holdfast.orchestrator.protocol.messages import (
    Heartbeat,
    NodeMemoryPlanned,
    StageEvery,
    StepCopied,
)
from holdfast.orchestrator.runtime import snapshot
from holdfast.orchestrator.runtime.observe.projection import JobProjection, ProjectionState

from .harness import Transcript, facts, spec

SHARD, LIMIT = 2**20, 2**40
FSDP = {"min": 2, "max": 2}


def reports(transcript: Transcript, node: str, units: float) -> None:
    """The agent has usable memory for so many buffers of each of its two workers."""
    room = HostRoom(LIMIT, int(units * 2 * SHARD) + LIMIT // 10)
    shards = transcript.state.group.membership.mesh.num_shards  # type: ignore[union-attr]
    memory = plan_host_memory(room, shard_bytes=SHARD, num_shards=shards, workers=2, buddy=True)
    event = FromNode(node, NodeMemoryPlanned(generation=transcript.state.generation, memory=memory))
    transcript.apply(event)


def sharded(**checkpoint: Any) -> Transcript:
    """Four ranks on nodes a and b share one copy."""
    return Transcript(spec(FSDP, shard=4, checkpoint=checkpoint)).started("a", "b", step=0)


def launched_again(transcript: Transcript) -> list[LaunchGroup]:
    transcript.exits(0, signal=9)
    transcript.all_stopped(1)
    return transcript.of(LaunchGroup)


def test_copies_are_made_until_a_node_says_that_they_do_not_fit() -> None:
    transcript = sharded()
    assert [a.buddy for a in transcript.all(LaunchGroup)] == ["b", "a"]
    reports(transcript, "a", 9)
    assert [a.buddy for a in launched_again(transcript)] == ["b", "a"]
    reports(transcript, "b", 5)
    assert [a.buddy for a in launched_again(transcript)] == ["", ""]


def test_no_round_of_copies_begins_after_that() -> None:
    transcript, rounds = sharded(), CopyScheduler()

    copied = StepCopied(generation=1, wanted=0, step=0, staged_step=0)
    reports(transcript, "b", 5)
    assert rounds.observe(transcript.now_ns, "a", copied, transcript.state) == []
    assert rounds.observe(transcript.now_ns, "b", copied, transcript.state) == []


@pytest.mark.parametrize("every", ["auto", 1])
def test_with_one_buffer_all_nodes_stage_for_storage_only(every: object) -> None:
    memory, storage = {"everySteps": every}, {"everySteps": 50}
    transcript = sharded(memory=memory, storage=storage)
    reports(transcript, "a", 1.5)
    transcript.wait(5)
    transcript.step(10)
    assert transcript.state.stage_every_steps == 50
    assert describe(transcript.state).startswith("every 50 steps, for storage only")
    beat = Heartbeat(generation=1)
    ordered = [order for node in ("a", "b") for order in orders(transcript.state, node, beat)]
    assert [order.node for order in ordered] == ["a", "b"]
    (wanted,) = {order.message for order in ordered}
    assert isinstance(wanted, StageEvery) and wanted.every_steps == 50 and wanted.from_step > 10
    launches = launched_again(transcript)
    assert [a.stage_every_steps for a in launches] == [50, 50]


def test_a_larger_node_in_its_place_brings_the_memory_tier_back() -> None:
    transcript = Transcript(spec(FSDP, shard=4)).started("a", "b", step=0)
    reports(transcript, "b", 1.5)
    transcript.wait(5)
    transcript.step(10)
    assert transcript.state.stage_every_steps > 1
    transcript.lose("b")
    transcript.all_stopped(10)
    transcript.join("c")
    transcript.wait(60)
    assert [a.node for a in transcript.all(LaunchGroup)[-2:]] == ["a", "c"]
    assert transcript.state.stage_every_steps == 1
    assert transcript.all(LaunchGroup)[-1].buddy == "a"


def test_the_memory_of_a_spare_and_of_an_unknown_node_decides_nothing() -> None:
    transcript = Transcript(spec({**FSDP, "spares": 1}, shard=4)).started("a", "b", "c", step=0)
    reports(transcript, "c", 1.5)
    reports(transcript, "x", 1.5)
    assert not transcript.state.given_up.copies and not transcript.state.given_up.memory_tier
    assert transcript.state.nodes["c"].host_memory is not None and running(transcript.state) is None
    waiting = Transcript()
    waiting.submit()
    assert running(waiting.state) is None


def test_all_nodes_change_to_steps_for_storage_once_also_from_a_chosen_interval() -> None:
    transcript = sharded(storage={"everySteps": 50})
    transcript.wait(5)
    for step in (10, 11, 12):
        event = StepCompleted(
            generation=1, step=step, step_s=1.0, stall_s=0.12, copy_s=0.0, staging_s=0.1
        )
        transcript.apply(event)
    chosen = transcript.state.staging.interval
    assert chosen is not None and chosen.every_steps == 5
    reports(transcript, "a", 1.5)
    transcript.step(20)
    for_storage = transcript.state.staging.interval
    assert for_storage is not None and for_storage.every_steps == 50
    transcript.step(21)
    assert transcript.state.staging.interval == for_storage, "the step of the change stays"
    launched_again(transcript)
    beat = Heartbeat(generation=2, stage_every_steps=50, stage_from_step=0)
    assert orders(transcript.state, "a", beat) == [], "it began with this interval"


def test_storage_by_time_does_not_change_what_is_staged() -> None:
    transcript = sharded(storage={"everySeconds": 60})
    reports(transcript, "a", 1.5)
    transcript.wait(5)
    transcript.step(10)
    assert transcript.state.given_up.memory_tier and transcript.state.stage_every_steps == 1


def seen(transcript: Transcript) -> Any:
    projection = JobProjection(transcript.state.job, ProjectionState(), transcript.state)
    return projection.view(transcript.now_ns).host_memory


def test_the_view_shows_the_node_that_holds_least_and_a_snapshot_keeps_it() -> None:
    transcript = sharded()
    assert seen(transcript) is None
    reports(transcript, "a", 9)
    reports(transcript, "b", 2)
    view = seen(transcript)
    assert (view.node, view.buffers, view.buddy, view.given_up) == ("b", 2, False, "buffers")
    assert view.text.endswith("on b")
    state, _ = snapshot.decode(snapshot.encode(transcript.state, ProjectionState()))
    assert state.nodes["b"].host_memory == transcript.state.nodes["b"].host_memory
    assert state.given_up.copies
    again = transcript.replayed().state
    assert again.given_up.copies and again.nodes["b"].host_memory is not None


def test_members_on_one_machine_know_it() -> None:
    transcript = Transcript(spec(FSDP, shard=4))
    transcript.submit()
    transcript.join("a", facts=facts("host"))
    transcript.join("b", facts=facts("host"))
    assert [a.nodes_on_machine for a in transcript.all(LaunchGroup)] == [2, 2]
