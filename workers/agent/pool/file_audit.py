"""Reports the checkpoints that this process writes, so that the agent knows which ones are the
job's: others may write below the same directory.

Audit events of Python are synchronous: the report is sent before the file exists, so a kill in the
middle of a save does not lose it. `torch.save` opens its file in C++, so its event is added. What a
program without Python or a new interpreter of the script writes is not seen.

In a restart rank 0 also reports whether it opens a checkpoint of the job. If it has opened none and
is about to write over one that earlier generations saved again and again, it has begun at step 0.
It then waits for the agent to end it, unless the spec says otherwise: the file is still whole.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
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
_STATE = re.compile(r"ckpt|checkpoint|snapshot|model|weight|state|epoch|step|iter", re.IGNORECASE)
"""In the name of one of several files in a row that hold the state of a training."""
_NOT_STATE = (".py", ".pyc", ".log", ".txt")
OWN_CHECKPOINTS = "HOLDFAST_OWN_CHECKPOINTS"
"""Variable: {"known": [[path, times], ...], "hold": whether to wait} in JSON; not in a first start
and not without a complete checkpoint."""
STARTS_OVER = "holdfast.starts_over"
"""Audit event of a script that begins at step 0 by its own word."""
Series = tuple[Path, str]
"""(directory, name with # for its numbers) of checkpoints that follow each other."""


def series_of(path: Path) -> tuple[Series, tuple[int, ...]]:
    """(series, the numbers in the name)."""
    numbers = tuple(int(one) for one in re.findall(r"\d+", path.name))
    return (path.parent, re.sub(r"\d+", "#", path.name)), numbers


class Earlier:
    """The checkpoints of earlier generations that were saved again and again. What is written once
    in each start, such as a vocabulary or the parts of a data set, is not the training's state."""

    def __init__(self, known: Sequence[tuple[str, int]], since_ns: int = 0) -> None:
        """`since_ns`: when the job was submitted."""
        self._since_ns = since_ns
        members: dict[Series, list[tuple[int, ...]]] = {}
        again = []
        for text, times in known:
            series, numbers = series_of(Path(text))
            members.setdefault(series, []).append(numbers)
            is_file = text.endswith((*FILES, LATEST))
            is_state = (
                _STATE.search(series[1]) if is_file else _CHECKPOINT.fullmatch(Path(text).name)
            )
            if (is_file and times > 1) or (is_state and len(members[series]) > 1):
                again.append(series)
        self._newest = {series: max(members[series]) for series in again}
        self._directories = {series[0] for series in again}

    def __bool__(self) -> bool:
        return bool(self._newest)

    def holds(self, path: Path) -> bool:
        """Whether a file that is read may be the training's state, in whatever format: it is beside
        these checkpoints or in one, and was written since the job was submitted."""
        if path.suffix in _NOT_STATE or self._directories.isdisjoint(path.parents):
            return False
        try:
            return path.stat().st_mtime_ns >= self._since_ns
        except OSError:
            return False

    def overwritten(self, path: Path) -> bool:
        """Whether this takes the place of one, or is older than one."""
        series, numbers = series_of(path)
        return series in self._newest and numbers <= self._newest[series]

    def repeated(self, path: Path) -> bool:
        """Whether one of the same name is in another directory, as if each start had its own."""
        directory, name = series_of(path)[0]
        return any(name == known and directory != other for other, known in self._newest)


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
    """Of one process. `wrote` takes the path of a checkpoint that is about to be written, whether
    none of `earlier` was opened, and whether this process waits for its end; `opened` takes one
    that is read."""

    def __init__(
        self,
        wrote: Callable[[str, bool, bool], None],
        opened: Callable[[str], None] = lambda path: None,
        earlier: Earlier | None = None,
        *,
        hold: bool = False,
    ) -> None:
        self._report, self._report_opened = wrote, opened
        self._earlier, self._hold = earlier, hold
        self._busy = threading.local()
        self._folders: set[Path] = set()
        """Reported already. A file may be written again and again."""
        self._on: dict[str, Callable[..., None]] = {
            "open": self._opened,
            "os.mkdir": self._made,
            "os.rename": self._renamed,
            "os.symlink": self._renamed,
            STARTS_OVER: self._start_over,
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
        if isinstance(path, int):
            return
        if writes:
            self._wrote(path, folder=False)
        elif self._earlier is not None:
            real = Path(os.fsdecode(path)).resolve()
            if self._earlier.holds(real):
                self._earlier = None
                self._report_opened(str(real))

    def _start_over(self) -> None:
        self._earlier = None

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
        place = found.parent.resolve() / found.name
        over = self._earlier is not None and self._earlier.overwritten(place)
        unread = over or (self._earlier is not None and self._earlier.repeated(place))
        waits = over and self._hold
        if unread:
            self._earlier = None
        self._report(str(place), unread, waits)
        if waits:
            self._busy.now = False  # a handler of SIGTERM that saves waits as well
            self._wait()

    def _wait(self) -> None:
        while True:
            time.sleep(1)


def install(wire: int) -> None:
    """`wire`: the descriptor of the agent's socket."""
    import msgspec

    from holdfast.workers import packets, worker_protocol

    encoder = msgspec.msgpack.Encoder()

    def send(message: worker_protocol.FromWorker) -> None:
        with socket.socket(fileno=os.dup(wire)) as link:
            packets.send(link, encoder.encode(message))

    def wrote(path: str, unread: bool, waits: bool) -> None:
        send(worker_protocol.CheckpointWritten(path=path, unread=unread, waits=waits))

    def opened(path: str) -> None:
        send(worker_protocol.CheckpointOpened(path=path))

    given = json.loads(os.environ.get(OWN_CHECKPOINTS, "{}"))
    # Others may get the state from rank 0.
    reads = bool(given) and os.environ.get("RANK") == "0"
    known = [(path, times) for path, times in given["known"]] if reads else []
    earlier = Earlier(known, int(os.environ.get("HOLDFAST_RESUME_SINCE", "0"))) or None
    hold = bool(given.get("hold"))
    sys.addaudithook(FileAudit(wrote, opened, earlier, hold=hold).hook)
