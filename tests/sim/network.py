"""Links between agents and the controller: in order on one link, lost when it breaks.

Owns: latency, order, partitions. What TCP promises is kept and nothing more: messages of one link
arrive in order or not at all, different links overtake each other at will. Must not: read messages.
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
        """Not before what was sent earlier, and not while the node is cut off."""
        due = self.world.now + round(self.world.between(0.0002, 0.02) * 1e9)
        due = max(due, self._last[way] + 1, self.world.healed_ns(self.node))
        self._last[way] = due
        return due

    def to_controller(self, message: m.FromAgent) -> None:
        # Through the real codec: what cannot be said must not be simulated.
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
        """Either side may; what is under way is lost."""
        if not self.open:
            return
        self.open = False
        self.host.link_closed(self)
        self.world.at(self._arrival("down"), lambda: self.node.link_down(self))
