"""`holdfast debug stacks | profile`: look into the running workers of a job. They train on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import HoldfastError, UserError
from ..options import JobArgument, JsonOption, Target, with_target
from ..output import plural, print_json, size, stderr, stdout

if TYPE_CHECKING:
    from ...protocol.rank_stacks import CollectiveSpan, RankStacks

SUFFIXES = {".svg": "flamegraph", ".json": "speedscope"}
DOING = {
    "peers": "in a collective",
    "device": "waiting for the device",
    "reads": "reading data",
    "compiles": "compiling",
    "engine": "in the backward pass",
    "staging": "staging a checkpoint",
}


def register(app: typer.Typer, panel: str) -> None:
    for command in (stacks, profile):
        app.command(rich_help_panel=panel)(with_target(command))


def stacks(
    job: JobArgument,
    rank: Annotated[
        list[int] | None, typer.Option("--rank", min=0, help="Only this rank; may be repeated.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Ask all ranks, not only the first 512.")
    ] = False,
    as_json: JsonOption = False,
    *,
    target: Target,
) -> None:
    """Print what each rank does now: the stack of its main thread, and its newest collectives.

    The innermost call comes first. Ranks with the same stack share an entry. No process is paused.

    Examples: `holdfast debug stacks my-job`, `holdfast debug stacks my-job --rank 0 --rank 7`
    """
    answer = target.find(job).request("stacks", ranks=sorted(set(rank or ())), all=every)
    if as_json:
        print_json({"job": job, **answer.body})
        return
    console = stdout()
    for line in stack_lines(answer.body):
        console.print(line, soft_wrap=True)
    for remark in _remarks(answer.body):
        stderr().print(remark, style="yellow", soft_wrap=True)


def stack_lines(body: dict[str, Any]) -> list[str]:
    """The answer to `stacks` as text."""
    import msgspec

    from ...protocol.rank_stacks import RankStacks, rank_list

    lines = []
    for entry in msgspec.convert(body["stacks"], list[RankStacks]):
        doing = [entry.state, DOING.get(entry.activity, "")]
        head = ", ".join(part for part in doing if part)
        lines.append(f"{rank_list(entry.ranks)}:" + (f" {head}" if head else ""))
        lines += [re.sub(r"/\S*/(site|dist)-packages/", "", f"  {frame}") for frame in entry.frames]
        lines += [f"  {entry.problem}"] if entry.problem else []
        lines += [f"  {_collective(entry, span)}" for span in entry.collectives]
        lines.append("")
    return lines[:-1]


def _collective(entry: RankStacks, span: CollectiveSpan) -> str:
    number = f"{span.first}" if span.first == span.last else f"{span.first} to {span.last}"
    done = {0: "not done", span.num_ranks: "done"}.get(span.num_done)
    where = f" of {span.num_ranks} of the ranks" if span.num_ranks < len(entry.ranks) else ""
    state = done or f"done on {span.num_done} of {span.num_ranks} ranks"
    return f"newest collective of group {span.group}{where}: {span.operation} {number}, {state}"


def _remarks(body: dict[str, Any]) -> list[str]:
    from ...protocol.rank_stacks import rank_list

    remarks = [
        f"{rank_list(silent['ranks'])} on {silent['node']}: no answer: {silent['why']}"
        for silent in body["unanswered"]
    ]
    if body["not_asked"]:
        remarks.append(f"{plural(body['not_asked'], 'more rank')} not asked: --all, or --rank N")
    if body["left_out"]:
        remarks.append(
            f"{plural(body['left_out'], 'rank')} left out, the answer is too large: --rank N"
        )
    return remarks


def profile(
    job: JobArgument,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Rank of the worker.")] = 0,
    seconds: Annotated[
        float, typer.Option("--seconds", min=1, max=120, help="How long to record.")
    ] = 10.0,
    rate: Annotated[
        int, typer.Option("--rate", min=1, max=1000, help="Samples per second.")
    ] = 100,
    idle: Annotated[
        bool, typer.Option("--idle", help="Count waiting threads too, for example for peers.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE",
            help="FILE.svg is a flame graph, FILE.json a profile for speedscope.app.",
            show_default="JOB-rank-N.svg",
        ),
    ] = None,
    as_json: JsonOption = False,
    *,
    target: Target,
) -> None:  # fmt: skip
    """Record with py-spy where one rank spends its time, and write the file here.

    Training continues: py-spy never pauses the process.

    Example: `holdfast debug profile my-job --seconds 10 -o rank0.svg`
    """
    import base64
    import zlib

    from ..targets.remote_job import expect_not_ended

    file = out or Path(f"{job}-rank-{rank}.svg")
    form = SUFFIXES.get(file.suffix)
    if form is None:
        raise UserError.of("--output", str(file), "a name that ends with .svg or .json")
    live = target.find(job)
    expect_not_ended(live.view(), "profile")
    if not as_json:
        stderr().print(f"recording rank {rank} for {seconds:g} s", soft_wrap=True)
    answer = live.request("profile", format=form, rank=rank, seconds=seconds, rate=rate, idle=idle)
    content = zlib.decompress(base64.b64decode(answer.body["content"]))
    try:
        file.write_bytes(content)
    except OSError as error:
        raise HoldfastError(f"--output: {file} cannot be written: {error.strerror}") from None
    if as_json:
        fields = {name: value for name, value in answer.body.items() if name != "content"}
        print_json({"job": job, "file": str(file), "bytes": len(content), **fields})
        return
    typer.echo(f"job {job}: {answer.detail}: {file} ({size(len(content))})")
