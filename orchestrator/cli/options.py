"""Options and arguments that several commands share, and the choice of the target.

Imported for `--help`, so it imports nothing heavy.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from ..errors import UserError, installation
from ..parts import part

if TYPE_CHECKING:
    from .targets.base import Target as Target
else:
    Target = Any  # its imports are too heavy for --help

TARGET_PANEL = "Target"

HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home", envvar="HOLDFAST_HOME", help="Directory of local jobs.",
        show_default="~/.holdfast", rich_help_panel=TARGET_PANEL,
    ),
]  # fmt: skip
KubernetesOption = Annotated[
    bool,
    typer.Option("--kubernetes", help="Use a Kubernetes cluster.", rich_help_panel=TARGET_PANEL),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "--namespace", "-n", help="Kubernetes namespace.", show_default="the context's",
        rich_help_panel=TARGET_PANEL,
    ),
]  # fmt: skip
ContextOption = Annotated[
    str | None,
    typer.Option(
        "--context", help="Context of the kubeconfig.", show_default="the current context",
        rich_help_panel=TARGET_PANEL,
    ),
]  # fmt: skip
KubeconfigOption = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig", help="Kubeconfig file.", show_default="$KUBECONFIG or ~/.kube/config",
        rich_help_panel=TARGET_PANEL,
    ),
]  # fmt: skip
RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray", metavar="ADDRESS",
        help="Use a Ray cluster: auto inside it, HOST:PORT of its head, or http://HOST:8265. "
        "Without ADDRESS: $RAY_ADDRESS, or auto.",
        rich_help_panel=TARGET_PANEL,
    ),
]  # fmt: skip
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _job_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of this machine's jobs, for the shell's completion."""
    if ctx.params.get("kubernetes") or ctx.params.get("ray"):
        return []
    home = ctx.params.get("home") or os.environ.get("HOLDFAST_HOME") or "~/.holdfast"
    return [path.name for path in Path(home, "jobs").expanduser().glob(f"{incomplete}*")]


JobArgument = Annotated[
    str, typer.Argument(metavar="JOB", help="The job's metadata.name.", autocompletion=_job_names)
]
FileArgument = Annotated[
    Path, typer.Argument(metavar="FILE", help="A TrainingJob in YAML.", show_default=False)
]

_OPTIONS: dict[str, tuple[Any, Any]] = {
    "ctx": (typer.Context, inspect.Parameter.empty),
    "home": (HomeOption, None),
    "kubernetes": (KubernetesOption, False),
    "namespace": (NamespaceOption, None),
    "context": (ContextOption, None),
    "kubeconfig": (KubeconfigOption, None),
    "ray": (RayOption, None),
}
"""Options that choose the target -> type and default."""


def with_target(command: Callable[..., None], **fixed: Any) -> Callable[..., None]:
    """The command with the options that choose the target in place of the parameter `target`, and
    without the parameters that are fixed."""
    hints = get_type_hints(command, include_extras=True)
    own = [p for p in inspect.signature(command).parameters.values() if p.name not in fixed]
    parameters = [p.replace(annotation=hints[p.name]) for p in own if p.name != "target"]
    for name, (annotation, default) in _OPTIONS.items():
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))

    @functools.wraps(command)
    def run(**given: Any) -> None:
        target = choose(**{name: given.pop(name) for name in _OPTIONS})
        with target.guard():
            command(target=target, **given, **fixed)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def choose(
    ctx: typer.Context,
    home: Path | None,
    kubernetes: bool,
    namespace: str | None,
    context: str | None,
    kubeconfig: Path | None,
    ray: str | None,
) -> Any:
    """A Target. Raises UserError for options that exclude each other."""
    if ray is not None:
        if kubernetes:
            raise UserError.of("--ray", "--ray and --kubernetes", "only one of them")
        address = ray_address(ray)
        return provided("target ray", "ray", f"--ray {address}", address, ctx.info_name)
    if kubernetes or ctx.obj == PLUGIN:
        source = ctx.get_parameter_source("home")
        if source is not None and source.name == "COMMANDLINE":
            raise UserError.of("--home", "--home and --kubernetes", "only one of them")
        where = {"namespace": namespace, "context": context, "kubeconfig": kubeconfig}
        written, plugin = "--kubernetes", ctx.obj == PLUGIN
        return provided("target kubernetes", "kubernetes", written, **where, plugin=plugin)
    cluster_only = {"--namespace": namespace, "--context": context, "--kubeconfig": kubeconfig}
    for option, value in cluster_only.items():
        if value is not None:
            got = f"{value} without --kubernetes"
            raise UserError.of(option, got, "it with --kubernetes", "add --kubernetes")
    return provided("target local", "local", "--home", home)


def complete(words: list[str]) -> list[str]:
    """The command line with a value for `--ray`: an empty one if another option or nothing follows
    it. Any other word right after `--ray` is its value, and those after `--` are a script's."""
    done = []
    end = words.index("--") if "--" in words else len(words)
    words, rest = words[:end], words[end:]
    for word, following in zip(words, [*words, "--"][1:], strict=True):
        done.append("--ray=" if word == "--ray" and following.startswith("-") else word)
    return done + rest


def ray_address(given: str) -> str:
    """The address that `--ray` means, chosen as Ray's own commands choose it."""
    return given or os.environ.get("RAY_ADDRESS") or "auto"


def provided(name: str, backend: str, written: str, *given: Any, **named: Any) -> Any:
    """Result of a part's function. Raises UserError if the backend or its libraries are missing."""
    missing, fix = f"the backend {backend}", "an installation of Holdfast that has it"
    try:
        if make := part(name):
            return make(*given, **named)
    except ModuleNotFoundError as error:
        missing = f"the package {error.name}"
        fix = installation(backend)
    got = f"{written}, but {missing} is not installed"
    raise UserError.of(written.split()[0], got, "it installed", fix)


PLUGIN = "kubectl plugin"
"""The typer context's object when the program is `kubectl holdfast`."""
