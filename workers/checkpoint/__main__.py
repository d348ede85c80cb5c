"""`python -m holdfast.workers.checkpoint verify|export|repair`: JSON on standard output. No torch.

`holdfast checkpoint` runs it. Exit code 0; 1: a checkpoint is damaged; 2: an invalid request. A
problem is reported as {"error": "..."}.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from holdfast.orchestrator.errors import HoldfastError

from . import inspect, repair


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        body, code = _RUN[options.verb](options)
    except HoldfastError as error:
        body, code = {"error": str(error)}, error.exit_code
    except OSError as error:
        body, code = {"error": f"{error.filename or options.path}: {error.strerror}"}, 1
    print(json.dumps(body, indent=2))
    return code


def _verify(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    result = inspect.verify(options.path, inspect.find(options.path, options.step))
    body = {"path": options.path, "ok": result.ok, **dataclasses.asdict(result)}
    return body, 0 if result.ok else 1


def _export(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    manifest = inspect.find(options.path, options.step)
    to = Path(options.to)
    files = inspect.export(options.path, manifest, to, optimizer=options.optimizer)
    body = {
        "path": options.path,
        "directory": manifest.directory,
        "step": manifest.step,
        "files": [str(file) for file in files],
        "num_bytes": sum(file.stat().st_size for file in files),
    }
    return body, 0


def _repair(options: argparse.Namespace) -> tuple[dict[str, Any], int]:
    result = repair.repair(options.path, options.step, write=not options.dry_run, job=options.job)
    body = {"path": options.path, **dataclasses.asdict(result)}
    return body, 1 if result.problems else 0


_RUN = {"verify": _verify, "export": _export, "repair": _repair}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m holdfast.workers.checkpoint")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, what in (
        ("verify", "read and check every byte of one checkpoint"),
        ("export", "write plain safetensors files"),
        ("repair", "write a new checkpoint from the intact parts of a damaged one"),
    ):
        command = verbs.add_parser(verb, help=what)
        command.add_argument("path", help="checkpoint path or URL of a job")
        command.add_argument("--step", type=int, help="default: the newest step")
        if verb == "repair":
            command.add_argument("--dry-run", action="store_true", help="change nothing")
            command.add_argument("--job", default="", help="if no manifest has the job's name")
        if verb == "export":
            command.add_argument("--to", required=True, help="directory to write to")
            command.add_argument("--optimizer", action="store_true", help="include optimizer state")
    return parser


if __name__ == "__main__":
    sys.exit(main())
