"""`holdfast spec preflight`: find what hangs or fails silently in a script and its job, unrun."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.orchestrator.errors import UserError

from ..options import JsonOption
from ..output import plural, print_json, stderr

if TYPE_CHECKING:
    from holdfast.orchestrator.preflight import Finding


def register(app: typer.Typer, panel: str) -> None:
    app.command(rich_help_panel=panel)(preflight)


def preflight(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="FILE",
            help="A TrainingJob in YAML, or a training script in Python.",
            show_default=False,
        ),
    ] = None,
    rules: Annotated[
        bool, typer.Option("--rules", help="List all rules: what each finds, why, and the source.")
    ] = False,
    imported: Annotated[
        Path | None,
        typer.Option(
            "--import",
            metavar="CONFIG",
            help="Print the TrainingJob of an accelerate YAML, a DeepSpeed JSON or a torchtitan "
            "TOML, and the fields that it dropped.",
        ),
    ] = None,
    script: Annotated[
        str | None,
        typer.Option(
            "--script", metavar="FILE", help="With --import: the script that the job runs.",
            show_default="the recipe",
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", min=1, help="With --import: the number of nodes.")
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, max=64, help="With --import: workers on each node."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FILE", help="With --import: write the job to this file."),
    ] = None,
    as_json: JsonOption = False,
) -> None:  # fmt: skip
    """Find hangs and silent errors in a training script and its job, without running them.

    One line for each finding: `FILE:LINE: error ID what: why; fix`. Exit code 1 with errors, 0
    without. A comment `# holdfast: ignore[ID]` silences a line.

    Example: `holdfast spec preflight examples/script.yaml`
    """
    asked = {"FILE": file, "--rules": rules or None, "--import": imported}
    options = [name for name, value in asked.items() if value is not None]
    if len(options) != 1:
        got = " and ".join(options) or "none of them"
        raise UserError.of("preflight", got, "one of FILE, --rules, --import CONFIG")
    only_import = {"--script": script, "--nodes": nodes, "--workers": workers, "--save": save}
    for option, value in only_import.items():
        if value is not None and imported is None:
            raise UserError.of(option, f"{value} without --import", "it with --import")
    if rules:
        _list_rules(as_json)
    elif imported is not None:
        _import(imported, script, nodes, workers, save, as_json)
    else:
        assert file is not None
        _check(file, as_json)


def _list_rules(as_json: bool) -> None:
    from holdfast.orchestrator.preflight import RULES

    if as_json:
        print_json([vars(rule) for rule in RULES.values()])
        return
    for rule in RULES.values():
        typer.echo(f"{rule.id} ({rule.severity}): {rule.finds}")
        typer.echo(f"    why: {rule.why}\n    fix: {rule.fix}\n    source: {rule.source}")


def _check(file: Path, as_json: bool) -> None:
    findings, facts, remark = _findings(file)
    errors = sum(finding.severity == "error" for finding in findings)
    warnings = sum(finding.severity == "warning" for finding in findings)
    if as_json:
        listed = [{**vars(f), "file": _shown(f.file)} for f in findings]
        counts = {"errors": errors, "warnings": warnings}
        print_json({"file": str(file), **facts, "findings": listed, **counts, "remark": remark})
    else:
        for finding in findings:
            typer.echo(finding.text(_shown(finding.file)))
        if remark:
            typer.echo(f"note: {remark}", err=True)
        notes = len(findings) - errors - warnings
        counted = [plural(errors, "error"), plural(warnings, "warning"), plural(notes, "note")]
        summary = ", ".join(counted) if findings else "nothing found"
        typer.echo(f"{plural(facts['num_files'], 'file')} read: {summary}", err=True)
    if errors:
        raise typer.Exit(1)


def _findings(file: Path) -> tuple[list[Finding], dict[str, Any], str]:
    """(findings, facts, what was not read and why) of a script or of a job and its script."""
    from holdfast.orchestrator.preflight import check_job, check_script
    from holdfast.orchestrator.preflight.check import script_of

    if file.suffix == ".py":
        findings, project = check_script(file, [file.absolute().parent, Path.cwd()])
        remark = _skipped_files(project.skipped)
        return findings, {"num_files": len(project.modules) + len(project.unreadable)}, remark
    from holdfast.orchestrator.api.v1alpha1 import load_job
    from holdfast.orchestrator.api.v1alpha1.load import read_job_file

    job = load_job(file)
    findings = check_job(file, read_job_file(file), job)
    script, roots = script_of(job, file.absolute().parent)
    if script is None:
        entry = job.spec.entrypoint.program
        what = f"module {entry.module} is not below the working directory" if entry.module else ""
        what = what or (f"{entry} is not a Python file" if entry.words else "")
        return findings, {"num_files": 1}, what and f"{what}: its code was not read"
    if not script.is_file():
        got = f"{job.spec.entrypoint.program.script} ({script} does not exist)"
        raise UserError.of(job.spec.entrypoint.script_field, got, "a Python file")
    resumes = bool(job.spec.entrypoint.resume_args)
    more, project = check_script(script, roots, resumes=resumes)
    count = 1 + len(project.modules) + len(project.unreadable)
    return findings + more, {"num_files": count}, _skipped_files(project.skipped)


def _skipped_files(skipped: int) -> str:
    return f"{plural(skipped, 'file')} were not read: too many, too large or too deep" * bool(
        skipped
    )


def _shown(path: Path) -> str:
    """The path as a person types it: relative to the current directory if it is below it."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return os.fspath(path)


def _import(
    config: Path,
    script: str | None,
    nodes: int | None,
    workers: int | None,
    save: Path | None,
    as_json: bool,
) -> None:
    from holdfast.orchestrator.preflight.importers import import_config

    new = import_config(config, nodes=nodes, workers=workers, script=script)
    if save is not None:
        try:
            save.write_text(new.text, encoding="utf-8")
        except OSError as error:
            raise UserError.of("--save", f"{save} ({error.strerror})", "a writable file") from None
    if as_json:
        dropped = [{"field": d.field, "value": d.value, "why": d.why} for d in new.dropped]
        print_json({"format": new.format, "job": new.document, "dropped": dropped})
    elif save is None:
        typer.echo(new.text, nl=False)
    console = stderr()
    for drop in () if as_json else new.dropped:
        console.print(f"dropped {drop}", soft_wrap=True)
    if save is not None and not as_json:
        fix = f"holdfast spec plan {save}"
        console.print(f"{save} written: {plural(len(new.dropped), 'field')} dropped; see {fix}")
