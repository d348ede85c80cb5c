"""Collects the findings of all checks of a project, without those that a comment silences."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from .flow import Site
from .rules import RULES, Finding, Severity
from .source import Module


class Report:
    """Each finding once, at a line and column of a file."""

    def __init__(self) -> None:
        self._found: dict[tuple[Path, int, int, str], Finding] = {}

    def add(
        self,
        rule: str,
        module: Module,
        node: ast.AST,
        what: str,
        *,
        why: str = "",
        fix: str = "",
        severity: Severity | None = None,
    ) -> None:
        """`why`, `fix` and `severity` are the rule's unless given. Nothing happens where a comment
        on a line of the node, or of its beginning, silences the rule."""
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1
        end = getattr(node, "end_lineno", line) or line
        if any(rule in module.ignores.get(number, ()) for number in range(line, end + 1)):
            return
        self.put(module.path, line, column, rule, what, why, fix, severity)

    def at(self, rule: str, site: Site, what: str = "", **texts: Any) -> None:
        """`add` for a call; by default, `what` is the called function."""
        what = what or f"{shown(site.call.func)}()"
        self.add(rule, site.function.module, site.call, what, **texts)

    def put(
        self,
        path: Path,
        line: int,
        column: int,
        rule: str,
        what: str,
        why: str = "",
        fix: str = "",
        severity: Severity | None = None,
    ) -> None:
        """A finding at a place that no syntax tree has."""
        rule_known = RULES[rule]
        finding = Finding(
            path, line, column, rule, severity or rule_known.severity, what,
            why or rule_known.why, fix or rule_known.fix,
        )  # fmt: skip
        self._found.setdefault((path, line, column, rule), finding)

    def sorted(self) -> list[Finding]:
        return sorted(self._found.values())


def shown(node: ast.AST, limit: int = 60) -> str:
    """The code of a node on one line, shortened."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."
