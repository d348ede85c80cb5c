"""Rejections of `kubectl apply`: by the CRD and the chart's policy, with a checkpoint volume.

Specs that users wrote. The policy holds for the whole cluster, and is deleted at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from helm import render
from tests.e2e.kubernetes import test_chart
from tests.e2e.kubernetes.conftest import fresh, skip_without
from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.existing_cluster import GivenCluster
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.unit.api.wrong_jobs import job

pytestmark = pytest.mark.e2e

BOUND_S = 60.0
POLICY = f"{render.NAMESPACE}-holdfast-jobs"
BASE: dict[str, Any] = {
    "entrypoint": {"command": "sleep 100"},
    "nodes": {"min": 1, "max": 2},
    "workersPerNode": 1,
    "resources": {"gpu": 0},
}


def worker(**fields: Any) -> dict[str, Any]:
    return pod(containers=[{"name": "worker", **fields}])


def pod(**fields: Any) -> dict[str, Any]:
    return {"kubernetes": {"podTemplate": {"spec": fields}}}


def recipe(config: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"entrypoint": {"recipe": {"name": "pretrain", "config": config}}, **spec}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "toleration-typo": (pod(tolerationz=[]), 'podTemplate.spec.tolerationz"'),
    "container-field-typo": (worker(volumeMount=[]), 'containers[0].volumeMount"'),
    "container-other-name": (
        pod(containers=[{"name": "main", "image": "foo:1"}]),
        "got main and no worker; expected worker, the training container; rename it to worker",
    ),
    "gpu-list": ({"resources": {"gpu": [8]}}, "spec.resources.gpu"),
    "memory-64GB": ({"resources": {"gpu": 0, "memory": "64GB"}}, "got 64GB; expected a quantity"),
    "cpu-4-cores": ({"resources": {"gpu": 0, "cpu": "4 cores"}}, "got 4 cores; expected a quant"),
    "min-over-max": ({"nodes": {"min": 4, "max": 2}}, "got 2; expected at least nodes.min (4)"),
    "two-entrypoints": ({"entrypoint": {"command": "x", "script": "a.py"}}, "exactly one of"),
    "no-entrypoint": ({"entrypoint": {}}, "got none of them; expected exactly one of"),
    "elasticity-not-multiple": (
        {"workersPerNode": 4, "elasticity": [3, 6]},
        "spec.elasticity: got 3 workers; expected multiples of workersPerNode (4)",
    ),
    "path-relative": (
        {"checkpoint": {"path": "ckpts/x"}},
        "got ckpts/x; expected a URL or an absolute directory",
    ),
    "path-dotdot": (
        {"checkpoint": {"path": "/checkpoints/team-b/../team-a/pw"}},
        "got /checkpoints/team-b/../team-a/pw; expected a path without ..",
    ),
    "path-other-tenant": (
        {"checkpoint": {"path": "/checkpoints/team-a/pw"}},
        "got /checkpoints/team-a/pw; expected /checkpoints/NAMESPACE/right, the directory of this",
    ),
    "env-rank": ({"env": {"RANK": "0"}}, "spec.env.RANK: got a variable that Holdfast sets"),
    "env-number": ({"env": {"OMP_NUM_THREADS": 1}}, "spec.env.OMP_NUM_THREADS"),
    "shard-not-dividing": (
        {"workersPerNode": 2, "parallelism": {"shard": 3}},
        "spec.parallelism.shard: got 3; expected a divisor of 4 workers",
    ),
    "tensor-over-nodes": (
        recipe({}, workersPerNode=2, parallelism={"tensor": 4}),
        "spec.parallelism.tensor: got 4; expected a divisor of workersPerNode (2)",
    ),
    "replicas": ({"replicas": 3}, 'unknown field "spec.replicas"'),
    "toleration-no-list": (pod(tolerations={"key": "spot"}), "podTemplate.spec.tolerations"),
    "gang-unknown": ({"kubernetes": {"gang": "yunikorn"}}, 'Unsupported value: "yunikorn"'),
    "queue-without-gang": (
        {"queue": "lq"},
        "spec.queue: got lq; expected none without a gang that has queues",
    ),
    "deadline-text": ({"activeDeadlineSeconds": "2h"}, "spec.activeDeadlineSeconds"),
    "budget-incomplete": (
        {"recovery": {"budgets": {"user": {"windowSeconds": 100}}}},
        "spec.recovery.budgets.user.restarts: Required value",
    ),
    "template-quantity": (
        worker(resources={"requests": {"cpu": "four"}}),
        "got resources of worker that are not quantities",
    ),
    "template-limit": (
        {
            **worker(resources={"limits": {"memory": "1Gi"}}),
            "resources": {"gpu": 0, "memory": "4Gi"},
        },
        "got a limit of memory for worker below spec.resources.memory",
    ),
    "template-volume": (
        worker(volumeMounts=[{"name": "data", "mountPath": "/data"}]),
        "got a volumeMount of worker without its volume; expected one of agents, shm",
    ),
    "template-init-volume": (
        pod(initContainers=[{"name": "i", "volumeMounts": [{"name": "d", "mountPath": "/d"}]}]),
        "got a volumeMount of i without its volume; expected one of agents, shm",
    ),
    "template-init-quantity": (
        pod(initContainers=[{"name": "i", "resources": {"limits": {"cpu": "four"}}}]),
        "got resources of i that are not quantities",
    ),
    "template-ephemeral": (
        pod(ephemeralContainers=[{"name": "debug"}]),
        'unknown field "spec.kubernetes.podTemplate.spec.ephemeralContainers"',
    ),
    "priority-class-number": ({"kubernetes": {"priorityClassName": 1000}}, "priorityClassName"),
    "shared-memory": (
        {"kubernetes": {"sharedMemory": "32 GB"}},
        "spec.kubernetes.sharedMemory: got 32 GB; expected a quantity such as 32Gi",
    ),
    "working-directory": (
        {"workingDirectory": "../../etc"},
        "spec.workingDirectory: got ../../etc; expected a directory without ..",
    ),
}
RIGHT: dict[str, dict[str, Any]] = {
    "sidecar": pod(containers=[{"name": "worker"}, {"name": "logs", "image": "fluent:1"}]),
    "null": worker(resources=None, volumeMounts=None),
    "init-null": pod(initContainers=None),
    "init-shm": pod(
        initContainers=[{"name": "i", "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}]}]
    ),
    "resources": {
        **worker(
            resources={"limits": {"memory": "8Gi", "nvidia.com/gpu": 8}, "requests": {"cpu": 0.5}},
            volumeMounts=[{"name": one, "mountPath": f"/{one}"} for one in ("data", "shm")],
        ),
        "resources": {"gpu": 0, "memory": "4Gi", "cpu": 2},
    },
    "elasticity": {"workersPerNode": 2, "elasticity": [2, 4]},
    "elasticity-word": {"elasticity": "any"},
    "path": {"checkpoint": {"path": "/checkpoints/NAMESPACE/right"}},
    "url": {"checkpoint": {"path": "s3://bucket/x"}},
    "queue": {"queue": "lq", "kubernetes": {"gang": "kueue"}},
    "shared-memory": {"kubernetes": {"sharedMemory": "32Gi"}},
    "working-directory": {"workingDirectory": "/src/..x"},
}
RIGHT["resources"]["kubernetes"]["podTemplate"]["spec"]["volumes"] = [
    {"name": "data", "emptyDir": {}}
]


BY_POLICY = (
    "container-other-name", "elasticity-not-multiple", "path-relative", "path-dotdot",
    "path-other-tenant", "queue-without-gang", "template-quantity", "template-limit",
    "template-volume", "shared-memory", "working-directory",
)  # fmt: skip
"""Specs that a rule of the policy rejects; test_chart.py tries its other rules."""


@pytest.fixture(scope="module")
def user(
    plane: ControlPlane | GivenCluster,
    binaries: programs.Binaries,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Kubectl]:
    """kubectl in a namespace where the chart's policy holds."""
    skip_without(binaries, ("helm",))
    helm = test_chart.Helm(binaries.path("helm"), tmp_path_factory.mktemp("helm"))
    text = helm.run(
        "template", "holdfast", str(render.CHART), "--namespace", render.NAMESPACE,
        "--kube-version", render.OLDEST, "--show-only", "templates/admission.yaml",
        "--set", "checkpoints.root=/checkpoints/",
        "--set", "checkpoints.volume.persistentVolumeClaim.claimName=checkpoints",
    )  # fmt: skip
    policy = [one for one in yaml.safe_load_all(text) if one["metadata"]["name"] == POLICY]
    kubectl = plane.kubectl()
    for namespace in fresh(kubectl):
        old = {**WRONG["working-directory"][0], **WRONG["container-other-name"][0], "queue": "lq"}
        namespace.create(job({**BASE, **old}, "old"))
        kubectl.run("apply", "--filename=-", stdin=yaml.safe_dump_all(policy))
        _wait_for_policy(namespace)
        yield namespace
    kubectl.run("delete", "--filename=-", stdin=yaml.safe_dump_all(policy))


