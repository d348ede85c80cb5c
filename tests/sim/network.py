"""Simulated connections between agents and the controller, with latency and partitions.

They guarantee what TCP does: messages of one link arrive in order or not at all. Messages of
different links may overtake each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.orchestrator.protocol import messages as m

if TYPE_CHECKING:
    from .host import Host
    from .node import SimNode
    from .world import World


class Link:
    def __init__(self, world: World, node: SimNode, host: Host) -> None:
        self.world, self.node, self.host = world, node, host
        self.open = True
        self.greeted = False
        self._last = {"up": 0, "down": 0}

    def _arrival(self, way: str) -> int:
        """Time of arrival: not before earlier messages, nor while the node is disconnected."""
        due = self.world.now + round(self.world.between(0.0002, 0.02) * 1e9)
        due = max(due, self._last[way] + 1, self.world.healed_ns(self.node))
        self._last[way] = due
        return due

    def to_controller(self, message: m.FromAgent) -> None:
        # Through the real codec, so that only valid messages are simulated.
        copy = m.decode(m.encode(message)[4:])
        self.world.at(self._arrival("up"), lambda: self._up(copy))

    def to_agent(self, message: m.ToAgent) -> None:
        copy = m.decode(m.encode(message)[4:])
        self.world.at(self._arrival("down"), lambda: self._down(copy))

    def _up(self, message: Any) -> None:
        if self.open and self.host.up:
            self.host.received(self, message)

    def _down(self, message: object) -> None:
        if self.open and self.node.alive:
            from holdfast.workers.agent.machine import inputs

            self.node.feed(inputs.Received(message))  # type: ignore[arg-type]

    def close(self) -> None:
        """Either side may close; messages under way are lost."""
        if not self.open:
            return
        self.open = False
        self.host.link_closed(self)
        self.world.at(self._arrival("down"), lambda: self.node.link_down(self))
