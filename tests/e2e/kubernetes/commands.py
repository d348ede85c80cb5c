"""`holdfast --kubernetes` as a user types it, in this process or in a separate one.

Jobs that seem to have trained get their status through the API, with the operator's own code.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.orchestrator.cli.main import main
from holdfast.orchestrator.hosts.kubernetes.spec import owner_of
from holdfast.orchestrator.hosts.kubernetes.status import StatusContext, status_of
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import EVENTS, JOBS
from holdfast.orchestrator.kube.event_recorder import event_document
from holdfast.orchestrator.runtime.observe.view import JobView
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.unit.cli.fixtures import NS, make_incident, make_view


class CliResult(NamedTuple):
    code: int
    out: str
    err: str


class HoldfastCli:
    """The command line for one namespace of a cluster."""

    def __init__(self, kubectl: Kubectl, kubeconfig: Path | None = None) -> None:
        self.kubectl = kubectl
        self.where = ["--kubernetes", "--kubeconfig", str(kubeconfig or kubectl.kubeconfig)]
        self.where += ["--namespace", kubectl.namespace]

    def __call__(self, *words: str | Path) -> CliResult:
        return called(main, *words, *self.where)

    def json(self, *words: str) -> Any:
        result = self(*words, "--json")
        assert result.code == 0, result.err
        return json.loads(result.out)

    def start(self, output: Path, *words: str | Path) -> subprocess.Popen[bytes]:
        """Run in a separate process, with its output in a file."""
        command = [
            sys.executable,
            "-m",
            "holdfast.orchestrator.cli.main",
            *map(str, words),
            *self.where,
        ]
        with output.open("wb") as file:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
            )


def called(entry: Callable[[list[str]], object], *words: str | Path) -> CliResult:
    """Run a command line in this process."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    err = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        entry([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    out.seek(0)
    return CliResult(ended.value.code, out.read(), err.getvalue())


# -- jobs for the tests -----------------------------------------------------------------------
SCRIPT: dict[str, Any] = {
    "apiVersion": "holdfast.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "demo"},
    "spec": {
        "entrypoint": {"script": "train.py"},
        "image": "example.test/worker:1",
        "nodes": {"max": 2},
        "checkpoint": {"path": "s3://bucket/demo"},
    },
}


def write_status(kubectl: Kubectl, view: JobView) -> None:
    """Write the status and the Event of the newest incident as the operator does."""
    document = kubectl.get("trainingjob", view.name)
    assert document is not None
    owner = owner_of(document)
    generation = document["metadata"]["generation"]
    status = status_of(view, StatusContext(view.name, generation, 2, view.now_ns))
    body = {
        "apiVersion": document["apiVersion"],
        "kind": document["kind"],
        "metadata": {"name": view.name, "namespace": owner.namespace},
        "status": status,
    }

    async def act() -> None:
        async with await KubeClient.connect(kubeconfig=kubectl.kubeconfig) as cluster:
            key = (JOBS, owner.namespace, view.name)
            await cluster.patch(*key, body, subresource="status", apply=True)
            for one in view.incidents[-1:]:
                text = f"incident {one.number}: {one.title}; {one.decision}"
                annotations = {names.INCIDENT: str(one.number)}
                event = event_document(
                    owner, f"{view.name}.1", "Warning", "Hang", text, annotations
                )
                await cluster.create(EVENTS, owner.namespace, event)

    asyncio.run(act())


def trained(**changes: Any) -> JobView:
    """A running job with two incidents."""
    now_ns = time.time_ns()
    incidents = [
        make_incident(at_ns=now_ns - 50 * NS),
        make_incident(number=2, at_ns=now_ns - 20 * NS, title="worker 1 hangs", rehearsal=False),
    ]
    times = {"submitted_ns": now_ns - 60 * NS, "now_ns": now_ns}
    return make_view(**{"incidents": incidents, "nodes": [], **times, **changes})
