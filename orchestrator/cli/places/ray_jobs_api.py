"""Commands for a Ray cluster that is only reached through its dashboard's address.

Owns: handing in a job (`holdfast submit`), and running any other command inside the cluster. Must
not: know what the commands do.
"""

from __future__ import annotations

import secrets
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from ...backends.ray import jobs
from ...backends.ray.jobs_view import OWNER
from ...protocol.errors import HoldfastError, Problem, UserError
from ...protocol.spec import TrainingJob
from ..preflight import load_checked

PROGRAM = "python -m orchestrator.cli.main"
FILE_NAME = "holdfast-job.yaml"


def submit(
    file: Path, address: str, runtime_env: Path | None, *, attach: bool
) -> tuple[str, int | None]:
    """Hand a job in. (name of the Ray job, its exit code if it was waited for)."""
    job = load_checked(file)
    wanted = _runtime_env(runtime_env)
    api = jobs.Api(address)
    with tempfile.TemporaryDirectory(prefix="holdfast-submit-") as place:
        directory = Path(place)
        # A recipe needs nothing but the spec; whoever has a script gets what lies beside the spec.
        source = file.absolute().parent if job.spec.entrypoint.recipe is None else None
        if "working_dir" not in wanted:
            wanted["working_dir"] = str(source or directory)
        if source is None:
            shutil.copy(file, directory / FILE_NAME)
        name = file.name if source is not None else FILE_NAME
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
    if words[:1] == ["run"]:
        raise UserError(
            str(
                Problem(
                    "--ray",
                    f"{address} with `run`",
                    "auto or HOST:PORT, from inside the cluster's network",
                    f"holdfast submit FILE --ray {address} --follow",
                )
            )
        )
    inner = [word for word in words if word != address and not word.startswith("--ray")]
    entrypoint = f"{PROGRAM} {shlex.join([*inner, '--ray', 'auto'])}"
    api = jobs.Api(address)
    name = f"holdfast-command-{secrets.token_hex(4)}"
    shown = shlex.join(["holdfast", *inner])
    submitted = api.submit(name, entrypoint, {}, {"job_name": shown})
    kept: list[str] = []
    # Ray has one stream for stdout and stderr. What ends can wait until it is known which it was.
    live = any(word in ("-f", "--follow") for word in inner)
    try:
        outcome = api.follow(submitted, _write if live else kept.append, own=True)
    except KeyboardInterrupt:
        api.stop(submitted)
        return 130
    failed = outcome.status == "FAILED"
    (sys.stderr if failed else sys.stdout).write("".join(kept))
    api.forget(submitted)  # the Jobs view is for jobs
    return _code(outcome)


def _code(outcome: jobs.Outcome) -> int:
    if outcome.status == "FAILED" and outcome.exit_code in (1, 2):
        return outcome.exit_code
    if outcome.status != "SUCCEEDED":
        raise HoldfastError(f"the Ray job has {outcome.status.lower()}: {outcome.message.strip()}")
    return 0


def _runtime_env(file: Path | None) -> dict[str, Any]:
    import yaml

    if file is None:
        return {}
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        problem = Problem("--runtime-env", f"{file} ({error})", "a YAML file that can be read")
        raise UserError(str(problem)) from None
    if not isinstance(found, dict):
        problem = Problem("--runtime-env", str(file), "a mapping, as Ray's runtime_env is")
        raise UserError(str(problem))
    return found


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
