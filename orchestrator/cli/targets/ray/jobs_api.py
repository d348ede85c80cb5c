"""Commands for a Ray cluster that is only reached through its dashboard's address: `run` and
`submit` hand a job in; every other command runs again in the cluster, as a short Ray job."""

from __future__ import annotations

import secrets
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, parse_job
from holdfast.orchestrator.api.v1alpha1.load import read_job_file
from holdfast.orchestrator.api.v1alpha1.remarks import remarks
from holdfast.orchestrator.backends.ray import jobs_api
from holdfast.orchestrator.cli import code_files, job_code
from holdfast.orchestrator.cli.job_checks import check_submission
from holdfast.orchestrator.cli.launch_sizes import not_taken_along
from holdfast.orchestrator.errors import HoldfastError, Problem, UserError

from ..base import Launch
from ..remote_job import BY, requester
from ..tempdir import on_sigterm, scratch
from . import working_dir

PROGRAM = "python -m holdfast.orchestrator.cli.main"
MADE = ".holdfast-job-{}.yaml"
"""The spec of a run without one, among the uploaded files: no file of the user has that name."""
OWNER = "holdfast_job"
"""Metadata key with the job's name: without it, the Ray job is another program that runs a job."""
COMMAND = "holdfast_command_"
"""Prefix of the Ray job of a command; a submitted job is called holdfast-JOB-..."""
STDERR_MARK = "\x1e"
"""Mark between stdout and stderr of a command in the one log that a Ray job has."""


class Submitted(NamedTuple):
    ray_job: str
    job: str
    """metadata.name, which all other commands take."""
    api: jobs_api.JobsApi


def submit(launch: Launch, address: str, note: Callable[[str], None]) -> Submitted:
    """Submit a job with the code of its directory. In a working_dir of the user's own the spec of a
    script is made in the cluster. `note` gets what the user should know."""
    wanted, file, script = _runtime_env(launch.runtime_env), launch.file, launch.script
    own = wanted.get("working_dir")
    text = read_job_file(file)
    job = parse_job(text, str(file if script is None else script.file))
    if own and script is not None and (names := script.env.keys() | script.hidden_variables()):
        got = f"{', '.join(sorted(names))} with a working_dir in --runtime-env"
        expected = "it without: Ray's dashboard would show the values"
        raise UserError.of("--env", got, expected, "write env_vars in that file")
    check_submission(job, launch.directory, str(file), ships=not own)
    with scratch("holdfast-submit-") as place:
        if own and (script is None or script.is_script):
            name = _name_in(own, file if script is None else script.file)
        elif own and script is not None:
            name = str(script.file)
        else:
            name = file.name if script is None else MADE.format(job.name)
            archive = place / "code.zip"
            excludes = wanted.get("excludes") or ()
            _pack(job, archive, (name, text), launch.directory, excludes)
            wanted["working_dir"] = str(archive)
        launch.show()
        api = jobs_api.JobsApi(address)
        if (running := api.running(OWNER, job.name)) is not None:
            got = f"{job.name}, which Ray job {running} is running"
            fix = f"end it with `ray job stop {running}`, or choose another metadata.name"
            raise UserError.of("metadata.name", got, "a name that is free", fix)
        entrypoint = f"{PROGRAM} run {shlex.quote(name)} --ray auto"
        if own and script is not None:
            options = shlex.join([*script.options(job.name), "--ray", "auto"])
            entrypoint = f"{PROGRAM} run {options} -- {shlex.join([name, *script.words])}"
        ray_job = f"holdfast-{job.name}-{secrets.token_hex(3)}"
        ray_job = api.submit(ray_job, entrypoint, wanted, metadata(job))
    for text in (*remarks(job), *not_taken_along(job)):
        note(text)
    return Submitted(ray_job, job.name, api)


def follow(submitted: Submitted) -> int:
    """Print the output of a job until it ends; its exit code."""
    return _code(submitted.api.follow(submitted.ray_job, _write))


def _pack(
    job: TrainingJob, archive: Path, spec: tuple[str, str], directory: Path, excludes: Any
) -> None:
    """Write the archive of what is uploaded. Raises UserError."""
    if not isinstance(excludes, (list, tuple)):
        raise UserError.of("--runtime-env", f"excludes: {excludes}", "a list of patterns")
    chosen = code_files.Chosen({}, ())  # a recipe needs only the spec
    if job.spec.entrypoint.recipe is None:
        chosen = code_files.choose(directory, tuple(map(str, excludes)))
        job_code.check_uploaded(job, directory, chosen.sizes)
    links = working_dir.write(archive, spec, directory, chosen.sizes)
    job_code.print_remarks([*chosen.remarks, *links])


def _name_in(own: Any, file: Path) -> str:
    """The spec's name in the working_dir of a --runtime-env, where the job's driver reads it.
    Raises UserError when it is not in there."""
    if not isinstance(own, str) or "://" in own or not Path(own).is_dir():
        return file.name  # at the top of an archive; Ray itself refuses what it cannot use
    path, directory = file.parent.resolve() / file.name, Path(own).resolve()
    if not path.is_relative_to(directory):
        got = f"working_dir: {own}, which {file} is not in"
        expected = "a directory that the spec is in: nothing else is uploaded"
        fix = "without a working_dir, the files that the job needs are uploaded"
        raise UserError.of("--runtime-env", got, expected, fix)
    return str(path.relative_to(directory))


