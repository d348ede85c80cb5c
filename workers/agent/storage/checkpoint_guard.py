"""Sets incomplete checkpoints of a script aside before its workers are started again.

A framework takes the newest checkpoint, complete or not: a kill in the middle of a save would end
the job for good. Nothing is deleted, and nothing is touched that was last written before the job
was submitted.

Whose it is: other jobs, converters and downloads may write below the same directory. Touched is
what ranks of this job reported to have written (pool/file_audit.py), and what lies in a directory
that the spec or an argument names and in which no rank was seen to write. Of the latter, files that
a process has open or that still grow stay as they are. Where ranks report what they write, a new
file that none reported is another program's, and stays too.

Every node looks before it starts its own workers, and no rank trains before all are started, so no
save is under way. On a shared file system one of the nodes renames; the others find it done. Of the
files that each rank writes, a node opens those of its own ranks and a few. Invariant: nothing is
renamed or written after LOOK_TIMEOUT_S, as the workers are started then.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.protocol import files

from . import script_checkpoints

MAX_ENTRIES = 2000
"""Names looked at below one directory: 10 ms on a local disk."""
MAX_PATH = 1024
"""Characters of an argument that may be a path."""
MAX_DEPTH = 3
"""Folders below a directory that is looked at."""
MAX_ROOTS = 16
MAX_JUDGED = 3
"""Older checkpoints with which the newest one is compared."""
LOOK_TIMEOUT_S = 5.0
"""Seconds after which the workers are started all the same: a launch is sent again after 15 s."""
TOO_SLOW = f"the file system did not answer within {LOOK_TIMEOUT_S:.0f} s; the rest is unchanged"
GROWTH_S = 0.5
"""A checkpoint that may be another job's is renamed only if it has not changed for this long."""
SETTLED_S = 60.0
"""Seconds in which what no rank reported must not have changed: a download may pause."""
SINGLE_FILES = (".ckpt", ".pt", ".pth", ".pth.tar")
"""Ends of the names of checkpoints that are one file, where no rank reported what it wrote."""
_RESUMED = re.compile(
    r"(?<![a-z])(?:last|latest|checkpoint|ckpt|snapshot|state|epoch|step|iter|resume)(?![a-z])",
    re.IGNORECASE,
)
"""Words in the name of a file from which a script resumes."""
_EXPORTED = re.compile(
    r"(?<![a-z])(?:best|ema|swa|avg|weights?|final|export(?:ed)?|adapter|optim(?:izer)?|scheduler"
    r"|rng|scaler)(?![a-z])",
    re.IGNORECASE,
)
"""Words in the name of a file that lacks a part of the state."""
SAME_SAVE_NS = 30 * 10**9
"""Files of one directory that are this close in time may be from one save: the largest counts."""
_LARGER = 1.2
"""Factor between sizes that shows that a file holds more of the state."""
SKIPPED = ("__pycache__", "node_modules", "site-packages", "wandb", "mlruns")
ASIDE = ".incomplete"
"""End of the name of a folder with what was set aside."""
_NUMBERED = re.compile(r"(.*?)(\d+)")


@dataclass
class Findings:
    """Results of one look."""

    set_aside: list[str] = field(default_factory=list)
    """A sentence each."""
    newest: tuple[int, Path] | None = None
    """(when it was written, where) of the newest complete checkpoint of this job. A file that may
    be something else, such as a cache, counts only if there is no other."""
    certainty: int = 0
    """Certainty that the script resumes from it: a folder or tag of a framework, 2; for files see
    `certainty_of`."""
    size: int = 0
    """Bytes of a file."""
    divided: tuple[Path, int] | None = None
    """(where, by how many ranks) of a newest complete checkpoint that ZeRO of DeepSpeed divided."""
    failed: frozenset[Path] = frozenset()
    """Checkpoints read by starts that failed before they trained: not the newest while there is
    another."""
    passed_over: list[tuple[int, Path]] = field(default_factory=list)
    """(when it was written, where) of those."""
    num_entries: int = 0
    cut_short: str = ""
    """Reason why the search ended early; empty: it did not."""

    def complete(self, path: Path, written_ns: int, certainty: int, size: int = 0) -> None:
        if path in self.failed:
            self.passed_over.append((written_ns, path))
        elif self.newest is None or self._comes_before(path, written_ns, certainty, size):
            self.newest, self.certainty, self.size = (written_ns, path), certainty, size

    def _comes_before(self, path: Path, written_ns: int, certainty: int, size: int) -> bool:
        assert self.newest is not None
        newest_ns, newest = self.newest
        is_same_save = (
            certainty == self.certainty
            and path.parent == newest.parent
            and abs(written_ns - newest_ns) < SAME_SAVE_NS
            and re.sub(r"\d+", "#", path.name) != re.sub(r"\d+", "#", newest.name)
        )
        if is_same_save and max(size, self.size) > _LARGER * min(size, self.size):
            return size > self.size
        return (certainty, written_ns) > (self.certainty, newest_ns)


