"""Output about a job: the live display, plain lines, status and report."""

from __future__ import annotations

import io
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from rich.console import Console

from holdfast.orchestrator.cli import output
from holdfast.orchestrator.cli.display import LineDisplay, LiveDisplay, make_display
from holdfast.orchestrator.cli.render import checkpoints, outcome, status, throughput
from holdfast.orchestrator.cli.report import main_thread, report
from holdfast.orchestrator.runtime.observe.view import CheckpointView, JobView, NodeView

from .fixtures import NS, T0, make_incident, make_view

TraceFunction = Callable[[FrameType, str, object], object]


def console(*, terminal: bool = False) -> Console:
    made = output.console(Terminal() if terminal else io.StringIO())
    made.width = 200
    return made


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def text_of(to: Console) -> str:
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def show(*views: JobView) -> list[str]:
    """The lines that a file gets, without their time of day."""
    to = console()
    with LineDisplay(to, interval_s=5) as display:
        for view in views:
            display.show(view)
    return [line.partition("  ")[2] for line in text_of(to).splitlines()]


def test_a_terminal_gets_the_live_display_and_a_file_gets_lines() -> None:
    assert isinstance(make_display(console(terminal=True)), LiveDisplay)
    assert isinstance(make_display(console()), LineDisplay)


def test_progress_is_printed_every_few_seconds_only() -> None:
    def at(seconds: float, step: int) -> JobView:
        return make_view(step=step, now_ns=T0 + int(seconds * NS))

    lines = show(at(0, 1), at(1, 2), at(2, 3), at(5.5, 9), at(6, 10))
    steps = [line.split(",")[0] for line in lines if " of 100 steps" in line]
    assert steps == ["2 of 100 steps", "10 of 100 steps"]


def test_nothing_is_printed_twice() -> None:
    assert show(make_view(), make_view()) == show(make_view())


def test_an_incident_is_printed_when_it_opens_and_when_it_is_resolved() -> None:
    opened = make_view(incidents=[make_incident(over=False)], state="recovering")
    closed = make_view(incidents=[make_incident()], generation=2)
    lines = show(make_view(), opened, opened, closed, closed)
    printed = [line for line in lines if line.startswith("incident")]
    assert printed == [
        "incident 1: worker 2 on node-1 was killed by SIGKILL (injected)",
        "incident 1 resolved: next step after 0.67 s, 1 step lost, restored from memory",
    ]
    assert any(line.startswith("generation 2: 4 workers") for line in lines)


def test_changes_made_in_place_to_a_view_are_printed() -> None:
    to = console()
    view = make_view(nodes=[])
    with LineDisplay(to) as display:
        display.show(view)
        view.nodes.append(NodeView(name="node-7", state="joining"))
        view.state = "suspended"
        display.show(view)
    assert "node-7 joining" in text_of(to)
    assert "suspended" in text_of(to)


def test_a_committed_checkpoint_is_printed_once() -> None:
    after = make_view(checkpoints=[CheckpointView(step=49, generation=1)])
    lines = show(make_view(), after, after)
    assert lines.count("checkpoint after 50 steps committed") == 1


def test_the_live_display_shows_everything() -> None:
    to = console(terminal=True)
    with LiveDisplay(to) as display:
        for step in range(3):
            display.show(make_view(step=step, loss=3.0 - step, incidents=[make_incident()]))
        display.note("a remark")
    shown = text_of(to)
    for part in ("3 of 100 steps", "12.3k tokens/s", "4 workers, HSDP", "node-0", "SIGKILL", "█▅▁",
                 "memory: after 42 steps; storage: after 40 steps (40.0 MiB)",
                 "remark"):  # fmt: skip
        assert part in shown


def test_throughput_is_shown_of_the_job_and_of_one_gpu_where_there_are_any() -> None:
    on_cpus = make_view(tokens_per_s=12_300.0, world_size=4, gpus_per_worker=0)
    assert list(throughput(on_cpus)) == ["12.3k tokens/s"]
    on_gpus = make_view(tokens_per_s=12_300.0, world_size=4, gpus_per_worker=1, mfu=0.412)
    assert list(throughput(on_gpus)) == ["12.3k tokens/s", "3.1k per GPU", "MFU 41.2%"]
    assert any("12.3k tokens/s, 3.1k per GPU, MFU 41.2%" in line for line in report_lines(on_gpus))


def test_of_a_script_its_own_checkpoint_is_shown() -> None:
    for path, shown in (("/o/ckpt.pt", "/o/ckpt.pt"), ("", "no checkpoint yet")):
        view = make_view(own_checkpoint=path, checkpoints=[])
        assert checkpoints(view) == shown
        assert "no checkpoint in storage" not in "\n".join(map(str, report_lines(view)))


