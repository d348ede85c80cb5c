"""Makes the job of `holdfast run train.py --nodes 2 -- ARGS`: a script, or the line of a launcher,
without a spec. The options are few; everything else is written in a spec, which `--save` begins."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import Problem, SpecError, UserError

if TYPE_CHECKING:
    from ..api.launchers import Program

PANEL = "Without a spec"

NodesOption = Annotated[
    int | None,
    typer.Option("--nodes", min=1, help="Nodes.", show_default="1", rich_help_panel=PANEL),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        "--workers", min=1, max=64, help="Workers on each node.", show_default="1",
        rich_help_panel=PANEL,
    ),
]  # fmt: skip
GpusOption = Annotated[
    int | None,
    typer.Option(
        "--gpus", min=0, help="GPUs of each worker.", show_default="1 where there are some",
        rich_help_panel=PANEL,
    ),
]  # fmt: skip
NameOption = Annotated[
    str | None,
    typer.Option(
        "--name", help="Name of the job.", show_default="from the script's", rich_help_panel=PANEL
    ),
]
EnvOption = Annotated[
    list[str] | None,
    typer.Option(
        "--env", metavar="K=V", help="Variable of the workers; may be repeated.",
        show_default=False, rich_help_panel=PANEL,
    ),
]  # fmt: skip
PythonOption = Annotated[
    str | None,
    typer.Option(
        "--python", metavar="PATH", help="Interpreter, or directory of an environment.",
        show_default=False, rich_help_panel=PANEL,
    ),
]  # fmt: skip
ResumeOption = Annotated[
    str | None,
    typer.Option(
        "--resume-args", metavar="ARGS", help="Arguments added once there is a checkpoint, such "
        "as '--resume {checkpoint}'.", show_default=False, rich_help_panel=PANEL,
    ),
]  # fmt: skip
SaveOption = Annotated[
    Path | None,
    typer.Option(
        "--save", metavar="JOB.yaml", help="Write the job to a new file, and run it.",
        show_default=False, rich_help_panel=PANEL,
    ),
]  # fmt: skip
WordsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[-- ARGS]", help="Arguments of the script, after --.", show_default=False
    ),
]

_SPEC_SUFFIXES = (".yaml", ".yml", ".json")
_SCRIPT_SUFFIXES = (".py", ".pyz", ".ipynb", ".sh")
_MAX_NAME = 40
"""Characters; fewer than the 52 of a name, since a number may follow."""


@dataclass(frozen=True)
class ScriptRun:
    """A script or a command line, and the options that stand for a spec."""

    file: Path
    words: tuple[str, ...] = ()
    nodes: int | None = None
    workers: int | None = None
    gpus: int | None = None
    name: str = ""
    """Empty: from the script's."""
    env: dict[str, str] = field(default_factory=dict)
    python: str | None = None
    resume_args: tuple[str, ...] = ()
    """Arguments of each start that finds a checkpoint."""
    is_local: bool = False
    """True if the job runs on this machine, whose GPUs a launcher would count."""

    def title(self) -> str:
        """A name for the job, from the script's."""
        if self.name:
            return self.name
        program = self.program
        what = program.script or program.module or (program.words or ("job",))[0]
        stem = Path(what).stem if program.module is None else what.rpartition(".")[2]
        name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:_MAX_NAME].strip("-")
        return name or "job"

    @cached_property
    def program(self) -> Program:
        """Program of each worker; an empty one for an entrypoint that `document` rejects."""
        from pydantic import ValidationError

        from ..api.launchers import Program
        from ..api.v1alpha1.workload import Entrypoint

        try:
            return Entrypoint.model_validate(self._entrypoint()).program
        except ValidationError:
            return Program()

    @property
    def is_script(self) -> bool:
        """True if FILE is a script; otherwise the words are a command."""
        return self.file.suffix in _SCRIPT_SUFFIXES

    def _entrypoint(self) -> dict[str, Any]:
        if self.is_script:
            entry: dict[str, Any] = {"script": str(self.file)}
            if self.words:
                entry["args"] = list(self.words)
        else:
            name = str(self.file)
            program = f"./{name}" if "/" not in name and self.file.is_file() else name
            entry = {"command": shlex.join([program, *self.words])}
        if self.resume_args:
            entry["resumeArgs"] = list(self.resume_args)
        return entry | ({"python": self.python} if self.python else {})

    def document(self, name: str, work: str = ".") -> dict[str, Any]:
        """The spec; `work` is its working directory. Raises SpecError."""
        spec: dict[str, Any] = {"entrypoint": self._entrypoint()}
        if work != ".":
            spec["workingDirectory"] = work
        sizes = {size.of: size for size in self.program.sizes}
        nodes, least, workers = self.nodes, 1, self.workers
        if nodes is None and "nodes" in sizes:
            nodes, least = sizes["nodes"].most, sizes["nodes"].least
        if workers is None and "workers" in sizes:
            workers = sizes["workers"].most
        elif workers is None and "world" in sizes:
            workers = sizes["world"].most // (nodes or 1)
        elif workers is None:
            workers = self._counted(nodes or 1)
        if nodes is not None:
            spec["nodes"] = {"min": least if least != nodes else 1, "max": nodes}
        if workers is not None:
            spec["workersPerNode"] = workers
        if self.gpus is not None:
            spec["resources"] = {"gpu": self.gpus}
        if self.env:
            spec["env"] = dict(self.env)
        if "restarts" in sizes:
            budgets = {"infrastructure": {"restarts": sizes["restarts"].most}}
            spec["recovery"] = {"budgets": budgets}
        return job_document(name, spec, str(self.file))

    def _counted(self, nodes: int) -> int | None:
        """Workers of a node where the launcher would count. Raises UserError."""
        from . import launch_sizes

        if not self.program.counts:
            return None
        env = {**self.program.env, **self.env}
        return launch_sizes.counted(self.program, nodes, self.gpus, env, is_local=self.is_local)

    def hidden_variables(self) -> list[str]:
        """Names of variables whose values are not displayed. The document must be valid."""
        from ..api.v1alpha1.job import redacted

        variables = {**self.program.env, **self.env}
        return [name for name, value in variables.items() if redacted(name, value) != value]

    def options(self, name: str) -> list[str]:
        """The words of a command line with which this run is made again, except for FILE."""
        options = {"--nodes": self.nodes, "--workers": self.workers, "--gpus": self.gpus,
                 "--python": self.python, "--name": name}  # fmt: skip
        if self.resume_args:
            options["--resume-args"] = shlex.join(self.resume_args)
        words = [f"{key}={value}" for key, value in options.items() if value is not None]
        return words + [f"--env={key}={value}" for key, value in self.env.items()]


