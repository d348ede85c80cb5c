"""Local backend <-> machine host: who forks this machine's nodes.

Owns: the messages. The launcher (agent/process/node_launcher.py) has imported torch once and forks
an agent per node in milliseconds. It listens on a Unix socket (mode 0600) in the job's directory
and outlives the controller; it ends by itself when it has no node and no connection. Frames as in
messages.py: 4-byte big-endian length, msgpack body.
"""

from __future__ import annotations

import msgspec


class LauncherMessage(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True
):
    """Base of all messages."""


# -- backend -> host --------------------------------------------------------------------------
class StartNode(LauncherMessage, frozen=True, kw_only=True, tag="start-node"):
    """Fork an agent. Idempotent by name."""

    node: str
    job: str
    slots: int
    token_file: str
    endpoint_file: str
    """JSON file with `address` and `port` of the controller, re-read at every reconnect."""
    log_file: str
    devices: tuple[str, ...] | None = None
    """GPUs of this machine for nodes of the job: this one gets as many as it has slots, which no
    other node has, and waits until there are. None: it sees what the host sees."""


class StopNode(LauncherMessage, frozen=True, kw_only=True, tag="end-node"):
    """SIGKILL a node's agent; its workers and its memory go with it."""

    node: str


class StopLauncher(LauncherMessage, frozen=True, kw_only=True, tag="end-host"):
    """SIGKILL all nodes, then end."""


# -- host -> backend --------------------------------------------------------------------------
class NodeList(LauncherMessage, frozen=True, kw_only=True, tag="nodes"):
    """First message on every connection, and after every StartNode: the nodes that exist."""

    nodes: dict[str, int]
    """Name -> pid of the agent."""


class NodeEnded(LauncherMessage, frozen=True, kw_only=True, tag="node-ended"):
    node: str
    detail: str
    """`killed by SIGKILL`, `exited with code 1` ..."""


ToHost = StartNode | StopNode | StopLauncher
FromHost = NodeList | NodeEnded