def certainty_of(name: str) -> int:
    """Order among files: a name to resume from, 1; another one, 0; a best or exported model, -1."""
    return -1 if _EXPORTED.search(name) else int(_RESUMED.search(name) is not None)


def roots(job: TrainingJob, spec_directory: str) -> list[Path]:
    """Directories and files that the spec or the script's arguments name."""
    home = files.resolve(spec_directory, job.spec.working_directory).absolute()
    if named := job.spec.checkpoint.guard.directories:
        return [files.resolve(home, directory) for directory in named]
    program = job.spec.entrypoint.program
    words = (*program.args, *program.words)
    paths = [home / value for word in words for value in _paths(word)]
    existing = [path for path in paths if path not in (home, path.parent) and path.exists()]
    return list(dict.fromkeys(existing[:MAX_ROOTS]))


def may_name(job: TrainingJob) -> bool:
    """True if the newest checkpoint of these directories is the job's. An argument may also name
    what another job writes; the ranks of a script report what they write."""
    program = job.spec.entrypoint.program
    unseen = bool(program.words or program.python or program.runner)
    return bool(job.spec.checkpoint.guard.directories) or unseen


def _paths(word: str) -> Iterator[str]:
    """`--output_dir=out` and `out` both name out."""
    value = word.partition("=")[2] if word.startswith("-") else word
    if value and len(value) < MAX_PATH and "\0" not in value:
        yield value


def look(
    where: Iterable[Path],
    since_ns: int,
    own: tuple[int, int, int] = (0, 1, 1),
    written: Iterable[Path] = (),
    *,
    named: bool = True,
    failed: Iterable[Path] = (),
) -> Findings:
    """Rename incomplete newest checkpoints: among `written`, which the job's ranks reported, and in
    and below those of the directories `where` in which they wrote none. `named`: the newest one
    may be from these directories. `failed`: see Findings.

    `since_ns`: wall clock; what was written before is not touched. `own`: the first rank of this
    node, how many it has, and how many the job has.
    """
    return _Look(since_ns, own, failed).run(where, list(written), named=named)


