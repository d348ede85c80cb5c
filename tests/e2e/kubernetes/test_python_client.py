"""The Python client at a real API server."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from holdfast import Client
from holdfast.orchestrator.cli.targets.kubernetes.target import KubernetesTarget
from holdfast.orchestrator.errors import UserError
from tests.e2e.kubernetes.commands import SCRIPT, trained, write_status
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.unit.ui.views import served

pytestmark = pytest.mark.e2e
BOUND_S = 90


def train() -> None:
    print("training")


def test_a_job_is_created_changed_awaited_and_deleted(
    jobs: Kubectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No operator runs; its status is written by the test."""
    monkeypatch.chdir(tmp_path)
    client = Client(
        kubernetes=True, namespace=jobs.namespace, kubeconfig=jobs.kubeconfig,
        home=tmp_path / "home",
    )  # fmt: skip
    (tmp_path / "train.py").write_text("print('training')\n")
    job = client.submit(SCRIPT)
    assert jobs.get("trainingjob", "demo") is not None and job.view().state == "pending"
    assert "to 1 node" in job.resize(1)
    view = trained(state="failed", reason="no", finished_ns=time.time_ns())
    write_status(jobs, view)
    ended = job.wait(BOUND_S)
    assert (ended.state, ended.reason, ended.step) == ("failed", "no", view.step)
    assert [one.name for one in client.jobs()] == ["demo"] and job.events()
    with pytest.raises(UserError, match=r"metadata\.name: got demo, which exists"):
        client.submit(SCRIPT)
    job.delete()
    made = client.submit(train, workers=2, gpus=0)
    assert made.name.startswith("train") and jobs.get("trainingjob", made.name) is not None
    assert [one.name for one in client.jobs()] == [made.name]
    assert not list(tmp_path.glob(".holdfast*")) and not list(tmp_path.glob("home/client/*"))


def test_the_page_shows_and_changes_a_job_with_the_users_credentials(
    jobs: Kubectl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("starlette", reason="the extra `ui` is not installed")
    monkeypatch.chdir(tmp_path)
    client = Client(kubernetes=True, namespace=jobs.namespace, kubeconfig=jobs.kubeconfig)
    (tmp_path / "train.py").write_text("print('training')\n")
    client.submit(SCRIPT)
    write_status(jobs, trained())
    target = KubernetesTarget(jobs.namespace, None, jobs.kubeconfig)
    with served(target) as page:
        assert 'href="/jobs/demo"' in page.text("/")
        shown = page.text("/jobs/demo")
        assert "Where the time went" in shown and 'data-dialog="do-resize"' in shown
        answer = page.ask("POST", "/jobs/demo/resize", "nodes=1", Origin=page.url)
        assert answer.status == 200, answer.read()
        changed = jobs.get("trainingjob", "demo")
        assert changed is not None and changed["spec"]["nodes"]["max"] == 1
        assert "expected one of demo" in page.text("/jobs/other")
