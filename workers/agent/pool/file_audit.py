"""Reports the checkpoints that this process writes, so that the agent knows which ones are the
job's: others may write below the same directory.

Audit events of Python are synchronous: the report is sent before the file exists, so a kill in the
middle of a save does not lose it. `torch.save` opens its file in C++, so its event is added. What a
program without Python or a new interpreter of the script writes is not seen.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILES = (".ckpt", ".pt", ".pth")
LATEST = "latest"
"""Written last by DeepSpeed."""
_CHECKPOINT = re.compile(r"(?:checkpoint|ckpt|global_step|step|epoch|iter)[-_=]?\d+(?:\.ckpt)?")
"""A folder that is a checkpoint as a whole."""
_NUMBERED = re.compile(r".*(?:\d|\.ckpt)")
_DEPTH = 3
"""Folders above a file that may be the checkpoint that it belongs to."""
_WRITES = os.O_WRONLY | os.O_RDWR


def checkpoint_of(path: Path, *, folder: bool) -> Path | None:
    """The checkpoint that a written file or a new folder belongs to; None: to none."""
    above = (path, *path.parents) if folder else path.parents
    whole = [one for one in above[:_DEPTH] if _CHECKPOINT.fullmatch(one.name)]
    if whole:
        return whole[-1]
    name = path.name
    counts = _NUMBERED.fullmatch(name) if folder else name == LATEST or name.endswith(FILES)
    return path if counts else None


class FileAudit:
    """Of one process. `report` takes the path of a checkpoint that is about to be written."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._busy = threading.local()
        self._folders: set[Path] = set()
        """Reported already. A file may be written again and again."""
        self._on: dict[str, Callable[..., None]] = {
            "open": self._opened,
            "os.mkdir": self._made,
            "os.rename": self._renamed,
            "os.symlink": self._renamed,
        }

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """For sys.addaudithook. Whatever goes wrong here, the script runs on."""
        see = self._on.get(event)
        if see is None or getattr(self._busy, "now", False):
            return
        self._busy.now = True
        try:
            see(*arguments)
        except Exception:
            return
        finally:
            self._busy.now = False

    def _opened(self, path: Any, mode: Any, flags: Any = 0) -> None:
        writes = any(sign in mode for sign in "wax+") if mode else bool(flags and flags & _WRITES)
        if writes and not isinstance(path, int):
            self._wrote(path, folder=False)

    def _made(self, path: Any, *_more: Any) -> None:
        self._wrote(path, folder=True)

    def _renamed(self, source: Any, target: Any, *_more: Any) -> None:
        self._wrote(target, folder=Path(os.fsdecode(source)).is_dir())

    def _wrote(self, path: Any, *, folder: bool) -> None:
        found = checkpoint_of(Path(os.fsdecode(path)).absolute(), folder=folder)
        if found is None or found in self._folders:
            return
        if folder or not found.name.endswith((*FILES, LATEST)):
            self._folders.add(found)
        self._report(str(found.parent.resolve() / found.name))


def install(wire: int) -> None:
    """`wire`: the descriptor of the agent's socket."""
    import msgspec

    from holdfast.workers import packets, worker_protocol

    encoder = msgspec.msgpack.Encoder()

    def report(path: str) -> None:
        with socket.socket(fileno=os.dup(wire)) as link:
            packets.send(link, encoder.encode(worker_protocol.CheckpointWritten(path=path)))

    sys.addaudithook(FileAudit(report).hook)
