"""Jobs of a home on this machine: their controllers are asked over a socket, their files are read.

Owns: what the commands do with a job's directory. Must not: interpret; runtime/ and the renderers
do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.orchestrator.errors import Damaged, HoldfastError, Problem, SpecError, UserError
from holdfast.orchestrator.hosts.local.job_directory import Home, JobDirectory
from holdfast.orchestrator.protocol.manifest import Manifest
from holdfast.orchestrator.runtime.observe.view import JobView

from ..display import Display
from ..output import plural, stderr
from ..render import FINISHED
from ..report import local_command
from .base import LogSelector, Response, RunResult

if TYPE_CHECKING:
    from holdfast.orchestrator.api.v1alpha1 import TrainingJob

FOLLOW_INTERVAL_S = 0.2


class LocalJob:
    """One job's directory."""

    def __init__(self, directory: JobDirectory) -> None:
        self._directory = directory
        self._damaged = False
        """Nobody knows its state."""

    @property
    def name(self) -> str:
        return self._directory.name

    def view(self) -> JobView:
        return read_view(self._directory)

    def remarks(self, view: JobView) -> list[str]:
        if view.controller_alive or view.state in FINISHED:
            return []
        from holdfast.orchestrator.backends.local import node_registry

        attach = f"`holdfast run --attach {view.name}` takes the job over"
        try:
            living = node_registry.living(self._directory.nodes_file)
        except HoldfastError as error:
            return [f"No controller is running: this is what the journal says. {error}."]
        if living:
            return [
                "No controller is running: this is what the journal says. Training goes on without "
                f"one, for 15 minutes; {attach}."
            ]
        return [
            "No controller is running and none of the job's nodes is left, as after a restart of "
            f"the machine: this is what the journal says. {attach} and goes on from its last "
            "checkpoint in storage."
        ]

    def request(self, verb: str, **arguments: Any) -> Response:
        from ..client import ask

        reply = ask(self._directory, verb, **arguments)
        return Response(reply.detail, reply.body)

    def print_events(self, *, follow: bool, as_json: bool) -> None:
        from holdfast.orchestrator.hosts.local.file_journal import JournalReader, Snapshot

        from ..event_format import EventFormatter
        from ..output import stdout

        reader = JournalReader(self._directory.journal, history=True)
        console, narrator = stdout(), EventFormatter()
        while True:
            # Asked before reading: what was written up to a controller's end is then seen.
            alive = self._directory.controller_alive()
            for item in reader.read():
                if isinstance(item, Snapshot):
                    narrator.resume(console, item, as_json=as_json)
                else:
                    narrator.tell(console, item.now_ns, item.event, as_json=as_json)
            if not follow or not alive:
                return
            time.sleep(FOLLOW_INTERVAL_S)

    def print_logs(self, wanted: LogSelector, *, follow: bool) -> None:
        from ..log_files import follow_files, print_files

        if follow:
            follow_files(self._directory, *wanted, FOLLOW_INTERVAL_S)
        else:
            print_files(self._directory, *wanted)

    @contextmanager
    def storage(self) -> Iterator[str]:
        from holdfast.orchestrator.runtime.checkpoint_store.job_environment import job_environment

        job = self._directory.job()
        with job_environment(job):
            yield self._directory.checkpoint_path(job)

    def manifests(self) -> tuple[str, list[Manifest]]:
        from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore

        with self.storage() as path:
            return path, CheckpointStore(path, self.name).manifests()

    def deleting(self, keep: Path | None) -> str:
        try:
            self._check_keep(keep)
            state: str = self.view().state
        except Damaged as error:
            return self._deleting_damaged(keep, error)
        except SpecError as error:
            raise UserError(
                f"{error}\njob {self.name}: got this spec, with which nobody can tell whether the "
                f"job has ended; expected one of this version; delete it with the Holdfast that "
                f"wrote it, or remove {self._directory.path} once nothing of it runs"
            ) from None
        if state not in FINISHED:
            raise UserError(
                f"job {self.name}: got a job that is {state}; expected one that is "
                f"{', '.join(FINISHED[:-1])} or {FINISHED[-1]}; end it with "
                f"`holdfast cancel {self.name}`"
            )
        return self._what(keep)

    def _check_keep(self, keep: Path | None) -> None:
        path = self._directory.job().spec.checkpoint.path
        if keep is not None and path is not None:
            raise UserError(
                f"--keep-checkpoints: got a directory; expected none for job {self.name}, whose "
                f"checkpoints stay in {path} (spec.checkpoint.path)"
            )

    def _deleting_damaged(self, keep: Path | None, error: Damaged) -> str:
        """A job whose state nobody can tell any more, once nothing of it runs."""
        from holdfast.orchestrator.backends.local import node_registry

        living = node_registry.living(self._directory.nodes_file)
        if self._directory.controller_alive() or living:
            raise error
        self._damaged = True
        return f"{self._what(keep)}, of a job that may not have ended: nobody can tell ({error})"

    def _what(self, keep: Path | None) -> str:
        what = "logs" if keep is not None else "logs and checkpoints"
        return f"{self._directory.path} with its {what}"

    def delete(self, keep: Path | None) -> list[str]:
        kept = keep.absolute() if keep is not None else None
        self._directory.remove(kept)
        remarks = []
        if self._damaged:
            remarks.append("its files were damaged: nobody could tell whether it had ended")
        if kept is not None:
            remarks.append(f"to go on from its checkpoints: spec.checkpoint.path: {kept}")
        return remarks


