"""The CRD on a real API server: what it accepts, defaults and refuses, and with which messages.

The wrong documents are those of tests/unit/api/wrong_jobs.py, which the models refuse with the same
messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping, load_job, yaml_text
from holdfast.orchestrator.api.v1alpha1.crd import NAME, job_from_resource
from holdfast.orchestrator.kube.pod_schema import definition_text
from tests.e2e.kubernetes.conftest import fresh
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.existing_cluster import GivenCluster
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.unit.api.wrong_jobs import (
    CHANGES,
    SCRIPT,
    UNTYPED_RIGHT,
    UNTYPED_WRONG,
    WRONG,
    Change,
    Wrong,
    job,
)
from tests.unit.cli.test_written_specs import WORDS

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[3]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.fixture(scope="session")
def crd(control_plane: ControlPlane | GivenCluster) -> dict[str, Any]:
    kubectl = control_plane.kubectl()
    kubectl.run("apply", "--server-side", "--filename=-", stdin=definition_text())
    kubectl.served(NAME)
    return kubectl.json("get", "crd", NAME)


@pytest.fixture
def jobs(crd: dict[str, Any], namespace: Kubectl) -> Kubectl:
    """A namespace of a cluster with the CRD."""
    assert crd["spec"]["names"]["kind"] == "TrainingJob"
    return namespace


@pytest.fixture(scope="module")
def dry(crd: dict[str, Any], control_plane: ControlPlane | GivenCluster) -> Iterator[Kubectl]:
    """One namespace for all tests that create nothing."""
    yield from fresh(control_plane.kubectl())


def test_the_definition_is_accepted_without_warnings(crd: dict[str, Any]) -> None:
    conditions = {c["type"]: c["status"] for c in crd["status"]["conditions"]}
    assert conditions["Established"] == conditions["NamesAccepted"] == "True"
    assert conditions.get("NonStructuralSchema", "False") == "False"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_applies_unchanged_with_the_same_defaults(jobs: Kubectl, path: Path) -> None:
    """The defaults of the server are those of the models."""
    jobs.run("apply", "--filename", str(path))
    stored = jobs.get("trainingjob", load_job(path).name)
    assert stored is not None
    ours = load_job(path)
    assert job_from_resource(stored).spec == ours.spec
    written = ours.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    if recipe := written["entrypoint"].get("recipe"):
        # The server does not know the settings of recipes: packages bring them.
        recipe["config"] = stored["spec"]["entrypoint"]["recipe"]["config"]
    assert without_empty(written) == without_empty(stored["spec"])


def without_empty(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {k: without_empty(v) for k, v in value.items() if v not in ([], {}, None)}


@pytest.mark.parametrize("case", WRONG, ids=lambda case: f"{case.rule} {case.id}".strip())
def test_a_wrong_job_is_refused_with_the_messages_of_the_models(dry: Kubectl, case: Wrong) -> None:
    text = dry.refusal("apply", "--filename=-", stdin=yaml.safe_dump(job(case.spec, case.name)))
    for part in case.message:
        assert part in text
    assert "rule evaluation error" not in text


def start(jobs: Kubectl) -> None:
    """The status of a job that the operator has started."""
    patch = json.dumps({"status": {"jobId": "8f0c"}})
    jobs.run("patch", "tj", "right", "--subresource=status", "--type=merge", "--patch", patch)


def test_a_job_that_never_started_may_be_corrected(jobs: Kubectl) -> None:
    jobs.create(job(SCRIPT))
    right = job({"entrypoint": {"script": "other.py"}, "image": "mine:1"})
    jobs.run(
        "apply", "--server-side", "--force-conflicts", "--filename=-", stdin=yaml.safe_dump(right)
    )


@pytest.mark.parametrize("case", CHANGES, ids=lambda case: case.rule)
def test_a_change_that_a_running_job_cannot_follow_is_refused(jobs: Kubectl, case: Change) -> None:
    jobs.create(job(case.before))
    start(jobs)
    text = jobs.refusal("patch", "tj", "right", "--type=merge", "--patch", json.dumps(case.patch))
    for part in case.message:
        assert part in text


@pytest.mark.parametrize("part", ["resources", "parallelism", "kubernetes"])
def test_a_change_inside_an_untyped_field_is_noticed(jobs: Kubectl, part: str) -> None:
    """CEL does not see such fields; the rule compares the whole."""
    jobs.create(job({**SCRIPT, "kubernetes": {"podTemplate": {"spec": {"hostname": "a"}}}}))
    start(jobs)
    change = {
        "resources": {"cpu": 2},
        "parallelism": {"fsdp": {"reshardAfterForward": False}},
        "kubernetes": {"podTemplate": {"spec": {"hostname": "b"}}},
    }[part]
    patch = json.dumps({"spec": {part: change}})
    text = jobs.refusal("patch", "tj", "right", "--type=merge", "--patch", patch)
    assert f"spec.{part}: got a changed value" in text


@pytest.mark.parametrize(
    "change",
    [
        {"suspend": True},
        {"nodes": {"max": 4, "spares": 1}},
        {"recovery": {"hangTimeoutSeconds": 30, "budgets": {"hang": {"restarts": 1}}}},
        {"ttlSecondsAfterFinished": 60},
    ],
    ids=lambda change: "+".join(change),
)
def test_a_change_that_a_running_job_can_follow_is_accepted(
    jobs: Kubectl, change: dict[str, Any]
) -> None:
    jobs.create(job(SCRIPT))
    start(jobs)
    jobs.run("patch", "tj", "right", "--type=merge", "--patch", json.dumps({"spec": change}))
    stored = jobs.get("tj", "right")
    assert stored is not None
    job_from_resource(stored)


@pytest.mark.parametrize(
    "change",
    [{"kubernetes": {"podTemplate": {"spec": {"nodeSelector": {"pool": "b"}}}}}, {"priority": 5}],
    ids=lambda change: "+".join(change),
)
def test_where_the_pods_run_can_change_while_the_job_is_suspended(
    jobs: Kubectl, change: dict[str, Any]
) -> None:
    jobs.create(job({**SCRIPT, "suspend": True}))
    start(jobs)
    patch = ("patch", "tj", "right", "--type=merge", "--patch", json.dumps({"spec": change}))
    assert "suspend the job to change it" in jobs.refusal(*patch), "its pods are still there"
    state = json.dumps({"status": {"state": "suspended"}})
    jobs.run("patch", "tj", "right", "--subresource=status", "--type=merge", "--patch", state)
    jobs.run(*patch)


@pytest.mark.parametrize("spec", UNTYPED_WRONG, ids=str)
def test_values_of_untyped_fields_are_checked(dry: Kubectl, spec: dict[str, Any]) -> None:
    text = dry.refusal("create", "--filename=-", stdin=yaml.safe_dump(job(spec)))
    field = next(
        f"{part}.{name}" for part, inner in spec.items() for name in inner if part != "entrypoint"
    )
    assert f"spec.{field}" in text


@pytest.mark.parametrize("value", (2, 0.5, True, "auto", ["a"], {"a": 1}), ids=str)
def test_a_gone_field_has_the_command_that_prints_what_to_write(dry: Kubectl, value: Any) -> None:
    inner = {"pipelineSchedule": value, "activationCheckpointing": {"mode": value}}
    wrong = job({**SCRIPT, "environment": value, "parallelism": inner})
    text = dry.refusal("apply", "--filename=-", stdin=yaml.safe_dump(wrong))
    assert "spec.parallelism.pipelineSchedule: Unsupported value: " in text
    assert text.count("none: `holdfast spec validate FILE` prints what to write instead") == 3


@pytest.mark.parametrize("spec", UNTYPED_RIGHT, ids=str)
def test_untyped_fields_accept_every_form_of_a_file(dry: Kubectl, spec: dict[str, Any]) -> None:
    words = ("create", "--dry-run=server", "--filename=-", "--output=json")
    made = json.loads(dry.run(*words, stdin=yaml.safe_dump(job(spec))))
    assert job_from_resource(made).spec == job_from_mapping(job(spec)).spec


def test_kubectl_reads_each_word_that_we_write_as_it_was_given(dry: Kubectl) -> None:
    entrypoint = {"script": "train.py", "args": list(WORDS)}
    document = yaml_text(job({**SCRIPT, "entrypoint": entrypoint}))
    words = ("create", "--dry-run=server", "--filename=-", "--output=json")
    assert json.loads(dry.run(*words, stdin=document))["spec"]["entrypoint"] == entrypoint


def test_kubectl_rejects_a_number_without_quotes_and_names_its_field(dry: Kubectl) -> None:
    """Pods are the same: what was written is lost before the API server sees it."""
    for field, change in {
        "spec.entrypoint.args[1]": {"entrypoint": {"script": "t.py", "args": ["--lr", "2e-3"]}},
        "spec.env.LR": {"env": {"LR": "2e-3"}},
    }.items():
        document = yaml.safe_dump(job({**SCRIPT, **change}))
        assert "2e-3\n" in document and "'2e-3'" not in document
        text = dry.refusal("create", "--dry-run=server", "--filename=-", stdin=document)
        assert field in text and "must be of type string" in text


def test_a_misspelt_key_is_refused_by_kubectl_and_dropped_otherwise(jobs: Kubectl) -> None:
    document = yaml.safe_dump(job({**SCRIPT, "nodez": {"min": 1}}))
    assert 'unknown field "spec.nodez"' in jobs.refusal("apply", "--filename=-", stdin=document)
    jobs.run("apply", "--validate=ignore", "--filename=-", stdin=document)
    stored = jobs.get("tj", "right")
    assert stored is not None and "nodez" not in stored["spec"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ({"specs": {}}, 'unknown field "spec.kubernetes.podTemplate.specs"'),
        ({"spec": []}, "spec.kubernetes.podTemplate.spec"),
        (
            {"spec": {"containers": [{"name": "worker", "volumeMount": []}]}},
            'unknown field "spec.kubernetes.podTemplate.spec.containers[0].volumeMount"',
        ),
        (
            {"metadata": {"label": {"a": "b"}}},
            'unknown field "spec.kubernetes.podTemplate.metadata.label"',
        ),
        ({"spec": {"tolerations": {}}}, "spec.kubernetes.podTemplate.spec.tolerations"),
    ],
    ids=["key", "type", "typo", "metadata", "inner type"],
)
def test_an_invalid_pod_template_is_refused(
    dry: Kubectl, template: dict[str, Any], message: str
) -> None:
    document = yaml.safe_dump(job({**SCRIPT, "kubernetes": {"podTemplate": template}}))
    assert message in dry.refusal("create", "--filename=-", stdin=document)


def test_a_pod_template_is_stored_as_written(jobs: Kubectl) -> None:
    """Including nulls, which remove a key; client-side `kubectl apply` would drop them."""
    worker = {
        "name": "worker",
        "resources": {"limits": {"cpu": 0.5, "memory": "4Gi", "nvidia.com/gpu": 8}},
        "livenessProbe": {"httpGet": {"port": "http"}},
        "ports": [{"containerPort": 80, "hostPort": None}],
        "securityContext": None,
    }
    template = {
        "metadata": {"labels": {"a": "b"}, "annotations": {"c": None}},
        "spec": {"hostname": None, "containers": [worker], "overhead": {"cpu": "1"}},
    }
    made = jobs.create(job({**SCRIPT, "kubernetes": {"podTemplate": template}}))
    assert made["spec"]["kubernetes"]["podTemplate"] == template


def test_an_unknown_version_is_refused_with_the_known_ones(jobs: Kubectl) -> None:
    document = {**job(SCRIPT), "apiVersion": "holdfast.dev/v9"}
    text = jobs.refusal("apply", "--filename=-", stdin=yaml.safe_dump(document))
    assert 'no matches for kind "TrainingJob" in version "holdfast.dev/v9"' in text


def test_explain_documents_every_part(jobs: Kubectl) -> None:
    text = jobs.run("explain", "tj.spec.recovery")
    assert "heartbeatTimeoutSeconds" in text
    assert "Detection of failures, and what follows." in text
    assert "Seconds without a heartbeat after which a node is lost" in text
    assert "memory, storage or nothing" in jobs.run("explain", "tj.status.incidents.restoredFrom")


def test_scale_resizes_and_adjusts_the_minimum(jobs: Kubectl) -> None:
    jobs.create(job({**SCRIPT, "nodes": {"min": 2, "max": 3}}))
    jobs.run("scale", "tj/right", "--replicas=5")
    assert sizes(jobs) == (2, 5)
    jobs.run("scale", "tj/right", "--replicas=1")
    assert sizes(jobs) == (1, 1)
    jobs.run("patch", "tj", "right", "--type=merge", "--patch", '{"spec":{"suspend":true}}')
    text = jobs.refusal("scale", "tj/right", "--replicas=0")
    assert "spec.nodes.max: got 0; expected greater than or equal to 1; for no nodes" in text
    raised = '{"spec":{"nodes":{"min":4}}}'
    text = jobs.refusal("patch", "tj", "right", "--type=merge", "--patch", raised)
    assert "spec.nodes.max: got 1; expected at least nodes.min (4)" in text


def sizes(jobs: Kubectl) -> tuple[int, int]:
    stored = jobs.get("tj", "right")
    assert stored is not None
    nodes = job_from_resource(stored).spec.nodes
    return nodes.min, nodes.max


def test_scale_to_a_size_that_splits_a_replica_group_is_refused(jobs: Kubectl) -> None:
    spec = {
        **SCRIPT,
        "nodes": {"min": 2, "max": 4},
        "workersPerNode": 2,
        "parallelism": {"shard": 4},
    }
    jobs.create(job(spec))
    text = jobs.refusal("scale", "tj/right", "--replicas=3")
    assert "spec.parallelism.shard: got 4; expected a divisor of 6 workers" in text
    jobs.run("scale", "tj/right", "--replicas=2")


def test_get_shows_the_main_columns(jobs: Kubectl) -> None:
    jobs.create(job(SCRIPT))
    status = {
        "state": "running",
        "nodes": {"ready": 2, "desired": 4, "summary": "2/4"},
        "replicas": 2,
        "selector": "holdfast.dev/job=right",
        "worldSize": 8,
        "step": 119,
        "restarts": 1,
        "goodput": "98.2%",
        "seen": "2026-01-01T00:00:00Z",
        "conditions": [condition("Ready", "True", "Running")],
        "incidents": [
            {
                "number": 1,
                "time": "2026-01-01T00:00:00Z",
                "class": "infrastructure",
                "title": "worker 3 was killed by SIGKILL",
                "seconds": {"total": 1.25},
            }
        ],
    }
    patch = json.dumps({"status": status})
    jobs.run("patch", "tj", "right", "--subresource=status", "--type=merge", "--patch", patch)
    head, line = jobs.run("get", "tj", "right").splitlines()
    columns = "NAME STATE NODES WORLD STEP RESTARTS GOODPUT REASON SEEN AGE"
    assert head.split() == columns.split()
    assert line.split()[:8] == ["right", "running", "2/4", "8", "119", "1", "98.2%", "Running"]
    assert line.split()[8].endswith("d"), "seen in January"
    jobs.run("wait", "--for=condition=Ready", "tj/right", "--timeout=10s")
    scale = jobs.json("get", "tj", "right", "--subresource=scale")
    assert scale["status"] == {"replicas": 2, "selector": "holdfast.dev/job=right"}
    assert "tj/right" in jobs.run("get", "all", "--output=name").replace(
        "trainingjob.holdfast.dev", "tj"
    )
    assert "worker 3 was killed by SIGKILL" in jobs.run("describe", "tj", "right")


def condition(kind: str, status: str, reason: str) -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": "",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }


def test_conditions_of_two_writers_are_merged_by_type(jobs: Kubectl) -> None:
    """Server-side apply: the list is keyed, so no writer drops the conditions of another."""
    jobs.create(job(SCRIPT))
    for manager, kind in (("one", "Ready"), ("other", "Succeeded")):
        document = {**job(SCRIPT), "status": {"conditions": [condition(kind, "False", "Waiting")]}}
        del document["spec"]
        jobs.run(
            "apply", "--server-side", "--subresource=status", f"--field-manager={manager}",
            "--filename=-", stdin=yaml.safe_dump(document),
        )  # fmt: skip
    stored = jobs.get("tj", "right")
    assert stored is not None
    assert {c["type"] for c in stored["status"]["conditions"]} == {"Ready", "Succeeded"}


def test_a_spec_write_cannot_touch_the_status(jobs: Kubectl) -> None:
    document = {**job(SCRIPT), "status": {"state": "succeeded"}}
    jobs.run("apply", "--filename=-", stdin=yaml.safe_dump(document))
    stored = jobs.get("tj", "right")
    assert stored is not None and "status" not in stored
