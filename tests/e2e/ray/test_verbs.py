"""Every command on a job of a Ray cluster, with the head's address, over http:// and ray://."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from urllib.request import HTTPCookieProcessor, Request, build_opener

import pytest

from holdfast.orchestrator.backends.ray.names import view_file
from holdfast.orchestrator.backends.ray.state_api import StateApi
from holdfast.orchestrator.protocol.manifest import MANIFEST_NAME

from ..ports import free_port
from . import cluster_rig
from .jobs import BOUND_S, Job, holdfast, says, started

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]
NAME = "worked-on"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    place = tmp_path_factory.mktemp("ray")
    tier = {"path": str(place / "tier"), "storage": {"everySteps": 20}}
    job = Job(place, NAME, 1_000_000, checkpoint=tier)
    try:
        job.running()
        yield job
    finally:
        job.end()


def ask(job: Job, *words: str, address: str = "") -> str:
    done = holdfast(*words, "--ray", address or job.cluster.address)
    assert done.returncode == 0, done.stderr
    assert "as a Ray job instead" not in done.stderr, done.stderr
    return done.stdout


def test_a_job_is_resized_while_it_trains(job: Job) -> None:
    assert "from 2 to 1 nodes" in ask(job, "resize", NAME, "1")
    assert job.running(nodes=1).world_size == 2
    assert "from 1 to 2 nodes" in ask(job, "resize", NAME, "2")
    assert job.running(nodes=2).world_size == 4


def use_checkpoints(job: Job, address: str, place: Path) -> None:
    """Save, list, verify and export a checkpoint."""
    job.running()
    command = functools.partial(ask, job, address=address)
    step = json.loads(command("checkpoint", "save", NAME, "--json"))["step"]
    job.until(lambda view: any(one.step >= step for one in view.checkpoints))
    listed = json.loads(command("checkpoint", "list", NAME, "--json"))
    assert listed[-1]["step"] >= step and listed[-1]["mesh"]
    assert "is intact" in command("checkpoint", "verify", NAME)
    assert "model.safetensors" in command("checkpoint", "export", NAME, str(place / "model"))
    assert (place / "model" / "model.safetensors").stat().st_size > 0


@pytest.mark.parametrize("http", [False, True], ids=["address", "http"])
def test_checkpoints_are_saved_listed_verified_and_exported(
    job: Job, tmp_path: Path, http: bool
) -> None:
    use_checkpoints(job, job.cluster.dashboard if http else job.cluster.address, tmp_path)


@pytest.mark.parametrize("outside", [False, True], ids=["address", "client"])
def test_the_page_shows_a_running_job_and_saves_a_checkpoint(
    job: Job, tmp_path: Path, outside: bool
) -> None:
    job.running()
    address = job.cluster.address
    with client_server(address, tmp_path) if outside else nullcontext(address) as address:
        command = started("ui", "--ray", address)
        (url,) = re.findall(r"http://\S+", says(command, "http://"))
        base = url.partition("/?")[0]
        browser = build_opener(HTTPCookieProcessor())
        row = browser.open(url, timeout=BOUND_S).read().decode()
        assert NAME in row and "running" in row and address in row
        html = browser.open(f"{base}/jobs/{NAME}", timeout=BOUND_S).read().decode()
        assert "4 running" in html and "tokens/s" in html
        commits = job.view().commits
        save = Request(f"{base}/jobs/{NAME}/checkpoint", b"", {"Origin": base})
        browser.open(save, timeout=BOUND_S).close()
        job.until(lambda view: view.commits > commits)
        command.terminate()
        assert command.wait(BOUND_S) in (0, -signal.SIGTERM)


def test_stacks_and_a_profile_come_from_the_nodes(job: Job, tmp_path: Path) -> None:
    job.running()
    found = json.loads(ask(job, "debug", "stacks", NAME, "--json"))
    ranks = sorted(rank for entry in found["stacks"] for rank in entry["ranks"])
    assert ranks == list(range(found["world_size"])), found
    flames = tmp_path / "flames.svg"
    ask(job, "debug", "profile", NAME, "--seconds", "1", "--idle", "-o", str(flames))
    assert "<svg" in flames.read_text()


def test_logs_are_followed_while_they_are_written(job: Job) -> None:
    job.running()
    follower = started("logs", NAME, "-f", "--rank", "0", "--ray", job.cluster.address)
    try:
        step = job.view().step
        says(follower, f"step {step + 3} ")
    finally:
        follower.kill()
        follower.wait()


def test_a_command_that_watches_shows_what_rank_0_prints(job: Job) -> None:
    job.running()
    watcher = started("attach", NAME, "--logs", "--ray", job.cluster.address)
    try:
        says(watcher, r"\[rank 0\] step ")
    finally:
        watcher.kill()
        watcher.wait()


def test_reading_logs_of_other_machines_does_not_fill_rays_list_of_tasks(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All Ray nodes are on this machine; the reader pretends to be on another one."""
    import ray
    from ray.util.state import list_tasks

    from holdfast.orchestrator.backends.ray import remote_files

    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    offsets: dict[str, int] = {}
    everything = remote_files.LogFilter(None, None, None)
    job_id = job.running().job_id
    assert remote_files.fetch_logs(NAME, job_id, everything, offsets, tmp_path) and offsets
    later = ray.remote(num_cpus=0)(lambda: 0).options(name="later")  # Ray lists both at once
    assert ray.get(later.remote(), timeout=BOUND_S) == 0
    names, give_up = set[str](), time.monotonic() + BOUND_S
    while "later" not in names:
        assert time.monotonic() < give_up
        names = {task.name for task in list_tasks(address=job.cluster.dashboard, limit=10_000)}
        time.sleep(0.5)  # Ray collects task events once a second
    assert "_read" not in names


