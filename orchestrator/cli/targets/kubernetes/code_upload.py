"""Uploads the code of a job: into ConfigMaps of its namespace that are deleted with it."""

from __future__ import annotations

from holdfast.orchestrator.cli.code_files import Code
from holdfast.orchestrator.errors import Problem, UserError
from holdfast.orchestrator.kube import code_parts
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import CONFIG_MAPS, Conflict
from holdfast.orchestrator.kube.names import Owner


async def upload(cluster: KubeClient, owner: Owner, code: Code) -> None:
    """Create what is not there yet. Raises ApiError, and UserError if another object has a name."""
    for document in code_parts.part_documents(owner, code.name, code.archive):
        name = document["metadata"]["name"]
        try:
            await cluster.create(CONFIG_MAPS, owner.namespace, document)
        except Conflict:
            found = await cluster.get(CONFIG_MAPS, owner.namespace, name)
            if not owner.owns(found):
                got = f"ConfigMap {owner.namespace}/{name}, which belongs to another job"
                expected = "a name that is free"
                fix = "an earlier job of this name may be being deleted; try again in a moment"
                raise UserError(str(Problem("code", got, expected, fix))) from None


async def delete_others(cluster: KubeClient, owner: Owner, kept: tuple[str, ...]) -> None:
    """Delete the job's archives except these. Raises ApiError."""
    found, _version = await cluster.list_all(
        CONFIG_MAPS, owner.namespace, code_parts.selector(owner.name)
    )
    digits = [name[: code_parts.DIGITS] for name in kept if name]
    for one in found:
        metadata = one["metadata"]
        old = metadata["labels"][code_parts.LABEL_CODE] not in digits
        if old and owner.owns(one):
            await cluster.delete(
                CONFIG_MAPS, owner.namespace, metadata["name"], uid=metadata["uid"]
            )
