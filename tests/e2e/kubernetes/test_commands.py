"""`holdfast --kubernetes` at a real API server without nodes: what it reads, writes and reports.

Some tests use the real operator, whose pods stay pending. Others use jobs that seem to have
trained: the test writes their status through the API, with the operator's own code. Training itself
is in test_commands_training.py.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.kubernetes.commands import SCRIPT, HoldfastCli, trained, write_status
from tests.e2e.kubernetes.conftest import fresh
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.rig.process import Server
from tests.e2e.kubernetes.rig.waiting import until
from tests.e2e.ports import free_port

pytestmark = pytest.mark.e2e

AGENTS = "127.0.0.1"


# -- jobs that have trained -------------------------------------------------------------------
def test_a_job_is_described_like_a_local_one(jobs: Kubectl, holdfast: HoldfastCli) -> None:
    jobs.create(SCRIPT)
    write_status(jobs, trained(checkpoint_path="s3://bucket/demo"))
    status = holdfast("status", "demo")
    assert status.code == 0 and status.err == ""
    for part in ("demo  running", "42 of 100 steps", "HSDP: replicate 2 x shard 2", "after 42 s"):
        assert part in status.out
    report = holdfast("status", "demo", "--report")
    for part in ("goodput 90.9%", "2 incidents", "worker 1 hangs", "decision: restart all 4 work"):
        assert part in report.out
    assert f"holdfast checkpoint export demo DIRECTORY --kubernetes -n {jobs.namespace}" in (
        report.out
    )
    assert holdfast.json("status")[0]["num_incidents"] == 2
    assert holdfast("status").out.split("\n")[1].split()[:3] == ["demo", "running", "42/100"]
    write_status(jobs, trained(incidents=[], checkpoint_path="/shared/demo"))
    text = holdfast("status", "demo", "--report").out
    assert "where that path is mounted: holdfast checkpoint export PATH DIRECTORY" in text


def test_incidents_with_expired_events_are_shown_from_the_status(
    jobs: Kubectl, holdfast: HoldfastCli
) -> None:
    jobs.create(SCRIPT)
    write_status(jobs, trained())
    text = holdfast("debug", "events", "demo").out.splitlines()
    assert "status" in text[0] and "incident 1: worker 2 on node-1 was killed" in text[0]
    assert "next step after 0.67 s" in text[1]
    assert "Hang" in text[2] and text[2].endswith(
        "worker 1 hangs; restart all 4 workers from memory"
    )
    assert len(text) == 3, "no incident is shown twice"
    lines = [
        json.loads(line) for line in holdfast("debug", "events", "demo", "--json").out.splitlines()
    ]
    assert [sorted(line) for line in lines] == [["at_ns", "incident"], ["at_ns", "event"]]


def test_the_newest_checkpoint_is_listed_from_the_status(
    jobs: Kubectl, holdfast: HoldfastCli
) -> None:
    jobs.create(SCRIPT)
    assert "no committed checkpoint" in holdfast("checkpoint", "list", "demo").err
    write_status(jobs, trained(checkpoint_path="/checkpoints/demo"))
    assert holdfast("checkpoint", "list", "demo").out.splitlines()[1].split()[:2] == ["40", "1"]
    found = holdfast.json("checkpoint", "list", "demo")
    assert (found[0]["step"], found[0]["path"]) == (39, "/checkpoints/demo")
    verify = holdfast("checkpoint", "verify", "demo")
    assert verify.code == 2 and "a directory of the cluster" in verify.err


def test_a_finished_job_keeps_its_name_until_it_is_deleted(
    jobs: Kubectl, holdfast: HoldfastCli, file: Path
) -> None:
    jobs.create(SCRIPT)
    write_status(jobs, trained(state="failed", reason="no", finished_ns=time.time_ns()))
    again = holdfast("run", file)
    assert again.code == 2
    assert "metadata.name: got demo, which exists in namespace" in again.err
    assert "(failed); expected a name that is free; remove it with `holdfast delete" in again.err
    watched = holdfast("attach", "demo")
    assert watched.code == 1 and "2 incidents" in watched.out
    ended = holdfast("resize", "demo", "1")
    assert ended.code == 2 and "job demo: has failed (" in ended.err
    assert "; nothing to resize" in ended.err
    kept = holdfast("delete", "demo", "--yes", "--keep-checkpoints", "here")
    assert kept.code == 2 and "stay where they are" in kept.err
    assert holdfast("delete", "demo", "--yes").code == 0
    assert jobs.get("trainingjob", "demo") is None


# -- without an operator ----------------------------------------------------------------------
def test_ctrl_c_leaves_the_job_running_and_prints_how_to_reattach(
    jobs: Kubectl, holdfast: HoldfastCli, file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "output"
    command = holdfast.start(output, "run", file)
    jobs.wait("trainingjob", "demo", bool, "to be created")
    write_status(jobs, trained())
    until(lambda: "42 of 100 steps" in output.read_text(), "a line of progress", timeout_s=60,
          last=output.read_text)  # fmt: skip
    command.send_signal(signal.SIGINT)
    assert command.wait(60) == 130
    assert "job demo continues in the cluster. Watch it again with `holdfast attach" in (
        output.read_text()
    )
    assert jobs.get("trainingjob", "demo") is not None
    output = tmp_path / "again"
    command = holdfast.start(output, "run", file)
    until(lambda: "already runs in namespace" in output.read_text(), "the same job", timeout_s=60,
          last=output.read_text)  # fmt: skip
    write_status(jobs, trained(state="succeeded", reason="all steps done", incidents=[]))
    assert command.wait(60) == 0, output.read_text()
    assert "goodput 90.9%" in output.read_text()


def test_watching_continues_after_an_outage_of_the_api_server(
    jobs: Kubectl,
    holdfast: HoldfastCli,
    file: Path,
    tmp_path: Path,
    own_control_plane: ControlPlane,
) -> None:
    output = tmp_path / "output"
    command = holdfast.start(output, "run", file)
    jobs.wait("trainingjob", "demo", bool, "to be created")
    write_status(jobs, trained())
    until(lambda: "42 of 100 steps" in output.read_text(), "a line of progress", timeout_s=60,
          last=output.read_text)  # fmt: skip
    own_control_plane.kill_api_server()
    until(lambda: "trying again" in output.read_text(), "the remark", timeout_s=60,
          last=output.read_text)  # fmt: skip
    own_control_plane.start_api_server()
    until(lambda: "answers again" in output.read_text(), "the way back", timeout_s=60,
          last=output.read_text)  # fmt: skip
    write_status(jobs, trained(state="succeeded", reason="all steps done", incidents=[]))
    assert command.wait(60) == 0, output.read_text()


def test_another_job_of_the_same_name_is_not_touched(
    jobs: Kubectl, holdfast: HoldfastCli, file: Path
) -> None:
    jobs.create({**SCRIPT, "spec": {**SCRIPT["spec"], "nodes": {"max": 7}}})
    result = holdfast("run", file)
    assert result.code == 2 and "watch it with `holdfast attach demo" in result.err
    found = jobs.get("trainingjob", "demo")
    assert found is not None and found["spec"]["nodes"]["max"] == 7


def test_deleting_a_job_ends_commands_that_watch_it(
    jobs: Kubectl, holdfast: HoldfastCli, file: Path, tmp_path: Path
) -> None:
    command = holdfast.start(tmp_path / "output", "run", file)
    jobs.wait("trainingjob", "demo", bool, "to be created")
    jobs.run("delete", "trainingjob", "demo")
    assert command.wait(60) == 1
    assert "job demo: was deleted" in (tmp_path / "output").read_text()


def test_an_unanswered_fault_injection_is_withdrawn(jobs: Kubectl, holdfast: HoldfastCli) -> None:
    jobs.create(SCRIPT)
    write_status(jobs, trained())
    result = holdfast("debug", "kill-worker", "demo", "--rank", "1")
    assert result.code == 1
    assert "chaos: no operator accepted the request within 20 s, so it was withdrawn" in result.err
    found = jobs.get("trainingjob", "demo")
    assert found is not None and "annotations" not in found["metadata"]


def test_a_request_that_waits_for_an_operator_is_reported(
    jobs: Kubectl, holdfast: HoldfastCli
) -> None:
    jobs.create(SCRIPT)
    document = jobs.get("trainingjob", "demo")
    assert document is not None
    until(lambda: holdfast("status", "demo").err, "the remark", timeout_s=60)
    assert "the operator has not looked at this job yet" in holdfast("status", "demo").err
    suspended = holdfast("suspend", "demo")
    assert suspended.code == 0 and "as soon as an operator runs again" in suspended.out


# -- with the operator ------------------------------------------------------------------------
@pytest.fixture(scope="module")
def attended(
    plane: object, own_control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kubectl]:
    """A namespace with its own operator."""
    plane = own_control_plane
    agents, metrics = free_port(), free_port()
    for kubectl in fresh(plane.kubectl()):
        operator = Server(
            plane.run,
            f"operator-{kubectl.namespace}",
            [
                *(sys.executable, "-m", "holdfast.orchestrator.cli.main", "operator"),
                *("--namespace", kubectl.namespace, "--lease-namespace", kubectl.namespace),
                *("--agent-endpoint", f"{AGENTS}:{agents}", "--listen", f"{AGENTS}:{agents}"),
                *("--metrics-address", AGENTS, "--metrics-port", str(metrics)),
                *("--checkpoint-root", str(tmp_path_factory.mktemp("checkpoints"))),
                *("--log-format", "text"),
            ],
            environment={"KUBECONFIG": str(plane.kubeconfig), "PYTHONPATH": str(Path.cwd())},
        )
        operator.start()
        yield kubectl
        operator.kill()


def test_every_request_reaches_the_operator_and_is_answered(
    attended: Kubectl, tmp_path: Path
) -> None:
    holdfast, output = HoldfastCli(attended), tmp_path / "output"
    name = "requests"
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump({**SCRIPT, "metadata": {"name": name}, "spec": {
        **SCRIPT["spec"], "checkpoint": {}}}))  # fmt: skip
    command = holdfast.start(output, "run", path)
    attended.wait("trainingjob", name, lambda d: bool(d and d.get("status")), "to be taken up",
                  timeout_s=120)  # fmt: skip
    until(lambda: len(holdfast.json("status", name)["nodes"]) == 2, "two pods", timeout_s=60)
    assert "joining" in holdfast("status", name).out

    asked = holdfast("debug", "stacks", name)
    assert asked.code == 2 and "expected one with a running pod" in asked.err
    saved = holdfast("checkpoint", "save", name)
    assert saved.code == 2 and "expected a running job" in saved.err
    assert "Refused" in holdfast("debug", "events", name).out
    asked = holdfast("resume", name)
    assert asked.code == 2 and "got pending; expected a suspended job" in asked.err

    assert holdfast("resize", name, "1").out == f"job {name}: from 2 to 1 nodes\n"
    assert holdfast("suspend", name).code == 0
    until(lambda: holdfast.json("status", name)["state"] == "suspended", "to hold", timeout_s=60)
    assert holdfast("resume", name).out == f"job {name}: asking for nodes\n"
    until(lambda: holdfast.json("status", name)["state"] == "pending", "to go on", timeout_s=60)
    assert holdfast("cancel", name).out == f"job {name}: stopping all workers\n"
    assert command.wait(60) == 1, output.read_text()
    text = output.read_text()
    assert f"{name}  cancelled" in text and "suspended" in text and "cancel requested" in text
    assert "pods" in holdfast("logs", name).err
    assert holdfast("delete", name, "--yes").code == 0
