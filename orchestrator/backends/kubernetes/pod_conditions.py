"""What pods, their conditions and the API server say -> plain sentences. Pure.

Owns: the wording, and telling an end from a trouble that may pass. Must not: touch the API or
decide what is done about it.

Sources: https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/ (conditions, reasons),
https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions
"""

from __future__ import annotations

import signal
from typing import Any, NamedTuple

from holdfast.orchestrator.kube import names

Document = dict[str, Any]

DISRUPTIONS = {
    "PreemptionByScheduler": "preempted by a pod of higher priority",
    "DeletionByTaintManager": "its Kubernetes node was tainted NoExecute",
    "EvictionByEvictionAPI": "evicted, by a drain for example",
    "DeletionByPodGC": "its Kubernetes node is gone",
    "TerminationByKubelet": "its Kubernetes node is being shut down or has too little resources",
}
PULL_ERRORS = ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName")
GATED = "SchedulingGated"
MAX_MESSAGE = 600


class PodProblem(NamedTuple):
    """Why a pod has not started. It may pass."""

    code: str
    """CamelCase, for conditions: Unschedulable, ImagePullBackOff, ..."""
    text: str


def is_over(pod: Document) -> bool:
    """Nothing of the node runs any more, or ever will."""
    return _phase(pod) in ("Succeeded", "Failed") or _ended_container(pod) is not None


def is_running(pod: Document) -> bool:
    """The agent's container runs."""
    state = _container(pod).get("state", {})
    return _phase(pod) == "Running" and "running" in state


def is_leaving(pod: Document) -> bool:
    """Somebody has deleted it; it may still run."""
    return bool(pod["metadata"].get("deletionTimestamp"))


def place(pod: Document) -> str:
    """The Kubernetes node; empty: none yet."""
    return str(pod.get("spec", {}).get("nodeName") or "")


def has_trained(pod: Document) -> bool:
    """It is, or was when it was last told, in a generation that has finished a step."""
    return names.LABEL_RANK in (pod["metadata"].get("labels") or {})


def job(pod: Document) -> str:
    """Whose it is, as the log has it: namespace/name."""
    metadata = pod["metadata"]
    name = (metadata.get("labels") or {}).get(names.LABEL_JOB, "")
    return f"{metadata.get('namespace', '')}/{name}" if name else ""


def disruption(pod: Document) -> str:
    """Why it is taken away, where Kubernetes says so (DisruptionTarget); empty: it is not."""
    for condition in _conditions(pod):
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            reason = str(condition.get("reason", ""))
            text = DISRUPTIONS.get(reason, f"it is taken away ({reason})")
            return _with_message(text, condition.get("message", ""))
    return ""


def end(pod: Document, *, deleted: bool = False) -> str:
    """How it ended, in one sentence. `deleted`: its object is gone, and this was its last state."""
    where = f" on {place(pod)}" if place(pod) else ""
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


def trouble(pod: Document) -> PodProblem | None:
    """Why it does not start; None: it starts, runs or is over."""
    if is_over(pod) or is_running(pod):
        return None
    for condition in _conditions(pod):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            code = str(condition.get("reason", "Unschedulable"))
            if code == GATED:
                return PodProblem(
                    code, "held back by a scheduling gate: a queue has not admitted it"
                )
            said = condition.get("message", "") or "no reason given"
            return PodProblem(code, f"the scheduler finds no place: {said}"[:MAX_MESSAGE])
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
    """What is said of a pod that is given back because it did not start."""
    found = trouble(pod)
    text = found.text if found else "its containers did not come up"
    return f"not started within {seconds:g} s: {text}"


def _with_message(text: str, message: Any) -> str:
    said = " ".join(str(message or "").split())
    return f"{text}: {said}"[:MAX_MESSAGE] if said else text


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
    """With restartPolicy Never there is no second life."""
    ended: Document | None = _container(pod).get("state", {}).get("terminated")
    return ended
