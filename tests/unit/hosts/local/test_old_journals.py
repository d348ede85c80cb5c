"""Journals and snapshots that were written before fields and classes got their present names.

data/dab5345 has one job as the Holdfast of commit dab5345 wrote it. It meets an injected fault,
loses a node, gets a preemption notice and a new controller, is suspended and cancelled.
`whole.journal` has every event; the others begin with a snapshot: `incident` while nodes are
pending (one of them without a name) and a state at risk is drained to storage, `restarted` after
the next controller has found a node, `staging` while a step is staged before a suspension,
`drain` while the last checkpoint is written. `views.json` has what that Holdfast showed, without
sentences.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.core.controller import Controller
from holdfast.orchestrator.core.events import JobSubmitted
from holdfast.orchestrator.core.journal import Record
from holdfast.orchestrator.core.roster import PendingNode
from holdfast.orchestrator.core.state import JobState
from holdfast.orchestrator.hosts.local.file_journal import FileJournal
from holdfast.orchestrator.runtime import snapshot
from holdfast.orchestrator.runtime.observe.projection import JobProjection

DATA = Path(__file__).parent / "data" / "dab5345"
NUM_EVENTS = {"incident": 42, "restarted": 43, "staging": 58, "drain": 63, "end": 69}
SENTENCES = {
    "reason", "text", "title", "evidence", "decision", "traceback", "stacks", "notes", "problem",
    "intent_reason", "leave_reason", "released_nodes", "release_pending", "cordoned",
}  # fmt: skip
NEWER = {"noticed_ns", "last_controller_ns"}
"""Fields that those snapshots lack; a replay of all events has them."""


def read(name: str, tmp_path: Path) -> tuple[bytes | None, list[Record]]:
    path = tmp_path / f"{name}.journal"
    shutil.copy(DATA / path.name, path)
    journal = FileJournal(path)
    journal.close()
    return journal.snapshot, journal.records


def without_sentences(value: Any) -> Any:
    """Structs as {field: value}; sentences are worded differently today."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        skipped = SENTENCES | NEWER
        if "timers" in value:  # the time to rejoin was another one
            value = {**value, "timers": sorted(value["timers"])}
        return {k: without_sentences(v) for k, v in value.items() if k not in skipped}
    if isinstance(value, list | tuple):
        return [without_sentences(one) for one in value]
    return value


def comparable(view: Any) -> Any:
    """That Holdfast counted the last step of an interrupted generation as recovery if no report of
    it had come; today's counts it as training. The sum of both is the same."""
    ledger = dict(view["ledger"])
    together = round(ledger.pop("productive") + ledger.pop("recovering"), 6)
    return {**view, "goodput": None, "ledger": {**ledger, "productive and recovering": together}}


class OldReplay:
    """Controller and view of an old journal, through today's code."""

    def __init__(self, name: str, tmp_path: Path) -> None:
        data, records = read(name, tmp_path)
        if data is None:
            first = records[0].event
            assert isinstance(first, JobSubmitted)
            job = job_from_mapping(first.spec)
            self.controller, self.projection = Controller(), JobProjection(job)
        else:
            state, memory = snapshot.decode(data)
            self.controller = Controller(state)
            self.projection = JobProjection(state.job, memory, state)
        self.later = records

    @property
    def state(self) -> JobState:
        return self.controller.state

    def take(self, count: int | None = None) -> OldReplay:
        for now_ns, event in self.later[:count]:
            actions = self.controller.step(now_ns, event)
            self.projection.observe(now_ns, event, actions, self.controller.state)
        self.later = [] if count is None else self.later[count:]
        return self

    def view(self) -> Any:
        now_ns = self.projection.now_ns + 1_000_000
        return comparable(without_sentences(self.projection.view(now_ns, live=False)))


def comparable_state(state: JobState) -> Any:
    """Without the fields of launches that were added since: a replay decides them again. An old
    snapshot does not know which sizes have worked; the next step of the job shows it."""
    found = without_sentences(state)
    del found["sizes"]
    for launch in found["launch_actions"].values():
        for added in ("own_shards", "stage_every_steps", "nodes_on_machine"):
            del launch[added]
    return found


