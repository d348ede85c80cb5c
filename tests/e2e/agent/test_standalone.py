"""An agent as a pod runs it (`-P -m holdfast.workers.agent`): TLS, output to stdout, SIGTERM."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.orchestrator.protocol import cgroup, tls
from holdfast.orchestrator.protocol import messages as m
from holdfast.orchestrator.protocol.facts import Membership, WorkerSeat
from holdfast.orchestrator.protocol.manifest import directory_name, shard_file_name
from holdfast.orchestrator.protocol.mesh import Mesh
from holdfast.workers.agent.pool import preload
from tests.unit.runtime.certificates import make

from ..storage.server import BUCKET, S3
from .agent_rig import PATIENCE_S, TOKEN, FakeController, children_of, watched

pytestmark = pytest.mark.e2e

NAME = "uid.jobs.holdfast.dev"
SCRIPT = """
import os, getpass
from pathlib import Path
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
print("here", os.environ["RANK"], getpass.getuser(), flush=True)
print("cache", default_cache_dir(), os.access(Path.home(), os.W_OK), flush=True)
import time
if Path("stage").exists():
    import mmap
    from holdfast.workers import worker_protocol as wire, worker_transport as transport
    link, seat = transport.attached.link, transport.attached.assign.seat
    link.setblocking(True)
    transport.send(link, wire.BufferRequest(num_bytes=1_000_000))
    message, fd = transport.receive(link)
    mmap.mmap(fd, 1_000_000)[:] = bytes([seat.shard]) * 1_000_000
    transport.send(link, wire.Staged(buffer=message.buffer, step=7, num_bytes=1_000_000))
if Path("eat").exists() and os.environ["RANK"] == "1":
    eaten = [bytearray(2**28) for _ in range(16)]
while True:
    time.sleep(1000)
"""


class Pod:
    """One agent process, its own session and a controller of its own."""

    def __init__(self, directory: Path, checkpoint_path: str = "", **spec: Any) -> None:
        self.directory = directory
        (directory / "token").write_text(TOKEN)
        (directory / "train.py").write_text(SCRIPT)
        files = make(directory / "tls", NAME)
        document = {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "test"},
            "spec": {
                "entrypoint": {"script": "train.py"},
                "nodes": {"min": 1, "max": 1},
                "workersPerNode": 2,
                "resources": {"gpu": 0},
                **spec,
            },
        }
        welcome = m.Welcome(
            spec=document,
            spec_directory=str(directory),
            checkpoint_path=checkpoint_path or str(directory / "checkpoints"),
            log_directory="-",
            heartbeat_interval_s=0.2,
        )
        self.controller = FakeController(directory, welcome, tls.server_context(*files))
        self.controller.open()
        self.process: subprocess.Popen[str]

    def start(
        self, *more: str, wrapper: tuple[str, ...] = (), environment: dict[str, str] | None = None
    ) -> None:
        address, port = self.controller.address
        self.process = subprocess.Popen(
            [
                *wrapper, sys.executable, "-P", "-m", "holdfast.workers.agent",
                "--job", "ns/test", "--node", "pod-1", "--slots", "2",
                "--token-file", str(self.directory / "token"),
                # The first refuses, like a replica of the operator that is not the leader.
                "--endpoint", f"{address}:1,{address}:{port}",
                "--tls", str(self.directory / "tls"), "--tls-name", NAME, *more,
            ],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), **(environment or {})},
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )  # fmt: skip

    def launch(self, generation: int = 1) -> None:
        membership = Membership(
            generation=generation,
            mesh=Mesh(shard=2),
            num_nodes=1,
            workers_per_node=2,
            master_address="127.0.0.1",
            master_port=1,
            restart_count=0,
        )
        seats = tuple(WorkerSeat(rank, rank, rank, True) for rank in range(2))
        launch = m.LaunchWorkers(
            action_id=10 * generation, membership=membership, node_rank=0, seats=seats
        )
        self.controller.send("pod-1", launch)
        self.controller.wait(m.Launched, "pod-1", lambda x: x.action_id == 10 * generation)

    def until_printed(self, *patterns: str) -> str:
        """The output until all of these patterns have been printed."""
        assert self.process.stdout is not None
        text = ""
        while not all(re.search(pattern, text, re.M) for pattern in patterns):
            ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
            part = os.read(self.process.stdout.fileno(), 65536).decode() if ready else ""
            assert part, f"{patterns} were not printed:\n{text}"
            text += part
        return text

    def terminate(self) -> None:
        os.kill(self.process.pid, signal.SIGTERM)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.controller.close()


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A control group below our own. Skips if it cannot be created."""
    ours = cgroup.find("memory")
    if ours is None:
        pytest.skip("no memory controller is mounted here")
    group = ours.directory / f"holdfast-test-{os.getpid()}"
    name = "memory.max" if ours.version == 2 else "memory.limit_in_bytes"
    try:
        group.mkdir()
        (group / name).write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"a control group with a limit cannot be made here: {error}")
    try:
        yield group
    finally:
        group.rmdir()


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    pod = Pod(tmp_path)
    yield pod
    pod.end()


