"""Between the agents' links and the core: messages become events, in the order they came.

Owns: that translation, and what a closed link means. Must not: decide what is done about anything.

A closed link is not a lost node. If the backend says that the node has ended, it is lost at once;
while it still exists it may come back, and the monitor calls it lost when it stays silent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ..backends.base import Backend, NodeGone
from ..core import events
from ..core.events import AnyEvent
from ..core.state import JobState
from ..protocol import messages as wire
from ..protocol.facts import NodeFacts
from .agent_server import AgentConnection
from .evidence_budget import EvidenceBudget
from .executor import Executor

Log = logging.Logger | logging.LoggerAdapter[logging.Logger]


class AgentGateway:
    """Implements endpoint.Sink, and hears of ended nodes from the backend."""

    def __init__(
        self,
        backend: Backend,
        executor: Executor,
        state: Callable[[], JobState],
        submit: Callable[[AnyEvent], None],
        evidence: EvidenceBudget,
        log: Log,
    ) -> None:
        self._backend, self._executor = backend, executor
        self._state, self._submit, self._log = state, submit, log
        self._evidence = evidence
        self._gone: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- from the backend ----------------------------------------------------------------------
    def node_gone(self, gone: NodeGone) -> None:
        self._lost(gone.node, "gone", gone.detail)

    def _lost(self, node: str, cause: events.LossCause, detail: str) -> None:
        if node in self._gone:
            return
        self._gone.add(node)
        self._log.info("%s: %s: %s", node, cause, detail)
        self._submit(events.NodeLost(node=node, cause=cause, detail=detail))
        self._executor.forget(node, f"{node} was lost")

    # -- endpoint.Sink -------------------------------------------------------------------------
    def refusal(self, hello: wire.Hello) -> str:
        state = self._state()
        if state.terminal:
            return f"the job has {state.phase}"
        if hello.node in self._gone:
            return f"{hello.node} was lost"
        if hello.node in state.released_nodes:
            return f"{hello.node} was given up: {state.released_nodes[hello.node]}"
        return ""

    def joined(self, link: AgentConnection, hello: wire.Hello) -> None:
        self._log.info("%s joined, generation %d", hello.node, hello.generation)
        # Where a node is, its backend may know better: racks are no business of an agent.
        located: Callable[[str, NodeFacts], NodeFacts] | None
        located = getattr(self._backend, "facts_of", None)
        self._submit(
            events.NodeJoined(
                node=hello.node,
                facts=located(hello.node, hello.facts) if located is not None else hello.facts,
                generation=hello.generation,
                ranks=hello.ranks,
                staged=hello.staged,
                offered_port=hello.offered_port,
            )
        )
        # After the news, so that the core has said again what it still wants.
        self._executor.forget(hello.node, f"{hello.node} came back over a new link")

    def replaced(self, node: str) -> None:
        self._log.info("%s dialled in again over a new link", node)

    def received(self, node: str, message: wire.Message) -> None:
        match message:
            case wire.Heartbeat():
                self._submit(
                    events.HeartbeatReceived(
                        node=node,
                        generation=message.generation,
                        workers=message.workers,
                        staged_step=message.staged_step,
                    )
                )
            case wire.WorkerExitReport():
                exit = self._evidence.exit(message.generation, message.exit)
                self._submit(
                    events.WorkerExited(node=node, generation=message.generation, exit=exit)
                )
            case wire.Launched() | wire.ShardStaged():
                self._executor.answered(node, message)
            case wire.Stopped():
                self._executor.stopped(node, message)
            case wire.Persisted():
                self._submit(
                    events.ShardPersisted(
                        node=node,
                        generation=message.generation,
                        shard=message.shard,
                        seconds=message.seconds,
                    )
                )
            case wire.ShardPersistFailed():
                self._submit(
                    events.PersistFailed(
                        node=node,
                        generation=message.generation,
                        step=message.step,
                        shard=message.shard,
                        detail=message.detail,
                        tried=message.tried,
                    )
                )
            case wire.NodeLeaving():
                self._submit(
                    events.PreemptionNoticed(
                        node=node, detail=message.detail, grace_s=message.grace_s
                    )
                )
            case wire.AgentEvent():
                self._log.info("%s: %s", node, message.text)
            case _:
                self._log.warning("%s: unexpected %s", node, type(message).__name__)

    def disconnected(self, node: str) -> None:
        if self._state().terminal:
            return
        self._log.info("%s: the link closed", node)
        task = asyncio.get_running_loop().create_task(self._look(node))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _look(self, node: str) -> None:
        if node not in await self._backend.list_nodes():
            self._lost(node, "disconnected", "the link closed and its backend has no such node")
