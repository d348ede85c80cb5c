"""A resume of a job that holds: storage is read first, and only a user begins at step 0."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from holdfast.orchestrator.backends.base import Backend
from holdfast.orchestrator.core.events import AnyEvent
from holdfast.orchestrator.core.state import JobState
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.protocol import messages as wire
from holdfast.orchestrator.protocol.facts import ShardFile
from holdfast.orchestrator.runtime.control_api import ControlApi
from holdfast.orchestrator.runtime.driver import Driver
from holdfast.orchestrator.runtime.inquiries import Inquiries
from holdfast.orchestrator.runtime.notifier import ChangeNotifier
from holdfast.orchestrator.runtime.observe.view import JobView
from tests.unit.core.harness import Transcript
from tests.unit.core.test_own_checkpoints import restarted, written
from tests.unit.core.test_unusable_checkpoints import held, shard_files


class CoreDriver:
    """The part of a Driver that the control API uses, over a core without a journal."""

    def __init__(self, job: Transcript) -> None:
        self.job = job

    @property
    def state(self) -> JobState:
        return self.job.state

    async def submit_durable(self, event: AnyEvent) -> None:
        self.job.apply(event)


class Held:
    def __init__(self, *stored: tuple[int, int], answers: bool = True) -> None:
        self.job = held(9, 19)
        self.stored, self.answers = stored, answers

    async def _list(self) -> tuple[ShardFile, ...]:
        if not self.answers:
            raise HoldfastError("storage: no answer within 15 s")
        return shard_files(*self.stored)

    def resume(self, **arguments: Any) -> wire.Reply:
        api = ControlApi(
            cast(Driver, CoreDriver(self.job)), cast(Backend, None), {},
            lambda: JobView(name="j"), ChangeNotifier(), lambda: cast(wire.Welcome, None),
            self._list, Inquiries({}),
        )  # fmt: skip
        return asyncio.run(api.perform("resume", arguments))


def test_a_resume_without_a_usable_checkpoint_is_refused_with_what_to_do() -> None:
    one = Held((9, 1), (19, 1))
    text = r"that after 20 steps is damaged.*checkpoint repair.*--start-over"
    with pytest.raises(UserError, match=text):
        one.resume()
    assert one.job.state.phase == "suspended"


def test_a_resume_finds_a_repaired_checkpoint() -> None:
    one = Held((9, 1), (19, 1), (19, 7))
    assert "after 20 steps" in one.resume().detail
    assert one.job.state.phase == "pending"


def test_a_user_begins_at_step_0() -> None:
    one = Held((9, 1), (19, 1))
    assert "begins at step 0" in one.resume(start_over=True).detail
    assert one.job.state.catalog.start_over


def test_a_store_that_does_not_answer_is_said() -> None:
    with pytest.raises(UserError, match="cannot be listed now: storage: no answer"):
        Held(answers=False).resume()


def test_only_a_job_that_holds_may_start_over() -> None:
    one = Held()
    one.job = Transcript().started()
    one.job.state.intent = "suspend"
    with pytest.raises(UserError, match="--start-over"):
        one.resume(start_over=True)


@pytest.mark.parametrize("start_over", [False, True])
def test_a_script_that_ignored_its_checkpoint_goes_on_by_a_resume(start_over: bool) -> None:
    one = Held(answers=False)
    one.job = restarted()
    one.job.apply(written("/o/ckpt.pt", 2, unread=True, waits=True))
    detail = one.resume(start_over=start_over).detail
    assert ("begins at step 0" in detail) == start_over
    assert bool(one.job.state.own.written) != start_over
