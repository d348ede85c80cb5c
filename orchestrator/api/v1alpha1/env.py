"""Environment variables of a job: those that it may not set, and those that nobody may read.

Owns: these lists. Must not: know values; environment.py computes them.
"""

from __future__ import annotations

import re
from typing import Any

CONTRACT_NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
RESERVED_PREFIXES = ("TORCHELASTIC_", "HOLDFAST_")


HIDDEN = "(hidden)"
_SECRET = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|KEY|AUTH|^FSSPEC_", re.IGNORECASE)


def shown(name: str, value: str) -> str:
    """A variable's value as it may be printed: not that of a name that speaks of a secret."""
    return HIDDEN if _SECRET.search(name) else value


def shown_document(document: dict[str, Any]) -> dict[str, Any]:
    """A job's document as it may be printed."""
    spec = document.get("spec", {})
    if not spec.get("env"):
        return document
    env = {name: shown(name, value) for name, value in spec["env"].items()}
    return {**document, "spec": {**spec, "env": env}}


def problem_of_name(name: str) -> str:
    """What is wrong with a variable's name, in the `got; expected; fix` form; empty if nothing."""
    if name in CONTRACT_NAMES or name.startswith(RESERVED_PREFIXES):
        return (
            f"env.{name}: got a variable that Holdfast sets for each worker; expected any other "
            f"name; remove it: ranks and addresses change with every generation"
        )
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return f"env: got the name {name!r}; expected letters, digits and underscores"
    return ""
