"""The directory of a run of `holdfast.ray.Trainer`, which workers write and the client reads.

`<storage_path>/<name>/` has checkpoints: each is a directory that is renamed to `checkpoint_000000`
when it is complete, and `checkpoint_000000.json` beside it says which report it belongs to;
`result.json` has the newest metrics.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

RESULT = "result.json"
_NAME = re.compile(r"checkpoint_(\d{6,})")


class TrainCheckpoint:
    """A directory with a checkpoint; `holdfast.ray.Checkpoint`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)

    @classmethod
    def from_directory(cls, path: str | os.PathLike[str]) -> Self:
        """Of a local directory, for `report`."""
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

    def __fspath__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"Checkpoint(path={self.path!r})"


def checkpoints(run: Path) -> list[Path]:
    """The complete ones, oldest first."""
    found = [path for path in run.glob("checkpoint_*") if _NAME.fullmatch(path.name)]
    return sorted(found, key=number)


def number(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("_")[2])


def newest(run: Path) -> TrainCheckpoint | None:
    """None: there is no complete one."""
    found = checkpoints(run)
    return TrainCheckpoint(found[-1]) if found else None


def facts_file(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.json")


def metrics(run: Path) -> dict[str, Any] | None:
    """The newest that were reported; None: nothing was."""
    try:
        found: dict[str, Any] = json.loads((run / RESULT).read_text(encoding="utf-8"))["metrics"]
    except FileNotFoundError:
        return None
    return found