def job_document(name: str, spec: dict[str, Any], source: str) -> dict[str, Any]:
    """A TrainingJob, checked. Raises SpecError with the source."""
    from ..api.v1alpha1 import job_from_mapping

    head = {"apiVersion": "holdfast.dev/v1alpha1", "kind": "TrainingJob"}
    document = {**head, "metadata": {"name": name}, "spec": spec}
    job_from_mapping(document, source)
    return document


def asked(
    file: Path | None, words: list[str] | None, save: Path | None = None, **options: Any
) -> ScriptRun | None:
    """The run without a spec that a command line asks for; None: FILE is a spec. Raises UserError
    for options that a spec has fields for."""
    options_given = {name: value for name, value in options.items() if value or value == 0}
    if file is not None and not words and file.is_dir():
        raise UserError.of("FILE", f"{file}, a directory", "a TrainingJob, or a script")
    if file is not None and not _is_spec(file, words):
        run = ScriptRun(_relative(file), tuple(words or ()))
        return _with(run, options_given)
    named = [f"--{name.replace('_', '-')}" for name in options_given] + (["--save"] if save else [])
    if file is not None and words:
        fix = "write spec.entrypoint.args"
        raise UserError.of("ARGS", f"{shlex.join(words)} with {file}", "them with a script", fix)
    if named:
        got = f"it with {file}" if file is not None else "it without a script"
        fix = "a spec has fields for it: see docs/user/job-spec.md" if file else ""
        raise UserError.of(named[0], got, "it with a script", fix)
    return None


def _relative(file: Path) -> Path:
    """A file of the current directory by its name there, which a copy of the directory has too."""
    here, place = Path.cwd().resolve(), file.parent.resolve()
    if file.is_absolute() and file.is_file() and place.is_relative_to(here):
        return place.relative_to(here) / file.name
    return file


