"""TrainingJobs for the tests on a cluster, seen only through the API, as a user sees them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import yaml

from tests.e2e.kubernetes.rig.kubectl import Document, Kubectl, condition
from tests.e2e.kubernetes.rig.run import REPOSITORY
from tests.e2e.kubernetes.rig.waiting import until

EXAMPLE = REPOSITORY / "examples" / "stdlib-bytes.yaml"
ENDLESS = 1_000_000
START_TIMEOUT_S = 240
"""Six processes import torch on two cores, which may be busy."""
OWNED = ("pods", "secrets", "configmaps")


def example(name: str, num_steps: int, **spec: Any) -> Document:
    """The example with other values, and a small model."""
    document: Document = yaml.safe_load(EXAMPLE.read_text())
    document["metadata"]["name"] = name
    config = document["spec"]["entrypoint"]["recipe"]["config"]
    config.update(steps=num_steps, evaluateEverySteps=0)
    if num_steps >= ENDLESS:  # leave the processors to the tests beside it
        config.update(minStepSeconds=0.5)
    config["model"].update(dim=64, numLayers=2)
    # Tests count lost steps; `auto` may skip some where a step of this model takes milliseconds.
    document["spec"].setdefault("checkpoint", {})["memory"] = {"everySteps": 1}
    document["spec"].update(spec)
    return document


class Job:
    """An applied TrainingJob."""

    def __init__(self, kubectl: Kubectl, document: Document) -> None:
        self.kubectl = kubectl
        self.name = document["metadata"]["name"]
        kubectl.apply(document)

    def object(self) -> Document:
        return self.kubectl.get("trainingjob", self.name) or {}

    def status(self) -> Document:
        return self.object().get("status") or {}

    def wait(
        self, true_of: Callable[[Document], bool], what: str, *, timeout_s: float = 120
    ) -> Document:
        """Wait until this is true of the status; raise if the job fails meanwhile."""
        seen: Document = {}

        def look() -> bool:
            seen.clear()
            seen.update(self.status())
            if true_of(seen):
                return True
            assert condition({"status": seen}, "Failed") != "True", self.report()
            return False

        until(look, f"job {self.name} {what}", timeout_s=timeout_s, every_s=0.2, last=self.report)
        return seen

    def wait_steps(self, num_steps: int, *, timeout_s: float = 120) -> Document:
        """Wait for this many steps more than the status shows now."""
        wanted = self.status().get("step", 0) + num_steps
        return self.wait(
            lambda s: s.get("state") == "running" and s.get("step", 0) >= wanted,
            f"to reach step {wanted}",
            timeout_s=timeout_s,
        )

    def wait_running(self, world_size: int) -> Document:
        return self.wait(
            lambda s: (
                (s.get("state"), s.get("worldSize")) == ("running", world_size)
                and s.get("step", 0) > 0
            ),
            f"to run with {world_size} workers",
            timeout_s=START_TIMEOUT_S,
        )

    def pods(self) -> list[Document]:
        return self.kubectl.list("pods", f"holdfast.dev/job={self.name}")

    def nodes(self) -> list[str]:
        """The Kubernetes nodes of its running pods."""
        running = (pod for pod in self.pods() if pod["status"]["phase"] == "Running")
        return sorted(pod["spec"]["nodeName"] for pod in running)

    def last_step(self) -> int:
        """The last step by the pods' logs, which need no operator."""
        text = self.kubectl.run("logs", f"--selector=holdfast.dev/job={self.name}", "--tail=400")
        found = re.findall(r"^\[rank 0, gen \d+\] step +(\d+)", text, re.MULTILINE)
        return max(map(int, found), default=0)

    def annotate(self, name: str, value: str) -> None:
        self.kubectl.run("annotate", "trainingjob", self.name, f"{name}={value}", "--overwrite")

    def chaos(self, kind: str, **arguments: Any) -> None:
        self.demand("chaos", kind=kind, **arguments)

    def demand(self, verb: str, **arguments: Any) -> None:
        document = {"verb": verb, "arguments": arguments, "by": "test"}
        self.annotate("holdfast.dev/request", json.dumps(document))

    def incidents_after(self, before: Document) -> list[Document]:
        """Incidents that are not in an earlier status."""
        known = {one["number"] for one in before.get("incidents") or ()}
        found = self.status().get("incidents") or []
        return [one for one in found if one["number"] not in known]

    def delete(self) -> None:
        """Delete it and wait until nothing of it is left."""
        self.kubectl.run("delete", "trainingjob", self.name, "--timeout=60s")
        until(lambda: self.left() == [], "nothing to be left", timeout_s=60, last=self.left)

    def left(self) -> list[str]:
        """Objects of the job that still exist."""
        found = []
        for kind in OWNED:
            for one in self.kubectl.list(kind):
                owners = one["metadata"].get("ownerReferences") or ()
                if any(owner["name"] == self.name for owner in owners):
                    found.append(f"{kind} {one['metadata']['name']}")
        return found

    def report(self) -> str:
        """`kubectl describe` and the last lines of the pods."""
        parts = [self.kubectl.attempt("describe", "trainingjob", self.name).stdout[-3000:]]
        for pod in self.pods():
            name = pod["metadata"]["name"]
            log = self.kubectl.attempt("logs", name, "--tail=8")
            parts.append(f"{name} {pod['status'].get('phase')}:\n{log.stdout}{log.stderr}")
        return "\n".join(parts)
