"""Where jobs live on this machine: one directory per job under the home.

Owns: the layout of a job's directory, its lock and its small files. Must not: know what is in the
journal, or start anything.

    <home>/jobs/<name>/
      job.json          what was submitted: {job_id, spec_directory, document}
      token             secret of the job's agents and of the command line, mode 0600
      journal           see journal.py
      controller.json   where the controller listens: {pid, address, port, metrics_port}
      lock              held (flock) by the controller that lives
      host.sock         the machine host of the local backend
      logs/             agent-<node>.log, host.log, gen-0001/rank-00000.log
      checkpoints/      the storage tier, where the spec names no other
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..protocol import limits
from ..protocol.errors import HoldfastError, Problem, UserError
from ..protocol.spec import TrainingJob, job_from_mapping, job_to_mapping
from .journal import sync_directory
from .surroundings import storage_place

HOME_VARIABLE = "HOLDFAST_HOME"
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
        """job.json as it stands. Raises HoldfastError when it is damaged."""
        return _read_json(self.path / "job.json")

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
        """Be the controller of this job. Raises UserError when there is one already."""
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if not _lock(fd):
                pid = (self.controller() or {}).get("pid", "unknown")
                raise UserError(
                    f"job {self.name}: got a controller that lives (pid {pid}); expected none; "
                    f"see it with `holdfast status {self.name}`"
                )
            yield
        finally:
            os.close(fd)

    def write_controller(self, address: str, port: int, metrics_port: int) -> None:
        """Say where this process listens; agents and the command line read it."""
        place = {"pid": os.getpid(), "address": address, "port": port, "metrics_port": metrics_port}
        write_atomically(self.controller_file, json.dumps(place).encode() + b"\n")

    def remove_controller(self) -> None:
        self.controller_file.unlink(missing_ok=True)

    def remove(self, keep_checkpoints: Path | None = None) -> None:
        """Forget the job, its logs and the checkpoints in its directory; or move these to a
        directory that does not exist. Raises UserError when that cannot be."""
        with self.locked():
            if keep_checkpoints is not None:
                try:
                    keep_checkpoints.parent.mkdir(parents=True, exist_ok=True)
                    if keep_checkpoints.exists():
                        raise FileExistsError(17, "exists")
                    shutil.move(self.path / "checkpoints", keep_checkpoints)
                except OSError as error:
                    raise UserError(
                        f"--keep-checkpoints: got {keep_checkpoints} ({error.strerror or error}); "
                        "expected a directory that does not exist yet and can be written"
                    ) from None
            shutil.rmtree(self.path)


class NameTaken(UserError):
    """A job of this name exists."""

    def __init__(self, directory: JobDirectory) -> None:
        super().__init__(f"metadata.name: got {directory.name}; expected a name that is free")
        self.directory = directory


class Home:
    """All jobs of one person on this machine."""

    def __init__(self, path: Path | str | None = None) -> None:
        chosen = path or os.environ.get(HOME_VARIABLE) or Path.home() / ".holdfast"
        self.path = Path(chosen).expanduser().absolute()
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
            raise UserError(str(self._unwritable(error))) from None
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
        write_atomically(path / "job.json", text.encode() + b"\n")
        token = secrets.token_hex(limits.TOKEN_BYTES)
        write_atomically(path / "token", token.encode() + b"\n")
        (path / "lock").touch(mode=0o600)

    def _unwritable(self, error: OSError) -> Problem:
        return Problem(
            "--home",
            f"{self.path} ({error.strerror})",
            "a directory that can be written",
            f"choose another, or set {HOME_VARIABLE}",
        )

    def find(self, name: str) -> JobDirectory:
        """An existing job. Raises UserError, naming the jobs that there are."""
        directory = self.directory(name)
        valid = re.fullmatch(r"[a-z0-9][-a-z0-9]*", name)
        if valid and (directory.path / "job.json").exists():
            return directory
        names = [job.name for job in self.list()]
        known = f"one of {', '.join(names)}" if names else f"a job; there is none in {self.path}"
        raise UserError(str(Problem("job", name, known, "see `holdfast status`")))

    def list(self) -> list[JobDirectory]:
        """All jobs, by name."""
        if not self.jobs.is_dir():
            return []
        paths = sorted(self.jobs.iterdir())
        found = [p for p in paths if not p.name.startswith(".") and (p / "job.json").exists()]
        return [JobDirectory(path) for path in found]


def _lock(fd: int) -> bool:
    # Somebody who only asks whether a controller lives holds the lock for microseconds.
    for _ in range(5):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.01)
    return False


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file so that a reader sees the old or the new one, mode 0600, durable."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise HoldfastError(f"{path}: cannot be read ({why})") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise HoldfastError(f"{path}: is damaged ({error})") from None
    if not isinstance(value, dict):
        raise HoldfastError(f"{path}: is damaged (not a mapping)")
    return value
