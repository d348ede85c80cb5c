"""Modules that a script imports: those of `spec.preload`, and installed ones, learned from its
workers for the standbys to come.

The learned ones are kept in a file of the machine's cache, for later agents and the next run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path

import msgspec

from holdfast.orchestrator.api.v1alpha1 import TrainingJob

from .user_modules import MAX_NAMES_BYTES


class _Kept(msgspec.Struct):
    """The file."""

    modules: tuple[str, ...]
    left_out: tuple[str, ...] = ()


class LearnedImports:
    """Modules that one job's workers on this node imported."""

    def __init__(self) -> None:
        self.preload: tuple[str, ...] = ()
        self._modules: tuple[str, ...] = ()
        self.left_out: tuple[str, ...] = ()
        """Modules after whose import a process must not fork; `known` reads them."""
        self._file: Path | None = None

    def keep_in(self, cache_directory: str, job: TrainingJob) -> None:
        """Keep them from now on in a file below `cache_directory`, and read from it."""
        if job.spec.learn_preload and job.spec.entrypoint.recipe is None:
            of = job.spec.entrypoint.model_dump_json().encode()
            name = f"{job.name}-{hashlib.sha256(of).hexdigest()[:12]}.json"
            self._file = Path(cache_directory, "imports", name)

    def known(self) -> tuple[str, ...]:
        if not self._modules and self._file is not None:
            # A damaged file is as good as none: what it says saves time only.
            with contextlib.suppress(OSError, ValueError, msgspec.MsgspecError):
                kept = msgspec.json.decode(self._file.read_bytes(), type=_Kept)
                self._modules, self.left_out = kept.modules, kept.left_out
        return self.preload + self._modules

    def learned(self, modules: tuple[str, ...]) -> None:
        """Add modules that a worker had imported when it trained: ranks may differ in them."""
        new = tuple(name for name in modules if name not in set(self.known()))
        if new and sum(map(len, self._modules + new)) <= MAX_NAMES_BYTES:
            self._modules += new
            self._write()

    def leave_out(self, modules: tuple[str, ...]) -> None:
        """A template could not fork after it had imported the first one."""
        self.left_out += tuple(name for name in modules if name not in set(self.left_out))
        self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        with contextlib.suppress(OSError):  # a full disk
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part = self._file.with_suffix(f".{os.getpid()}")
            part.write_bytes(msgspec.json.encode(_Kept(self._modules, self.left_out)))
            part.replace(self._file)
