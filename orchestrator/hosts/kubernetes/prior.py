"""Facts about a job before its controller runs: from the object's status, and from the journal when
another operator has run the job."""

from __future__ import annotations

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping
from holdfast.orchestrator.core.events import JobSubmitted
from holdfast.orchestrator.core.journal import Journal
from holdfast.orchestrator.kube.client import Document, KubeClient
from holdfast.orchestrator.kube.errors import CONFIG_MAPS
from holdfast.orchestrator.kube.names import Owner, journal_name
from holdfast.orchestrator.runtime import snapshot

PRIOR_FIELDS = (
    "jobId", "startTime", "generation", "step", "totalSteps", "loss", "restarts",
    "restartsByClass", "goodput", "ledger", "memoryStep", "lastCheckpoint", "checkpointPath",
    "storageProblem", "incidents", "traceback",
)  # fmt: skip
"""Fields of the status that describe the past. The others describe the present, which is unknown
for a job without a controller."""


class PriorStatus:
    """Facts about a job before its controller runs. A job that was started once stays so: its pods
    may be training although no controller could be started and the status shows another phase."""

    def __init__(self, document: Document) -> None:
        """`document`: the object as this operator first sees it."""
        self.started = False
        """A controller has run the job, in this operator or an earlier one."""
        self.checkpoint_path = ""
        """Directory or URL of the job's checkpoints; empty: none yet."""
        self.fields: Document = {}
        """Fields of the status that the last controller wrote."""
        self.machines: dict[str, str] = {}
        """Pod -> Kubernetes node, of the incidents of earlier operators."""
        status = document.get("status") or {}
        if status.get("jobId"):
            self.remember(status)

    def remember(self, status: Document) -> None:
        """A status that a controller has written."""
        self.started = True
        self.fields = {name: status[name] for name in PRIOR_FIELDS if name in status}
        self.checkpoint_path = self.fields.get("checkpointPath", "")
        for incident in self.fields.get("incidents", ()):
            if incident.get("culpritNode") and incident.get("nodeName"):
                self.machines[incident["culpritNode"]] = incident["nodeName"]

    async def look_up(self, cluster: KubeClient, owner: Owner) -> bool:
        """True if the job was started. Looks for a journal where no status shows it: the operator
        may have ended before it wrote the first one. Raises ApiError."""
        if not self.started:
            store = await cluster.find(CONFIG_MAPS, owner.namespace, journal_name(owner.name))
            self.started = store is not None and owner.owns(store) and bool(store.get("binaryData"))
        return self.started


def began_as(journal: Journal) -> tuple[TrainingJob | None, str]:
    """The job as it was when the journal began or was last compacted, and where its checkpoints
    have been from the start. (None, ""): it never began."""
    if journal.snapshot is not None:
        state, _projection = snapshot.decode(journal.snapshot)
        return state.job, state.checkpoint_path
    for record in journal.records:
        if isinstance(event := record.event, JobSubmitted):
            return job_from_mapping(event.spec), event.checkpoint_path
    return None, ""
