"""Requests to the controller of a local job: an answer, a refusal, and no controller."""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.backends.local import node_registry
from holdfast.orchestrator.backends.local.processes import Identity, identify
from holdfast.orchestrator.cli.output import without_controller
from holdfast.orchestrator.cli.targets.local import LocalTransport
from holdfast.orchestrator.cli.targets.remote_job import ControllerGone, RemoteJob, RequestRefused
from holdfast.orchestrator.errors import UserError
from holdfast.orchestrator.protocol.messages import Reply, Request, decode, encode, frame_length
from holdfast.orchestrator.runtime.control_api import view_body
from holdfast.orchestrator.runtime.job_directory import Home, JobDirectory
from holdfast.orchestrator.runtime.observe.view import JobView
from tests.documents import job_document
from tests.unit.runtime.harness import make_job

JOB = job_document("demo", {"entrypoint": {"script": "train.py"}})


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    return Home(tmp_path).create(job_from_mapping(JOB), tmp_path)


@contextmanager
def controller(directory: JobDirectory, answer: bytes) -> Iterator[list[Request]]:
    """A controller that holds the lock and answers one request with these bytes."""
    received: list[Request] = []
    with socket.create_server(("127.0.0.1", 0)) as server, directory.locked():
        directory.write_controller(*server.getsockname()[:2], 0)

        def serve() -> None:
            link, _ = server.accept()
            with link:
                length = frame_length(link.recv(4, socket.MSG_WAITALL))
                request = decode(link.recv(length, socket.MSG_WAITALL))
                assert isinstance(request, Request)
                received.append(request)
                link.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield received
        thread.join(timeout=10)


def ask(directory: JobDirectory, verb: str, **arguments: object) -> Reply:
    return RemoteJob(LocalTransport(directory)).request(verb, **arguments)


def test_a_request_carries_the_token_and_the_user(directory: JobDirectory) -> None:
    with controller(directory, encode(Reply(ok=True, body={"a": 1}))) as received:
        assert ask(directory, "resize", nodes=2).body == {"a": 1}
    request = received[0]
    assert request.token == directory.token()
    assert request.verb == "resize"
    assert request.arguments["nodes"] == 2
    assert "by" in request.arguments


def test_a_refusal_is_the_users_error(directory: JobDirectory) -> None:
    refusal = Reply(ok=False, detail="nodes: got 9; expected 1 to 2")
    with controller(directory, encode(refusal)), pytest.raises(RequestRefused) as raised:
        ask(directory, "resize", nodes=9)
    assert raised.value.exit_code == 2
    assert "nodes: got 9" in str(raised.value)


def test_no_controller_says_how_to_take_the_job_over(directory: JobDirectory) -> None:
    with pytest.raises(ControllerGone) as raised:
        ask(directory, "suspend")
    assert raised.value.exit_code == 1
    assert "holdfast attach demo" in str(raised.value)


@pytest.mark.parametrize("answer", [b"", b"\xff\xff\xff\xff", b"\0\0\0\1x"])
def test_a_controller_with_invalid_answers_counts_as_gone(
    directory: JobDirectory, answer: bytes
) -> None:
    with controller(directory, answer), pytest.raises(ControllerGone):
        ask(directory, "status")


def test_a_port_without_a_listener_counts_as_gone(directory: JobDirectory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = server.getsockname()[:2]
    with directory.locked():
        directory.write_controller(*place, 0)
        with pytest.raises(ControllerGone):
            ask(directory, "status")


def test_checking_for_a_controller_does_not_take_the_lock(directory: JobDirectory) -> None:
    directory.controller_alive()
    with (directory.path / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_without_a_controller_a_remark_says_whether_training_goes_on(
    directory: JobDirectory,
) -> None:
    def remark(agent: Identity) -> str:
        known = node_registry.LocalNodeRegistry(agents={"node-0": agent})
        node_registry.save(directory.nodes_file, known)
        (line,) = RemoteJob(LocalTransport(directory)).remarks(
            JobView(name="demo", state="running", controller_alive=False)
        )
        assert "`holdfast attach demo`" in line
        return line

    here = identify(os.getpid())
    assert here is not None
    assert "The agents train without one for 15 min 00 s: take the job over" in remark(here)
    # After a restart of the machine another process has the pid.
    assert "no node of the job is left" in remark(Identity(here.pid, here.start_ticks + 1))


@pytest.mark.parametrize(
    ("absence", "text"), [("never", "without limit"), (7200, "for 2 h 00 min"), ("auto", "15 min")]
)
def test_how_long_training_goes_on_is_that_of_the_spec(absence: str | int, text: str) -> None:
    job = make_job(recovery={"controllerAbsenceSeconds": absence})
    assert text in without_controller(job)


def test_without_a_controller_and_with_a_damaged_record_of_nodes_the_view_is_shown(
    directory: JobDirectory,
) -> None:
    (directory.path / "nodes.json").write_bytes(b"")
    view = JobView(name="demo", state="running", controller_alive=False)
    (line,) = RemoteJob(LocalTransport(directory)).remarks(view)
    assert "this view comes from the journal" in line
    assert "nodes.json: cannot be read" in line and "damaged" in line


def test_a_job_that_runs_is_not_deleted(directory: JobDirectory) -> None:
    running = Reply(ok=True, body=view_body(JobView(name="demo", state="running")))
    text = "job demo: is running; only a job that is succeeded, failed or cancelled can be deleted"
    with controller(directory, encode(running)), pytest.raises(UserError, match=text):
        RemoteJob(LocalTransport(directory)).describe_deletion(None)


class EndedTransport(LocalTransport):
    """A job without a controller of which only the record is left, and whose code is uploaded."""

    def recorded(self) -> JobView:
        return JobView(name="demo", state="cancelled")

    def has_ended(self) -> bool:
        return True

    def check_code(self) -> bool:
        return True


def test_a_job_that_has_ended_takes_no_request_and_no_code(directory: JobDirectory) -> None:
    job = RemoteJob(EndedTransport(directory))
    assert job.view().state == "cancelled"
    with pytest.raises(UserError, match="job demo: was cancelled; nothing to break"):
        job.request("chaos", kind="kill-worker")
    with pytest.raises(UserError, match="job: got cancelled; expected a job that has not ended"):
        job.again(None)
