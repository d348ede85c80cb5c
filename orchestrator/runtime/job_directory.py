"""Job directories on this machine: their layout, their lock and their small files.

<home>/jobs/<name>/
  job.json          what was submitted: {job_id, spec_directory, document}
  token             shared secret of the controller, the agents and the CLI, mode 0600
  journal/          see journal/file_store.py
  controller.json   where the controller listens: {pid, address, port, metrics_port}
  lock              held (flock) by the running controller
  nodes.json        the local backend's nodes, see backends/local/node_registry.py
  host.sock         socket of the local backend's node launcher
  logs/             agent-<node>.log, host.log, gen-0001/rank-00000.log
  checkpoints/      the storage tier, if the spec names no other
  earlier-1/        journal and logs of a run that ended before the job was run again
<home>/cache/                       what torch.compile and Triton compiled, of all jobs
<home>/jobs/.<name>.<hex>           a directory that is being created
<home>/jobs/.<name>.<hex>.deleted   files of a deleted job that are still to be removed
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from holdfast.orchestrator import limits
from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_from_mapping, job_to_mapping
from holdfast.orchestrator.errors import Damaged, HoldfastError, Problem, UserError
from holdfast.orchestrator.protocol.files import PRIVATE, replace, sync_directory
from holdfast.orchestrator.runtime.checkpoint_store.options import storage_place

HOME_VARIABLE = "HOLDFAST_HOME"
CACHE = "cache"
EARLIER = "earlier"
DELETED_SUFFIX = ".deleted"
RECORD_FIELDS = frozenset({"job_id", "spec_directory", "document"})
SOCKET_PATH_BYTES = 107
"""Linux limit for the path of a Unix socket: sun_path less the final zero."""


class JobDirectory:
    """The files of one job."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.home = path.parent.parent
        """Home of all jobs of the user."""
        self.home_cache = self.home / CACHE
        """Cache of all jobs of the home directory."""
        self.journal, self.logs = path / "journal", path / "logs"
        self.token_file, self.controller_file = path / "token", path / "controller.json"
        self.nodes_file, self.host_socket = path / "nodes.json", path / "host.sock"

    def rank_log(self, generation: int, rank: int) -> Path:
        return self.logs / f"gen-{generation:04d}" / f"rank-{rank:05d}.log"

    def token(self) -> str:
        return _read(self.token_file).strip()

    def record(self) -> dict[str, Any]:
        """The contents of job.json. Raises Damaged, or HoldfastError when it cannot be read now."""
        record = _read_json(self.path / "job.json")
        if missing := RECORD_FIELDS - record.keys():
            raise Damaged(f"{self.path / 'job.json'}: is damaged (no {min(missing)})")
        return record

    def job(self) -> TrainingJob:
        return job_from_mapping(self.record()["document"], str(self.path / "job.json"))

    @property
    def job_id(self) -> str:
        return str(self.record()["job_id"])

    @property
    def spec_directory(self) -> str:
        return str(self.record()["spec_directory"])

    def checkpoint_path(self, job: TrainingJob) -> str:
        """URL or absolute directory of the storage tier."""
        path = job.spec.checkpoint.path
        if path is None:
            return str(self.path / "checkpoints")
        return storage_place(path, self.spec_directory)

    def controller(self) -> dict[str, Any] | None:
        """The contents of controller.json; None if no controller is running."""
        if not self.controller_alive():
            return None
        try:
            return _read_json(self.controller_file)
        except HoldfastError:
            return None

    def controller_alive(self) -> bool:
        """True if a controller holds the lock."""
        try:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            # Shared: two processes that only check must not mistake each other for a controller.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of this job's controller. Raises UserError when another process holds it
        or the job was deleted."""
        lock = self.path / "lock"
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise UserError(f"job {self.name}: was deleted in the meantime") from None
        except OSError as error:
            raise HoldfastError(f"{lock}: cannot be opened ({error.strerror})") from None
        try:
            if not _lock(fd):
                pid = (self.controller() or {}).get("pid", "unknown")
                raise UserError(
                    f"job {self.name}: a controller is already running (pid {pid}); "
                    f"see `holdfast status {self.name}`"
                )
            if not _is_file(fd, lock):  # a new job may have this name by now
                raise UserError(f"job {self.name}: was deleted in the meantime")
            yield
        finally:
            os.close(fd)

    def write_controller(self, address: str, port: int, metrics_port: int) -> None:
        """Publish where this process listens, for agents and the CLI. Raises HoldfastError."""
        record = {
            "pid": os.getpid(),
            "address": address,
            "port": port,
            "metrics_port": metrics_port,
        }
        try:
            replace(self.controller_file, json.dumps(record).encode() + b"\n", PRIVATE)
        except OSError as error:
            raise HoldfastError(
                f"{self.controller_file}: cannot be written ({error.strerror}); training continues "
                f"without a controller; free disk space, then attach again"
            ) from None

    def remove_controller(self) -> None:
        self.controller_file.unlink(missing_ok=True)

    def set_aside(self) -> Path:
        """Move the journal and logs of an ended job to a directory of their own before the job runs
        again. The caller holds the lock. Raises HoldfastError."""
        number = 1 + sum(1 for _ in self.path.glob(f"{EARLIER}-*"))
        place = self.path / f"{EARLIER}-{number}"
        try:
            place.mkdir()
            # The journal last: without one, the job has not run.
            for path in (self.logs, self.nodes_file, self.journal):
                if path.exists():
                    path.rename(place / path.name)
            self.logs.mkdir()
            sync_directory(self.path)
        except OSError as error:
            text = f"job {self.name}: {place}: cannot be written ({error.strerror})"
            raise HoldfastError(text) from None
        return place

    def remove(self, keep_checkpoints: Path | None = None) -> None:
        """Delete the job, its logs and the checkpoints in its directory, after moving these to
        `keep_checkpoints`, a directory that must not exist. Raises UserError when that is not
        possible, and HoldfastError when files of the deleted job remain."""
        with self.locked():
            if keep_checkpoints is not None:
                self._move_checkpoints(keep_checkpoints)
            # Rename first: the job is deleted even if removing its files is interrupted.
            deleted = self.path.with_name(f".{self.name}.{secrets.token_hex(4)}{DELETED_SUFFIX}")
            try:
                self.path.rename(deleted)
                sync_directory(deleted.parent)
            except OSError as error:
                why = f"cannot be deleted ({error.strerror})"
                raise HoldfastError(f"job {self.name}: {self.path} {why}") from None
            remove_tree(deleted)

    def _move_checkpoints(self, target: Path) -> None:
        """Durable when this returns. Raises UserError."""
        source = self.path / "checkpoints"
        try:
            if target.resolve().is_relative_to(self.path.resolve()):
                raise OSError(errno.EINVAL, "inside the directory to delete")
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                raise OSError(errno.EEXIST, "exists")
            try:
                source.rename(target)
                sync_directory(target.parent)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                copy_tree(source, target)
        except OSError as error:
            raise UserError(
                f"--keep-checkpoints: got {target} ({error.strerror or error}); expected a "
                f"new, writable directory outside of {self.path}"
            ) from None


class NameTaken(UserError):
    """A job of this name exists."""

    def __init__(self, directory: JobDirectory) -> None:
        super().__init__(f"metadata.name: got {directory.name}; expected an unused name")
        self.directory = directory


class Home:
    """The directory that holds all jobs of one user on this machine."""

    def __init__(self, path: Path | str | None = None) -> None:
        chosen = path or os.environ.get(HOME_VARIABLE) or "~/.holdfast"
        try:
            self.path = Path(chosen).expanduser().absolute()
        except RuntimeError:  # no such user, or one without a home
            got = f"{chosen}, whose ~ has no home directory on this machine"
            raise UserError.of(f"${HOME_VARIABLE}", got, "a directory") from None
        self.jobs = self.path / "jobs"
        self.cache = self.path / CACHE

    def directory(self, name: str) -> JobDirectory:
        return JobDirectory(self.jobs / name)

    def create(self, job: TrainingJob, place: str | Path, job_id: str = "") -> JobDirectory:
        """Create a job's directory; `place`: the spec's. Raises UserError when the name is taken or
        the directory cannot be written; then nothing is left behind."""
        directory = self.directory(job.name)
        socket_bytes = len(os.fsencode(directory.host_socket))
        if socket_bytes > SOCKET_PATH_BYTES:
            raise UserError.of(
                "--home",
                f"{self.path} ({socket_bytes} bytes with the job's socket)",
                f"a path short enough that {directory.host_socket} has at most {SOCKET_PATH_BYTES}",
                f"choose a shorter path, or set {HOME_VARIABLE}",
            )
        new = self.jobs / f".{job.name}.{secrets.token_hex(4)}"
        try:
            new.mkdir(parents=True, mode=0o700)
            self._fill(new, job, place, job_id or secrets.token_hex(8))
            # A rename is atomic and fails to replace a directory that is not empty: if two
            # processes create the same job at once, one wins.
            new.rename(directory.path)
            sync_directory(self.jobs)
        except OSError as error:
            shutil.rmtree(new, ignore_errors=True)
            if directory.path.exists():
                raise NameTaken(directory) from None
            raise UserError(str(self._unusable(error, "written"))) from None
        return directory

    def _fill(self, path: Path, job: TrainingJob, place: str | Path, job_id: str) -> None:
        for name in ("logs", "checkpoints"):
            (path / name).mkdir()
        record = {
            "job_id": job_id,
            "spec_directory": str(Path(place).absolute()),
            "document": job_to_mapping(job),
        }
        text = json.dumps(record, indent=2, sort_keys=True, ensure_ascii=False)
        replace(path / "job.json", text.encode() + b"\n", PRIVATE)
        token = secrets.token_hex(limits.TOKEN_BYTES)
        replace(path / "token", token.encode() + b"\n", PRIVATE)
        (path / "lock").touch(mode=0o600)

    def _unusable(self, error: OSError, use: str) -> Problem:
        return Problem(
            "--home",
            f"{self.path} ({error.strerror})",
            f"a directory that can be {use}",
            f"choose another directory, or set {HOME_VARIABLE}",
        )

    def find(self, name: str) -> JobDirectory:
        """The directory of an existing job; it may lack job.json, and can then only be deleted.
        Raises UserError that lists the existing jobs."""
        directory = self.directory(name)
        if re.fullmatch(r"[a-z0-9][-a-z0-9]*", name):
            record = directory.path / "job.json"
            try:
                record.stat()
                return directory
            except (FileNotFoundError, NotADirectoryError):
                if directory.path.is_dir():
                    return directory
            except OSError as error:
                raise HoldfastError(f"{record}: cannot be read ({error.strerror})") from None
        names = [job.name for job in self.list()]
        expected = f"one of {', '.join(names)}" if names else f"a job; {self.path} holds none"
        raise UserError.of("job", name, expected, "see `holdfast status`")

    def list(self) -> list[JobDirectory]:
        """The directories of all jobs, sorted by name; those without job.json are left out."""
        paths = [path for path in self._paths() if not path.name.startswith(".")]
        return [JobDirectory(path) for path in paths if _has_record(path)]

    def sweep(self) -> None:
        """Remove the files of jobs whose deletion was interrupted, as far as possible."""
        for path in self._paths():
            if path.name.startswith(".") and path.name.endswith(DELETED_SUFFIX):
                with suppress(HoldfastError):
                    remove_tree(path)

    def _paths(self) -> Iterable[Path]:
        """Raises UserError when the home cannot be read."""
        try:
            return sorted(self.jobs.iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(str(self._unusable(error, "read"))) from None


def _has_record(path: Path) -> bool:
    try:
        (path / "job.json").stat()
    except OSError:
        return False
    return True


def _is_file(fd: int, path: Path) -> bool:
    """True if the open file is the one at `path` now."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _lock(fd: int) -> bool:
    # A process in controller_alive() holds the lock for microseconds.
    for _ in range(5):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.01)
    return False


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Damaged(f"{path}: is missing") from None
    except OSError as error:
        raise HoldfastError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise Damaged(f"{path}: is damaged ({error})") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise Damaged(f"{path}: is damaged ({error})") from None
    if not isinstance(value, dict):
        raise Damaged(f"{path}: is damaged (not a mapping)")
    return value


def copy_tree(source: Path, target: Path) -> None:
    """Copy to another file system; durable when this returns. The copy gets its name only when it
    is complete, so a kill leaves a `.NAME.HEX.partial`. Raises OSError, also for an existing
    `target`, which is left as it is."""
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    try:
        shutil.copytree(source, partial)
        os.sync()
        if os.path.lexists(target):  # a rename would replace an empty directory
            raise OSError(errno.EEXIST, "exists")
        partial.rename(target)
    except shutil.Error as error:  # holds a list of (from, to, reason)
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(errno.EIO, str(error.args[0][0][2])) from None
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(target.parent)


def remove_tree(path: Path) -> None:
    """Delete a directory that other processes may be deleting too. Raises HoldfastError for files
    that remain."""
    while path.exists():
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            continue  # another process was faster
        except OSError as error:
            raise HoldfastError(f"{path}: cannot be removed ({error.strerror})") from None
