"""Number of workers where a launcher's line has none: the launcher would count the GPUs of the
machine, or read accelerate's configuration file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..api.launchers import Program
from ..api.v1alpha1 import TrainingJob
from ..errors import UserError
from ..protocol import files

_CORES = ("auto", "cpu")
"""Values of --nproc-per-node with which torchrun counts the cores where it counts no GPU."""


def counted(
    program: Program, nodes: int, gpus: int | None, env: Mapping[str, str], *, is_local: bool
) -> int | None:
    """Workers on each of the `nodes` of this machine, as the launcher would count; None: one, or as
    many as a configuration file has, which is checked. `gpus`: of each worker, where the user gave
    them. `env`: of the spec. Raises UserError."""
    if not is_local:
        got = f"{program.counts}, which would count the GPUs of a machine"
        raise _refused(got, "the number for the nodes of a cluster, which are not known here")
    value = program.counts.partition("=")[2]
    is_accelerate = program.launcher == "accelerate launch"
    whole = {**os.environ, **env}
    if is_accelerate and ("--cpu" in program.launcher_args or config_file(program, Path(), whole)):
        return None
    from ..backends.devices import found_by

    visible = found_by(env)
    count = 0 if gpus == 0 or value == "cpu" else visible.most
    if count:
        return max(count // nodes // (gpus or 1), 1)
    if value in _CORES:
        return max((os.cpu_count() or 1) // nodes, 1)
    if value:
        raise _refused(f"{program.counts}, and {visible.what}", "the number of workers")
    return None


def _refused(got: str, expected: str) -> UserError:
    return UserError.of("--workers", got, expected, "write --workers N before the --")


def config_file(program: Program, work: Path, env: Mapping[str, str]) -> tuple[str, Path] | None:
    """(name, path) of the configuration file that accelerate reads; None: none. `env`: of the
    workers. accelerate's config_args.py defines the default place."""
    words = program.launcher_args
    if program.launcher != "accelerate launch":
        return None
    if "--config-file" in words:
        written = words[words.index("--config-file") + 1]
        return written, files.resolve(work, written)
    if "--cpu" in words:
        return None
    cache = env.get("XDG_CACHE_HOME", "~/.cache")
    home = Path(env.get("HF_HOME", f"{cache}/huggingface")).expanduser()
    path = home / "accelerate" / "default_config.yaml"
    return (str(path), path) if path.is_file() else None


def not_taken_along(job: TrainingJob) -> Iterator[str]:
    """A remark on a configuration of this machine, for a job that runs in a cluster."""
    program = job.spec.entrypoint.program
    config = config_file(program, Path(), os.environ)
    if config and "--config-file" not in program.launcher_args:
        yield (
            f"accelerate's default configuration, {config[0]}, is not taken along: the nodes read "
            f"their own; put a copy beside the script and name it with --config_file"
        )
