"""What is wrong with a kubeconfig, or with what somebody wants of it, in words.

Owns: that check, before the client library reads the file. Must not: open a connection.

The library merges files as kubectl does; its complaints name its own data structures.
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
    """None: the files are there, and so is the context."""
    field, paths = _files(kubeconfig)
    found = [path for path in paths if os.path.isfile(path)]  # noqa: PTH113 (never raises)
    if not found:
        only = paths[0] if len(paths) == 1 else ""
        what = "a directory" if os.path.isdir(only) else "no such file"  # noqa: PTH112
        got = f"{':'.join(map(str, paths))} ({what})"
        return Problem(field, got, "a kubeconfig", FIX)
    contexts: list[str] = []
    current = ""
    for path in found:
        try:
            document = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
            contexts += [str(one["name"]) for one in document.get("contexts") or ()]
            current = current or str(document.get("current-context") or "")
        except OSError as error:
            return Problem(field, f"{path} ({error.strerror})", "a file that can be read")
        except (ValueError, RecursionError, yaml.YAMLError, AttributeError, TypeError, KeyError):
            return Problem(field, f"{path}, which is no kubeconfig", "a kubeconfig in YAML", FIX)
    known = f"one of {', '.join(dict.fromkeys(contexts))}" if contexts else "a context; it has none"
    if context is not None and context not in contexts:
        return Problem("--context", context, f"{known} in {':'.join(map(str, found))}")
    if context is None and current not in contexts:
        got = f"none, and the current one of the kubeconfig is {current or 'not set'}"
        return Problem("--context", got, known, "see `kubectl config get-contexts`")
    return None


def _files(kubeconfig: Any) -> tuple[str, list[Path]]:
    """What the person set to choose them, and their paths."""
    if kubeconfig is not None:
        return "--kubeconfig", [_path(kubeconfig)]
    if listed := os.environ.get(VARIABLE):
        return f"${VARIABLE}", [_path(p) for p in listed.split(os.pathsep) if p]
    return "kubeconfig", [_path(DEFAULT)]


def _path(written: Path | str) -> Path:
    """Where ~ is nobody's home it stays: there is no such file."""
    return Path(os.path.expanduser(written))  # noqa: PTH111
