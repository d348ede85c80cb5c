"""What is said of a Ray node that drains, from what Ray logs and tells."""

from __future__ import annotations

from pathlib import Path

from holdfast.orchestrator.backends.ray.drains import reason_in_log, words
from holdfast.orchestrator.backends.topology import coordinates

STAMP = "[2026-11-21 15:57:13,028 I 22594 22594] (raylet) node_manager.cc:2245: "
LINE = (
    STAMP + "Drain raylet RPC has received. Deadline is 1795276640981. Drain reason: "
    "DRAIN_NODE_REASON_PREEMPTION. Drain reason message: spot taken away\n"
)


def test_the_reason_is_the_one_of_the_own_raylet(tmp_path: Path) -> None:
    (tmp_path / "raylet.out").write_text(LINE.replace("22594", "100").replace("spot", "other"))
    (tmp_path / "raylet.1.out").write_text("something\n" + LINE + "something else\n")
    assert reason_in_log(tmp_path, 22594) == "preemption: spot taken away"
    assert reason_in_log(tmp_path, 100) == "preemption: other taken away"
    assert reason_in_log(tmp_path, 7) == ""


def test_a_log_that_says_it_otherwise_or_is_not_there_leaves_the_reason_open(
    tmp_path: Path,
) -> None:
    assert reason_in_log(tmp_path, 22594) == ""
    (tmp_path / "raylet.out").write_text(STAMP + "Drain request, why nobody knows\n")
    assert reason_in_log(tmp_path, 22594) == ""


def test_a_drain_is_told_with_its_reason_and_deadline() -> None:
    told = words("0123456789abcdef", "preemption: spot taken away", 29.6)
    assert told == (
        "Ray drains its Ray node 01234567, which ends in 30 s, for preemption: spot taken away"
    )
    assert words("0123456789abcdef", "", 0.0) == "Ray drains its Ray node 01234567 for preemption"


def test_a_label_that_a_machine_lacks_counts_as_empty() -> None:
    assert coordinates({"zone": "a"}, ("region", "zone")) == ("", "a")
