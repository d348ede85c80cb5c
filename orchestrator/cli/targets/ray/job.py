"""One job of a Ray cluster: commands call its controller, or read its keys in the cluster's store
where no controller answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.backends.ray import actors, kv, remote_files
from holdfast.orchestrator.backends.ray.backend import end_without_controller
from holdfast.orchestrator.cli.code_files import Code
from holdfast.orchestrator.cli.display import Display
from holdfast.orchestrator.cli.log_files import generations
from holdfast.orchestrator.cli.output import without_controller
from holdfast.orchestrator.core.context import SECOND_NS
from holdfast.orchestrator.core.journal import JournalError
from holdfast.orchestrator.core.transitions import TERMINAL
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.hosts.ray import actor
from holdfast.orchestrator.hosts.ray.actor import ControllerOrder
from holdfast.orchestrator.hosts.ray.code_store import KeyValueCodeStore
from holdfast.orchestrator.hosts.ray.host import checkpoint_path
from holdfast.orchestrator.journal import gcs_store
from holdfast.orchestrator.journal.chunk_journal import contents, read
from holdfast.orchestrator.journal.gcs_store import GcsStore
from holdfast.orchestrator.protocol.manifest import Manifest
from holdfast.orchestrator.protocol.messages import Reply
from holdfast.orchestrator.runtime.checkpoint_store.options import job_environment
from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore
from holdfast.orchestrator.runtime.clock import Clock
from holdfast.orchestrator.runtime.control_api import view_body
from holdfast.orchestrator.runtime.job_directory import JobDirectory
from holdfast.orchestrator.runtime.job_loop import replay
from holdfast.orchestrator.runtime.observe.view import JobView

from ..remote_job import ControllerGone, LogSelector, expect_ended, extra_s, view_through
from ..tempdir import scratch

FOLLOW_INTERVAL_S = 0.5
LINES_INTERVAL_S = 2.0
END_RECORD_S = 30.0
"""Seconds from a job's last view to its end record."""


