"""Starts that wait for code and packages: each is carried out once, or answered."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.protocol import code_archive
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.environment import RESUME_FROM, RESUME_SINCE
from holdfast.orchestrator.protocol.facts import OwnCheckpoint, WorkerSeat
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.agent.machine import commands, inputs
from holdfast.workers.agent.pool.file_audit import OWN_CHECKPOINTS
from holdfast.workers.agent.process.guarded_starts import GuardedStarts, StartSetting
from holdfast.workers.agent.process.uploaded_code import UploadedCode
from holdfast.workers.agent.storage import checkpoint_guard
from tests.unit.api.wrong_jobs import job as document
from tests.unit.api.wrong_jobs import script
from tests.unit.workers.members import membership

WELCOME = m.Welcome(
    spec={}, spec_directory="/here", checkpoint_path="", log_directory="-", heartbeat_interval_s=1
)


def fork(rank: int, code: str = "", restarts: int = 0, written: str = "") -> commands.Fork:
    own = (OwnCheckpoint(path=written, generation=1),) if written else ()
    at = membership(
        mesh=Mesh(replicate=2), workers_per_node=2, restart_count=restarts, own_checkpoints=own
    )
    return commands.Fork(at, 0, WorkerSeat(rank, rank, 0, rank == 0), code=code)


class Node:
    def __init__(self, answer: Callable[[m.FetchCode], m.CodePart] | None = None) -> None:
        self.started: list[tuple[int, StartSetting]] = []
        self.given: list[inputs.Input] = []
        self.sent: list[m.NodeRemarked | m.AgentEvent] = []
        self._answer = answer
        self.code = UploadedCode(self._requested)
        self.starts = GuardedStarts(
            lambda fork, setting: self.started.append((fork.seat.rank, setting)),
            self.given.append,
            self.sent.append,
            self.code,
        )

    def _requested(self, request: m.FetchCode) -> None:
        if self._answer is not None:
            loop = asyncio.get_running_loop()
            loop.call_soon(self.code.received, self._answer(request))

    async def begin(self, code: str = "", **spec: Any) -> None:
        """Both starts, and wait until what they wait for is there."""
        given = job_from_mapping(document(script(**spec)))
        for rank in range(2):
            self.starts.begin(fork(rank, code), given, WELCOME)
        while self.starts._tasks and self._answer is not None:
            await asyncio.wait(self.starts._tasks)


async def test_without_anything_to_wait_for_they_start_at_once() -> None:
    node = Node()
    await node.begin()
    assert node.started == [(0, StartSetting("/here")), (1, StartSetting("/here"))]


async def test_they_start_in_the_uploaded_code(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print()")
    name, archive = code_archive.pack(tmp_path, ["train.py"])
    node = Node(lambda asked: m.CodePart(code=name, part=asked.part, num_parts=1, data=archive))
    await node.begin(name)
    assert [rank for rank, _setting in node.started] == [0, 1]
    assert {Path(setting.directory, "train.py").is_file() for _, setting in node.started} == {True}
    node.code.close()


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param({"problem": "it was deleted"}, id="none"),
        pytest.param({"num_parts": 1, "data": b"x"}, id="damaged"),
        pytest.param({"num_parts": 10_000, "data": b"x"}, id="too-many"),
        pytest.param({"num_parts": 1, "data": bytes(limits.CODE_PART_BYTES + 1)}, id="too-long"),
    ],
)
async def test_code_that_does_not_come_fails_each_start(answer: dict[str, Any]) -> None:
    node = Node(lambda asked: m.CodePart(code=asked.code, part=asked.part, **answer))
    await node.begin("a" * 64)
    assert node.started == []
    failed = [one for one in node.given if isinstance(one, inputs.ForkFailed)]
    assert [one.rank for one in failed] == [0, 1]


async def test_a_start_that_is_killed_while_it_waits_is_answered_once() -> None:
    node = Node()
    await node.begin("a" * 64)
    assert node.starts.dropped(1, 0) and node.starts.dropped(1, 1)
    assert not node.starts.dropped(1, 1)
    assert len(node.given) == 2 and node.started == []


@pytest.mark.parametrize("written_by", [2, 4])
async def test_a_checkpoint_of_deepspeed_for_another_number_of_ranks_is_reported(
    tmp_path: Path, written_by: int
) -> None:
    (tmp_path / "step").mkdir()
    (tmp_path / "latest").write_text("step")
    for name in ("mp_rank_00_model_states.pt", *(
        f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(written_by)
    )):  # fmt: skip
        (tmp_path / "step" / name).write_bytes(b"not read")
    given = job_from_mapping(document(script(workingDirectory=str(tmp_path))))
    welcome = msgspec.structs.replace(WELCOME, submitted_ns=1)
    node, written = Node(), fork(0, restarts=1, written=str(tmp_path / "latest"))
    node.starts.begin(written, given, welcome)
    await asyncio.wait(node.starts._tasks)
    assert node.started[0][1].environment == {
        RESUME_FROM: str(tmp_path),
        RESUME_SINCE: "1",
        OWN_CHECKPOINTS: json.dumps({"known": [[str(tmp_path / "latest"), 1]], "hold": True}),
    }
    texts = [message.text for message in node.sent]
    assert f"newest complete checkpoint is {tmp_path}, written" in texts.pop()
    if written_by == 2:
        assert texts == []
    else:
        (text,) = texts
        assert f"{tmp_path}/step of DeepSpeed was written by 4 ranks, and 2 are started" in text


async def test_workers_start_although_a_file_system_does_not_answer_and_an_event_names_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()
    monkeypatch.setattr(checkpoint_guard, "look", lambda *_, **__: answers.wait(30))
    monkeypatch.setattr(checkpoint_guard, "LOOK_TIMEOUT_S", -0.99)
    given = job_from_mapping(document(script()))
    welcome = msgspec.structs.replace(WELCOME, submitted_ns=1)
    node = Node()
    node.starts.begin(fork(0, restarts=1), given, welcome)
    await asyncio.wait(node.starts._tasks)
    assert node.started[0][1].environment == {RESUME_SINCE: "1"}
    assert [message.text for message in node.sent] == [
        "not all checkpoints of the script were looked at: the file system did not answer "
        "within 5 s; the rest is unchanged"
    ]
    answers.set()


@pytest.mark.parametrize(("restarts", "guard"), [(0, {}), (1, {"never": {}})])
async def test_at_the_first_launch_and_without_the_guard_no_trainer_goes_on(
    restarts: int, guard: dict[str, Any]
) -> None:
    given = job_from_mapping(document(script(checkpoint={"guard": guard})))
    welcome = msgspec.structs.replace(WELCOME, submitted_ns=1)
    node = Node()
    node.starts.begin(fork(0, restarts=restarts), given, welcome)
    assert node.started == [(0, StartSetting("/here"))]
