"""Checks of the processes that a script starts, and of the address at which its ranks meet."""

from __future__ import annotations

import ast

from .facts import Facts
from .flow import Context, Function, Site
from .report import Report, shown

_SPAWNS = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")
_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
_STARTS = ("subprocess.Popen", "subprocess.run", "subprocess.call", "subprocess.check_call",
           "os.system")  # fmt: skip


def check(facts: Facts, report: Report) -> None:
    # A script that reads the variable likely starts processes only without a launcher.
    knows_launchers = facts.project.has_text("LOCAL_RANK")
    for function in facts.functions:
        for site in function.sites:
            if site.name in _SPAWNS and not knows_launchers:
                what = f"{shown(site.call.func)}()"
                report.at("ENV505", site, what)
            if site.name in _STARTS and _is_background(site):
                report.at("ENV507", site, shown(site.call, 60))
        if not knows_launchers or not facts.project.imports("torch.multiprocessing"):
            _check_address(facts, function, report)


def _is_background(site: Site) -> bool:
    if site.is_true("start_new_session"):
        return True
    command = ast.unparse(site.call.args[0]) if site.call.args else ""
    words = command.replace("'", " ").replace('"', " ").replace(",", " ").split()
    return bool({"nohup", "setsid"} & set(words)) or (
        site.name == "os.system" and words[-1:] == ["&"]
    )


def _check_address(facts: Facts, function: Function, report: Report) -> None:
    """ENV506: assignments that do not first look whether a launcher has set the variable."""
    for binding in function.bindings:
        target = binding.target
        if not isinstance(target, ast.Subscript) or not isinstance(target.slice, ast.Constant):
            continue
        owner = facts.project.resolve(function.module, target.value)
        if owner == "os.environ" and target.slice.value in _ADDRESS:
            asks = "environ" in ast.unparse(binding.value) or _asks(binding.context)
            if not asks:
                report.add("ENV506", function.module, target, str(target.slice.value))


def _asks(context: Context) -> bool:
    return any("environ" in ast.unparse(guard.test) for guard in context.guards)
