"""One job of a Ray cluster, as the commands ask about it.

Owns: asking its controller, or reading what it has left in the cluster's store. Must not: import
ray, or interpret; runtime/ and the renderers do.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.backends.ray import actor_calls, kv, logs
from holdfast.orchestrator.cli.client import RequestRefused
from holdfast.orchestrator.cli.display import Display
from holdfast.orchestrator.cli.render import FINISHED
from holdfast.orchestrator.errors import HoldfastError, UserError
from holdfast.orchestrator.hosts.local.file_journal import Snapshot
from holdfast.orchestrator.hosts.local.job_directory import JobDirectory
from holdfast.orchestrator.hosts.local.job_records import replay
from holdfast.orchestrator.hosts.ray import actor, gcs_journal
from holdfast.orchestrator.hosts.ray.actor import ControllerOrder
from holdfast.orchestrator.hosts.ray.host import checkpoint_path
from holdfast.orchestrator.protocol.manifest import Manifest
from holdfast.orchestrator.runtime.checkpoint_store.job_environment import job_environment
from holdfast.orchestrator.runtime.checkpoint_store.store import CheckpointStore
from holdfast.orchestrator.runtime.observe.view import JobView

from ..base import LogSelector, Response
from ..tempdir import scratch
from . import cleanup
from .requester import asks

FOLLOW_INTERVAL_S = 0.5
RECORD_S = 30.0
"""From a job's last view to its record."""