def test_a_drained_pod_sends_its_address_and_machine_and_ends_with_code_0(pod: Pod) -> None:
    pod.start("--grace", "20", environment={"POD_IP": "10.1.2.3", "NODE_NAME": "machine-7"})
    hello = pod.controller.wait(m.Hello, "pod-1")
    assert (hello.job, hello.token) == ("ns/test", TOKEN)
    facts = hello.joined.facts
    assert (facts.address, facts.failure_domain) == ("10.1.2.3", "machine-7")
    pod.launch()
    pod.until_printed(r"^\[rank 0, gen 1\] here 0", r"^\[rank 1, gen 1\] here 1")
    pod.terminate()
    notice = pod.controller.wait(m.PreemptionNoticed, "pod-1")
    assert 0 < notice.grace_s < 20
    pod.controller.send("pod-1", m.StopWorkers(action_id=2, generation=1))
    pod.controller.wait(m.GroupStopped, "pod-1")
    pod.controller.send("pod-1", m.Shutdown(detail="free to be taken away"))
    assert pod.process.wait(PATIENCE_S) == 0
    assert "free to be taken away" in pod.until_printed("ends: ")


def test_modules_beside_the_script_are_not_imported_by_the_agent_or_a_new_forkserver(
    pod: Pod,
) -> None:
    for name in ("random", "queue", "msgspec"):
        (pod.directory / f"{name}.py").write_text("raise SystemExit(3)")
    unready = dict.fromkeys(preload.SINGLE_THREADED, "")  # so that the agent restarts itself
    pod.start(environment=unready)
    pod.controller.wait(m.Hello, "pod-1")
    pod.launch()
    pod.until_printed(r"here 0", r"here 1")
    (server,) = children_of(pod.process.pid)
    os.kill(server, signal.SIGKILL)
    for rank in range(2):
        pod.controller.wait(m.WorkerExited, "pod-1", lambda x, k=rank: x.exit.rank == k)
    pod.controller.send("pod-1", m.StopWorkers(action_id=2, generation=1))
    pod.controller.wait(m.GroupStopped, "pod-1")
    pod.launch(generation=2)
    pod.until_printed(r"here 0", r"here 1")


def test_a_pod_that_gets_no_shutdown_ends_within_its_grace(pod: Pod) -> None:
    pod.start("--grace", "2")
    pod.controller.wait(m.Hello, "pod-1")
    pod.launch()
    pod.until_printed(r"here 0", r"here 1")
    pod.terminate()
    pod.controller.wait(m.PreemptionNoticed, "pod-1")
    assert pod.process.wait(PATIENCE_S) == 0
    assert "grace period of 2 s is over" in pod.until_printed("ends: ")


def test_a_pod_that_never_had_a_controller_ends_at_once(pod: Pod) -> None:
    pod.controller.close()
    pod.start()
    pod.until_printed("no controller yet: .*refused")
    pod.terminate()
    assert pod.process.wait(PATIENCE_S) == 0


def test_a_pod_whose_controller_is_gone_writes_its_staged_state_and_ends_in_time(pod: Pod) -> None:
    (pod.directory / "stage").touch()
    pod.start("--grace", "6")
    pod.controller.wait(m.Hello, "pod-1")
    pod.launch()
    pod.controller.wait(m.Heartbeat, "pod-1", lambda beat: beat.staged_step == 7)
    pod.controller.close()
    pod.until_printed("the controller has closed the connection|the connection broke")
    pod.terminate()
    assert pod.process.wait(PATIENCE_S) == 0
    directory = pod.directory / "checkpoints" / directory_name(7, 1)
    for shard in range(2):
        data = (directory / shard_file_name(shard, 2)).read_bytes()
        assert data == bytes([shard]) * 1_000_000