def test_status_of_a_job_that_has_not_started() -> None:
    to = console()
    to.print(status(JobView(name="new")))
    assert "pending" in text_of(to)
    assert "memory: none; storage: none" in text_of(to)


def test_a_table_leaves_columns_out_and_wraps_texts_but_cuts_nothing() -> None:
    to = Console(file=io.StringIO(), width=40)
    table = output.columns("strategy", "mesh", "memory", "why", leaves_out=("mesh",))
    table.add_row("HSDP, this job", "replicate 4", "62.2 GiB", "longer than there is room for it")
    to.print(table)
    assert "HSDP, this job   62.2 GiB   longer than" in text_of(to) and "MESH" not in text_of(to)


def report_lines(view: JobView) -> Iterator[str]:
    to = console()
    to.print(report(view))
    yield from (line.strip() for line in text_of(to).splitlines())


def test_the_report_names_no_command_for_checkpoints_that_cannot_be_read_from_here() -> None:
    view = make_view(state="succeeded", finished_ns=T0 + 71 * NS)
    assert "export it with: holdfast checkpoint export demo DIRECTORY" in list(report_lines(view))
    to = console()
    to.print(report(view, can_read=False))
    assert "export it where that path is mounted: holdfast checkpoint export PATH" in text_of(to)


def test_the_report_names_the_result_of_a_recipe_that_writes_one() -> None:
    view = make_view(state="succeeded", finished_ns=T0 + 71 * NS, result="tuned")
    lines = list(report_lines(view))
    assert "the trained model is in tuned" in lines
    assert not any("export" in line for line in lines)


def test_the_report_says_how_it_ended_and_what_each_incident_cost() -> None:
    view = make_view(state="succeeded", incidents=[make_incident()], finished_ns=T0 + 71 * NS)
    lines = list(report_lines(view))
    assert lines[0] == "demo  succeeded after 1 min 11 s"
    assert "goodput 90.9% of the time since the first launch" in lines
    for part in (
        "culprit: rank 2 on node-1",
        "evidence: exit by signal 9",
        "phases: stop 0.05 s, launch 0.02 s, first-step 0.60 s",
        "checkpoint after 40 steps (40.0 MiB) in /somewhere/checkpoints",
    ):
        assert part in lines
    bars = [line for line in lines if "█" in line]
    assert bars[0].startswith("productive")
    assert "90.9%" in bars[0]


def test_the_report_of_a_failed_job_has_its_traceback_and_stacks() -> None:
    first = make_incident(stacks={"2": "File x", "3": "File y"}, traceback="ValueError: no")
    again = make_incident(number=2, traceback="ValueError: no")
    last = make_incident(number=3, traceback="Traceback: boom")
    view = make_view(state="failed", traceback="Traceback: boom", incidents=[first, again, last])
    text = "\n".join(report_lines(view))
    assert "stack of rank 2, innermost call first:" in text
    assert "stack of rank 3" not in text
    assert "(--stacks shows the stacks of 1 other rank)" in text
    assert text.count("ValueError: no") == 1, "the same traceback is printed once"
    assert "traceback: as in incident 1" in text
    assert text.count("Traceback: boom") == 1
    assert "traceback: at the end of this report" in text


PY_SPY = """Process 866: python -m holdfast.workers.agent.process.node_launcher
Python v3.11.7
Thread 867 (idle): "holdfast-pulse"
    wait (threading.py:331)
Thread 866 (idle): "MainThread"
    all_gather (torch/distributed/x.py:1)
""" + "".join(f"    frame_{n} (train.py:{n})\n" for n in range(20))
FAULTHANDLER = """Thread 0x1 (most recent call first):
  File "threading.py", line 331 in wait

Current thread 0x2 (most recent call first):
  File "train.py", line 7 in step
"""


def test_only_the_innermost_frames_of_the_culprits_main_thread_are_shown() -> None:
    view = make_view(incidents=[make_incident(stacks={"2": PY_SPY, "3": "File y"})])
    lines = list(report_lines(view))
    begin = lines.index("stack of rank 2, innermost call first:")
    assert lines[begin + 1] == "all_gather (torch/distributed/x.py:1)"
    assert lines[begin + 15] == "frame_13 (train.py:13)"
    assert lines[begin + 16] == "(--stacks shows 6 more frames and the stacks of 1 other rank)"
    assert "wait (threading.py:331)" not in lines
    assert main_thread(FAULTHANDLER) == ['  File "train.py", line 7 in step']
    to = console()
    to.print(report(view, stacks=True))
    for part in ("frame_19", "holdfast-pulse", "stack of rank 3:\n", "File y"):
        assert part in text_of(to)


