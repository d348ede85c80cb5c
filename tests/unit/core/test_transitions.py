"""The table of transitions and its page."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from holdfast.orchestrator.core.transitions import (
    MEANING,
    TRANSITIONS,
    IllegalTransition,
    JobPhase,
    check_transition,
    targets,
)
from tools.phases_page import page

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


def test_only_transitions_of_the_table_are_checked_as_legal() -> None:
    check_transition("running", "recovering")
    refusal = r"running -> suspended: not a transition; from running a job can go to recovering, .*"
    with pytest.raises(IllegalTransition, match=refusal):
        check_transition("running", "suspended")
    with pytest.raises(IllegalTransition, match="from failed a job can go to nothing"):
        check_transition("failed", "running")
