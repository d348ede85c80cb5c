"""nodes.json in the job's directory: the nodes of a job, for its next controller.

After a reboot no node is left, and another process may have an agent's pid and even its start time,
which counts from boot. Node names are not reused then either.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from holdfast.orchestrator.errors import HoldfastError
from holdfast.orchestrator.protocol.files import PRIVATE, replace

from .processes import Identity, identify

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LocalNodeRegistry(msgspec.Struct):
    next_number: int = 0
    agents: dict[str, Identity] = {}
    """Nodes whose process is known."""
    starting: set[str] = set()
    """Requested nodes whose process is not known yet."""
    boot: str = ""
    """Boot id of the machine."""
    devices: dict[str, tuple[str, ...]] = {}
    """GPUs of `agents`, where nodes have GPUs of their own."""


def load(path: Path) -> LocalNodeRegistry:
    """Nodes of the current boot. Raises HoldfastError when the file cannot be read."""
    try:
        registry = msgspec.json.decode(path.read_bytes(), type=LocalNodeRegistry)
    except FileNotFoundError:
        return LocalNodeRegistry()
    except (OSError, msgspec.MsgspecError) as error:
        why = getattr(error, "strerror", None) or f"it is damaged: {error}"
        raise HoldfastError(
            f"{path}: cannot be read ({why}); it lists the processes of the job's nodes. When none "
            f"of them is left, remove it and attach again"
        ) from None
    return LocalNodeRegistry(registry.next_number) if registry.boot != _boot() else registry


def living(path: Path) -> tuple[str, ...]:
    """Nodes whose processes run, with or without a controller."""
    return tuple(node for node, who in load(path).agents.items() if identify(who.pid) == who)


def save(path: Path, known: LocalNodeRegistry) -> None:
    """Write durably, so that a name is used once even after a crash of the machine. Raises
    HoldfastError and leaves the old file or the new one."""
    known.boot = _boot()
    try:
        replace(path, msgspec.json.encode(known), PRIVATE)
    except OSError as error:
        raise HoldfastError(f"{path}: cannot be written ({error.strerror}); make room") from None


def _boot() -> str:
    return BOOT_ID.read_text().strip()
