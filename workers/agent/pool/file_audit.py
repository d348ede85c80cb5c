"""Reports the checkpoints that this process writes, so that the agent knows which ones are the
job's: others may write below the same directory.

Audit events of Python are synchronous: the report is sent before the file exists, so a kill in the
middle of a save does not lose it. `torch.save` opens its file in C++, so its event is added. What a
program without Python or a new interpreter of the script writes is not seen.

In a restart rank 0 also reports whether it opens a checkpoint of the job. If it has opened none,
trains, and is about to write over one that earlier generations saved again and again, it has begun
at step 0. It then waits for the agent to end it, unless the spec says otherwise: the file is still
whole. A script that fetches its checkpoint to this path first does not train yet.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_FILE = re.compile(r"\.(?:ckpt|pt|pth|safetensors)(?:\.(?:tar|gz|bz2|xz|zst|lz4))*$")
"""End of the name of a checkpoint."""
_MAYBE_FILE = re.compile(r"\.(?:bin|pkl|pickle|joblib|npz|h5|hdf5|msgpack|tar|tgz|zip)(?:\.gz)?$")
"""End of the name of a checkpoint, if a word of _STATE is before it."""
_NO_SUFFIX = re.compile(r"[^.]*(?:snapshot|checkpoint|ckpt)[^.]*", re.IGNORECASE)
_FIRST_SHARD = re.compile(r"__\d+_0\.distcp")
"""The first file of each rank in a folder of torch's DCP."""
LATEST = "latest"
"""Written last by DeepSpeed."""
_CHECKPOINT = re.compile(r"(?:checkpoint|ckpt|global_step|step|epoch|iter)[-_=]?\d+(?:\.ckpt)?")
"""A folder that is a checkpoint as a whole."""
_NUMBERED = re.compile(r".*(?:\d|\.ckpt)")
_DEPTH = 3
"""Folders above a file that may be the checkpoint that it belongs to."""
_WRITES = os.O_WRONLY | os.O_RDWR
_STATE = re.compile(
    r"ckpt|checkpoint|snapshot|model|weight|state|epoch|step|iter|optim|last|latest|best|resume",
    re.IGNORECASE,
)
"""Words in the name of a file that holds the state of a training."""
_NOT_STATE = (".py", ".pyc", ".log", ".txt", ".csv", ".md", ".yaml", ".yml", ".lock")
OWN_CHECKPOINTS = "HOLDFAST_OWN_CHECKPOINTS"
"""Variable: {"known": [[path, times], ...], "hold": whether to wait} in JSON; not in a first start
and not without a complete checkpoint."""
STARTS_OVER = "holdfast.starts_over"
"""Audit event of a script that begins at step 0 by its own word."""
SAVES = "holdfast.saves"
"""Audit event of torch.save and safetensors (framework_hooks.py), which open files natively."""
_MAX_SAVED = 64
Series = tuple[Path, str]
"""(directory, name with # for its numbers) of checkpoints that follow each other."""


def series_of(path: Path) -> tuple[Series, tuple[int, ...]]:
    """(series, the numbers in the name)."""
    numbers = tuple(int(digits) for digits in re.findall(r"\d+", path.name))
    return (path.parent, re.sub(r"\d+", "#", path.name)), numbers