class RayJob:
    """A job that has a record."""

    def __init__(self, order: ControllerOrder, command: Callable[..., str]) -> None:
        self.order, self._command = order, command
        self._keys = kv.JobKeyValueStore(order.job)
        self._job = job_from_mapping(order.document, f"job {order.job}")
        self._actor: Any = None

    @property
    def name(self) -> str:
        return self.order.job

    @property
    def ttl_s(self) -> int | None:
        return self._job.spec.ttl_s_after_finished

    @property
    def ended(self) -> dict[str, Any] | None:
        """What its controller has written last of all."""
        data = self._keys.get(kv.ENDED)
        return json.loads(data) if data else None

    def view(self) -> JobView:
        if (ended := self.ended) is not None:
            return _view(ended["view"])
        try:
            answer = self._ask("perform", "status", {})
            if answer["ok"]:
                return _view(answer["body"])
        except actor_calls.ControllerActorGone:
            pass
        # It ends now, or has ended.
        if (ended := self.ended) is not None:
            return _view(ended["view"])
        return self.fold()

    def fold(self) -> JobView:
        """As of the last event in its journal."""
        chunks = gcs_journal.read(self._keys, self.name)
        records = [record for chunk in chunks for record in chunk.records]
        story = replay(self._job, records, chunks[0].snapshot if chunks else None)
        path = checkpoint_path(self.order, self._job.spec.checkpoint.path)
        view = story.view(story.now_ns, live=False, checkpoint_path=path)
        view.job_id, view.controller_alive = self.order.job_id, False
        return view

    def remarks(self, view: JobView) -> list[str]:
        if view.controller_alive or view.state in FINISHED:
            return []
        attach = self._command("run", "--attach", self.name)
        return [
            f"No controller answers: this is what the journal says. Training goes on without one, "
            f"for 15 minutes; `{attach}` starts one."
        ]

    def request(self, verb: str, **arguments: Any) -> Response:
        arguments.setdefault("by", asks())
        try:
            answer = self._ask("perform", verb, arguments)
        except actor_calls.ControllerActorGone as error:
            if (ended := self.ended) is None:
                if verb != "cancel":
                    raise
                detail = cleanup.cancel(self, str(arguments["by"]), str(error))
                return Response(f"job {self.name}: {detail}", {})
            state = ended["view"]["state"]
            raise RequestRefused(f"job {self.name}: has {state} ({error})") from None
        if not answer["ok"]:
            raise RequestRefused(f"job {self.name}: {answer['detail']}")
        return Response(answer["detail"], answer["body"])

    def watch(self, display: Display) -> JobView:
        """Show it until it has ended; its last view. Raises UserError when it could not begin."""
        seen: Any = -1
        ended = self.ended
        while ended is None:
            try:
                news = self._ask("watch", seen)
                seen, view = news["seen"], _view(news["view"])
                display.show(view)
                if view.state in FINISHED:
                    ended = self.ended
            except actor_calls.ControllerActorGone as error:
                # It ends only after it has written what it leaves behind.
                if (ended := self.ended) is None:
                    lost = isinstance(error, actor_calls.RuntimeEnvGone)
                    if lost or actor.find(self.name) is None:
                        raise actor_calls.ControllerActorGone(
                            self._without_controller(error)
                        ) from None
                    seen = -1
                    time.sleep(actor_calls.PAUSE_S)
        if ended["refusal"]:
            self._keys.clear()  # it never began: its name is free again
            was_asked_wrongly = ended.get("exit_code", UserError.exit_code) == UserError.exit_code
            raise (UserError if was_asked_wrongly else HoldfastError)(ended["refusal"])
        view = _view(ended["view"])
        display.show(view)
        return view

    def _without_controller(self, error: actor_calls.ControllerActorGone) -> str:
        cancel = f"`{self._command('cancel', self.name)}` ends the job"
        if isinstance(error, actor_calls.RuntimeEnvGone):
            return (
                f"job {self.name}: no controller could be started: the cluster could not build the "
                f"job's runtime env: {error}\nRay keeps what was uploaded for it only as long as "
                f"something of the job is there. {cancel}"
            )
        if not gcs_journal.begun(self._keys):
            return f"job {self.name}: its controller did not start ({error}); {cancel}"
        return (
            f"job {self.name}: its controller was removed from the cluster ({error}); training "
            f"goes on; `{self._command('run', '--attach', self.name)}` starts another, {cancel}"
        )

    # -- events and logs -----------------------------------------------------------------------
    def print_events(self, *, follow: bool, as_json: bool) -> None:
        from holdfast.orchestrator.cli.event_format import EventFormatter
        from holdfast.orchestrator.cli.output import stdout

        console, formatter, after, seen = stdout(), EventFormatter(), "", -1
        told = 0
        while True:
            # Asked before reading: what was written up to the job's end is then seen.
            over = self.ended is not None
            for chunk in gcs_journal.read(self._keys, self.name, after, history=True):
                if chunk.snapshot is not None and chunk.covered != told:
                    item = Snapshot(chunk.covered, chunk.snapshot)
                    formatter.print_snapshot(console, item, as_json=as_json)
                    told = chunk.covered
                for record in chunk.records:
                    formatter.print_record(console, record.now_ns, record.event, as_json=as_json)
                told += len(chunk.records)
                after = chunk.key
            if not follow or over:
                return
            try:
                seen = self._ask("watch", seen)["seen"]
            except actor_calls.ControllerActorGone:
                seen = -1
                time.sleep(actor_calls.PAUSE_S)

    def print_logs(self, wanted: LogSelector, *, follow: bool) -> None:
        from holdfast.orchestrator.cli.log_files import follow_files, print_files

        with scratch("holdfast-logs-") as place:
            copy = _Copy(place / self.name, self, logs.Which(*wanted))
            while copy.fetch():
                continue
            if follow:
                follow_files(copy, *wanted, FOLLOW_INTERVAL_S)
            else:
                print_files(copy, *wanted)

    # -- checkpoints and the end ---------------------------------------------------------------
    @contextmanager
    def storage(self) -> Iterator[str]:
        with job_environment(self._job):
            yield checkpoint_path(self.order, self._job.spec.checkpoint.path)

    def manifests(self) -> tuple[str, list[Manifest]] | None:
        with self.storage() as path:
            if "://" not in path and not Path(path).is_dir():
                return None  # a directory of the cluster's machines
            return path, CheckpointStore(path, self.name).manifests()

    def describe_deletion(self, keep: Path | None) -> str:
        state = self.view().state
        if keep is not None:
            raise UserError(
                "--keep-checkpoints: got a directory; expected none with --ray, where checkpoints "
                "stay where they are"
            )
        if state not in FINISHED:
            raise UserError(
                f"job {self.name}: got a job that is {state}; expected one that is "
                f"{', '.join(FINISHED[:-1])} or {FINISHED[-1]}; end it with "
                f"`{self._command('cancel', self.name)}`"
            )
        self._wait_for_record()
        return f"the record of {self.name} in the Ray cluster"

    def _wait_for_record(self) -> None:
        """The last that its controller writes: what is deleted before would come back. Raises
        HoldfastError when it does not come."""
        give_up = time.monotonic() + RECORD_S
        while self.ended is None:
            if actor.find(self.name) is None:
                return  # nobody writes it any more
            if time.monotonic() > give_up:
                raise HoldfastError(
                    f"job {self.name}: has ended, and its controller still gives back what it had; "
                    f"try again in a while"
                )
            time.sleep(actor_calls.PAUSE_S)

    def delete(self, keep: Path | None) -> list[str]:
        path = checkpoint_path(self.order, self._job.spec.checkpoint.path)
        if self.ended is None:  # its controller was ended before it had given everything back
            cleanup.end(self)
        self._keys.clear()
        return [f"its checkpoints stay in {path}, its logs in Ray's log directories"]

    def _ask(self, method: str, *arguments: Any) -> Any:
        # Found once: the way to it by name leads over the head.
        self._actor = self._actor or actor.find(self.name)
        if self._actor is None:
            raise actor_calls.ControllerActorGone(f"job {self.name}: there is no controller")
        try:
            return actor_calls.ask(self._actor, method, *arguments)
        except actor_calls.ControllerActorGone:
            self._actor = None
            raise


class _Copy(JobDirectory):
    """The job's log files here, brought up to date whenever they are about to be read."""

    def __init__(self, path: Path, job: RayJob, which: logs.Which) -> None:
        super().__init__(path)
        self._job, self._which, self._offsets = job, which, dict[str, int]()

    def fetch(self) -> bool:
        job = self._job
        return logs.fetch(job.name, job.order.job_id, self._which, self._offsets, self.logs)

    def controller_alive(self) -> bool:
        over = self._job.ended is not None
        self.fetch()
        return not over


def _view(body: dict[str, Any]) -> JobView:
    return msgspec.convert(body, JobView)
