"""Commands for a Ray cluster that is only reached through its dashboard's address.

Owns: handing in a job (`holdfast submit`), and running any other command inside the cluster. Must
not: know what the commands do.
"""

from __future__ import annotations

import secrets
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from holdfast.orchestrator.api.v1alpha1 import TrainingJob, load_job
from holdfast.orchestrator.backends.ray import actor_calls, jobs_api
from holdfast.orchestrator.backends.ray.jobs_page import OWNER
from holdfast.orchestrator.cli.preflight import check_submission
from holdfast.orchestrator.errors import HoldfastError, Problem, UserError

from ..tempdir import scratch
from . import stream_mux
from .requester import handed_on

PROGRAM = "python -m holdfast.orchestrator.cli.main"
FILE_NAME = "holdfast-job.yaml"
COMMAND = "holdfast_command_"
"""So begins the name of the Ray job of a command, and never that of a job: holdfast-JOB-..."""


def submit(
    file: Path, address: str, runtime_env: Path | None, *, attach: bool
) -> tuple[str, int | None]:
    """Hand a job in. (name of the Ray job, its exit code if it was waited for)."""
    wanted = _runtime_env(runtime_env)
    own = wanted.get("working_dir")
    job = load_job(file)
    check_submission(job, file.absolute().parent, str(file), ships=not own)
    with scratch("holdfast-submit-") as place:
        if own:
            name = _name_in(own, file)
        else:
            wanted["working_dir"], name = _shipped(job, file, place)
        api = jobs_api.JobsApi(address)
        if (there := api.running(OWNER, job.name)) is not None:
            got = f"{job.name}, which Ray job {there} is running"
            fix = f"end it with `ray job stop {there}`, or choose another metadata.name"
            raise UserError(str(Problem("metadata.name", got, "a name that is free", fix)))
        entrypoint = f"{PROGRAM} run {shlex.quote(name)} --ray auto"
        shown = metadata(job) | {"state": "submitted"}
        submitted = api.submit(
            f"holdfast-{job.name}-{secrets.token_hex(3)}", entrypoint, wanted, shown
        )
    if not attach:
        return submitted, None
    try:
        outcome = api.follow(submitted, _write)
    except KeyboardInterrupt:
        return submitted, 130
    return submitted, _code(outcome)


def _shipped(job: TrainingJob, file: Path, place: Path) -> tuple[str, str]:
    """(The directory that goes along, the spec's name in it); `place` is an empty one."""
    # A recipe needs nothing but the spec; whoever has a script gets what lies beside the spec.
    if job.spec.entrypoint.recipe is None:
        return str(file.absolute().parent), file.name
    shutil.copy(file, place / FILE_NAME)
    return str(place), FILE_NAME


def _name_in(own: Any, file: Path) -> str:
    """The spec's name in the working_dir of a --runtime-env, where the job's driver reads it.
    Raises UserError when it is not in there."""
    if not isinstance(own, str) or "://" in own or not Path(own).is_dir():
        return file.name  # at the top of an archive; what Ray does not take it refuses itself
    path, directory = file.parent.resolve() / file.name, Path(own).resolve()
    if not path.is_relative_to(directory):
        got = f"working_dir: {own}, which {file} is not in"
        expected = "a directory that the spec is in: nothing else goes along"
        fix = "without a working_dir, what the job needs goes along"
        raise UserError(str(Problem("--runtime-env", got, expected, fix)))
    return str(path.relative_to(directory))


def metadata(job: TrainingJob) -> dict[str, str]:
    """What the dashboard's Jobs view shows of it; its driver keeps it current (ray_told.py)."""
    spec, recipe = job.spec, job.spec.entrypoint.recipe
    mesh, nodes = spec.parallelism, spec.nodes
    if recipe is not None:
        sizes = recipe.config.model
        what = f"{recipe.name}, {sizes.num_layers} layers of {sizes.dim}"
    else:
        what = str(spec.entrypoint.script or spec.entrypoint.module)
    axes = {"pipeline": mesh.pipeline, "context": mesh.context, "tensor": mesh.tensor}
    inner = [f"{name} {size}" for name, size in axes.items() if size > 1]
    return {
        "job_name": job.name,  # the key that the dashboard has a column for
        OWNER: job.name,
        "model": what,
        "mesh": ", ".join([f"replicate {mesh.replicate}", f"shard {mesh.shard}", *inner]),
        "nodes": f"{nodes.min} to {nodes.max} of {spec.workers_per_node} workers",
    }


