"""Messages between the local backend and the node launcher of a machine.

The launcher (agent/process/node_launcher.py) has imported torch once and forks an agent per node in
milliseconds. It listens on a Unix socket (mode 0600) in the job's directory, survives the
controller, and exits when it has neither a node nor a connection. Agents survive the launcher.
Frames as in messages.py.
"""

from __future__ import annotations

import msgspec


class LauncherMessage(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True
):
    """Base of all messages."""


# -- backend -> launcher ----------------------------------------------------------------------
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
    """GPUs of this machine for nodes of the job, without those of nodes that an earlier launcher
    started. The node gets `num_devices` of them, none of them used by another node, and waits until
    they are free. None: it sees all that the launcher sees."""
    num_devices: int = 0
    """0: as many as it has slots."""


class StopNode(LauncherMessage, frozen=True, kw_only=True, tag="end-node"):
    """SIGKILL a node's agent; its workers and its memory end with it."""

    node: str


class StopLauncher(LauncherMessage, frozen=True, kw_only=True, tag="end-host"):
    """SIGKILL all agents, then exit."""


# -- launcher -> backend ----------------------------------------------------------------------
class NodeList(LauncherMessage, frozen=True, kw_only=True, tag="nodes"):
    """First message on every connection, and after every StartNode: the nodes that exist."""

    nodes: dict[str, int]
    """Name -> pid of the agent."""
    devices: dict[str, tuple[str, ...]] = {}
    """Name -> GPUs that the launcher has assigned to the node."""


class NodeEnded(LauncherMessage, frozen=True, kw_only=True, tag="node-ended"):
    node: str
    detail: str
    """`killed by SIGKILL`, `exited with code 1` ..."""


ToLauncher = StartNode | StopNode | StopLauncher
FromLauncher = NodeList | NodeEnded
