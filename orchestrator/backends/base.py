"""What every backend can do: give nodes, take them back, say which there are.

Owns: the interface and its contract; tests/contract runs against each implementation. Must not:
know the job's state. A backend starts *agents*; an agent dials in to the controller by itself, so
launching and stopping workers goes over the agent link, the same on every backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import msgspec

from .. import limits
from ..errors import HoldfastError


class NoRoom(HoldfastError):
    """The backend cannot give that many nodes now."""


class NodeGone(msgspec.Struct, frozen=True):
    """The backend saw a node end."""

    node: str
    detail: str


class Starts(NamedTuple):
    """What a backend knows of nodes on their way."""

    usual_s: float | None = None
    """How long a node takes to start now; None: it does not know."""
    limit_s: float = limits.NODE_WAIT_S
    """A node that has not dialled in after this is given back, and another one asked for."""


class Backend(Protocol):
    """All calls are idempotent and return when the request is accepted, not when it is fulfilled.

    They may block for milliseconds, never for a node to come up. Where a queue has to admit nodes
    first, `request_nodes` lasts until it does, and returns those that it has admitted: fewer than
    asked for, perhaps.
    """

    async def open(self, on_node_gone: Callable[[NodeGone], None]) -> None:
        """Attach to what already runs for this job, or make ready. `on_node_gone` is called, from
        the event loop, whenever a node is seen to end."""

    async def request_nodes(self, count: int, avoid: tuple[str, ...]) -> tuple[str, ...]:
        """Start `count` more nodes and return their names: of fewer, where there is no room for all
        but the job can train with them. Raises NoRoom, starting none."""

    async def release_node(self, node: str) -> None:
        """End a node with all its processes and memory. An unknown node is already released."""

    async def list_nodes(self) -> tuple[str, ...]:
        """Names of the nodes that exist, sorted, whether they have dialled in or not."""

    def starts(self) -> Starts:
        """Asked when nodes have been promised."""

    async def close(self, *, release: bool) -> None:
        """Detach; with `release`, end everything of this job first."""