def test_a_suspected_hang_is_printed_once_and_the_rank_that_it_names_then() -> None:
    to, first = console(), "no progress: rank 0 has begun no collective for {} s"
    display = LineDisplay(to)
    display.show(make_view(state="running", reason="all workers run"))
    for reason in (
        first.format(4.0),
        "no progress: rank 1 is in no collective at train.py, line 7, on node-0",
        first.format(9.0),
        "no progress: rank 1 is in no collective at train.py, line 7, on node-0",
    ):
        display.show(make_view(state="running", reason=reason))
    printed = [line for line in text_of(to).splitlines() if "no progress" in line]
    assert len(printed) == 2 and "4.0 s" in printed[0] and "rank 1" in printed[1]


def test_an_incident_names_the_one_that_superseded_it() -> None:
    first = make_incident(over=False, overtaken_by=2)
    view = make_view(state="failed", incidents=[first, make_incident(number=2, over=False)])
    lines = [line for line in report_lines(view) if line.startswith("outcome")]
    assert lines == ["outcome: superseded by incident 2", "outcome: the job ended"]


def test_the_end_of_an_incident_is_unknown_if_the_script_shows_no_progress() -> None:
    unknown: dict[str, Any] = {"no_steps": True, "steps_lost": None, "restored_from": "nothing"}
    incident = make_incident(over=False, **unknown)
    incident.seconds = {"stop": 0.05, "place": 0.0, "launch": 0.62}
    lines = list(report_lines(make_view(incidents=[incident], step=-1)))
    assert "outcome: all workers run after 0.67 s, when training continued is unknown" in lines
    few = make_incident(steps_lost=0, steps_lost_at_least=True)
    assert outcome(few) == "next step after 0.67 s, restored from memory"
    inferred = make_incident(inferred=True, **unknown)
    (line,) = [x for x in report_lines(make_view(incidents=[inferred])) if "outcome" in x]
    assert line == "outcome: collectives again (no steps are reported) after 0.67 s"
    assert "no steps are reported: time is productive, except loading, hangs and restarts" in lines


@pytest.mark.parametrize(
    "lost", [{"steps_lost": None}, {"steps_lost": 40, "steps_lost_at_least": True}]
)
def test_goodput_is_an_upper_bound_if_steps_were_lost_that_are_not_counted(
    lost: dict[str, Any],
) -> None:
    lines = list(report_lines(make_view(**lost)))
    assert "goodput at most 90.9% of the time since the first launch" in lines


def test_text_of_the_job_is_never_taken_for_markup() -> None:
    view = make_view(reason="[red]not a colour[/red]", traceback="[bold]x[/bold] [/]")
    to = console()
    to.print(report(view))
    assert "[red]not a colour[/red]" in text_of(to)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.831, "0.83 s"),
        (42.04, "42.0 s"),
        (185, "3 min 05 s"),
        (7620, "2 h 07 min"),
        (9e4, "1 d 1 h"),
    ],
)
def test_durations_have_units(seconds: float, text: str) -> None:
    assert output.duration(seconds) == text


def test_sizes_and_counts_have_units() -> None:
    assert output.size(512) == "512 B"
    assert output.size(3 * 2**30) == "3.0 GiB"
    assert output.count(950) == "950"
    assert output.count(8.03e9) == "8.0B"


def test_a_sparkline_keeps_its_width() -> None:
    assert output.sparkline([1.0]) == ""
    assert output.sparkline([1.0, 2.0, float("nan")]) == "▁█"
    assert len(output.sparkline([float(n) for n in range(1000)], width=40)) == 40


def test_a_loss_that_is_not_a_number_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for write in (output.print_json, output.print_json_line):
        write({"a": make_view(loss=float("nan")), 7: [float("inf")]})
        printed = json.loads(capsys.readouterr().out, parse_constant=refuse)
        assert printed["a"]["loss"] is None and printed["7"] == [None]


def interrupted(display: LineDisplay, at: int) -> bool:
    """Raise a KeyboardInterrupt at call `at` within `show`; returns whether there were so many."""
    left = at

    def trace(_frame: FrameType, event: str, _arg: object) -> TraceFunction | None:
        nonlocal left
        left -= event in ("call", "return")
        if left:
            return trace
        sys.settrace(None)
        raise KeyboardInterrupt

    before = sys.gettrace()
    try:
        sys.settrace(trace)
        display.show(make_view(state="running"))
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_note_after_an_interruption_is_shown_wherever_the_interruption_came() -> None:
    for at in itertools.count(1):
        to = console()
        with LineDisplay(to) as display:
            if not interrupted(display, at):
                break
            display.note("The job goes on")
        assert text_of(to).endswith("The job goes on\n"), f"interrupted at {at}"
    assert at > 10
