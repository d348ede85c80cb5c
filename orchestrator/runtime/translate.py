"""Translation between wire and core: agents' messages become events, actions become messages.

Pure; the agent gateway, the executor and the simulation use it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from ..core import events
from ..core.actions import InspectGroup, LaunchGroup, PersistStep, StageStep, StopGroup
from ..core.state import JobState
from ..protocol import messages as wire
from ..protocol.facts import LaunchIncident, NodeFacts, OwnCheckpoint

NodeAction = LaunchGroup | StopGroup | StageStep
"""Actions that a node answers."""
Answer = wire.Launched | wire.GroupStopped | wire.ShardStaged

_ANSWER_OF: dict[type[NodeAction], type[Answer]] = {
    LaunchGroup: wire.Launched,
    StopGroup: wire.GroupStopped,
    StageStep: wire.ShardStaged,
}


class AwaitedAnswers:
    """Actions that were sent to a node and that it has not answered yet."""

    def __init__(self) -> None:
        self._actions: dict[str, dict[int, NodeAction]] = {}
        """Node -> id -> action."""

    def sent(self, action: NodeAction) -> None:
        self._actions.setdefault(action.node, {})[action.action_id] = action

    def take(self, node: str, message: Answer) -> NodeAction | None:
        """The action that this message answers; None: it repeats an answer that was sent over an
        earlier connection."""
        here = self._actions.get(node, {})
        action = here.get(message.action_id)
        if action is None or not isinstance(message, _ANSWER_OF[type(action)]):
            return None
        return here.pop(message.action_id)

    def forget(self, node: str) -> list[NodeAction]:
        """The node was lost or has reconnected: answers over its old connection will not come."""
        return list(self._actions.pop(node, {}).values())


def refusal(state: JobState, node: str, lost: Collection[str] = ()) -> str:
    """Reason why a node may not join; empty: it may. `lost`: also nodes whose loss is still on its
    way to the core."""
    if state.terminal:
        return f"the job has {state.phase}"
    if node in lost:
        return f"{node} was lost"
    if node in state.supply.released:
        return f"{node} was given up: {state.supply.released[node]}"
    return ""


def to_event(node: str, message: wire.Message) -> events.AnyEvent | None:
    """The event of an agent's message; None: it decides nothing. An Answer is an event only if the
    node was asked for it (AwaitedAnswers)."""
    if isinstance(message, wire.Fact):
        return events.FromNode(node, message)
    if not isinstance(message, wire.Launched | wire.ShardStaged):
        return None
    kind = events.ActionSucceeded if message.ok else events.ActionFailed
    generation = message.generation if isinstance(message, wire.Launched) else 0
    return kind(action_id=message.action_id, generation=generation, detail=message.detail)


def to_message(
    action: NodeAction | PersistStep | InspectGroup,
    buddy: NodeFacts | None = None,
    incidents: tuple[LaunchIncident, ...] = (),
    own_checkpoints: tuple[OwnCheckpoint, ...] = (),
) -> wire.Message:
    """The message that has a node carry out an action. Of a launch, `buddy`: the facts of the
    buddy, if it is connected; `incidents`: those that led to it; `own_checkpoints`: what the
    script has written."""
    match action:
        case LaunchGroup():
            membership = action.membership
            if action.own_shards:
                membership = membership.with_sources_of(seat.shard for seat in action.seats)
            membership = msgspec.structs.replace(
                membership, incidents=incidents, own_checkpoints=own_checkpoints
            )
            return _message(
                wire.LaunchWorkers,
                action,
                membership=membership,
                buddy=action.buddy if buddy else "",
                buddy_address=buddy.address if buddy else "",
                buddy_port=buddy.data_port if buddy else 0,
            )
        case StopGroup():
            return _message(wire.StopWorkers, action)
        case StageStep():
            return _message(wire.Stage, action, hold=True)
        case InspectGroup():
            return _message(wire.Inspect, action)
        case PersistStep():
            return _message(wire.Persist, action)


def _message(kind: type[wire.Message], action: msgspec.Struct, **more: Any) -> wire.Message:
    """A message with the fields of its action."""
    common = [name for name in kind.__struct_fields__ if hasattr(action, name)]
    return kind(**{name: getattr(action, name) for name in common} | more)
