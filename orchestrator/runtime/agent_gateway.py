"""Turns messages of agents and reports of the backend into events of one job, in order of arrival.

A closed connection is not a lost node. If the backend reports that the node has ended, it is lost
at once; while the node exists it may reconnect, and the monitor declares it lost after the
heartbeat timeout.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from ..backends.base import Backend, LocatesNodes, NodeGone
from ..core.events import AnyEvent, FromNode, LossCause, NodeLost
from ..protocol import messages as wire
from . import translate
from .agent_server import AgentConnection, other_protocol
from .evidence_budget import EvidenceBudget
from .executor import Executor
from .job_loop import JobLoop

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


class AgentGateway:
    """The agent_server.AgentSink of one job."""

    def __init__(
        self,
        backend: Backend,
        executor: Executor,
        loop: JobLoop,
        submit: Callable[[AnyEvent], None],
        log: Log,
        answered: Callable[[wire.QuestionAnswer], None],
        send_code: Callable[[str, wire.FetchCode], None],
    ) -> None:
        """`answered`: takes the answers to questions, which are no events. `send_code`: answers a
        node's request for a part of the job's code."""
        self._send_code = send_code
        self._backend, self._executor = backend, executor
        self._locates = backend if isinstance(backend, LocatesNodes) else None
        self._loop, self._submit, self._log = loop, submit, log
        self._answered = answered
        self._evidence = EvidenceBudget()
        self.imports: tuple[str, ...] = ()
        """Modules that the script imports, for nodes that join."""
        self._gone: set[str] = set()
        self._unchecked: set[str] = set()
        """Nodes whose connections closed since the backend was last asked."""
        self._checking: asyncio.Task[None] | None = None

    # -- from the backend ----------------------------------------------------------------------
    def node_gone(self, gone: NodeGone) -> None:
        self._lost(gone.node, "gone", gone.detail)

    def _lost(self, node: str, cause: LossCause, detail: str) -> None:
        if node in self._gone:
            return
        self._gone.add(node)
        self._log.info("%s: %s: %s", node, cause, detail)
        self._submit(NodeLost(node=node, cause=cause, detail=detail))
        self._executor.forget(node, f"{node} was lost")

    # -- AgentSink -----------------------------------------------------------------------------
    def refusal(self, hello: wire.Hello) -> str:
        if problem := other_protocol(hello):
            self._lost(hello.node, "gone", problem)  # its agent exits
            return problem
        return translate.refusal(self._loop.state, hello.node, self._gone)

    def joined(self, link: AgentConnection, hello: wire.Hello) -> None:
        joined = hello.joined
        self._log.info("%s joined, generation %d", hello.node, joined.generation)
        if self._locates is not None:
            facts = self._locates.facts_of(hello.node, joined.facts)
            joined = msgspec.structs.replace(joined, facts=facts)
        self._submit(FromNode(hello.node, joined))
        # After that event, on which the core sends unanswered orders again.
        self._executor.forget(hello.node, f"{hello.node} has reconnected")

    def replaced(self, node: str) -> None:
        self._log.info("%s reconnected while its old connection was open", node)

    def received(self, node: str, message: wire.Message) -> None:
        if isinstance(message, wire.AgentEvent):
            self._log.info("%s: %s", node, message.text)
            return
        if isinstance(message, wire.ImportsLearned):
            self.imports = message.modules
            return
        if isinstance(message, wire.FetchCode):
            self._send_code(node, message)
            return
        if isinstance(message, wire.QuestionAnswer):
            self._answered(message)
            return
        if isinstance(message, translate.Answer) and not self._executor.expects(node, message):
            return
        event = translate.to_event(node, self._evidence.bounded(message))
        if event is None:
            self._log.warning("%s: unexpected %s", node, type(message).__name__)
        else:
            self._submit(event)

    def disconnected(self, node: str) -> None:
        if self._loop.state.terminal:
            return
        self._log.info("%s: the connection closed", node)
        self._unchecked.add(node)
        if self._checking is None or self._checking.done():
            self._checking = asyncio.get_running_loop().create_task(self._check())

    async def _check(self) -> None:
        """One list of the backend's nodes for all connections that closed before it is made."""
        while self._unchecked:
            nodes, self._unchecked = self._unchecked, set()
            for node in sorted(nodes.difference(await self._backend.list_nodes())):
                detail = "the connection closed and the backend has no such node"
                self._lost(node, "disconnected", detail)
