"""A job that holds because none of its checkpoints can be used, on Kubernetes."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.orchestrator.core.actions import Reason
from holdfast.orchestrator.core.state import Hold, JobState
from holdfast.orchestrator.hosts.kubernetes.spec_sync import SpecSync
from holdfast.orchestrator.hosts.kubernetes.status import (
    HOLD_REASON,
    StatusContext,
    status_of,
    view_of,
)
from holdfast.orchestrator.hosts.kubernetes.status_writer import new_events
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.runtime.observe.view import JobView
from tests.unit.runtime.harness import make_job

TEXT = "no committed checkpoint can be used: that after 20 steps is damaged (model.a: a checksum)"


def test_the_condition_and_the_event_say_that_a_user_has_to_decide() -> None:
    view = JobView(name="j", state="suspended", reason=TEXT, hold=TEXT)
    context = StatusContext(name="j", generation=1, desired=2, now_ns=10**18)
    status = status_of(view, context)
    conditions = {one["type"]: one for one in status["conditions"]}
    suspended = conditions["Suspended"]
    assert (suspended["status"], suspended["reason"]) == ("True", HOLD_REASON)
    assert suspended["message"] == TEXT
    document = {"metadata": {"name": "j"}, "status": status}
    assert view_of(document, 10**18).hold == TEXT, "the command line reads it there"
    before = JobView(name="j", state="recovering")
    (event,) = new_events(before, view)
    assert (event.severity, event.reason, event.message) == ("Warning", HOLD_REASON, TEXT)


class Recorder:
    """The cluster, the runtime and its control API, as far as SpecSync uses them."""

    def __init__(self) -> None:
        self.performed: list[tuple[str, dict[str, Any]]] = []
        self.patched: list[Any] = []
        self.job = make_job()
        self.state = JobState(self.job, "id", 0, 0, phase="suspended", intent="suspend")
        self.state.reason = Reason("checkpoint", TEXT)
        self.state.hold = Hold(0, TEXT)
        self.control = self

    async def perform(self, verb: str, arguments: dict[str, Any]) -> wire.Reply:
        self.performed.append((verb, arguments))
        return wire.Reply(ok=True, detail="done")

    async def patch(self, *where: object) -> dict[str, Any]:
        self.patched.append(where[-1])
        return {"metadata": {"resourceVersion": "8"}}

    def record(self, *event: object) -> None:
        pass

    def apply(self, **annotations: str) -> None:
        document = {
            "metadata": {"generation": 1, "resourceVersion": "7", "annotations": annotations}
        }
        owner: Any = SimpleNamespace(namespace="team", name="j")
        this: Any = self
        sync = SpecSync(owner, this, this, this, this)
        asyncio.run(sync.apply(document, self.job))


def test_a_spec_without_suspend_does_not_resume_a_job_that_holds() -> None:
    one = Recorder()
    one.apply()
    assert one.performed == []
    one.state.hold = None
    one.apply()
    assert [verb for verb, _arguments in one.performed] == ["resume"]


@pytest.mark.parametrize("start_over", [False, True])
def test_the_annotation_of_a_user_resumes_it(start_over: bool) -> None:
    one = Recorder()
    wanted = {"verb": "resume", "arguments": {"start_over": start_over}, "by": "me"}
    one.apply(**{names.REQUEST: json.dumps(wanted)})
    assert one.performed == [("resume", {"start_over": start_over, "by": "me"})]
    assert one.patched == [{"metadata": {"annotations": {names.REQUEST: None}}}]