def metadata(job: TrainingJob) -> dict[str, str]:
    """Texts for the dashboard's Jobs page, which has a column for `job_name`."""
    return {"job_name": job.name, OWNER: job.name}


def forward(address: str, why: str = "") -> int:
    """Run this very command inside the cluster; its exit code. `why` is said on stderr once the
    Ray job is there: what failed without one."""
    words = sys.argv[1:]
    _expect_possible(words, address)
    inner = [word for word in words if word != address and not word.startswith("--ray")]
    command = f"{PROGRAM} {shlex.join([*inner, '--ray', 'auto'])}"
    follows = bool({"-f", "--follow"} & set(inner)) or (
        inner[:1] == ["attach"] and "--json" not in inner
    )
    api = jobs_api.JobsApi(address)
    shown = {"job_name": shlex.join(["holdfast", *inner])}
    name = f"{COMMAND}{secrets.token_hex(4)}"
    submitted = api.submit(name, shell_command(command, follows=follows), {}, shown)
    if why:
        sys.stderr.write(f"{why}; the command runs as a Ray job instead\n")

    def local(text: str) -> str:
        return text.replace("--ray auto", f"--ray {address}")  # the user types advice here

    def interrupt() -> None:
        raise KeyboardInterrupt

    try:
        with on_sigterm(interrupt):
            if follows:
                outcome = api.follow(submitted, lambda text: _write(local(text)), own=True)
            else:
                outcome, output = api.wait(submitted)
                stdout, stderr = split_output(local(output))
                _write(stdout)
                sys.stderr.write(stderr)
    except KeyboardInterrupt:
        api.stop(submitted)
        return 130
    api.delete_ended(COMMAND)  # the Jobs page is for jobs
    return _code(outcome)


def shell_command(command: str, *, follows: bool) -> str:
    """A Ray job's entrypoint for a command: it knows who typed it. A Ray job has one log, so stderr
    follows stdout after a mark; a command that follows something mixes both."""
    command = f"{BY}={shlex.quote(requester())} {command}"
    if follows:
        return f"{command} 2>&1"
    mark = f"printf '\\{ord(STDERR_MARK):03o}'"
    return f'e=$(mktemp); {command} 2>"$e"; c=$?; {mark}; cat "$e"; rm "$e"; exit $c'


def split_output(output: str) -> tuple[str, str]:
    """(stdout, stderr) of a command."""
    stdout, mark, stderr = output.rpartition(STDERR_MARK)
    return (stdout, stderr) if mark else (output, "")


def _expect_possible(words: list[str], address: str) -> None:
    """Raises UserError for commands that need this machine's terminal or working directory."""
    problem, confirms = None, words[:1] == ["delete"] or words[:2] == ["checkpoint", "adopt"]
    if words[:1] == ["again"]:
        got, expected = f"{address} with `again`", "auto or HOST:PORT of the cluster"
        fix = f"or run it again with `holdfast run FILE --ray {address}`"
        problem = Problem("--ray", got, expected, fix)
    elif words[:1] == ["ui"]:
        got = f"{address} with `ui`, whose page would be served in the cluster"
        problem = Problem("--ray", got, "ray://HEAD:10001, or auto on a Ray node")
    elif words[:2] == ["debug", "profile"]:
        got = f"{address} with `profile`, which would write its file in the cluster"
        problem = Problem("--ray", got, "auto or HOST:PORT, on a Ray node")
    elif confirms and not {"--yes", "-y"} & set(words):
        expected = f"it with --ray {address}: a command in the cluster cannot ask for confirmation"
        problem = Problem("--yes", "nothing", expected)
    elif words[:2] == ["checkpoint", "export"] and len(words) > 3 and words[3][:1] not in "/-":
        expected = "an absolute path: a directory of the cluster's head, where it is written"
        problem = Problem("DESTINATION", words[3], expected)
    if problem is not None:
        raise UserError(str(problem))


def _code(outcome: jobs_api.Outcome) -> int:
    if outcome.status == "FAILED" and outcome.exit_code in (1, 2):
        return outcome.exit_code
    if outcome.status != "SUCCEEDED":
        raise HoldfastError(f"the Ray job has {outcome.status.lower()}: {outcome.message.strip()}")
    return 0


def _runtime_env(file: Path | None) -> dict[str, Any]:
    """Raises UserError."""
    from holdfast.orchestrator.api.v1alpha1 import load

    if file is None:
        return {}
    try:
        env = load.read_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError.of(
            "--runtime-env", f"{file} ({error})", "a YAML file that can be read"
        ) from None
    except load.BadDocument as error:
        raise UserError(f"--runtime-env {file}: {error}") from None
    for problem in load.document_problems(env):
        raise UserError(f"--runtime-env {file}: {problem}")
    if not isinstance(env, dict):
        raise UserError.of("--runtime-env", str(file), "a mapping, as Ray's runtime_env is")
    return env


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
