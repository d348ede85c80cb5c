"""Translation between wire and core."""

from __future__ import annotations

from typing import get_args

from holdfast.orchestrator.core.actions import (
    InspectGroup,
    LaunchGroup,
    PersistStep,
    StageStep,
    StopGroup,
)
from holdfast.orchestrator.core.controller import _FACTS
from holdfast.orchestrator.core.events import ActionFailed, ActionSucceeded, FromNode
from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.protocol.facts import LaunchIncident, NodeFacts, OwnCheckpoint
from holdfast.orchestrator.runtime import translate
from tests.unit.core.harness import Transcript

BUDDY = NodeFacts(hostname="b", address="10.0.0.2", data_port=7001, slots=2)


def test_the_core_gets_facts_as_they_are_and_answers_as_results() -> None:
    fact = wire.StandbysReported(ready=False)
    assert translate.to_event("a", fact) == FromNode("a", fact)
    launched = wire.Launched(action_id=1, generation=2, ok=True)
    assert translate.to_event("a", launched) == ActionSucceeded(action_id=1, generation=2)
    late = wire.ShardStaged(action_id=3, ok=False, detail="too late")
    assert translate.to_event("a", late) == ActionFailed(action_id=3, detail="too late")
    assert translate.to_event("a", wire.AgentEvent(text="a forkserver was restarted")) is None
    assert translate.to_event("a", wire.ImportsLearned(modules=("transformers",))) is None


def test_the_core_takes_in_every_fact_but_the_two_that_are_not_journaled() -> None:
    assert {*get_args(wire.Fact)} - {*_FACTS} == {wire.Heartbeat, wire.StepCopied}


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
    stopped = wire.GroupStopped(action_id=launch.action_id, generation=1)
    assert awaited.take(launch.node, stopped) is None
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
