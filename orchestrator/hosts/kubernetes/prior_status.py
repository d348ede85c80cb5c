"""What is known of a job before its controller runs: whether it was ever started, where its
checkpoints are, and what was last told of it.

Owns: these. That a job was started is never forgotten: its pods may train while nobody can take it
up, whatever its status has come to say meanwhile. Must not: write anything.
"""

from __future__ import annotations

from typing import Any

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.core.events import JobSubmitted
from holdfast.orchestrator.core.journal import Journal
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import CONFIG_MAPS
from holdfast.orchestrator.kube.names import Owner
from holdfast.orchestrator.runtime import snapshot

Document = dict[str, Any]

TOLD = (
    "jobId", "startTime", "generation", "step", "totalSteps", "loss", "restarts",
    "restartsByClass", "goodput", "ledger", "memoryStep", "lastCheckpoint", "checkpointPath",
    "storageProblem", "incidents", "traceback",
)  # fmt: skip
"""Fields of the status that say what has been. The others say what is now, which nobody knows of a
job without a controller."""


class PriorStatus:
    """Of one job."""

    def __init__(self, document: Document) -> None:
        """The object as it stands there when this operator first sees it."""
        self.begun = False
        """A controller has run it, this one's or an earlier operator's."""
        self.place = ""
        """Where its checkpoints are; empty: nowhere yet."""
        self.told: Document = {}
        """What its last controller told, as fields of the status."""
        status = document.get("status") or {}
        if status.get("jobId"):
            self.tell(status)

    def tell(self, status: Document) -> None:
        """A status with a controller behind it."""
        self.begun = True
        self.told = {name: status[name] for name in TOLD if name in status}
        self.place = self.told.get("checkpointPath", "")

    async def look(self, cluster: KubeClient, owner: Owner) -> bool:
        """Whether it has begun, by its journal where no status says so: the operator may have ended
        before it wrote the first one. Raises ApiError."""
        if not self.begun:
            name = names.journal_name(owner.name)
            found = await cluster.find(CONFIG_MAPS, owner.namespace, name) or {"metadata": {}}
            owners = found["metadata"].get("ownerReferences") or ()
            ours = any(one.get("uid") == owner.uid for one in owners)
            self.begun = ours and bool(found.get("binaryData"))
        return self.begun


def job_in(journal: Journal) -> TrainingJob | None:
    """The job as it was when its journal began or was last compacted; None: it never began."""
    if journal.snapshot is not None:
        state, _memory = snapshot.decode(journal.snapshot)
        return state.job
    event = _submitted(journal)
    return job_from_mapping(event.spec) if event is not None else None


def place_in(journal: Journal) -> str:
    """Where its checkpoints have been from its first day; empty: the journal does not say, because
    it never began or is of an older Holdfast."""
    if journal.snapshot is not None:
        return snapshot.checkpoint_path(journal.snapshot)
    event = _submitted(journal)
    return event.checkpoint_path if event is not None else ""


def _submitted(journal: Journal) -> JobSubmitted | None:
    events = (record.event for record in journal.records)
    return next((event for event in events if isinstance(event, JobSubmitted)), None)