class Earlier:
    """The checkpoints of earlier generations that were saved again and again. What is written once
    in each start, such as a vocabulary or the parts of a data set, is not the training's state."""

    def __init__(self, known: Sequence[tuple[str, int]], since_ns: int = 0) -> None:
        """`since_ns`: when the job was submitted."""
        self._since_ns = since_ns
        members, again = dict[Series, list[tuple[int, ...]]](), list[Series]()
        self._states: set[Path] = set()
        self._once: set[Path] = set()
        """Written once in a start, and not named as a state."""
        for text, times in known:
            path = Path(text)
            series, numbers = series_of(path)
            members.setdefault(series, []).append(numbers)
            whole = _CHECKPOINT.fullmatch(path.name)
            is_file = not whole and (is_file_name(path.name) or not _NUMBERED.fullmatch(path.name))
            is_state = _STATE.search(series[1]) if is_file else whole
            if (is_file and times > 1) or (is_state and len(members[series]) > 1):
                again.append(series)
            (self._states if is_state or times > 1 else self._once).add(path)
        self._newest = {series: max(members[series]) for series in again}
        self._directories = {series[0] for series in again}

    def __bool__(self) -> bool:
        return bool(self._newest)

    def holds(self, path: Path) -> bool:
        """True if a file that is read may be the training's state: a checkpoint of the job, a file
        in one, or a file beside one with a checkpoint's name, written since the job began."""
        if path.suffix in _NOT_STATE or not (self._is_known(path) or self._is_beside(path)):
            return False
        try:
            return path.stat().st_mtime_ns >= self._since_ns
        except OSError:
            return False

    def _is_known(self, path: Path) -> bool:
        return path in self._states or not self._states.isdisjoint(path.parents)

    def _is_beside(self, path: Path) -> bool:
        if path.parent in self._directories:
            is_state = is_file_name(path.name) or _STATE.search(path.name)
            return bool(is_state) and path not in self._once
        above = self._directories.intersection(path.parents)
        return any(_STATE.search(path.relative_to(folder).parts[0]) for folder in above)

    def overwritten(self, path: Path) -> bool:
        """True if this takes the place of a checkpoint, or is older than one."""
        series, numbers = series_of(path)
        return series in self._newest and numbers <= self._newest[series]

    def repeated(self, path: Path) -> bool:
        """True if another directory has a checkpoint of the name, as if each start had its own."""
        directory, name = series_of(path)[0]
        return any(name == same and directory != other for other, same in self._newest)


def is_file_name(name: str) -> bool:
    """True if a file of this name is a checkpoint."""
    if _FILE.search(name):
        return True
    if (end := _MAYBE_FILE.search(name)) is not None:
        return _STATE.search(name[: end.start()]) is not None
    return name == LATEST or _NO_SUFFIX.fullmatch(name) is not None


def checkpoint_of(path: Path, *, folder: bool) -> Path | None:
    """The checkpoint that a written file or a new folder belongs to; None: to none."""
    above = (path, *path.parents) if folder else path.parents
    whole = [parent for parent in above[:_DEPTH] if _CHECKPOINT.fullmatch(parent.name)]
    if whole:
        return whole[-1]
    if not folder and _FIRST_SHARD.fullmatch(path.name):
        return path.parent
    counts = _NUMBERED.fullmatch(path.name) if folder else is_file_name(path.name)
    return path if counts else None


def _trains(saves: bool) -> bool:
    """True if this process trains already. `saves`: it calls torch.save or the like."""
    from holdfast.orchestrator import limits
    from holdfast.workers.session import inspection

    if saves and os.environ.get("WORLD_SIZE", "1") == "1":
        return True
    if inspection.num_collectives() >= (1 if saves else limits.BEGUN_COLLECTIVES):
        return True
    optimizer = getattr(sys.modules.get("torch.optim"), "Optimizer", None)
    return optimizer is not None and any(
        issubclass(type(thing), optimizer) and thing.state for thing in gc.get_objects()
    )


