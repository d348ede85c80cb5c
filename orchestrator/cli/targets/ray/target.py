"""Jobs of a Ray cluster: finding, listing, creating and watching them. A job is a record in the
cluster's store and a named controller actor."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_to_mapping, parse_job
from holdfast.orchestrator.api.v1alpha1.load import read_job_file
from holdfast.orchestrator.api.v1alpha1.remarks import remarks
from holdfast.orchestrator.backends.ray import actors, cluster, kv, names, ray_nodes
from holdfast.orchestrator.cli import job_code
from holdfast.orchestrator.cli.code_files import Code
from holdfast.orchestrator.cli.display import Display
from holdfast.orchestrator.cli.job_checks import check, check_submission
from holdfast.orchestrator.cli.output import stderr
from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.hosts.ray import actor
from holdfast.orchestrator.hosts.ray.actor import ControllerOrder
from holdfast.orchestrator.hosts.ray.code_store import KeyValueCodeStore
from holdfast.orchestrator.hosts.ray.host import RayHost
from holdfast.orchestrator.planner.gpus import resolve
from holdfast.orchestrator.protocol.certificate import make_keys
from holdfast.orchestrator.runtime.observe.view import JobView

from ..base import Launch, RunResult, Target, exit_code, name_taken
from ..remote_job import RemoteJob, readable, view_through
from ..supervisor import accept_stop, supervise
from ..tempdir import on_sigterm
from .job import RayTransport
from .jobs_api import metadata


class RayTarget(Target):
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
            jobs = kv.jobs()
            offer = f"one of {', '.join(jobs)}" if jobs else "a job; there is none in the cluster"
            raise UserError.of("job", name, offer, f"see `{self.command('status')}`")
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
        return readable(kv.jobs(), self.find)

    def empty_message(self) -> str:
        return f"no jobs in this Ray cluster; start one with `{self.command('run', 'FILE')}`"

    def command(self, *words: str) -> str:
        return " ".join(["holdfast", *words, "--ray", self._address])

    @contextmanager
    def guard(self) -> Iterator[None]:
        try:
            yield
        except ConnectionError as error:
            if type(error) is not ConnectionError:
                raise  # of a pipe or a socket; Ray's client raises only the base class
            raise cluster.ClusterGone(
                f"the connection to the Ray cluster at {self._address} was lost ({error}). "
                f"Jobs continue without this command; `{self.command('status')}` finds them again"
            ) from None

    # -- run -----------------------------------------------------------------------------------
    def run(self, launch: Launch, display: Display) -> RunResult:
        is_driver = bool(cluster.submission_id())
        return self._watched(self._start(launch, display), display, is_driver=is_driver)

    def submit(self, launch: Launch, display: Display) -> dict[str, str]:
        return {"job": self._start(launch, display)}

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
            try:
                accept_stop()
                view = transport.watch(display)
            except KeyboardInterrupt:
                display.note(
                    f"Job {name} continues in the cluster. Watch it again with "
                    f"`{self.command('attach', name)}`; end it with "
                    f"`{self.command('cancel', name)}`"
                )
                return RunResult(None, 130)
        return RunResult(view, exit_code(view))

    def _start(self, launch: Launch, display: Display) -> str:
        """Create a job; its name. Raises UserError when that is taken."""
        # Read before the fork and before connecting: Ray deletes the job's working_dir with its
        # first driver, and several Ray nodes of one machine replace it one after the other.
        text, job_id, is_driver = (
            read_job_file(launch.file), secrets.token_hex(8), bool(cluster.submission_id()),
        )  # fmt: skip
        # Nothing else before the fork: libraries of storage start threads, which it would lose.
        num_killed, code = supervise("driver of this job") if is_driver else 0, None
        if num_killed:
            os.chdir("/")
            job = parse_job(text, str(launch.file))  # checked by the first driver
        else:
            job, code = self._checked(text, launch, is_driver=is_driver)
            launch.show()
        cluster.connect(self._address, metadata(job))
        if num_killed and self._created(job.name, job_id):
            self._revive(self.transport(job.name), display)
            return job.name
        for expired in self.expire(kv.jobs()):
            stderr().print(f"job {expired}: deleted, its ttlSecondsAfterFinished is over")
        job, why = resolve(job, ray_nodes.gpus_found(job))
        self._create(job, code, launch.directory, job_id)
        uploaded = job_code.describe(code) if code is not None else ""
        for note in filter(None, (uploaded, why, *remarks(job))):
            display.note(note)
        return job.name

    def _created(self, name: str, job_id: str) -> bool:
        """True if an earlier driver of this Ray job created the job before it was killed."""
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
        """True if this machine is outside the cluster."""
        return self._address.startswith(cluster.CLIENT)

    def _checked(
        self, text: str, launch: Launch, *, is_driver: bool
    ) -> tuple[TrainingJob, Code | None]:
        """The job, and the code to upload: a Ray job's is already there. Raises SpecError, also for
        what cannot work on the machine that will run it."""
        job, code, source = parse_job(text, str(launch.file)), None, str(launch.file)
        if not self._outside:
            check(job, launch.directory, source=source)
        if not is_driver:
            job, code = job_code.with_code(job, launch.directory, source)
        if self._outside and code is None:
            check_submission(job, launch.directory, source, ships=False)
        return job, code

    def _create(
        self, job: TrainingJob, code: Code | None, spec_directory: Path, job_id: str
    ) -> None:
        """Raises UserError when the name is taken."""
        store = kv.JobKeyValueStore(job.name)
        keys = make_keys(names.tls(job_id))
        order = ControllerOrder(
            document=job_to_mapping(job),
            job=job.name,
            job_id=job_id,
            spec_directory=str(spec_directory),
            token=keys.token,
            certificate=keys.certificate,
            key=keys.key,
            runtime_env=actor.own_runtime_env(),
        )
        # Keys from before the record are an earlier job's. Later keys may be requests of other
        # commands for this job.
        old = [key for key in store.list("") if key != kv.RECORD]
        if not store.create(kv.RECORD, msgspec.msgpack.encode(order)):
            raise self._taken(self.transport(job.name))
        store.delete(*old)
        try:
            if code is not None:
                KeyValueCodeStore(store).upload(code.name, code.archive)
            actor.create(order, RayHost)
        # Ray's own errors: an actor of that name without a record, a head that was just lost.
        except Exception as error:
            store.clear()  # the name is free again
            raise HoldfastError(
                f"job {job.name}: its controller cannot be created ({error}); nothing was started"
            ) from None

    def _taken(self, job: RayTransport) -> UserError:
        state = view_through(job).state
        if state in TERMINAL:
            fix = f"remove it with `{self.command('delete', job.name)}`"
        else:
            fix = f"watch it with `{self.command('attach', job.name)}`"
        return name_taken(job.name, f"this Ray cluster ({state})", fix)

    def _revive(self, job: RayTransport, display: Display) -> None:
        """Start a controller again whose actor was removed; its agents wait for it."""
        if job.ended or actor.find(job.name) is not None:
            return
        display.note(f"job {job.name}: had no controller; starting one")
        with suppress(ValueError):  # another command was faster
            actor.create(job.order, RayHost, job.order.runtime_env)
