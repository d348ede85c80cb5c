"""The state of a pod in words: why it ended, is being removed, or does not start. Pure.

Sources: https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/ (conditions, reasons),
https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import NamedTuple

from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.names import Document

DISRUPTIONS = {
    "PreemptionByScheduler": "preempted by a pod of higher priority",
    "DeletionByTaintManager": "its Kubernetes node was tainted NoExecute",
    "EvictionByEvictionAPI": "evicted, by a drain for example",
    "DeletionByPodGC": "its Kubernetes node is gone",
    "TerminationByKubelet": "its Kubernetes node is being shut down or has too little resources",
}
NOTICES = (
    "aws-node-termination-handler/spot-itn",
    "aws-node-termination-handler/scheduled-maintenance",
    "aws-node-termination-handler/asg-lifecycle-termination",
    "cloud.google.com/impending-node-termination",
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",
    "ToBeDeletedByClusterAutoscaler",
    "node.cloudprovider.kubernetes.io/shutdown",
)
"""Taints of machines that will be taken away. With the effect NoSchedule they evict no pod."""
PULL_ERRORS = ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName")
GATED = "SchedulingGated"
MAX_MESSAGE = 600
REFUSALS = (
    ("violates PodSecurity", "PodSecurity"),
    ("no PriorityClass with name", "PriorityClassMissing"),
    ("error looking up service account", "ServiceAccountMissing"),
    ("is forbidden: maximum ", "LimitRange"),
    ("is forbidden: minimum ", "LimitRange"),
    ("denied the request", "AdmissionDenied"),
)
"""Part of the API server's message for a pod that it does not create -> code. Nothing becomes free
later in these cases; all others, such as an exceeded quota, are NoRoom."""


class PodProblem(NamedTuple):
    """Reason why a pod has not started; it may be temporary."""

    code: str
    """CamelCase, for conditions: Unschedulable, ImagePullBackOff, ..."""
    text: str


def refusal_code(message: str) -> str:
    """Reason why the API server does not create a pod, as one CamelCase word."""
    return next((code for part, code in REFUSALS if part in message), "NoRoom")


def is_over(pod: Document) -> bool:
    """The agent has ended, and the pod is not restarted."""
    return _phase(pod) in ("Succeeded", "Failed") or _ended_container(pod) is not None


def is_running(pod: Document) -> bool:
    """The agent's container runs."""
    state = _container(pod).get("state", {})
    return _phase(pod) == "Running" and "running" in state


def is_terminating(pod: Document) -> bool:
    """True if the pod is being deleted and may still run."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def is_active(pod: Document) -> bool:
    """Neither over nor being deleted."""
    return not is_over(pod) and not is_terminating(pod)


def node_name(pod: Document) -> str:
    """The Kubernetes node; empty before it is scheduled."""
    return str(pod.get("spec", {}).get("nodeName") or "")


def has_trained(pod: Document) -> bool:
    """True if the pod's label names a generation that has finished a step."""
    return names.LABEL_RANK in (pod["metadata"].get("labels") or {})


def job(pod: Document) -> str:
    """The job, namespace/name, for log lines."""
    metadata = pod["metadata"]
    name = (metadata.get("labels") or {}).get(names.LABEL_JOB, "")
    return f"{metadata.get('namespace', '')}/{name}" if name else ""


def disruption(pod: Document) -> str:
    """Reason why Kubernetes removes the pod (condition DisruptionTarget); empty if it does not."""
    for condition in _conditions(pod):
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            reason = str(condition.get("reason", ""))
            text = DISRUPTIONS.get(reason, f"it is being removed ({reason})")
            return _with_message(text, condition.get("message", ""))
    return ""


def notice(taints: Iterable[Document]) -> str:
    """Reason why a Kubernetes node will be taken away, by its taints; empty: nothing is known."""
    keys = [str(taint.get("key")) for taint in taints if taint.get("key") in NOTICES]
    return f"its Kubernetes node has the taint {keys[0]} and will be taken away" if keys else ""


