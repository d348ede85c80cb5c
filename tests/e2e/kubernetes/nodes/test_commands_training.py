"""`holdfast --kubernetes` with jobs that train, on a cluster with nodes."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.kubernetes.commands import HoldfastCli
from tests.e2e.kubernetes.jobs import ENDLESS, example
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.rig.operator import Operator
from tests.e2e.kubernetes.rig.waiting import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

BOUND_S = 150


@pytest.fixture
def holdfast(operator: Operator, cluster_namespace: Kubectl) -> Iterator[HoldfastCli]:
    operator.ensure_running()
    yield HoldfastCli(cluster_namespace)
    cluster_namespace.run("delete", "trainingjobs", "--all")


def seen(holdfast: HoldfastCli, name: str, what: str, true_of: Any) -> dict[str, Any]:
    """The output of `holdfast status --json`, once this is true of it."""
    found: dict[str, Any] = {}

    def look() -> bool:
        found.update(holdfast.json("status", name))
        return bool(true_of(found))

    until(look, what, timeout_s=BOUND_S, every_s=0.5, last=lambda: found)
    return found


def written(path: Path, text: str) -> None:
    until(lambda: text in path.read_text(), f"{text!r}", timeout_s=BOUND_S, last=path.read_text)


def start(holdfast: HoldfastCli, tmp_path: Path, document: dict[str, Any], *options: str) -> Any:
    """`holdfast run` of a file; its output is in tmp_path/run."""
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    command = holdfast.start(tmp_path / "run", "run", file, *options)
    name = document["metadata"]["name"]
    until(lambda: holdfast("status", name).code == 0, f"job {name}", timeout_s=BOUND_S,
          last=(tmp_path / "run").read_text)  # fmt: skip
    return command


def test_run_reports_a_job_to_its_end(holdfast: HoldfastCli, tmp_path: Path) -> None:
    command = start(holdfast, tmp_path, example("short", 12))
    assert command.wait(BOUND_S) == 0, (tmp_path / "run").read_text()
    text = (tmp_path / "run").read_text()
    assert "short  succeeded after" in text
    assert "12 of 12 steps, loss " in text and "no incidents" in text
    events = holdfast("debug", "events", "short", "-f").out
    assert "Succeeded" in events, "and following a job that has ended comes to an end"
    assert holdfast.json("checkpoint", "list", "short")[0]["step"] == 11
    assert holdfast("delete", "short", "--yes").code == 0


def test_a_job_is_watched_disturbed_inspected_and_cancelled(
    holdfast: HoldfastCli, tmp_path: Path
) -> None:
    command = start(holdfast, tmp_path, example("broken", ENDLESS), "--logs")
    status = seen(holdfast, "broken", "steps", lambda v: v["step"] >= 2 and v["world_size"] == 4)
    nodes = {node["name"]: node["state"] for node in status["nodes"]}
    assert sorted(nodes.values()) == ["member", "member"]
    written(tmp_path / "run", "[rank 0] step ")
    assert "[rank 1]" not in (tmp_path / "run").read_text()
    again, before = tmp_path / "again", status["step"]
    watching = holdfast.start(again, "attach", "broken", "--logs")
    written(again, "[rank 0] step ")
    watching.send_signal(signal.SIGINT)
    assert watching.wait(BOUND_S) == 130
    shown = re.findall(r"\[rank 0\] step\s+(\d+)", again.read_text())
    assert int(shown[0]) >= before, "lines from before are not shown"

    done = holdfast("debug", "kill-worker", "broken", "--rank", "0")
    assert done.code == 0, done.err
    assert re.match(r"job broken: kill-worker: worker 0 on broken-\w{5}\n", done.out)
    status = seen(
        holdfast, "broken", "to recover",
        lambda v: v["incidents"] and "total" in v["incidents"][0]["seconds"],
    )  # fmt: skip
    assert status["incidents"][0]["rehearsal"] and status["incidents"][0]["culprit_rank"] == 0
    written(tmp_path / "run", "incident 1 resolved: next step after ")
    assert "incident 1" in holdfast("debug", "events", "broken").out
    asked = holdfast.json("debug", "stacks", "broken")
    assert sorted(rank for one in asked["stacks"] for rank in one["ranks"]) == [0, 1, 2, 3], asked

    broke = holdfast("logs", "broken", "--failed")
    assert broke.code == 0 and broke.out and "[rank" not in broke.out, broke.err
    assert re.search(r"generation \d+: ", broke.err)

    wrong = holdfast("debug", "kill-worker", "broken", "--rank", "9")
    assert wrong.code == 2 and "rank: got 9; expected 0 to 3" in wrong.err
    saved = holdfast("checkpoint", "save", "broken")
    assert saved.code == 0 and "goes to storage" in saved.out
    waited = holdfast.json("checkpoint", "save", "broken", "--wait")
    assert f"the state after {waited['step'] + 1} steps is committed" == waited["detail"]
    newest = holdfast.json("checkpoint", "list", "broken")[-1]["step"]
    assert waited["step"] <= newest

    assert holdfast("cancel", "broken").code == 0
    assert command.wait(BOUND_S) == 1
    report = (tmp_path / "run").read_text()
    assert "broken  cancelled after" in report and "outcome: next step after" in report


def test_logs_are_shown_by_rank_and_followed_to_the_end(
    holdfast: HoldfastCli, tmp_path: Path
) -> None:
    command = start(holdfast, tmp_path, example("talks", ENDLESS))
    status = seen(holdfast, "talks", "steps", lambda v: v["step"] >= 2 and v["world_size"] == 4)
    followed = tmp_path / "followed"
    following = holdfast.start(followed, "logs", "talks", "-f")
    ranks = until(
        lambda: re.findall(r"^\[\d\]", holdfast("logs", "talks").out, re.MULTILINE),
        "lines of workers", timeout_s=BOUND_S,
        last=lambda: holdfast("logs", "talks"),
    )  # fmt: skip
    first = holdfast("logs", "talks", "--rank", ranks[0].strip("[]"))
    assert first.code == 0 and first.out and "[rank" not in first.out
    node = status["nodes"][0]["name"]
    agent = holdfast("logs", "talks", "--node", node)
    assert agent.code == 0 and "[rank" not in agent.out
    unknown = holdfast("logs", "talks", "--node", "nope")
    assert unknown.code == 2 and "--node: got nope; expected one of " in unknown.err
    assert node in unknown.err
    assert "0 to 3" in holdfast("logs", "talks", "--rank", "4").err
    of_first = holdfast("logs", "talks", "-g", "1")
    assert of_first.code == 0 and re.match(r"\[\d\] ", of_first.out)
    absent = holdfast("logs", "talks", "-g", "99")
    assert absent.code == 2 and "--generation: got 99; expected one of 1" in absent.err
    until(lambda: "[" in followed.read_text(), "followed lines", timeout_s=BOUND_S)
    holdfast("cancel", "talks")
    assert following.wait(BOUND_S) == 0, followed.read_text()
    command.send_signal(signal.SIGINT)
    command.wait(BOUND_S)
