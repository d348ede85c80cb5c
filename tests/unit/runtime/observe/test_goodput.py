"""Time accounting against sums that were computed by hand."""

from __future__ import annotations

import pytest

from holdfast.orchestrator.core.actions import Reason
from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.core.events import (
    AnyEvent,
    FromNode,
    HangDetected,
    ResumeRequested,
    StepCompleted,
    Tick,
)
from holdfast.orchestrator.core.state import IncidentRecord as Incident
from holdfast.orchestrator.core.state import JobState, OwnCheckpointState, PendingStop
from holdfast.orchestrator.protocol.facts import Membership, Restore
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.orchestrator.protocol.messages import OwnCheckpointSeen
from holdfast.orchestrator.runtime.observe.goodput import TimeAccounting

from ..harness import make_job


def incident(second: float, step_before: int) -> Incident:
    return Incident(
        number=1, at_ns=int(second * SECOND_NS), noticed_ns=int(second * SECOND_NS),
        purpose="failure", generation_before=1, world_size_before=1, step_before=step_before,
    )  # fmt: skip


class Accounted:
    """A TimeAccounting and its state, changed by hand. Times in seconds."""

    def __init__(self) -> None:
        self.state = JobState(make_job(), "id", 0, 0)
        self.accounting = TimeAccounting()
        self.at(0)

    def at(self, second: float, event: AnyEvent | None = None, **changes: object) -> None:
        for name, value in changes.items():
            setattr(self.state if hasattr(self.state, name) else self.state.group, name, value)
        self.accounting.observe(int(second * SECOND_NS), event or Tick(), self.state)

    def launch(self, second: float, generation: int, after_step: int = -1) -> None:
        restore = None
        if after_step >= 0:
            restore = Restore(step=after_step, generation=generation - 1, num_shards=1)
        membership = Membership(
            generation=generation, mesh=Mesh(), num_nodes=1, workers_per_node=1,
            master_address="", master_port=0, restart_count=0, restore=restore,
        )  # fmt: skip
        phase = "starting" if generation == 1 else "recovering"
        self.at(second, generation=generation, membership=membership, phase=phase)

    def step(self, second: float, step: int, stall_s: float = 0.0) -> None:
        advanced = StepCompleted(
            generation=self.state.generation, step=step, step_s=1.0, stall_s=stall_s
        )
        self.at(second, advanced, phase="running")

    def fail(self, second: float, step_before: int) -> None:
        self.state.incidents.append(incident(second, step_before))
        self.state.num_incidents += 1
        self.at(second, phase="recovering", reason=Reason("infrastructure", "a test"))

    def seconds(self, second: float) -> dict[str, float]:
        seconds = self.accounting.seconds(int(second * SECOND_NS))
        assert abs(sum(seconds.values()) - second) < 1e-9, "the causes add up"
        return {cause: round(value, 6) for cause, value in seconds.items() if value}


def trained(*steps: tuple[float, int]) -> Accounted:
    """The first generation, which has finished these steps: (second, step)."""
    job = Accounted()
    job.launch(0, 1)
    for second, step in steps:
        job.step(second, step)
    return job


def running() -> Accounted:
    """The first generation, which trains from its first second on."""
    job = trained()
    job.at(1, phase="running")
    return job


def test_waiting_starting_and_training_are_counted_separately() -> None:
    job = Accounted()
    job.launch(3, 1)
    job.step(5, 0)
    assert job.seconds(9) == {"queued": 3, "starting": 2, "productive": 4}
    assert job.accounting.goodput(9 * SECOND_NS) == 4 / 6


def test_staging_that_blocks_training_counts_as_stalled() -> None:
    job = trained((1, 0))
    job.step(5, 4, stall_s=0.25)
    assert job.seconds(5) == {"starting": 1, "productive": 3, "stalled": 1}


def test_steps_that_are_trained_again_count_as_redone() -> None:
    job = trained((1, 0), (5, 4))
    job.fail(5, step_before=4)
    job.launch(6, 2, after_step=1)
    job.step(8, 2)  # again; what it takes longer than a step is part of the recovery
    job.step(12, 6)  # 3 and 4 again, 5 and 6 new
    assert job.seconds(12) == {"starting": 1, "productive": 4 + 2, "recovering": 2, "redone": 3}