def end(pod: Document, *, deleted: bool = False) -> str:
    """One sentence on the pod's end. `deleted`: `pod` is the last state of a deleted object."""
    where = f" on {node_name(pod)}" if node_name(pod) else ""
    host = f"its Kubernetes node{where.removeprefix(' on')}"
    why = disruption(pod)
    reason = str(pod.get("status", {}).get("reason", ""))
    message = str(pod.get("status", {}).get("message", ""))
    if reason == "Evicted":
        return _with_message(f"evicted{where} by its kubelet", message)
    if reason in ("NodeShutdown", "Terminated", "Shutdown"):
        return _with_message(f"{host} was shut down", message)
    if reason == "DeadlineExceeded":
        return f"its pod{where} was active for longer than activeDeadlineSeconds of its template"
    if reason in ("NodeLost", "Preempting"):
        return _with_message(f"{host} was lost", message)
    ended = _ended_container(pod)
    if ended is not None:
        text = _exit(ended, where)
        return f"{text}; {why}" if why else text
    if why:
        return f"its pod{where} is gone: {why}"
    if _phase(pod) == "Failed":
        return _with_message(f"its pod{where} failed ({reason or 'no reason given'})", message)
    if _phase(pod) == "Succeeded":
        return f"its pod{where} has ended"
    return f"its pod{where} was deleted" if deleted else f"its pod{where} ended"


def _exit(ended: Document, where: str) -> str:
    reason, code = str(ended.get("reason", "")), int(ended.get("exitCode", 0))
    message = str(ended.get("message", ""))
    if reason == "OOMKilled":
        return (
            f"OOMKilled{where}: the pod used more memory than its limit; raise "
            f"spec.resources.memory (the memory tier and /dev/shm count against it)"
        )
    if reason in ("ContainerCannotRun", "StartError"):
        return _with_message(f"its container could not be started{where}", message)
    if reason == "ContainerStatusUnknown":
        return f"its container{where} is gone; the kubelet does not know how it ended"
    number = int(ended.get("signal") or (code - 128 if code > 128 else 0))
    if number:
        try:
            name = signal.Signals(number).name
        except ValueError:
            name = f"signal {number}"
        return _with_message(f"its agent was ended by {name}{where}", message)
    return _with_message(f"its agent ended with exit code {code}{where}", message)


def problem(pod: Document) -> PodProblem | None:
    """Reason why the pod does not start; None if it starts, runs or is over."""
    if is_over(pod) or is_running(pod):
        return None
    for condition in _conditions(pod):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            code = str(condition.get("reason", "Unschedulable"))
            if code == GATED:
                return PodProblem(
                    code, "held back by a scheduling gate: a queue has not admitted it"
                )
            message = condition.get("message", "") or "no reason given"
            return PodProblem(code, f"the scheduler finds no node: {message}"[:MAX_MESSAGE])
    for status in (*_statuses(pod, "initContainerStatuses"), *_statuses(pod, "containerStatuses")):
        waiting = status.get("state", {}).get("waiting", {})
        code = str(waiting.get("reason", ""))
        message = str(waiting.get("message", ""))
        if code in PULL_ERRORS:
            text = f"image {status.get('image', '')} cannot be pulled"
            return PodProblem(code, _with_message(text, message))
        if code and code not in ("ContainerCreating", "PodInitializing"):
            return PodProblem(code, _with_message(f"{status['name']} cannot be started", message))
    return None


def not_started(pod: Document, seconds: float) -> str:
    """Reason why a pod is released that did not start in time."""
    fault = problem(pod)
    text = fault.text if fault else "its containers did not start"
    return f"not started within {seconds:g} s: {text}"


def _with_message(text: str, message: object) -> str:
    line = " ".join(str(message or "").split())
    return f"{text}: {line}"[:MAX_MESSAGE] if line else text


def _phase(pod: Document) -> str:
    return str(pod.get("status", {}).get("phase", "Pending"))


def _conditions(pod: Document) -> list[Document]:
    return list(pod.get("status", {}).get("conditions") or ())


def _statuses(pod: Document, kind: str) -> list[Document]:
    return list(pod.get("status", {}).get(kind) or ())


def _container(pod: Document) -> Document:
    for status in _statuses(pod, "containerStatuses"):
        if status["name"] == names.CONTAINER:
            return status
    return {}


def _ended_container(pod: Document) -> Document | None:
    """Final, since the restartPolicy is Never."""
    ended: Document | None = _container(pod).get("state", {}).get("terminated")
    return ended
