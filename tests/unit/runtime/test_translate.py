"""Between wire and core: every message of an agent is an event or known to be none."""

from __future__ import annotations

from typing import get_args

import pytest

from holdfast.orchestrator.core.actions import (
    InspectGroup,
    LaunchGroup,
    PersistStep,
    StageStep,
    StopGroup,
)
from holdfast.orchestrator.core.copy_rounds import CopyOrder
from holdfast.orchestrator.core.events import ActionFailed, ActionSucceeded, GroupStopped
from holdfast.orchestrator.core.staging_interval import IntervalOrder
from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.protocol.facts import (
    Exit,
    LaunchIncident,
    NodeFacts,
    OwnCheckpoint,
    ShardFile,
)
from holdfast.orchestrator.protocol.host_memory import HostRoom, plan_host_memory
from holdfast.orchestrator.runtime import translate
from tests.unit.core.harness import Transcript

SHARD = ShardFile(3, 1, 0, 2, "file", 100, "c")
MEMORY = plan_host_memory(
    HostRoom(2**40, 2**39), shard_bytes=2**30, num_shards=2, workers=2, buddy=True
)
MESSAGES: tuple[wire.Message, ...] = (
    wire.Heartbeat(
        generation=1, staged_step=3, copied_step=2, stage_every_steps=4, cpu_pressure=0.5
    ),
    wire.Inspected(generation=1),
    wire.Launched(action_id=1, generation=1, ok=True),
    wire.WorkerExitReport(generation=1, exit=Exit(rank=0, code=1)),
    wire.Stopped(action_id=2, generation=1, offered_port=4000),
    wire.ShardStaged(action_id=3, ok=False, detail="too late"),
    wire.StepCopied(
        generation=1, wanted=2, step=3, staged_step=4, seconds=0.5, detail="late", missed=True
    ),
    wire.HostMemoryPlanned(generation=1, memory=MEMORY),
    wire.Persisted(generation=1, shard=SHARD, seconds=0.5),
    wire.ShardPersistFailed(generation=1, step=3, shard=0, detail="full", tried=False),
    wire.NodeLeaving(detail="SIGTERM", grace_s=30.0),
    wire.StandbyReport(ready=False),
    wire.OwnCheckpointWritten(
        generation=3, path="/o/checkpoint-5", times=2, unread=True, waits=True
    ),
    wire.OwnCheckpointOpened(generation=3, path="/o/checkpoint-5"),
    wire.AgentNote(text="out/checkpoint-120 was set aside"),
)
BUDDY = NodeFacts(hostname="b", address="10.0.0.2", data_port=7001, slots=2)


def test_every_message_is_an_event_if_a_decision_or_a_person_needs_it() -> None:
    others = {wire.Hello, wire.AgentEvent, wire.ImportsLearned}
    assert {type(message) for message in MESSAGES} | others == set(get_args(wire.FromAgent))
    assert translate.to_event("a", wire.AgentEvent(text="a forkserver was restarted")) is None
    assert translate.to_event("a", wire.ImportsLearned(modules=("transformers",))) is None


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_an_event_has_every_field_of_its_message(message: wire.Message) -> None:
    event = translate.to_event("a", message)
    assert event is not None and getattr(event, "node", "a") == "a"
    for name in message.__struct_fields__:
        if name != "ok":
            assert getattr(event, name) == getattr(message, name), name


def test_an_answer_is_the_result_of_its_action() -> None:
    answers = [translate.to_event("a", message) for message in MESSAGES]
    found = [type(one) for one in answers if getattr(one, "action_id", None)]
    assert found == [ActionSucceeded, GroupStopped, ActionFailed]


def test_a_message_has_every_field_of_its_action() -> None:
    transcript = Transcript().started()
    launch = transcript.last(LaunchGroup)
    common = {"action_id": 7, "generation": 1, "reason": launch.reason, "node": "a"}
    actions = (
        launch,
        StopGroup(**common, grace_s=2.0, stacks=True),
        StageStep(**common, step=9),
        PersistStep(**common, step=9),
        InspectGroup(**common),
        CopyOrder(node="a", generation=1, step=9, confirmed=4),
        IntervalOrder(node="a", generation=1, every_steps=4, from_step=20),
    )
    for action in actions:
        message = translate.to_message(action)
        for name in message.__struct_fields__:
            if not name.startswith("buddy") and name != "hold":
                assert getattr(message, name) == getattr(action, name), name


def test_a_launch_has_the_address_of_a_connected_buddy_only() -> None:
    launch = Transcript().started().last(LaunchGroup)
    alone, paired = translate.to_message(launch), translate.to_message(launch, BUDDY)
    assert isinstance(alone, wire.LaunchWorkers) and isinstance(paired, wire.LaunchWorkers)
    assert (alone.buddy, alone.buddy_address, alone.buddy_port) == ("", "", 0)
    assert (paired.buddy, paired.buddy_address, paired.buddy_port) == (
        launch.buddy, "10.0.0.2", 7001,
    )  # fmt: skip


def test_a_launch_has_the_checkpoints_that_the_script_wrote() -> None:
    launch = Transcript().started().last(LaunchGroup)
    own = (OwnCheckpoint(path="/o/checkpoint-5", generation=1),)
    message = translate.to_message(launch, own_checkpoints=own)
    assert isinstance(message, wire.LaunchWorkers) and message.membership.own_checkpoints == own


def test_a_launch_has_the_incidents_that_led_to_it() -> None:
    launch = Transcript().started().last(LaunchGroup)
    known = LaunchIncident(
        number=1, at_ns=5, failure_class="hang", title="x", world_size_before=4, world_size_after=4
    )
    message = translate.to_message(launch, incidents=(known,))
    assert isinstance(message, wire.LaunchWorkers) and message.membership.incidents == (known,)
    assert wire.decode(wire.encode(message)[4:]) == message
    assert launch.membership.incidents == (), "the journal has them already"


def test_an_answer_counts_once_from_the_right_node_and_of_the_right_kind() -> None:
    launch = Transcript().started().last(LaunchGroup)
    awaited = translate.AwaitedAnswers()
    awaited.sent(launch)
    answer = wire.Launched(action_id=launch.action_id, generation=1, ok=True)
    assert awaited.take("another", answer) is None
    assert awaited.take(launch.node, wire.Stopped(action_id=launch.action_id, generation=1)) is None
    assert awaited.take(launch.node, answer) == launch
    assert awaited.take(launch.node, answer) is None


def test_the_answers_of_a_node_that_reconnects_are_forgotten() -> None:
    launch = Transcript().started().last(LaunchGroup)
    awaited = translate.AwaitedAnswers()
    awaited.sent(launch)
    assert awaited.forget("another") == []
    assert awaited.forget(launch.node) == [launch]
    assert awaited.forget(launch.node) == []


def test_nodes_that_were_given_up_may_not_join() -> None:
    transcript = Transcript().started()
    assert translate.refusal(transcript.state, "a") == ""
    assert translate.refusal(transcript.state, "a", lost={"a"}) == "a was lost"
    transcript.lose("a", detail="its machine ended")
    assert "a was given up: " in translate.refusal(transcript.state, "a")
