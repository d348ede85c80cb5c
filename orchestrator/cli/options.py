"""Options and arguments that several commands share, and the choice of the place they speak of.

Owns: their names and help, and `with_place`. Must not: import anything heavy.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from .targets.base import Target as Target
else:
    Target = Any  # what it imports is too heavy for --help

WHERE = "Where the job lives"

HomeOption = Annotated[
    Path | None,
    typer.Option(
        "--home",
        envvar="HOLDFAST_HOME",
        help="Directory that holds the jobs.",
        show_default="~/.holdfast",
        rich_help_panel=WHERE,
    ),
]
KubernetesOption = Annotated[
    bool,
    typer.Option("--kubernetes", help="In a Kubernetes cluster.", rich_help_panel=WHERE),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "--namespace", "-n", help="Of the cluster.", show_default="the context's",
        rich_help_panel=WHERE,
    ),
]  # fmt: skip
ContextOption = Annotated[
    str | None,
    typer.Option(
        "--context", help="Of the kubeconfig.", show_default="the current one",
        rich_help_panel=WHERE,
    ),
]  # fmt: skip
KubeconfigOption = Annotated[
    Path | None,
    typer.Option(
        "--kubeconfig", help="File.", show_default="$KUBECONFIG or ~/.kube/config",
        rich_help_panel=WHERE,
    ),
]  # fmt: skip
RayOption = Annotated[
    str | None,
    typer.Option(
        "--ray", metavar="ADDRESS",
        help="In a Ray cluster: auto inside of it, HOST:PORT of its head, or http://HOST:8265. "
        "Without ADDRESS: $RAY_ADDRESS, or auto.",
        rich_help_panel=WHERE,
    ),
]  # fmt: skip
JsonOption = Annotated[bool, typer.Option("--json", help="Print facts as JSON.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="The job's metadata.name.")]
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
"""Options of every command that speaks of jobs -> type and default."""


def with_target(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with the options that say where the job lives instead of `place`."""
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters.values()
    parameters = [p.replace(annotation=hints[p.name]) for p in own if p.name != "place"]
    for name, (annotation, default) in _OPTIONS.items():
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=default, annotation=annotation))

    @functools.wraps(command)
    def asked(**given: Any) -> None:
        where = {name: given.pop(name) for name in _OPTIONS}
        place = choose(**where)
        with place.ending():
            command(place=place, **given)

    asked.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    asked.__annotations__ = {p.name: p.annotation for p in parameters}
    return asked


def choose(
    ctx: typer.Context,
    home: Path | None,
    kubernetes: bool,
    namespace: str | None,
    context: str | None,
    kubeconfig: Path | None,
    ray: str | None,
) -> Target:
    """Raises UserError for options that do not go together."""
    from ..errors import Problem, UserError

    if ray is not None:
        if kubernetes:
            got = f"{ray or 'it'} beside --kubernetes"
            raise UserError(str(Problem("--ray", got, "one place", "leave one out")))
        return _ray(ray)
    if kubernetes or ctx.obj == PLUGIN:
        source = ctx.get_parameter_source("home")
        if source is not None and source.name == "COMMANDLINE":
            raise UserError(
                str(Problem("--home", f"{home} beside --kubernetes", "one place", "leave one out"))
            )
        try:
            from .targets.kubernetes.target import KubernetesTarget
        except ModuleNotFoundError as error:
            got = f"it, but the package {error.name} is not installed"
            fix = "pip install '.[kubernetes]' in a checkout of Holdfast"
            raise UserError(str(Problem("--kubernetes", got, "its client library", fix))) from None
        return KubernetesTarget(namespace, context, kubeconfig, plugin=ctx.obj == PLUGIN)
    beside = {"--namespace": namespace, "--context": context, "--kubeconfig": kubeconfig}
    for option, value in beside.items():
        if value is not None:
            got = f"{value} without --kubernetes"
            raise UserError(str(Problem(option, got, "it beside --kubernetes", "add that")))
    from .targets.local import LocalTarget

    return LocalTarget(home)


def complete(words: list[str]) -> list[str]:
    """A command line whose `--ray` has a value: an empty one where another option follows, or
    nothing. What stands right after it is its value, also a job or a file."""
    done = []
    for word, following in zip(words, [*words, "--"][1:], strict=True):
        done.append("--ray=" if word == "--ray" and following.startswith("-") else word)
    return done


def ray_address(given: str) -> str:
    """What `--ray` means; Ray's own commands look there too."""
    return given or os.environ.get("RAY_ADDRESS") or "auto"


def _ray(given: str) -> Target:
    """Raises UserError without Ray's libraries. Behind a dashboard's address the same command runs
    once more, inside the cluster, and this one ends with its exit code."""
    from ..errors import Problem, UserError

    address = ray_address(given)
    try:
        if address.startswith(("http://", "https://")):
            from .targets.ray.jobs_api import forward

            raise typer.Exit(forward(address))
        from .targets.ray.target import RayTarget
    except ModuleNotFoundError as error:
        got = f"{address}, but the package {error.name} is not installed"
        fix = "pip install '.[ray]' in a checkout of Holdfast"
        raise UserError(str(Problem("--ray", got, "Ray's libraries", fix))) from None
    return RayTarget(address)


PLUGIN = "kubectl plugin"
"""As the context's object: the command is `kubectl holdfast`."""
