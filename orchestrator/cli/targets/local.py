"""Jobs of this machine: the controller answers at a socket, everything else is read from files."""

from __future__ import annotations

import functools
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.orchestrator.core.journal import JournalError
from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.errors import Damaged, HoldfastError, Problem, SpecError, UserError
from holdfast.orchestrator.protocol import python_command
from holdfast.orchestrator.protocol.manifest import Manifest
from holdfast.orchestrator.runtime.job_directory import Home, JobDirectory
from holdfast.orchestrator.runtime.observe.view import JobView

from ...protocol.messages import BadFrame, Reply, Request, decode, encode, frame_length
from ..display import Display, watch_job
from ..output import plural, stderr, without_controller
from ..render import after
from ..report import local_command
from .base import Launch, RunResult, RunsEnded, exit_code, first_free
from .remote_job import (
    ControllerGone,
    LogSelector,
    RemoteJob,
    expect_ended,
    extra_s,
    readable,
    view_through,
)
from .supervisor import supervise

if TYPE_CHECKING:
    from holdfast.orchestrator.api.v1alpha1 import TrainingJob

    from ..code_files import Code


PROGRAM = "holdfast.orchestrator.cli.main"
OUTPUT = "command.log"
"""File among a job's logs: what the background process of `holdfast submit` prints."""
GOES_ON = "Ctrl-C: job {0} goes on; `holdfast attach {0}` watches it, `holdfast cancel {0}` ends it"
TAKEN_OVER = "job {0} had no controller: this command is it now; Ctrl-C cancels the job"
START_POLL_S = 0.1
REPLACEMENT_S = 10.0
"""A supervised controller that was killed has a successor by then."""
TIMEOUT_S = 15.0
"""The controller answers from memory: it accepts a resize or a suspend without awaiting it."""


