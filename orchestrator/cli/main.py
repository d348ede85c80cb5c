"""The `holdfast` command: its verbs, their help, and what becomes of errors.

Owns: names, help texts, exit codes. Must not: import anything heavy before a command needs it
(`holdfast --help` must feel instant), or do a command's work; the modules in commands/ do.

Exit codes: 0 done, 1 what was asked for failed, 2 it was asked for wrongly, 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import typer

from .commands import chaos, checkpoint, control, inspect, operator, run, spec, submit
from .options import complete
from .targets.ray.stream_mux import mark_if_asked

# Newer typer carries a click of its own, older typer uses the real one; either way these are the
# bases of the one usage error that typer exports.
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
CLICK_EXCEPTION: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="holdfast",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


EPILOG = """
Start here:

    holdfast run examples/stdlib-bytes.yaml    train on this machine and watch
    holdfast chaos kill-node stdlib-bytes      meanwhile: rehearse a failure
    holdfast report stdlib-bytes               what it cost

Jobs live under ~/.holdfast, or --home, or $HOLDFAST_HOME; with --kubernetes (and
-n, --context, --kubeconfig) in a cluster. `kubectl holdfast VERB` is the same.
Exit codes: 0 done, 1 failed, 2 asked for wrongly, 130 interrupted.
"""


@app.callback(epilog=EPILOG)
def holdfast() -> None:
    """Elastic multi-node PyTorch training that survives lost workers, nodes and controllers."""


for module, panel in {
    run: "Run",
    submit: "Run",
    inspect: "Look",
    control: "Change",
    spec: "Prepare",
    operator: "Cluster",
}.items():
    module.register(app, panel)
app.add_typer(chaos.app, name="chaos", rich_help_panel="Rehearse")
app.add_typer(checkpoint.app, name="checkpoint", rich_help_panel="Look")


@app.command(rich_help_panel="Prepare")
def version() -> None:
    """Print the versions of Holdfast, Python and torch."""
    import platform
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    for name in ("holdfast", "torch"):
        try:
            typer.echo(f"{name} {installed(name)}")
        except PackageNotFoundError:
            typer.echo(f"{name} not installed")
    typer.echo(f"python {platform.python_version()}")


def fail(text: str, code: int) -> NoReturn:
    """One paragraph on stderr, no traceback."""
    from .output import stderr

    console = stderr()
    console.print("error: ", style="bold red", end="")
    console.print(text, markup=False, soft_wrap=True)
    raise SystemExit(code)


def _usage(error: Any) -> NoReturn:
    """typer's own complaints: a missing argument, an unknown option, a number that is none."""
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.format_message())
        raise SystemExit(2)
    context = getattr(error, "ctx", None)
    where = context.command_path if context else "holdfast"
    text = error.format_message().rstrip(".") + "."
    fail(f"{text} See `{where} --help`." if isinstance(error, USAGE_ERROR) else text, 2)


def main(
    arguments: list[str] | None = None, program: str = "holdfast", where: str | None = None
) -> NoReturn:
    """The entry point of the installed script. `arguments` are those of the command line, `program`
    what the person typed, `where` the place that is meant when no option names one."""
    from ..errors import HoldfastError

    mark_if_asked()
    try:
        words = complete(sys.argv[1:] if arguments is None else arguments)
        result = app(args=words, prog_name=program, standalone_mode=False, obj=where)
    except HoldfastError as error:
        fail(str(error), error.exit_code)
    except CLICK_EXCEPTION as error:
        _usage(error)
    except (typer.Abort, KeyboardInterrupt):
        raise SystemExit(130) from None
    raise SystemExit(result if isinstance(result, int) else 0)


if __name__ == "__main__":
    main()
