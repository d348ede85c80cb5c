"""All checks of `holdfast spec preflight`: of a script, and of a job's own fields."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from holdfast.orchestrator.api.v1alpha1 import TrainingJob
from holdfast.orchestrator.api.v1alpha1.variables import INEFFECTIVE

from . import collectives, fsdp, processes, resume_flags, training
from .facts import Facts
from .report import Report
from .rules import RULES, Finding
from .source import MAX_DEPTH, Project, load

_FRAMES_PER_LEVEL = 25
"""Frames of Python's stack for one level of a syntax tree: ast.unparse needs the most."""


def check_script(
    script: Path, roots: list[Path], *, resumes: bool = False
) -> tuple[list[Finding], Project]:
    """The findings of a script and of what it imports below `roots`, sorted by file and line.
    `resumes`: the job has resumeArgs.

    Raises UserError for a script that cannot be read.
    """
    project = load(script, roots)
    report = Report()
    for file in project.unreadable:
        report.put(file.path, file.line, file.column, "PRE001", file.why)
    for module in project.modules.values():
        for line, ids in module.ignores.items():
            for unknown in sorted(ids - RULES.keys()):
                report.put(module.path, line, 1, "PRE002", f"ignore[{unknown}]")
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _FRAMES_PER_LEVEL * MAX_DEPTH))
    try:
        facts = Facts(project)
        for check in (collectives.check, fsdp.check, training.check, processes.check):
            check(facts, report)
        if not resumes:
            resume_flags.check(project, report)
    finally:
        sys.setrecursionlimit(limit)
    return report.sorted(), project


def script_of(job: TrainingJob, directory: Path) -> tuple[Path | None, list[Path]]:
    """(the file that a worker runs, the directories it imports from); None for a recipe, and for a
    module that is not in the job's working directory."""
    work = directory / Path(job.spec.working_directory).expanduser()
    entry = job.spec.entrypoint.program
    if entry.script is not None:
        script = work / Path(entry.script).expanduser()
        return script, [script.parent, work]
    if entry.module is not None:
        place = work.joinpath(*entry.module.split("."))
        for file in (place.with_name(place.name + ".py"), place / "__main__.py"):
            if file.is_file():
                return file, [work]
    return None, [work]


def check_job(path: Path, text: str, job: TrainingJob) -> list[Finding]:
    """The findings in the fields of a job; `text` is its file's, for the lines."""
    report = Report()
    for name in job.spec.env:
        if effect := INEFFECTIVE.get(name):
            line = line_of(text, name)
            report.put(path, line, 1, "ENV501", f"spec.env.{name}", effect.why,
                       f"write {effect.instead}")  # fmt: skip
    entry = job.spec.entrypoint.program
    if "torch.distributed.launch" in (*entry.args, entry.launcher):
        line = line_of(text, "torch.distributed.launch")
        fix = "name your script in entrypoint.script: Holdfast starts the workers"
        report.put(path, line, 1, "ENV503", "torch.distributed.launch", fix=fix)
    for flag, answer in fsdp.removed_flags(list(entry.args)):
        report.put(path, line_of(text, flag), 1, "FSDP216", flag, fix=answer)
    if job.spec.parallelism.precision.reduce == "bfloat16":
        fix = "remove precision.reduce: the default is float32"
        report.put(path, line_of(text, "reduce"), 1, "FSDP207", "precision.reduce: bfloat16",
                   fix=fix)  # fmt: skip
    return report.sorted()


def line_of(text: str, word: str) -> int:
    """The first line of a YAML text that has the word as a key or a value; 1 if none has."""
    pattern = re.compile(rf"(?<![\w-]){re.escape(word)}(?![\w])")
    for number, line in enumerate(text.splitlines(), 1):
        if pattern.search(line.partition(" #")[0]):
            return number
    return 1