class LocalTransport:
    """The socket of the controller on this machine, and the files of the job's directory."""

    def __init__(self, directory: JobDirectory, follow_interval_s: float = 0.2) -> None:
        self._directory = directory
        self._follow_interval_s = follow_interval_s
        self._damaged = False
        """Names of jobs with damaged files, whose state is unknown."""

    @property
    def name(self) -> str:
        return self._directory.name

    @property
    def job(self) -> TrainingJob:
        return self._directory.job()

    def command(self, *words: str) -> str:
        return local_command(*words)

    def perform(self, verb: str, arguments: dict[str, Any]) -> Reply:
        """One connection, one request, one reply."""
        controller = self._directory.controller()
        if controller is None:
            raise self.gone("none is running")
        request = Request(token=self._directory.token(), verb=verb, arguments=arguments)
        address = (str(controller["address"]), int(controller["port"]))
        try:
            with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
                connection.settimeout(TIMEOUT_S + extra_s(verb, arguments))
                connection.sendall(encode(request))
                with connection.makefile("rb") as stream:  # its read() returns less only at the end
                    reply = decode(stream.read(frame_length(stream.read(4))))
        except (OSError, BadFrame) as error:
            raise self.gone(str(error) or type(error).__name__) from None
        if not isinstance(reply, Reply):
            raise self.gone(f"unexpected answer: {type(reply).__name__}")
        return reply

    def gone(self, why: str) -> ControllerGone:
        return ControllerGone(
            f"job {self.name}: no controller answers ({why}). Any agents of it train on for "
            f"15 minutes; take the job over with `holdfast attach {self.name}`; Ctrl-C cancels it"
        )

    def recorded(self) -> JobView:
        from holdfast.orchestrator.hosts.local import job_records

        view = job_records.read_view(self._directory)
        view.controller_alive = False
        return view

    def has_ended(self) -> bool:
        """A controller may have been killed before it released the nodes."""
        from holdfast.orchestrator.backends.local import node_registry

        if node_registry.living(self._directory.nodes_file):
            return False
        return self.recorded().state in TERMINAL

    def remark(self, view: JobView) -> str:
        from holdfast.orchestrator.backends.local import node_registry

        attach = f"`holdfast attach {view.name}`"
        try:
            living = node_registry.living(self._directory.nodes_file)
        except HoldfastError as error:
            return f"No controller is running; this view comes from the journal. {error}."
        if living:
            how_long = without_controller(self.job)
            return (
                "No controller is running; this view comes from the journal. The agents train "
                f"without one {how_long}: take the job over with {attach}."
            )
        return (
            "No controller is running and no node of the job is left, as after a restart of the "
            "machine; this view comes from the journal. Continue from the last checkpoint in "
            f"storage with {attach}."
        )

    def check_code(self) -> bool:
        """Raises UserError for a job without code of the user, and for code that cannot start: the
        job continues with the old one."""
        from holdfast.orchestrator.protocol import files

        from .. import entrypoint_checks

        job = self.job
        if job.spec.entrypoint.recipe is not None:
            got = f"job {self.name}, which runs a recipe"
            raise UserError.of("job", got, "one that runs code of yours")
        work = files.resolve(Path(self._directory.spec_directory), job.spec.working_directory)
        if problems := list(entrypoint_checks.problems(job, work)):
            raise SpecError(problems)
        return False

    def upload(self, code: Code) -> None:
        raise AssertionError("the nodes read the files where they are")

    def delete_code_except(self, *names: str) -> None:
        raise AssertionError("there is none")

    def print_events(self, *, follow: bool, as_json: bool) -> None:
        from holdfast.orchestrator.journal.file_store import FileStore

        from ..event_format import print_journal

        store = FileStore(self._directory.journal)
        pause = functools.partial(time.sleep, self._follow_interval_s) if follow else None
        print_journal(store, lambda: not self._directory.controller_alive(), pause, as_json=as_json)

    def print_logs(self, wanted: LogSelector, *, follow: bool) -> None:
        from ..log_files import follow_files, print_files

        if follow:
            follow_files(self._directory, *wanted, self._follow_interval_s)
        else:
            print_files(self._directory, *wanted)

    @contextmanager
    def storage(self) -> Iterator[str]:
        from holdfast.orchestrator.runtime.checkpoint_store.options import job_environment

        job = self._directory.job()
        with job_environment(job):
            yield self._directory.checkpoint_path(job)

    def manifests(self) -> tuple[str, list[Manifest]]:
        from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore

        with self.storage() as path:
            return path, CheckpointStore(path, self.name).manifests()

    def describe_deletion(self, keep: Path | None) -> str:
        try:
            self._check_keep(keep)
            view = view_through(self)
        except Damaged as error:
            return self._deleting_damaged(keep, error)
        except (SpecError, JournalError) as error:
            text = (
                f"{error}\njob {self.name}: whether it has ended is not known; delete it with the "
                f"Holdfast that wrote it, or remove {self._directory.path} once none of its "
                f"processes runs"
            )
            raise (UserError if error.exit_code == 2 else HoldfastError)(text) from None
        expect_ended(view, f"`{self.command('cancel', self.name)}`")
        return self._deleted_files(keep)

    def _check_keep(self, keep: Path | None) -> None:
        path = self._directory.job().spec.checkpoint.path
        if keep is not None and path is not None:
            raise UserError(
                f"--keep-checkpoints: got a directory; expected none for job {self.name}, whose "
                f"checkpoints stay in {path} (spec.checkpoint.path)"
            )

    def _deleting_damaged(self, keep: Path | None, error: Damaged) -> str:
        """Delete a job whose state is unknown and of which no process runs."""
        from holdfast.orchestrator.backends.local import node_registry

        living = node_registry.living(self._directory.nodes_file)
        if self._directory.controller_alive() or living:
            raise error
        self._damaged = True
        files = self._deleted_files(keep)
        return f"{files}, of a job that may still run: its state is unknown ({error})"

    def _deleted_files(self, keep: Path | None) -> str:
        what = "logs" if keep is not None else "logs and checkpoints"
        return f"{self._directory.path} with its {what}"

    def delete(self, keep: Path | None) -> list[str]:
        kept = keep.absolute() if keep is not None else None
        self._directory.remove(kept)
        remarks = []
        if self._damaged:
            remarks.append("its files were damaged, so the job may still run")
        if kept is not None:
            remarks.append(f"to continue from its checkpoints, set spec.checkpoint.path: {kept}")
        return remarks


