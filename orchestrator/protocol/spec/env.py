"""Environment variables that a job may not set: who a worker is, is not for the user to say.

Owns: that list. Must not: know values; environment.py computes them.
"""

from __future__ import annotations

import re

CONTRACT_NAMES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
RESERVED_PREFIXES = ("TORCHELASTIC_", "HOLDFAST_")


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
