"""The variables that `accelerate launch` gives to a script, from accelerate's own code.

The launcher turns options and its configuration file into variables (ACCELERATE_*, FSDP_*) and then
starts torchrun or a child process; here it stops before that. Only the standard library is imported
at first: other_python.py loads this file in the interpreter of a user, and launcher_shim.py runs it
there: `PYTHON accelerate_launch.py OPTIONS COMMAND` becomes the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

_NOT_OURS = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NODE_RANK", "RANK", "LOCAL_RANK",
             "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip
"""Holdfast sets these from the spec."""


class _Reached(BaseException):
    """The launcher would start the script now."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment


class NotSupported(Exception):
    """accelerate would start the script in a way that Holdfast does not know."""


def variables(words: list[str]) -> dict[str, str]:
    """The variables that the launcher's options `words` stand for. Raises what accelerate raises
    for wrong options, and NotSupported."""
    try:
        from accelerate.commands import launch
    except ImportError as error:
        raise NotSupported(
            f"entrypoint.command: got accelerate launch where accelerate cannot be imported "
            f"({error}); expected it in the Python of the workers; install it, or name another "
            f"interpreter in entrypoint.python"
        ) from None
    before = dict(os.environ)
    # Two processes on one machine: a script that accelerate takes for a single process, or for one
    # of several machines, goes another way there. Port 0: none is looked for.
    sizes = ["--num_processes", "2", "--num_machines", "1", "--main_process_port", "0"]
    arguments = launch.launch_command_parser().parse_args([*words, *sizes, "script.py"])
    try:
        with _stopped(launch):
            launch.launch_command(arguments)
    except _Reached as reached:
        return {
            name: value
            for name, value in reached.environment.items()
            if before.get(name) != value and name not in _NOT_OURS
        }
    raise NotSupported("accelerate launch ended without a start; write entrypoint.script instead")


@contextlib.contextmanager
def _stopped(launch: Any) -> Iterator[None]:
    """The places where the launcher would start processes raise _Reached instead."""
    from unittest import mock

    import torch.distributed.run as torchrun

    def run(_arguments: Any) -> None:
        raise _Reached(dict(os.environ))

    def simple(arguments: Any) -> None:
        arguments.num_processes = 1  # with more of them it looks for mpirun
        _command, environment = launch.prepare_simple_launcher_cmd_env(arguments)
        raise _Reached(environment)

    def refused(*_arguments: Any) -> None:
        raise NotSupported(
            "entrypoint.command: got a configuration of accelerate for TPUs or SageMaker; expected "
            "one for this machine; choose another --config_file"
        )

    names = ("tpu_launcher", "tpu_pod_launcher", "sagemaker_launcher")
    others: dict[str, Any] = dict.fromkeys(names, refused)
    starts = mock.patch.multiple(launch, simple_launcher=simple, **others)
    with mock.patch.object(torchrun, "run", run), starts:
        yield


def main(options: str, command: list[str]) -> NoReturn:
    """Ends with exit code 2 for options that accelerate refuses."""
    del sys.path[0]  # has modules with names that others may have
    try:
        os.environ.update(variables(json.loads(options)))
    except (NotSupported, ValueError, OSError) as error:
        print(f"usage: accelerate launch OPTIONS SCRIPT ARGS\nholdfast: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
