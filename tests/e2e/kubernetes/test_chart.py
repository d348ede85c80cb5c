"""The chart on a real API server: it installs, its policies refuse, and its roles suffice.

On a separate control plane, because a policy holds for the whole cluster. There are no nodes;
test_operator.py tests the operator.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from helm import render
from holdfast.orchestrator.limits import RELEASE
from tests.e2e.kubernetes.conftest import fresh, skip_without
from tests.e2e.kubernetes.rig import binaries as programs
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.rig.run import Run
from tests.e2e.kubernetes.rig.waiting import until
from tests.unit.api.wrong_jobs import SCRIPT, job

pytestmark = pytest.mark.e2e

OPERATOR = f"system:serviceaccount:{render.NAMESPACE}:holdfast-operator"


class Helm:
    """helm as a user runs it."""

    def __init__(self, program: Path, home: Path, kubeconfig: Path | None = None) -> None:
        self.program = program
        self.notes = ""
        """The notes of an installed release."""
        places = {f"HELM_{kind}_HOME": str(home / kind) for kind in ("CACHE", "CONFIG", "DATA")}
        self._environment = {**os.environ, **places}
        if kubeconfig:
            self._environment["KUBECONFIG"] = str(kubeconfig)

    def attempt(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(self.program), *words],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def run(self, *words: str) -> str:
        done = self.attempt(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def program(binaries: programs.Binaries) -> Path:
    skip_without(binaries, ("helm",))
    return binaries.path("helm")


@pytest.fixture
def chart(program: Path, tmp_path: Path) -> Helm:
    """helm without a cluster."""
    return Helm(program, tmp_path)


def rendered(chart: Helm, *options: str) -> list[dict[str, Any]]:
    words = ("template", "holdfast", str(render.CHART), "--namespace", render.NAMESPACE)
    text = chart.run(*words, "--kube-version", render.OLDEST, *options)
    return [document for document in yaml.safe_load_all(text) if document]


def kinds(documents: list[dict[str, Any]]) -> set[str]:
    return {document["kind"] for document in documents}


# -- without a cluster -------------------------------------------------------------------------
@pytest.mark.parametrize("options", [[], ["--set", "watchNamespaces={a,b}"]], ids=["all", "some"])
def test_lint_finds_nothing(chart: Helm, options: list[str]) -> None:
    text = chart.run("lint", "--strict", str(render.CHART), *options)
    assert "0 chart(s) failed" in text
    assert "[WARNING]" not in text and "[ERROR]" not in text


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("replicaz=3", "'replicaz' not allowed"),
        ("replicas=0", "/replicas"),
        ("watchNamespaces={Not_A_Name}", "/watchNamespaces/0"),
        ("checkpoints.root=relative", "/checkpoints/root"),
        ("metrics.prometheusRule.goodputRatio=95", "/metrics/prometheusRule/goodputRatio"),
        ("serviceAccount.create=false", "expected the name of a service account"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(chart: Helm, option: str, message: str) -> None:
    words = ("template", "holdfast", str(render.CHART), "--kube-version", render.OLDEST)
    done = chart.attempt(*words, "--set", option)
    assert done.returncode != 0
    assert message in done.stderr


def test_the_crd_takes_any_field_of_a_pod_template_on_request(chart: Helm) -> None:
    def spec(*options: str) -> dict[str, Any]:
        (crd,) = [d for d in rendered(chart, *options) if d["kind"] == "CustomResourceDefinition"]
        schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        template = schema["properties"]["kubernetes"]["properties"]["podTemplate"]
        found: dict[str, Any] = template["properties"]["spec"]
        return found

    assert "tolerations" in spec()["properties"]
    opened = spec("--set", "crds.podTemplate=open")
    assert opened == {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def test_names_and_labels_can_be_chosen(chart: Helm) -> None:
    labels = {"commonLabels": {"team": "platform"}}
    documents = rendered(
        chart, "--set", "fullnameOverride=keeper,nameOverride=hf", "--set-json",
        f"commonLabels={json.dumps(labels['commonLabels'])}",
    )  # fmt: skip
    own = [d for d in documents if d["kind"] != "CustomResourceDefinition"]
    assert all("keeper" in d["metadata"]["name"] for d in own)
    assert all(d["metadata"]["labels"]["team"] == "platform" for d in own)
    (deployment,) = [d for d in own if d["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]
    assert pod["metadata"]["labels"]["team"] == "platform"
    assert pod["metadata"]["labels"]["app.kubernetes.io/name"] == "hf"
    assert "team" not in deployment["spec"]["selector"]["matchLabels"], "it cannot change later"


def test_the_operator_gets_further_volumes_a_startup_probe_and_a_priority_class(
    chart: Helm,
) -> None:
    volume = [{"name": "ca", "configMap": {"name": "ca"}}]
    mount = [{"name": "ca", "mountPath": "/etc/ca"}]
    documents = rendered(
        chart, "--set-json", f"extraVolumes={json.dumps(volume)}",
        "--set-json", f"extraVolumeMounts={json.dumps(mount)}",
    )  # fmt: skip
    (deployment,) = [d for d in documents if d["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    assert volume[0] in spec["volumes"] and mount[0] in spec["containers"][0]["volumeMounts"]
    assert spec["containers"][0]["startupProbe"]["failureThreshold"] == 60
    (made,) = [d for d in documents if d["kind"] == "PriorityClass"]
    assert spec["priorityClassName"] == made["metadata"]["name"]
    chosen = rendered(chart, "--set", "priorityClassName=system-cluster-critical")
    assert "PriorityClass" not in kinds(chosen)


def test_a_volume_for_what_is_compiled_reaches_the_operators_command_line(chart: Helm) -> None:
    volume = {"persistentVolumeClaim": {"claimName": "cache"}}
    documents = rendered(chart, "--set-json", f"worker.cacheVolume={json.dumps(volume)}")
    (deployment,) = [d for d in documents if d["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (option,) = [one for one in container["args"] if one.startswith("--cache-volume=")]
    assert json.loads(option.partition("=")[2]) == volume
    assert all(one["name"] != "compile-cache" for one in container["volumeMounts"])


def test_monitoring_resources_are_optional(chart: Helm) -> None:
    foreign = {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    assert not foreign & kinds(rendered(chart))
    options = [f"metrics.{kind}.enabled=true" for kind in
               ("serviceMonitor", "podMonitor", "prometheusRule", "dashboard")]  # fmt: skip
    documents = rendered(chart, "--set", ",".join(options))
    assert foreign <= kinds(documents)
    (dashboard,) = [d for d in documents if d["metadata"]["name"].endswith("-dashboard")]
    assert json.loads(dashboard["data"]["holdfast.json"])["title"] == "Holdfast"
    (rules,) = [d for d in documents if d["kind"] == "PrometheusRule"]
    assert {rule["alert"] for group in rules["spec"]["groups"] for rule in group["rules"]} >= {
        "HoldfastHang", "HoldfastJobFailed", "HoldfastRestartStorm", "HoldfastCheckpointOld",
        "HoldfastGoodputLow",
    }  # fmt: skip


def test_a_namespaced_operator_has_no_rights_elsewhere(chart: Helm) -> None:
    documents = rendered(chart, "--set", "watchNamespaces={a,b}")
    cluster_wide = [
        resource
        for document in documents
        if document["kind"] == "ClusterRole" and document["metadata"]["name"].endswith("-operator")
        for rule in document["rules"]
        for resource in rule["resources"]
    ]
    assert cluster_wide == ["nodes"]
    where = {d["metadata"]["namespace"] for d in documents if d["kind"] == "RoleBinding"}
    assert where == {"a", "b", render.NAMESPACE}
    (deployment,) = [d for d in documents if d["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert {"--namespace=a", "--namespace=b"} <= set(container["args"])
    policies = [d["metadata"] for d in documents if d["kind"] == "NetworkPolicy"]
    assert {p["namespace"] for p in policies} == {"a", "b", render.NAMESPACE}


def test_the_documented_patch_of_the_manifests_adds_a_checkpoint_volume(
    binaries: programs.Binaries, tmp_path: Path
) -> None:
    """The patch of docs/operations/kubernetes.md, applied to manifests/."""
    skip_without(binaries, ("kubectl",))
    page = (render.ROOT / "docs/operations/kubernetes.md").read_text()
    (text,) = re.findall(r"```yaml\n# mine/kustomization.yaml\n(.*?)```", page, re.DOTALL)
    shutil.copytree(render.MANIFESTS, tmp_path / "manifests")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "kustomization.yaml").write_text(text)
    command = [str(binaries.path("kubectl")), "kustomize", str(mine)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    documents = list(yaml.safe_load_all(done.stdout))
    (deployment,) = [d for d in documents if d["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"][0] == "operator", "added, not put in place of the others"
    assert container["args"][-1] == "--checkpoint-root=s3://bucket/jobs"
    assert container["envFrom"] == [{"secretRef": {"name": "object-store"}}]


# -- installed ---------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def plane(binaries: programs.Binaries, program: Path) -> Iterator[ControlPlane]:
    skip_without(binaries, programs.CONTROL_PLANE)
    with Run() as run:
        plane = ControlPlane(run, binaries)
        plane.start()
        yield plane


@pytest.fixture(scope="module")
def helm(
    plane: ControlPlane, program: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Helm]:
    """The chart, installed into a namespace with the restricted standard."""
    helm = Helm(program, tmp_path_factory.mktemp("helm"), plane.kubeconfig)
    kubectl = plane.kubectl()
    kubectl.run("create", "namespace", render.NAMESPACE)
    label = "pod-security.kubernetes.io/enforce=restricted"
    kubectl.run("label", "namespace", render.NAMESPACE, label)
    namespace = ("--namespace", render.NAMESPACE)
    helm.notes = helm.run("install", "holdfast", str(render.CHART), *namespace)
    assert "runs TrainingJobs in all namespaces" in helm.notes
    kubectl.served("trainingjobs.holdfast.dev")
    yield helm


def test_the_notes_warn_about_missing_checkpoint_storage_and_their_command_adds_it(
    helm: Helm, plane: ControlPlane
) -> None:
    assert "checkpoints.root is empty" in helm.notes
    assert "the example has none" in helm.notes
    (line,) = re.findall(r"^ +(helm upgrade .*)$", helm.notes, re.MULTILINE)
    words = [str(render.CHART) if w == "CHART" else w for w in shlex.split(line)[1:]]
    notes = helm.run(*words)
    assert "checkpoints.root is empty" not in notes and "helm upgrade" not in notes
    deployment = plane.kubectl(render.NAMESPACE).json("get", "deployment", "holdfast-operator")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert "--checkpoint-root=s3://BUCKET/PREFIX" in container["args"]


@pytest.fixture
def user(helm: Helm, plane: ControlPlane) -> Iterator[Kubectl]:
    """kubectl in a namespace of its own, where the chart is installed."""
    assert helm.program
    yield from fresh(plane.kubectl())


def test_the_operators_pod_is_admitted_by_the_restricted_standard(
    helm: Helm, plane: ControlPlane
) -> None:
    deployment = plane.kubectl(render.NAMESPACE).json("get", "deployment", "holdfast-operator")
    template = deployment["spec"]["template"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**template["metadata"], "name": "by-hand"},
        "spec": template["spec"],
    }
    kubectl = plane.kubectl(render.NAMESPACE)
    kubectl.run("create", "--dry-run=server", "--filename=-", stdin=yaml.safe_dump(pod))
    pod["spec"]["containers"][0]["securityContext"]["capabilities"] = {}
    text = kubectl.refusal("create", "--dry-run=server", "--filename=-", stdin=yaml.safe_dump(pod))
    assert "violates PodSecurity" in text


# The rules of the policy in the order of the chart: a patch, and the message for the user.
POLICY = [
    (
        {"metadata": {"annotations": {"holdfast.dev/cancle": "me"}}},
        "metadata.annotations: got holdfast.dev/cancle; expected one of holdfast.dev/cancel, "
        "holdfast.dev/request",
    ),
    (
        {"metadata": {"annotations": {"holdfast.dev/request": '{"verb": "burn"}'}}},
        "verb is checkpoint, chaos or resume",
    ),
    (
        {"spec": {"resources": {"cpu": 4, "memory": "64GB"}}},
        "spec.resources.memory: got 64GB; expected a quantity such as 2, 500m or 4Gi; write the "
        "number alone for cores or bytes, 64Gi (powers of 1024) or 64G (of 1000) for gigabytes",
    ),
    (
        {
            "spec": {
                "parallelism": {"shard": 4, "fsdp": {"reshardAfterForward": 3}},
                "workersPerNode": 4,
            }
        },
        "spec.parallelism.fsdp.reshardAfterForward: got 3; expected true, false or a divisor of "
        "shard (4)",
    ),
]


@pytest.mark.parametrize(
    ("patch", "message"), POLICY, ids=["annotation", "request", "units", "reshard"]
)
def test_the_policy_refuses_what_the_crd_cannot_check(
    user: Kubectl, patch: dict[str, Any], message: str
) -> None:
    user.create(job(SCRIPT))
    text = user.refusal("patch", "tj", "right", "--type=merge", "--patch", json.dumps(patch))
    assert message in text


def test_the_api_server_finds_no_mistake_in_the_policies(helm: Helm, plane: ControlPlane) -> None:
    policies = plane.kubectl().json("get", "validatingadmissionpolicies")["items"]
    rules = {p["metadata"]["name"]: p["spec"]["validations"] for p in policies}
    assert len(rules[f"{render.NAMESPACE}-holdfast-jobs"]) > len(POLICY), "see test_wrong_specs.py"
    assert len(rules[f"{render.NAMESPACE}-holdfast-status"]) == 1
    assert len(rules[f"{render.NAMESPACE}-holdfast-operator"]) == 3
    for policy in policies:  # type errors that the API server found
        assert not policy.get("status", {}).get("typeChecking", {}).get("expressionWarnings")


@pytest.mark.parametrize(
    "annotation",
    [
        "holdfast.dev/cancel=ann",
        'holdfast.dev/request={"verb":"checkpoint","by":"ann"}',
        'holdfast.dev/request={"verb":"chaos","arguments":{"kind":"kill-worker","rank":3},"id":"1"}',
        "example.com/anything=goes",
    ],
)
def test_the_policy_lets_the_known_annotations_pass(user: Kubectl, annotation: str) -> None:
    user.create(job(SCRIPT))
    user.run("annotate", "tj", "right", annotation)


def test_only_the_operator_writes_the_status(user: Kubectl) -> None:
    user.create(job(SCRIPT))
    patch = ("patch", "tj", "right", "--subresource=status", "--type=merge", "--patch")
    text = user.refusal(*patch, '{"status":{"state":"succeeded"}}')
    assert f"status: got a change by admin; expected one by {OPERATOR}" in text
    assert "change spec, or annotate the job" in text
    user.run(*patch, '{"status":{"state":"running"}}', f"--as={OPERATOR}")
    user.create(job({**SCRIPT, "managedBy": "example.com/dispatcher"}, "theirs"))
    theirs = ("patch", "tj", "theirs", "--subresource=status", "--type=merge", "--patch")
    user.run(*theirs, '{"status":{"state":"running"}}')


def test_editors_of_a_namespace_may_run_jobs_but_not_write_their_status(
    user: Kubectl,
) -> None:
    user.run("create", "rolebinding", "ann", "--clusterrole=edit", "--user=ann")
    user.run("create", "rolebinding", "vic", "--clusterrole=view", "--user=vic")
    user.run("apply", "--as=ann", "--filename=-", stdin=yaml.safe_dump(job(SCRIPT)))
    user.run("scale", "--as=ann", "tj/right", "--replicas=3")
    assert "right" in user.run("get", "tj", "--as=vic")
    text = user.refusal("scale", "--as=vic", "tj/right", "--replicas=1")
    assert 'cannot patch resource "trainingjobs/scale"' in text
    patch = ("--subresource=status", "--type=merge", "--patch", '{"status":{"state":"x"}}')
    text = user.refusal("patch", "tj", "right", "--as=ann", *patch)
    assert 'cannot patch resource "trainingjobs/status"' in text
    user.run("delete", "tj", "right", "--as=ann")


@pytest.mark.parametrize(
    ("verb", "resource", "allowed"),
    [
        ("create", "pods", True),
        ("delete", "pods", True),
        ("update", "configmaps", True),
        ("get", "secrets", True),
        ("get", "nodes", True),
        ("patch", "trainingjobs.holdfast.dev/status", True),
        ("list", "secrets", False),
        ("watch", "secrets", False),
        ("delete", "secrets", False),
        ("list", "configmaps", False),
        ("create", "pods/exec", False),
        ("update", "nodes", False),
        ("create", "trainingjobs.holdfast.dev", False),
        ("get", "leases.coordination.k8s.io", False),
        ("create", "rolebindings.rbac.authorization.k8s.io", False),
    ],
)
def test_the_operator_has_the_rights_it_needs_and_no_more(
    user: Kubectl, verb: str, resource: str, allowed: bool
) -> None:
    name, _, sub = resource.partition("/")
    words = ["auth", "can-i", verb, name, *([f"--subresource={sub}"] if sub else [])]
    done = user.attempt(*words, f"--as={OPERATOR}")
    assert done.stdout.strip().splitlines()[-1] == ("yes" if allowed else "no"), done.stderr


OWNED = {
    "labels": {"holdfast.dev/job": "llm"},
    "ownerReferences": [
        {"apiVersion": "holdfast.dev/v1alpha1", "kind": "TrainingJob", "name": "llm", "uid": "1"}
    ],
}
RESTRICTED = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
KINDS: dict[str, dict[str, Any]] = {
    "Pod": {"spec": {"securityContext": RESTRICTED, "containers": [{
        "name": "worker", "image": "any", "securityContext": {
            "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}}]}},
    "Secret": {"type": "Opaque"},
    "ConfigMap": {"data": {"a": "b"}},
}  # fmt: skip
SYSTEM = ("kube-system", "kube-public", "kube-node-lease", render.NAMESPACE)


def written(kind: str, metadata: dict[str, Any], **fields: Any) -> str:
    head = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "written", **metadata}}
    return yaml.safe_dump({**head, **KINDS[kind], **fields})


@pytest.mark.parametrize("kind", KINDS)
def test_the_operator_writes_only_to_objects_of_jobs_and_in_no_system_namespace(
    user: Kubectl, kind: str
) -> None:
    create = ("create", "--filename=-", f"--as={OPERATOR}")
    dry = (*create, "--dry-run=server")
    labels, owners = ({part: OWNED[part]} for part in ("labels", "ownerReferences"))
    another = {**OWNED, "labels": {"holdfast.dev/job": "other"}}
    foreign = {**OWNED, "ownerReferences": [{**OWNED["ownerReferences"][0], "kind": "Job"}]}
    for metadata in ({}, labels, owners, another, foreign):
        text = user.refusal(*dry, stdin=written(kind, metadata))
        assert "the operator may write only to objects with the label holdfast.dev/job" in text
    for namespace in SYSTEM:
        text = user.inside(namespace).refusal(*dry, stdin=written(kind, OWNED))
        assert f"the operator may write nothing in namespace {namespace}" in text
    user.run(*create, stdin=written(kind, OWNED))


def test_the_operator_neither_changes_nor_deletes_what_others_made(user: Kubectl) -> None:
    system = user.inside("kube-system")
    system.run("create", "configmap", "coredns", "--from-literal=a=b")
    user.run("create", "--filename=-", stdin=written("Pod", {"name": "theirs"}))
    by = f"--as={OPERATOR}"
    uid = user.create(job(SCRIPT, "llm"))["metadata"]["uid"]
    owned = {**OWNED, "ownerReferences": [{**OWNED["ownerReferences"][0], "uid": uid}]}
    adopted = yaml.safe_dump({"metadata": owned})
    for kubectl, words in (
        (system, ("replace", "--filename=-")),
        (user, ("patch", "pod", "theirs", "--type=merge", "--patch", adopted)),
        (user, ("delete", "pod", "theirs", "--wait=false")),
    ):
        text = kubectl.refusal(*words, by, stdin=written("ConfigMap", {"name": "coredns"}))
        assert "the operator may write only to objects with the label holdfast.dev/job" in text
    user.run("create", "--filename=-", by, stdin=written("Pod", owned))
    user.run("label", "pod", "written", "holdfast.dev/rank=0", by)
    text = user.refusal("label", "pod", "written", "holdfast.dev/job=other", "--overwrite", by)
    assert "the operator may write only to objects" in text
    user.run("delete", "pod", "written", "--wait=false", by)


def test_the_operator_makes_no_secret_that_the_cluster_fills_with_a_token(user: Kubectl) -> None:
    named = {**OWNED, "annotations": {"kubernetes.io/service-account.name": "default"}}
    document = written("Secret", named, type="kubernetes.io/service-account-token")
    text = user.refusal("create", "--filename=-", f"--as={OPERATOR}", stdin=document)
    assert "the operator may write only to Secrets of the type Opaque" in text


@pytest.mark.parametrize("namespace", SYSTEM)
def test_a_job_in_a_system_namespace_is_rejected(user: Kubectl, namespace: str) -> None:
    words = ("create", "--filename=-", "--dry-run=server")
    text = user.inside(namespace).refusal(*words, stdin=yaml.safe_dump(job(SCRIPT)))
    assert f"metadata.namespace: got {namespace}; expected a namespace of users" in text


def test_an_operator_of_its_own_namespace_runs_jobs_there(chart: Helm) -> None:
    for options, own in (
        ([], True),
        (["--set", f"watchNamespaces={{{render.NAMESPACE}}}"], False),
    ):
        policies = [d for d in rendered(chart, *options) if d["kind"].endswith("AdmissionPolicy")]
        excluded = [str(d["spec"]["validations"]).count(f"'{render.NAMESPACE}'") for d in policies]
        assert excluded == ([1, 0, 1] if own else [0, 0, 0])


def commands() -> list[str]:
    """The kubectl lines of the quickstart and of docs/operations/kubernetes.md."""
    pages = ("user/quickstart-kubernetes.md", "operations/kubernetes.md")
    text = "".join((render.ROOT / "docs" / page).read_text() for page in pages)
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("kubectl ")]


def test_every_kubectl_line_of_the_docs_works(user: Kubectl) -> None:
    """The lines run from the root of the repository; the test writes the status of the operator."""
    lines = [line for line in commands() if not line.startswith("kubectl apply -k")]
    assert len(lines) > 15
    for line in lines:
        words = shlex.split(line)[1:]
        if words[0] == "wait":
            kind = re.findall(r"--for=condition=(\w+)", line)[0]
            said = {"type": kind, "status": "True", "reason": "Tried", "message": "",
                    "lastTransitionTime": "2026-01-01T00:00:00Z"}  # fmt: skip
            patch = json.dumps({"status": {"state": "running", "conditions": [said]}})
            user.run("patch", "tj", "stdlib-bytes", "--subresource=status", "--type=merge",
                     "--patch", patch, f"--as={OPERATOR}")  # fmt: skip
        words = [word for word in words if word != "--watch"]  # does not end
        words = [str(render.ROOT / w) if w.startswith("examples/") else w for w in words]
        done = user.attempt(*words)
        assert done.returncode == 0, f"{line}: {done.stderr}"
    assert user.get("tj", "stdlib-bytes") is None


def test_uninstall_keeps_the_jobs_and_the_manifests_install_over_them(
    helm: Helm, plane: ControlPlane
) -> None:
    kubectl = plane.kubectl()
    kubectl.create(job(SCRIPT, "kept"))
    helm.run("uninstall", "holdfast", "--namespace", render.NAMESPACE, "--wait")
    assert kubectl.get("tj", "kept") is not None
    assert kubectl.get("clusterrole", f"{render.NAMESPACE}-holdfast-operator") is None
    kubectl.run("apply", "--kustomize", str(render.MANIFESTS))
    assert kubectl.get("tj", "kept") is not None
    kubectl.run("auth", "can-i", "create", "pods", f"--as={OPERATOR}")
    kubectl.run("delete", "--kustomize", str(render.MANIFESTS), "--wait=false")


def test_the_install_lines_of_the_docs_work_as_written(
    helm: Helm, plane: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above has uninstalled the chart."""
    monkeypatch.chdir(render.ROOT)
    namespace = functools.partial(plane.kubectl().get, "namespace", render.NAMESPACE)
    until(lambda: namespace() is None, "the namespace to be gone", timeout_s=60)
    for page in ("user/quickstart-kubernetes.md", "operations/kubernetes.md"):
        text = (render.ROOT / "docs" / page).read_text().replace("\\\n", "")
        (line,) = re.findall(r"^helm install .*", text, re.MULTILINE)
        helm.run(*shlex.split(line)[1:])
        system = plane.kubectl(render.NAMESPACE)
        deployment = system.get("deployment", "holdfast-operator") or {}
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        (image,) = re.findall(r"image.repository=(\S+)", line)
        assert container["image"] == f"{image}:{RELEASE}"
        (worker,) = re.findall(r"worker.image=(\S+)", line)
        assert f"--worker-image={worker}" in container["args"]
        helm.run("uninstall", "holdfast", "--namespace", render.NAMESPACE, "--wait")