class _Look:
    def __init__(
        self, since_ns: int, own: tuple[int, int, int], failed: Iterable[Path] = ()
    ) -> None:
        self._since_ns = since_ns
        self._deadline_s = time.monotonic() + LOOK_TIMEOUT_S
        self._share = script_checkpoints.Share(*own, check=self._expect_time)
        self._seen: set[Path] = set()
        self._links: list[Path] = []
        self._foreign = False
        """True if the checkpoint that is looked at may belong to another job."""
        self._reported = False
        """Ranks report what they write, so that what is looked at probably does."""
        self.findings = Findings(failed=frozenset(failed))

    def run(self, where: Iterable[Path], written: list[Path], *, named: bool) -> Findings:
        self._written(written)
        self._guarded(partial(self._files, self._links))  # what they lead to was looked at
        newest, self._foreign, self._links = self.findings.newest, True, []
        self._reported = not named
        for root in where:
            real = root.resolve()
            if any(path.is_relative_to(real) for path in written):
                continue
            if root.is_dir():
                self._below(root)
            elif root.suffix in script_checkpoints.SAVED_SUFFIXES and root.is_file():
                self._guarded(partial(self._files, [root]))
        self._guarded(partial(self._files, self._links))
        if newest is not None or not named:
            self.findings.newest = newest
        if self.findings.newest is None and self.findings.passed_over:
            self.findings.newest = max(self.findings.passed_over)
        return self.findings

    def _written(self, written: list[Path]) -> None:
        """Judge from the top: what is in a checkpoint is judged with it."""
        judged: set[Path] = set()
        directories = {path.parent for path in written}
        for directory in sorted(directories, key=lambda path: len(path.parts)):
            if judged.intersection((directory, *directory.parents)):
                continue
            here = [path for path in written if path.parent == directory and os.path.lexists(path)]
            folders = [path for path in here if path.is_dir() and not path.is_symlink()]
            rest = self._in(directory, folders, [path for path in here if path not in folders])
            judged.update(folder for folder in folders if folder not in rest)

    def _expect_time(self) -> None:
        if time.monotonic() >= self._deadline_s:
            raise TimeoutError(TOO_SLOW)

    def _below(self, root: Path) -> None:
        """Breadth first: checkpoints are near the top."""
        level, left = [root], MAX_ENTRIES
        for _depth in range(MAX_DEPTH + 1):
            deeper: list[Path] = []
            for directory in level:
                if directory in self._seen:
                    continue
                self._seen.add(directory)
                try:
                    self._expect_time()
                    with os.scandir(directory) as scan:
                        entries = [entry for entry, _ in zip(scan, range(left), strict=False)]
                    left -= len(entries)
                    folders = [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False)]
                    names = [Path(e.path) for e in entries if _is_single(e)]
                except TimeoutError:
                    self.findings.cut_short = TOO_SLOW
                    return
                except OSError:
                    continue
                self.findings.num_entries += len(entries)
                deeper += self._in(directory, folders, names)
                if left <= 0:
                    self.findings.cut_short = f"{root} has more than {MAX_ENTRIES} entries"
                    return
            level = deeper

    def _in(self, directory: Path, folders: list[Path], names: list[Path]) -> list[Path]:
        """Judge what is in one directory; returns the folders to look into."""
        if any(path.name == "latest" and not path.is_symlink() for path in names):
            self._guarded(partial(self._deepspeed, directory))
            folders = [] if script_checkpoints.tags_in(directory) else folders
        saved = [path for path in names if path.name != "latest"]
        self._links += [path for path in saved if path.is_symlink()]
        self._guarded(partial(self._files, [path for path in saved if not path.is_symlink()]))
        rest = []
        for series in _series(folders):
            numbered = _number(series[0]) >= 0 or series[0].suffix == ".ckpt"
            ordered = sorted(series, key=_number, reverse=True)
            own = not self._foreign  # one folder of DCP may be written again and again
            kind = script_checkpoints.kind_of(ordered[:MAX_JUDGED]) if numbered or own else ""
            kind = kind if numbered or kind == "dcp" else ""
            if kind or (numbered and _is_empty(ordered[0])):
                self._guarded(partial(self._directories, kind, ordered))
            else:
                rest += series
        return [
            folder
            for folder in rest
            if not (folder.name.startswith(".") or folder.name in SKIPPED)
            and not folder.name.endswith(ASIDE)
        ]

    def _guarded(self, work: Callable[[], None]) -> None:
        """A file that vanishes, or that may not be read, is no reason to start no workers."""
        try:
            work()
        except OSError as error:
            self.findings.cut_short = str(error)

    # -- series of directories ----------------------------------------------------------------
    def _directories(self, kind: script_checkpoints.Kind, ordered: Sequence[Path]) -> None:
        for at, newest in enumerate(ordered):
            written_ns = self._written_ns(newest)
            if written_ns < self._since_ns:
                return
            older = ordered[at + 1 : at + 1 + MAX_JUDGED]
            why = script_checkpoints.problem(kind, newest, older, self._share)
            if why:
                self._set_aside(newest, why)
                continue
            if kind:
                self.findings.complete(newest, written_ns, 2)
            if newest not in self.findings.failed:
                return

    def _written_ns(self, directory: Path) -> int:
        """Time of the last change of a checkpoint's files or folder."""
        times = [directory.stat().st_mtime_ns]
        for name in self._share.of(script_checkpoints.names_in(directory)):
            self._expect_time()
            times.append((directory / name).lstat().st_mtime_ns)
        return max(times)

    # -- single files -------------------------------------------------------------------------
    def _files(self, saved: Sequence[Path]) -> None:
        for path in saved:
            self._expect_time()
            if path.is_symlink() and not path.exists():
                if path.lstat().st_mtime_ns >= self._since_ns:
                    self._set_aside(path, "its target does not exist")
                continue
            status = path.stat()
            written_ns = status.st_mtime_ns
            if written_ns < self._since_ns or path.is_dir():
                continue
            if why := script_checkpoints.torn(path):
                self._set_aside(path, why)
            else:
                certainty = certainty_of(path.name)
                self.findings.complete(path, written_ns, certainty, status.st_size)

    def _set_aside(self, path: Path, why: str) -> None:
        if not self._may_change(path, why):
            return
        then = _moved(path)
        if then is not None:
            what = f"checkpoint {path} is incomplete ({why}); it was renamed to {then}"
            self.findings.set_aside.append(what)

    def _may_change(self, path: Path, why: str) -> bool:
        user = (self._reported and _recent(path)) or in_use(path) if self._foreign else ""
        self._expect_time()
        if user:
            text = f"checkpoint {path} is incomplete ({why}) and keeps its name: {user}"
            self.findings.set_aside.append(text)
        return not user

    # -- DeepSpeed ----------------------------------------------------------------------------
    def _deepspeed(self, directory: Path) -> None:
        latest, tags = directory / "latest", script_checkpoints.tags_in(directory)
        if latest.stat().st_mtime_ns < self._since_ns or not tags:
            return
        why = script_checkpoints.deepspeed_problem(directory, self._share)
        if not why:
            self._complete_tag(directory)
            return
        share = self._share
        good = next((tag for tag in tags if not script_checkpoints.tag_problem(tag, share)), None)
        if good is None:
            self._set_aside(latest, f"{why}, and no complete tag is beside it")
            return
        if not self._may_change(directory, why):
            return
        files.replace(latest, good.name.encode())
        self._complete_tag(directory)
        text = f"checkpoint {directory}: {why}; latest names {good.name} now, which is complete"
        self.findings.set_aside.append(text)

    def _complete_tag(self, directory: Path) -> None:
        self.findings.complete(directory, (directory / "latest").stat().st_mtime_ns, 2)
        tag = script_checkpoints.tag_of_latest(directory)
        parts, model_ranks = script_checkpoints.optimizer_parts(tag) if tag else (0, 0)
        if tag and parts and self.findings.newest and self.findings.newest[1] == directory:
            self.findings.divided = (tag, parts * model_ranks)


