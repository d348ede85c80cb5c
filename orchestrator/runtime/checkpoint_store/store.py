"""Commits, lists and deletes the checkpoints of one job on its storage tier.

A manifest is written last and deleted first, so that a checkpoint with a manifest is complete. All
calls block; async_store.py makes them in threads.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
import msgspec
from fsspec.implementations.local import LocalFileSystem

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.api.v1alpha1.resilience import Retention
from holdfast.orchestrator.core.actions import Retained
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.protocol import coverage
from holdfast.orchestrator.protocol.facts import CoverageSum, ShardFile, steps_done
from holdfast.orchestrator.protocol.manifest import (
    MANIFEST_NAME,
    NOTE_SUFFIX,
    Manifest,
    ShardNote,
    decode_manifest,
    decode_note,
    directory_name,
    encode_manifest,
    expect_files,
    parse_directory_name,
)
from holdfast.orchestrator.protocol.mesh import Mesh

from ...protocol.files import is_local, make_directory, read_small, replace, sync_directory
from .beneath import FilesBeneath
from .options import CHECKPOINT_FIELD, answer_of, missing_driver, options_of_one_job
from .shard_headers import BadHeader, gaps, read_boxes


class CommitRefused(HoldfastError):
    """The files in the store differ from what the agents reported."""


class NotCovered(CommitRefused):
    """The shards do not hold every value of every tensor, so the checkpoint cannot be restored.
    Another attempt does not change that."""


class CheckpointStore:
    """One job's checkpoint path: a local directory or any URL that fsspec knows."""

    def __init__(
        self,
        path: str,
        job_name: str,
        options: Mapping[str, Any] | None = None,
        *,
        beneath: str = "",
    ) -> None:
        """`options`: of the URL's fsspec driver (options.py). `beneath`: a directory that others
        write to, which has `path` below it; no link in it is followed. Raises UserError for a URL
        whose scheme is unknown or whose driver is not installed, HoldfastError where the driver
        connects at once and cannot."""
        self.path = path
        self._job_name = job_name
        self.fs: Any
        try:
            self.fs, self.root = fsspec.core.url_to_fs(path, **(options or {}))
        except ImportError as error:
            raise UserError(str(missing_driver(path, error))) from None
        except ValueError as error:
            expected = "a directory or a URL that fsspec knows"
            raise UserError.of(CHECKPOINT_FIELD, f"{path} ({error})", expected) from None
        except Exception as error:  # as in prepare
            raise HoldfastError(f"{path}: cannot be opened ({_why(error)})") from None
        self._local = isinstance(self.fs, LocalFileSystem) and not beneath
        if beneath:
            self.fs = FilesBeneath(beneath)
        self._gaps: dict[tuple[CoverageSum | None, ...], str] = {}
        """Sums that prove nothing -> what the headers showed; one reading per layout."""

    def prepare(self) -> None:
        """Create the directory and prove that it can be written. Raises UserError."""
        probe = f"{self.root}/.holdfast-{uuid.uuid4().hex}"
        try:
            make_directory(self.fs, self.root)
            self.fs.pipe_file(probe, b"")
            self.fs.rm_file(probe)
        # fsspec drivers raise what their libraries raise; here every exception means the same.
        except Exception as error:
            raise UserError.of(
                CHECKPOINT_FIELD,
                f"{self.path} ({_why(error)})",
                "a directory or URL that can be written",
                "choose another, or fix its permissions",
            ) from None

    def commit(self, step: int, mesh: Mesh, files: tuple[ShardFile, ...]) -> int:
        """Write the manifest of a complete set of files, atomically; returns their bytes.

        Raises CommitRefused when a file is missing or has another size than was reported,
        NotCovered when the files do not hold every value of every tensor.
        """
        generation = files[0].generation if files else 0
        try:
            expect_files(files, mesh, step, generation)
        except ValueError as error:
            raise CommitRefused(f"after {steps_done(step)}: {error}") from None
        directory = f"{self.root}/{directory_name(step, generation)}"
        self.fs.invalidate_cache(directory)
        for file in files:
            self._check(directory, file)
        self._check_coverage(directory, mesh, files)
        manifest = Manifest(
            job=self._job_name,
            step=step,
            generation=generation,
            mesh=mesh,
            files=tuple(sorted(files, key=lambda file: file.shard)),
            committed_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )
        self._put(f"{directory}/{MANIFEST_NAME}", encode_manifest(manifest))
        return manifest.num_bytes

    def _check(self, directory: str, file: ShardFile) -> None:
        path = f"{directory}/{file.file}"
        try:
            size = self.fs.info(path)["size"]
        except FileNotFoundError:
            text = f"{path}: missing here, although its node has reported it as written"
            if is_local(self.fs):
                text += "; a directory must be one volume that all nodes and the controller share"
            raise CommitRefused(text) from None
        if size != file.num_bytes:
            raise CommitRefused(f"{path}: got {size} bytes; expected {file.num_bytes}")

    def _check_coverage(self, directory: str, mesh: Mesh, files: tuple[ShardFile, ...]) -> None:
        ordered = sorted(files, key=lambda file: file.shard)
        sums = tuple(file.coverage for file in ordered)
        if coverage.proved(ordered, mesh):
            return
        if sums not in self._gaps:
            try:
                boxes = [read_boxes(self.fs, f"{directory}/{file.file}") for file in ordered]
                self._gaps = {sums: gaps(boxes, mesh)}
            except BadHeader as error:
                raise CommitRefused(f"after {steps_done(files[0].step)}: {error}") from None
        if self._gaps[sums]:
            raise NotCovered(f"after {steps_done(files[0].step)}: {self._gaps[sums]}")

    def _put(self, path: str, data: bytes) -> None:
        if not self._local:
            self.fs.pipe_file(path, data)  # object stores write an object completely or not at all
            return
        replace(Path(path), data)

    def clean(self, retained: Retained) -> list[str]:
        """Delete the job's checkpoints that are not retained, committed or not; returns their
        names. One listing of the directories, and a few requests for each that is deleted. Raises
        what the driver raised last, after it has tried all."""
        self.fs.invalidate_cache()
        deleted, keep, failed = [], dict.fromkeys(retained.keep), None
        for path in sorted(self._directories()):
            at = parse_directory_name(_name(path))
            if at is None or at in keep or at[1] > retained.generation or at > retained.abandoned:
                continue
            try:
                if at > retained.newest and self.fs.exists(f"{path}/{MANIFEST_NAME}"):
                    continue
                manifest = self._manifest(path)
                if manifest is None or manifest.job == self._job_name:
                    self.delete(*at)
                    deleted.append(_name(path))
            except Exception as error:  # as in prepare
                failed = error
        if failed is not None:
            raise failed
        return deleted

    def delete(self, step: int, generation: int) -> None:
        """Delete a checkpoint, its manifest first, so that no manifest names deleted files."""
        directory = f"{self.root}/{directory_name(step, generation)}"
        self.fs.invalidate_cache()
        manifest = f"{directory}/{MANIFEST_NAME}"
        if self.fs.exists(manifest):
            self.fs.rm_file(manifest)
            if self._local:
                sync_directory(Path(directory))
        if self.fs.exists(directory):
            self.fs.rm(directory, recursive=True)

    def adopt(self, manifests: Iterable[Manifest]) -> None:
        """Rewrite the manifests of committed checkpoints for this job. It may be repeated after an
        interruption. Raises HoldfastError when the store cannot be written."""
        for m in manifests:
            ours = msgspec.structs.replace(m, job=self._job_name)
            try:
                self._put(f"{self.root}/{m.directory}/{MANIFEST_NAME}", encode_manifest(ours))
            except Exception as error:  # as in prepare
                raise HoldfastError(f"{self.path}: cannot be written ({_why(error)})") from None

    def manifests(self) -> list[Manifest]:
        """Committed checkpoints, oldest step first, without those whose manifest is damaged.

        Raises HoldfastError when the store does not answer.
        """
        self.fs.invalidate_cache()
        with self._reading():
            read = [self._manifest(path) for path in self._directories()]
        manifests = [manifest for manifest in read if manifest is not None]
        return sorted(manifests, key=lambda m: (m.step, m.generation))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # as in prepare
            raise HoldfastError(f"{self.path}: cannot be read ({_why(error)})") from None

    def adopt_written(self, generation: int, retention: Retention) -> list[Manifest]:
        """Commit the steps of this generation whose shards all have a note and that have no
        manifest: agents wrote them without a controller. Newest first, and only those that
        `retention` keeps, or a takeover would take longer the longer there was no controller.
        Raises HoldfastError when the store does not answer."""
        self.fs.invalidate_cache()
        with self._reading():
            return self._adopt_written(generation, retention)

    def _adopt_written(self, generation: int, retention: Retention) -> list[Manifest]:
        taken: list[Manifest] = []
        nth = retention.keep_every_steps
        parsed = ((parse_directory_name(_name(path)), path) for path in self._directories())
        written = [(at[0], path) for at, path in parsed if at is not None and at[1] == generation]
        for step, path in sorted(written, reverse=True):
            if len(taken) >= retention.keep_last and (nth is None or (step + 1) % nth):
                continue
            if not self.fs.exists(f"{path}/{MANIFEST_NAME}"):
                taken += self._commit_written(step, path, self._notes(path))
        return taken[::-1]

    def _commit_written(self, step: int, path: str, notes: list[ShardNote]) -> list[Manifest]:
        meshes = [note.mesh for note in notes]
        if not meshes or any(mesh != meshes[0] for mesh in meshes):
            return []
        try:
            self.commit(step, meshes[0], tuple(note.file for note in notes))
        except CommitRefused:
            return []  # not all shards
        manifest = self._manifest(path)
        return [manifest] if manifest is not None else []

    def damaged(self) -> list[str]:
        """Names of directories whose manifest is there and damaged. Raises HoldfastError when the
        store does not answer."""
        with self._reading():
            return [_name(path) for path in self._directories() if self._is_damaged(path)]

    def _is_damaged(self, directory: str) -> bool:
        exists = self.fs.isfile(f"{directory}/{MANIFEST_NAME}")
        return exists and self._manifest(directory) is None

    def _notes(self, directory: str) -> list[ShardNote]:
        notes = []
        for path in self.fs.ls(directory, detail=False):
            if path.endswith(NOTE_SUFFIX):
                try:
                    notes.append(decode_note(self._read(path)))
                except ValueError:
                    continue  # torn
        return notes

    def _directories(self) -> list[str]:
        try:
            paths = self.fs.ls(self.root, detail=False)
        except FileNotFoundError:
            return []
        return [path.rstrip("/") for path in paths if parse_directory_name(_name(path)) is not None]

    def _manifest(self, directory: str) -> Manifest | None:
        try:
            return decode_manifest(self._read(f"{directory}/{MANIFEST_NAME}"), _name(directory))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
            return None  # not committed, not a checkpoint at all, or damaged

    def _read(self, path: str) -> bytes:
        """A manifest or note. Raises ValueError for a file that is too large to be one."""
        return read_small(self.fs, path, limits.MAX_MANIFEST_BYTES)


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


NO_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError")
"""Names of botocore's errors, which is installed for S3 only."""


def _why(error: Exception) -> str:
    text = answer_of(error) or getattr(error, "strerror", None) or str(error)
    if type(error).__name__ in NO_CREDENTIALS:
        text += "; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
    return text or type(error).__name__


def storage_of(job: TrainingJob, path: str, key: str, beneath: str = "") -> CheckpointStore:
    """The storage tier of one of many jobs in this process. `path` has its checkpoints, `key` is
    the job's name in manifests; `beneath` as CheckpointStore has it. Raises as options_of_one_job
    and CheckpointStore."""
    return CheckpointStore(path, key, options_of_one_job(job, path), beneath=beneath)
