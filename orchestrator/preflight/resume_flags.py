"""RES601: the script has a flag with which it resumes, and nothing would set it after a restart.

Holdfast adds `entrypoint.resumeArgs` only when there is a checkpoint, so a first start has none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..protocol.environment import RESUME_FROM
from .report import Report
from .source import Module, Project

_FLAG = re.compile(r"--(auto[-_])?(resume|continue)([-_]from.*|[-_]training|[-_]path)?")
_PARAMETER = re.compile(r"(resume|continue)(_from.*)?")
_OPTIONS = ("add_argument", "option", "Option")
"""Functions of argparse, click and typer."""
_SWITCHES = ("store_true", "BooleanOptionalAction")
NANO_GPT = "init_from"
"""A setting of nanoGPT and its descendants, which read `--init_from=resume`."""


def check(project: Project, report: Report) -> None:
    """Nothing for a script that Holdfast restores or that reads the variable of the checkpoint."""
    if project.imports("holdfast") or project.has_text(RESUME_FROM):
        return
    for module in project.modules.values():
        for node, flag, words in _flags(module):
            what = f"`{flag}`, which `entrypoint.resumeArgs` would set after a restart"
            quoted = ", ".join(f'"{word}"' for word in words)
            report.add("RES601", module, node, what, fix=f"write resumeArgs: [{quoted}]")


def _flags(module: Module) -> Iterator[tuple[ast.AST, str, list[str]]]:
    typed = any(name.startswith("typer") for name in module.aliases.values())
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and _name(node.func) in _OPTIONS:
            yield from _option_flags(node)
        elif isinstance(node, ast.FunctionDef) and typed:
            yield from _parameter_flags(node)
    for node in module.tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == NANO_GPT for target in targets):
            yield node, f"{NANO_GPT} = ...", [f"--{NANO_GPT}=resume"]


def _option_flags(call: ast.Call) -> Iterator[tuple[ast.AST, str, list[str]]]:
    names = [arg.value for arg in call.args if isinstance(arg, ast.Constant)]
    flag = next((n for n in names if isinstance(n, str) and _FLAG.fullmatch(n)), None)
    if flag is None:
        return
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    action, is_flag = keywords.get("action"), keywords.get("is_flag")
    switch = (isinstance(action, ast.Constant) and action.value in _SWITCHES) or (
        action is not None and _name(action) in _SWITCHES
    )
    switch = switch or (isinstance(is_flag, ast.Constant) and bool(is_flag.value))
    yield call, flag, [flag] if switch else [flag, "{checkpoint}"]


def _parameter_flags(function: ast.FunctionDef) -> Iterator[tuple[ast.AST, str, list[str]]]:
    for parameter in (*function.args.args, *function.args.kwonlyargs):
        if _PARAMETER.fullmatch(parameter.arg) and parameter.annotation is not None:
            flag = "--" + parameter.arg.replace("_", "-")
            switch = _name(parameter.annotation) == "bool"
            yield parameter, flag, [flag] if switch else [flag, "{checkpoint}"]


def _name(node: ast.expr) -> str:
    """The last part of a dotted name."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
