"""Wishes that are acts, not states: a rehearsal, a checkpoint now. Each is an annotation that the
operator takes away, and then says in an Event what came of it.

Owns: waiting for that, within a bound, and taking back what nobody has noticed. Must not: leave an
act behind that would surprise somebody an hour later.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from typing import Any

from holdfast.orchestrator.cli.client import user
from holdfast.orchestrator.errors import HoldfastError, Problem, UserError
from holdfast.orchestrator.kube import names
from holdfast.orchestrator.kube.client import KubeClient
from holdfast.orchestrator.kube.errors import EVENTS, JOBS, ApiError, Conflict, Forbidden

from ..base import Response
from .events import fields_of, is_about
from .session import ClusterSession
from .watch import follow

Document = dict[str, Any]
ANNOTATIONS = {"chaos": names.CHAOS, "checkpoint": names.CHECKPOINT}
TAKEN_S = 20.0
"""An operator that runs takes an act within a second; another one that has to take the lead first,
within its lease."""
SAID_S = 5.0
"""After it was taken: its Event."""
WITHDRAWALS = 5


class NoResponse(HoldfastError):
    """No operator took it."""


def perform(
    link: ClusterSession, document: Document, verb: str, arguments: dict[str, Any]
) -> Response:
    """Raises UserError when the operator refuses, NobodyAnswers when there is none."""
    act = _AnnotatedRequest(link, document, verb, arguments)
    return link.run(act.perform)


class _AnnotatedRequest:
    def __init__(
        self, link: ClusterSession, document: Document, verb: str, arguments: dict[str, Any]
    ) -> None:
        self._link, self._document, self._verb = link, document, verb
        self._arguments = arguments
        metadata = document["metadata"]
        self._place = (metadata["namespace"], metadata["name"])
        self._name: str = metadata["name"]
        self._annotation = ANNOTATIONS[verb]
        self._value = user() or "somebody"
        if verb == "chaos":
            wanted = {**arguments, "by": self._value, "id": secrets.token_hex(4)}
            self._value = json.dumps(wanted)

    async def perform(self, cluster: KubeClient, namespace: str) -> Response:
        waiting = self._found(self._document)
        if waiting is not None:
            got = f"one that waits for the operator already ({waiting})"
            raise UserError(str(Problem(self._verb, got, "none", self._look())))
        version = await self._events_version(cluster)
        await cluster.patch(JOBS, *self._place, self._body(self._value))
        try:
            async with asyncio.timeout(TAKEN_S):
                await self._until_taken(cluster)
        except TimeoutError:
            if await self._withdraw(cluster):
                raise NoResponse(
                    f"job {self._name}: {self._verb}: no operator answered within {TAKEN_S:.0f} s, "
                    f"so it was taken back; {self._look()}"
                ) from None
        body = {key: value for key, value in self._arguments.items() if key != "kind"}
        said = await self._what_came_of_it(cluster, version)
        if self._verb == "checkpoint" and (match := re.match(r"step (\d+) ", said)):
            body["step"] = int(match[1])
        return Response(said or "the operator has taken it; see `kubectl describe`", body)

    async def _until_taken(self, cluster: KubeClient) -> None:
        async for seen in follow(cluster, self._document):
            if self._found(seen) != self._value:
                return

    async def _withdraw(self, cluster: KubeClient) -> bool:
        """False: it was taken at the last moment."""
        for _attempt in range(WITHDRAWALS):
            seen = await cluster.find(JOBS, *self._place)
            if seen is None or self._found(seen) != self._value:
                return False
            body = self._body(None)
            body["metadata"]["resourceVersion"] = seen["metadata"]["resourceVersion"]
            try:
                await cluster.patch(JOBS, *self._place, body)
            except Conflict:
                continue
            return True
        raise HoldfastError(
            f"job {self._name}: {self._verb}: no operator answered, and it could not be taken "
            f"back: remove the annotation {self._annotation} yourself"
        )

    async def _events_version(self, cluster: KubeClient) -> str:
        """From where on to look for the answer; empty: this person may not see Events."""
        try:
            _found, version = await cluster.list_all(
                EVENTS, self._place[0], fields=fields_of(self._document)
            )
        except Forbidden:
            return ""
        return version

    async def _what_came_of_it(self, cluster: KubeClient, version: str) -> str:
        """The operator's own words; empty: it did not say any in time."""
        if not version:
            return ""
        try:
            async with asyncio.timeout(SAID_S):
                return await self._first_words(cluster, version)
        except (TimeoutError, ApiError):
            return ""

    async def _first_words(self, cluster: KubeClient, version: str) -> str:
        prefix = f"{self._verb}: "
        fields = fields_of(self._document)
        async for kind, event in cluster.watch(EVENTS, version, self._place[0], fields=fields):
            text = str(event.get("message", ""))
            if kind not in ("ADDED", "MODIFIED") or not is_about(event, self._document):
                continue
            if not text.startswith(prefix):
                continue
            text = text.removeprefix(prefix)
            if event.get("reason") == "Refused":
                raise UserError(f"job {self._name}: {text}")
            return text
        return ""

    def _found(self, document: Document) -> str | None:
        annotations = document["metadata"].get("annotations") or {}
        found: str | None = annotations.get(self._annotation)
        return found

    def _body(self, value: str | None) -> Document:
        return {"metadata": {"annotations": {self._annotation: value}}}

    def _look(self) -> str:
        look = self._link.kubectl_hint("describe", "trainingjob", self._name)
        return f"does the operator run? See {look}"