def test_ending_a_command_that_only_watches_does_not_end_the_job(job: Job) -> None:
    job.running()
    watcher = started("attach", NAME, "--ray", job.cluster.address)
    says(watcher, " steps")
    watcher.send_signal(signal.SIGTERM)
    said, _ = watcher.communicate(timeout=BOUND_S)
    assert watcher.returncode == 130 and f"attach {NAME}" in said, said
    step = job.view().step
    assert job.until(lambda view: view.step > step + 2).state == "running"


def test_sigterm_ends_logs_f_without_output_and_files(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "in"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    follower = started("logs", NAME, "-f", "--rank", "0", "--ray", job.cluster.address)
    says(follower, "step ")
    assert [one.name[:13] for one in place.glob("holdfast-*")] == ["holdfast-logs"]
    follower.terminate()
    said, _ = follower.communicate(timeout=BOUND_S)
    assert follower.returncode == -signal.SIGTERM and "SIGTERM" not in said
    assert not list(place.glob("holdfast-*")), "its copy of the logs"


def test_inside_the_cluster_auto_is_the_address(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", job.cluster.address)  # as Ray sets it for its jobs
    assert NAME in ask(job, "status", address="auto")


def commands(job: Job) -> set[str]:
    """Ray jobs of commands."""
    from ray.job_submission import JobSubmissionClient

    listed = JobSubmissionClient(job.cluster.dashboard).list_jobs()
    names = {one.submission_id or "" for one in listed}
    return {name for name in names if name.startswith("holdfast_command_")}


def test_over_http_a_command_prints_the_same_and_its_ray_job_is_deleted(job: Job) -> None:
    dashboard = job.cluster.dashboard
    shown = json.loads(ask(job, "status", "--json", address=dashboard))
    assert NAME in [one["name"] for one in shown]
    first, give_up = commands(job), time.monotonic() + BOUND_S
    assert first
    while first & commands(job) and time.monotonic() < give_up:  # later commands delete it
        done = holdfast("status", "unknown", "--ray", dashboard)
        assert done.returncode == 2 and done.stdout == ""
        assert f"holdfast status --ray {dashboard}" in done.stderr
    assert not first & commands(job)


def test_over_http_a_running_job_is_shown_without_a_ray_job(job: Job) -> None:
    dashboard, now_running = job.cluster.dashboard, job.running()
    api = StateApi(dashboard)
    controller = api.controller(NAME)
    assert controller is not None
    while True:  # it is published once a second
        published = json.loads(api.log_file(controller.ray_node, view_file(NAME)))
        assert published["pid"] == controller.pid
        if published["view"]["step"] >= now_running.step:
            break
    before = commands(job)
    shown = json.loads(ask(job, "status", NAME, "--json", address=dashboard))
    assert shown["step"] >= now_running.step and shown["job_id"] == now_running.job_id
    assert "goodput" in ask(job, "status", NAME, "--report", address=dashboard)
    assert "parameters" in ask(job, "logs", NAME, "--rank", "0", address=dashboard)
    assert commands(job) <= before, "no Ray job was started"


def test_over_http_a_negative_answer_is_on_stdout_and_an_error_on_stderr(
    job: Job, tmp_path: Path
) -> None:
    job.running()
    job.until(lambda view: bool(view.checkpoints))
    newest = max((job.file.parent / "tier").glob(f"step-*/{MANIFEST_NAME}")).parent
    copy = tmp_path / "tier"
    shutil.copytree(newest, copy / newest.name)
    shard = max((copy / newest.name).glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 255
    shard.write_bytes(data)
    words = ("checkpoint", "verify", str(copy), "--json", "--ray", job.cluster.dashboard)
    done = holdfast(*words)
    assert done.returncode == 1
    assert json.loads(done.stdout)["problems"] and not done.stderr
    missing = holdfast("checkpoint", "verify", str(tmp_path / "none"), *words[3:])
    assert missing.returncode == 2
    assert missing.stderr.startswith("error: ") and not missing.stdout


def test_over_http_commands_that_need_a_terminal_or_a_local_directory_are_refused(job: Job) -> None:
    dashboard = job.cluster.dashboard
    done = holdfast("delete", NAME, "--ray", dashboard)
    assert done.returncode == 2 and "--yes: got nothing" in done.stderr
    done = holdfast("debug", "profile", NAME, "--ray", dashboard)
    assert done.returncode == 2 and "which would write its file in the cluster" in done.stderr
    done = holdfast("ui", "--ray", dashboard)
    assert done.returncode == 2 and f"{dashboard} with `ui`, whose page" in done.stderr
    done = holdfast("again", NAME, "--ray", dashboard)
    assert done.returncode == 2 and f"{dashboard} with `again`; expected auto" in done.stderr
    done = holdfast("checkpoint", "export", NAME, "model", "--ray", dashboard)
    assert done.returncode == 2 and "DESTINATION: got model; expected an absolute" in done.stderr


def test_over_http_a_fault_is_injected_into_an_existing_rank(job: Job) -> None:
    dashboard, before = job.cluster.dashboard, job.running().num_incidents
    kill = ("debug", "kill-worker", NAME, "--rank")
    done = holdfast(*kill, "9", "--ray", dashboard)
    assert done.returncode == 2 and done.stdout == ""
    assert "rank: got 9; expected" in done.stderr
    assert "worker 1" in ask(job, *kill, "1", address=dashboard)
    assert job.incident_after(before).rehearsal
    assert job.running().num_incidents == before + 1


def test_over_http_a_request_has_the_name_of_the_user_who_typed_it(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is not the cluster user's, who runs the command."""
    dashboard = job.cluster.dashboard
    monkeypatch.setenv("LOGNAME", "ada; $(exit 1)\x1b[2J")
    job.running()
    assert "from 2 to 1 nodes" in ask(job, "resize", NAME, "1", address=dashboard)
    assert job.running(nodes=1).world_size == 2
    assert "from 1 to 2 nodes" in ask(job, "resize", NAME, "2", address=dashboard)
    assert job.running(nodes=2).world_size == 4
    assert "the newest state goes to storage" in ask(job, "suspend", NAME, address=dashboard)
    job.until(lambda view: view.state == "suspended")
    assert "asking for nodes" in ask(job, "resume", NAME, address=dashboard)
    job.running()
    events = [json.loads(line) for line in ask(job, "debug", "events", NAME, "--json").splitlines()]
    asked = [one["event"]["by"] for one in events if one.get("event", {}).get("by")]
    assert asked[-4:] == ["ada; $(exit 1)[2J"] * 4


def test_events_are_followed_up_to_the_jobs_end_and_a_job_is_cancelled_over_http(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path, "called-off", 1_000_000)
    try:
        job.until(lambda view: view.state in ("pending", "running"))
        follower = started("debug", "events", job.name, "-f", "--ray", job.cluster.address)
        says(follower, r"job [0-9a-f]+ submitted")
        done = ask(job, "cancel", job.name, address=job.cluster.dashboard)
        assert "stopping all workers" in done
        says(follower, "cancel requested by ")
        follower.communicate(timeout=BOUND_S)
        assert follower.returncode == 0
        assert job.until(lambda view: view.state == "cancelled").reason
        assert job.command.wait(BOUND_S) == 1
    finally:
        job.end()


def test_the_same_commands_work_through_a_ray_client(job: Job, tmp_path: Path) -> None:
    with client_server(job.cluster.address, tmp_path) as address:
        command = functools.partial(ask, job, address=address)
        assert json.loads(command("status", NAME, "--json"))["name"] == NAME
        assert "parameters" in command("logs", NAME, "--rank", "0")
        assert "launch" in command("debug", "events", NAME)
        assert "goodput" in command("status", NAME, "--report")
        before = job.running().num_incidents
        assert "worker 1" in command("debug", "kill-worker", NAME, "--rank", "1")
        assert job.incident_after(before).rehearsal
        job.running()
        step = json.loads(command("checkpoint", "save", NAME, "--json"))["step"]
        job.until(lambda view: any(one.step >= step for one in view.checkpoints))
        assert json.loads(command("checkpoint", "list", NAME, "--json"))[-1]["step"] >= step
        assert "the newest state goes to storage" in command("suspend", NAME)
        job.until(lambda view: view.state == "suspended")
        ask(job, "resume", NAME)
        job.running(nodes=2)


def test_a_ray_client_that_is_not_served_tries_again_and_reports_why(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy head gives up on the process that it starts for the client; this one at once."""
    monkeypatch.setenv("RAY_CLIENT_RECONNECT_GRACE_PERIOD", "1")
    with client_server(job.cluster.address, tmp_path, patience_s=0) as address:
        done = holdfast("status", NAME, "--ray", address)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.count("trying again") == 1
    assert f"--ray: got {address} (Proxy failed to Connect to backend!" in done.stderr
    assert "GRPC_ENABLE_FORK_SUPPORT=0 ray start --head" in done.stderr


@contextmanager
def client_server(cluster: str, log: Path, patience_s: int = int(BOUND_S)) -> Iterator[str]:
    """The address of a server for Ray clients, as a head runs it."""
    port = free_port()
    patience = {"RAY_CLIENT_SERVER_CHECK_CHANNEL_TIMEOUT_S": str(patience_s)}
    forks = {"GRPC_ENABLE_FORK_SUPPORT": "0"}  # else its processes may crash: Ray's issue 63202
    with (log / "client.log").open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "ray.util.client.server", "--mode", "proxy",
             "--address", cluster, "--host", "127.0.0.1", "--port", str(port)],
            stdout=output, stderr=output, start_new_session=True,
            env=os.environ | patience | forks,
        )  # fmt: skip
    try:
        _until(lambda: listens(port), "the Ray client's server does not listen")
        yield f"ray://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


def _until(true: Callable[[], object], otherwise: str) -> None:
    give_up = time.monotonic() + BOUND_S
    while not true():
        assert time.monotonic() < give_up, otherwise
        time.sleep(0.05)


def test_a_deleted_job_is_gone_and_its_checkpoints_stay(tmp_path: Path) -> None:
    tier = {"path": str(tmp_path / "tier"), "storage": {"everySteps": 5}}
    job = Job(tmp_path, "short-lived", 12, checkpoint=tier)
    try:
        assert job.command.wait(BOUND_S) == 0, job.output.read_text()
        assert "stay in" in ask(job, "delete", "short-lived", "--yes")
        done = holdfast("status", "short-lived", "--ray", cluster_rig.shared().address)
        assert done.returncode == 2 and "job: got short-lived" in done.stderr
        assert "is intact" in ask(job, "checkpoint", "verify", str(tmp_path / "tier"))
    finally:
        job.end()
