"""Code without an image: `holdfast run --kubernetes` uploads it, and workers run in a copy of it.

API server and operator are real. Pods are never scheduled: the test starts the agent of the job's
pod with the pod's own arguments and Secret, as a kubelet would.
"""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.kubernetes.commands import HoldfastCli
from tests.e2e.kubernetes.conftest import fresh
from tests.e2e.kubernetes.replica import Replica
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.unschedulable import IMAGE, Document, Plane, wait_pods

pytestmark = pytest.mark.e2e

SECRETS = "/var/run/holdfast/agents"
BOUND_S = 90
SCRIPT = """
import time
from holdfast import session
from lib.version import VERSION

for step in range(1_000_000):
    session.report(step)
    if step % 10 == 0:
        print("code", VERSION, __file__, flush=True)
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def jobs(plane: Plane) -> Iterator[Kubectl]:
    yield from fresh(plane.kubectl())


@pytest.fixture(scope="module")
def operator(
    plane: Plane, jobs: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Replica]:
    directory = tmp_path_factory.mktemp("operator")
    replica = Replica(
        plane.kubeconfig, directory, (jobs.namespace,), f"--worker-image={IMAGE}"
    ).start_leading()
    yield replica
    assert replica.close() == 0, replica.tail()


class PodProcess:
    """The training container of a pod, as a process of this machine."""

    def __init__(self, jobs: Kubectl, pod: Document, place: Path) -> None:
        self.log, secrets = place / "pod.log", place / "agents"
        secrets.mkdir(parents=True)
        job = pod["metadata"]["labels"]["holdfast.dev/job"]
        for name, value in jobs.json("get", "secret", f"{job}-agents")["data"].items():
            (secrets / name).write_bytes(base64.b64decode(value))
        words = pod["spec"]["containers"][0]["args"]
        words = [word.replace(SECRETS, str(secrets)) for word in words]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *words], cwd=place, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log,
            )  # fmt: skip

    def until_printed(self, text: str) -> str:
        self.until(lambda: text in self.log.read_text(), text)
        return self.log.read_text()

    def tail(self) -> str:
        return self.log.read_text()[-2000:]

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """The directory of a job; beside its script are a module, a secret and what git ignores."""
    place = tmp_path / "code"
    (place / "lib").mkdir(parents=True)
    (place / "train.py").write_text(SCRIPT)
    (place / "lib" / "version.py").write_text("VERSION = 'one'\n")
    (place / ".env").write_text("TOKEN=secret\n")
    (place / ".gitignore").write_text("out\n")
    (place / "out").write_text("x" * 1000)
    spec = {"entrypoint": {"script": "train.py"}, "resources": {"gpu": 0}}
    document = {
        "apiVersion": "holdfast.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "edited"},
        "spec": spec,
    }
    (place / "job.yaml").write_text(yaml.safe_dump(document))
    return place


def archives(jobs: Kubectl) -> list[Document]:
    return jobs.list("configmaps", "holdfast.dev/code")


def test_the_directory_reaches_the_workers_and_an_edit_does_without_a_new_pod(
    jobs: Kubectl, operator: Replica, code: Path, tmp_path: Path
) -> None:
    holdfast, output = HoldfastCli(jobs), tmp_path / "output"
    watching = holdfast.start(output, "run", code / "job.yaml")
    (pod,) = wait_pods(jobs, "edited", 1)
    node = PodProcess(jobs, pod, tmp_path / "node")
    try:
        text = node.until_printed("code one")
        assert "holdfast-code-" in text and str(code) not in text, "it runs in the copy"
        shown = output.read_text()
        assert "not uploaded, because the name is one of secrets: .env" in shown
        assert "uploaded: 4 files" in shown
        (archive,) = archives(jobs)
        uid = jobs.json("get", "trainingjob", "edited")["metadata"]["uid"]
        assert archive["metadata"]["ownerReferences"][0]["uid"] == uid, "deleted with the job"

        same = holdfast("again", "edited", code / "job.yaml")
        assert same.code == 2 and "runs already" in same.err

        for version in ("two", "three"):
            (code / "lib" / "version.py").write_text(f"VERSION = '{version}'\n")
            done = holdfast("again", "edited", code / "job.yaml")
            assert done.code == 0, done.err
            print(done.out)  # how long it took
            assert "runs the new code after" in done.out
            node.until_printed(f"code {version}")
        assert len(wait_pods(jobs, "edited", 1)) == 1
        assert wait_pods(jobs, "edited", 1)[0]["metadata"]["uid"] == pod["metadata"]["uid"]
        assert len(archives(jobs)) == 2, "the new one and the one before"

        jobs.run("patch", "trainingjob", "edited", "--type=merge",
                 f'--patch={{"spec": {{"code": "{"a" * 64}"}}}}')  # fmt: skip
        jobs.wait(
            "trainingjob",
            "edited",
            lambda d: "is not there; upload" in str(d.get("status")),
            "to refuse code that was not uploaded",
        )
        assert jobs.json("get", "trainingjob", "edited")["status"]["state"] == "running"
    finally:
        watching.terminate()
        watching.wait(30)
        node.end()
        jobs.run("delete", "trainingjob", "edited", "--wait=false")


def test_a_script_needs_no_spec(
    jobs: Kubectl, operator: Replica, code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holdfast, output = HoldfastCli(jobs), tmp_path / "output"
    monkeypatch.chdir(code)
    watching = holdfast.start(output, "run", "train.py", "--nodes", "2")
    try:
        wait_pods(jobs, "train", 2)
        assert jobs.json("get", "trainingjob", "train")["spec"]["code"]
        assert "uploaded: 4 files" in output.read_text()
    finally:
        watching.terminate()
        watching.wait(30)
        jobs.run("delete", "trainingjob", "train", "--wait=false")
