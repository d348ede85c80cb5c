"""Local jobs: requests go to the controller over a socket, everything else is read from files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.errors import Damaged, HoldfastError, Problem, SpecError, UserError
from holdfast.orchestrator.hosts.local.job_directory import Home, JobDirectory
from holdfast.orchestrator.protocol.manifest import Manifest
from holdfast.orchestrator.runtime.observe.view import JobView

from ..display import Display
from ..output import plural, stderr, without_controller
from ..report import local_command
from .base import LogSelector, Response, RunResult, exit_code, expect_not_ended, first_free

if TYPE_CHECKING:
    from holdfast.orchestrator.api.v1alpha1 import TrainingJob
    from holdfast.orchestrator.hosts.local.service import FinishedRun


class LocalJob:
    def __init__(self, directory: JobDirectory, follow_interval_s: float = 0.2) -> None:
        self._directory = directory
        self._follow_interval_s = follow_interval_s
        self._damaged = False
        """Its files are damaged, so its state is unknown."""

    @property
    def name(self) -> str:
        return self._directory.name

    def view(self) -> JobView:
        return read_view(self._directory)

    def remarks(self, view: JobView) -> list[str]:
        if view.controller_alive or view.state in TERMINAL:
            return []
        from holdfast.orchestrator.backends.local import node_registry

        attach = f"`holdfast run --attach {view.name}`"
        try:
            living = node_registry.living(self._directory.nodes_file)
        except HoldfastError as error:
            return [f"No controller is running; this view comes from the journal. {error}."]
        if living:
            how_long = without_controller(self._directory.job())
            return [
                "No controller is running; this view comes from the journal. The agents train "
                f"without one {how_long}: take the job over with {attach}."
            ]
        return [
            "No controller is running and no node of the job is left, as after a restart of the "
            "machine; this view comes from the journal. Continue from the last checkpoint in "
            f"storage with {attach}."
        ]

    def request(self, verb: str, **arguments: Any) -> Response:
        from ..client import ControllerGone, ask

        try:
            reply = ask(self._directory, verb, **arguments)
        except ControllerGone:
            view = self.view()
            if has_ended(self._directory, view):
                expect_not_ended(view, verb)
            raise
        return Response(reply.detail, reply.body)

    def again(self, directory: Path | None) -> Response:
        if directory is not None:
            expected = "nothing: a job of this machine reads its files where they are"
            raise UserError(str(Problem("FILE", str(directory), expected)))
        self.check_code()
        return self.request("again")

    def check_code(self) -> None:
        """Raises UserError for a job without code of the user, and for code that cannot start."""
        job = self._directory.job()
        if job.spec.entrypoint.recipe is not None:
            got = f"job {self.name}, which runs a recipe"
            raise UserError(str(Problem("--again", got, "one that runs code of yours")))
        check_code(job, Path(self._directory.spec_directory))

    def print_events(self, *, follow: bool, as_json: bool) -> None:
        from holdfast.orchestrator.hosts.local.file_journal import JournalReader, Snapshot

        from ..event_format import EventFormatter
        from ..output import stdout

        reader = JournalReader(self._directory.journal, history=True)
        console, formatter, now_ns = stdout(), EventFormatter(), 0
        while True:
            # Before reading, so that the last records of a controller that ends now are read.
            alive = self._directory.controller_alive()
            for item in reader.read():
                if isinstance(item, Snapshot):
                    formatter.print_snapshot(console, item, as_json=as_json)
                else:
                    formatter.print_record(console, item.now_ns, item.event, as_json=as_json)
                    now_ns = item.now_ns
            if not follow or not alive:
                formatter.end(console, now_ns, as_json=as_json)
                return
            time.sleep(self._follow_interval_s)

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
            state: str = self.view().state
        except Damaged as error:
            return self._deleting_damaged(keep, error)
        except SpecError as error:
            raise UserError(
                f"{error}\njob {self.name}: this version cannot read the job spec, so it does not "
                f"know whether the job has ended; delete it with the Holdfast that wrote it, or "
                f"remove {self._directory.path} once none of its processes runs"
            ) from None
        if state not in TERMINAL:
            raise UserError(
                f"job {self.name}: is {state}; only a job that is {', '.join(TERMINAL[:-1])} or "
                f"{TERMINAL[-1]} can be deleted; end it with `holdfast cancel {self.name}`"
            )
        return self._deleted_files(keep)

    def _check_keep(self, keep: Path | None) -> None:
        path = self._directory.job().spec.checkpoint.path
        if keep is not None and path is not None:
            raise UserError(
                f"--keep-checkpoints: got a directory; expected none for job {self.name}, whose "
                f"checkpoints stay in {path} (spec.checkpoint.path)"
            )

    def _deleting_damaged(self, keep: Path | None, error: Damaged) -> str:
        """For a job whose state is unknown, but of which no process runs."""
        from holdfast.orchestrator.backends.local import node_registry

        living = node_registry.living(self._directory.nodes_file)
        if self._directory.controller_alive() or living:
            raise error
        self._damaged = True
        files = self._deleted_files(keep)
        return f"{files}, of a job that may not have ended: its state is unknown ({error})"

    def _deleted_files(self, keep: Path | None) -> str:
        what = "logs" if keep is not None else "logs and checkpoints"
        return f"{self._directory.path} with its {what}"

    def delete(self, keep: Path | None) -> list[str]:
        kept = keep.absolute() if keep is not None else None
        self._directory.remove(kept)
        remarks = []
        if self._damaged:
            remarks.append("its files were damaged, so it is unknown whether it had ended")
        if kept is not None:
            remarks.append(f"to continue from its checkpoints, set spec.checkpoint.path: {kept}")
        return remarks


class LocalTarget:
    def __init__(self, home: Path | None) -> None:
        self._home = Home(home)

    def find(self, name: str) -> LocalJob:
        return LocalJob(self._home.find(name))

    def views(self) -> list[JobView]:
        found = []
        for directory in self._home.list():
            try:
                found.append(read_view(directory))
            except HoldfastError as error:
                stderr().print(f"{directory.name}: {error}", markup=False, soft_wrap=True)
        return found

    def empty_message(self) -> str:
        return f"no jobs in {self._home.path}; start one with `holdfast run FILE`"

    def command(self, *words: str) -> str:
        return local_command(*words)

    def can_read(self, path: str) -> bool:
        return True

    def guard(self) -> AbstractContextManager[None]:
        return nullcontext()

    def free_name(self, wanted: str) -> str:
        used = {directory.name for directory in self._home.list()}
        return first_free(wanted, used)

    def run(
        self,
        file: Path | None,
        attach: str | None,
        display: Display,
        directory: Path | None = None,
    ) -> RunResult:
        from holdfast.orchestrator.hosts.local.service import attach_job, run_job

        if attach is not None:
            found = self._home.find(attach)
            if has_ended(found, view := read_view(found)):
                return RunResult(view, exit_code(view))
            with display, _lines(found.job(), found, display):
                done = attach_job(found, display.show, display.note)
        else:
            assert file is not None
            job, notes = self._load(file, directory)
            with display, _lines(job, self._home.directory(job.name), display):
                for note in notes:
                    display.note(note)
                home = directory or file.absolute().parent
                done = run_job(job, self._home, home, display.show, display.note)
        return _result(done)

    def run_ended(self, name: str, display: Display) -> RunResult:
        from holdfast.orchestrator.hosts.local.service import attach_job

        directory = self._home.find(name)
        found, job = LocalJob(directory), directory.job()
        found.check_code()
        view = found.view()
        begin = "the beginning: it has no checkpoint"
        if view.checkpoints:
            begin = f"its checkpoint of step {view.checkpoints[-1].step}"
        with directory.locked():
            place = directory.set_aside()
        with display, _lines(job, directory, display):
            display.note(
                f"job {name}: {view.state} before; it runs again with the code as it is now, from "
                f"{begin}; journal and logs of before are in {place}"
            )
            return _result(attach_job(directory, display.show, display.note))

    def _load(self, file: Path, directory: Path | None) -> tuple[TrainingJob, list[str]]:
        """The job in a file with its number of GPUs, after expired jobs made room for it; and notes
        for the user. Raises UserError."""
        from holdfast.orchestrator.api.v1alpha1.remarks import remarks
        from holdfast.orchestrator.backends.local.devices import found_here
        from holdfast.orchestrator.hosts.local.job_records import expire
        from holdfast.orchestrator.planner.gpus import resolve
        from holdfast.orchestrator.runtime.clock import Clock

        from ..job_checks import load_checked

        job = load_checked(file, directory)
        job, why = resolve(job, found_here(job))
        _check_size(job)
        _check_memory(job)
        for name in expire(self._home, Clock().now_ns()):
            stderr().print(f"job {name}: deleted, its ttlSecondsAfterFinished is over")
        return job, [*filter(None, [why]), *remarks(job)]


def _result(done: FinishedRun) -> RunResult:
    if done.interrupted:
        return RunResult(done.view, 130)
    return RunResult(done.view, exit_code(done.view))


def _lines(
    job: TrainingJob, directory: JobDirectory, display: Display
) -> AbstractContextManager[object]:
    """Shows what rank 0 prints inside of the context, if it is wanted."""
    from ..rank_lines import RankLines

    wanted = display.wants_lines
    if wanted is None:
        wanted = job.spec.entrypoint.recipe is None
    return RankLines(directory, display.line) if wanted else nullcontext()


def read_view(directory: JobDirectory) -> JobView:
    """The view of the controller, or the one of the journal when no controller answers."""
    import msgspec

    from holdfast.orchestrator.hosts.local import job_records

    from ..client import ControllerGone, ask

    try:
        body = ask(directory, "status").body
    except ControllerGone:
        view = job_records.read_view(directory)
        view.controller_alive = False
        return view
    return msgspec.convert(body.get("view", body), JobView)


def has_ended(directory: JobDirectory, view: JobView) -> bool:
    """Whether nothing of the job is left to control. A controller may have been killed before it
    released the nodes."""
    from holdfast.orchestrator.backends.local import node_registry

    return view.state in TERMINAL and not node_registry.living(directory.nodes_file)


def check_code(job: TrainingJob, spec_directory: Path) -> None:
    """Raises SpecError for edited code that cannot start: the job goes on with the old one."""
    from holdfast.orchestrator.protocol import files

    from .. import entrypoint_checks

    work = files.resolve(spec_directory, job.spec.working_directory)
    if problems := list(entrypoint_checks.problems(job, work)):
        raise SpecError(problems)


def _check_memory(job: TrainingJob) -> None:
    """Raises SpecError for a recipe that certainly runs out of this machine's GPU memory."""
    from holdfast.orchestrator.planner.advice import refused_as_wanted
    from holdfast.orchestrator.planner.choose import memory_on

    from ..job_checks import local_facts

    if problem := refused_as_wanted(job, memory_on(job, [local_facts(job.spec.workers_per_node)])):
        raise SpecError([problem])


def _check_size(job: TrainingJob) -> None:
    """Raises SpecError for more nodes than this machine can run."""
    from holdfast.orchestrator.backends.local import node_limit
    from holdfast.orchestrator.backends.local.devices import gpu_names

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
