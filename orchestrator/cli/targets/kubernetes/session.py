"""The connection of one command to a cluster, the spelling of its hints, and following a job."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.kube import kubeconfig as check
from holdfast.orchestrator.kube.client import SERVICE_ACCOUNT, Document, KubeClient
from holdfast.orchestrator.kube.errors import JOBS, Expired, TooBusy, Unreachable
from holdfast.orchestrator.kube.informer import Backoff

T = TypeVar("T")
RETRY_MIN_S = 0.5
RETRY_MAX_S = 10.0


class ClusterSession:
    """`run(act)` calls `act(cluster, namespace)` within a connection of its own."""

    def __init__(
        self,
        namespace: str | None,
        context: str | None,
        kubeconfig: Path | None,
        *,
        plugin: bool = False,
    ) -> None:
        self.namespace = namespace
        """The option --namespace; None: the namespace of the context."""
        self._context, self._kubeconfig = context, kubeconfig
        self._plugin = plugin

    def run(self, act: Callable[[KubeClient, str], Awaitable[T]]) -> T:
        """Raises UserError when no cluster is configured, and what `act` raises."""
        return asyncio.run(self._connected(act))

    async def _connected(self, act: Callable[[KubeClient, str], Awaitable[T]]) -> T:
        inside = "KUBERNETES_SERVICE_HOST" in os.environ and SERVICE_ACCOUNT.is_dir()
        if not inside or self._context is not None or self._kubeconfig is not None:
            wrong = check.problem(self._context, self._kubeconfig)
            if wrong is not None:
                raise UserError(str(wrong))
        async with await KubeClient.connect(self._context, self._kubeconfig) as cluster:
            return await act(cluster, self.namespace or cluster.namespace)

    def hint(self, *words: str) -> str:
        """A command as the user would type it for the same cluster and namespace."""
        head = ["kubectl", "holdfast"] if self._plugin else ["holdfast"]
        tail = [] if self._plugin else ["--kubernetes"]
        tail += self._options()
        return f"`{shlex.join([*head, *words, *tail])}`"

    def kubectl_hint(self, *words: str) -> str:
        return f"`{shlex.join(['kubectl', *words, *self._options()])}`"

    def _options(self) -> list[str]:
        options = {
            "-n": self.namespace,
            "--context": self._context,
            "--kubeconfig": None if self._kubeconfig is None else str(self._kubeconfig),
        }
        return [word for name, value in options.items() if value for word in (name, value)]


class JobDeleted(HoldfastError):
    """The object was deleted while a command followed it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"job {name}: was deleted from the cluster")


async def follow_job(
    cluster: KubeClient, document: Document, note: Callable[[str], None] = lambda text: None
) -> AsyncIterator[Document]:
    """The job's object, now and after every change. An API server that does not answer is tried
    again: the job does not depend on it. Raises JobDeleted, also when another object has taken the
    name."""
    metadata = document["metadata"]
    namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
    pauses = Backoff(RETRY_MIN_S, RETRY_MAX_S)
    noted = False
    while True:
        try:
            latest = await cluster.find(JOBS, namespace, name)
            if latest is None or latest["metadata"]["uid"] != uid:
                raise JobDeleted(name)
            if noted:
                note("the API server answers again")
                noted = False
            yield latest
            version = latest["metadata"]["resourceVersion"]
            async for kind, changed in cluster.watch(
                JOBS, version, namespace, fields=f"metadata.name={name}"
            ):
                pauses.reset()
                if kind == "DELETED" or changed["metadata"].get("uid", uid) != uid:
                    raise JobDeleted(name)
                if kind != "BOOKMARK":
                    yield changed
        except Expired:
            continue
        except (Unreachable, TooBusy) as error:
            if not noted:
                note(f"{error} Training does not depend on it; trying again")
                noted = True
            await asyncio.sleep(pauses.next_s())


def events_selector(document: Document) -> str:
    """Field selector of the Events of a job, without Events of earlier jobs of the same name."""
    return f"involvedObject.uid={document['metadata']['uid']}"


def annotation_of(document: Document, name: str) -> str | None:
    annotations: dict[str, str] = document["metadata"].get("annotations") or {}
    return annotations.get(name)


async def until_finished(cluster: KubeClient, document: Document) -> None:
    async for latest in follow_job(cluster, document):
        if (latest.get("status") or {}).get("state") in TERMINAL:
            return
