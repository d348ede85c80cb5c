"""Sends uploaded code to the agents of a job, part by part, over their own connections."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from holdfast.orchestrator.tasks import TaskSet

from ..errors import HoldfastError
from ..protocol import messages as wire
from .agent_server import AgentConnection

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


class StoredPart(NamedTuple):
    """A part of a code archive."""

    data: bytes
    num_parts: int


class CodeMissing(HoldfastError):
    """The archive is not there; another attempt finds none either."""


class CodeStore(Protocol):
    """Store to which the code of a job was uploaded."""

    async def part(self, code: str, number: int) -> StoredPart:
        """Raises CodeMissing, and HoldfastError where another attempt may succeed."""
        ...


class CodeSender:
    """Sends the code of one job. An agent repeats a request that has no answer: so nothing is sent
    while the store does not answer, or once the connection is lost."""

    def __init__(
        self, store: CodeStore | None, links: Mapping[str, AgentConnection], log: Log
    ) -> None:
        self._store, self._links, self._log = store, links, log
        self._tasks = TaskSet()

    def requested(self, node: str, request: wire.FetchCode) -> None:
        """Called from the event loop; does not block."""
        self._tasks.start(self._send(node, request))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _send(self, node: str, request: wire.FetchCode) -> None:
        code, number = request.code, request.part
        try:
            if self._store is None:
                raise CodeMissing(f"code {code[:12]}: this controller has none")
            part = await self._store.part(code, number)
            answer = wire.CodePart(code=code, part=number, num_parts=part.num_parts, data=part.data)
        except CodeMissing as error:
            answer = wire.CodePart(code=code, part=number, problem=str(error))
        except HoldfastError as error:
            self._log.warning("%s: part %d of its code is sent later: %s", node, number, error)
            return
        if (link := self._links.get(node)) is not None:
            link.send(answer)