def _wait_for_policy(user: Kubectl) -> None:
    deadline = time.monotonic() + BOUND_S
    while "expected a directory without .." not in _apply(user, WRONG["working-directory"][0]):
        assert time.monotonic() < deadline, "the policy does not hold"
        time.sleep(0.2)


def _apply(user: Kubectl, spec: dict[str, Any]) -> str:
    """The refusal; empty: the job was accepted."""
    namespace = str(user.namespace)
    document = yaml.safe_dump(job({**BASE, **spec})).replace("NAMESPACE", namespace)
    done = user.attempt("create", "--dry-run=server", "--filename=-", stdin=document)
    return done.stderr.replace(namespace, "NAMESPACE") if done.returncode else ""


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_spec_is_rejected_at_apply_with_what_to_write(user: Kubectl, name: str) -> None:
    spec, message = WRONG[name]
    text = _apply(user, spec)
    assert message in text
    assert "evaluation error" not in text and "no such key" not in text


def test_every_rule_of_the_policy_has_a_wrong_spec(
    user: Kubectl, plane: ControlPlane | GivenCluster
) -> None:
    assert user.namespace
    policy = plane.kubectl().json("get", "validatingadmissionpolicy", POLICY)
    system_namespaces = 1  # tried in test_chart.py
    known = len(BY_POLICY) + len(test_chart.POLICY) + system_namespaces
    assert len(policy["spec"]["validations"]) == known


def test_a_job_of_before_the_policy_is_still_scaled_suspended_and_annotated(user: Kubectl) -> None:
    user.run("scale", "tj/old", "--replicas=3")
    user.run("patch", "tj", "old", "--type=merge", "--patch", '{"spec":{"suspend":true}}')
    user.run("annotate", "tj", "old", 'holdfast.dev/request={"verb":"checkpoint"}')
    patch = ("--type=merge", "--patch", '{"spec":{"queue":"other"}}')
    done = user.attempt("patch", "tj", "old", *patch)
    assert done.returncode and "spec.queue: got other; expected none" in done.stderr


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_spec_that_resembles_a_wrong_one_is_accepted(user: Kubectl, name: str) -> None:
    assert _apply(user, RIGHT[name]) == ""