def views() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "views.json").read_text())
    return {name: comparable(without_sentences(view)) for name, view in found.items()}


def of_that_time(value: Any, then: Any) -> Any:
    """`value` without the fields that `then` lacks: they were added since."""
    if isinstance(then, dict):
        return {key: of_that_time(value[key], one) for key, one in then.items()}
    if isinstance(then, list) and len(value) == len(then):
        return [of_that_time(*pair) for pair in zip(value, then, strict=True)]
    return value


@pytest.mark.parametrize("name", NUM_EVENTS)
def test_an_old_journal_gives_the_same_view(name: str, tmp_path: Path) -> None:
    whole = OldReplay("whole", tmp_path)
    assert len(whole.later) == NUM_EVENTS["end"]
    then = views()[name]
    assert of_that_time(whole.take(NUM_EVENTS[name]).view(), then) == then


@pytest.mark.parametrize("name", ["incident", "restarted", "staging", "drain"])
def test_an_old_snapshot_gives_the_state_and_view_that_a_replay_gives(
    name: str, tmp_path: Path
) -> None:
    whole = OldReplay("whole", tmp_path).take(NUM_EVENTS[name])
    compacted = OldReplay(name, tmp_path)
    assert len(compacted.later) == NUM_EVENTS["end"] - NUM_EVENTS[name]
    then = views()
    assert compacted.view() == whole.view()
    assert of_that_time(whole.view(), then[name]) == then[name]
    # That Holdfast armed the timer of a last checkpoint for a state at risk too.
    if name in ("restarted", "staging"):
        assert compacted.state.timers.pop("persist")
    assert comparable_state(compacted.state) == comparable_state(whole.state)
    assert compacted.take().view() == whole.take().view()
    assert of_that_time(whole.view(), then["end"]) == then["end"]
    assert comparable_state(compacted.state) == comparable_state(whole.state)
    assert compacted.state.phase == "cancelled" and compacted.state.reason.code == "cancel"


def test_an_old_snapshot_keeps_what_an_incident_has_under_way(tmp_path: Path) -> None:
    state = OldReplay("incident", tmp_path).state
    assert state.phase == "recovering" and state.needs_placement
    unnamed, named = state.pending_nodes
    assert unnamed == PendingNode(None, 1_007_500_000_000)
    assert named == PendingNode("f", 1_010_500_000_000)
    assert list(state.released_nodes) == ["d", "e", "b"] and list(state.release_pending) == ["e"]
    assert list(state.cordoned) == ["a"] and list(state.failed_starts) == ["d"]
    assert state.num_failed_starts == 1 and state.expected_start_ns == 1_500_000_000
    assert state.start_durations_ns == [500_000_000, 600_000_000, 600_000_000]
    assert state.nodes["c"].preempting and state.nodes["c"].leave_reason == "spot interruption"
    assert state.drain is not None and (state.drain.kind, state.drain.step) == ("at-risk", 8)
    assert [incident.fault_injected for incident in state.incidents] == [True, False]
    assert [known.key for known in state.catalog.committed] == [(5, 1)]


def test_an_old_snapshot_keeps_nodes_that_a_new_controller_found(tmp_path: Path) -> None:
    state = OldReplay("restarted", tmp_path).state
    assert [(one.name, one.recovered) for one in state.pending_nodes] == [("f", False), ("x", True)]
    assert not state.nodes["c"].confirmed and state.incarnation == 2


def test_an_old_snapshot_keeps_a_step_that_is_staged_before_a_suspension(tmp_path: Path) -> None:
    state = OldReplay("staging", tmp_path).state
    assert state.intent == "suspend" and state.intent_reason == "suspend was asked for by ada"
    assert state.quiesce is not None and state.quiesce.step == 22
    assert state.quiesce.requested_ns == 1_060_000_000_000 and state.first_step_done