class FileAudit:
    """The reports of one process. `wrote` takes the path of a checkpoint that is about to be
    written, whether none of `earlier` was opened, and whether this process waits for its end;
    `opened` takes one that is read. `trains`: whether a write may be a training's save."""

    def __init__(
        self,
        wrote: Callable[[str, bool, bool], None],
        opened: Callable[[str], None] = lambda path: None,
        earlier: Earlier | None = None,
        *,
        hold: bool = False,
        trains: Callable[[bool], bool] = lambda saves: True,
    ) -> None:
        self._report, self._report_opened = wrote, opened
        self._earlier, self._hold, self._trains = earlier, hold, trains
        self._judged = mmap.mmap(-1, 1) if earlier is not None else None
        """1 when this process, or one forked from it such as a saver, has read its state."""
        self._busy = threading.local()
        self._folders: set[Path] = set()
        """Reported already. A file may be written again and again."""
        self._saved: dict[Path, None] = {}
        """Files of torch.save, which may be renamed."""
        self._on: dict[str, Callable[..., None]] = {
            "open": self._opened,
            "os.mkdir": self._made,
            "os.rename": self._renamed,
            "os.symlink": self._renamed,
            SAVES: self._saves,
            STARTS_OVER: self._judge,
        }

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Hook of sys.addaudithook. The script runs on, whatever goes wrong here."""
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
        elif (earlier := self._unjudged()) is not None:
            real = Path(os.fsdecode(path)).resolve()
            if earlier.holds(real):
                self._judge()
                self._report_opened(str(real))

    def _unjudged(self) -> Earlier | None:
        return None if self._judged is None or self._judged[0] else self._earlier

    def _judge(self) -> None:
        if self._judged is not None:
            self._judged[0] = 1

    def _made(self, path: Any, *_more: Any) -> None:
        if Path(os.fsdecode(path)).parent != Path(tempfile.gettempdir()):  # of a queue, for example
            self._wrote(path, folder=True)

    def _saves(self, path: Any) -> None:
        if not isinstance(path, int):
            written = Path(os.fsdecode(path)).absolute()
            self._wrote(path, folder=False, saves=True, is_final=written in self._saved)
            self._saved[written] = None
            while len(self._saved) > _MAX_SAVED:
                del self._saved[next(iter(self._saved))]

    def _renamed(self, source: Any, target: Any, *_more: Any) -> None:
        before = Path(os.fsdecode(source)).absolute()
        saves = self._saved.pop(before, 0) is None  # as each value is
        self._wrote(target, folder=before.is_dir(), saves=saves, is_final=saves)

    def _wrote(
        self, path: Any, *, folder: bool, saves: bool = False, is_final: bool = False
    ) -> None:
        """`is_final`: whether a saved file keeps its name; others may be renamed when whole."""
        written = Path(os.fsdecode(path)).absolute()
        named = checkpoint_of(written, folder=folder)
        if named is None and not saves:
            return
        checkpoint = named or written
        place = checkpoint.parent.resolve() / checkpoint.name
        earlier = self._unjudged()
        over = earlier is not None and earlier.overwritten(place)
        if named is None and not is_final and not (saves and over):
            return
        unread = over or (earlier is not None and earlier.repeated(place))
        unread = unread and self._trains(saves)
        waits = over and unread and self._hold
        if unread:
            self._judge()
        elif checkpoint in self._folders:
            return
        if folder or (checkpoint != written and _NUMBERED.fullmatch(checkpoint.name)):
            self._folders.add(checkpoint)
        self._report(str(place), unread, waits)
        if waits:
            self._busy.now = False  # a handler of SIGTERM that saves waits as well
            self._wait()

    def _wait(self) -> None:
        while True:
            time.sleep(1)


_installed: list[FileAudit] = []
"""The audit of this run of the script."""


def install(wire: int) -> None:
    """`wire`: the descriptor of the agent's socket. Python cannot remove a hook, so the script's
    next run in this process gets the same one."""
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

    setting = json.loads(os.environ.get(OWN_CHECKPOINTS, "{}"))
    # Others may get the state from rank 0.
    reads = bool(setting) and os.environ.get("RANK") == "0"
    checkpoints = [(path, times) for path, times in setting["known"]] if reads else []
    earlier = Earlier(checkpoints, int(os.environ.get("HOLDFAST_RESUME_SINCE", "0"))) or None
    hold = bool(setting.get("hold"))
    audits = not _installed
    _installed[:] = [FileAudit(wrote, opened, earlier, hold=hold, trains=_trains)]
    if audits:
        sys.addaudithook(lambda event, arguments: _installed[0].hook(event, arguments))
