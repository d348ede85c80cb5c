"""Checks a kubeconfig and the chosen context before the client library loads them.

The errors of the library name its own data structures. This module does not import the library, so
that a wrong option is reported at once.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from ..errors import Problem

VARIABLE = "KUBECONFIG"
DEFAULT = Path("~/.kube/config")
FIX = "name one with --kubeconfig, or set $KUBECONFIG"


def problem(context: str | None, kubeconfig: str | Path | None) -> Problem | None:
    """None when the files and the context exist."""
    field, paths = _files(kubeconfig)
    files = [path for path in paths if os.path.isfile(path)]  # noqa: PTH113 (never raises)
    if not files:
        only = paths[0] if len(paths) == 1 else ""
        what = "a directory" if os.path.isdir(only) else "no such file"  # noqa: PTH112
        got = f"{':'.join(map(str, paths))} ({what})"
        return Problem(field, got, "a kubeconfig", FIX)
    contexts: list[str] = []
    current = ""
    for path in files:
        try:
            document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            contexts += [str(entry["name"]) for entry in document.get("contexts") or ()]
            current = current or str(document.get("current-context") or "")
        except OSError as error:
            return Problem(field, f"{path} ({error.strerror})", "a file that can be read")
        except (ValueError, RecursionError, yaml.YAMLError, AttributeError, TypeError, KeyError):
            return Problem(field, f"{path}, which is not a kubeconfig", "a kubeconfig in YAML", FIX)
    expected = (
        f"one of {', '.join(dict.fromkeys(contexts))}" if contexts else "a context (there is none)"
    )
    if context is not None and context not in contexts:
        return Problem("--context", context, f"{expected} in {':'.join(map(str, files))}")
    if context is None and current not in contexts:
        got = f"none, and current-context of the kubeconfig is {current or 'not set'}"
        return Problem("--context", got, expected, "see `kubectl config get-contexts`")
    return None


def _files(kubeconfig: Any) -> tuple[str, list[Path]]:
    """The option or variable that names the files, and their paths."""
    if kubeconfig is not None:
        return "--kubeconfig", [_path(kubeconfig)]
    if listed := os.environ.get(VARIABLE):
        return f"${VARIABLE}", [_path(p) for p in listed.split(os.pathsep) if p]
    return "kubeconfig", [_path(DEFAULT)]


def _path(written: Path | str) -> Path:
    """The path with ~ expanded, except where there is no such home."""
    return Path(os.path.expanduser(written))  # noqa: PTH111