def test_a_generation_that_is_launched_as_the_last_one_is_lost_has_its_own_steps() -> None:
    """All nodes are gone, so nothing is stopped: one event ends a generation and begins another."""
    job = trained((1, 0), (5, 4))
    job.state.incidents.append(incident(15, step_before=4))
    job.state.num_incidents = 1
    job.launch(15, 2, after_step=4)
    job.step(17, 5)
    job.step(20, 8)
    expected = {"starting": 1, "productive": 4 + 1 + 3, "recovering": 10 + 1}
    assert job.seconds(20) == expected


def test_steps_before_a_new_controller_knew_of_the_launch_are_productive() -> None:
    """The first four steps come in one report."""
    job = trained((1, 0), (5, 4))
    job.fail(5, step_before=4)
    job.launch(6, 2, after_step=4)
    job.step(11, 8)
    assert job.seconds(11) == {"starting": 1, "productive": 4 + 4, "recovering": 2}


@pytest.mark.parametrize("reported", ["", "before", "while it stops"])
def test_the_time_of_an_unfinished_step_belongs_to_the_recovery(reported: str) -> None:
    """A hang: the last step was finished at 3 s, the hang detected at 10 s."""
    job, late = Accounted(), StepCompleted(generation=1, step=2, step_s=1.0, ago_s=7.0)
    job.launch(0, 1)
    job.step(1, 0)
    if reported == "before":
        job.at(10, late)
    stop = PendingStop("failure", Reason("infrastructure", "a test"), 10 * SECOND_NS, False, 0)
    job.at(10, stop=stop if reported == "while it stops" else None)
    job.fail(10, step_before=2)
    job.at(10, late, stop=None)
    assert job.seconds(12) == {"starting": 1, "productive": 2, "recovering": 7 + 2}


def test_what_is_silent_until_it_is_cancelled_is_not_productive() -> None:
    job = trained((1, 0))
    job.state.incidents.append(incident(10, step_before=0))
    job.at(10, phase="finishing", intent="cancel")
    assert job.seconds(10) == {"starting": 1, "recovering": 9}


def test_a_script_that_reports_no_steps_is_productive_while_it_runs() -> None:
    job = running()
    job.fail(9, step_before=-1)
    assert job.seconds(10) == {"starting": 1, "productive": 8, "recovering": 1}


def test_a_script_that_reports_no_steps_is_not_productive_while_it_hangs() -> None:
    job = running()
    job.at(9, HangDetected(generation=1, ranks=(1,), evidence="", quiet_s=5.0))
    job.fail(9, step_before=-1)
    assert job.seconds(10) == {"starting": 1, "productive": 3, "recovering": 5 + 1}


def posted(step: int, generation: int, began_after: int | None = None) -> StepCompleted:
    return StepCompleted(
        generation=generation, step=step, step_s=1.0, counted_by="posted", began_after=began_after
    )


def test_steps_of_a_saved_checkpoint_are_productive_although_they_were_never_posted() -> None:
    """Two launches are killed: 3 s and 4 s after the last post, the second before its first one.
    The third begins at a checkpoint with five steps more than were posted."""
    job = running()
    job.at(6, posted(4, 1), phase="running")
    job.fail(9, step_before=4)
    job.launch(10, 2)
    job.at(10, phase="running")
    job.fail(14, step_before=4)
    assert job.seconds(14)["recovering"] == 3 + 1 + 4
    job.launch(14, 3)
    job.at(14, phase="running")
    job.at(16, posted(11, 3, began_after=9), phase="running")
    assert job.seconds(16)["productive"] == 1 + 5 + 1
    job.at(18, posted(13, 3), phase="running")
    assert job.seconds(18)["productive"] == 1 + 5 + 3


def test_the_end_of_a_launch_may_come_with_the_next_one() -> None:
    """All nodes of the old launch have stopped, and the new one begins at once."""
    job = running()
    job.at(6, posted(4, 1), phase="running")
    job.at(9, stop=object())
    job.fail(9, step_before=4)
    job.state.stop = None
    job.launch(10, 2)
    job.at(11, phase="running")
    job.at(17, posted(9, 2, began_after=6))
    assert job.seconds(17)["productive"] == 1 + 2 + 1, "5 and 6 were saved"
    job.at(20, posted(12, 2))
    expected = {"starting": 5, "productive": 1 + 2 + 1 + 3, "recovering": 1 + 1 + 1 + 5}
    assert job.seconds(20) == expected