def _is_single(entry: os.DirEntry[str]) -> bool:
    named = entry.name == "latest" or entry.name.endswith(SINGLE_FILES)
    return named and not entry.is_dir(follow_symlinks=False)


def _series(folders: Iterable[Path]) -> list[list[Path]]:
    """Folders whose names differ in the number at their end only."""
    series: dict[str, list[Path]] = {}
    for folder in folders:
        match = _NUMBERED.fullmatch(folder.name)
        series.setdefault(f"{match[1]}#" if match else folder.name, []).append(folder)
    return list(series.values())


def _is_empty(directory: Path) -> bool:
    """Made by a save that had written nothing yet."""
    named = re.match(r"checkpoint|step|epoch|ckpt", directory.name) is not None
    return named and not script_checkpoints.names_in(directory)


def _number(path: Path) -> int:
    """The number at the end of a name, by which frameworks find the newest; -1: there is none."""
    match = _NUMBERED.fullmatch(path.name)
    return int(match[2]) if match else -1


def in_use(path: Path) -> str:
    """Process that writes a checkpoint while no rank of this job runs; empty: no process that this
    node can see."""
    before = _state(path)
    for process in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            for link in process.iterdir():
                opened = Path(link.readlink())
                if opened == path or path in opened.parents:
                    return f"process {process.parent.name} has it open"
    time.sleep(GROWTH_S)
    return "it still grows" if _state(path) != before else ""


def _recent(path: Path) -> str:
    """Age of a checkpoint's last change, if it may change again; a time to come counts as now. The
    clock is the file system's, where a file can be made."""
    changed_ns = max(written_ns for _, _, written_ns in _state(path))
    try:
        with tempfile.TemporaryFile(dir=path.parent) as file:
            now_ns = os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        now_ns = time.time_ns()
    age_s = max(0.0, (now_ns - changed_ns) / 1e9)
    written = f"it was written {age_s:.0f} s ago, and not by a rank of this job"
    return written if age_s < SETTLED_S else ""


def _state(path: Path) -> list[tuple[str, int, int]]:
    """Sizes and times of a file, or of all files of a folder."""
    files_below = [path, *path.rglob("*")] if path.is_dir() else [path]
    statuses = [(str(file), file.lstat()) for file in files_below]
    return [(name, status.st_size, status.st_mtime_ns) for name, status in statuses]


def _moved(path: Path) -> Path | None:
    """Rename into a folder beside the checkpoints' own one, which some frameworks and scripts list
    as a whole; where that cannot be made, under another name. None: another node has done it."""
    beside = path.parent.parent / f"{path.parent.name or 'checkpoints'}{ASIDE}"
    try:
        beside.mkdir(exist_ok=True)
        return path.rename(_free(beside, path.name))
    except FileNotFoundError:
        return None
    except OSError:  # the parent is the root of a volume, or belongs to another user
        pass
    try:
        return path.rename(_free(path.parent, f"incomplete-of-{path.name}"))
    except FileNotFoundError:
        return None


def _free(folder: Path, name: str) -> Path:
    numbers = range(1, 10_000)
    choices = (folder / f"{name}-{number}{ASIDE}" for number in numbers)
    return next(path for path in choices if not os.path.lexists(path))
