"""The `holdfast` and `kubectl holdfast` programs: their commands, and how errors end them.

Exit codes: 0 success, 1 failure, 2 invalid usage or job spec, 130 interrupted. Nothing heavy is
imported before a command needs it: `holdfast --help` must be fast.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from .. import limits
from ..errors import HoldfastError, Problem
from ..parts import part
from .commands import chaos, checkpoint, control, inspect, ranks, run, spec
from .options import PLUGIN, complete
from .output import discard_output, stderr

# Newer versions of typer bundle click, older ones import it; in both, these are the bases of the
# one usage error that typer exports.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
CLICK_EXCEPTION: type[Exception] = typer.BadParameter.__mro__[2]
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a full disk, whichever file is on it: standard output or one of a command."""
WRITABLE = "a file on a disk with space and quota left"

app = typer.Typer(
    name="holdfast",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


EPILOG = """
Quick start:

    holdfast run examples/stdlib-bytes.yaml    train on this machine and watch
    holdfast debug kill-node stdlib-bytes      meanwhile: inject a failure
    holdfast status stdlib-bytes --report      see what the failure cost

Local jobs are stored in ~/.holdfast, --home or $HOLDFAST_HOME. --kubernetes (with -n,
--context, --kubeconfig) and --ray select a cluster; `kubectl holdfast` implies --kubernetes.
Exit codes: 0 success, 1 failure, 2 invalid usage or job spec, 130 interrupted.
"""
GROUPS = {
    "spec": "Before a job starts: validate, preflight, plan, and the schema of its spec.",
    "debug": "Look into a running job (events, stacks, profile), or break it on purpose "
    "(kill-worker, hang-worker, kill-node).",
}
ELSEWHERE = {
    "chaos": "debug kill-worker", "describe": "status JOB", "get": "status", "list": "status",
    "ls": "status", "ps": "status", "report": "status JOB --report", "stop": "cancel",
}  # fmt: skip
"""Command of another tool, or a word of our pages -> ours."""


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    import platform
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    typer.echo(f"holdfast {limits.RELEASE}")
    try:
        typer.echo(f"torch {installed('torch')}")
    except PackageNotFoundError:
        typer.echo("torch not installed")
    typer.echo(f"python {platform.python_version()}")
    raise typer.Exit


@app.callback(epilog=EPILOG)
def holdfast(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            "-V",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of Holdfast, torch and Python, and exit.",
        ),
    ] = False,
) -> None:
    """Elastic multi-node PyTorch training that survives lost workers, nodes and controllers."""


def _group(name: str, panel: str, *registers: Callable[[typer.Typer, str], None] | None) -> None:
    """A group of commands; the first paragraph of its help is a line on the first page."""
    group = typer.Typer(no_args_is_help=True, help=GROUPS[name])
    for register in filter(None, registers):
        register(group, "Commands")
    app.add_typer(group, name=name, rich_help_panel=panel)


run.register(app, "Run")
inspect.register(app, "Look")
if ui := part("command ui"):
    ui(app, "Look")
control.register(app, "Change")
app.add_typer(checkpoint.app, name="checkpoint", rich_help_panel="More")
_group("spec", "More", spec.register, part("command preflight"), part("command plan"))
_group("debug", "More", inspect.register_events, ranks.register, chaos.register)
if operator := part("command operator"):
    operator(app, "")


def fail(text: str, code: int) -> NoReturn:
    """Print one paragraph on stderr, without a traceback, and exit."""
    console = stderr()
    console.print("error: ", style="bold red", end="")
    console.print(text, markup=False, soft_wrap=True)
    raise SystemExit(code)


def _command_paths() -> dict[str, str]:
    """Name of each command -> how it is called; groups' commands with their group."""
    root: Any = typer.main.get_command(app)
    inner = {name: f"{group} {name}" for group in GROUPS for name in root.commands[group].commands}
    return inner | {name: name for name in root.commands}


def _usage(error: Any) -> NoReturn:
    """Report a usage error of typer: a missing argument, an unknown option, an invalid number."""
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.format_message())
        raise SystemExit(2)
    context = getattr(error, "ctx", None)
    where = context.command_path if context else "holdfast"
    text = error.format_message()
    text += "." * (text[-1] not in ".?")
    if type(error).__name__ == "NoSuchOption" and where.endswith((" run", " submit")):
        text += " Arguments of a script come after --."
    unknown = getattr(error, "option_name", "").removeprefix("--")
    if command := re.search(r"command '([^']+)'", text):
        unknown = command[1]
    if path := (_command_paths() | ELSEWHERE).get(unknown):
        text = f"{text.partition(' Did you mean')[0]} Write `holdfast {path}`."
    fail(f"{text} See `{where} --help`." if isinstance(error, USAGE_ERROR) else text, 2)


def _prepare_streams() -> None:
    """Replace characters that the output's encoding lacks, and open what a daemon has closed: any
    other file or socket would get its number, and our output."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest one that is free
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r+"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def main(
    arguments: list[str] | None = None, program: str = "holdfast", default_target: str | None = None
) -> NoReturn:
    """Entry point of `holdfast`. `arguments` default to the command line, `program` is the name
    that help texts show, `default_target` applies when no option chooses a target."""
    _prepare_streams()
    try:
        _run(sys.argv[1:] if arguments is None else arguments, program, default_target)
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        discard_output()
        fail(str(Problem(error.filename or "output", str(error.strerror), WRITABLE)), 1)


def _run(arguments: list[str], program: str, default_target: str | None) -> NoReturn:
    try:
        words = complete(arguments)
        result = app(args=words, prog_name=program, standalone_mode=False, obj=default_target)
        sys.stdout.flush()
    except HoldfastError as error:
        fail(str(error), error.exit_code)
    except CLICK_EXCEPTION as error:
        _usage(error)
    except (typer.Abort, KeyboardInterrupt):
        raise SystemExit(130) from None
    raise SystemExit(result if isinstance(result, int) else 0)


KUBECTL_OPTIONS = ("-n", "--namespace", "--context", "--kubeconfig")
"""Each takes a value."""


def kubectl_main(arguments: list[str] | None = None) -> NoReturn:
    """Entry point of `kubectl-holdfast`, which kubectl runs for `kubectl holdfast`."""
    app._add_completion = False  # kubectl completes its own words
    main(reordered(arguments or sys.argv[1:]), program="kubectl holdfast", default_target=PLUGIN)


def reordered(arguments: list[str]) -> list[str]:
    """Move kubectl's options behind the verb, where our commands expect them: kubectl allows
    `kubectl holdfast -n team status`."""
    leading: list[str] = []
    rest = list(arguments)
    while rest:
        name, equals, _value = rest[0].partition("=")
        if name in KUBECTL_OPTIONS and (equals or len(rest) > 1):
            count = 1 if equals else 2
        elif rest[0].startswith("-n") and len(rest[0]) > 2:
            count = 1
        else:
            break
        leading += rest[:count]
        del rest[:count]
    at = rest.index("--") if "--" in rest else len(rest)
    return [*rest[:at], *leading, *rest[at:]]


if __name__ == "__main__":
    main()
