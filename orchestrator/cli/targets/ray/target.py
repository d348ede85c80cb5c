"""Jobs of a Ray cluster: finding, listing, creating and watching them. A job is a record in the
cluster's store and a named controller actor."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from holdfast.orchestrator.api.v1alpha1 import (
    TrainingJob,
    job_to_mapping,
    parse_job,
)
from holdfast.orchestrator.api.v1alpha1.load import read_job_file
from holdfast.orchestrator.api.v1alpha1.remarks import remarks
from holdfast.orchestrator.backends.ray import actors, cluster, kv, names, ray_nodes, remote_files
from holdfast.orchestrator.cli.display import Display
from holdfast.orchestrator.cli.job_checks import check, check_submission
from holdfast.orchestrator.cli.output import stderr
from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.errors import HoldfastError, Problem, UserError
from holdfast.orchestrator.hosts.ray import actor
from holdfast.orchestrator.hosts.ray.actor import ControllerOrder
from holdfast.orchestrator.hosts.ray.host import RayHost
from holdfast.orchestrator.planner.gpus import resolve
from holdfast.orchestrator.protocol import files
from holdfast.orchestrator.protocol.certificate import make_keys
from holdfast.orchestrator.runtime.observe.view import JobView

from ..base import RunResult, exit_code
from ..remote_job import RemoteJob, view_through
from ..tempdir import on_sigterm
from .driver import accept_stop, fork_driver
from .job import RayTransport
from .jobs_api import metadata


class RayTarget:
    """One cluster. Connects at the first call."""

    def __init__(self, address: str, *, answer_s: float = actors.ANSWER_S) -> None:
        """`answer_s`: how long to wait for a controller's answer."""
        self._address, self._answer_s = address, answer_s

    def find(self, name: str) -> RemoteJob:
        return RemoteJob(self.transport(name))

    def transport(self, name: str) -> RayTransport:
        cluster.connect(self._address)
        data = kv.JobKeyValueStore(name).get(kv.RECORD) if name else None
        if data is None:
            found = kv.jobs()
            known = f"one of {', '.join(found)}" if found else "a job; there is none in the cluster"
            raise UserError(str(Problem("job", name, known, f"see `{self.command('status')}`")))
        try:
            order = msgspec.msgpack.decode(data, type=ControllerOrder)
        except msgspec.MsgspecError as error:
            raise HoldfastError(
                f"job {name}: its record in the cluster's store cannot be read ({error}); use the "
                f"Holdfast that wrote it"
            ) from None
        return RayTransport(order, self.command, answer_s=self._answer_s)

    def views(self) -> list[JobView]:
        cluster.connect(self._address)
        found = []
        for name in kv.jobs():
            try:
                found.append(self.find(name).view())
            except HoldfastError as error:
                stderr().print(f"{name}: {error}", markup=False, soft_wrap=True)
        return found

    def empty_message(self) -> str:
        return f"no jobs in this Ray cluster; start one with `{self.command('run', 'FILE')}`"

    def command(self, *words: str) -> str:
        return " ".join(["holdfast", *words, "--ray", self._address])

    def can_read(self, path: str) -> bool:
        return True  # on a Ray node, where not on this machine

    @contextmanager
    def guard(self) -> Iterator[None]:
        try:
            yield
        except ConnectionError as error:
            if type(error) is not ConnectionError:
                raise  # of a pipe or a socket; Ray's client raises only the base class
            raise cluster.ClusterGone(
                f"the connection to the Ray cluster at {self._address} was lost ({error}); its "
                f"jobs go on without this command, and `{self.command('status')}` finds them again"
            ) from None

    def free_name(self, wanted: str) -> str:
        # Without looking: nothing connects before the driver of a submitted job has forked.
        return f"{wanted}-{secrets.token_hex(2)}"

    # -- run -----------------------------------------------------------------------------------
    def run(self, file: Path, display: Display, directory: Path | None = None) -> RunResult:
        # Read before the fork and before connecting: Ray deletes the job's working_dir with its
        # first driver, and several Ray nodes of one machine replace it one after the other.
        home, text = directory or file.absolute().parent, read_job_file(file)
        # Nothing else before the fork: libraries of storage start threads, which it would lose.
        is_driver = bool(cluster.submission_id())
        job_id, num_killed = secrets.token_hex(8), fork_driver() if is_driver else 0
        if num_killed:
            os.chdir("/")
            job = parse_job(text, str(file))  # checked by the first driver
        else:
            job = self._checked(text, file, home)
        cluster.connect(self._address, metadata(job))
        if num_killed and self._created(job.name, job_id):
            self._revive(self.transport(job.name), display)
        else:
            self._start(job, home, job_id, display)
        return self._watched(job.name, display, is_driver=is_driver)

    def attach(self, name: str, display: Display) -> RunResult:
        self._revive(self.transport(name), display)
        return self._watched(name, display, is_driver=False)

    def _watched(self, name: str, display: Display, *, is_driver: bool) -> RunResult:
        transport = self.transport(name)

        def stop() -> None:
            # `ray job stop` is meant for the job that the Ray job has submitted. Elsewhere SIGTERM
            # ends a command that only watches.
            if not is_driver:
                raise KeyboardInterrupt
            transport.perform("cancel", {"by": "SIGTERM"})

        with display, on_sigterm(stop), transport.lines_of_rank_0(display):
            accept_stop()
            try:
                view = transport.watch(display)
            except KeyboardInterrupt:
                display.note(
                    f"Job {name} continues in the cluster. Watch it again with "
                    f"`{self.command('attach', name)}`; end it with "
                    f"`{self.command('cancel', name)}`"
                )
                return RunResult(None, 130)
        return RunResult(view, exit_code(view))

    def _start(self, job: TrainingJob, directory: Path, job_id: str, display: Display) -> None:
        """Raises UserError for a script that no node has, or a name that is taken."""
        if self._outside:
            _expect_script(job, directory)
        for expired in self.expire(kv.jobs()):
            stderr().print(f"job {expired}: deleted, its ttlSecondsAfterFinished is over")
        job, why = resolve(job, ray_nodes.gpus_found(job))
        self._create(job, directory, job_id)
        for note in filter(None, (why, *remarks(job))):
            display.note(note)

    def _created(self, name: str, job_id: str) -> bool:
        """Whether an earlier driver of this Ray job created the job before it was killed."""
        return kv.JobKeyValueStore(name).exists(kv.RECORD) and (
            self.transport(name).order.job_id == job_id
        )

    def expire(self, jobs: list[str]) -> list[str]:
        """Delete the records of jobs that finished longer than their ttlSecondsAfterFinished ago;
        returns their names."""
        deleted = []
        for name in jobs:
            with suppress(HoldfastError):  # written by another Holdfast, or deleted meanwhile
                if self.transport(name).expire():
                    deleted.append(name)
        return deleted

    @property
    def _outside(self) -> bool:
        """Whether this machine is outside the cluster."""
        return self._address.startswith(cluster.CLIENT)

    def _checked(self, text: str, file: Path, directory: Path) -> TrainingJob:
        """Raises SpecError, also for what cannot work on the machine that will run it."""
        job = parse_job(text, str(file))
        if self._outside:
            check_submission(job, directory, str(file), ships=False)
        else:
            check(job, directory, source=str(file))
        return job

    def _create(self, job: TrainingJob, spec_directory: Path, job_id: str) -> None:
        """Raises UserError when the name is taken."""
        store = kv.JobKeyValueStore(job.name)
        made = make_keys(names.tls(job_id))
        order = ControllerOrder(
            document=job_to_mapping(job),
            job=job.name,
            job_id=job_id,
            spec_directory=str(spec_directory),
            token=made.token,
            certificate=made.certificate,
            key=made.key,
            runtime_env=actor.own_runtime_env(),
        )
        # Keys from before the record are an earlier job's. Later keys may be requests of other
        # commands for this job.
        old = [key for key in store.list("") if key != kv.RECORD]
        if not store.create(kv.RECORD, msgspec.msgpack.encode(order)):
            raise UserError(str(self._taken(self.transport(job.name))))
        store.delete(*old)
        try:
            actor.create(order, RayHost)
        # Ray's own errors: an actor of that name without a record, a head that was just lost.
        except Exception as error:
            store.clear()  # the name is free again
            raise HoldfastError(
                f"job {job.name}: its controller could not be made ({error}); nothing was started"
            ) from None

    def _taken(self, job: RayTransport) -> Problem:
        state = view_through(job).state
        if state in TERMINAL:
            fix = f"remove it with `{self.command('delete', job.name)}`"
        else:
            fix = f"watch it with `{self.command('attach', job.name)}`"
        got = f"{job.name}, which exists in this Ray cluster and is {state}"
        return Problem(
            "metadata.name", got, "a name that is free", f"{fix}, or choose another metadata.name"
        )

    def _revive(self, job: RayTransport, display: Display) -> None:
        """Start a controller again whose actor was removed; its agents wait for it."""
        if job.ended or actor.find(job.name) is not None:
            return
        display.note(f"job {job.name}: had no controller; starting one")
        with suppress(ValueError):  # another command was faster
            actor.create(job.order, RayHost, job.order.runtime_env)


def _expect_script(job: TrainingJob, directory: Path) -> None:
    """Raises UserError when no Ray node has the script at its path here. A node that lacks it while
    others have it fails at its start."""
    script = job.spec.entrypoint.program.script
    if script is None:
        return
    path = str(files.resolve(directory, job.spec.working_directory, script).resolve())
    if remote_files.on_no_node(path):
        got = f"{script} ({path} is on no Ray node of the cluster)"
        fix = "`holdfast submit FILE --ray http://HEAD:8265` uploads the files beside FILE"
        field = job.spec.entrypoint.script_field
        problem = Problem(field, got, "a file that the nodes have", fix)
        raise UserError(str(problem))