class RayTransport:
    """The actor of a job's controller, and the job's record in the store of the cluster's head."""

    def __init__(
        self,
        order: ControllerOrder,
        command: Callable[..., str],
        *,
        store: kv.JobKeyValueStore | None = None,
        answer_s: float = actors.ANSWER_S,
    ) -> None:
        """`command`: a command line as the user would type it for this cluster."""
        self.order, self.command, self._answer_s = order, command, answer_s
        self._store = store or kv.JobKeyValueStore(order.job)
        self.job = job_from_mapping(order.document, f"job {order.job}")
        self._actor: Any = None

    @property
    def name(self) -> str:
        return self.order.job

    @property
    def ended(self) -> dict[str, Any] | None:
        """The end record, which its controller writes last."""
        data = self._store.get(kv.ENDED)
        return json.loads(data) if data else None

    def perform(self, verb: str, arguments: dict[str, Any]) -> Reply:
        try:
            answer = self._ask("perform", verb, arguments, extra_s=extra_s(verb, arguments))
        except actors.ControllerActorGone as error:
            if verb != "cancel" or self.ended is not None:
                raise ControllerGone(str(error)) from None
            detail = self._cancel(str(arguments["by"]), str(error))
            return Reply(ok=True, detail=f"job {self.name}: {detail}")
        return msgspec.convert(answer, Reply)

    def has_ended(self) -> bool:
        return self.ended is not None

    def recorded(self) -> JobView:
        ended = self.ended
        return self.fold() if ended is None else _view(ended["view"])

    def fold(self) -> JobView:
        """The view at the last event in its journal. Raises JournalError."""
        snapshot, records = contents(read(GcsStore(self._store, self.name)))
        projection = replay(self.job, records, snapshot)
        path = checkpoint_path(self.order, self.job.spec.checkpoint.path)
        view = projection.view(projection.now_ns, live=False, checkpoint_path=path)
        view.job_id, view.controller_alive = self.order.job_id, False
        return view

    def remark(self, view: JobView) -> str:
        attach = self.command("attach", self.name)
        return (
            f"No controller answers: this is the state of the journal. Training continues, "
            f"{without_controller(self.job)}; `{attach}` starts one."
        )

    def _cancel(self, by: str, cause: str) -> str:
        """End all that exists of the job, and write its end record. Returns what was done."""
        end_without_controller(self.name)
        now_ns = Clock().now_ns()
        try:
            view = self.fold()
        except JournalError:  # perhaps the reason why there is no controller
            view = JobView(name=self.name, job_id=self.order.job_id, submitted_ns=now_ns)
        view.state, view.finished_ns, view.now_ns, view.nodes = "cancelled", now_ns, now_ns, []
        view.reason = f"cancelled by {by or 'an unknown user'} without its controller ({cause})"
        record = {"view": view_body(view), "refusal": ""}
        self._store.put(kv.ENDED, json.dumps(record).encode())
        return f"no controller answers ({cause}): its actors and placement groups were removed"

    def expire(self) -> bool:
        """Delete the record if the job finished longer than ttlSecondsAfterFinished ago."""
        ttl_s, ended = self.job.spec.ttl_s_after_finished, self.ended
        finished_ns = ended["view"].get("finished_ns") if ended is not None else None
        if ttl_s is None or finished_ns is None:
            return False
        if Clock().now_ns() < finished_ns + ttl_s * SECOND_NS:
            return False
        self._store.clear()
        return True

    def watch(self, display: Display) -> JobView:
        """Show the job until it has ended; its last view. Raises UserError when it was refused."""
        seen: Any = -1
        ended = self.ended
        while ended is None:
            try:
                answer = self._ask("watch", seen)
                seen, view = answer["seen"], _view(answer["view"])
                display.show(view)
                if view.state in TERMINAL:
                    ended = self.ended
            except actors.ControllerActorGone as error:
                # A controller ends only after it has written the end record.
                if (ended := self.ended) is None:
                    lost = isinstance(error, actors.RuntimeEnvGone)
                    if lost or actor.find(self.name) is None:
                        raise actors.ControllerActorGone(self._without_controller(error)) from None
                    seen = -1
                    time.sleep(actors.PAUSE_S)
        if ended["refusal"]:
            self._store.clear()  # the job never began: its name is free again
            user_error = ended.get("exit_code", UserError.exit_code) == UserError.exit_code
            raise (UserError if user_error else HoldfastError)(ended["refusal"])
        view = _view(ended["view"])
        display.show(view)
        return view

    def _without_controller(self, error: actors.ControllerActorGone) -> str:
        cancel = f"`{self.command('cancel', self.name)}` ends the job"
        if isinstance(error, actors.RuntimeEnvGone):
            return (
                f"job {self.name}: no controller could be started: the cluster could not build the "
                f"job's runtime env: {error}\nRay keeps uploaded files only as long as an actor of "
                f"the job exists. {cancel}"
            )
        if not gcs_store.exists(self._store):
            return f"job {self.name}: its controller did not start ({error}); {cancel}"
        return (
            f"job {self.name}: its controller was removed from the cluster ({error}); training "
            f"continues; `{self.command('attach', self.name)}` starts another, {cancel}"
        )

    # -- events and logs -----------------------------------------------------------------------
    def check_code(self) -> bool:
        return True

    def upload(self, code: Code) -> None:
        KeyValueCodeStore(self._store).upload(code.name, code.archive)

    def delete_code_except(self, *names: str) -> None:
        KeyValueCodeStore(self._store).delete_others(*names)

    def print_events(self, *, follow: bool, as_json: bool) -> None:
        from holdfast.orchestrator.cli.event_format import print_journal

        seen = -1

        def pause() -> None:
            nonlocal seen
            try:
                seen = self._ask("watch", seen)["seen"]
            except actors.ControllerActorGone:
                seen = -1
                time.sleep(actors.PAUSE_S)

        store = GcsStore(self._store, self.name)
        print_journal(
            store, lambda: self.ended is not None, pause if follow else None, as_json=as_json
        )

    def print_logs(self, wanted: LogSelector, *, follow: bool) -> None:
        from holdfast.orchestrator.cli.log_files import follow_files, print_files

        with scratch("holdfast-logs-") as place:
            since = None if follow else 0
            copy = _LogCopy(place / self.name, self, remote_files.LogFilter(*wanted, since))
            while copy.fetch():
                continue
            if follow:
                follow_files(copy, *wanted, FOLLOW_INTERVAL_S)
            else:
                print_files(copy, *wanted)

    @contextmanager
    def lines_of_rank_0(self, display: Display) -> Iterator[None]:
        """Shows them inside of the context, if it is wanted: each look is a task on every Ray
        node."""
        if not display.wants_lines:
            yield
            return
        from holdfast.orchestrator.cli.rank_lines import RankLines

        with scratch("holdfast-logs-") as place:
            copy = _LogCopy(place / self.name, self, remote_files.LogFilter(0, None, None))

            def refresh() -> None:
                with suppress(Exception):  # of Ray: the next look tries again
                    copy.fetch()

            with RankLines(copy, display.line, refresh, LINES_INTERVAL_S):
                yield

    # -- checkpoints and the end ---------------------------------------------------------------
    @contextmanager
    def storage(self) -> Iterator[str]:
        with job_environment(self.job):
            yield checkpoint_path(self.order, self.job.spec.checkpoint.path)

    def manifests(self) -> tuple[str, list[Manifest]] | None:
        with self.storage() as path:
            if "://" not in path and not Path(path).is_dir():
                return None  # a directory on the cluster's machines
            return path, CheckpointStore(path, self.name).manifests()

    def describe_deletion(self, keep: Path | None) -> str:
        view = view_through(self)
        if keep is not None:
            raise UserError(
                "--keep-checkpoints: got a directory; expected none with --ray, where checkpoints "
                "stay where they are"
            )
        expect_ended(view, f"`{self.command('cancel', self.name)}`")
        self._wait_for_end_record()
        return f"the record of {self.name} in the Ray cluster"

    def _wait_for_end_record(self) -> None:
        """The controller would write deleted keys again until it has written the end record. Raises
        HoldfastError after END_RECORD_S."""
        give_up = time.monotonic() + END_RECORD_S
        while self.ended is None:
            if actor.find(self.name) is None:
                return
            if time.monotonic() > give_up:
                raise HoldfastError(
                    f"job {self.name}: has ended, and its controller is still releasing its nodes; "
                    f"try again in a while"
                )
            time.sleep(actors.PAUSE_S)

    def delete(self, keep: Path | None) -> list[str]:
        path = checkpoint_path(self.order, self.job.spec.checkpoint.path)
        if self.ended is None:  # its controller ended before it had released all nodes
            end_without_controller(self.name)
        self._store.clear()
        return [f"its checkpoints stay in {path}, its logs in Ray's log directories"]

    def _ask(self, method: str, *arguments: Any, extra_s: float = 0.0) -> Any:
        # Looked up once: that is a round trip to the head.
        self._actor = self._actor or actor.find(self.name)
        if self._actor is None:
            raise actors.ControllerActorGone(f"job {self.name}: there is no controller")
        try:
            timeout_s = self._answer_s + extra_s
            return actors.ask(self._actor, method, *arguments, timeout_s=timeout_s)
        except actors.ControllerActorGone:
            self._actor = None
            raise


class _LogCopy(JobDirectory):
    """A local copy of the job's log files, updated whenever they are about to be read."""

    def __init__(self, path: Path, job: RayTransport, wanted: remote_files.LogFilter) -> None:
        super().__init__(path)
        self._job, self._wanted, self._offsets = job, wanted, dict[str, int]()

    def fetch(self) -> bool:
        name, job_id = self._job.name, self._job.order.job_id
        parts = remote_files.fetch_logs(name, job_id, self._wanted, self._offsets, self.logs)
        if self._wanted.since is None:
            # From now on also a generation that begins and ends between two looks.
            newest = max(generations(self), default=0)
            self._wanted = self._wanted._replace(since=newest)
        return parts

    def controller_alive(self) -> bool:
        ended = self._job.ended is not None
        self.fetch()
        return not ended


def _view(body: dict[str, Any]) -> JobView:
    return msgspec.convert(body, JobView)