def test_the_store_is_reached_with_the_variables_of_the_spec(tmp_path: Path) -> None:
    """A pod is started without spec.env; its agent gets it with Welcome."""
    server = S3()
    pod = Pod(tmp_path, f"s3://{BUCKET}/job", env=server.environment)
    try:
        (pod.directory / "stage").touch()
        pod.start()
        pod.controller.wait(m.Hello, "pod-1")
        pod.launch()
        pod.controller.wait(m.Heartbeat, "pod-1", lambda beat: beat.staged_step == 7)
        pod.controller.send("pod-1", m.Persist(action_id=3, generation=1, step=7))
        for shard in range(2):
            pod.controller.wait(m.ShardPersisted, "pod-1", lambda p, k=shard: p.shard.shard == k)
        assert server.steps("job") == [directory_name(7, 1)]
    finally:
        pod.end()
        server.kill()


def test_a_worker_killed_for_lack_of_memory_is_distinguished_from_one_killed_otherwise(
    pod: Pod,
) -> None:
    limit_bytes = 3 * 2**30
    with memory_group(limit_bytes) as group:
        enter = ("/bin/sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "enter")
        pod.start(wrapper=enter)
        hello = pod.controller.wait(m.Hello, "pod-1")
        assert hello.joined.facts.memory_bytes == limit_bytes
        (pod.directory / "eat").touch()
        pod.launch()
        eaten = pod.controller.wait(m.WorkerExited, "pod-1").exit
        assert (eaten.rank, eaten.signal, eaten.out_of_memory) == (1, signal.SIGKILL, True)
        pod.controller.send("pod-1", m.Chaos(kind="kill-worker", rank=0))
        killed = pod.controller.wait(m.WorkerExited, "pod-1", lambda x: x.exit.rank == 0).exit
        assert (killed.signal, killed.out_of_memory) == (signal.SIGKILL, False)
        left = [int(pid) for pid in (group / "cgroup.procs").read_text().split()]
        with watched(left) as gone:
            pod.end()
            gone()


UID = "65532"
AS_UID = (
    "setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups",
    # To read this checkout in any directory.
    "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search",
)  # fmt: skip


READ_ONLY = (
    "unshare", "--mount", "/bin/sh", "-c",
    "mount --make-rprivate / && mount -o remount,bind,ro / && mount -t tmpfs none /dev/shm"
    ' && exec "$@"', "enter",
)  # fmt: skip


@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("setpriv") and shutil.which("unshare")),
    reason="only root can become another user, with setpriv and unshare of util-linux",
)
def test_a_user_without_a_name_can_train_on_a_read_only_file_system(pod: Pod) -> None:
    if subprocess.run([*READ_ONLY, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    bare = dict.fromkeys(("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"), "")
    pod.start(wrapper=(*READ_ONLY, *AS_UID), environment={**bare, "TMPDIR": "/dev/shm"})
    pod.controller.wait(m.Hello, "pod-1")
    pod.launch()
    text = pod.until_printed(r"^\[rank 0, gen 1\] cache", r"^\[rank 1, gen 1\] cache")
    assert f"here 0 uid-{UID}" in text
    assert f"torchinductor_uid-{UID} True" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tls-name", ""], "--tls: got --tls without --tls-name; expected both or none"),
        (["--endpoint", "host"], "--endpoint: got host; expected HOST:PORT"),
        (["--grace", "0"], "--grace: got 0; expected seconds above 0"),
        (["--token-file", "none"], "--token-file: got none; expected a file with the job's token"),
        (["--tls", "none"], "tls.key: got a certificate and key that cannot be used"),
    ],
)
def test_a_wrong_command_line_is_refused_with_the_fix(
    pod: Pod, arguments: list[str], text: str
) -> None:
    pod.start(*arguments)
    assert text in pod.until_printed("expected")
    assert pod.process.wait(PATIENCE_S) in (1, 2)
