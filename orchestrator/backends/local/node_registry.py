"""What a new controller must know of the nodes of an old one, in the job's directory.

Owns: that file (nodes.json), and what of it still holds. Must not: decide what is in it.

After a restart of the machine no node is left, and another process may have an agent's pid and even
its start time, which counts from boot. The names stay given away.
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
    """Nodes whose process has been seen."""
    starting: set[str] = set()
    """Nodes that were asked for and have not been seen yet."""
    boot: str = ""
    """Of the machine, when this was written; empty in files of earlier versions."""


def load(path: Path) -> LocalNodeRegistry:
    """Raises HoldfastError when the file cannot be read."""
    try:
        known = msgspec.json.decode(path.read_bytes(), type=LocalNodeRegistry)
    except FileNotFoundError:
        return LocalNodeRegistry()
    except (OSError, msgspec.MsgspecError) as error:
        why = getattr(error, "strerror", None) or f"it is damaged: {error}"
        raise HoldfastError(
            f"{path}: cannot be read ({why}); it says which processes are the job's nodes. Once "
            f"none of them is left, remove it and attach again"
        ) from None
    return LocalNodeRegistry(known.next_number) if known.boot not in ("", _boot()) else known


def living(path: Path) -> tuple[str, ...]:
    """Nodes whose processes are there, whether anybody watches them or not."""
    return tuple(node for node, one in load(path).agents.items() if identify(one.pid) == one)


def save(path: Path, known: LocalNodeRegistry) -> None:
    """Durable when this returns: a name is given away once, whatever becomes of the machine.
    Raises HoldfastError, leaving the old file or the new one."""
    known.boot = _boot()
    try:
        replace(path, msgspec.json.encode(known), PRIVATE)
    except OSError as error:
        raise HoldfastError(f"{path}: cannot be written ({error.strerror}); make room") from None


def _boot() -> str:
    return BOOT_ID.read_text().strip()
