"""The table of transitions, its page, and what must hold after every step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import get_args

import pytest

from holdfast.orchestrator.core import invariants
from holdfast.orchestrator.core.context import StepContext
from holdfast.orchestrator.core.events import JobSubmitted, Tick
from holdfast.orchestrator.core.state import JobState
from holdfast.orchestrator.core.transitions import (
    MEANING,
    TRANSITIONS,
    IllegalTransition,
    JobPhase,
    check_transition,
    page,
    targets,
)

from .harness import Transcript

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_generated_from_the_table() -> None:
    assert (ROOT / "docs/concepts/job-phases.md").read_text() == page()


def test_every_phase_has_a_meaning_and_a_row() -> None:
    assert set(get_args(JobPhase)) == set(MEANING)
    assert {phase for edge in TRANSITIONS for phase in edge} == set(MEANING)
    assert len(TRANSITIONS) == 23


def test_every_phase_can_reach_an_end() -> None:
    ends = {"succeeded", "failed", "cancelled"}
    assert {phase for phase in MEANING if not targets(phase)} == ends
    for phase in MEANING:
        seen, edge = {phase}, [phase]
        while edge:
            new = [then for then in targets(edge.pop()) if then not in seen]
            seen.update(new)
            edge += new
        assert seen & ends


def test_an_illegal_transition_raises_and_changes_nothing() -> None:
    job = Transcript().started()
    turn = StepContext(job.state, job.now_ns)
    before = copy.copy(job.state)
    refusal = r"running -> suspended: not a transition; .*recovering"
    with pytest.raises(IllegalTransition, match=refusal):
        turn.move("suspended", "suspend", "no")
    assert job.state == before
    check_transition("running", "recovering")


def test_a_job_is_submitted_once_and_first() -> None:
    job = Transcript()
    with pytest.raises(AssertionError, match="JobSubmitted"):
        job.controller.step(1, Tick())
    job.submit()
    with pytest.raises(AssertionError, match="once"):
        job.apply(JobSubmitted(job_id="x", spec=job.document, spec_directory="."))


def _break(state: JobState, what: str) -> None:
    match what:
        case "a node is a member twice":
            state.members = ("a", "a")
        case "nodes wanted":
            state.members = ("a",)
        case "runs a future generation":
            state.nodes["a"].generation = 9
        case "has joined and was released":
            state.released_nodes["a"] = "lost"
        case "a generation runs while the next one is placed":
            state.needs_placement = True
        case "no generation runs in phase running":
            state.active = False
        case "ranks are no bijection":
            state.launch_actions["b"] = state.launch_actions["a"]
        case "a terminal phase without an outcome":
            state.phase = "failed"
        case "committed twice":
            state.catalog.committed = state.catalog.committed * 2
        case "the newest good checkpoint is being deleted":
            state.catalog.deleting[(9, 1)] = 1


@pytest.mark.parametrize(
    "what",
    [
        "a node is a member twice", "nodes wanted", "runs a future generation",
        "has joined and was released", "a generation runs while the next one is placed",
        "no generation runs in phase running", "ranks are no bijection",
        "a terminal phase without an outcome", "committed twice",
        "the newest good checkpoint is being deleted",
    ],
)  # fmt: skip
def test_a_state_that_contradicts_itself_is_caught(what: str) -> None:
    job = Transcript().started()
    job.commit(9)
    invariants.check(job.state)
    _break(job.state, what)
    with pytest.raises(invariants.Broken, match=what):
        invariants.check(job.state)
