"""The way of one command to a cluster: connect, do something, close; and how its hints are spelled.

Owns: which cluster and namespace are meant, and what is said when nothing can be reached. Must not:
know jobs.
"""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.kube import kubeconfig as check
from holdfast.orchestrator.kube.client import SERVICE_ACCOUNT, KubeClient

T = TypeVar("T")


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
        """As somebody asked for it; None: that of the context."""
        self._context, self._kubeconfig = context, kubeconfig
        self._plugin = plugin

    def run(self, act: Callable[[KubeClient, str], Awaitable[T]]) -> T:
        """Raises UserError when there is no way to a cluster, and what `act` raises."""
        return asyncio.run(self._within(act))

    async def _within(self, act: Callable[[KubeClient, str], Awaitable[T]]) -> T:
        inside = "KUBERNETES_SERVICE_HOST" in os.environ and SERVICE_ACCOUNT.is_dir()
        if not inside or self._context is not None or self._kubeconfig is not None:
            wrong = check.problem(self._context, self._kubeconfig)
            if wrong is not None:
                raise UserError(str(wrong))
        async with await KubeClient.connect(self._context, self._kubeconfig) as cluster:
            return await act(cluster, self.namespace or cluster.namespace)

    def hint(self, *words: str) -> str:
        """A command as the person would type it for the same cluster and namespace."""
        head = ["kubectl", "holdfast"] if self._plugin else ["holdfast"]
        tail = [] if self._plugin else ["--kubernetes"]
        tail += self._options()
        return f"`{shlex.join([*head, *words, *tail])}`"

    def kubectl_hint(self, *words: str) -> str:
        return f"`{shlex.join(['kubectl', *words, *self._options()])}`"

    def _options(self) -> list[str]:
        given = {
            "-n": self.namespace,
            "--context": self._context,
            "--kubeconfig": None if self._kubeconfig is None else str(self._kubeconfig),
        }
        return [word for name, value in given.items() if value for word in (name, value)]