def _with(run: ScriptRun, given: dict[str, Any]) -> ScriptRun:
    from dataclasses import replace

    variables = {}
    for text in given.pop("env", ()):
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError.of("--env", text, "NAME=VALUE")
        variables[name] = value
    try:
        given["resume_args"] = tuple(shlex.split(given.get("resume_args", "")))
    except ValueError as error:
        got = f"{given['resume_args']} ({error})"
        raise UserError.of("--resume-args", got, "words as in a shell") from None
    return replace(run, env=variables, **given)


def _is_spec(file: Path, words: list[str] | None) -> bool:
    from ..api.v1alpha1 import command_line

    if file.suffix in _SPEC_SUFFIXES:
        return True
    return file.suffix not in _SCRIPT_SUFFIXES and not (
        words or command_line.is_known(str(file)) or (file.is_file() and os.access(file, os.X_OK))
    )


@contextmanager
def spec_file(
    run: ScriptRun,
    save: Path | None,
    free_name: Callable[[str], str],
    show: Callable[[str], None],
    *,
    uploads: bool = False,
) -> Iterator[tuple[Path, Callable[[], None]]]:
    """(A file with the spec of a run, a function that shows it to the user), for as long as the
    command runs; its directory is the current one. With `save` it stays, where its directory is,
    unless the job is refused. `uploads`: the directory goes to a cluster. `show` prints a text.
    Raises UserError and SpecError."""
    from ..api.v1alpha1.job import redacted_document
    from .targets.tempdir import scratch

    if save is not None:
        _check_place(save, uploads)
    name = run.name or free_name(run.title())
    try:
        if save is not None:
            work = os.path.relpath(Path.cwd().resolve(), save.absolute().parent.resolve())
            with _saved(run, save, run.document(name, work), show, uploads):
                yield save, lambda: None
            return
        document = run.document(name)
        shown = text_of(redacted_document(document, run.program.env)).rstrip()
        hint = "# this is the job as a spec; --save job.yaml keeps it"
        with scratch("holdfast-run-") as place:
            file = place / f"{name}.yaml"
            file.write_text(text_of(document), encoding="utf-8")
            yield file, lambda: show(f"{shown}\n{hint}")
    except SpecError as error:
        raise SpecError(error.problems, str(run.file)) from None


def text_of(document: dict[str, Any], suffix: str = ".yaml") -> str:
    if suffix == ".json":
        return json.dumps(document, indent=2) + "\n"
    from ..api.v1alpha1 import yaml_text

    return yaml_text(document)


def _check_place(save: Path, uploads: bool) -> None:
    """Raises UserError for a file in which the spec cannot be."""
    problem = None
    if save.suffix not in _SPEC_SUFFIXES:
        expected = f"a file whose name ends in {', '.join(_SPEC_SUFFIXES)}"
        problem = Problem("--save", str(save), expected, "`holdfast run` takes others for scripts")
    elif uploads and save.absolute().parent.resolve() != Path.cwd().resolve():
        expected = "a file in the current directory: the directory of the spec is uploaded"
        problem = Problem("--save", f"{save} for a cluster", expected, f"--save {save.name}")
    elif save.exists():
        fix = f"run it with `holdfast run {save}`, or choose another name"
        problem = Problem("--save", f"{save}, which exists", "a new file", fix)
    if problem is not None:
        raise UserError(str(problem))


@contextmanager
def _saved(
    run: ScriptRun, save: Path, document: dict[str, Any], show: Callable[[str], None], uploads: bool
) -> Iterator[None]:
    """A new file with a spec, which is removed if the job is refused. Raises UserError."""
    hidden = run.hidden_variables()
    if hidden and uploads:
        fix = "leave it out: put it into a Secret, and name that in envFrom of the pod template"
        got = f"it with {', '.join(hidden)}, whose value would be in the uploaded {save}"
        raise UserError.of("--save", got, "it without secrets", fix)
    text = text_of(document, save.suffix)
    _write_new(save, text, 0o600 if hidden else 0o666)
    try:
        yield
    except UserError:
        if save.read_text(encoding="utf-8") == text:
            save.unlink()
        raise
    finally:
        if save.exists():
            show(f"{save} written; run it again with `holdfast run {save}`")
            if hidden:
                show(f"{save} has the value of {', '.join(hidden)}: only you may read it")


def _write_new(path: Path, text: str, mode: int) -> None:
    """Raises UserError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        got = f"{path} ({error.strerror})"
        raise UserError.of("--save", got, "a new file that can be written") from None
