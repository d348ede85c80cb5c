"""Commands over http:// read what the controller publishes, or run in the cluster."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from holdfast.orchestrator.backends.ray import names
from holdfast.orchestrator.backends.ray.state_api import ControllerProcess
from holdfast.orchestrator.cli.log_files import older_part
from holdfast.orchestrator.cli.targets.ray.dashboard import NOT_YET, OLD_S, DashboardTarget
from holdfast.orchestrator.cli.targets.remote_job import LogSelector
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.hosts.ray.host import RayHostTiming
from holdfast.orchestrator.hosts.ray.view_file import ViewFile
from holdfast.orchestrator.runtime.observe.view import JobView

ADDRESS = "http://head:8265"
NODE = "a" * 56
JOB_ID = "0123456789"


class FakeStateApi:
    """The log directory of one Ray node, and at most one controller."""

    def __init__(self, logs: Path, pid: int | None) -> None:
        self.logs, self.pid = logs, pid

    def controller(self, job: str) -> ControllerProcess | None:
        return None if self.pid is None else ControllerProcess(NODE, self.pid)

    def ray_nodes(self) -> list[str]:
        return [NODE]

    def log_files(self, ray_node: str, glob: str) -> list[str]:
        return [str(path.relative_to(self.logs)) for path in self.logs.glob(glob)]

    def log_file(self, ray_node: str, name: str) -> bytes:
        assert ray_node == NODE
        return (self.logs / name).read_bytes()


def target(logs: Path, pid: int | None, ran: list[str]) -> DashboardTarget:
    def run_inside(address: str, why: str) -> int:
        ran.extend([address, why] if why else [address])
        return 3

    def open_api(address: str) -> Any:
        assert address == ADDRESS
        return FakeStateApi(logs, pid)

    return DashboardTarget(ADDRESS, open_api=open_api, run_inside=run_inside)


def published(logs: Path, *, ago_s: float = 0.0, loss: float = 0.5) -> JobView:
    view = JobView(
        name="a", job_id=JOB_ID, state="running", step=7, loss=loss, now_ns=time.time_ns()
    )
    view.now_ns -= round(ago_s * 1e9)
    assert ViewFile(logs, "a", 2.0).write(view) >= 2.0
    return view


def test_a_running_job_is_shown_without_a_ray_job(tmp_path: Path) -> None:
    view, ran = published(tmp_path), list[str]()
    found = target(tmp_path, os.getpid(), ran).find("a")
    assert found.view() == view and not ran
    assert found.remarks(view) == []
    for act in (
        lambda: found.request("suspend"),
        lambda: found.print_events(follow=False, as_json=False),
        lambda: found.again(None),
    ):
        with pytest.raises(typer.Exit):
            act()
    assert ran == [ADDRESS] * 3, "what changes a job is a Ray job"


def test_logs_of_every_generation_are_read_from_the_dashboard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    view, ran = published(tmp_path), list[str]()
    root = tmp_path / names.logs("a", view.job_id)
    for generation, rank in ((1, 0), (2, 0), (2, 1)):
        path = root / f"gen-{generation:04}" / f"rank-{rank:05}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"line of {generation} and {rank}\n")
    older_part(root / "gen-0002" / "rank-00001.log").write_text("its older part\n")
    found = target(tmp_path, os.getpid(), ran).find("a")
    found.print_logs(LogSelector(), follow=False)
    first, second = (
        "[0] line of 1 and 0\n",
        "[0] line of 2 and 0\n[1] its older part\n[1] line of 2 and 1\n",
    )
    heads = ("== generation 1 ==\n", "== generation 2 ==\n")
    assert capsys.readouterr().out == heads[0] + first + heads[1] + second
    found.print_logs(LogSelector(rank=1), follow=False)
    assert capsys.readouterr().out == "its older part\nline of 2 and 1\n" and not ran
    with pytest.raises(UserError, match="--rank: got 7; expected one of 0, 1"):
        found.print_logs(LogSelector(rank=7), follow=False)
    with pytest.raises(typer.Exit):
        found.print_logs(LogSelector(), follow=True)
    assert ran == [ADDRESS]


@pytest.mark.parametrize("case", ["no file", "another process", "ended", "old", "no view"])
def test_in_doubt_the_command_runs_in_the_cluster(tmp_path: Path, case: str) -> None:
    ran, pid = list[str](), os.getpid()
    if case != "no file":
        published(tmp_path, ago_s=2 * OLD_S if case == "old" else 0.0)
    if case == "no view":
        (tmp_path / names.view_file("a")).write_text(json.dumps({"pid": pid, "view": {"step": {}}}))
    of_actor = {"another process": pid + 1, "ended": None}.get(case, pid)
    with pytest.raises(typer.Exit) as ended:
        target(tmp_path, of_actor, ran).find("a")
    assert ran[0] == ADDRESS and ended.value.exit_code == 3
    why = {
        "no file": "the state of job a cannot be read through the dashboard (",
        "another process": NOT_YET,
        "no view": "the state of job a cannot be read through the dashboard (",
        "old": "the published state of job a is 12",
    }
    assert len(ran) == 1 + (case in why)
    assert case not in why or ran[1].startswith(why[case])


def test_the_first_view_of_a_controller_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view, ran = published(tmp_path), list[str]()
    file = tmp_path / names.view_file("a")
    of_now = file.read_text()
    file.write_text(json.dumps(json.loads(of_now) | {"pid": os.getpid() + 1}))  # the one before
    monkeypatch.setattr(time, "sleep", lambda seconds: file.write_text(of_now))
    assert target(tmp_path, os.getpid(), ran).find("a").view() == view and not ran


def test_a_loss_that_is_no_number_is_published(tmp_path: Path) -> None:
    published(tmp_path, loss=float("nan"))
    loss = target(tmp_path, os.getpid(), []).find("a").view().loss
    assert loss is not None and loss != loss


def test_the_list_of_all_jobs_and_what_reads_storage_run_in_the_cluster(tmp_path: Path) -> None:
    ran = list[str]()
    with pytest.raises(typer.Exit):
        target(tmp_path, os.getpid(), ran).views()
    assert ran == [ADDRESS]


def test_a_full_disk_does_not_disturb_the_controller(tmp_path: Path) -> None:
    file = ViewFile(tmp_path / "missing", "a", 2.0)
    assert file.write(JobView(name="a")) >= 2.0
    file.remove()


def test_a_view_of_any_size_is_written_before_readers_call_it_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 0.1, 0.0, 5.0])
    monkeypatch.setattr(time, "thread_time", lambda: next(times))
    file = ViewFile(tmp_path, "a", 2.0)
    assert file.write(JobView(name="a")) == pytest.approx(10.0)
    assert file.write(JobView(name="a")) + RayHostTiming().view_refresh_s < OLD_S