class LocalTarget(RunsEnded):
    def __init__(self, home: Path | None) -> None:
        self.home = self._home = Home(home)

    def find(self, name: str) -> RemoteJob:
        return RemoteJob(LocalTransport(self._home.find(name)))

    def views(self) -> list[JobView]:
        return readable((directory.name for directory in self._home.list()), self.find)

    def empty_message(self) -> str:
        return f"no jobs in {self._home.path}; start one with `holdfast run FILE`"

    def command(self, *words: str) -> str:
        return local_command(*words)

    def free_name(self, wanted: str) -> str:
        used = {directory.name for directory in self._home.list()}
        return first_free(wanted, used)

    def run(self, launch: Launch, display: Display) -> RunResult:
        from holdfast.orchestrator.api.v1alpha1 import load_job

        job_id = secrets.token_hex(8)
        # Nothing else before the fork: libraries of storage start threads, which it would lose.
        if supervise("controller"):
            directory = self._home.directory(load_job(launch.file).name)
            with suppress(HoldfastError):  # the killed one has not created the job
                if directory.job_id == job_id:
                    return self._controlled(directory, display)
        directory, notes = self._create(launch, job_id)
        return self._controlled(directory, display, notes, is_new=True)

    def submit(self, launch: Launch, display: Display) -> dict[str, str]:
        """`holdfast attach` in the background is the job's controller."""
        directory, notes = self._create(launch)
        for note in notes:
            display.note(note)
        output = directory.logs / OUTPUT
        output.parent.mkdir(exist_ok=True)
        with output.open("wb") as stream:
            child = subprocess.Popen(
                [*python_command.start(PROGRAM), "attach", directory.name, "--json",
                 "--home", str(self._home.path)],
                stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        transport = LocalTransport(directory)
        try:
            while directory.controller() is None and child.poll() is None:
                time.sleep(START_POLL_S)
        except KeyboardInterrupt:
            display.note(GOES_ON.format(directory.name))
            raise
        if child.poll() is not None:
            error = HoldfastError.of_command(child.returncode, output.read_text(errors="replace"))
            if not directory.journal.exists():
                directory.remove()
                raise error
            if transport.recorded().state not in TERMINAL:
                raise transport.gone(str(error))
        return {"job": directory.name}

    def attach(self, name: str, display: Display) -> RunResult:
        directory = self._home.find(name)
        transport = LocalTransport(directory)
        if view_through(transport).controller_alive:
            with display, _lines(directory.job(), directory, display):
                return _watched(name, transport, display)
        notes = [TAKEN_OVER.format(name)] * directory.journal.exists()
        supervise("controller")
        return self._controlled(directory, display, notes)

    def _create(self, launch: Launch, job_id: str = "") -> tuple[JobDirectory, list[str]]:
        from holdfast.orchestrator.hosts.local.job_records import create_job

        job, notes = self._load(launch.file, launch.directory)
        directory = create_job(self._home, job, launch.directory, job_id)
        launch.show()
        return directory, notes

    def _controlled(
        self,
        directory: JobDirectory,
        display: Display,
        notes: Sequence[str] = (),
        *,
        is_new: bool = False,
    ) -> RunResult:
        """Be the controller of a job until it ends, in a supervised process: a killed one is
        replaced, and the next one takes the job over."""
        transport = LocalTransport(directory)
        view = view_through(transport)
        if view.state in TERMINAL and transport.has_ended():
            return RunResult(view, exit_code(view))
        _check_packages(directory.job())
        from holdfast.orchestrator.hosts.local.service import run_job

        with display, _lines(directory.job(), directory, display):
            with suppress(OSError):  # of `| head`: the job trains
                for note in notes:
                    display.note(note)
            done = run_job(directory, display.show, display.note, is_new=is_new)
        return RunResult(done.view, 130 if done.interrupted else exit_code(done.view))

    def run_ended(self, name: str, display: Display) -> RunResult:
        directory = self._home.find(name)
        transport = LocalTransport(directory)
        transport.check_code()
        _check_packages(directory.job())
        view = view_through(transport)
        begin = "the beginning: it has no checkpoint"
        if view.checkpoints:
            begin = f"its checkpoint {after(view.checkpoints[-1])}"
        with directory.locked():
            place = directory.set_aside()
        note = (
            f"job {name} ({view.state}) runs again with the current code, from {begin}; its old "
            f"journal and logs are in {place}"
        )
        return self._controlled(directory, display, [] if supervise("controller") else [note])

    def _load(self, file: Path, directory: Path) -> tuple[TrainingJob, list[str]]:
        """The job in a file with its number of GPUs, after expired jobs made room for it; and notes
        for the user. Raises UserError."""
        from holdfast.orchestrator.api.v1alpha1.remarks import remarks
        from holdfast.orchestrator.backends.devices import found_here
        from holdfast.orchestrator.hosts.local.job_records import expire
        from holdfast.orchestrator.planner.gpus import resolve
        from holdfast.orchestrator.runtime.clock import Clock

        from ..job_checks import load_checked

        job = load_checked(file, directory)
        _check_packages(job)
        job, why = resolve(job, found_here(job))
        _check_size(job)
        _check_memory(job)
        for name in expire(self._home, Clock().now_ns()):
            stderr().print(f"job {name}: deleted, its ttlSecondsAfterFinished is over")
        return job, [*filter(None, [why]), *remarks(job)]


def attended_view(transport: LocalTransport) -> JobView:
    """The view of a job that has ended, or has a controller: a killed one is replaced soon. Raises
    HoldfastError where it is not."""
    give_up = time.monotonic() + REPLACEMENT_S
    while True:
        view = view_through(transport)
        if view.controller_alive or view.state in TERMINAL:
            return view
        if time.monotonic() > give_up:
            raise transport.gone("it has ended")
        time.sleep(START_POLL_S)


def _watched(name: str, transport: LocalTransport, display: Display) -> RunResult:
    """Show a job whose controller another process is."""
    try:
        view = watch_job(lambda: attended_view(transport), display)
    except KeyboardInterrupt:
        display.note(GOES_ON.format(name))
        return RunResult(None, 130)
    return RunResult(view, exit_code(view))


def _lines(
    job: TrainingJob, directory: JobDirectory, display: Display
) -> AbstractContextManager[object]:
    """Shows what rank 0 prints inside of the context, if it is wanted."""
    from ..rank_lines import RankLines

    wanted = display.wants_lines
    if wanted is None:
        wanted = job.spec.entrypoint.recipe is None
    return RankLines(directory, display.line) if wanted else nullcontext()


def _check_packages(job: TrainingJob) -> None:
    """Raises UserError where this Python cannot run the job's nodes."""
    from holdfast.orchestrator.protocol import training_packages

    if missing := training_packages.problem(*job.spec.entrypoint.packages):
        raise UserError(missing)


def _check_memory(job: TrainingJob) -> None:
    """Raises SpecError for a recipe that certainly runs out of this machine's GPU memory."""
    from holdfast.orchestrator.planner.choose import memory_on
    from holdfast.orchestrator.planner.refusal import refused_as_wanted

    from ..job_checks import local_facts

    if problem := refused_as_wanted(job, memory_on(job, [local_facts(job.spec.workers_per_node)])):
        raise SpecError([problem])


def _check_size(job: TrainingJob) -> None:
    """Raises SpecError for more nodes than this machine can run."""
    from holdfast.orchestrator.backends.devices import gpu_names
    from holdfast.orchestrator.backends.local import node_limit

    nodes, limit = job.spec.nodes, node_limit(job)
    wanted = nodes.max + nodes.spares
    if wanted > limit:
        workers, gpus = job.spec.workers_per_node, gpu_names(job)
        if gpus == ():
            expected = "0 on this machine, which has no usable GPU"
            fix = "see nvidia-smi and CUDA_VISIBLE_DEVICES"
            gpu = str(job.spec.resources.gpu)
            raise SpecError([Problem("spec.resources.gpu", gpu, expected, fix)])
        expected = f"at most {limit} nodes of {workers} workers, including spares, on this machine"
        if gpus is not None:
            expected += f", which has {plural(len(gpus), 'usable GPU')}"
        raise SpecError([Problem("spec.nodes.max", f"{wanted} including spares", expected)])
