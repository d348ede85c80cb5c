"""`kubectl holdfast`: the same commands, for jobs of a cluster. kubectl finds it on the PATH by its
name, kubectl-holdfast, and hands over what follows.

Owns: where kubectl's own options may stand. Must not: have verbs of its own.
"""

from __future__ import annotations

from typing import NoReturn

WITH_VALUE = ("-n", "--namespace", "--context", "--kubeconfig")


def reordered(arguments: list[str]) -> list[str]:
    """kubectl's options may stand before the verb (`kubectl holdfast -n team status`); behind it is
    where our commands take them."""
    leading: list[str] = []
    rest = list(arguments)
    while rest:
        name, equals, _value = rest[0].partition("=")
        if name in WITH_VALUE and (equals or len(rest) > 1):
            count = 1 if equals else 2
        elif rest[0].startswith("-n") and len(rest[0]) > 2:
            count = 1
        else:
            break
        leading += rest[:count]
        del rest[:count]
    at = rest.index("--") if "--" in rest else len(rest)
    return [*rest[:at], *leading, *rest[at:]]


def main(arguments: list[str] | None = None) -> NoReturn:
    """The entry point of the installed script."""
    import sys

    from . import main as command
    from .options import PLUGIN

    given = sys.argv[1:] if arguments is None else arguments
    command.main(reordered(given), program="kubectl holdfast", where=PLUGIN)


if __name__ == "__main__":
    main()
