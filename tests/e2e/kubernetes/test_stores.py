"""Jobs whose S3 endpoint never answers, beside jobs with a working store, under one operator."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.kubernetes.replica import Replica
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.unschedulable import Plane, job, names_of, pods, wait_pods

pytestmark = pytest.mark.e2e
MANY = 40
"""More jobs than an operator starts at a time."""


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Socket that accepts nothing, with a backlog for more connections than there are jobs."""
    with socket.create_server(("127.0.0.1", 0), backlog=2 * MANY) as server:
        yield server


def test_a_store_that_does_not_answer_delays_only_its_own_jobs(
    plane: Plane, tmp_path: Path, namespace: Kubectl, silent: socket.socket
) -> None:
    endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
    listed = f"--user-credentials={json.dumps({namespace.namespace: [endpoint]})}"
    replica = Replica(plane.kubeconfig, tmp_path, (namespace.namespace,), listed).start_leading()
    environment = {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "AKIADUMMYDUMMYDUMMY1",
        "AWS_SECRET_ACCESS_KEY": "dummy",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    hanging = [
        job(f"hangs-{number}", env=environment, checkpoint={"path": f"s3://bucket/{number}"})
        for number in range(MANY)
    ]
    namespace.apply(*hanging)
    replica.until(
        lambda: len(namespace.list("configmaps", "holdfast.dev/job")) == MANY,
        "all of them to be taken up",
    )
    namespace.apply(job("answered"))
    wait_pods(namespace, "answered", 2)
    for number in range(MANY):
        assert names_of(pods(namespace, f"hangs-{number}")) == set()
    silent.close()
    assert replica.close() == 0
