"""The pod of a node, and the user's podTemplate merged over it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.backends.kubernetes.backend import PodTracker
from holdfast.orchestrator.backends.kubernetes.pods import SECRETS, PodSettings, pod_document
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.kube.strategic_merge import merge

OWNER = Owner("team-a", "llm", "0b1c")
SETTINGS = PodSettings(endpoint="holdfast-agents.holdfast.svc:7077", image="default:1")


def pod(
    blamed: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
    settings: PodSettings = SETTINGS,
    doubtful: tuple[str, ...] = (),
    **spec: Any,
) -> dict[str, Any]:
    job = job_from_mapping(
        {
            "apiVersion": "holdfast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "llm", "namespace": "team-a", "labels": labels or {}},
            "spec": {"entrypoint": {"script": "train.py"}, **spec},
        }
    )
    return pod_document(job, OWNER, settings, "llm-abcde", blamed, doubtful)


def worker(document: dict[str, Any]) -> dict[str, Any]:
    (found,) = [c for c in document["spec"]["containers"] if c["name"] == "worker"]
    return dict(found)


def test_a_pod_is_named_labelled_and_owned_as_a_node_of_its_job() -> None:
    metadata = pod(labels={"team": "a"})["metadata"]
    assert (metadata["namespace"], metadata["name"]) == ("team-a", "llm-abcde")
    assert metadata["labels"]["holdfast.dev/job"] == "llm"
    assert metadata["labels"]["holdfast.dev/role"] == "node"
    assert metadata["labels"]["team"] == "a"
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("TrainingJob", "llm", "0b1c")
    assert owner["controller"] is True


def test_the_agents_arguments_suffice_to_connect() -> None:
    arguments = worker(pod(workersPerNode=4))["args"]
    given = dict(zip(arguments[3::2], arguments[4::2], strict=True))
    assert arguments[:3] == ["-P", "-m", "holdfast.workers.agent"]
    assert given == {
        "--job": "team-a/llm",
        "--node": "llm-abcde",
        "--slots": "4",
        "--token-file": f"{SECRETS}/token",
        "--endpoint": "holdfast-agents.holdfast.svc:7077",
        "--tls": SECRETS,
        "--tls-name": "0b1c.jobs.holdfast.dev",
        "--grace": "35",
    }


def test_the_agent_gets_the_grace_of_the_template() -> None:
    mine = {"podTemplate": {"spec": {"terminationGracePeriodSeconds": 600}}}
    assert worker(pod(kubernetes=mine))["args"][-2:] == ["--grace", "600"]


def test_a_pod_satisfies_the_restricted_security_standard() -> None:
    document = pod()
    security = document["spec"]["securityContext"]
    assert security["runAsNonRoot"] is True and security["runAsUser"] != 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert security["fsGroupChangePolicy"] == "OnRootMismatch", "of every file it takes minutes"
    container = worker(document)["securityContext"]
    assert container["allowPrivilegeEscalation"] is False
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert document["spec"]["automountServiceAccountToken"] is False
    assert all("hostPath" not in volume for volume in document["spec"]["volumes"])


def test_requests_of_a_pod_are_those_of_a_worker_times_their_number() -> None:
    document = pod(
        workersPerNode=8,
        resources={"cpu": "1500m", "memory": "4Gi", "gpu": 1},
        kubernetes={"extendedResources": {"rdma/hca": 1}, "sharedMemory": "64Gi"},
    )
    resources = worker(document)["resources"]
    assert resources["requests"] == {"cpu": "12000m", "memory": str(32 * 2**30)}
    assert resources["limits"] == {
        "memory": str(32 * 2**30), "nvidia.com/gpu": "8", "rdma/hca": "1",
    }  # fmt: skip
    volumes = {volume["name"]: volume for volume in document["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": str(64 * 2**30)}


def test_the_gpu_resource_can_be_chosen() -> None:
    document = pod(resources={"gpu": 1}, kubernetes={"gpuResource": "amd.com/gpu"})
    assert worker(document)["resources"]["limits"] == {"amd.com/gpu": "1"}


def test_the_grace_of_a_pod_is_that_of_the_job_plus_a_margin() -> None:
    document = pod(recovery={"terminationGraceSeconds": 100})
    assert document["spec"]["terminationGracePeriodSeconds"] == 105


def test_blamed_nodes_are_excluded_and_annotated_for_the_next_operator() -> None:
    document = pod(blamed={"llm-aaaaa": "gpu-7", "llm-bbbbb": "gpu-9"})
    required = document["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    (term,) = required["nodeSelectorTerms"]
    assert [field["values"] for field in term["matchFields"]] == [["gpu-7"], ["gpu-9"]]
    assert {field["operator"] for field in term["matchFields"]} == {"NotIn"}
    noted = json.loads(document["metadata"]["annotations"][names.BLAMED])
    assert noted == {"llm-aaaaa": "gpu-7", "llm-bbbbb": "gpu-9"}


def test_blamed_nodes_are_excluded_in_each_term_of_the_users_affinity() -> None:
    mine = [{"matchExpressions": [{"key": "pool", "operator": "In", "values": [v]}]} for v in "ab"]
    affinity = {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": mine}
        }
    }
    template = {"spec": {"affinity": affinity}}
    document = pod(blamed={"llm-aaaaa": "gpu-7"}, kubernetes={"podTemplate": template})
    terms = document["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert len(terms) == 2
    for term in terms:
        assert term["matchExpressions"] and term["matchFields"][0]["values"] == ["gpu-7"]


def test_a_node_that_may_be_dead_is_only_a_last_resort() -> None:
    affinity = pod(blamed={"llm-a": "gpu-1"}, doubtful=("gpu-2", "gpu-1"))["spec"]["affinity"]
    (term,) = affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    (field,) = term["preference"]["matchFields"]
    assert (field["operator"], field["values"]) == ("NotIn", ["gpu-2"]), "gpu-1 is excluded"


@pytest.mark.parametrize(
    ("spread", "rule"),
    [
        ("preferred", "preferredDuringSchedulingIgnoredDuringExecution"),
        ("required", "requiredDuringSchedulingIgnoredDuringExecution"),
    ],
)
def test_spread_sets_the_anti_affinity(spread: str, rule: str) -> None:
    affinity = pod(kubernetes={"spread": spread})["spec"]["affinity"]["podAntiAffinity"]
    assert list(affinity) == [rule]
    assert "affinity" not in pod(kubernetes={"spread": "none"})["spec"]


def test_a_template_merges_by_name_but_keeps_the_identity_of_the_node() -> None:
    template = {
        "metadata": {
            "name": "mine",
            "labels": {"holdfast.dev/job": "another", "cost": "center"},
            "annotations": {"a": "b"},
        },
        "spec": {
            "restartPolicy": "Always",
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "securityContext": {"runAsUser": 1000},
            "volumes": [
                {"name": "data", "persistentVolumeClaim": {"claimName": "tokens"}},
                {"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}},
            ],
            "containers": [
                {"name": "sidecar", "image": "log:1"},
                {
                    "name": "worker",
                    "args": ["never"],
                    "env": [{"name": "HOME", "value": "/home/me"}, {"name": "N", "value": "1"}],
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                },
            ],
        },
    }
    document = pod(kubernetes={"podTemplate": template})
    assert document["metadata"]["name"] == "llm-abcde"
    assert document["metadata"]["labels"]["holdfast.dev/job"] == "llm"
    assert document["metadata"]["labels"]["cost"] == "center"
    spec = document["spec"]
    assert spec["restartPolicy"] == "Never"
    assert spec["securityContext"]["runAsUser"] == 1000
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert [container["name"] for container in spec["containers"]] == ["worker", "sidecar"]
    assert {volume["name"] for volume in spec["volumes"]} == {"agents", "shm", "data"}
    (shm,) = [volume for volume in spec["volumes"] if volume["name"] == "shm"]
    assert shm == {"name": "shm", "emptyDir": {"sizeLimit": "1Gi"}}
    assert worker(document)["args"][:3] == ["-P", "-m", "holdfast.workers.agent"]
    env = {one["name"]: one for one in worker(document)["env"]}
    assert env["HOME"]["value"] == "/home/me" and env["N"]["value"] == "1"
    assert env["NODE_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"
    assert "/data" in {mount["mountPath"] for mount in worker(document)["volumeMounts"]}


def test_a_pod_has_the_priority_class_and_the_service_account_of_the_job() -> None:
    spec = pod(kubernetes={"priorityClassName": "urgent", "serviceAccountName": "reader"})["spec"]
    assert (spec["priorityClassName"], spec["serviceAccountName"]) == ("urgent", "reader")
    assert "priorityClassName" not in pod()["spec"]


def test_a_template_without_the_training_container_is_refused() -> None:
    template = {"spec": {"containers": None}}
    with pytest.raises(UserError, match="none called worker"):
        pod(kubernetes={"podTemplate": template})


def test_the_jobs_image_overrides_the_operators() -> None:
    assert worker(pod())["image"] == "default:1"
    assert worker(pod(image="mine:2"))["image"] == "mine:2"


CLAIM = {"persistentVolumeClaim": {"claimName": "checkpoints"}}
WITH_VOLUME = PodSettings("e:1", "i", checkpoint_volume=CLAIM, checkpoint_root="/checkpoints")


def test_a_pod_gets_only_the_directory_of_its_own_job_from_the_shared_volume() -> None:
    document = pod(settings=WITH_VOLUME)
    assert {"name": "checkpoints", **CLAIM} in document["spec"]["volumes"]
    (mount,) = [one for one in worker(document)["volumeMounts"] if one["name"] == "checkpoints"]
    namespace = document["metadata"]["namespace"]
    own = f"{namespace}/{document['metadata']['labels']['holdfast.dev/job']}"
    place = {"mountPath": f"/checkpoints/{own}", "subPath": own}
    assert mount == {"name": "checkpoints", **place}


def test_a_job_with_checkpoints_elsewhere_gets_no_part_of_the_volume() -> None:
    for path in ("s3://bucket/x", "/checkpoints", "/checkpoints/team", "/checkpoints/other/evil"):
        document = pod(settings=WITH_VOLUME, checkpoint={"path": path})
        assert "checkpoints" not in str(document["spec"]["volumes"])
        assert "checkpoints" not in str(worker(document)["volumeMounts"])


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": [{"name": "worker", "volumeMounts": [
            {"name": "checkpoints", "mountPath": "/all"}]}]},
        {"containers": [{"name": "worker", "volumeMounts": [
            {"name": "checkpoints", "mountPath": "/x", "subPathExpr": "$(POD_NAME)"}]}]},
        {"initContainers": [{"name": "i", "volumeMounts": [
            {"name": "checkpoints", "mountPath": "/x", "subPath": "team-b/other"}]}]},
        {"volumes": [{"name": "again", "persistentVolumeClaim": {
            "claimName": "checkpoints", "readOnly": True}}]},
        {"volumes": [{"name": "checkpoints", "emptyDir": {}}]},
    ],
    ids=["whole-volume", "expression", "other-job", "same-claim", "replaced"],
)  # fmt: skip
def test_a_template_that_reaches_the_checkpoints_of_other_jobs_is_refused(
    spec: dict[str, Any],
) -> None:
    with pytest.raises(UserError, match=r"spec.kubernetes.podTemplate.spec.\w+.*got .*expected"):
        pod(settings=WITH_VOLUME, kubernetes={"podTemplate": {"spec": spec}})


CACHE = {"persistentVolumeClaim": {"claimName": "cache"}}
WITH_CACHE = PodSettings("e:1", "i", cache_volume=CACHE)


def test_pods_keep_what_compilers_produce_in_the_directory_of_their_namespace() -> None:
    document = pod(settings=WITH_CACHE)
    assert {"name": "compile-cache", **CACHE} in document["spec"]["volumes"]
    (mount,) = [one for one in worker(document)["volumeMounts"] if one["name"] == "compile-cache"]
    directory = mount["mountPath"]
    namespace = document["metadata"]["namespace"]
    assert mount == {"name": "compile-cache", "mountPath": directory, "subPath": namespace}
    assert {"name": "HOLDFAST_CACHE_DIR", "value": directory} in worker(document)["env"]


def test_a_job_may_keep_what_is_compiled_elsewhere() -> None:
    mine = {"name": "worker", "env": [{"name": "HOLDFAST_CACHE_DIR", "value": "/mine"}]}
    template = {"podTemplate": {"spec": {"containers": [mine]}}}
    found = worker(pod(settings=WITH_CACHE, kubernetes=template))["env"]
    chosen = [one["value"] for one in found if one["name"] == "HOLDFAST_CACHE_DIR"]
    assert chosen == ["/mine"]


@pytest.mark.parametrize(
    "spec",
    [
        {"containers": [{"name": "worker", "volumeMounts": [
            {"name": "compile-cache", "mountPath": "/x", "subPath": "team-b"}]}]},
        {"volumes": [{"name": "again", **CACHE}]},
    ],
    ids=["other-namespace", "same-claim"],
)  # fmt: skip
def test_a_template_that_reaches_what_other_namespaces_compile_is_refused(
    spec: dict[str, Any],
) -> None:
    with pytest.raises(UserError, match=r"spec.kubernetes.podTemplate.spec.\w+.*got .*expected"):
        pod(settings=WITH_CACHE, kubernetes={"podTemplate": {"spec": spec}})


WITH_REQUESTS = PodSettings("e:1", "i", requests={"cpu": "250m", "memory": "512Mi"})


def test_a_pod_without_resources_requests_the_operators_defaults_per_worker() -> None:
    document = pod(settings=WITH_REQUESTS, workersPerNode=4)
    assert worker(document)["resources"] == {
        "requests": {"cpu": "1000m", "memory": str(4 * 512 * 2**20)}
    }


def test_what_the_job_or_its_template_requests_is_kept() -> None:
    given = pod(settings=WITH_REQUESTS, resources={"cpu": 2, "memory": "4Gi"})
    assert worker(given)["resources"]["requests"] == {"cpu": "2000m", "memory": str(4 * 2**30)}
    limits = {"name": "worker", "resources": {"limits": {"memory": "1Gi"}}}
    template = {"podTemplate": {"spec": {"containers": [limits]}}}
    found = worker(pod(settings=WITH_REQUESTS, kubernetes=template))["resources"]
    assert found == {"limits": {"memory": "1Gi"}, "requests": {"cpu": "250m"}}


def test_the_jobs_own_secret_reaches_its_pods() -> None:
    document = pod(checkpoint={"path": "s3://mine/x", "secretName": "store"})
    assert worker(document)["envFrom"] == [{"secretRef": {"name": "store"}}]


def test_merging_changes_neither_side_and_null_removes() -> None:
    base = {"a": {"b": 1, "c": 2}, "env": [{"name": "x", "value": "1"}]}
    over = {"a": {"b": None}, "env": [{"name": "x", "value": "2"}, {"name": "y"}]}
    kept = json.loads(json.dumps([base, over]))
    assert merge(base, over) == {"a": {"c": 2}, "env": [{"name": "x", "value": "2"}, {"name": "y"}]}
    assert [base, over] == kept


def test_lists_without_a_key_are_replaced() -> None:
    base = {"args": ["1", "2"], "env": [{"name": "x"}]}
    assert merge(base, {"args": ["3"]}) == {"args": ["3"], "env": [{"name": "x"}]}


def test_nodes_of_released_pods_are_doubtful_until_the_pods_have_ended() -> None:
    tracker = PodTracker(released={"a", "b"})

    def on(node: str, phase: str) -> dict[str, Any]:
        return {"spec": {"nodeName": node}, "status": {"phase": phase}, "metadata": {}}

    pods = {"a": on("n1", "Running"), "b": on("n2", "Failed"), "c": on("n3", "Running")}
    assert tracker.doubtful(pods) == {"n1"}
