"""The interface of a backend: start nodes, release them, list them.

tests/contract runs against each implementation. A backend starts agents; an agent connects to the
controller by itself and takes launch and stop commands over that connection on every backend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from .. import limits
from ..errors import HoldfastError
from ..protocol.facts import NodeFacts


class NoRoom(HoldfastError):
    """The backend has no capacity for that many nodes now."""


class NodeGone(msgspec.Struct, frozen=True):
    """The backend has seen a node end."""

    node: str
    detail: str


class Starts(NamedTuple):
    """Expected start times of pending nodes."""

    usual_s: float | None = None
    """Seconds that a node takes to start now; None when unknown."""
    limit_s: float = limits.NODE_WAIT_S
    """A node that has not connected after this is released, and another one is requested."""


def coordinates(labels: Mapping[str, str], keys: Sequence[str]) -> tuple[str, ...]:
    """The values of `keys`, outermost first, for NodeFacts.topology; missing labels are empty."""
    return tuple(labels.get(key, "") for key in keys)


class Backend(Protocol):
    """All calls are idempotent and return when the request is accepted, not when it is fulfilled.

    They may block for milliseconds, never until a node is up. Where a queue has to admit nodes
    first, `request_nodes` waits for the queue and returns the admitted nodes, perhaps fewer than
    requested.
    """

    async def open(self, on_node_gone: Callable[[NodeGone], None]) -> None:
        """Find the nodes that this job already has, and prepare for new ones. `on_node_gone` is
        called from the event loop whenever a node ends."""

    async def request_nodes(self, count: int, avoid: tuple[str, ...]) -> tuple[str, ...]:
        """Start `count` more nodes and return their names; fewer where there is no capacity for all
        but the job can train with them. Raises NoRoom and starts none otherwise."""

    async def release_node(self, node: str) -> None:
        """End a node with its processes and memory. An unknown node counts as released."""

    async def list_nodes(self) -> tuple[str, ...]:
        """Sorted names of the nodes that exist, connected or not."""

    def starts(self) -> Starts:
        """Expected start times of the nodes that were requested."""

    async def close(self, *, release: bool) -> None:
        """Detach; with `release`, end all nodes of this job first."""


# -- capabilities that only some backends have; found with isinstance ----------------------------
@runtime_checkable
class LocatesNodes(Protocol):
    def facts_of(self, node: str, facts: NodeFacts) -> NodeFacts:
        """The facts of a node, with what only the backend knows, such as its topology."""


@runtime_checkable
class LimitsNodes(Protocol):
    def node_limit(self) -> int | None:
        """The largest number of nodes; None: no limit."""


@runtime_checkable
class WithholdsCapacity(Protocol):
    def withhold(self, seconds: float) -> None:
        """Fault injection: behave for so long as if there were no capacity."""


class Withholding:
    """A WithholdsCapacity whose `expect_room` raises NoRoom meanwhile."""

    _withheld_until = 0.0

    def withhold(self, seconds: float) -> None:
        self._withheld_until = asyncio.get_running_loop().time() + seconds

    def expect_room(self) -> None:
        left_s = self._withheld_until - asyncio.get_running_loop().time()
        if left_s > 0:
            raise NoRoom(f"replacements are withheld for another {left_s:.0f} s (fault injection)")
