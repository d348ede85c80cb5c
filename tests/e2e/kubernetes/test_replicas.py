"""Replicas of the operator: leader election, takeover, and probes. Each test has its own."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from holdfast.orchestrator.api.v1alpha1.crd import NAME
from holdfast.orchestrator.hosts.kubernetes.status import condition
from holdfast.orchestrator.kube.pod_schema import definition_text
from tests.e2e.kubernetes.replica import Replica
from tests.e2e.kubernetes.rig.control_plane import ControlPlane
from tests.e2e.kubernetes.rig.existing_cluster import GivenCluster
from tests.e2e.kubernetes.rig.kubectl import Kubectl
from tests.e2e.kubernetes.rig.waiting import until
from tests.e2e.kubernetes.unschedulable import (
    BOUND_S,
    Plane,
    install,
    job,
    names_of,
    pods,
    reason_of,
    wait_message,
    wait_pods,
)

pytestmark = pytest.mark.e2e


def test_another_replica_takes_over_when_the_leader_is_killed(
    plane: Plane, tmp_path: Path, namespace: Kubectl
) -> None:
    first, second = (Replica(plane.kubeconfig, tmp_path, (namespace.namespace,)) for _ in range(2))
    first.start_leading()
    second.start()
    namespace.apply(job("heir"))
    before = names_of(wait_pods(namespace, "heir", 2))
    assert not second.leads()
    assert second.get("/readyz")[0] == 200, "a standby is ready"
    first.kill()
    second.wait_leading()
    namespace.run("scale", "trainingjob/heir", "--replicas=3")
    after = names_of(wait_pods(namespace, "heir", 3))
    assert before < after, "the pods of the first leader stay"
    assert second.close() == 0


def test_an_operator_that_stops_releases_its_lease_and_its_jobs(
    plane: Plane, tmp_path: Path, namespace: Kubectl
) -> None:
    replica = Replica(
        plane.kubeconfig, tmp_path, (namespace.namespace,), "--lease-seconds=600"
    ).start_leading()
    namespace.apply(job("left"))
    wait_pods(namespace, "left", 2)
    assert replica.close() == 0
    left = namespace.get("trainingjob", "left")
    for kind in ("Ready", "Progressing"):
        assert condition(left or {}, kind)["status"] == "Unknown", "nothing renews it"
        assert reason_of(left, kind) == "NoOperator"
    assert "NoOperator" in namespace.run("get", "trainingjob", "left")
    heir = Replica(
        plane.kubeconfig, tmp_path, (namespace.namespace,), "--lease-seconds=600"
    ).start_leading()
    namespace.wait(
        "trainingjob", "left",
        lambda d: condition(d or {}, "Progressing").get("status") == "True", "to be looked at",
    )  # fmt: skip
    assert heir.close() == 0


def test_a_killed_operator_continues_from_the_journal(
    plane: Plane, tmp_path: Path, namespace: Kubectl
) -> None:
    replica = Replica(plane.kubeconfig, tmp_path, (namespace.namespace,)).start_leading()
    namespace.apply(job("orphan"))
    before = names_of(wait_pods(namespace, "orphan", 2))
    secret = namespace.json("get", "secret", "orphan-agents")["data"]
    replica.kill()
    victim = sorted(before)[0]
    namespace.run("delete", "pod", victim)
    namespace.run("scale", "trainingjob/orphan", "--replicas=3")
    replica.start_leading()
    replica.until(
        lambda: len(names_of(pods(namespace, "orphan")) - {victim}) == 3,
        "what was requested without an operator",
    )
    assert before - {victim} < names_of(pods(namespace, "orphan"))
    assert namespace.json("get", "secret", "orphan-agents")["data"] == secret
    assert replica.close() == 0


def test_a_finished_job_is_in_the_metrics_of_the_next_leader(
    plane: Plane, tmp_path: Path, namespace: Kubectl
) -> None:
    replica = Replica(plane.kubeconfig, tmp_path, (namespace.namespace,)).start_leading()
    namespace.apply(job("over"))
    wait_pods(namespace, "over", 2)
    namespace.run("annotate", "trainingjob", "over", "holdfast.dev/cancel=ann")
    namespace.wait(
        "trainingjob", "over",
        lambda d: bool((d or {}).get("status", {}).get("completionTime")), "to have ended",
    )  # fmt: skip
    assert replica.close() == 0
    replica.start_leading()
    state = f'{{job="over",namespace="{namespace.namespace}",state="cancelled"}} 1.0'
    replica.until(
        lambda: f"holdfast_job_state{state}" in replica.get("/metrics")[1],
        "the next leader to tell its state",
    )
    assert "holdfast_operator_jobs 0.0" in replica.get("/metrics")[1], "nothing was taken up"
    assert replica.close() == 0


def test_a_secret_deleted_without_an_operator_is_restored_or_its_loss_reported(
    plane: Plane, tmp_path: Path, namespace: Kubectl
) -> None:
    replica = Replica(plane.kubeconfig, tmp_path, (namespace.namespace,)).start_leading()
    namespace.apply(job("keyless"))
    wait_pods(namespace, "keyless", 2)
    before = namespace.json("get", "secret", "keyless-agents")["data"]
    replica.kill()
    namespace.run("delete", "secret", "keyless-agents")
    replica.start_leading()
    replica.until(
        lambda: (namespace.get("secret", "keyless-agents") or {}).get("data") == before,
        "the Secret to be restored from its copy",
    )
    replica.kill()
    namespace.run("delete", "secret", "keyless-agents", "keyless-agents-copy")
    replica.start_leading()
    wait_message(namespace, "keyless", "agents that still run cannot connect with the old one")
    assert namespace.json("get", "secret", "keyless-agents")["data"] != before
    assert replica.close() == 0


def test_a_running_job_continues_under_an_operator_that_would_refuse_it(
    plane: Plane, tmp_path: Path, namespace: Kubectl
) -> None:
    imageless = job("older")
    del imageless["spec"]["image"]
    lease = "--lease-name=older"
    first = Replica(
        plane.kubeconfig, tmp_path, (namespace.namespace,), lease, "--worker-image=some:1"
    )
    first.start_leading()
    namespace.apply(imageless)
    before = names_of(wait_pods(namespace, "older", 2))
    namespace.wait(
        "trainingjob", "older", lambda d: bool((d or {}).get("status", {}).get("jobId")), "known"
    )
    assert first.close() == 0
    second = Replica(plane.kubeconfig, tmp_path, (namespace.namespace,), lease).start_leading()
    found = wait_message(namespace, "older", "spec.image: got nothing")
    assert found["status"]["state"] == "pending", "it waits for its pods, as before"
    assert names_of(pods(namespace, "older")) == before
    assert second.close() == 0


def test_a_job_keeps_its_checkpoint_path_under_an_operator_with_another_root(
    plane: Plane, tmp_path: Path, namespace: Kubectl
) -> None:
    name, place = namespace.namespace, f"{tmp_path}/one/{namespace.namespace}/rooted"

    def path() -> str:
        return str(namespace.json("get", "trainingjob", "rooted")["status"].get("checkpointPath"))

    for nodes, root in ((2, f"{tmp_path}/one"), (3, f"{tmp_path}/two"), (4, "")):
        option = f"--checkpoint-root={root}"
        replica = Replica(
            plane.kubeconfig, tmp_path, (name,), "--lease-name=rooted", option
        ).start_leading()
        namespace.apply(job("rooted", nodes={"min": 1, "max": nodes}))
        wait_pods(namespace, "rooted", nodes)
        replica.until(lambda: path() == place, "its path in the status")
        assert replica.close() == 0
    assert not (tmp_path / "two").exists()


def test_an_expired_token_is_reported(plane: Plane, tmp_path: Path, namespace: Kubectl) -> None:
    if isinstance(plane, GivenCluster):
        pytest.skip("needs a kubeconfig of its own")
    old = base64.b64encode(b"expired").decode()
    kubeconfig = plane.write_kubeconfig(f"expired-{namespace.namespace}", token=old)
    replica = Replica(kubeconfig, tmp_path, (namespace.namespace,))
    replica.start()
    replica.until(lambda: "rejected the credentials" in replica.tail(), "the log")
    assert "log in again" in replica.tail()
    status, text = replica.get("/readyz")
    assert status == 503
    assert text.startswith("the lease cannot be acquired: ") and "log in again" in text
    assert replica.get("/healthz")[0] == 200, "a restart would not help"
    assert replica.close() == 0


def test_a_replica_without_rights_to_the_lease_is_not_ready(
    plane: Plane, tmp_path: Path, namespace: Kubectl
) -> None:
    if isinstance(plane, GivenCluster):
        pytest.skip("needs the token of a service account in a kubeconfig of its own")
    namespace.run("create", "serviceaccount", "unbound")
    token = namespace.run("create", "token", "unbound").strip()
    kubeconfig = plane.write_kubeconfig(f"unbound-{namespace.namespace}", token=token)
    replica = Replica(kubeconfig, tmp_path, (namespace.namespace,))
    replica.start()
    replica.until(
        lambda: "lease cannot be acquired: missing right: get leases" in replica.get("/readyz")[1],
        "readyz to name the missing right",
    )
    namespace.run("create", "role", "lease", "--verb=get,create,update", "--resource=leases")
    account = f"--serviceaccount={namespace.namespace}:unbound"
    namespace.run("create", "rolebinding", "lease", "--role=lease", account)
    replica.until(
        lambda: "missing right: list" in replica.get("/readyz")[1],
        "the lease, and what is missing next",
    )
    assert (replica.get("/readyz")[0], replica.get("/healthz")[0]) == (503, 200)
    assert replica.close() == 0


def test_a_standby_is_ready_until_an_outage_outlasts_the_lease(
    own_control_plane: ControlPlane, plane: Plane, tmp_path: Path, namespace: Kubectl
) -> None:
    replicas = [Replica(plane.kubeconfig, tmp_path, (namespace.namespace,)) for _ in range(2)]
    leader, heir = replicas
    leader.start_leading()
    heir.start()
    ready = (200, "ok\n")
    heir.until(lambda: heir.get("/readyz") == ready, "to stand by")
    own_control_plane.kill_api_server()
    try:
        heir.until(
            lambda: "the lease cannot be acquired: the API server" in heir.get("/readyz")[1],
            "readyz to name the outage",
        )
        assert heir.get("/readyz")[0] == 503
        assert heir.get("/healthz")[0] == 200
    finally:
        own_control_plane.start_api_server()
    for replica in replicas:  # one leads again, the other is standby
        until(
            lambda replica=replica: replica.get("/readyz") == ready,  # type: ignore[misc]
            "to be ready again",
            timeout_s=BOUND_S,
            last=replica.tail,
        )
    assert [replica.close() for replica in replicas] == [0, 0]


@pytest.fixture
def old_definition(plane: Plane) -> Iterator[None]:
    """A CRD with another version only; restored at the end."""
    if isinstance(plane, GivenCluster):
        pytest.skip("takes all TrainingJobs of the cluster away")
    kubectl = plane.kubectl()
    kubectl.run("delete", "crd", NAME, "--timeout=90s", timeout_s=100)
    definition = yaml.safe_load(definition_text())
    (version,) = definition["spec"]["versions"]
    version["name"] = "v1alpha0"
    kubectl.apply(definition)
    kubectl.served(NAME)
    yield
    kubectl.run("delete", "crd", NAME, "--timeout=90s", timeout_s=100)
    install(plane)


def test_an_operator_without_its_crd_reports_it_and_continues_with_it(
    plane: Plane, tmp_path: Path, namespace: Kubectl, old_definition: None
) -> None:
    replica = Replica(plane.kubeconfig, tmp_path, (namespace.namespace,))
    replica.start()
    problem = "does not serve trainingjobs.holdfast.dev in version v1alpha1; install this version"
    replica.until(lambda: problem in replica.get("/readyz")[1], "readyz to name the resource")
    assert replica.get("/readyz")[0] == 503 and replica.get("/healthz")[0] == 200
    assert replica.log.read_text().count(problem) == 1, replica.tail()
    plane.kubectl().run("delete", "crd", NAME, "--timeout=90s", timeout_s=100)
    install(plane)
    replica.wait_leading()
    namespace.apply(job("late"))
    wait_pods(namespace, "late", 2)
    assert replica.close() == 0