def test_a_first_post_that_comes_after_the_end_of_its_launch_counts_once() -> None:
    job = running()
    job.at(6, posted(4, 1), phase="running")
    job.fail(9, step_before=4)
    job.launch(10, 2)
    job.at(10, phase="running")
    job.fail(14, step_before=4)
    job.at(15, posted(7, 2, began_after=4))
    assert job.seconds(15) == {"starting": 5, "productive": 1 + 3, "recovering": 3 + 1 + 1 + 1}


def test_what_a_first_step_takes_longer_than_others_belongs_to_the_recovery() -> None:
    job = running()
    job.step(4, 0)  # how long a step takes is not known
    job.step(6, 2)
    job.fail(6, step_before=2)
    job.launch(7, 2, after_step=2)
    job.at(8, phase="running")
    job.step(12, 3)
    job.step(14, 5)
    assert job.seconds(14) == {"starting": 4, "productive": 2 + 1 + 2, "recovering": 2 + 3}


def test_after_the_end_no_time_passes() -> None:
    job = trained((1, 0))
    job.at(3, phase="finishing")
    job.at(4, phase="succeeded")
    seconds = job.accounting.seconds(99 * SECOND_NS)
    assert sum(seconds.values()) == 4 and seconds["finishing"] == 1


def test_a_step_that_is_reported_after_the_loss_of_all_nodes_is_trained_again() -> None:
    """Heartbeats of lost nodes knew later steps than the journal: those are new, and repeated."""
    job = Accounted()
    job.launch(1, 1)
    job.step(2, 0)
    job.step(10, 8)
    job.fail(16, 8)
    job.at(16, StepCompleted(generation=1, step=12, step_s=1.0))
    job.launch(20, 2, after_step=8)
    job.step(22, 8)
    job.step(26, 12)
    job.step(27, 13)
    seconds = job.seconds(27)
    assert seconds["redone"] == 4
    assert seconds["productive"] == 8 + 4 + 1


def test_a_silent_script_is_not_productive_between_a_fault_and_its_discovery() -> None:
    job = running()
    job.state.stop = PendingStop("failure", Reason("infrastructure", "a test"), 0, False, 0.0)
    job.fail(9, step_before=-1)
    job.state.incidents[0].at_ns = 4 * SECOND_NS
    job.at(9, stop=None)
    assert job.seconds(10) == {"starting": 1, "productive": 3, "recovering": 5 + 1}


def silent_restart() -> Accounted:
    """A script that reports no steps: it has trained for 50 s, and for 10 s since its restart."""
    job = Accounted()
    job.launch(0, 1)
    job.at(0, phase="running")
    job.fail(50, -1)
    job.launch(52, 2)
    job.at(52, phase="running")
    return job


def ignores(*, waits: bool) -> FromNode:
    return FromNode("a", OwnCheckpointSeen(generation=2, path="/o/c.pt", unread=True, waits=waits))


def test_a_silent_script_that_begins_at_step_0_trains_the_same_again() -> None:
    job = silent_restart()
    job.at(62, ignores(waits=False), own=OwnCheckpointState(ignored_in=2))
    assert job.seconds(112) == {"recovering": 2, "redone": 50, "productive": 60}
    job.at(112, ignores(waits=False))
    assert job.seconds(112) == {"recovering": 2, "redone": 50, "productive": 60}, "counted once"


def test_a_silent_script_that_is_held_has_trained_in_vain_since_its_restart() -> None:
    job = silent_restart()
    job.at(62, ignores(waits=True), own=OwnCheckpointState(ignored_in=2), phase="suspending")
    assert job.seconds(70) == {"recovering": 2, "redone": 10, "productive": 50, "suspended": 8}
    job.at(70, ResumeRequested(start_over=True), phase="pending")
    assert job.seconds(70) == {"recovering": 2, "redone": 60, "suspended": 8}
