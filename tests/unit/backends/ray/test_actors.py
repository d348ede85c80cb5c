"""Waiting for the end of an agent, and Ray's errors about a runtime env as short texts."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from holdfast.orchestrator.backends.ray import actors

BOUND_S = 30.0
ERROR = """Could not create the actor because its associated runtime env failed to be created.
[Node 10.0.0.7] Traceback (most recent call last):
  File "ray/runtime_env/packaging.py", line 957, in download
    raise IOError(
OSError: Failed to download gcs://package.zip
Try again.
"""


@pytest.mark.parametrize(
    "first", [RuntimeError("the head does not answer"), None], ids=["no-head", "replaced"]
)
async def test_a_call_without_an_answer_does_not_end_a_node(first: Exception | None) -> None:
    """The head does not answer, or calls of other controllers replaced this one."""

    class WaitForEnd:
        answers: ClassVar[list[Any]] = [first, "was killed by SIGKILL"]

        async def remote(self) -> Any:
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

    class Actor:
        wait_for_end = WaitForEnd()

    async with asyncio.timeout(BOUND_S):
        detail = await actors.agent_end(Actor(), 0.01)
    assert detail == "its agent was killed by SIGKILL"


def test_stack_frames_of_ray_are_left_out() -> None:
    assert actors.runtime_env_error(ERROR).splitlines()[1:] == [
        "[Node 10.0.0.7] OSError: Failed to download gcs://package.zip", "Try again.",
    ]  # fmt: skip


def test_the_summary_is_one_line_without_what_all_such_errors_say() -> None:
    text = f"Failed to set up runtime environment.\n{ERROR}"
    assert actors.runtime_env_summary(text) == (
        "[Node 10.0.0.7] OSError: Failed to download gcs://package.zip Try again."
    )


def test_the_summary_of_a_long_error_has_both_ends() -> None:
    text = f"wanted numpy==0\n{'resolving ' * 100}\nERROR: no such version"
    summary = actors.runtime_env_summary(text)
    assert summary.startswith("wanted numpy==0 resolving")
    assert summary.endswith("ERROR: no such version")
    assert len(summary) == 2 * actors.SUMMARY_CHARS + len(" ... ")
