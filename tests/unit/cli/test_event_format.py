"""`holdfast debug events`: events in words, and the events of a job whose journal was compacted."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from holdfast.orchestrator.api.v1alpha1 import job_from_mapping
from holdfast.orchestrator.cli import event_format
from holdfast.orchestrator.core import events
from holdfast.orchestrator.core.actions import LaunchGroup, RequestNodes
from holdfast.orchestrator.core.controller import Controller
from holdfast.orchestrator.hosts.local.job_records import read_view
from holdfast.orchestrator.protocol import messages
from holdfast.orchestrator.protocol.facts import Exit
from holdfast.orchestrator.runtime import snapshot
from holdfast.orchestrator.runtime.job_directory import Home, JobDirectory
from holdfast.orchestrator.runtime.job_loop import replay
from holdfast.orchestrator.runtime.observe.projection import JobProjection

from ..core import harness as core
from ..journal.files import claimed, live
from .conftest import Holdfast


def long_job(home: Path, keep_files: int) -> tuple[JobDirectory, core.Transcript]:
    """Many interruptions, a snapshot every 2,000 bytes."""
    budgets = {"infrastructure": {"restarts": 1000}}
    recovery = {"budgets": budgets, "badNodeStrikes": 1000}
    transcript = core.Transcript(core.spec(recovery=recovery)).started(step=0)
    for number in range(1, 8):
        transcript.exits(2, signal=9)
        transcript.all_stopped(10 * number)
        transcript.succeed(LaunchGroup)
        transcript.step(10 * number + 1)
    job = job_from_mapping(transcript.document)
    directory = Home(home).create(job, home)
    journal = claimed(directory.journal, bound_bytes=2000, keep_files=keep_files)
    controller, story = Controller(), JobProjection(job)
    for now_ns, event in transcript.journal:
        actions = controller.step(now_ns, event)
        story.observe(now_ns, event, actions, controller.state)
        journal.append(now_ns, event)
        if journal.full:
            asyncio.run(journal.compact(snapshot.encode(controller.state, story.memory)))
    asyncio.run(journal.commit())
    journal.close()
    return directory, transcript


def test_the_view_of_a_compacted_journal_is_that_of_all_events(tmp_path: Path) -> None:
    directory, transcript = long_job(tmp_path, keep_files=0)
    assert live(directory.journal).stat().st_size < 10_000
    view = read_view(directory)
    whole = replay(job_from_mapping(transcript.document), transcript.journal)
    expected = whole.view(transcript.now_ns, live=False, checkpoint_path=view.checkpoint_path)
    assert view.num_incidents == 7 and view.incidents == expected.incidents
    assert (view.ledger, view.recovery, view.incident_counts) == (
        expected.ledger, expected.recovery, expected.incident_counts,
    )  # fmt: skip


def test_events_begin_with_the_number_of_events_no_longer_kept(
    tmp_path: Path, holdfast: Holdfast
) -> None:
    long_job(tmp_path, keep_files=2)
    done = holdfast("debug", "events", "tale", "--home", tmp_path)
    first, *rest = done.out.splitlines()
    assert "older events no longer kept; the job was" in first
    assert len(rest) > 10 and "job job-1 submitted" not in done.out
    assert "action" not in " ".join(line for line in rest if "succeeded" in line)
    done = holdfast("debug", "events", "tale", "--home", tmp_path, "--json")
    documents = [json.loads(line) for line in done.out.splitlines()]
    assert documents[0]["facts_not_kept"] > 10 and "event" in documents[1]


def test_events_that_are_kept_are_printed_from_the_beginning(
    tmp_path: Path, holdfast: Holdfast
) -> None:
    _directory, transcript = long_job(tmp_path, keep_files=50)
    done = holdfast("debug", "events", "tale", "--home", tmp_path, "--json")
    documents = [json.loads(line) for line in done.out.splitlines()]
    assert len(documents) == len(transcript.journal)
    assert documents[0]["event"]["type"] == "job-submitted"


def test_every_durable_event_has_a_sentence() -> None:
    known = event_format._SENTENCES
    missing = [
        kind.__name__
        for kind in (*events.AnyEvent.__args__, *messages.Fact.__args__)
        if kind not in (events.FromNode, messages.Heartbeat, messages.StepCopied, *known)
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("exit", "text"),
    [
        (Exit(rank=2, signal=9), "worker 2 was killed by SIGKILL"),
        (
            Exit(rank=0, code=1, error_type="ValueError", error_message="no"),
            "code 1: ValueError: no",
        ),
        (Exit(rank=0, signal=9, out_of_memory=True), "SIGKILL, out of memory"),
    ],
)
def test_an_exit_is_described_in_words(exit: Exit, text: str) -> None:
    event = events.FromNode("node-0", messages.WorkerExited(generation=1, exit=exit))
    assert text in event_format.sentence(event)
    assert event_format.source(event) == "node-0"
    shown = event_format.document(event)
    assert (shown["type"], shown["node"], shown["generation"]) == ("worker-exited", "node-0", 1)


def printed(transcript: core.Transcript, *, as_json: bool = False) -> list[str]:
    output = io.StringIO()
    console, formatter = Console(file=output, width=1000), event_format.EventFormatter()
    for now_ns, event in transcript.journal:
        formatter.print_record(console, now_ns, event, as_json=as_json)
    formatter.end(console, as_json=as_json)
    return output.getvalue().splitlines()


def refused(times: int) -> core.Transcript:
    """A job that gets no node, however often it asks."""
    transcript = core.Transcript()
    transcript.submit()
    for number in range(times):
        if number:
            transcript.wait(3600)
        transcript.fail(transcript.last(RequestNodes), "0 of 8 GPU are free")
    return transcript


def test_a_repeated_refusal_is_printed_once_with_how_often_it_came() -> None:
    lines = printed(refused(9))
    assert sum("0 of 8 GPU are free" in line for line in lines) == 1, lines
    assert lines[-1].endswith("failed 8 more times like that"), lines
    assert len(lines) < 8, lines


def test_another_refusal_and_a_success_are_printed() -> None:
    transcript = refused(5)
    transcript.wait(3600)
    transcript.fail(transcript.last(RequestNodes), "the head does not answer")
    transcript.wait(3600)
    transcript.succeed(RequestNodes)
    lines = printed(transcript)
    at = next(i for i, line in enumerate(lines) if "4 more times like that" in line)
    assert "failed: the head does not answer" in lines[at + 1]
    assert any("succeeded" in line for line in lines[at + 2 :]), lines


def test_json_has_every_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    printed(refused(9), as_json=True)
    assert capsys.readouterr().out.count("0 of 8 GPU are free") >= 9
