"""Jobs of a Ray cluster: named controller actors, and records in the cluster's store.

Owns: finding, listing, creating and watching them. Must not: import ray; backends/ray does.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, job_to_mapping, load_job
from holdfast.orchestrator.backends.ray import actor_calls, cluster, kv, names, remote_files
from holdfast.orchestrator.backends.ray.jobs_page import JobsPageEntry, submission_id
from holdfast.orchestrator.cli.display import Display
from holdfast.orchestrator.cli.output import stderr
from holdfast.orchestrator.cli.preflight import check_submission, load_checked
from holdfast.orchestrator.cli.render import FINISHED
from holdfast.orchestrator.errors import HoldfastError, Problem, UserError
from holdfast.orchestrator.hosts.ray import actor
from holdfast.orchestrator.hosts.ray.actor import ControllerOrder
from holdfast.orchestrator.hosts.ray.host import RayHost
from holdfast.orchestrator.protocol import paths
from holdfast.orchestrator.protocol.certificate import make_keys
from holdfast.orchestrator.runtime.observe.view import JobView

from ..base import RunResult
from . import cleanup, head_warning
from .job import RayJob
from .jobs_api import metadata
from .status_publisher import StatusPublisher


class RayTarget:
    """One cluster. Connects when it is first asked for something."""

    def __init__(self, address: str) -> None:
        self._address = address

    def find(self, name: str) -> RayJob:
        cluster.connect(self._address)
        data = kv.JobKeyValueStore(name).get(kv.RECORD) if name else None
        if data is None:
            there = kv.jobs()
            known = f"one of {', '.join(there)}" if there else "a job; there is none in the cluster"
            raise UserError(str(Problem("job", name, known, f"see `{self.command('status')}`")))
        try:
            order = msgspec.msgpack.decode(data, type=ControllerOrder)
        except msgspec.MsgspecError as error:
            raise HoldfastError(
                f"job {name}: its record in the cluster's store cannot be read ({error}); use the "
                f"Holdfast that wrote it"
            ) from None
        return RayJob(order, self.command)

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
        return True  # on a Ray node where not here

    @contextmanager
    def guard(self) -> Iterator[None]:
        try:
            yield
        except ConnectionError as error:
            if type(error) is not ConnectionError:
                raise  # a pipe's or a socket's; Ray's client raises no narrower one
            raise cluster.ClusterGone(
                f"the connection to the Ray cluster at {self._address} was lost ({error}); its "
                f"jobs go on without this command, and `{self.command('status')}` finds them again"
            ) from None

    # -- run -----------------------------------------------------------------------------------
    def run(self, file: Path | None, attach: str | None, display: Display) -> RunResult:
        if file is not None:
            # Before connecting: several Ray nodes of one machine unpack a job's working_dir one
            # after the other in the same place, and take it away from under our feet.
            job, directory = self._load(file), file.absolute().parent
            told = metadata(job)
            cluster.connect(self._address, told)
            if self._outside:
                _expect_script(job, directory)
            for one in cleanup.expire(kv.jobs(), self.find):
                stderr().print(f"job {one}: deleted, its ttlSecondsAfterFinished is over")
            self._create(job, directory)
            name = job.name
        else:
            assert attach is not None
            name, told = attach, {}
            self._revive(self.find(attach), display)
        found, display = self.find(name), StatusPublisher(display, JobsPageEntry(name, told))

        def stop() -> None:
            # `ray job stop` means the job that the Ray job has brought. Elsewhere somebody ends a
            # command that only watches.
            if attach is not None or not submission_id():
                raise KeyboardInterrupt
            found.request("cancel", by="SIGTERM")

        attached = self.command("run", "--attach", name)
        of_head = head_warning.watched(display, found.order, attached)
        with display, actor_calls.on_sigterm(stop), of_head:
            try:
                view = found.watch(display)
            except KeyboardInterrupt:
                display.note(
                    f"Job {name} goes on in the cluster. Watch it again with "
                    f"`{attached}`; end it with "
                    f"`{self.command('cancel', name)}`"
                )
                return RunResult(None, 130)
        return RunResult(view, 0 if view.state == "succeeded" else 1)

    @property
    def _outside(self) -> bool:
        """Whether this machine is none of the cluster's."""
        return self._address.startswith(cluster.CLIENT)

    def _load(self, file: Path) -> TrainingJob:
        """Raises SpecError, also for what cannot work where it will run, as far as is known."""
        if not self._outside:
            return load_checked(file)
        job = load_job(file)
        check_submission(job, file.absolute().parent, str(file), ships=False)
        return job

    def _create(self, job: TrainingJob, spec_directory: Path) -> None:
        """Raises UserError when the name is taken."""
        keys, job_id = kv.JobKeyValueStore(job.name), secrets.token_hex(8)
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
        # What is there before the name is ours is an earlier job's; what comes after it may be what
        # others do to this one.
        left = [key for key in keys.list("") if key != kv.RECORD]
        if not keys.create(kv.RECORD, msgspec.msgpack.encode(order)):
            raise UserError(str(self._taken(self.find(job.name))))
        keys.delete(*left)
        try:
            actor.create(order, RayHost)
        # An actor of that name without a record, a head that is just lost: Ray's own errors.
        except Exception as error:
            keys.clear()  # its name is free again
            raise HoldfastError(
                f"job {job.name}: its controller could not be made ({error}); nothing was started"
            ) from None

    def _taken(self, job: RayJob) -> Problem:
        state = job.view().state
        if state in FINISHED:
            fix = f"remove it with `{self.command('delete', job.name)}`"
        else:
            fix = f"watch it with `{self.command('run', '--attach', job.name)}`"
        got = f"{job.name}, which exists in this Ray cluster and is {state}"
        return Problem(
            "metadata.name", got, "a name that is free", f"{fix}, or choose another metadata.name"
        )

    def _revive(self, job: RayJob, display: Display) -> None:
        """A controller whose actor somebody has removed comes back; its agents wait for it."""
        if job.ended or actor.find(job.name) is not None:
            return
        display.note(f"job {job.name}: had no controller; starting one")
        with suppress(ValueError):  # somebody else was faster
            actor.create(job.order, RayHost, job.order.runtime_env)


def _expect_script(job: TrainingJob, directory: Path) -> None:
    """Raises UserError when no Ray node has the script where it is here. What is on some of them
    only, is told by those that lack it."""
    script = job.spec.entrypoint.script
    if script is None:
        return
    path = str(paths.resolve(directory, job.spec.working_directory, script).resolve())
    if remote_files.on_no_node(path):
        got = f"{script} ({path} is on no Ray node of the cluster)"
        fix = "`holdfast submit FILE --ray http://HEAD:8265` takes along what lies beside FILE"
        problem = Problem("spec.entrypoint.script", got, "a file that the nodes have", fix)
        raise UserError(str(problem))
