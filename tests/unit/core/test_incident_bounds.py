"""What is kept of interruptions is bounded: a journal's snapshot holds all of it."""

from __future__ import annotations

from holdfast.orchestrator import limits
from holdfast.orchestrator.core.actions import LaunchGroup
from holdfast.orchestrator.core.events import HangDetected
from holdfast.orchestrator.protocol.facts import Stack

from .harness import Transcript


def test_stacks_of_an_interruption_are_kept_up_to_a_bound_the_telling_ones_first() -> None:
    story = Transcript().started(step=5)
    story.tell(HangDetected(generation=1, ranks=(3, 0, 1, 2), evidence="quiet"))
    text = "x" * (limits.MAX_INCIDENT_STACK_BYTES // 2)
    stacks = {rank: Stack(rank=rank, text=text, in_collective=rank != 1) for rank in range(4)}
    story.stopped("a", 5, stacks=(stacks[0], stacks[1]))
    story.stopped("b", 5, stacks=(stacks[2], stacks[3]))
    # Rank 1 waits for nobody; rank 3 is the likeliest of those that wait.
    assert list(story.state.incidents[-1].stacks) == [1, 3]


def test_one_stack_is_kept_however_long_it_is() -> None:
    story = Transcript().started(step=5)
    story.tell(HangDetected(generation=1, ranks=(3,), evidence="quiet"))
    text = "x" * (2 * limits.MAX_INCIDENT_STACK_BYTES)
    story.stopped("a", 5, stacks=(Stack(rank=0, text=text, in_collective=True),))
    story.stopped("b", 5, stacks=(Stack(rank=3, text=text, in_collective=True),))
    assert list(story.state.incidents[-1].stacks) == [3]


def test_only_the_newest_interruptions_keep_their_tracebacks() -> None:
    story = Transcript().started(step=0)
    for number in range(limits.MAX_INCIDENTS_IN_FULL + 3):
        how = {"error_type": "E", "error_message": f"{number}", "traceback": "Traceback"}
        story.exits(1, code=1, step=number, **how)
        story.all_stopped(number)
        story.succeed(LaunchGroup)
        story.step(number + 1)
        # So that no budget is used up.
        story.state.charges.clear()
        story.state.strikes.clear()
        story.state.cordoned.clear()
    kept = [incident.traceback for incident in story.state.incidents]
    assert kept == [""] * 3 + ["Traceback"] * limits.MAX_INCIDENTS_IN_FULL
    assert all(incident.title for incident in story.state.incidents)
