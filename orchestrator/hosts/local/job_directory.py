"""Where jobs live on this machine: one directory per job under the home.

Owns: the layout of a job's directory, its lock and its small files. Must not: know what is in the
journal, or start anything.

    <home>/jobs/<name>/
      job.json          what was submitted: {job_id, spec_directory, document}
      token             secret of the job's agents and of the command line, mode 0600
      journal           see journal.py
      controller.json   where the controller listens: {pid, address, port, metrics_port}
      lock              held (flock) by the controller that lives
      nodes.json        the local backend's nodes, see backends/local/node_registry.py
      host.sock         the machine host of the local backend
      logs/             agent-<node>.log, host.log, gen-0001/rank-00000.log
      checkpoints/      the storage tier, where the spec names no other
    <home>/jobs/.<name>.<hex>           one that is being made
    <home>/jobs/.<name>.<hex>.deleted   what is left of one that is forgotten
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
from holdfast.orchestrator.protocol.atomic_files import PRIVATE, replace, sync_directory
from holdfast.orchestrator.runtime.checkpoint_store.job_environment import storage_place

from . import fs_utils

HOME_VARIABLE = "HOLDFAST_HOME"
DOOMED = ".deleted"
"""Ends the name of a directory whose job is forgotten."""
RECORD_FIELDS = frozenset({"job_id", "spec_directory", "document"})
SOCKET_PATH_BYTES = 107
"""sun_path of a Unix socket, less the final zero: a limit of the kernel."""


class JobDirectory:
    """One job's files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def token_file(self) -> Path:
        return self.path / "token"

    @property
    def controller_file(self) -> Path:
        return self.path / "controller.json"

    @property
    def nodes_file(self) -> Path:
        return self.path / "nodes.json"

    @property
    def host_socket(self) -> Path:
        return self.path / "host.sock"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def rank_log(self, generation: int, rank: int) -> Path:
        return self.logs / f"gen-{generation:04d}" / f"rank-{rank:05d}.log"

    def token(self) -> str:
        return _read(self.token_file).strip()

    def record(self) -> dict[str, Any]:
        """job.json as it stands. Raises Damaged, and HoldfastError when it cannot be read now."""
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
        """controller.json while a controller lives, else None."""
        if not self.controller_alive():
            return None
        try:
            return _read_json(self.controller_file)
        except HoldfastError:
            return None

    def controller_alive(self) -> bool:
        """Whether a process holds the lock."""
        try:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            # Shared: two that only ask must not take each other for a controller.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Be the controller of this job. Raises UserError when there is one already, or no job any
        more."""
        lock = self.path / "lock"
        try:
            fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise UserError(f"job {self.name}: was deleted meanwhile") from None
        except OSError as error:
            raise HoldfastError(f"{lock}: cannot be opened ({error.strerror})") from None
        try:
            if not _lock(fd):
                pid = (self.controller() or {}).get("pid", "unknown")
                raise UserError(
                    f"job {self.name}: got a controller that lives (pid {pid}); expected none; "
                    f"see it with `holdfast status {self.name}`"
                )
            if not _is_file(fd, lock):  # another job may have the name by now
                raise UserError(f"job {self.name}: was deleted meanwhile")
            yield
        finally:
            os.close(fd)

    def write_controller(self, address: str, port: int, metrics_port: int) -> None:
        """Say where this process listens; agents and the command line read it. Raises
        HoldfastError."""
        place = {"pid": os.getpid(), "address": address, "port": port, "metrics_port": metrics_port}
        try:
            replace(self.controller_file, json.dumps(place).encode() + b"\n", PRIVATE)
        except OSError as error:
            raise HoldfastError(
                f"{self.controller_file}: cannot be written ({error.strerror}); training goes on "
                f"without a controller; make room, then attach again"
            ) from None

    def remove_controller(self) -> None:
        self.controller_file.unlink(missing_ok=True)

    def remove(self, keep_checkpoints: Path | None = None) -> None:
        """Forget the job, its logs and the checkpoints in its directory; or move these to a
        directory that does not exist. Raises UserError when that cannot be, and HoldfastError when
        files of a job that is forgotten are left."""
        with self.locked():
            if keep_checkpoints is not None:
                self._keep(keep_checkpoints)
            # First its name: what is interrupted after that has forgotten the job all the same.
            doomed = self.path.with_name(f".{self.name}.{secrets.token_hex(4)}{DOOMED}")
            try:
                self.path.rename(doomed)
                sync_directory(doomed.parent)
            except OSError as error:
                why = f"cannot be deleted ({error.strerror})"
                raise HoldfastError(f"job {self.name}: {self.path} {why}") from None
            fs_utils.clear(doomed)

    def _keep(self, place: Path) -> None:
        """Move the checkpoints; durable when this returns."""
        source = self.path / "checkpoints"
        try:
            if place.resolve().is_relative_to(self.path.resolve()):
                raise OSError(errno.EINVAL, "in the directory that is deleted")
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.exists():
                raise OSError(errno.EEXIST, "exists")
            try:
                source.rename(place)
                sync_directory(place.parent)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                fs_utils.copy(source, place)
        except OSError as error:
            raise UserError(
                f"--keep-checkpoints: got {place} ({error.strerror or error}); expected a "
                f"directory outside of {self.path} that does not exist yet and can be written"
            ) from None


class NameTaken(UserError):
    """A job of this name exists."""

    def __init__(self, directory: JobDirectory) -> None:
        super().__init__(f"metadata.name: got {directory.name}; expected a name that is free")
        self.directory = directory


class Home:
    """All jobs of one person on this machine."""

    def __init__(self, path: Path | str | None = None) -> None:
        chosen = path or os.environ.get(HOME_VARIABLE) or "~/.holdfast"
        try:
            self.path = Path(chosen).expanduser().absolute()
        except RuntimeError:  # no such user, or one without a home
            got = f"{chosen}, and no home is known here for its ~"
            raise UserError(str(Problem(f"${HOME_VARIABLE}", got, "a directory"))) from None
        self.jobs = self.path / "jobs"

    def directory(self, name: str) -> JobDirectory:
        return JobDirectory(self.jobs / name)

    def create(self, job: TrainingJob, spec_directory: str | Path) -> JobDirectory:
        """Make a new job's directory. Raises UserError when the name is taken or it cannot be
        written; then nothing is left behind."""
        directory = self.directory(job.name)
        socket_bytes = len(os.fsencode(directory.host_socket))
        if socket_bytes > SOCKET_PATH_BYTES:
            problem = Problem(
                "--home",
                f"{self.path} ({socket_bytes} bytes with the job's socket)",
                f"a path so short that {directory.host_socket} has at most {SOCKET_PATH_BYTES}",
                f"choose a shorter one, or set {HOME_VARIABLE}",
            )
            raise UserError(str(problem))
        new = self.jobs / f".{job.name}.{secrets.token_hex(4)}"
        try:
            new.mkdir(parents=True, mode=0o700)
            self._fill(new, job, spec_directory)
            # A rename is atomic and refuses a directory that is not empty: of two that create the
            # same job at once, one wins.
            new.rename(directory.path)
            sync_directory(self.jobs)
        except OSError as error:
            shutil.rmtree(new, ignore_errors=True)
            if directory.path.exists():
                raise NameTaken(directory) from None
            raise UserError(str(self._unusable(error, "written"))) from None
        return directory

    def _fill(self, path: Path, job: TrainingJob, spec_directory: str | Path) -> None:
        for name in ("logs", "checkpoints"):
            (path / name).mkdir()
        record = {
            "job_id": secrets.token_hex(8),
            "spec_directory": str(Path(spec_directory).absolute()),
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
            f"choose another, or set {HOME_VARIABLE}",
        )

    def find(self, name: str) -> JobDirectory:
        """An existing job, or what is left of one without job.json, to be deleted. Raises
        UserError, naming the jobs that there are."""
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
        known = f"one of {', '.join(names)}" if names else f"a job; there is none in {self.path}"
        raise UserError(str(Problem("job", name, known, "see `holdfast status`")))

    def list(self) -> list[JobDirectory]:
        """All jobs, by name; but those that somebody else has put here for himself."""
        paths = [path for path in self._paths() if not path.name.startswith(".")]
        return [JobDirectory(path) for path in paths if _has_record(path)]

    def sweep(self) -> None:
        """Finish deletions that were interrupted, as far as that is possible."""
        for path in self._paths():
            if path.name.startswith(".") and path.name.endswith(DOOMED):
                with suppress(HoldfastError):
                    fs_utils.clear(path)

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
    """Whether this open file has that name now."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def _lock(fd: int) -> bool:
    # Somebody who only asks whether a controller lives holds the lock for microseconds.
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
