"""The directory of a run of `holdfast.ray.Trainer`, which workers write and the client reads.

`<storage_path>/<name>/` has checkpoints: each is a directory that is renamed to `checkpoint_000000`
when it is complete, and `checkpoint_000000.json` beside it says which report it belongs to;
`result.json` has the newest metrics, `returned.json` what the function of rank 0 returned.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Self

from ..errors import UserError
from . import files

RESULT = "result.json"
RETURNED = "returned.json"
_METADATA = ".metadata.json"
_NAME = re.compile(r"checkpoint_(\d{6,})")


class TrainCheckpoint:
    """A directory with a checkpoint; `holdfast.ray.Checkpoint`."""

    def __init__(self, path: str | os.PathLike[str], filesystem: object = None) -> None:
        if filesystem is not None:
            raise _not_local("Checkpoint.filesystem", filesystem)
        self.path = os.fspath(path)
        if "://" in self.path:
            raise _not_local("Checkpoint.path", self.path)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Self:
        """The checkpoint in a local directory, for `report`."""
        return cls(path)

    def to_directory(self, path: str | os.PathLike[str] | None = None) -> str:
        """Copy it to a directory, a new temporary one by default; the directory."""
        target = os.fspath(path) if path is not None else tempfile.mkdtemp(prefix="checkpoint_")
        shutil.copytree(self.path, target, dirs_exist_ok=True)
        return target

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        """`with checkpoint.as_directory() as d:` the directory, to read from."""
        yield self.path

    @property
    def filesystem(self) -> NoReturn:
        """Raises UserError: a run has no rank but the node's own."""
        raise _not_local("Checkpoint.filesystem", "a use")

    def get_metadata(self) -> dict[str, Any]:
        """The values that `set_metadata` has stored."""
        try:
            metadata: dict[str, Any] = json.loads(Path(self.path, _METADATA).read_text("utf-8"))
        except FileNotFoundError:
            return {}
        return metadata

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """Store what JSON can hold, in the directory, instead of what is stored there."""
        Path(self.path, _METADATA).write_text(json.dumps(metadata), "utf-8")

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """Store these keys, and keep the others."""
        self.set_metadata(self.get_metadata() | metadata)

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"Checkpoint(path={self.path!r})"


def _not_local(field: str, got: object) -> UserError:
    fix = "keep checkpoints in a directory that all nodes see"
    return UserError.of(field, repr(got)[:80], "a path, without a file system", fix)


def checkpoints(run: Path) -> list[Path]:
    """The complete ones, oldest first."""
    folders = [path for path in run.glob("checkpoint_*") if _NAME.fullmatch(path.name)]
    return sorted(folders, key=number)


def number(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("_")[2])


def newest(run: Path) -> TrainCheckpoint | None:
    """None: there is no complete one."""
    folders = checkpoints(run)
    return TrainCheckpoint(folders[-1]) if folders else None


def facts_file(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.json")


def metrics(run: Path) -> dict[str, Any] | None:
    """The newest that were reported; None: nothing was."""
    try:
        return metrics_of(run / RESULT)
    except FileNotFoundError:
        return None


def metrics_of(file: Path) -> dict[str, Any]:
    """Metrics of one report. Raises FileNotFoundError."""
    document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["metrics"]
    return document


def kept(run: Path) -> list[tuple[TrainCheckpoint, dict[str, Any]]]:
    """The complete checkpoints, oldest first, with the metrics of their reports."""
    folders = checkpoints(run)
    return [(TrainCheckpoint(path), metrics_of(facts_file(path))) for path in folders]


def write_returned(run: Path, value: object) -> None:
    """Write a function's result as source: that keeps tuples, and keys that are not text."""
    text = repr(value)
    try:
        is_plain = ast.literal_eval(text) == value
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        is_plain = False
    facts = {"value": text} if is_plain else {"refused": text[:80]}
    files.replace(run / RETURNED, json.dumps(facts).encode())


def returned(run: Path) -> dict[str, str]:
    """`value`, the source of what the function returned, or `refused`, the begin of what is no
    plain value. Raises FileNotFoundError where no function has returned."""
    document: dict[str, str] = json.loads((run / RETURNED).read_text(encoding="utf-8"))
    return document
