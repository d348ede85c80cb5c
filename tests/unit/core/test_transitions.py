"""The table of moves, its page, and what must hold after every step."""

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
    MOVES,
    IllegalMove,
    JobPhase,
    check_move,
    page,
)

from .harness import Transcript

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_the_one_that_the_table_gives() -> None:
    assert (ROOT / "docs/concepts/job-phases.md").read_text() == page()


def test_every_phase_has_a_meaning_and_a_row() -> None:
    assert set(get_args(JobPhase)) == set(MOVES) == set(MEANING)


def test_every_phase_can_reach_an_end() -> None:
    ends = {"succeeded", "failed", "cancelled"}
    assert {phase for phase, targets in MOVES.items() if not targets} == ends
    for phase in MOVES:
        seen, edge = {phase}, [phase]
        while edge:
            new = [then for then in MOVES[edge.pop()] if then not in seen]
            seen.update(new)
            edge += new
        assert seen & ends


def test_an_illegal_move_raises_and_changes_nothing() -> None:
    story = Transcript().started()
    turn = StepContext(story.state, story.now)
    before = copy.copy(story.state)
    with pytest.raises(IllegalMove, match=r"running -> suspended: not a legal move; .*recovering"):
        turn.move("suspended", "suspend", "no")
    assert story.state == before
    check_move("running", "recovering")


def test_a_job_is_submitted_once_and_first() -> None:
    story = Transcript()
    with pytest.raises(AssertionError, match="JobSubmitted"):
        story.controller.step(1, Tick())
    story.submit()
    with pytest.raises(AssertionError, match="once"):
        story.tell(JobSubmitted(job_id="x", spec=story.document, spec_directory="."))


def _break(state: JobState, what: str) -> None:
    match what:
        case "a node has two places":
            state.members = ("a", "a")
        case "nodes wanted":
            state.members = ("a",)
        case "runs a generation of the future":
            state.nodes["a"].generation = 9
        case "is here and was given up":
            state.released_nodes["a"] = "lost"
        case "something runs while the next is placed":
            state.needs_placement = True
        case "nothing runs in phase running":
            state.active = False
        case "ranks are no bijection":
            state.launch_actions["b"] = state.launch_actions["a"]
        case "over without an outcome":
            state.phase = "failed"
        case "committed twice":
            state.catalog.committed = state.catalog.committed * 2
        case "the newest good checkpoint is being deleted":
            state.catalog.deleting[(9, 1)] = 1


@pytest.mark.parametrize(
    "what",
    [
        "a node has two places", "nodes wanted", "runs a generation of the future",
        "is here and was given up", "something runs while the next is placed",
        "nothing runs in phase running", "ranks are no bijection", "over without an outcome",
        "committed twice", "the newest good checkpoint is being deleted",
    ],
)  # fmt: skip
def test_a_state_that_contradicts_itself_is_caught(what: str) -> None:
    story = Transcript().started()
    story.commit(9)
    invariants.check(story.state)
    _break(story.state, what)
    with pytest.raises(invariants.Broken, match=what):
        invariants.check(story.state)