class LocalTarget:
    """A home."""

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

    def nothing(self) -> str:
        return f"no jobs in {self._home.path}; start one with `holdfast run FILE`"

    def command(self, *words: str) -> str:
        return local_command(*words)

    def reads(self, path: str) -> bool:
        return True

    def ending(self) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, file: Path | None, attach: str | None, display: Display) -> RunResult:
        from holdfast.orchestrator.hosts.local.job_records import expire
        from holdfast.orchestrator.hosts.local.service import run_job
        from holdfast.orchestrator.runtime.clock import Clock

        job, spec_directory = self._job(file, attach)
        for name in expire(self._home, Clock().now_ns()) if attach is None else ():
            stderr().print(f"job {name}: deleted, its ttlSecondsAfterFinished is over")
        notes: list[str] = []

        def note(text: str) -> None:
            notes.append(text)
            display.note(text)

        with display:
            view = run_job(
                job,
                self._home,
                spec_directory,
                on_view=display.show,
                attach=attach is not None,
                on_note=note,
            )
        if any(text.startswith("Ctrl-C") for text in notes):
            return RunResult(view, 130)
        return RunResult(view, 0 if view.state == "succeeded" else 1)

    def _job(self, file: Path | None, attach: str | None) -> tuple[TrainingJob, Path]:
        """What to run, and the directory that its paths are relative to. Raises UserError."""
        if attach is not None:
            directory = self._home.find(attach)
            return directory.job(), Path(directory.spec_directory)
        from ..preflight import load_checked

        assert file is not None
        job = load_checked(file)
        _check_size(job)
        return job, file.absolute().parent


def read_view(directory: JobDirectory) -> JobView:
    """The job as its controller sees it now, or as its journal tells when there is none."""
    import msgspec

    from holdfast.orchestrator.hosts.local.job_records import read_view as fold

    from ..client import ControllerGone, ask

    try:
        body = ask(directory, "status").body
    except ControllerGone:
        view = fold(directory)
        view.controller_alive = False
        return view
    return msgspec.convert(body.get("view", body), JobView)


def _check_size(job: TrainingJob) -> None:
    """Raises SpecError for more nodes than this machine can bear."""
    from holdfast.orchestrator.backends.local import node_limit
    from holdfast.orchestrator.backends.local.devices import shared_out

    nodes, limit = job.spec.nodes, node_limit(job)
    wanted = nodes.max + nodes.spares
    if wanted > limit:
        workers, gpus = job.spec.workers_per_node, shared_out(job)
        if gpus == ():
            expected = "0 on this machine, where no GPU can be used"
            fix = "see nvidia-smi and CUDA_VISIBLE_DEVICES"
            gpu = str(job.spec.resources.gpu)
            raise SpecError([Problem("spec.resources.gpu", gpu, expected, fix)])
        expected = f"at most {limit} nodes of {workers} workers, spares included, on this machine"
        if gpus is not None:
            expected += f", where {plural(len(gpus), 'GPU')} can be used"
        raise SpecError([Problem("spec.nodes.max", f"{wanted} with spares", expected)])