def forward(address: str) -> int:
    """Run this very command inside the cluster; its exit code."""
    words = sys.argv[1:]
    _expect_possible(words, address)
    inner = [word for word in words if word != address and not word.startswith("--ray")]
    entrypoint = handed_on(f"{PROGRAM} {shlex.join([*inner, '--ray', 'auto'])}")
    # Ray has one stream for stdout and stderr.
    entrypoint = f"{stream_mux.ENV}={stream_mux.MARKED} {entrypoint}"
    api = jobs_api.JobsApi(address)
    name = f"{COMMAND}{secrets.token_hex(4)}"
    submitted = api.submit(name, entrypoint, {}, {"job_name": shlex.join(["holdfast", *inner])})

    parted = stream_mux.Parted(sys.stdout, sys.stderr)

    def show(text: str) -> None:
        # What it advises is typed here, not inside the cluster.
        parted.feed(text.replace("--ray auto", f"--ray {address}"))

    live = {"-f", "--follow"} & set(inner) or (inner[:1] == ["run"] and "--json" not in inner)
    try:
        with actor_calls.on_sigterm(_interrupt):
            if live:
                outcome = api.follow(submitted, show, own=True)
            else:
                outcome, said = api.wait(submitted)
    except KeyboardInterrupt:
        api.stop(submitted)
        return 130
    if not live:
        show(said)
    api.tidy(COMMAND)  # the Jobs view is for jobs
    return _code(outcome)


def _interrupt() -> None:
    """Whoever ends this command, by whatever means, ends it inside the cluster too."""
    raise KeyboardInterrupt


def _expect_possible(words: list[str], address: str) -> None:
    """Raises UserError for what needs the terminal or the directory of who types it."""
    problem = None
    if words[:1] == ["run"] and not any(word.startswith("--attach") for word in words):
        expected = "auto or HOST:PORT, from inside the cluster's network"
        fix = f"holdfast submit FILE --ray {address} --follow"
        problem = Problem("--ray", f"{address} with `run`", expected, fix)
    elif _asks(words) and not {"--yes", "-y"} & set(words):
        expected = f"it with --ray {address}: nobody can be asked inside the cluster"
        problem = Problem("--yes", "nothing", expected)
    elif words[:2] == ["checkpoint", "export"] and len(words) > 3 and words[3][:1] not in "/-":
        expected = "an absolute path: a directory of the cluster's head, where it is written"
        problem = Problem("DESTINATION", words[3], expected)
    if problem is not None:
        raise UserError(str(problem))


def _asks(words: list[str]) -> bool:
    return words[:1] == ["delete"] or words[:2] == ["checkpoint", "adopt"]


def _code(outcome: jobs_api.Outcome) -> int:
    if outcome.status == "FAILED" and outcome.exit_code in (1, 2):
        return outcome.exit_code
    if outcome.status != "SUCCEEDED":
        raise HoldfastError(f"the Ray job has {outcome.status.lower()}: {outcome.message.strip()}")
    return 0


def _runtime_env(file: Path | None) -> dict[str, Any]:
    """Raises UserError."""
    from holdfast.orchestrator.api.v1alpha1 import document

    if file is None:
        return {}
    try:
        found = document.read(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        problem = Problem("--runtime-env", f"{file} ({error})", "a YAML file that can be read")
        raise UserError(str(problem)) from None
    except document.BadDocument as error:
        raise UserError(f"--runtime-env {file}: {error}") from None
    for problem in document.faults(found):
        raise UserError(f"--runtime-env {file}: {problem}")
    if not isinstance(found, dict):
        problem = Problem("--runtime-env", str(file), "a mapping, as Ray's runtime_env is")
        raise UserError(str(problem))
    return found


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
