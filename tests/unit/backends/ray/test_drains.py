"""Notices of draining Ray nodes, and the reason that a raylet logs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from holdfast.orchestrator.backends.base import coordinates
from holdfast.orchestrator.backends.ray.drains import (
    Drains,
    RayNodeLookup,
    notice_text,
    reason_in_log,
)

BOUND_S = 30.0
STAMP = "[2026-11-21 15:57:13,028 I 22594 22594] (raylet) node_manager.cc:2245: "
LINE = (
    STAMP + "Drain raylet RPC has received. Deadline is 1795276640981. Drain reason: "
    "DRAIN_NODE_REASON_PREEMPTION. Drain reason message: spot taken away\n"
)


def test_the_reason_is_that_of_the_nodes_own_raylet(tmp_path: Path) -> None:
    (tmp_path / "raylet.out").write_text(LINE.replace("22594", "100").replace("spot", "other"))
    (tmp_path / "raylet.1.out").write_text("something\n" + LINE + "something else\n")
    assert reason_in_log(tmp_path, 22594) == "preemption: spot taken away"
    assert reason_in_log(tmp_path, 100) == "preemption: other taken away"
    assert reason_in_log(tmp_path, 7) == ""


def test_a_missing_log_or_another_format_gives_no_reason(tmp_path: Path) -> None:
    assert reason_in_log(tmp_path, 22594) == ""
    (tmp_path / "raylet.out").write_text(STAMP + "Drain request in another format\n")
    assert reason_in_log(tmp_path, 22594) == ""


def test_a_notice_has_reason_and_deadline() -> None:
    text = notice_text("0123456789abcdef", "preemption: spot taken away", 29.6)
    assert text == (
        "Ray drains its Ray node 01234567, which ends in 30 s, for preemption: spot taken away"
    )
    text = notice_text("0123456789abcdef", "", 0.0)
    assert text == "Ray drains its Ray node 01234567 for preemption"


def test_a_label_that_a_machine_lacks_counts_as_empty() -> None:
    assert coordinates({"zone": "a"}, ("region", "zone")) == ("", "a")


async def test_the_watch_for_drains_goes_on_when_the_head_does_not_answer() -> None:
    answers: list[Any] = [RuntimeError("the head does not answer"), {"draining": 0}]

    def source() -> dict[str, int]:
        answer: Any = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    notices: asyncio.Queue[str] = asyncio.Queue()
    lookup = RayNodeLookup({"node-0": "draining", "node-1": "other"}, {})
    drains = Drains(lookup, lambda node, *_: notices.put_nowait(node), source, 0.01)
    task = asyncio.create_task(drains.watch())
    async with asyncio.timeout(BOUND_S):
        assert await notices.get() == "node-0"
    task.cancel()
    assert notices.empty()
